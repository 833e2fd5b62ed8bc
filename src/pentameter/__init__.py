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
    from pentameter import generate as generate
    from pentameter import plan as plan
    from pentameter.checkpoint.model import load_model as load_model
    from pentameter.config.load import load_config as load_config
    from pentameter.train.trainer import Trainer as Trainer

_HOMES = {
    "Trainer": "pentameter.train.trainer",
    "load_config": "pentameter.config.load",
    "load_model": "pentameter.checkpoint.model",
}
_CALLABLE_PACKAGES = ("generate", "plan")  # packages that are also functions, see `callable_module`

__all__ = ["Trainer", "generate", "load_config", "load_model", "plan"]


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"pentameter.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'pentameter' has no attribute {name!r}")
    from pentameter.parallel.threads import bound_spinning

    bound_spinning()  # what is imported now imports torch
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES, *_CALLABLE_PACKAGES]
