"""Sessions of a run: from each start to the next one, on which nodes and in which layout it
trained, and what was lost in between."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pentameter.record.curves import Series
from pentameter.record.events import RunEnd, RunStart

MOST_SESSIONS = 200
"""Most sessions that are shown, the last ones."""
_LATEST = 1e11  # seconds since 1970, in the year 5138
_LONGEST_LAYOUT = 100


@dataclass(frozen=True)
class Session:
    """The part of a run from one start to the next, or to its end. Times are in seconds since the
    first session began. A frozen record."""

    first_step: int
    """The step from which it went on: that of its checkpoint, 0 without one."""
    last_step: int
    """The last step that it recorded."""
    begin: float
    """When it was ready for its first step."""
    end: float
    """When it recorded its last event."""
    n_nodes: int
    """Number of machines that trained."""
    n_ranks: int
    layout: str
    lost_steps: int = 0
    """Steps at its end that the next session made again."""
    lost_from: float = math.inf
    """Time from which on it made the lost steps; infinite if none were lost."""
    extends: bool = False
    """True if the session before had made all its planned steps, so that this one extends the run
    and nothing was interrupted."""

    @property
    def kept_until(self) -> float:
        """Time until which it made steps that were not made again."""
        return min(self.lost_from, self.end)


def pauses(sessions: Sequence[Session]) -> list[float]:
    """Return the seconds between each session and the next one, in which nothing was trained; NaN
    where the run was complete and was extended."""
    return [
        math.nan if after.extends else after.begin - before.end
        for before, after in itertools.pairwise(sessions)
    ]


def sessions_of(
    starts: Sequence[RunStart], times: Series, end: RunEnd | None, last_step: int
) -> tuple[Session, ...]:
    """Return a run's sessions, from its `start` and `resume` events, in order. Sessions are left
    out before the first event that has a time, since an earlier version did not write it.

    times: for each step that was not made again, when it was recorded, in seconds since 1970.
    end: the event that ended the run, None without one.
    last_step: the last step of the last session.
    """
    timed = list(itertools.dropwhile(lambda start: not math.isfinite(_time(start.time)), starts))
    if not timed:
        return ()
    zero = _time(timed[0].time)
    newest = max(times.values[-1:], default=zero)
    latest = newest if newest < _LATEST else zero
    latest = _later(latest, math.nan if end is None else _time(end.time))
    ended = RunStart(last_step, reached_step=last_step, reached_time=latest)
    found: list[Session] = []
    clock, planned = 0.0, None  # a machine's clock may jump back, a session does not
    for start, following in itertools.pairwise([*timed, ended]):
        begin = _later(clock, _time(start.time) - zero)
        clock = _later(begin, _time(following.reached_time) - zero)
        first = max(0, start.step)
        last = max(first, first if following.reached_step is None else following.reached_step)
        went_on = min(last, following.step) if following.step >= 0 else last
        session = Session(
            first, last, begin, clock, max(1, start.n_nodes or 1), max(1, start.world_size or 1),
            " ".join((start.layout or "").split())[:_LONGEST_LAYOUT], last - went_on,
            extends=extends(start, planned),
        )  # fmt: skip
        planned = start.steps
        if session.lost_steps:
            n_kept = bisect.bisect_right(times.steps, went_on)
            kept_until = times.values[n_kept - 1] - zero if n_kept else begin
            lost_from = kept_until if begin <= kept_until <= clock else begin
            session = replace(session, lost_from=lost_from)
        found.append(session)
    return tuple(found)


def extends(start: RunStart, planned: int | None) -> bool:
    """Return True if a start or resume extends a run: the session before it had made all its
    `planned` steps, and there are more now."""
    return planned is not None and start.step == planned


def _time(seconds: float | None) -> float:
    """Return `seconds` since 1970, or NaN if it is None or cannot be drawn."""
    return math.nan if seconds is None or not abs(seconds) < _LATEST else seconds


def _later(first: float, second: float) -> float:
    """Return the later of two times; the first one if the second is NaN."""
    return max(first, second) if math.isfinite(second) else first
