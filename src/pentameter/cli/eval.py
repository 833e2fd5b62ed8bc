"""`pentameter eval`: a model's loss over a whole split, or its accuracy on questions and tasks."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pentameter.cli.options.arguments import (
    check_least,
    device_for_verb,
    load_for_verb,
    parse_arguments,
)
from pentameter.config.choices import Precision
from pentameter.config.files.overrides import parse_overrides
from pentameter.errors import ConfigError, CorruptError, PentameterError, missing_package
from pentameter.machine.load.beside_others import BesideOthers

if TYPE_CHECKING:
    from pentameter.checkpoint.folders.load_model import LoadedModel
    from pentameter.config.schema import Config
    from pentameter.data.shards.dataset import Dataset
    from pentameter.parallel.engine import Engine


@dataclass(frozen=True)
class EvalArguments:
    """Evaluate a model on a whole split, every token once, on multiple-choice questions, or on
    tasks of lm-evaluation-harness.

    Other text than the model's own: --data.path FILE, or any other --data.… key.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder (its best checkpoint, else its last), a checkpoint folder or a Hugging Face
    folder."""
    split: Literal["val", "test", "train"] = "val"
    """The part of the data, as the data section cuts it."""
    stride: Annotated[int | None, tyro.conf.arg(metavar="TOKENS")] = None
    """Windows begin this many tokens apart and overlap, so that each token is predicted from at
    least the model's context_length - stride tokens before it; context_length when absent."""
    multiple_choice: Annotated[Path | None, tyro.conf.arg(metavar="FILE.jsonl")] = None
    """Instead of a split: questions, one a line, in HellaSwag's form (ctx, endings, label) or as
    context, choices, answer."""
    tasks: Annotated[str | None, tyro.conf.arg(metavar="NAME[,NAME]")] = None
    """Instead of a split: tasks of lm-evaluation-harness, such as hellaswag,arc_easy; needs the
    extra lm-eval."""
    tasks_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """With --tasks: a folder of further tasks' YAML files."""
    num_fewshot: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --tasks: examples before each question; as each task says when absent."""
    limit: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """With --tasks: only the first questions of each."""
    batch_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Sequences at once; the result does not depend on it. When absent 32; on a GPU, without
    --tasks, as many as have 32,768 tokens if these are more."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the model runs; auto takes the fastest present."""
    precision: Literal["auto", Precision] = "fp32"
    """Arithmetic of the matrix products."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Evaluate as `arguments` (the command line after the verb) ask, print the metrics, and return
    the exit code 0."""
    parsed, overrides = parse_arguments(EvalArguments, arguments, verb="eval")
    check_least(parsed, batch_size=1, num_fewshot=0, limit=1)
    _check_tasks(parsed, overrides)
    with BesideOthers():
        if parsed.tasks is not None:
            values, line = _tasks(parsed, parsed.tasks)
        elif parsed.multiple_choice is not None:
            values, line = _multiple_choice(parsed, parsed.multiple_choice, overrides)
        else:
            values, line = _split(parsed, overrides)
    from pentameter.record.events import strict

    print(json.dumps(strict(values)) if parsed.json else line)
    return 0


def _split(parsed: EvalArguments, overrides: list[str]) -> tuple[dict[str, Any], str]:
    """Evaluate the split `parsed.split`, with `overrides` for keys in [data]. Return the object for
    `--json`, and the line printed without it."""
    from pentameter.evaluate.split import evaluate, rows_at_once, what_was_read

    loaded, config, engine = _load(parsed, overrides)
    if loaded.checkpoint is None and not overrides:
        raise ConfigError(
            f"{parsed.model} is a Hugging Face folder, which names no text: add --data.path FILE "
            "or --data.corpus NAME"
        )
    context_length = config.model.context_length
    if parsed.stride is not None and not 1 <= parsed.stride <= context_length:
        raise ConfigError(
            f"--stride {parsed.stride} must be in 1 … {context_length}, the model's context_length"
        )
    dataset = _dataset(config, loaded, is_own=not overrides)
    metrics = evaluate(
        engine,
        dataset.split(parsed.split),
        name=parsed.split,
        step=loaded.step,
        batch_size=parsed.batch_size or rows_at_once(engine.device.type, context_length),
        stride=parsed.stride,
    )
    assert metrics is not None  # nothing asks it to stop
    stride = parsed.stride or context_length
    counts, read = what_was_read(config.data, dataset, parsed.split)
    values = {**metrics.values(), "stride": stride, **counts}
    del values["best"]
    line = (
        f"{metrics.split}: loss {metrics.loss:.4f} nats/token · perplexity "
        f"{metrics.perplexity:.4f} · {metrics.bits_per_byte:.4f} bits/byte · "
        f"{metrics.tokens:,} loss tokens · stride {stride} of context {context_length} · "
        f"step {metrics.step}\n{read}"
    )
    return values, line


def _dataset(config: Config, loaded: LoadedModel, *, is_own: bool) -> Dataset:
    """Open the data set that `config` names. If it is the model's own and its text is not found,
    open the tokens that the run has recorded, as `data` and `replay` do: a relative path is
    relative to the folder in which the run was started."""
    from pentameter.data.open_dataset import open_dataset
    from pentameter.record.run_data import open_run_data

    try:
        return open_dataset(config.data, tokenizer=loaded.tokenizer)
    except ConfigError:
        if is_own and loaded.checkpoint is not None:
            with suppress(PentameterError):
                return open_run_data(loaded.checkpoint.path.parents[1], verify=True).dataset
        raise


def _multiple_choice(
    parsed: EvalArguments, file: Path, overrides: list[str]
) -> tuple[dict[str, Any], str]:
    """Evaluate multiple-choice questions in `file`. Return the object for `--json`, and the line
    printed without it."""
    from pentameter.evaluate.multiple_choice import (
        encode_questions,
        evaluate_multiple_choice,
        read_questions,
    )
    from pentameter.evaluate.split import rows_at_once

    if parsed.stride is not None or overrides:
        given = "--stride" if parsed.stride is not None else overrides[0]
        raise ConfigError(f"--multiple-choice reads its own file; leave out {given}")
    questions = read_questions(file)
    loaded, config, engine = _load(parsed, overrides)
    encoded = encode_questions(questions, loaded.tokenizer, config.model.context_length)
    batch_size = parsed.batch_size or rows_at_once(engine.device.type, encoded.longest)
    metrics = evaluate_multiple_choice(
        engine, encoded, name=file.stem, step=loaded.step, batch_size=batch_size
    )
    assert metrics is not None  # nothing asks it to stop
    if math.isnan(metrics.loss):
        raise CorruptError("the model's logits are NaN: its weights are damaged; take another")
    line = (
        f"{file.name}: accuracy {metrics.accuracy:.4f} · per token "
        f"{metrics.accuracy_per_token:.4f} · per byte {metrics.accuracy_per_byte:.4f} · "
        f"loss {metrics.loss:.4f} nats/token of the right choices · "
        f"{metrics.examples:,} examples · step {metrics.step}"
    )
    values = metrics.values()
    for name in ("split", "best"):
        del values[name]
    return {"file": str(file), **values}, line


def _check_tasks(parsed: EvalArguments, overrides: list[str]) -> None:
    """Raise ConfigError if options exclude each other or are out of range, or if --tasks needs
    lm-eval and it is not installed."""
    of_tasks = {
        "--tasks-dir": parsed.tasks_dir,
        "--num-fewshot": parsed.num_fewshot,
        "--limit": parsed.limit,
    }
    if parsed.tasks is None:
        for option, value in of_tasks.items():
            if value is not None:
                raise ConfigError(f"{option} {value} is of --tasks, which is missing")
        return
    others = {"--stride": parsed.stride, "--multiple-choice": parsed.multiple_choice}
    given = [option for option, value in others.items() if value is not None] + overrides
    if given:
        raise ConfigError(f"--tasks brings its own text; leave out {given[0]}")
    if find_spec("lm_eval") is None:
        raise missing_package("--tasks", "lm-eval", "lm-eval")


def _tasks(parsed: EvalArguments, asked: str) -> tuple[dict[str, Any], str]:
    """Run lm-evaluation-harness tasks, names separated by commas. Return the object for `--json`,
    and the lines printed without it."""
    from pentameter.harness.model import HarnessModel
    from pentameter.harness.tasks import find_tasks, run_tasks

    start = time.perf_counter()
    names = [name.strip() for name in asked.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--tasks {asked!r} names no task: --tasks hellaswag,arc_easy")
    tasks = find_tasks(names, parsed.tasks_dir)  # whose mistakes show before the model is loaded
    loaded, _, engine = _load(parsed, [])
    model = HarnessModel(engine, loaded.tokenizer, parsed.batch_size or 32)
    found = run_tasks(model, tasks, n_fewshot=parsed.num_fewshot, limit=parsed.limit)
    values = {
        "step": loaded.step,
        "tasks": {each.name: each.to_json() for each in found},
        "seconds": time.perf_counter() - start,
    }
    return values, "\n".join([*map(str, found), f"step {loaded.step}"])


def _load(parsed: EvalArguments, overrides: list[str]) -> tuple[LoadedModel, Config, Engine]:
    """Load the model. Return it, its configuration with the overrides applied, and an engine to
    evaluate it with in this process. Raises ConfigError for an override outside [data]."""
    from pentameter.config.files.load import load_config
    from pentameter.config.schema import ParallelConfig
    from pentameter.machine.choices import choose_precision
    from pentameter.model.gpt import GPT
    from pentameter.parallel.assemble import engine_of
    from pentameter.parallel.precision import arithmetic, set_matmul_precision
    from pentameter.planning.plan import make_plan

    device = device_for_verb(parsed.device)
    precision, _ = choose_precision(parsed.precision, device, key="precision")
    loaded = load_for_verb(parsed.model, device)
    for path, _ in parse_overrides(overrides):
        if not path.startswith("data."):
            raise ConfigError(
                f"eval takes overrides of the data section only, not {path}: --data.path FILE"
            )
    config = load_config(loaded.config, overrides) if overrides else loaded.config
    # The weights may be saved in another type: a double model trained, a half one imported.
    model = loaded.model.to(arithmetic(precision).weights)
    assert isinstance(model, GPT)  # no other is loaded without its function
    config = config.model_copy(update={"parallel": ParallelConfig()})  # here is one process
    engine = engine_of(model, make_plan(config), device, precision)
    set_matmul_precision(None, precision)
    return loaded, config, engine
