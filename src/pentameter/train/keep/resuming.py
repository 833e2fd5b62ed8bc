"""The checks whether a run may resume as requested, and the step at which its schedule begins.
Nothing is written here.

A step's result is a function of (configuration, seed, step). So a run may resume only if the
requested configuration would have made the same steps as those already made; its schedule may
differ in later ones. `--resume extend` begins the schedule anew at the last checkpoint, and then it
does not cover earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pentameter.checkpoint.folders.opening import (
    Check,
    Checkpoint,
    find_checkpoint,
    read_own_manifest,
)
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.folders.verification import Verification
from pentameter.config.files.load import load_config
from pentameter.config.fingerprint import config_hash, diff_configs
from pentameter.config.schema import Config
from pentameter.errors import ConfigError, CorruptError, few
from pentameter.optim.schedule import learning_rate
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.plan import Plan, default_cooldown
from pentameter.processes.failures.activity import STARTING
from pentameter.processes.group.world import World
from pentameter.record.checkpoints import list_checkpoints, step_of
from pentameter.record.identity import RunIdentity, read_identity
from pentameter.train.user_components import UserComponents

NEW_FOLDER = "another --run-dir or --name to start anew"


@dataclass(frozen=True)
class RunRequest:
    """The request for a run that `Trainer` was given: the configuration, the run folder, whether to
    start or resume, the user's components, and the ranks that run it."""

    config: Config
    """The configuration as the user wrote it, before missing values are derived."""
    run_dir: Path
    resume: str
    """`auto` (resume a run with the same configuration, else start), `never` (only start), `must`
    (only resume), `extend` (only resume, and begin the schedule anew) or the path to a checkpoint
    to branch off from."""
    init_from: Path | None
    """The model whose weights a run without a checkpoint begins with; None for random weights."""
    world: World
    supplied: UserComponents = field(default_factory=UserComponents)
    """The user's own model, optimizer and batches, if given."""
    force: bool = False
    """True to try a run that is predicted to exceed the memory."""
    verification: Verification = field(default_factory=Verification)
    """The checkpoints that the ranks of `world` have verified at this start."""
    goes_on: bool = False
    """True for a run whose length was changed after it had cooled down: it goes on from the newest
    checkpoint whose steps the configuration would have made, and later ones are removed."""


# -- whose folder it is -------------------------------------------------------------------------


def step_folders(path: Path) -> list[str]:
    """Return the names of the folders in `path`/checkpoints that may hold complete checkpoints
    (step-…), sorted."""
    names = (entry.name for entry in (path / "checkpoints").glob("step-*"))
    return sorted(name for name in names if step_of(name) is not None)


def refuse_foreign(path: Path, identity: RunIdentity | None) -> None:
    """Raise ConfigError if `path` holds checkpoints of another run than `identity`, as
    `read_identity(path)` returned it. `identity` is None for a folder without config.toml, which is
    no run folder; any checkpoint in it is then refused, and also a plan.json next to metrics."""
    names = step_folders(path)
    branch = f"--run-dir NEW --resume {path}/checkpoints/step-…"
    if identity is None:
        metrics = path / "metrics.jsonl"
        has_plan = (path / "plan.json").exists()
        if names:
            raise ConfigError(
                f"{path} has no config.toml, and holds the checkpoints {few(names, 3)} of a run; "
                f"each has a copy: put {path}/checkpoints/{names[-1]}/config.toml back into {path} "
                f"to continue the run, or give {branch} to branch off, or {NEW_FOLDER}"
            )
        if has_plan and metrics.exists() and metrics.stat().st_size:
            raise ConfigError(
                f"{path} has no config.toml, and holds plan.json and metrics.jsonl of a run that "
                f"saved no checkpoint; remove the folder, or give {NEW_FOLDER}"
            )
        return
    foreign = {}
    for candidate in list_checkpoints(path / "checkpoints"):
        try:
            run_id = read_own_manifest(candidate.path).run_id
        except CorruptError:
            continue  # it belongs to no run
        if run_id != identity.run_id:
            foreign[candidate.path.name] = run_id
    if foreign:
        others = ", ".join(sorted(set(foreign.values())))
        raise ConfigError(
            f"{path} mixes two runs: plan.json is of run {identity.run_id}, and the checkpoints "
            f"{few(foreign, 3)} are of {others}. Put the plan.json and config.toml of the "
            f"checkpoints' run back, or move those checkpoints away, or give {branch} to branch "
            f"off, or {NEW_FOLDER}"
        )


def newest_of_run(path: Path, check: Check) -> tuple[str, int] | None:
    """Return the id of the run in the folder `path`, and the step of its newest checkpoint that
    passes `check`; None if there is none. Raises CorruptError if plan.json is damaged."""
    identity = read_identity(path)
    if identity is None:
        return None
    found = find_checkpoint(path / "checkpoints", [], run_id=identity.run_id, check=check)
    return None if found is None else (identity.run_id, found.step)


def no_checkpoint(request: RunRequest) -> ConfigError:
    """Return the error for `--resume must` or `extend` in a run folder without a checkpoint."""
    return ConfigError(
        f"--resume {request.resume}: there is no checkpoint in {request.run_dir}; use --resume "
        "auto to start"
    )


# -- whether its steps are the requested ones ------------------------------------------------------


def check_same_run(path: Path, checkpoint: Checkpoint, plan: Plan, asked: Config) -> None:
    """Raise ConfigError, listing the differences, unless a run resumed from `checkpoint` would have
    made the same steps up to it. The configuration in `plan` is compared with config.toml in the
    run folder `path` and with the one in the checkpoint. Only [schedule] may differ, and no
    learning rate up to the checkpoint may. `asked` is the user's configuration, from which `plan`
    was derived; the message names its keys.

    Also raises ConfigError if the plan has fewer steps than the checkpoint, and CorruptError for a
    damaged checkpoint.
    """
    saved_layout(checkpoint)  # raises if the layout is unknown
    checkpoint.read("config.toml")  # raises if it is missing or damaged
    for source in (path / "config.toml", checkpoint.path / "config.toml"):
        found = load_config(source)
        if not _made_the_same(found, plan.config, checkpoint.step):
            raise ConfigError(_refusal(path, source, found, plan, asked, checkpoint.step))
    if plan.steps < checkpoint.step:
        raise ConfigError(
            f"the run in {path} has made {checkpoint.step} steps already, and train.steps="
            f"{plan.steps} are fewer; leave train.steps as it was, or give {NEW_FOLDER}"
        )


def newest_of_same_steps(store: CheckpointStore, newest: Checkpoint, plan: Plan) -> Checkpoint:
    """Return the newest intact checkpoint in `store` whose steps the configuration in `plan` would
    have made, too; `newest`, the newest of all, if there is none."""
    for step in sorted({each.step for each in list_checkpoints(store.folder)}, reverse=True):
        with suppress(CorruptError):
            found = newest if step == newest.step else store.at(step)
            if found is not None:
                found.read("config.toml")  # raises if it is missing or damaged
                made = load_config(found.path / "config.toml")
                if _made_the_same(made, plan.config, step):
                    return found
    return newest


def check_start_step(path: Path, plan: Plan, checkpoint: Checkpoint | None) -> None:
    """Raise ConfigError if the run would start before `schedule.start_step`: from an earlier
    checkpoint, or from step 0 if `checkpoint` is None. `path` is the run folder, named in the
    message."""
    start, first = plan.config.schedule.start_step, 0 if checkpoint is None else checkpoint.step
    if first < start and checkpoint is None:
        raise ConfigError(
            f"schedule.start_step={start}, and a new run begins at step 0; leave it out, "
            "--schedule.start-step 0"
        )
    if first < start:
        raise ConfigError(
            f"{path} was extended at step {start} (schedule.start_step), and its newest whole "
            f"checkpoint is step {first}, after which the steps had another schedule; restore a "
            f"later one, or branch off: --run-dir NEW --resume {path}/checkpoints/step-{first:08d} "
            "--schedule.start-step 0"
        )


def saved_layout(checkpoint: Checkpoint) -> Layout:
    """Return the layout (degrees of parallelism) that wrote a checkpoint. Raises CorruptError if
    this version does not know its keys."""
    try:
        return Layout(**checkpoint.manifest.layout)  # type: ignore[arg-type]
    except TypeError as error:
        raise CorruptError(
            f"{checkpoint.path}/manifest.json is malformed: layout: {error}"
        ) from error


def _made_the_same(found: Config, asked: Config, n_steps: int) -> bool:
    """Return True if both configurations make the same first `n_steps` steps: they differ at most
    in [schedule], and all learning rates up to there are equal."""
    if not all(change.startswith("schedule.") for change in diff_configs(found, asked)):
        return False
    if config_hash(found) == config_hash(asked):
        return True
    old, new = found.schedule, asked.schedule
    if any(getattr(old, key) is None for key in old.decay_keys):
        return False  # a key would follow from the run's length, as it does in no run's config.toml
    return all(
        learning_rate(step, found.optimizer, old) == learning_rate(step, asked.optimizer, new)
        for step in range(max(old.start_step, new.start_step), n_steps)
    )


def _refusal(
    path: Path, source: Path, found: Config, plan: Plan, asked: Config, n_steps: int
) -> str:
    """Return the error message for a run in `path` that was made with another configuration: the
    differences, by the keys that the user sets, and a remedy.

    source, found: a config.toml and the configuration in it.
    plan, asked: the new plan, and the user's configuration that it was derived from.
    n_steps: the steps that the run has made.
    """
    differences = _in_user_keys(found, plan.config, asked)
    where = "" if source.parent == path else f" ({source.parent.name} says so)"
    remedy = ""
    if found.schedule.start_step >= plan.steps:
        remedy = f"The run was extended: --train.steps {found.train.steps} continues it.\n"
    elif n_steps < plan.steps and all(d.startswith(("schedule.", "train.")) for d in differences):
        remedy = (
            f"To train longer: --resume extend goes on from step {n_steps} with a schedule that "
            "begins anew there. A constant schedule, and wsd before its cool-down, can be "
            "continued as they are: their rates do not depend on what follows.\n"
        )
    listed = "\n  ".join(differences)
    other_copies = ", with another checkpoint.copy_to" if asked.checkpoint.copy_to else ""
    return (
        f"{path} holds a run of another configuration{where}, which differs in\n  {listed}\n"
        f"{remedy}Use the same values to continue it, or {NEW_FOLDER}{other_copies}"
    )


def _in_user_keys(found: Config, planned: Config, asked: Config) -> list[str]:
    """Return "key: old → new" for each difference between `found` (the run's configuration so far)
    and `planned` (the new one). Where a schedule key differs only because it follows from the run's
    length, `train.steps` is named instead, the key that the user set in `asked`."""
    derived = {"schedule.start_step"} if asked.schedule.start_step == 0 else set()
    if found.train.steps != planned.train.steps:
        derived |= _from_length(found) & _from_length(planned)
    differences = diff_configs(found, planned)
    told = [each for each in differences if each.partition(":")[0] not in derived]
    if len(told) == len(differences):
        return told
    epochs = asked.train.epochs
    length = "" if epochs is None else f", train.epochs={epochs}"
    return [
        *told,
        f"train.steps: {found.train.steps} → {planned.train.steps}{length}, and so every learning "
        f"rate of schedule.name={planned.schedule.name!r}",
    ]


def _from_length(config: Config) -> set[str]:
    """Return the keys of [schedule] whose values follow from `train.steps`: decay_steps if the
    decay ends at the last step, and then cooldown_steps if it has its default."""
    steps, schedule = config.train.steps, config.schedule
    if steps is None or schedule.decay_steps != steps - schedule.start_step:
        return set()
    if schedule.cooldown_steps != default_cooldown(schedule.decay_steps):
        return {"schedule.decay_steps"}
    return {"schedule.decay_steps", "schedule.cooldown_steps"}


# -- which schedule -----------------------------------------------------------------------------


def plan_run(request: RunRequest, plan_of: Callable[[Config], Plan]) -> Plan:
    """Return the Plan of the requested run. `plan_of` makes a Plan from a configuration.
    Collective.

    If the run was extended, its schedule begins at that step; with `--resume extend` it begins at
    the last checkpoint. An extension that was interrupted is found in the folder's config.toml, and
    not begun again. Raises ConfigError if there is nothing to extend, or if train.steps is not
    beyond the last checkpoint; and any error from `plan_of`.
    """
    path, config, world = request.run_dir, request.config, request.world
    extends = request.resume == "extend"
    plan = plan_of(config)
    if request.resume not in ("auto", "must", "extend"):
        return plan
    source = path / "config.toml"
    found = world.on_main(lambda: load_config(source) if source.exists() else None)
    if found is None:
        if extends:
            raise no_checkpoint(request)
        return plan
    begun = found.schedule.start_step
    if config.schedule.start_step == 0 and 0 < begun < plan.steps:
        plan = plan_of(config.updated({"schedule.start_step": begun}))
    same = config_hash(found) == config_hash(plan.config) and found.train.steps == plan.steps
    if not extends or same:
        return plan
    verification = request.verification
    found_last = verification.on_main(lambda: newest_of_run(path, verification.check), STARTING)
    if found_last is None:
        raise no_checkpoint(request)
    start = found_last[1]
    if plan.steps <= start:
        raise ConfigError(
            f"--resume extend: the run in {path} has made {start} steps already, and "
            f"train.steps={plan.steps} is not beyond; say how many there are to be in all"
        )
    return plan_of(config.updated({"schedule.start_step": start}))
