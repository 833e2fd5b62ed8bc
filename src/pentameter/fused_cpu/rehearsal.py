"""A rehearsal of the fused step, before a run relies on its kernels: one layer of each kind, with
drawn weights, in the run's own shapes and dtypes.

The C++ libraries are compared with PyTorch's operations, one sub-layer after another; the kernels
of `torch.compile` are checked as they are called for the first time (`model/compiled.py`). The
result is kept in the cache folder, where the next start finds it.

A *level* says how a library or kernel is built or run: LEVELS lists them, from the compiler's
default over less optimization to PyTorch's own operations.

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
from pentameter.fused_cpu.functions import EmbeddingDropout, Norm
from pentameter.fused_cpu.kernels import CENTRED, NormKind
from pentameter.fused_cpu.step import (
    add_norm,
    attention_output,
    feed_forward_output,
    fused_loss_sum,
    head_loss_sum,
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
from pentameter.model import loss
from pentameter.model.attention.attention import Attention
from pentameter.model.compiled import failures, hold, plainly, refused
from pentameter.model.dropout import dropout_keys
from pentameter.model.experts import Experts
from pentameter.model.feed_forward import MLP
from pentameter.model.gpt import GPT, Block
from pentameter.model.positions import rotation

MOST_REROUTED = 1e-3
"""Fraction of results in which a sub-layer of experts may differ: two experts with nearly the same
score may change places by a rounding."""


def rehearse(
    config: ModelConfig, dtype: torch.dtype, n_rows: int, capabilities: Capabilities
) -> dict[str, Level]:
    """Check the C++ libraries and the kernels of `torch.compile` against PyTorch's own operations,
    for micro-batches of `n_rows` whole contexts with matmuls in `dtype`. Return, by name, the level
    of optimization for each that must not run at the default level on this machine. Nothing is
    changed for good: `settle` applies the levels.

    The first time it takes seconds, besides compiling; then the result comes from the cache.
    """
    loaded = [name for name in native.DTYPES if native.is_loaded(name)]
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
    """Set kernels and libraries to the slowest level that any rank's `rehearse` has returned for
    them (`everywhere` has one result per rank), so that all ranks compute alike. Return a phrase to
    append to the reason for compiling, empty if all run at the default level."""
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
    """Return the fastest level at which a library agrees with PyTorch's operations in every
    sub-layer of `model`, while the `others` are unloaded. At the end the library is loaded at the
    default level again."""
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
    """One part of the fused step that is checked by itself: its name, the function, the tensors
    that it is called with, the modules whose parameters it reads, whether these are in training
    mode, and the fraction of results that may differ."""

    name: str
    function: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    modules: tuple[nn.Module, ...]
    training: bool
    may_differ: float = 0.0


def _wrong(name: native.Name, part: _Part) -> str | None:
    """Return a phrase that says how the results of a part of the step, or their gradients, differ
    between the loaded library and PyTorch; None if they agree."""
    results = _results(part)
    with native.without(name):
        expected = _results(part)
    wrong = disagreement(results, expected, may_differ=part.may_differ)
    return None if wrong is None else f"{part.name}: {wrong}"


def _results(part: _Part) -> list[Tensor]:
    """Return a part's outputs, and the gradients of its inputs and of all parameters that it reads
    and that are trained; a bias that balances a router is not."""
    for module in part.modules:
        module.train(part.training)
    inputs = [x.detach().requires_grad_() for x in part.inputs]
    parameters = [p for module in part.modules for p in module.parameters() if p.requires_grad]
    outputs = part.function(*inputs)
    generator = torch.Generator().manual_seed(1)
    g = [torch.empty_like(y).normal_(generator=generator) for y in outputs]
    gradients = torch.autograd.grad(outputs, [*inputs, *parameters], g, allow_unused=True)
    return [*outputs, *(each for each in gradients if each is not None)]


def _parts(model: GPT, dtype: torch.dtype, n_rows: int) -> Iterator[_Part]:
    """Yield the parts of the fused step that a library may compute: attention and feed-forward
    layers, the ends of sub-layers, and what stands before and after the blocks. Parts that
    evaluation computes in another way, without dropout or a router's losses, come once more for
    evaluation."""
    for training in (True, False):
        yield from _layers(model, dtype, n_rows, training)
    yield from _ends(model, dtype, n_rows)


def _ends(model: GPT, dtype: torch.dtype, n_rows: int) -> Iterator[_Part]:
    """Yield the parts before and after the blocks: the first norm, dropout on the embeddings, and
    the head with its loss. A loss in chunks is computed for as many tokens as make two of them."""
    config, weight = model.config, model.head_parameters()[0]
    assert config.vocab_size is not None
    kind = NormKind(CENTRED[config.norm], config.norm_eps)
    generator = torch.Generator().manual_seed(4)
    size = n_rows, config.context_length, config.d_model
    x = torch.randn(size, generator=generator, dtype=weight.dtype)
    yield _Part("norm", lambda x: (Norm.apply(x, kind, dtype),), (x,), (), True)
    if (p := model.embedding_dropout.p) > 0:
        sites = dropout_keys(config, 0, 0, range(n_rows)).transpose(0, 1).contiguous()
        keys = sites[model.embedding_dropout.site]
        yield _Part("dropout", lambda x: (EmbeddingDropout.apply(x, keys, p),), (x,), (), True)
    if loss.exceeds_chunk(n_rows * config.context_length, len(weight)):
        size = 1, loss.MAX_LOGITS // len(weight) + 1, config.d_model
    h = torch.randn(size, generator=generator).to(dtype)
    targets = torch.randint(-1, config.vocab_size, size[:2], generator=generator)
    read = model.final_norm, model.token_embedding if config.tied_head else model.head
    yield _Part("head", lambda h: (head_loss_sum(h, model, targets),), (h,), read, True)


def _layers(model: GPT, dtype: torch.dtype, n_rows: int, training: bool) -> Iterator[_Part]:
    """Yield the parts of the model's blocks: all of them if `training`, else only those that
    evaluation computes in another way."""
    config, kind = model.config, NormKind(CENTRED[model.config.norm], model.config.norm_eps)
    T, D = config.context_length, config.d_model
    generator = torch.Generator().manual_seed(0)
    parameters = model.final_norm.get_parameter("weight").dtype
    x = torch.randn(n_rows, T, D, generator=generator, dtype=parameters)
    h, y = (torch.randn(x.shape, generator=generator).to(dtype) for _ in range(2))
    tables = rotation(torch.arange(T), config, parameters, T) or (None, None)
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
    """Run one forward and backward pass of the fused step, in which the kernels of `torch.compile`
    check themselves."""
    config = model.train().config
    assert config.vocab_size is not None
    generator = torch.Generator().manual_seed(2)
    size = n_rows, config.context_length
    tokens = torch.randint(config.vocab_size, size, generator=generator)
    keys = dropout_keys(config, 0, 0, range(n_rows))
    fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, dtype).backward()


def _shallow(config: ModelConfig, dtype: torch.dtype) -> GPT:
    """Return a model in training mode, for matmuls in `dtype`, with one layer of each kind. All its
    weights are drawn: in a new model some are 0, and so would be results."""
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
