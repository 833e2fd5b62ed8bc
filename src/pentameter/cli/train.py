"""`pentameter train`: train what a configuration asks for, or continue it."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pentameter.cli.arguments import parse_arguments

if TYPE_CHECKING:
    from pentameter.config.schema import Config
    from pentameter.train.trainer import Trainer

HELP = "Train a model, or continue a run."


@dataclass(frozen=True)
class TrainArguments:
    """Train a model, or continue a run: the same command line after a crash continues.

    Every key of the configuration can be overridden: --train.steps 500, --model.n-layers=4.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET-or-FILE")]
    """A preset (quickstart, shakespeare-char, …) or a TOML file."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The run folder; runs/NAME when absent."""
    resume: str = "auto"
    """auto: continue a run of the same configuration, else start; never; must; or a checkpoint."""
    init_from: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Begin with the weights of a run, a checkpoint or a Hugging Face GPT-2 folder (fine-tune)."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the Plan and train nothing."""
    print_config: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the configuration as TOML and train nothing."""


def run(arguments: list[str]) -> int:
    """Train; 0 when the run is complete."""
    parsed, overrides = parse_arguments(TrainArguments, arguments, verb="train")
    from pentameter.config.load import load_config, to_toml

    config = load_config(parsed.source, overrides)
    if parsed.init_from is not None:
        config = _with_tokenizer_beside(config, parsed.init_from)
    if parsed.print_config:
        print(to_toml(config), end="")
        return 0
    if parsed.dry_run:
        print(json.dumps(_plan(config), indent=2))
        return 0
    from pentameter.train.trainer import Trainer

    trainer = Trainer(
        config, run_dir=parsed.run_dir, resume=parsed.resume, init_from=parsed.init_from
    )
    trainer.fit()
    _say_goodbye(trainer)
    return 0


def _with_tokenizer_beside(config: Config, model: Path) -> Config:
    """`config` with MODEL's own tokenizer file where the one it names is not there any more: an
    imported folder names its own, and may have been moved."""
    named, beside = Path(config.data.tokenizer), model / "tokenizer.json"
    if named.name != beside.name or named.exists() or not beside.exists():
        return config
    print(f"pentameter: {named} is not there; taking {beside}", file=sys.stderr)
    data = config.data.model_copy(update={"tokenizer": str(beside)})
    return config.model_copy(update={"data": data})


def _plan(config: Config) -> dict[str, object]:
    """The Plan as JSON; the data is read only for a vocabulary or an epoch that is not stated."""
    from pentameter.plan.plan import make_plan, needs_data

    if not needs_data(config):
        return make_plan(config).to_json()
    from pentameter.data import open_dataset, training_batches

    dataset = open_dataset(config.data)
    batches = training_batches(config, dataset.split("train"))
    return make_plan(config, dataset.vocab_size, batches.rows_per_epoch).to_json()


def _say_goodbye(trainer: Trainer) -> None:
    """Write the report and name the commands that make sense next, ready to paste."""
    from pentameter.report.report import write_report

    report = write_report(trainer.run_dir)
    called = Path(sys.argv[0])
    command = str(called) if called.name == "pentameter" else f"{sys.executable} -m pentameter"
    run, prompt = shlex.quote(str(trainer.run_dir)), trainer.config.train.sample_prompt
    asked = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    print(
        f"\nreport: {report}\n\nnext:\n"
        f"  {command} sample {run}{asked} --max-new-tokens 500\n"
        f"  {command} eval {run}\n"
        f"  {command} train quickstart --name mine --data.path FILE-or-FOLDER\n"
        f"  {command} doctor"
    )
