"""The collective in which a rank waits for another one, read off the traceback of the error with
which it failed, so that nothing has to be recorded while a run is well.

The frames of a traceback keep their local variables. The innermost ones name the collective and its
process group; the ones around them hold the module, the autograd node or the parameters that it
serves, which a `Naming` turns into names.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_MESSAGES = ("batch_isend_irecv", "irecv", "isend", "recv", "send")
_COLLECTIVE = re.compile(
    r"(all_gather|all_reduce|all_to_all|barrier|broadcast|reduce|reduce_scatter)"
    r"(_into_tensor|_object|_object_list|_single|_tensor)?"
)
"""Functions in torch.distributed whose names say which collective they are."""

MODULES = "torch/nn/modules/module.py"
"""The file with the calls of modules, which are on the stack in a forward pass."""

_DISTRIBUTED = "torch/distributed/distributed_c10d.py"
_STAGES = ("torch/distributed/pipelining/", "parallel/pipeline/")
_LIBRARIES = ("site-packages/", "dist-packages/", "processes/group/world.py", "contextlib.py")
_INNERMOST_CALLS = 12


class Naming:
    """Names for the modules, gradients and process groups that a stack frame's local variables
    hold, for error messages about a lost rank. This base class names nothing; `Names` in
    `parallel/` knows the model."""

    def of(self, local: object) -> str | None:
        """Return the name of the module, FSDP unit or pipeline stage that a frame's local variable
        holds; None if it is anything else."""
        return None

    def of_gradient(self, local: object) -> str | None:
        """Return the name of the module whose gradients `local` computes, if it is an autograd
        node. None if it is anything else, or a node with no module near."""
        return None

    def group(self, local: object) -> tuple[str, list[int]] | None:
        """Return a process group's mesh dimension ("" if it has none) and its ranks, if `local`
        holds the group or its name; None for anything else."""
        import torch.distributed as dist

        if not isinstance(local, dist.ProcessGroup):
            return None
        return "", dist.get_process_group_ranks(local)

    def summed(self) -> tuple[str, str, list[int]] | None:
        """Return the first gradients whose all-reduce has begun and is not done, as (their name in
        words, mesh dimension of the group, its ranks); None if there are none."""
        return None


@dataclass(frozen=True)
class Wait:
    """The place where a rank waited when it noticed that it had lost another one: the collective or
    messages, their group, and the call in the source."""

    collective: str
    """The collective in words, such as `all-reduce`; `collective` if it is not known which."""
    along: str = ""
    """The mesh dimension of its group; empty if the group has none."""
    ranks: Sequence[int] = ()
    """The ranks of its group; empty for all ranks."""
    serves: str = ""
    """The purpose of the communication: a module's name, the gradients by their parameters' names,
    or pipeline stages."""
    during: str = ""
    """`forward pass`, `backward pass`, or empty."""
    calls: str = ""
    """The innermost function that is not in a library, and its place in the source."""
    seconds: float = 0.0
    """Seconds from the start of the rank's action until it lost the other. The rank with the
    smallest value waited first."""
    stack: str = ""
    """The frames, outermost first, a line for each, without those inside libraries."""
    timed_out: bool = False
    """True if the other did not answer in time; False if its connection closed."""

    def __str__(self) -> str:
        along = f" along {self.along}" if self.along else "" if self.ranks else " over all ranks"
        serves = f" {self.serves}" if self.serves else f" of {self.calls}" if self.calls else ""
        during = f" in the {self.during}" if self.during else ""
        return f"the {self.collective}{along}{serves}{during}"

    def to_json(self) -> str:
        """Return the wait, without its stack, as one line for the store."""
        return json.dumps(asdict(self) | {"stack": ""})


def wait_behind(error: BaseException, naming: Naming, seconds: float) -> Wait | None:
    """Return where this rank waited when `error` (from gloo, nccl or a store) was raised; None for
    an error that was created and never raised.

    naming: names the modules, parameters and groups in the traceback's frames.
    seconds: time since the rank's action began.
    """
    import torch.distributed as dist

    placed = list(traceback.walk_tb(_innermost(error).__traceback__))[::-1]
    if not placed:
        return None
    inward = [frame for frame, _ in placed]
    in_backward = any(frame.f_code.co_name == "_engine_run_backward" for frame in inward)
    in_forward = any(_path(frame).endswith(MODULES) for frame in inward)
    collective, group = _collective(inward, naming)
    serves = ""
    for local in _locals(inward):
        name = naming.of(local) or (in_backward and naming.of_gradient(local))
        if name:
            serves = f"of {name}"
            break
    if not collective and in_backward and (summed := naming.summed()) is not None:
        parameters, *group = summed
        collective, serves = "all-reduce", f"of the gradients of {parameters}"
    along, ranks = group or ("", [])
    world_size = dist.get_world_size() if dist.is_initialized() else None
    if not serves and len(ranks) == world_size:  # also the group of the only dimension
        along, ranks = "", []
    where, stack = calls_in_words([(_path(f), line, f.f_code.co_name) for f, line in placed])
    collective = collective or "collective"
    during = "backward pass" if in_backward else "forward pass" if in_forward else ""
    return Wait(collective, along, ranks, serves, during, where, seconds, stack)


def calls_in_words(calls: Sequence[tuple[str, int, str]]) -> tuple[str, str]:
    """Return two texts about a stack of calls: the innermost call outside libraries, with file and
    line, and all calls outside libraries. `calls` lists (file, line, function), the innermost
    first, at least one; if all are in libraries, the texts are about these."""
    own = [each for each in calls if not any(part in each[0] for part in _LIBRARIES)]
    shown = [
        f"{_short(path)}:{line} in {function}"
        for path, line, function in (own or calls)[:_INNERMOST_CALLS]
    ]
    place, _, function = shown[0].rpartition(" in ")
    return f"{function} ({place})", "\n".join(f"  {call}" for call in reversed(shown))


def first_wait(waits: Sequence[Wait], absent: Sequence[int]) -> Wait | None:
    """Return the wait that caused the others: the one that began first, among those whose group has
    an `absent` rank, or among all if there are none. None if `waits` is empty."""
    direct = [wait for wait in waits if not wait.ranks or set(wait.ranks) & set(absent)]
    return min(direct or waits, key=lambda wait: wait.seconds, default=None)


def _innermost(error: BaseException) -> BaseException:
    """Return the error that the library raised: the innermost among `error` and its causes."""
    found, each = error, error.__cause__ or error.__context__
    while each is not None:
        if each.__traceback__ is not None and isinstance(each, RuntimeError):
            found = each
        each = each.__cause__ or each.__context__
    return found


def _collective(inward: Sequence[FrameType], naming: Naming) -> tuple[str, Any]:
    """Return (name, group) of the collective that the stack frames `inward`, innermost first, are
    in. The name is in words, "" if it is not known. The group is (mesh dimension, ranks), or None
    if it has all ranks."""
    found, start = "", 0
    for index, frame in enumerate(inward):
        name, path = frame.f_code.co_name, _path(frame)
        if path.endswith(_DISTRIBUTED) and name in _MESSAGES:
            found = "messages"
        elif path.endswith(_DISTRIBUTED) and (named := _COLLECTIVE.fullmatch(name)):
            found = named[1].replace("_", "-")
        elif name == "finish" and path.endswith("parallel/waits.py"):
            found = frame.f_locals["collective"]
        elif any(part in path for part in _STAGES) and not found:
            found = "messages"
        else:
            continue
        start = index
        break
    if not found:
        return "", None
    if inward[start].f_locals.get("group", "") is None:
        return found, None
    groups = (naming.group(local) for local in _locals(inward[start:]))
    return found, next((group for group in groups if group is not None), None)


def _locals(frames: Sequence[FrameType]) -> Iterator[object]:
    for frame in frames:
        yield from list(frame.f_locals.values())


def _path(frame: FrameType) -> str:
    return frame.f_code.co_filename.replace("\\", "/")


def _short(path: str) -> str:
    """Return a file's path from the package's folder on; the file's name if it is elsewhere."""
    _, found, rest = path.rpartition("/pentameter/")
    return rest if found else Path(path).name
