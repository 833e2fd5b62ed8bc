"""`pm.verify_model`: the Python call that verifies layouts, for the built-in model or a custom
one."""

from __future__ import annotations

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.parallel.sources.custom_model import Build, model_source
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.train.user_components import BatchFunction
from pentameter.verify.compare import Outcome, verify_layouts
from pentameter.verify.sent_model import sent
from pentameter.verify.shrink import shrunk_cases
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
        model: a custom model: a function from the configuration to a module, or an `OwnModel`,
            which also says how to shard it; None for the built-in GPT.
        batches: a custom model's batch function, `batches(step, rows)` → inputs and targets for
            these rows in the global batch; None for random tokens.
        layouts: text as for `--layouts`: `data=2;tensor=2`, or `all`, which leaves out layouts that
            a custom model cannot have.
        steps: number of optimizer steps.

    Worker processes import the script that calls this function, so call it below `if __name__ ==
    "__main__":`. Raises ConfigError for an invalid layout and for a model that other processes
    cannot import, and TrainingFailedError if the one process fails.
    """
    source = model_source(model)
    is_gpt = isinstance(source, GPTSource)
    if is_gpt and batches is not None:
        raise ConfigError(
            "batches= goes with a custom model; the built-in one is made small, with a vocabulary "
            "of its own, and verified on random tokens"
        )
    small, cases = shrunk_cases(config, layouts, None if is_gpt else source)
    custom = None if is_gpt else sent(source, batches)
    with Workers() as workers:
        found = verify_layouts(
            small, cases, workers, n_steps=steps, model=custom, outline_of=source.outline
        )
        return list(found)
