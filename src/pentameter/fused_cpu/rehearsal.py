"""A rehearsal of the fused step, before a run believes its kernels: one layer of each kind, with
drawn weights, in the run's own shapes and dtypes.

The C++ libraries are compared with PyTorch's operations, one sub-layer after another; the kernels
of `torch.compile` prove themselves as they are called for the first time (`model/compiled.py`). The
verdict is kept in the cache folder, so that another start finds it there.

Shapes: B batch rows, T sequence, D d_model, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import native
from pentameter.fused_cpu.functions import FoldedLinear
from pentameter.fused_cpu.kernels import CENTRED, NormKind
from pentameter.fused_cpu.step import (
    add_norm,
    attention_output,
    feed_forward_output,
    fused_loss_sum,
)
from pentameter.machine.capabilities import Capabilities
from pentameter.machine.kernel_checks import (
    LEVELS,
    Level,
    disagreement,
    key_of,
    recall,
    record,
    worst,
)
from pentameter.model.attention.attention import Attention
from pentameter.model.compiled import failures, hold, plainly, refused
from pentameter.model.dropout import dropout_keys
from pentameter.model.experts import Experts
from pentameter.model.feed_forward import MLP
from pentameter.model.gpt import GPT, Block
from pentameter.model.loss import exceeds_chunk
from pentameter.model.positions import rotation

MOST_REROUTED = 1e-3
"""Share of results in which a sub-layer of experts may differ: two experts with nearly the same
score may change places by a rounding."""


def rehearse(
    config: ModelConfig, dtype: torch.dtype, n_rows: int, capabilities: Capabilities
) -> dict[str, Level]:
    """Return what is not to be used as the compiler makes it, and how it is to be run instead, by
    the name of a C++ library or of a kernel of `torch.compile`: on this machine, for micro-batches
    of `n_rows` whole contexts and matmuls in `dtype`. Nothing is changed for good: call `settle`.

    Takes seconds beside what there is to compile, the first time; then the cache knows.
    """
    loaded = [name for name in native.FILES if native.is_loaded(name)]
    threads = torch.get_num_threads()
    key = key_of("fused step", config.model_dump_json(), dtype, n_rows, loaded, threads)
    if (verdict := recall(key)) is not None:
        levels: dict[str, Level] = verdict["levels"]
        return levels
    model = _shallow(config, dtype)
    levels = {}
    for name in loaded:
        others = [other for other in loaded if other != name]
        level = _library_level(name, others, model, dtype, n_rows, capabilities)
        record(key_of("library", key, name), f"{name} kernels", level)
        levels[name] = level
    _step(model, dtype, n_rows)
    levels = {name: level for name, level in (levels | refused()).items() if level != LEVELS[0]}
    if not failures():  # which may pass
        record(key, "fused step", LEVELS[0], levels=levels)
    return levels


def settle(everywhere: Sequence[Mapping[str, Level]], capabilities: Capabilities) -> str:
    """Run kernels and libraries from now on at the slowest level that any rank's `rehearse` has
    returned, so that all compute alike. Return a phrase to append to the reason for compiling."""
    levels: dict[str, Level] = {}
    for each in everywhere:
        for name, level in each.items():
            levels[name] = worst(level, levels.get(name, LEVELS[0]))
    hold({name: level for name, level in levels.items() if name not in native.FILES})
    said = []
    for name, level in sorted(levels.items()):
        if name in native.FILES:
            library: native.Name = "AMX" if name == "AMX" else "vector"
            if level == LEVELS[-1] or native.load(library, capabilities, level) is not None:
                native.unload(library)
        how = "left to PyTorch" if level == LEVELS[-1] else f"built with {level}"
        said.append(f"{name} {how}")
    return f"; not as this compiler makes them: {', '.join(said)}" if said else ""


def _library_level(
    name: native.Name,
    others: Sequence[native.Name],
    model: GPT,
    dtype: torch.dtype,
    n_rows: int,
    capabilities: Capabilities,
) -> Level:
    """Return the fastest level at which a loaded library agrees with PyTorch's operations in every
    sub-layer of `model`, the other libraries left out. It is loaded again as it was."""
    found = LEVELS[-1]
    for level in LEVELS[:-1]:
        if native.load(name, capabilities, level) is not None:
            break
        with plainly(), native.without(*others):
            wrong = next(
                filter(None, (_wrong(name, part) for part in _parts(model, dtype, n_rows))), None
            )
        if wrong is None:
            found = level
            break
        warnings.warn(f"the {name} kernels, built with {level}, are wrong: {wrong}", stacklevel=2)
    native.load(name, capabilities)
    return found


class _Part(NamedTuple):
    """A part of the fused step: its name, the function, the tensors that it is called with, the
    modules whose parameters it reads, and whether these are in training."""

    name: str
    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    modules: tuple[nn.Module, ...]
    training: bool
    may_differ: float = 0.0


def _wrong(name: native.Name, part: _Part) -> str | None:
    """Return a phrase that says how the loaded library's results of a part of the step, or their
    gradients, differ from PyTorch's; None if they agree."""
    results = _results(part)
    with native.without(name):
        expected = _results(part)
    wrong = disagreement(results, expected, may_differ=part.may_differ)
    return None if wrong is None else f"{part.name}: {wrong}"


def _results(part: _Part) -> list[Tensor]:
    """Return a part's outputs, and the gradients of its inputs and of all parameters it reads."""
    for module in part.modules:
        module.train(part.training)
    inputs = [x.detach().requires_grad_() for x in part.inputs]
    parameters = [p for module in part.modules for p in module.parameters()]
    outputs = part.function(*inputs)
    generator = torch.Generator().manual_seed(1)
    g = [torch.empty_like(y).normal_(generator=generator) for y in outputs]
    gradients = torch.autograd.grad(outputs, [*inputs, *parameters], g, allow_unused=True)
    return [*outputs, *(each for each in gradients if each is not None)]


def _parts(model: GPT, dtype: torch.dtype, n_rows: int) -> Iterator[_Part]:
    """Yield the parts of the fused step that a library may compute: attention and feed-forward
    layers, the ends of sub-layers, and the head unless its loss comes in chunks, by other
    operations. What evaluation computes otherwise, without dropout or a router's losses, is a part
    of its own."""
    for training in (True, False):
        yield from _layers(model, dtype, n_rows, training)
    config, weight = model.config, model.head_parameters()[0]
    if exceeds_chunk(n_rows * config.context_length, len(weight)):
        return
    generator = torch.Generator().manual_seed(4)
    size = n_rows, config.context_length, config.d_model
    h = torch.randn(size, generator=generator).to(dtype)
    scale = model.final_norm.get_parameter("weight")
    read = model.final_norm, model.token_embedding if config.tied_head else model.head
    yield _Part("head", lambda h: (FoldedLinear.apply(h, scale, weight),), (h,), read, True)


def _layers(model: GPT, dtype: torch.dtype, n_rows: int, training: bool) -> Iterator[_Part]:
    """Yield the parts of the model's blocks in training; or in evaluation, those that differ."""
    config, kind = model.config, NormKind(CENTRED[model.config.norm], model.config.norm_eps)
    T, D = config.context_length, config.d_model
    generator = torch.Generator().manual_seed(0)
    parameters = model.final_norm.get_parameter("weight").dtype
    x = torch.randn(n_rows, T, D, generator=generator, dtype=parameters)
    h, y = (torch.randn(x.shape, generator=generator).to(dtype) for _ in range(2))
    tables = rotation(torch.arange(T), config, parameters) or (None, None)
    sites = dropout_keys(config, 0, 0, range(n_rows)).transpose(0, 1).contiguous()
    for block in model.blocks.values():
        assert isinstance(block, Block)
        (norm, attention), (mlp_norm, mlp) = block.sub_layers()
        assert isinstance(attention, Attention)
        assert isinstance(mlp, MLP | Experts)
        keys = sites[attention.weights_dropout.site] if training else None
        if training or config.attention.dropout:
            yield _Part(
                "attention",
                lambda h, norm=norm, attention=attention, keys=keys: (
                    attention_output(h, norm, attention, config, keys, tables),
                ),
                (h,),
                (norm, attention),
                training,
            )
        if training or isinstance(mlp, Experts):
            yield _Part(
                "experts" if isinstance(mlp, Experts) else "feed-forward layer",
                lambda h, norm=mlp_norm, mlp=mlp: feed_forward_output(
                    h, norm, mlp, config.feed_forward.activation
                )[:1],
                (h,),
                (mlp_norm, mlp),
                training,
                MOST_REROUTED if isinstance(mlp, Experts) else 0.0,
            )
        bias, dropout = attention.out.bias, attention.dropout
        if training or config.dropout:
            yield _Part(
                "end of a sub-layer",
                lambda x, y, bias=bias, dropout=dropout: add_norm(
                    x, y, bias, dropout, sites, training, kind
                ),
                (x, y),
                (attention.out,),
                training,
            )


def _step(model: GPT, dtype: torch.dtype, n_rows: int) -> None:
    """Make a step's forward and backward pass, in which the kernels of `torch.compile` prove
    themselves."""
    config = model.train().config
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(2)
    size = n_rows, config.context_length
    tokens = torch.randint(config.vocab_size, size, generator=generator)
    keys = dropout_keys(config, 0, 0, range(n_rows))
    fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, dtype).backward()


def _shallow(config: ModelConfig, dtype: torch.dtype) -> GPT:
    """Return a model for matmuls in `dtype` with one layer of each kind, in training, whose weights
    are drawn, so that no result is 0 as those of new models may be."""
    with torch.device("meta"):
        model = GPT(config).to(torch.promote_types(dtype, torch.float32))
    kinds = set()
    for name in list(model.blocks):
        if (kind := config.experts.are_in(int(name))) in kinds:
            del model.blocks[name]
        kinds.add(kind)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() > 1
            size = parameter.shape[-1] ** -0.5 if is_matrix else 0.1
            middle = 1.0 if name.endswith("weight") and not is_matrix else 0.0
            parameter.normal_(middle, size, generator=generator)
        for buffer in model.buffers():
            buffer.zero_()
    return model.train()
