"""pentameter trains GPT language models from one configuration file.

    import pentameter as pm

    config = pm.load_config("shakespeare-char", {"train.steps": 500})
    end = pm.Trainer(config, run_dir="runs/first").fit()
    loaded = pm.load_model("runs/first")
    print(pm.generate(loaded.model, loaded.tokenizer, "ROMEO:")[0])

Names are imported at their first use, so that `import pentameter` does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pentameter.autotune.best_layout import best_layout as best_layout
    from pentameter.autotune.sweep import sweep as sweep
    from pentameter.checkpoint.folders.load_model import load_model as load_model
    from pentameter.config.files.load import load_config as load_config
    from pentameter.estimating.seconds.estimate import plan as plan
    from pentameter.generation.loop import generate as generate
    from pentameter.generation.loop import stream as stream
    from pentameter.parallel.sources.custom_model import OwnModel as OwnModel
    from pentameter.train.loop import Trainer as Trainer
    from pentameter.verify.verify_model import verify_model as verify_model

_MODULES = {
    "OwnModel": "pentameter.parallel.sources.custom_model",
    "Trainer": "pentameter.train.loop",
    "best_layout": "pentameter.autotune.best_layout",
    "generate": "pentameter.generation.loop",
    "load_config": "pentameter.config.files.load",
    "load_model": "pentameter.checkpoint.folders.load_model",
    "plan": "pentameter.estimating.seconds.estimate",
    "stream": "pentameter.generation.loop",
    "sweep": "pentameter.autotune.sweep",
    "verify_model": "pentameter.verify.verify_model",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'pentameter' has no attribute {name!r}")
    if sys.platform == "win32" and name not in ("load_config", "plan"):
        from pentameter.errors import NO_WINDOWS

        raise ImportError(NO_WINDOWS)
    from pentameter.machine.load.idle_threads import prepare_threads

    prepare_threads()  # what is imported now imports torch
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
