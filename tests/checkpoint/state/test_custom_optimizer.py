"""What a custom optimizer keeps comes back: equal, of the same type, and one object where it was
one."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, namedtuple

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from pentameter.checkpoint.state.custom_optimizer import FILE_NAME, note_as_made
from pentameter.checkpoint.state.state_dicts import (
    load_optimizer_state,
    optimizer_state,
    optimizer_values,
)
from pentameter.errors import ConfigError

Pair = namedtuple("Pair", "first second")


class Own(torch.optim.Optimizer):
    """One with two groups, `settings` in both, and an attribute `kept`."""

    def __init__(self, kept=None, **settings):
        self.named = {"w": Parameter(torch.ones(2, 3)), "b": Parameter(torch.ones(3))}
        super().__init__(
            [{"params": [each]} for each in self.named.values()], {"lr": 0.1, **settings}
        )
        self.kept = kept
        note_as_made(self, self.named)

    def saved(self):
        tensors = optimizer_state(self, self.named.items())
        values = optimizer_values(self, self.named.items())[FILE_NAME]
        return {name: each.clone() for name, each in tensors.items()}, values

    def load(self, saved):
        tensors, values = saved
        load_optimizer_state(self, self.named.items(), tensors, values=values)
        return self


def test_equal_tensors_of_groups_stay_apart():
    saving = Own()
    for group, parameter in zip(saving.param_groups, saving.named.values(), strict=True):
        group["n"] = torch.zeros(())
        saving.state[parameter]["n"] = group["n"]
    saving.kept = saving.param_groups[0]["n"]
    resumed = Own().load(saving.saved())
    for group in resumed.param_groups:
        group["n"] += 1
    assert [group["n"].item() for group in resumed.param_groups] == [1, 1]
    assert resumed.kept is resumed.param_groups[0]["n"]
    for group, parameter in zip(resumed.param_groups, resumed.named.values(), strict=True):
        assert resumed.state[parameter]["n"] is group["n"]


def test_what_groups_have_in_common_stays_one():
    def make():
        shared = {"noise": torch.Generator().manual_seed(1), "seen": [], "k": torch.zeros(1)}
        return Own(**shared, n=1000)

    saving, whole = make(), make()
    for each in (saving, whole):
        for group in each.param_groups:
            torch.rand(1, generator=group["noise"])
            group["seen"].append(1)
    resumed = make().load(saving.saved())
    for group, undisturbed in zip(resumed.param_groups, whole.param_groups, strict=True):
        draws = [torch.rand(1, generator=each["noise"]) for each in (group, undisturbed)]
        assert draws[0] == draws[1]
        group["seen"].append(2)
        group["k"] += 1
    assert resumed.param_groups[0]["seen"] == [1, 1, 2, 2]
    assert resumed.param_groups[0]["k"] == 2


def test_what_came_after_a_checkpoint_goes_when_the_run_returns_to_it():
    optimizer = Own(seen=[])
    del optimizer.kept
    note_as_made(optimizer, optimizer.named)
    saved = optimizer.saved()
    optimizer.n = 5
    optimizer.param_groups[0]["k"] = 7
    optimizer.param_groups[0]["seen"].append(1)
    optimizer.load(saved)
    assert not hasattr(optimizer, "n")
    first, second = optimizer.param_groups
    assert "k" not in first
    assert first["seen"] == []
    assert first["seen"] is second["seen"]


KEPT = {
    "default": (defaultdict(dict), defaultdict(dict, {1: {"a": 2}})),
    "counter": (Counter(), Counter("aab")),
    "complex": (0j, 1 - 2j),
    "bytes": (b"", b"\0\xff"),
    "frozen": (frozenset(), frozenset({1, 2})),
    "double": (np.float64(0), np.float64(2.5)),
    "half": (np.float16(0), np.float16(2.5)),
    "truth": (1, True),
    "float": (1, 1.0),
    "sign": (0.0, -0.0),
    "array": (np.zeros(2, np.uint16), np.ones(2, np.uint16)),
}


@pytest.mark.parametrize("name", KEPT)
def test_values_come_back_in_their_types(name):
    made, changed = KEPT[name]
    saving = Own(made)
    saving.kept = changed
    resumed = Own(made).load(saving.saved()).kept
    assert type(resumed) is type(changed)
    assert repr(resumed) == repr(changed)
    assert getattr(resumed, "default_factory", None) == getattr(changed, "default_factory", None)


def test_tensors_in_a_defaultdict_come_back():
    saving = Own(defaultdict(dict))
    saving.kept["w"]["m"] = torch.tensor([1 + 2j, 3j]).conj()
    resumed = Own(defaultdict(dict)).load(saving.saved())
    assert torch.equal(resumed.kept["w"]["m"], torch.tensor([1 - 2j, -3j]))


@pytest.mark.parametrize("make", [random.Random, np.random.default_rng])
def test_draws_go_on(make):
    whole, saving = make(1), Own(make(1))
    assert saving.kept.random() == whole.random()
    assert Own(make(1)).load(saving.saved()).kept.random() == whole.random()


def holding_itself():
    found = []
    found.append(found)
    return found


class Known(list):
    """A container of a class that nobody else knows."""


@pytest.mark.parametrize(
    ("made", "changed", "said"),
    [
        (None, Pair(1, 2), "test_custom_optimizer.Pair"),
        (Known([1]), Known([2]), "test_custom_optimizer.Known"),
        (defaultdict(lambda: 1), defaultdict(lambda: 1, a=1), "a collections.defaultdict"),
        (np.longdouble(0), np.longdouble(1), "a numpy.longdouble"),
        (np.zeros(2, ">f4"), np.ones(2, ">f4"), "a numpy.ndarray"),
        (None, holding_itself(), "100 values within one another"),
    ],
)
def test_a_value_that_cannot_be_kept_is_refused_once_it_changes(made, changed, said):
    optimizer = Own(made)
    optimizer.saved()
    optimizer.kept = changed
    with pytest.raises(ConfigError, match=f"Own keeps kept.*{said}"):
        optimizer.saved()
