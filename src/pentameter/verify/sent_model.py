"""A custom model in a form that can be sent to the processes that verify it.

Its functions are pickled by name, so the receiving process must find their module just as the
user's process did: on its search path, or as the script that was started. That script runs under
another name in the receiver, as with `multiprocessing`.
"""

from __future__ import annotations

import functools
import pickle
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from pentameter.errors import ConfigError

if TYPE_CHECKING:  # these import torch
    from pentameter.parallel.sources.model_source import ModelSource
    from pentameter.train.user_components import BatchFunction

SCRIPT_NAME = "__mp_main__"
"""A script's `__name__` in processes that did not start it, so that its `if __name__ ==
"__main__":` does not run."""


@dataclass(frozen=True)
class SentModel:
    """A pickled custom model (its model source: the functions that build and shard it) and batch
    function, with whatever another process on this machine needs to unpickle them."""

    pickled: bytes
    script: str | None
    """Path of the script that was started, if the functions are defined in it; else None."""
    module: str | None
    """The script's name as a module, if it was started as one (`python -m`), so that its relative
    imports find its package; else None."""
    search_path: tuple[str, ...]

    def received(self) -> tuple[ModelSource, BatchFunction | None]:
        """Unpickle the model source and the batch function (None if there is none) in the receiving
        process, importing their modules or running the script."""
        return _received(self)


def sent(source: ModelSource, batches: BatchFunction | None = None) -> SentModel:
    """Return a custom model's source and batch function (None for random tokens) as a SentModel.
    Raises ConfigError for functions that another process cannot import: lambdas, nested functions,
    those defined in an interactive session."""
    try:
        pickled = pickle.dumps((source, batches))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"verify starts processes that import the model by name, and cannot: {error}; define "
            "its functions at the top of a file, not inside another function and not as a lambda"
        ) from error
    path = tuple(str(Path(entry).resolve()) for entry in sys.path)
    if b"__main__" not in pickled:
        return SentModel(pickled, None, None, path)
    main = sys.modules["__main__"]
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None:
        raise ConfigError(
            "verify starts processes that import the model by name, and it is defined in an "
            "interactive session; define it in a file and import it from there"
        )
    module = None if spec is None or spec.name == "__main__" else spec.name  # that is a folder's
    return SentModel(pickled, str(Path(file).resolve()), module, path)


@functools.cache
def _received(model: SentModel) -> tuple[ModelSource, BatchFunction | None]:
    sys.path += [entry for entry in model.search_path if entry not in sys.path]
    found: tuple[ModelSource, BatchFunction | None]
    if model.script is None:
        found = pickle.loads(model.pickled)
        return found
    script = ModuleType(SCRIPT_NAME)
    if model.module is None:
        script.__dict__.update(runpy.run_path(model.script, run_name=SCRIPT_NAME))
    else:
        script.__dict__.update(runpy.run_module(model.module, run_name=SCRIPT_NAME))
    own = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules[SCRIPT_NAME] = script
    try:
        found = pickle.loads(model.pickled)
    finally:
        sys.modules["__main__"] = own
    return found
