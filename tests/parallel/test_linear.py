"""Every matmul by a layer's weight is the arithmetic's, on one process and on layouts."""

from typing import Any

import pytest
import torch
from measured import configuration, constants, own_batch
from torch import Tensor, nn

from pentameter.config.choices import PRECISIONS
from pentameter.config.schema import LoraConfig
from pentameter.model.matmul import PLAIN, Matmul
from pentameter.parallel import precision
from pentameter.parallel.assemble import assemble
from pentameter.parallel.engine import Engine
from pentameter.parallel.gradients import local
from pentameter.parallel.linear import install_forwards
from pentameter.parallel.sources.adapters import add_adapters
from pentameter.parallel.sources.custom_outline import _adapted
from pentameter.planning.layouts.layout import parse_layout
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World

MODEL = {"n_layers": 2, "n_heads": 4, "d_ff": 16, "dropout": 0.0, "tied_head": False}
LLAMA = {**MODEL, "n_kv_heads": 2, "activation": "swiglu", "positions": "rotary"}
LORA = {"rank": 3, "alpha": 6.0}
SMALL_CHUNKS = {"pentameter.model.loss.MAX_LOGITS": 26}
RATE = 0.3


class Halved(Matmul):
    """Multiplies by half of each weight, in each of the three matmuls."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return super().linear(x, weight * 0.5, bias)

    def input_gradient(self, g: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        return super().input_gradient(g, weight * 0.5, total)

    def weight_gradient(self, g: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        return super().weight_gradient(g * 0.5, x, total)


def steps(engine: Engine, halved: frozenset[str]) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of two steps of gradient descent, and the gradients after the second. Of `halved`
    parameters the engine's are half as large, and those of their gradients twice."""
    losses = []
    for step in range(2):
        engine.zero_gradients()
        losses.append(engine.forward_backward(own_batch(engine, step), step).total)
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                if parameter.grad is not None:
                    rate = RATE * (0.25 if name in halved else 1.0)
                    local(parameter).sub_(local(parameter.grad), alpha=rate)
    found = {}
    for name, parameter in engine.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad * (0.5 if name in halved else 1.0)
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return losses, found


def trained(world: World, layout: str, model: Any, lora: Any, patches: Any, how: str) -> Any:
    """Two steps with `Halved`; or in fp64, of a model whose linear weights are half as large."""
    config = configuration(layout, model, {"precision": "fp64", "micro_batch_size": 2}, lora)
    plan = make_plan(config, world_size=world.size)
    with constants(patches), pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRECISIONS, "halved", PRECISIONS["fp64"])
        patch.setattr(precision, "MATMULS", {**precision.MATMULS, "halved": Halved()})
        engine = assemble(plan, torch.device("cpu"), how, compiled=False, world=world)
        if how == "halved":
            return steps(engine, frozenset())
        linear = {f"{n}.weight" for n, m in engine.model.named_modules() if type(m) is nn.Linear}
        adapters = {n for n, _ in engine.named_parameters() if ".lora_" in n}
        halved = frozenset(linear | adapters)
        with torch.no_grad():
            for name, parameter in engine.named_parameters():
                if name in halved:
                    parameter.mul_(0.5)
        return steps(engine, halved)


CASES = [
    ("data=1", MODEL, {}, {}),
    ("data=1", LLAMA, {}, SMALL_CHUNKS),
    ("data=1", MODEL, LORA, {}),
    ("tensor=2", LLAMA, {}, {}),
    ("tensor=2", MODEL, LORA, {}),
    ("tensor=2,sequence=1", MODEL, {}, SMALL_CHUNKS),
    ("pipeline=2", MODEL, {}, {}),
    ("tensor=2,pipeline=2,schedule=zero-bubble", MODEL, {}, {}),
    ("tensor=4,tensor_mode=2d", MODEL, {}, {}),
    pytest.param("tensor=8,tensor_mode=3d", MODEL, {}, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "model", "lora", "patches"), CASES)
def test_every_matmul_is_the_arithmetics(processes, layout, model, lora, patches):
    losses, gradients = trained(World(), "data=1", model, lora, patches, "fp64")
    size = parse_layout(layout).world_size
    arguments = (layout, model, lora, patches, "halved")
    results = processes.run(size, trained, *arguments)
    seen = set()
    for found, own in results:
        assert found == pytest.approx(losses, rel=1e-12)
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-9)
        seen |= own.keys()
    assert seen == gradients.keys()


def test_a_layer_of_ones_own_keeps_its_forward():
    """A subclass of Linear that computes something else is not a layer to multiply by."""

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input

    model = nn.Sequential(Own(2, 2), nn.Linear(2, 2, bias=False))
    x = torch.ones(1, 2)
    before = model(x)
    install_forwards(model, Halved(), {})
    assert torch.equal(model(x), before / 2)


def test_pytorch_s_own_layers_see_adapters_in_evaluation():
    """In evaluation a kernel would read the weights of an encoder's linear layers, and not call
    them."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    add_adapters(model, ["0.linear1", "0.linear2"], LoraConfig(rank=2))
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
    install_forwards(model, PLAIN, {})
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.train()(x))


def test_a_layer_that_is_never_called_gets_no_adapter():
    """PyTorch's attention reads the weight of its last layer, so that an adapter would not act."""
    whole = nn.ModuleDict({"block": nn.TransformerEncoderLayer(8, 2, 16)})
    config = configuration("data=1", MODEL, {}, lora=LORA)
    assert _adapted(whole, ["block"], config, "build") == ["block.linear1", "block.linear2"]
