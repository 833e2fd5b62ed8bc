"""Somebody's own model on its way to the processes that verify it.

Functions travel by name (`pickle`), so a process has to find their module as the user's process
did: on its search path, or as the script that was started, which is then run under another name, as
`multiprocessing` does it.
"""

from __future__ import annotations

import functools
import pickle
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pentameter.errors import ConfigError
from pentameter.parallel.model_source import ModelSource

SCRIPT_NAME = "__mp_main__"
"""What a script is called where it is not the one that was started: its `if __name__ ==
"__main__":` does not run."""


@dataclass(frozen=True)
class SentModel:
    """A model source in a form that another process of this machine can take up."""

    pickled: bytes
    script: str | None
    """The file that was started, where the source's functions may be defined."""
    search_path: tuple[str, ...]

    def received(self) -> ModelSource:
        """The source, in the process that it was sent to."""
        return _received(self)


def sent(source: ModelSource) -> SentModel:
    """The form of a source that can be sent. Raises ConfigError where its functions have no name by
    which another process could find them."""
    try:
        pickled = pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"verify starts processes that import the model by name, and cannot: {error}; define "
            "its functions at the top of a file, not inside another function and not as a lambda"
        ) from error
    file = getattr(sys.modules["__main__"], "__file__", None)
    script = None if file is None else str(Path(file).resolve())
    if script is None and b"__main__" in pickled:
        raise ConfigError(
            "verify starts processes that import the model by name, and it is defined in an "
            "interactive session; define it in a file and import it from there"
        )
    path = tuple(str(Path(entry).resolve()) for entry in sys.path)
    return SentModel(pickled, script if b"__main__" in pickled else None, path)


@functools.cache
def _received(model: SentModel) -> ModelSource:
    sys.path += [entry for entry in model.search_path if entry not in sys.path]
    if model.script is None:
        found: ModelSource = pickle.loads(model.pickled)
        return found
    script = ModuleType(SCRIPT_NAME)
    script.__dict__.update(runpy.run_path(model.script, run_name=SCRIPT_NAME))
    own = sys.modules["__main__"]
    sys.modules["__main__"] = sys.modules[SCRIPT_NAME] = script
    try:
        found = pickle.loads(model.pickled)
    finally:
        sys.modules["__main__"] = own
    return found
