"""Which nodes train together next, decided from what they have written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pentameter.processes.nodes.attempts import (
    Attempt,
    Rules,
    next_attempt,
    read_attempt,
    write_attempt,
)
from pentameter.processes.nodes.roll import Node, reachable_group

RULES = Rules(least=1, most=4, n_restarts=2)


def nodes(*names, apart=(), **changes):
    """Nodes by name that reach each other, but for the pairs in `apart`."""
    return {
        name: Node(
            name=name, host=f"host-{name}", address=f"10.0.0.{number}", ping_port=1, store_port=7,
            n_processes=2,
            reaches=tuple(n for n in names if n != name and {n, name} not in map(set, apart)),
            **changes,
        )
        for number, name in enumerate(names)
    }  # fmt: skip


def decide(now, present, *, settled=True, progress="", rules=RULES):
    return next_attempt(now, present, rules, settled=settled, progress=progress)


def running(*names, **changes):
    return Attempt(3, "running", names, (2,) * len(names), "10.0.0.0:7", **changes)


def at_work(present, number=3):
    return {name: replace(n, attempt=number, state="running") for name, n in present.items()}


def test_nodes_that_come_together_begin_together():
    present = nodes("a", "b", "c")
    assert decide(Attempt(), present, settled=False) == Attempt()  # others may be on their way
    begun = decide(Attempt(), present)
    assert (begun.number, begun.state, begun.members) == (1, "running", ("a", "b", "c"))
    assert begun.n_processes == (2, 2, 2)
    assert begun.store == "10.0.0.0:7"  # where rank 0 is
    four = decide(Attempt(), nodes(*"abcd"), settled=False)
    assert four.members == tuple("abcd")  # more cannot come
    assert decide(Attempt(), nodes(*"abcde")).members == tuple("abcd")
    few = Rules(least=2, most=4, n_restarts=2)
    assert decide(Attempt(), nodes("a"), rules=few) == Attempt()


def test_an_attempt_goes_on_while_all_are_well():
    now, present = running("a", "b"), at_work(nodes("a", "b"))
    assert decide(now, present) is now


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda p: {"a": p["a"]}, "1 of 2 nodes gone"),
        (
            lambda p: {**p, "b": replace(p["b"], state="lost", message="rank 2 was killed")},
            "host-b (10.0.0.1): rank 2 was killed",
        ),
        (lambda p: {**p, "b": replace(p["b"], reaches=())}, "out of reach: 1 node, host-b"),
        (lambda p: {**p, "b": replace(p["b"], state="idle")}, "two nodes have decided at once"),
    ],
)
def test_a_loss_ends_it_and_those_that_are_left_go_on(change, reason):
    now = running("a", "b", progress="step-5")
    present = change(at_work(nodes("a", "b")))
    over = decide(now, present)
    assert over.state == "over"
    assert reason in over.reason
    assert decide(over, present, progress="step-5") is over  # a still has its processes
    idle = {name: replace(node, state="idle") for name, node in present.items()}
    again = decide(over, idle, progress="step-5")
    assert (again.number, again.state, again.n_lost) == (4, "running", 1)
    assert again.members == tuple(node.name for node in reachable_group(idle))


def test_too_many_losses_without_a_checkpoint_end_the_run():
    lost = replace(running("a", progress="step-5"), state="over", exit_code=70, n_lost=2)
    lost = replace(lost, reason="rank 0 was killed")
    failed = decide(lost, nodes("a"), progress="step-5")
    assert failed.is_final
    assert failed.exit_code == 70
    assert failed.reason == "rank 0 was killed; lost 3 times without a new checkpoint"
    assert decide(lost, nodes("a"), progress="step-6").n_lost == 1


def test_the_end_after_too_many_losses_has_the_code_of_the_last_one():
    present = at_work(nodes("a"))
    held = {"state": "lost", "exit_code": 73, "message": "in use by process 7 on b"}
    present["a"] = replace(present["a"], **held)
    over = decide(running("a", n_lost=2), present)
    failed = decide(over, present)
    assert (failed.state, failed.exit_code) == ("failed", 73)
    assert "in use by process 7 on b" in failed.reason


def test_an_error_that_would_come_again_ends_the_run():
    present = at_work(nodes("a", "b"))
    present["b"] = replace(present["b"], state="failed", message="too large", exit_code=2)
    failed = decide(running("a", "b"), present)
    assert (failed.state, failed.reason, failed.exit_code) == ("failed", "too large", 2)


def test_all_done_is_complete():
    present = {n: replace(node, state="done") for n, node in at_work(nodes("a", "b")).items()}
    assert decide(running("a", "b"), present).state == "complete"
    present["b"] = replace(present["b"], state="running")
    assert decide(running("a", "b"), present).state == "running"


def test_a_node_that_comes_is_taken_in_after_a_save():
    now, present = running("a", "b"), {**nodes("a", "b", "c"), **at_work(nodes("a", "b"))}
    present = {
        name: replace(n, reaches=tuple("abc".replace(name, ""))) for name, n in present.items()
    }
    assert decide(now, present, settled=False) is now
    assert decide(now, present, rules=Rules(1, 2, 2)) is now  # there are enough
    stopping = decide(now, present)
    assert stopping.state == "stopping"
    assert "taking in 1 node, host-c" in stopping.reason
    assert decide(stopping, present) is stopping
    present["a"] = replace(present["a"], state="stopped")
    assert decide(stopping, present) is stopping  # b is still saving
    present["b"] = replace(present["b"], state="stopped")
    over = decide(stopping, present)
    assert (over.state, over.exit_code) == ("over", 0)
    again = decide(over, present)
    assert (again.members, again.n_lost) == (("a", "b", "c"), 0)


def test_a_node_that_only_some_can_reach_is_not_taken_in():
    present = nodes("a", "b", "c", apart=[("b", "c")])
    present = {**present, **{n: node for n, node in at_work(present).items() if n != "c"}}
    now = running("a", "b")
    assert decide(now, present) is now


def test_who_leaves_is_not_taken_again():
    present = nodes("a", "b")
    present["b"] = replace(present["b"], state="leaving")
    assert decide(replace(running("a", "b"), state="over"), present).members == ("a",)


def test_the_largest_group_that_reach_each_other():
    names = [each.name for each in reachable_group(nodes(*"abcd", apart=[("a", "d"), ("b", "d")]))]
    assert names == ["a", "b", "c"]
    assert [each.name for each in reachable_group(nodes("a", "b", apart=[("a", "b")]))] == ["a"]
    one_way = nodes("a", "b", "c")
    one_way["a"] = replace(one_way["a"], reaches=())
    assert [each.name for each in reachable_group(one_way)] == ["b", "c"]


def test_an_attempt_is_read_as_it_was_written(tmp_path):
    assert read_attempt(tmp_path) == Attempt()
    write_attempt(tmp_path, running("a", "b", reason="x"))
    assert read_attempt(tmp_path) == running("a", "b", reason="x")
    (tmp_path / "attempt.json").write_text("{")
    assert read_attempt(tmp_path) == Attempt()
    before = running("a")
    assert read_attempt(tmp_path, before) == before
    (tmp_path / "attempt.json").unlink()  # or all of the folder is away
    assert read_attempt(tmp_path, before) == before
