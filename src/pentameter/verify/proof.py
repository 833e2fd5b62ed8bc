"""`pm.verify_model`: the proof from Python, of the built-in model or of a module of one's own.

Functions travel to the processes that verify by name (`pickle`), so a process has to find their
module as the user's process did: on its search path, or as the script that was started, which is
then run under another name, as `multiprocessing` does it.
"""

from __future__ import annotations

import functools
import pickle
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError
from pentameter.parallel.gpt_source import GPTSource
from pentameter.parallel.model_source import ModelSource
from pentameter.parallel.own_model import Build, model_source
from pentameter.planning.plan import make_plan
from pentameter.train.supplied import BatchFunction
from pentameter.verify.cases import Case, chosen_cases
from pentameter.verify.compare import Outcome, verify_layouts
from pentameter.verify.shrink import case_config, shrink
from pentameter.verify.workers import Workers


def verify_model(
    config: Config,
    *,
    model: Build | ModelSource | None = None,
    batches: BatchFunction | None = None,
    layouts: str = "all",
    steps: int = 3,
) -> list[Outcome]:
    """Compare `layouts` with one process in float64: every loss, gradient and weight of some steps.

    `model`, `batches` and `config` are those of `Trainer`, `layouts` those of the command line;
    without `batches` the steps are on random tokens. The built-in
    model is made small. Of a module of one's own nothing is known that could be changed, so
    `[model]` stays, without its dropout: give a small one. `all` are then the layouts that it can
    have. A script that calls this does so below `if __name__ == "__main__":`, as processes that it
    starts read it too.

    Raises ConfigError for layouts that cannot be and for a model that other processes cannot
    import, TrainingFailedError where the one process fails.
    """
    source = model_source(model)
    is_gpt = isinstance(source, GPTSource)
    if is_gpt and batches is not None:
        raise ConfigError(
            "batches= goes with a custom model; the built-in one is made small, with a vocabulary "
            "of its own, and verified on random tokens"
        )
    if not is_gpt:
        config = config.model_copy(update={"parallel": ParallelConfig()})
    cases = chosen_cases(config, layouts)
    small = shrink(config, cases, keeps_model=not is_gpt)
    if not is_gpt:
        make_plan(small, outline_of=source.outline)  # what is wrong whatever the layout
    possible, problem = _possible(small, cases, source)
    if problem is not None and (is_gpt or layouts != "all"):
        raise problem
    with Workers() as workers:
        sent_model = None if is_gpt else sent(source, batches)
        return list(
            verify_layouts(
                small,
                possible,
                workers,
                n_steps=steps,
                model=sent_model,
                outline_of=source.outline,
            )
        )


def _possible(
    small: Config, cases: Sequence[Case], source: ModelSource
) -> tuple[list[Case], ConfigError | None]:
    """The cases that a run could have, and why it could not have the first of the others."""
    possible, problem = [], None
    for case in cases:
        try:
            make_plan(case_config(small, case), outline_of=source.outline)
            if case.tied_head is not None and not isinstance(source, GPTSource):
                raise ConfigError(f"layout {str(case)!r}: tied_head is of the built-in model")
            possible.append(case)
        except ConfigError as error:
            problem = problem or ConfigError(f"layout {str(case)!r}: {error}")
    return possible, problem


# -- a model on its way to other processes ------------------------------------------------------

SCRIPT_NAME = "__mp_main__"
"""What a script is called where it is not the one that was started: its `if __name__ ==
"__main__":` does not run."""


@dataclass(frozen=True)
class SentModel:
    """A model source, and a function of batches, in a form that another process of this machine can
    take up."""

    pickled: bytes
    script: str | None
    """The file that was started, where the source's functions may be defined."""
    search_path: tuple[str, ...]

    def received(self) -> tuple[ModelSource, BatchFunction | None]:
        """The source and the batches, in the process that they were sent to."""
        return _received(self)


def sent(source: ModelSource, batches: BatchFunction | None = None) -> SentModel:
    """The form of a source that can be sent. Raises ConfigError where its functions have no name by
    which another process could find them."""
    try:
        pickled = pickle.dumps((source, batches))
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
def _received(model: SentModel) -> tuple[ModelSource, BatchFunction | None]:
    sys.path += [entry for entry in model.search_path if entry not in sys.path]
    found: tuple[ModelSource, BatchFunction | None]
    if model.script is None:
        found = pickle.loads(model.pickled)
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
