"""`pentameter train`: train a configuration, or resume it."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from pentameter.cli.options.arguments import (
    importing,
    parse_arguments,
    sizes_of_data,
    without_options,
)
from pentameter.config.files.overrides import as_options
from pentameter.errors import ConfigError, StorageError, remark
from pentameter.processes.group.rank import LaunchedRank, find_rank, processes_together
from pentameter.processes.launch.local_launch import check_launch
from pentameter.processes.launch.worker import become_rank, watch_launcher
from pentameter.processes.standard_streams import outlived

if TYPE_CHECKING:
    from pentameter.autotune.sweep import SweepRun
    from pentameter.config.schema import Config
    from pentameter.processes.group.join import Meeting
    from pentameter.processes.launch.training_launch import Launch
    from pentameter.train.run import TrainingRun
    from pentameter.train.say.profile import Profile
    from pentameter.train.timed.timed_run import TimedRun


IMPORTED = "pentameter.train.loop"
"""The module that a fork server imports before it forks ranks: it imports torch, and nearly all
that training needs."""
AS_RANK = "pentameter.cli.train:train_as_rank"
"""The function that a process calls to train as one of several ranks."""
EXCLUSIVE = (
    *(("sweep", "time"), ("layout", "time")),
    *(("nodes", "time"), ("nodes", "sweep"), ("respawn", "time"), ("respawn", "sweep")),
)
"""Pairs of options that exclude each other."""


@dataclass(frozen=True)
class TrainArguments:
    """Train a model, or continue a run: the same command line after a crash continues.

    Every key of the configuration can be overridden: --train.steps 500, --model.n-layers=4.
    """

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET-or-FILE")] = (
        None
    )
    """A preset (quickstart, shakespeare-char, …) or a TOML file. A text file, or a folder of them:
    the quickstart on that text, --data.path TEXT. With --init-from a text, or nothing: MODEL's own
    configuration, tokenizer and chat template."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The run folder; runs/NAME when absent."""
    resume: str = "auto"
    """auto: continue a run of the same configuration, else start; never; must; extend: continue to
    a larger train.steps, with the schedule begun anew at the last checkpoint; or a checkpoint."""
    init_from: Annotated[Path | None, tyro.conf.arg(metavar="MODEL")] = None
    """Begin with the weights of a run, a checkpoint, a Hugging Face folder or OWNER/NAME of the Hub
    (fine-tune)."""
    nproc: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Train as N processes of this machine, which divide the work as [parallel] says."""
    oversubscribe: tyro.conf.FlagCreatePairsOff[bool] = False
    """Let --nproc start more processes than the cores of this machine can serve."""
    nodes: Annotated[str | None, tyro.conf.arg(metavar="MIN:MAX")] = None
    """Train on so many machines, of which each is given this command, with a --run-dir that all
    share. One that is lost is left out, and one that comes is taken in at the next step's end."""
    respawn: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """After a loss (a process or machine is killed, crashes, hangs) start again from the last
    checkpoint, up to N times until there is a new one; 0 when absent, 3 with --nodes. With --layout
    best, --nproc starts one process less after each further loss, until the next checkpoint."""
    layout: Annotated[str | None, tyro.conf.arg(metavar="best|LAYOUT")] = None
    """Instead of [parallel]: best, which is the fastest that `plan --search` finds for these
    processes, with its micro-batch; or a layout, data=2,tensor=2."""
    time: Annotated[str | None, tyro.conf.arg(metavar="30m")] = None
    """Train for so long, preparation included: 90s, 30m, 2h, 1h30m. Of a text, and of the
    quickstart, the best model for that time on this machine is chosen, with all that you leave
    open; another preset or file gets the steps that there is time for."""
    sweep: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=V,V")
    ] = ()
    """A run for each of these values of a key, and for each combination if it is given again. They
    lie in --run-dir (runs/NAME-sweep when absent), and are compared at the end."""
    at_once: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """With --sweep: so many of its runs at a time, which divide the cores."""
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
    """Train as `arguments` (the command line after the verb) ask, and return the exit code 0 once
    the run is complete. With --nproc this process only launches the ranks."""
    watch_launcher()
    parsed, overrides = parse_arguments(TrainArguments, arguments, verb="train")
    with nullcontext() if parsed.dry_run or parsed.print_config else outlived():
        _run(*_with_folder(parsed, overrides, arguments))
    return 0


def _with_folder(
    parsed: TrainArguments, overrides: list[str], arguments: list[str]
) -> tuple[TrainArguments, list[str], list[str]]:
    """Return the command line as it was parsed, and as it was given, with the folder of MODEL where
    --init-from names one on the Hub: it is fetched here, once for all processes of this machine."""
    from pentameter.checkpoint.hugging_face.hub import fetch, hub_address

    given = parsed.init_from
    if given is None or (address := hub_address(given, scheme=False)) is None:
        return parsed, overrides, arguments
    warnings: list[str] = []
    folder = fetch(address, warnings)
    remark(*warnings)
    named = [*without_options(arguments, ["init-from"]), "--init-from", str(folder)]
    return replace(parsed, init_from=folder), overrides, named


def _run(parsed: TrainArguments, overrides: list[str], arguments: list[str]) -> None:
    """Train, given the command line after the verb (`arguments`) and the two parts it was parsed
    into: options (`parsed`) and configuration keys (`overrides`)."""
    from pentameter.planning.layouts.layout import BEST

    launched = find_rank()
    _check_alone(parsed, launched)
    is_main = launched is None or launched.rank == 0
    n_processes = processes_together(parsed.nproc, launched)
    if parsed.sweep:
        _sweep(parsed, arguments, overrides, n_processes)
        return
    timed = None
    if parsed.time is not None:
        from pentameter.train.timed.timed_run import TimedRun, check_timed

        check_timed(parsed.resume, n_processes or 1)
        timed = TimedRun(
            parsed.source,
            overrides,
            parsed.time,
            run_dir=parsed.run_dir,
            init_from=parsed.init_from,
        )
    config = _configuration(parsed, overrides, n_processes, launched, timed, say=is_main)
    hooks = []
    if parsed.profile is not None:
        from pentameter.train.say.profile import parse_window

        hooks.append(parse_window(parsed.profile, config.train.steps))
    if parsed.print_config or parsed.dry_run:
        if is_main:
            _print_plan(config, parsed, n_processes, launched)
        return
    if parsed.layout == BEST and launched is not None:
        _train_in_best_layout(config, parsed, launched, hooks)
    elif launched is None and ((n_processes or 1) > 1 or parsed.respawn or parsed.nodes):
        launch = _launch(config, parsed, arguments)
        if parsed.nodes is not None:
            launch.on_nodes(parsed.nodes)
        else:
            chosen = partial(_configuration, parsed, overrides, launched=None, say=True)
            launch.here(lambda n: chosen(n_processes=n))
    else:
        if is_main and sys.stdout.isatty():  # it may be minutes to the run's own first line
            print(f"{config.name}: loading PyTorch, then reading the text …", flush=True)
        check_launch(
            config,
            n_processes or 1,
            launched,
            oversubscribe=parsed.oversubscribe,
            check_fit=not parsed.force,
        )
        _train(config, parsed, launched, hooks, timed)


def train_as_rank(request: tuple[Mapping[str, str], list[str]]) -> int:
    """Train as one rank, in a process forked for it, and return the exit code. `request` holds the
    environment variables, which say the rank, and the command line after `train`."""
    from pentameter.cli.main import main

    environment, arguments = request
    become_rank(environment)
    sys.argv = [str(Path(sys.executable).with_name("pentameter")), "train", *arguments]
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _launch(config: Config, parsed: TrainArguments, arguments: list[str]) -> Launch:
    """Return the Launch that `arguments`, the command line after `train`, ask for."""
    from pentameter.processes.launch.program import Preloaded
    from pentameter.processes.launch.training_launch import Launch

    launching = ("nproc", "nodes", "respawn", "layout", "resume")
    return Launch(
        program=Preloaded(IMPORTED, AS_RANK, parsed.nproc or 1),
        arguments=without_options(arguments, launching),
        n_processes=parsed.nproc or 1,
        config=config,
        layout=parsed.layout,
        resume=parsed.resume,
        folder=parsed.run_dir or Path("runs") / config.name,
        restarts=parsed.respawn,
        oversubscribe=parsed.oversubscribe,
        check_fit=not parsed.force,
    )


def _check_alone(parsed: TrainArguments, launched: LaunchedRank | None) -> None:
    """Raise ConfigError if two options exclude each other (EXCLUSIVE), or if --respawn is negative.
    Also raise it if --nodes, --respawn or --sweep, which start processes by themselves, is given in
    a process that a launcher such as torchrun has started (`launched`; None without one)."""
    for option, other in EXCLUSIVE:
        if getattr(parsed, option) and getattr(parsed, other):
            raise ConfigError(f"--{option} and --{other} exclude each other; leave one of them out")
    for option in ("nodes", "respawn"):
        if launched is not None and getattr(parsed, option):
            raise ConfigError(
                f"--{option} and {launched.source} exclude each other; leave one of them out"
            )
    if launched is not None and parsed.sweep:
        raise ConfigError("--sweep starts its processes itself; leave the launcher out")
    if parsed.respawn is not None and parsed.respawn < 0:
        raise ConfigError(f"--respawn {parsed.respawn} must be 0 or more")


def _sweep(
    parsed: TrainArguments, arguments: list[str], overrides: list[str], n_processes: int | None
) -> None:
    """Train the runs that `--sweep` asks for, in a folder of their own, and compare them in that
    folder's compare.html; with --dry-run or --print-config only list them. `arguments` is the
    command line after `train`, and `overrides` the configuration keys in it. Raises ConfigError
    before the first run if any configuration is invalid."""
    from pentameter.autotune.sweep import sweep_runs, train_sweep
    from pentameter.config.files.load import flat_overrides

    counted = itertools.count()

    def load(settings: Mapping[str, Any]) -> Config:
        own = [*overrides, *as_options(settings)]
        return _configuration(parsed, own, n_processes, None, say=next(counted) == 0)

    runs = sweep_runs(swept_values(parsed.sweep), flat_overrides(overrides), load, parsed.run_dir)
    if parsed.print_config or parsed.dry_run:
        for run in runs:
            print(run.folder, *as_options(run.settings))
        return
    common = without_options(arguments, ("sweep", "at-once", "run-dir"))

    def request(run: SweepRun) -> list[str]:
        named = {"name": run.label, "run-dir": run.folder}
        return [*common, *as_options({**run.settings, **named})]

    train_sweep(runs, parsed.at_once, "pentameter.cli.train:serve_sweep", request)


def swept_values(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key in a sweep. Each text reads `KEY=VALUE,VALUE`, with `;` between
    values that contain commas. Raises ConfigError for another form, and a key named twice."""
    values: dict[str, list[str]] = {}
    for text in texts:
        key, equals, listed = text.removeprefix("--").partition("=")
        key = key.strip().replace("-", "_")
        found = [each.strip() for each in listed.split(";" if ";" in listed else ",")]
        if not equals or not all(found):
            raise ConfigError(f"--sweep {text!r} must read KEY=VALUE,VALUE, as seed=1,2,3")
        if key in values:
            raise ConfigError(f"--sweep names {key} twice; list all of its values in one")
        values[key] = found
    return values


def serve_sweep() -> Callable[[list[str]], int]:
    """Return a function that trains a run from `train`'s arguments. Called in a sweep's worker
    process."""
    return run


def _configuration(
    parsed: TrainArguments,
    overrides: list[str],
    n_processes: int | None,
    launched: LaunchedRank | None,
    timed: TimedRun | None = None,
    *,
    say: bool,
) -> Config:
    """Return the configuration that the command line names, in the requested layout, or as chosen
    for a time (`timed`). A best layout for processes that a launcher started is chosen later, once
    they have met.

    n_processes: how many train together; None for one.
    launched: this process's rank, and how many a launcher started on each machine; None if all are
        on this machine.
    say: print the choices made on stderr.
    """
    from pentameter.config.files.command_source import random_weights, with_tokenizer_beside
    from pentameter.config.files.load import flat_overrides, load_config
    from pentameter.planning.layouts.layout import BEST, layout_overrides
    from pentameter.train.keep.own_configuration import configuration_to_train

    is_printed = parsed.print_config or parsed.dry_run
    if timed is None:
        given = {**flat_overrides(overrides), **layout_overrides(parsed.layout)}
        config = load_config(*configuration_to_train(parsed.source, given, parsed.init_from))
    else:
        config = timed.choose(parsed.resume, keep=not is_printed)
    said = [] if parsed.init_from is not None else [*random_weights(Path(parsed.source or ""))]
    is_launched = launched is not None or parsed.nodes is not None
    if parsed.layout == BEST and (is_printed or not is_launched):
        from pentameter.autotune.best_layout import best_layout

        n_together = n_processes or 1
        local_size = n_together if launched is None else launched.local_size
        best = best_layout(config, n_together, local_size, sizes_of_data(config))
        said.append(str(best))
        config = best.of(config)
    config, warnings = with_tokenizer_beside(config, parsed.init_from)
    if say:
        remark(*said, *warnings)
    return config


def _train(
    config: Config,
    parsed: TrainArguments,
    launched: LaunchedRank | None,
    hooks: list[Profile],
    timed: TimedRun | None,
    meeting: Meeting | None = None,
) -> None:
    """Train in this process, and print the commands to go on with on rank 0.

    launched: this process's rank in a group that a launcher started; None if it runs alone.
    meeting: the processes' meeting, if they have met already; None if they are to meet now.
    """
    with importing():
        from pentameter.processes.group.join import joined_world_of
        from pentameter.train.loop import Trainer

    with joined_world_of(config, launched, meeting) as world:
        trainer = Trainer(
            config,
            time=timed,
            run_dir=parsed.run_dir,
            resume=parsed.resume,
            init_from=parsed.init_from,
            hooks=hooks,
            world=world,
            force=parsed.force,
        )
        trainer.fit()
    if world.is_main:
        _print_next_steps(trainer.run, parsed.time)


def _train_in_best_layout(
    config: Config, parsed: TrainArguments, launched: LaunchedRank, hooks: list[Profile]
) -> None:
    """Train as a rank of a launched group, in the layout that rank 0 chooses for the group. If that
    layout has no use for this rank, wait for the end. Collective."""
    from pentameter.autotune.best_layout import choose_together
    from pentameter.processes.group.join import meet

    meeting = meet(launched, config.parallel.timeout_seconds)
    chosen, training = choose_together(config, meeting, lambda: sizes_of_data(config))
    if launched.rank >= training.world_size:
        meeting.wait_as_spare()
        return
    _train(chosen, parsed, training, hooks, None, meeting)
    if launched.rank == 0:
        meeting.release_spares(training.world_size)


def _print_plan(
    config: Config, parsed: TrainArguments, n_processes: int | None, launched: LaunchedRank | None
) -> None:
    """Print the configuration as TOML with --print-config; else the run's Plan (all derived sizes,
    memory per rank, layout), in words on a terminal, as JSON elsewhere or with --json.

    n_processes: the ranks to plan for, None for as many as [parallel] implies. launched: says how
    many are on each machine; None if all are on this one.
    """
    from pentameter.config.files.write import to_toml
    from pentameter.estimating.bytes.plan_estimates import describe_plan, plan_record
    from pentameter.planning.plan import make_plan

    if parsed.print_config:
        print(to_toml(config), end="")
        return
    sizes = sizes_of_data(config, parsed.init_from)
    plan = make_plan(
        config,
        sizes.vocab_size,
        sizes.rows_per_epoch,
        world_size=n_processes,
        local_size=n_processes if launched is None else launched.local_size,
    )
    if sys.stdout.isatty() and not parsed.json:
        print(describe_plan(plan))
        print("--json prints everything; `pentameter plan` says how long it takes")
    else:
        print(json.dumps(sizes.without_unknown(plan_record(plan)), indent=2))


def _prompt_options(run: TrainingRun) -> str:
    """Return options for `sample` that repeat the run's own sample prompt. A question from the data
    is not repeated: the user writes one."""
    dataset, prompt = run.dataset, run.prompt.text
    is_chat = dataset.has_conversations and dataset.tokenizer.chat is not None
    if is_chat:
        prompt = run.config.train.sample_prompt or "Hello"
    # One with a line end would break the line to paste.
    asked = f" --prompt={shlex.quote(prompt)}" if prompt and prompt.isprintable() else ""
    return f"{' --chat' if is_chat else ''}{asked}"


def words_of_program() -> list[str]:
    """Return the words that start this program again: the script by which it was called, or the one
    beside its Python, as the processes of a launch are called otherwise; the module without one."""
    script = Path(sys.argv[0])
    if script.name != "pentameter":
        script = Path(sys.executable).with_name("pentameter")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "pentameter"]


def _print_next_steps(run: TrainingRun, time: str | None) -> None:
    """Write the report, and print commands for this run, of the `time` asked for, that can be
    pasted."""
    from pentameter.report.pages.page import write_report

    try:
        report = f"report: {write_report(run.run_dir)}"
    except StorageError as error:  # the run is complete and saved all the same
        report = f"warning: no report: {error}"
    command = shlex.join(words_of_program())
    folder = shlex.quote(str(run.run_dir))
    n_tokens = min(500, run.config.model.context_length)  # beyond it the beginning is forgotten
    lines = [f"{command} sample {folder}{_prompt_options(run)} --max-new-tokens {n_tokens}"]
    if find_spec("uvicorn") is not None:  # the extra `serve`
        lines.append(f"{command} serve {folder}")
    if run.dataset.split("val").n_tokens > 1:
        lines.append(f"{command} eval {folder}")
    if run.config.log.tensorboard:
        lines.append(f"tensorboard --logdir {folder}/tensorboard")
    lines.append(f"{command} doctor")
    print(f"\n{report}\n\nnext:", *lines, sep="\n  ")
    resumed = run.folder.checkpoint
    if resumed is not None and resumed.step == run.plan.steps:
        longer = f"add --resume extend and a larger --train.steps than {run.plan.steps}"
        if time is not None:  # which refuses both
            longer = f"give more than --time {time}"
        print(f"\nThe run was complete already. To train longer, {longer}.")
    if run.config.data.corpus is not None:
        print("\nYour own text, a file or a folder: name it where you named the preset.")
