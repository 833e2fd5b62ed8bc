from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.state.state_dicts import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from pentameter.errors import CorruptError
from pentameter.optim.build import JointOptimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.head = nn.Linear(9, 11, bias=False)

    def forward(self, x):
        return self.head(self.up(self.embedding(x)).relu())


def build(kind, seed=0, reverse=False):
    torch.manual_seed(seed)
    net = Net()
    matrices = [value for value in net.parameters() if value.dim() > 1]
    others = [value for value in net.parameters() if value.dim() <= 1]
    if reverse:
        matrices.reverse()
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    make = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2),
        "fused": lambda: torch.optim.AdamW(groups, lr=1e-2, fused=True),
        "amsgrad": lambda: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
        "momentum": lambda: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-2),
        "muon": lambda: JointOptimizer(
            torch.optim.Muon(groups[:1], lr=1e-2), torch.optim.AdamW(groups[1:], lr=1e-2)
        ),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=1e-2),
    }[kind]
    return net, make()


def train(net, optimizer, n_steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        x = torch.randint(0, 11, (4, 5), generator=generator)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()


def through_disk(store, net, optimizer):
    tensors = {
        "model": model_state(net),
        "optimizer": optimizer_state(optimizer, net.named_parameters()),
    }
    store.save(Contents(1, tensors, {}, {}))
    checkpoint = store.latest()
    return checkpoint.tensors("model"), checkpoint.tensors("optimizer")


@pytest.mark.parametrize(
    "kind", ["adamw", "fused", "amsgrad", "momentum", "sgd", "rmsprop", "muon"]
)
@pytest.mark.parametrize("n_steps", [0, 3])
def test_training_continues_bit_for_bit(store, kind, n_steps):
    net, optimizer = build(kind)
    train(net, optimizer, n_steps, seed=1)
    model, state = through_disk(store, net, optimizer)
    net_2, optimizer_2 = build(kind, seed=5, reverse=True)  # order of parameters is no matter
    if n_steps:
        train(net_2, optimizer_2, 1, seed=9)  # what was there before is replaced
    load_model_state(net_2, model)
    load_optimizer_state(optimizer_2, net_2.named_parameters(), state)
    del model, state
    for each in ((net, optimizer), (net_2, optimizer_2)):
        train(*each, 4, seed=2)
    for (name, ours), theirs in zip(net.named_parameters(), net_2.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_names_are_parameter_and_slot(store):
    net, optimizer = build("adamw")
    train(net, optimizer, 2, seed=1)
    state = optimizer_state(optimizer, net.named_parameters())
    assert set(state) == {
        f"{name}.{slot}"
        for name, _ in net.named_parameters()
        for slot in ("step", "exp_avg", "exp_avg_sq")
    }
    assert state["up.weight.step"].item() == 2


def test_parts_of_a_joint_optimizer_keep_slots_of_their_own():
    net, optimizer = build("muon")
    assert optimizer_state(optimizer, net.named_parameters()) == {}
    train(net, optimizer, 2, seed=1)
    state = optimizer_state(optimizer, net.named_parameters())
    matrices = {"embedding.weight", "up.weight", "head.weight"}
    assert set(state) == {f"{name}.momentum_buffer" for name in matrices} | {
        f"up.bias.{slot}" for slot in ("step", "exp_avg", "exp_avg_sq")
    }


def test_a_joint_state_that_does_not_fit_leaves_every_part_as_it_was():
    net, optimizer = build("muon")
    train(net, optimizer, 2, seed=1)
    state = optimizer_state(optimizer, net.named_parameters())
    for change, message in [
        (lambda s: s.pop("up.bias.step"), r"missing: up\.bias\.step"),
        (lambda s: [s.pop(n) for n in state if n.startswith("up.bias")], "missing"),
        (lambda s: s.update({"x.step": torch.tensor(1.0)}), r"unexpected: x\.step"),
        (lambda s: s.update({"up.bias.exp_avg": torch.zeros(2)}), r"up\.bias\.exp_avg is \(2,\)"),
        (lambda s: s.update({"up.bias.momentum_buffer": torch.zeros(9)}), "AdamW keeps"),
        (lambda s: s.update({"up.weight.exp_avg": torch.zeros(9, 6)}), "Muon keeps"),
    ]:
        wrong = {name: tensor + 1 for name, tensor in state.items()}
        change(wrong)
        before = {name: tensor.clone() for name, tensor in state.items()}
        with pytest.raises(CorruptError, match=message):
            load_optimizer_state(optimizer, net.named_parameters(), wrong)
        now = optimizer_state(optimizer, net.named_parameters())
        assert all(torch.equal(now[name], before[name]) for name in before)
    other, adamw = build("adamw")
    with pytest.raises(CorruptError, match="another optimizer"):
        load_optimizer_state(adamw, other.named_parameters(), state)


def test_plain_and_fused_read_each_others_state():
    net, optimizer = build("adamw")
    train(net, optimizer, 2, seed=1)
    net_2, optimizer_2 = build("fused")
    state = optimizer_state(optimizer, net.named_parameters())
    load_optimizer_state(optimizer_2, net_2.named_parameters(), state)
    again = optimizer_state(optimizer_2, net_2.named_parameters())
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert not any(
        again[name].data_ptr() == state[name].data_ptr() for name in state if "step" not in name
    )


def broken(change):
    net, optimizer = build("adamw")
    train(net, optimizer, 2, seed=1)
    state = optimizer_state(optimizer, net.named_parameters())
    change(state)
    before = copy.deepcopy(optimizer.state_dict())
    try:
        load_optimizer_state(optimizer, net.named_parameters(), state)
    finally:
        after = optimizer.state_dict()
        for number, slots in before["state"].items():
            for slot, value in slots.items():
                assert torch.equal(after["state"][number][slot], value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("up.bias.step"), r"missing: up\.bias\.step"),
        (lambda s: [s.pop(f"up.bias.{x}") for x in ("step", "exp_avg", "exp_avg_sq")], "missing"),
        (lambda s: s.update({"x.step": torch.tensor(1.0)}), r"unexpected: x\.step"),
        (lambda s: s.update({"up.bias.exp_avg": torch.zeros(2)}), r"up\.bias\.exp_avg is \(2,\)"),
        (lambda s: s.update({"up.bias.momentum_buffer": torch.zeros(9)}), "another optimizer"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_whole(change, message):
    with pytest.raises(CorruptError, match=message):
        broken(change)


def test_another_optimizers_state_is_refused():
    net, adamw = build("adamw")
    train(net, adamw, 1, seed=1)
    state = optimizer_state(adamw, net.named_parameters())
    for kind in ("sgd", "momentum"):
        other, optimizer = build(kind)
        with pytest.raises(CorruptError, match="another optimizer"):
            load_optimizer_state(optimizer, other.named_parameters(), state)


def test_a_parameter_without_state_beside_others_is_refused_when_saving():
    net, optimizer = build("adamw")
    net.up.bias.requires_grad_(False)
    train(net, optimizer, 1, seed=1)
    with pytest.raises(ValueError, match=r"uneven; .*: up\.bias"):
        optimizer_state(optimizer, net.named_parameters())
    with pytest.raises(ValueError, match="have a name"):
        optimizer_state(optimizer, [("up.weight", net.up.weight)])


def test_a_model_state_must_fit_exactly():
    net = Net()
    state = {name: tensor.clone() for name, tensor in model_state(net).items()}
    before = net.up.bias.clone()
    changed = {**state, "up.bias": torch.ones(9)}
    for wrong, message in [
        ({k: v for k, v in changed.items() if k != "head.weight"}, r"missing: head\.weight"),
        ({**changed, "extra": torch.ones(1)}, "unexpected: extra"),
        ({**changed, "head.weight": torch.ones(11, 8)}, r"head\.weight is \(11, 8\)"),
        ({**changed, "head.weight": torch.ones(11, 9).double()}, "float64"),
    ]:
        with pytest.raises(CorruptError, match=message):
            load_model_state(net, wrong)
        assert torch.equal(net.up.bias, before)
    load_model_state(net, changed)
    assert torch.equal(net.up.bias, torch.ones(9))


def test_tied_weights_stay_tied(store):
    net = Net()
    net.embedding = nn.Embedding(11, 9)
    net.head.weight = net.embedding.weight
    assert {"embedding.weight", "head.weight"} <= model_state(net).keys()
    store.save(Contents(1, {"model": model_state(net)}, {}, {}))
    other = Net()
    other.embedding = nn.Embedding(11, 9)
    other.head.weight = other.embedding.weight
    load_model_state(other, store.latest().tensors("model"))
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, net.head.weight)
