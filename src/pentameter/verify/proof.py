"""`pm.verify_model`: the proof from Python, of the built-in model or of a module of one's own."""

from __future__ import annotations

from collections.abc import Sequence

from pentameter.config.schema import Config, ParallelConfig
from pentameter.errors import ConfigError
from pentameter.parallel.gpt_source import GPTSource
from pentameter.parallel.model_source import ModelSource
from pentameter.parallel.own_model import Build, model_source
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import Case, chosen_cases
from pentameter.verify.compare import Outcome, verify_layouts
from pentameter.verify.sent_model import sent
from pentameter.verify.shrink import case_config, shrink
from pentameter.verify.workers import Workers


def verify_model(
    config: Config,
    *,
    model: Build | ModelSource | None = None,
    layouts: str = "all",
    steps: int = 3,
) -> list[Outcome]:
    """Compare `layouts` with one process in float64: every loss, gradient and weight of some steps.

    `model` and `config` are those of `Trainer`, `layouts` those of the command line. The built-in
    model is made small. Of a module of one's own nothing is known that could be changed, so
    `[model]` stays, without its dropout: give a small one. `all` are then the layouts that it can
    have. A script that calls this does so below `if __name__ == "__main__":`, as processes that it
    starts read it too.

    Raises ConfigError for layouts that cannot be and for a model that other processes cannot
    import, TrainingFailedError where the one process fails.
    """
    source = model_source(model)
    is_gpt = isinstance(source, GPTSource)
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
        sent_model = None if is_gpt else sent(source)
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
