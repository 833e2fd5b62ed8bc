"""pentameter trains GPT language models from one configuration file.

    import pentameter as pm

    config = pm.load_config("shakespeare-char", {"train.steps": 500})
    end = pm.Trainer(config, run_dir="runs/first").fit()
    loaded = pm.load_model("runs/first")
    print(pm.generate(loaded.model, loaded.tokenizer, "ROMEO:")[0])

Names are imported when they are first used, so that `import pentameter` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pentameter.checkpoint.load_model import load_model as load_model
    from pentameter.config.load import load_config as load_config
    from pentameter.generation.loop import generate as generate
    from pentameter.generation.loop import stream as stream
    from pentameter.parallel.own_model import OwnModel as OwnModel
    from pentameter.planning.estimate import plan as plan
    from pentameter.train.loop import Trainer as Trainer
    from pentameter.verify.proof import verify_model as verify_model

_HOMES = {
    "OwnModel": ("pentameter.parallel.own_model", "OwnModel"),
    "Trainer": ("pentameter.train.loop", "Trainer"),
    "generate": ("pentameter.generation.loop", "generate"),
    "load_config": ("pentameter.config.load", "load_config"),
    "load_model": ("pentameter.checkpoint.load_model", "load_model"),
    "stream": ("pentameter.generation.loop", "stream"),
    "verify_model": ("pentameter.verify.proof", "verify_model"),
    "plan": ("pentameter.planning.estimate", "plan"),
}

__all__ = [
    "OwnModel",
    "Trainer",
    "generate",
    "load_config",
    "load_model",
    "plan",
    "stream",
    "verify_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pentameter' has no attribute {name!r}")
    from pentameter.machine.cores import choose_wait_policy

    choose_wait_policy()  # what is imported now imports torch
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
