"""Events as lines: written, read back, and read from damaged and earlier files."""

import json
import math
from dataclasses import fields
from pathlib import Path

import pytest

from pentameter.record import events
from pentameter.record.events import (
    KINDS,
    ChoiceMetrics,
    EndKind,
    EvalMetrics,
    Event,
    OtherEvent,
    RunEnd,
    line_of,
    read_line,
    recorded,
)

SAMPLE = {"int": 3, "float": 0.5, "str": "words", "bool": False, "EndKind": EndKind.HOOK}
SAMPLE |= {"Path": Path("checkpoints/step-00000003"), "tuple[float, ...]": (1.0, 2.0)}


def of_kind(kind: type[Event]) -> Event:
    """An event with a value in each field."""
    given = {name: SAMPLE[of.removesuffix(" | None")] for name, of in recorded(kind).items()}
    return kind(**given, time=0.5)


@pytest.mark.parametrize("kind", [*KINDS.values(), ChoiceMetrics], ids=lambda kind: kind.__name__)
def test_an_event_is_read_as_it_was_written(kind):
    event = of_kind(kind)
    line = line_of(event, event.time)
    assert list(json.loads(line))[:2] == ["event", "step"]
    assert read_line(line.encode()) == event


@pytest.mark.parametrize("kind", [*KINDS.values(), ChoiceMetrics], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("damage", [None, "text", [], {}, 1e400, 2**70, True])
def test_damaged_values_are_unknown_and_harm_nothing(kind, damage):
    values = dict.fromkeys(of_kind(kind).values(), damage)
    found = read_line(json.dumps({"event": kind.EVENT, **values, "time": damage}).encode())
    assert type(found) is kind
    line_of(found, None).encode()
    for each in fields(kind):
        value = getattr(found, each.name)
        if isinstance(value, int):
            assert abs(value) < 2**63


def test_what_an_earlier_version_did_not_write_follows_from_the_rest():
    (end, evaluation, saved) = (
        read_line(json.dumps(record).encode())
        for record in (
            {"event": "end", "step": 7, "reason": "SIGTERM", "seconds": 2.0},
            {"event": "eval", "step": 7, "loss": 1.5},
            {"event": "checkpoint", "step": 7, "bytes": 8},
        )
    )
    assert repr(end) == repr(RunEnd(7, "SIGTERM", 2.0, EndKind.SIGNAL))  # NaN is no NaN's equal
    assert isinstance(evaluation, EvalMetrics)
    assert (evaluation.split, evaluation.loss) == ("val", 1.5)
    assert math.isnan(evaluation.perplexity)
    assert saved.path.name == "step-00000007"


def test_a_hooks_own_event_passes_through():
    line = line_of(OtherEvent(4, "weights", {"norm": 2.5, "split": "a"}), 1.0)
    assert json.loads(line) == {
        "event": "weights", "step": 4, "norm": 2.5, "split": "a", "time": 1.0,
    }  # fmt: skip
    assert read_line(line.encode()) == OtherEvent(4, "weights", {"norm": 2.5, "split": "a"}, time=1)


@pytest.mark.parametrize("line", [b"", b"{", b"[1]", b"3", b'{"step": 1}', b'{"event": 3}'])
def test_what_is_no_event_is_none(line):
    assert read_line(line) is None


def test_every_key_has_a_meaning_or_says_itself():
    from reference_pages import events_page

    bare = [row for row in events_page().splitlines() if row.endswith("|  |")]
    assert [row.split("`")[1] for row in bare] == ["learning_rate"]
    assert events.UNKNOWN < 0
