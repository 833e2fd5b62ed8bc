"""A run's training data, opened from its folder without a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.data.batches.rows_read import source_names
from pentameter.data.batches.step import TrainingBatches, training_batches
from pentameter.data.open_dataset import joined_sources
from pentameter.data.shards.dataset import Dataset
from pentameter.data.shards.format import find_header
from pentameter.data.shards.opening import open_shards
from pentameter.data.shards.token_stream import Source, is_token_stream, open_token_stream
from pentameter.disk.atomic import read_json
from pentameter.disk.cache import cache_folder
from pentameter.errors import ConfigError, CorruptError
from pentameter.record.reading import as_table, check_run_folder


@dataclass(frozen=True)
class RunData:
    """A run's configuration, data set and batches."""

    config: Config
    dataset: Dataset
    batches: TrainingBatches
    first_step: int
    """Number of the first step made in this folder, 1 unless the run branched off from another's
    checkpoint."""

    @property
    def source_names(self) -> list[str]:
        """Corpus or path of each data source, as configured."""
        return source_names(self.config.data)

    def batch_index(self, step: int) -> int:
        """Return the index for a step's batch: steps count from 1, as in metrics.jsonl, batches
        from 0.

        Raises ConfigError for a step outside the run, or one made by the run that it branched off
        from.
        """
        n_steps = self.config.train.steps
        assert n_steps is not None  # a run's config.toml has it
        if not 1 <= step <= n_steps:
            raise ConfigError(
                f"--step {step} is no step of this run, which makes the steps 1 … {n_steps}, as "
                "metrics.jsonl numbers them"
            )
        if step < self.first_step:
            raise ConfigError(
                f"--step {step} was made by the run from which this one branched off after step "
                f"{self.first_step - 1}; look at it in that run's folder"
            )
        return step - 1


def open_run_data(folder: Path, *, verify: bool = False) -> RunData:
    """Open a run's data from the token shards that it trains on; nothing is tokenized. With
    `verify`, every token is hashed; otherwise the training process is relied on to do so. Raises
    ConfigError if the folder holds no run, or one with batches from the user's code; CorruptError
    if the shards are missing or changed."""
    check_run_folder(folder)
    config, plan_file = load_config(folder / "config.toml"), folder / "plan.json"
    record = read_json(plan_file)
    data = as_table(record.get("data"))
    if "batches" not in data:
        raise ConfigError(
            f"{plan_file} does not say where the run's tokens lie: an earlier version wrote it. "
            "The command that trained the run adds it, also when the run is complete"
        )
    if data["batches"] is not None:
        raise ConfigError(
            f"the run in {folder} reads batches from a function of its user ({data['batches']}), "
            "and `data` knows those of the configuration alone; call the function with the step "
            "- 1 and the rows"
        )
    paths = data.get("shards")
    if not isinstance(paths, list) or len(paths) != len(config.data.sources or (config.data,)):
        raise CorruptError(f"{plan_file} is damaged: data.shards={paths!r:.80}")
    opened = [_opened(Path(str(path)), folder, verify) for path in paths]
    dataset = joined_sources(config.data, opened) if config.data.sources else opened[0]
    if dataset.hash != data.get("hash"):
        raise CorruptError(
            f"the tokens in {', '.join(map(str, paths))} are not those of the run in {folder} "
            f"(sha256 {dataset.hash[:16]}…, expected {str(data.get('hash'))[:16]}…); restore them"
        )
    own_keys = data.get("own_keys", False) is True  # an earlier version says nothing
    batches = training_batches(config, dataset.split("train"), own_keys=own_keys)
    branched_after = as_table(record.get("parent")).get("step")
    first_step = 1 + branched_after if isinstance(branched_after, int) else 1
    return RunData(config, dataset, batches, first_step)


def _opened(recorded: Path, run_folder: Path, verify: bool) -> Dataset:
    """Open token shards at their recorded path, else by the same name in this machine's cache.
    Raises CorruptError if they are in neither."""
    for folder in (recorded, cache_folder() / "prepared" / recorded.name):
        if is_token_stream(folder):
            return open_token_stream(folder, Source(folder), verify=verify)
        if (header := find_header(folder)) is not None:
            return open_shards(header, verify=verify)
    raise CorruptError(
        f"the tokens of the run in {run_folder} are gone: {recorded} is not there. The command "
        "that trained the run prepares them again from the same text; shards that were prepared "
        "by hand have to be put back"
    )
