"""`pm.verify_model`: the Python call that verifies layouts, for the built-in model or a custom
one."""

from __future__ import annotations

from collections.abc import Sequence

from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError
from pentameter.parallel.sources.custom_model import Build, model_source
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.planning.plan import make_plan
from pentameter.train.user_components import BatchFunction
from pentameter.verify.cases import Case, chosen_cases
from pentameter.verify.compare import Outcome, verify_layouts
from pentameter.verify.sent_model import sent
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
    """Compare `layouts` with one process in float64, and return an Outcome for each: every loss,
    gradient and weight in some steps.

    Args:
        config: the run's configuration. The built-in model is shrunk. Nothing is known about a
            custom model that could be shrunk, so `[model]` stays, without its dropout: give a small
            one.
        model: a custom model as for `Trainer`; None for the built-in GPT.
        batches: a custom model's batch function as for `Trainer`; None for random tokens.
        layouts: text as for `--layouts`: `data=2;tensor=2`, or `all`, which leaves out layouts that
            a custom model cannot have.
        steps: number of optimizer steps.

    Worker processes import the script that calls this function, so call it below
    `if __name__ == "__main__":`. Raises ConfigError for an invalid layout and for a model that
    other processes cannot import, and TrainingFailedError if the one process fails.
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
        make_plan(small, outline_of=source.outline)  # errors that no layout avoids
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
    """Return the cases that a run with this model could have, and the error for the first one that
    it could not; None if all are possible."""
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
