"""`pentameter train`: train what a configuration asks for, or continue it."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pentameter.cli.arguments import parse_arguments
from pentameter.config.overrides import parse_overrides
from pentameter.errors import ConfigError, StorageError, terminal_message
from pentameter.machine.cores import check_memory, check_processes
from pentameter.processes.join import joined_world
from pentameter.processes.local_launch import python_command, run_local
from pentameter.processes.place import Place, find_place, processes_together
from pentameter.processes.worker import watch_launcher

if TYPE_CHECKING:
    from pentameter.config.schema import Config
    from pentameter.train.loop import Trainer
    from pentameter.train.profile import Profile


BEST = "best"
"""The layout that the search chooses."""

PRESET_FOR_TEXT = "quickstart"
"""The preset that `train novel.txt` trains."""

# A TOML file by another name is no text.
_OF_A_CONFIGURATION = re.compile(rb"^(extends *=|\[(model|data|optimizer|train)\])", re.MULTILINE)
_LOOKED_AT_BYTES = 1 << 16


@dataclass(frozen=True)
class TrainArguments:
    """Train a model, or continue a run: the same command line after a crash continues.

    Every key of the configuration can be overridden: --train.steps 500, --model.n-layers=4.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET-or-FILE")]
    """A preset (quickstart, shakespeare-char, …) or a TOML file. A text file, or a folder of them:
    the quickstart on that text, --data.path TEXT."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The run folder; runs/NAME when absent."""
    resume: str = "auto"
    """auto: continue a run of the same configuration, else start; never; must; extend: continue to
    a larger train.steps, with the schedule begun anew at the last checkpoint; or a checkpoint."""
    init_from: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Begin with the weights of a run, a checkpoint or a Hugging Face folder (fine-tune)."""
    nproc: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Train as N processes of this machine, which divide the work as [parallel] says."""
    oversubscribe: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let --nproc start more processes than the cores of this machine can serve."""
    layout: Annotated[str | None, tyro.conf.arg(metavar="best|LAYOUT")] = None
    """Instead of [parallel]: best, which is the fastest that `plan --search` finds for these
    processes, with its micro-batch; or a layout, data=2,tensor=2."""
    force: tyro.conf.FlagCreatePairsOff[bool] = False
    """Try what the Plan says does not fit the memory."""
    profile: Annotated[str | None, tyro.conf.arg(metavar="FIRST:LAST")] = None
    """Record what these steps spend their time and memory on, into the run folder's profile/."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the Plan and train nothing: in words on a terminal, else as JSON."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """With --dry-run: one JSON object on a terminal, too."""
    print_config: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the configuration as TOML and train nothing."""


def run(arguments: list[str]) -> int:
    """Train; 0 when the run is complete."""
    watch_launcher()
    parsed, overrides = parse_arguments(TrainArguments, arguments, verb="train")
    from pentameter.config.load import load_config
    from pentameter.config.write import to_toml

    place = find_place()
    is_main = place is None or place.rank == 0
    n_processes = processes_together(parsed.nproc, place)
    overrides = [*overrides, *layout_overrides(parsed.layout)]
    config = load_config(*configuration_of(parsed.source, overrides, parsed.init_from))
    if is_main and parsed.init_from is None:
        _warn_of_random_weights(Path(parsed.source))
    if parsed.layout is not None:
        if parsed.layout == BEST:
            config = _with_best_layout(config, n_processes or 1, place, say=is_main)
        if place is None:  # the processes that are started get it as it was chosen
            arguments = [*_without_layout(arguments), *_layout_options(config)]
    if parsed.init_from is not None:
        config = _with_tokenizer_beside(config, parsed.init_from, say=is_main)
    hooks = []
    if parsed.profile is not None:
        from pentameter.train.profile import parse_window

        hooks.append(parse_window(parsed.profile))
        if config.train.steps is not None:
            hooks[0].check(config.train.steps)
    if parsed.print_config or parsed.dry_run:
        if is_main and parsed.print_config:
            print(to_toml(config), end="")
        elif is_main:
            _print_plan(config, parsed, n_processes, place)
        return 0
    # Before data is read, processes meet, or N of them say the same.
    if place is None:
        check_processes(n_processes or 1, oversubscribe=parsed.oversubscribe)
    _check_layout(config, n_processes or 1, place, check_fit=not parsed.force)
    if place is None and n_processes is not None and n_processes > 1:
        run_local(python_command("train", *arguments), n_processes)
        return 0
    _train(config, parsed, place, hooks)
    return 0


def configuration_of(
    source: str, overrides: list[str], init_from: Path | None = None
) -> tuple[str, list[str]]:
    """The configuration's source and overrides: those given, or, where `source` is a text, the
    configuration beside the model `init_from`, else the quickstart's, with the text as data.path.

    Raises ConfigError where the overrides name a text too.
    """
    from pentameter.config.load import preset_names, text_name

    if source in preset_names() or not is_text(Path(source)):
        return source, overrides
    for key, text in parse_overrides(overrides):
        if key in ("data.path", "data.corpus"):
            raise ConfigError(
                f"{source} is the text to train on, and --{key} {text} names another; keep one"
            )
    named = [f"--data.path={source}", *overrides]
    if init_from is not None and (init_from / "config.toml").is_file():
        # The quickstart on that text has the text's own name already.
        return str(init_from / "config.toml"), [f"--name={text_name(source)}-tuned", *named]
    return PRESET_FOR_TEXT, named


def _warn_of_random_weights(source: Path) -> None:
    """Warn where the configuration beside a model is trained without that model's weights."""
    folder = source.parent
    if source.name == "config.toml" and (folder / "manifest.json").is_file():
        print(
            f"pentameter: {source} lies beside a model, and a new run begins with random weights; "
            f"--init-from {folder} begins with that model's",
            file=sys.stderr,
        )


def is_text(path: Path) -> bool:
    """True if `path` can be trained on: a file that is no configuration, or a folder that holds
    none (the folders of runs and models do)."""
    try:
        is_folder = path.is_dir()
        if is_folder and any(path.glob("*.safetensors")):
            return False  # a model
        file = path / "config.toml" if is_folder else path
        if not file.is_file():  # to open a pipe would wait
            return is_folder
        if file.suffix.lower() == ".toml" and not is_folder:
            return False
        with file.open("rb") as opened:
            return _OF_A_CONFIGURATION.search(opened.read(_LOOKED_AT_BYTES)) is None
    except (OSError, ValueError):  # unreadable, or a NUL in the name: the loader says so
        return False


def _train(
    config: Config, parsed: TrainArguments, place: Place | None, hooks: list[Profile]
) -> None:
    """Train in this process, together with those it meets at `place`."""
    from pentameter.machine.choices import choose_device
    from pentameter.train.loop import Trainer

    device = choose_device(config.train.device)
    with joined_world(
        device.type,
        place,
        always_group=config.parallel.zero > 0,
        timeout_seconds=config.parallel.timeout_seconds,
    ) as world:
        trainer = Trainer(
            config,
            run_dir=parsed.run_dir,
            resume=parsed.resume,
            init_from=parsed.init_from,
            hooks=hooks,
            world=world,
            force=parsed.force,
        )
        trainer.fit()
    if world.is_main:
        _say_goodbye(trainer)


def _check_layout(
    config: Config, n_processes: int, place: Place | None, *, check_fit: bool
) -> None:
    """Raise ConfigError where the layout does not fit the processes: those started at `place`, or
    `n_processes` on this machine, whose memory they must fit with `check_fit`."""
    from pentameter.planning.layout import make_layout
    from pentameter.planning.layout_checks import check_layout
    from pentameter.planning.plan import make_plan, needs_data

    local_size = n_processes if place is None else place.local_size
    check_layout(make_layout(config.parallel, n_processes), config.model, local_size)
    if needs_data(config):
        return
    plan = make_plan(config, world_size=n_processes, local_size=local_size)
    on_gpu = config.train.device in ("auto", "cuda") and Path("/dev/nvidia0").exists()
    if check_fit and place is None and n_processes > 1 and not on_gpu:
        check_memory(n_processes, plan.weights_bytes + plan.gradients_bytes + plan.optimizer_bytes)


def layout_overrides(layout: str | None) -> list[str]:
    """The overrides of `[parallel]` that a layout's text stands for, so that the configuration is
    checked as it will run; none without a text. For `best` one that every setting is possible
    with: the search then chooses the rest."""
    from pentameter.planning.layout import NOT_OF_A_LAYOUT, parse_parallel

    if layout is None:
        return []
    if layout == BEST:
        return ["--parallel.zero=1"]
    chosen = parse_parallel(layout, also=[BEST]).model_dump(exclude=set(NOT_OF_A_LAYOUT))
    return _options({f"parallel.{name}": value for name, value in chosen.items()})


def _with_best_layout(
    config: Config, n_processes: int, place: Place | None, *, say: bool
) -> Config:
    """`config` in the fastest layout that fits these processes."""
    from pentameter.machine.this_cluster import this_cluster
    from pentameter.planning.search import search, why_nothing_fits

    local_size = n_processes if place is None else place.local_size
    cluster, _ = this_cluster(n_processes, local_size)
    found = search(config, cluster, *vocabulary_and_epoch(config)[:2], n_best=2)
    if not found.estimates:
        raise ConfigError(f"--layout best: {why_nothing_fits(config, cluster, found)}")
    best = found.estimates[0]
    if say:
        print(
            f"pentameter: the best of {found.n_candidates:,} layouts is {best.plan.layout}, "
            f"{best.plan.micro_batch_size} sequences at a time: {best.time.seconds:.3g} s a step "
            f"planned on {cluster.device.name or cluster.device_key}",
            file=sys.stderr,
        )
    chosen = best.plan.config
    train = config.train.model_copy(
        update={
            "micro_batch_size": best.plan.micro_batch_size,
            "activation_checkpoint": chosen.train.activation_checkpoint,
        }
    )
    return config.model_copy(update={"parallel": chosen.parallel, "train": train})


def _layout_options(config: Config) -> list[str]:
    """The overrides that say a configuration's layout, and how it cuts the batch."""
    parallel = config.parallel
    values = {f"parallel.{name}": value for name, value in parallel.model_dump().items()}
    for name in ("micro_batch_size", "activation_checkpoint"):
        values[f"train.{name}"] = getattr(config.train, name)
    return _options(values)


def _options(values: Mapping[str, Any]) -> list[str]:
    """Settings by their dotted paths, as they stand on a command line."""
    return [
        f"--{key}={'none' if value is None else str(value).lower()}"
        for key, value in values.items()
    ]


def _without_layout(arguments: list[str]) -> list[str]:
    """A command line without its --layout."""
    kept, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--layout":
            rest[:1] = []
        elif not argument.startswith("--layout="):
            kept.append(argument)
    return kept


def _with_tokenizer_beside(config: Config, model: Path, *, say: bool) -> Config:
    """`config` with MODEL's own tokenizer file where the one it names is not there any more: an
    imported folder names its own, and may have been moved."""
    named, beside = Path(config.data.tokenizer), model / "tokenizer.json"
    if named.name != beside.name or named.exists() or not beside.exists():
        return config
    if say:
        said = f"pentameter: {named} is not there; taking {beside}"
        print(terminal_message(said), file=sys.stderr)
    data = config.data.model_copy(update={"tokenizer": str(beside)})
    return config.model_copy(update={"data": data})


def vocabulary_and_epoch(
    config: Config, init_from: Path | None = None
) -> tuple[int | None, int | None, list[str]]:
    """The vocabulary and the rows of an epoch that a Plan needs, and the keys of its JSON that are
    not known; the data is read only for a vocabulary or an epoch that is not known.

    Where GPT-2's tokenizer would have to be downloaded for an epoch's length, that length is not
    known, and neither is what follows from it.
    """
    from pentameter.checkpoint.hugging_face.tokenizer_files import gpt2_beside
    from pentameter.data.batches.step import training_batches
    from pentameter.data.open_dataset import is_at_hand, open_dataset
    from pentameter.data.tokenizers.setting import known_vocab_size
    from pentameter.planning.plan import UNKNOWN_EPOCH, needs_data

    tokenizer = gpt2_beside(config.data.tokenizer, init_from)
    vocab_size = config.model.vocab_size or known_vocab_size(config.data.tokenizer)
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    if not needs_data(config.model_copy(update={"model": model})):
        return vocab_size, None, []
    if tokenizer is None and not is_at_hand(config.data):
        unknown = ["rows_per_epoch"]
        if config.train.epochs is not None:
            unknown += ["steps", "total_tokens", "total_flops"]
        print(
            "pentameter: an epoch's length is not known: GPT-2's tokenizer, which cuts the "
            f"text, is not on this machine; null are {', '.join(unknown)}",
            file=sys.stderr,
        )
        return vocab_size, UNKNOWN_EPOCH, unknown
    dataset = open_dataset(config.data, tokenizer=tokenizer, verify=False)
    rows_per_epoch = training_batches(config, dataset.split("train")).rows_per_epoch
    return dataset.vocab_size, rows_per_epoch, []


def _print_plan(
    config: Config, parsed: TrainArguments, n_processes: int | None, place: Place | None
) -> None:
    """Print the Plan: in words for people, as JSON for programs."""
    from pentameter.planning.plan import make_plan

    vocab_size, rows_per_epoch, unknown = vocabulary_and_epoch(config, parsed.init_from)
    plan = make_plan(
        config,
        vocab_size,
        rows_per_epoch,
        world_size=n_processes,
        local_size=n_processes if place is None else place.local_size,
    )
    if sys.stdout.isatty() and not parsed.json:
        print(plan.in_words())
        print("--json prints everything; `pentameter plan` says how long it takes")
    else:
        print(json.dumps({**plan.to_json(), **dict.fromkeys(unknown)}, indent=2))


def _prompt_options(trainer: Trainer) -> str:
    """The options of `sample` that ask as the run's own samples do; a question's text is the
    user's to write."""
    dataset, prompt = trainer.dataset, trainer.prompt.text
    is_chat = dataset.has_conversations and dataset.tokenizer.chat is not None
    if is_chat:
        prompt = trainer.config.train.sample_prompt or "Hello"
    # A line end would break the line to paste; without a prompt a sample begins after one.
    asked = f" --prompt={shlex.quote(prompt)}" if prompt and prompt.isprintable() else ""
    return f"{' --chat' if is_chat else ''}{asked}"


def _say_goodbye(trainer: Trainer) -> None:
    """Write the report and name the commands that make sense next, ready to paste: each works for
    this run, in this folder."""
    from pentameter.report.page import write_report

    try:
        report = f"report: {write_report(trainer.run_dir)}"
    except StorageError as error:  # the run is complete and saved all the same
        report = f"warning: no report: {error}"
    called = Path(sys.argv[0])
    is_script = called.name == "pentameter"
    command = shlex.join([str(called)] if is_script else [sys.executable, "-m", "pentameter"])
    run = shlex.quote(str(trainer.run_dir))
    lines = [f"{command} sample {run}{_prompt_options(trainer)} --max-new-tokens 500"]
    if trainer.dataset.split("val").n_tokens > 1:
        lines.append(f"{command} eval {run}")
    if trainer.config.log.tensorboard:
        lines.append(f"tensorboard --logdir {run}/tensorboard")
    lines.append(f"{command} doctor")
    print(f"\n{report}\n\nnext:", *lines, sep="\n  ")
    resumed = trainer.folder.checkpoint
    if resumed is not None and resumed.step == trainer.plan.steps:
        print(
            "\nThe run was complete already. To train longer, add --resume extend and a larger "
            f"--train.steps than {trainer.plan.steps}."
        )
    if trainer.config.data.corpus is not None:
        print("\nYour own text, a file or a folder: name it where you named the preset.")
