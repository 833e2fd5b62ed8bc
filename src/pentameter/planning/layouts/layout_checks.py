"""Checks that a layout fits a model and a step; each refusal names the possible values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import Config, LoraConfig, ModelConfig, TrainConfig
from pentameter.errors import ConfigError, divisors, either, listed
from pentameter.planning.architecture import Axis
from pentameter.planning.gpt import sub_layers
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.sharding import Sharding, shard_size, sharding_of
from pentameter.planning.outline import ModelOutline

MOST_PASSES = 1 << 16
"""Maximum forward passes to fill a pipeline: its ranks × stages. Planning simulates about eight
times as many, at a few hundred thousand per second."""


def check_layout(layout: Layout, config: Config, local_size: int | None = None) -> None:
    """Raise ConfigError if the layout cannot shard the built-in GPT, its experts or its adapters,
    naming the possible values.

    `local_size` is the rank count per machine, which `tensor` must divide; None if not known.
    """
    model, sharding = config.model, sharding_of(layout, config.model)
    if (obstacle := model_obstacle(model, layout)) is not None:
        raise ConfigError(obstacle)
    if (matmuls := config.train.matmuls) is not None and layout.tensor > 1:
        raise ConfigError(
            f"train.matmuls={matmuls!r} scales each row of a matrix by its largest number, which "
            f"may lie in another process with parallel.tensor={layout.tensor}; use data, zero, "
            "pipeline, context or expert in its place, or leave train.matmuls out"
        )
    if layout.is_grid:
        _check_grid(layout, model)
    else:
        for dimension in sharding.sharding_dimensions:
            _check_even_shards(sharding, model, dimension)
    _check_places(sharding, model, local_size)
    if layout.turns_back and model.tied_head:  # the V's first and last stage are on one rank
        held = "holds the embedding and the tied head on one process"
        _check_tied_replicas(layout, held, "parallel.zero to 0, model.tied_head to false")
    _check_adapters(config.lora, layout, sharding.kv_replicas)


def check_custom_layout(
    layout: Layout, config: Config, outline: ModelOutline, local_size: int | None
) -> None:
    """Raise ConfigError if the layout cannot shard a custom model, naming the `OwnModel` argument
    that it lacks. `outline` holds the model's parameters and the arguments that it was given;
    `local_size` is the rank count per machine, which `tensor` must divide, or None if not known."""
    _check_places(sharding_of(layout, config.model), config.model, local_size)
    whose = f"the module that {outline.built_by} builds"
    _check_adapters(config.lora, layout)
    for key, usual in (("matmuls", None), ("stream", "weights")):
        if (asked := getattr(config.train, key)) != usual:
            raise ConfigError(f"train.{key}={asked!r} is of the built-in model, not {whose}")
    if layout.context > 1:
        raise ConfigError(
            f"parallel.context={layout.context} splits each sequence, and {whose} mixes its "
            "positions (by attention, say) in code that would have to ask other processes for "
            "theirs; set it to 1, or use parallel.sequence, which splits it between the layers"
        )
    if layout.is_grid:
        raise ConfigError(
            f"{layout.grid_setting} splits activations by row and width, so "
            f"that each operation between two matmuls of {whose}, a norm or a softmax, would have "
            "to be a distributed one; use '1d'"
        )
    if layout.shards_experts:
        raise ConfigError(
            f"{_expert_setting(layout)} sends tokens to the experts of the built-in model, and "
            f"{whose} keeps its own to itself; leave it out"
        )
    if layout.tensor > 1 and "tensor" not in outline.divided_by:
        raise ConfigError(
            f"parallel.tensor={layout.tensor}: {whose} does not say which of its matrices are "
            "divided, and how; give pm.OwnModel a `tensor_table`, or use data, zero"
        )
    if layout.pipeline > 1 and "pipeline" not in outline.divided_by:
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline}: {whose} does not say what a slice of its layers "
            "is; give pm.OwnModel a `slice`, or use data, zero"
        )
    if config.parallel.partition != "uniform":
        raise ConfigError(
            f"parallel.partition='{config.parallel.partition}' weighs layers by their operations, "
            f"which are not known of {whose}; use 'uniform'"
        )
    if layout.zero and (scalars := [spec.name for spec in outline.table if not spec.shape]):
        raise ConfigError(
            f"parallel.zero={layout.zero} divides parameters by their first dimension, and "
            f"{scalars[0]} of {whose} has none; make it a vector of one number"
        )
    if config.optimizer.name == "muon" and not any(
        spec.is_orthogonalized for spec in outline.table
    ):
        raise ConfigError(
            f"optimizer.name='muon' takes the matrices of blocks, and {whose} names none; give "
            "pm.OwnModel `blocks`, like 'blocks.*', or use 'adamw'"
        )
    how = config.train.activation_checkpoint
    if how is not None and not outline.recomputes:
        raise ConfigError(
            f"train.activation_checkpoint='{how}' computes sub-modules again, and {whose} names "
            "none; give pm.OwnModel `blocks`, like 'blocks.*'"
        )


def adapters_obstacle(lora: LoraConfig, layout: Layout, kv_replicas: int) -> str | None:
    """Return, as text with the reason, the layout's first setting under which adapters (LoRA)
    cannot be trained; None if they can be, or if there are none. Obstacles are a tensor mode other
    than 1d, `kv_replicas` above 1, and a schedule that splits the backward pass. `kv_replicas` is
    the number of tensor-parallel ranks that compute the same key and value head."""
    if lora.rank is None:
        return None
    if layout.is_grid:
        return f"{layout.grid_setting}, whose products know no adapters; use '1d'"
    if kv_replicas > 1:
        return (
            f"parallel.tensor={layout.tensor}, of which {kv_replicas} processes compute the "
            "same keys and values, each by its own rows; lower it"
        )
    if layout.splits_backward:
        return (
            f"parallel.schedule='{layout.schedule}', which computes the gradients of weights "
            "apart, and most have none; use '1f1b' or another"
        )
    return None


def model_obstacle(model: ModelConfig, layout: Layout) -> str | None:
    """Return, as a sentence that names both settings, why the model's experts, sinks or latent
    attention cannot be trained under the layout; None if they can be. Whether degrees divide the
    sizes is checked elsewhere."""
    if (obstacle := _experts_obstacle(model, layout)) is not None:
        has = " is not set, which" if model.experts.count is None else f"={model.experts.count}"
        return f"model.experts.count{has} is not possible with {obstacle}"
    if model.attention.sinks and layout.is_grid:
        return (
            f"model.attention.sinks=true is not possible with {layout.grid_setting}, which would "
            "shard the numbers of the heads in another way than the heads; use '1d'"
        )
    if model.attention.type == "latent" and layout.is_grid:
        return (
            f"model.attention.type='latent' is not possible with {layout.grid_setting}, which "
            "shards the width of the residual stream that latents are computed from, and would "
            "have to shard theirs; use '1d'"
        )
    return None


def _experts_obstacle(model: ModelConfig, layout: Layout) -> str | None:
    """Return, as text with the reason, the first setting under which the model's experts cannot be
    trained in this layout; None if they can be. With experts, the obstacles are a tensor mode other
    than 1d, and an expert capacity together with `context` above 1 or `sequence`. Without experts,
    the only one is a layout that shards them (`expert` or `expert_tensor` above 1). Whether a
    degree divides the sizes is not checked here."""
    if model.experts.count is None:
        if layout.shards_experts:
            return f"{_expert_setting(layout)}, which shards experts; leave it out"
        return None
    if layout.is_grid:
        return (
            f"{layout.grid_setting}, which shards the width of the residual stream that a router "
            "reads; use '1d'"
        )
    if model.experts.capacity is not None and (layout.context > 1 or layout.sequence):
        setting = f"context={layout.context}" if layout.context > 1 else "sequence=true"
        return (
            f"model.experts.capacity={model.experts.capacity} under parallel.{setting}: an expert "
            "takes the first tokens of a sequence, of which each process has a part; leave one out"
        )
    return None


def _expert_setting(layout: Layout) -> str:
    """Return the layout's first degree of experts above 1 as a setting for error messages, such as
    `parallel.expert=4`."""
    name = "expert" if layout.expert > 1 else "expert_tensor"
    return f"parallel.{name}={getattr(layout, name)}"


def _check_adapters(lora: LoraConfig, layout: Layout, kv_replicas: int = 1) -> None:
    """Raise ConfigError if adapters (LoRA) cannot be trained under the layout, naming the setting.
    `kv_replicas` is the number of tensor-parallel ranks that compute the same key and value
    head."""
    if (obstacle := adapters_obstacle(lora, layout, kv_replicas)) is not None:
        raise ConfigError(f"lora.rank={lora.rank} is not possible with {obstacle}")


def check_tied_within(
    layout: Layout, stage_names: Sequence[frozenset[str]], tied: Mapping[str, Sequence[int]]
) -> None:
    """Raise ConfigError if ZeRO would shard a parameter that two pipeline stages on one rank hold.
    `stage_names` are each stage's parameter names; `tied` maps parameters in several stages to the
    `pipeline` coordinates that hold them."""
    for name, holders in tied.items():
        if len(holders) < sum(name in own for own in stage_names):
            stages = f"with {layout.virtual_stages} stages a process"
            _check_tied_replicas(layout, f"{stages} holds two copies of {name} on one of them")


def _check_tied_replicas(layout: Layout, held: str, remedy: str = "parallel.zero to 0") -> None:
    """Raise ConfigError if the layout uses ZeRO, which would shard a tied parameter twice. For the
    message, `held` names the replicas on one rank, and `remedy` the settings to change."""
    if layout.zero:
        raise ConfigError(
            f"parallel.schedule='{layout.schedule}' {held}, where parallel.zero={layout.zero} "
            f"would shard it twice; set {remedy}, or use another schedule"
        )


def divides_heads(model: ModelConfig, tensor: int) -> bool:
    """Return whether `tensor` tensor-parallel ranks can have equally many query heads each. Key and
    value heads do not count: they are replicated if there are fewer than ranks."""
    return all(size % tensor == 0 for size in _even_sizes(model)["heads"].values())


def check_passes(layout: Layout, train: TrainConfig) -> None:
    """Raise ConfigError if the training passes do not fit the layout. That is so if the schedule
    splits the backward pass and activation checkpointing is on, if compilation is requested and the
    layout prevents it, or if `train.check_every` is set and data-parallel replicas do not compute
    independently."""
    if layout.splits_backward and train.activation_checkpoint is not None:
        # PyTorch calls autograd once per weight group, and each call would recompute its block.
        raise ConfigError(
            f"train.activation_checkpoint='{train.activation_checkpoint}' computes again what a "
            f"single backward pass needs, and parallel.schedule='{layout.schedule}' splits it into "
            "many; leave it out, or use another schedule"
        )
    obstacle = compile_obstacle(layout)
    if train.compile is True and obstacle is not None:
        raise ConfigError(f"train.compile=true is not possible: {obstacle}; set it to 'auto'")
    if train.check_every is not None and (layout.shards_experts or layout.is_3d):
        mixes = "parallel.tensor_mode=3d computes attention and matmuls for other rows"
        if layout.shards_experts:
            mixes = f"{_expert_setting(layout)} has the rows of all ranks in each expert's sums"
        raise ConfigError(
            f"train.check_every={train.check_every} has two copies compute the same gradients, and "
            f"{mixes}, so that they need not be equal to the bit; set it to none, and "
            "train.check_copies instead"
        )


def may_compile(layout: Layout, train: TrainConfig) -> bool:
    """Return whether a run with this layout compiles its training steps if it is long enough and
    has a compiler. It does unless `train.compile` is false or the schedule splits the backward
    pass."""
    return train.compile is not False and compile_obstacle(layout) is None


def compile_obstacle(layout: Layout) -> str | None:
    """Return why a layout's training steps cannot be compiled, as text: its schedule splits the
    backward pass. None if they can be."""
    if layout.splits_backward:
        return (
            f"parallel.schedule='{layout.schedule}' splits the backward pass in two, which "
            "compiled code does as a whole"
        )
    return None


def uncompiled_blocks(config: Config, layout: Layout) -> str | None:
    """Return, as text, why a compiled run leaves its blocks uncompiled; None if it compiles them. A
    recomputed block is compiled as a whole or not at all. One with experts contains calls that
    cannot be compiled: FSDP's hooks, which gather the units within it, or the exchange of
    tokens."""
    if config.model.experts.count is None or config.train.activation_checkpoint is None:
        return None
    if not layout.shards_experts and not layout.zero:
        return None
    setting = _expert_setting(layout) if layout.shards_experts else f"parallel.zero={layout.zero}"
    return (
        f"but not blocks with experts, which send in the middle with {setting}, while "
        "train.activation_checkpoint has a block compiled as a whole or not at all"
    )


def _check_places(sharding: Sharding, model: ModelConfig, local_size: int | None) -> None:
    """Raise ConfigError for a layout that no model of this size could have, whatever its layers
    compute: a sequence that cannot be split evenly, more pipeline stages than layers, more than
    MOST_PASSES passes to fill the pipeline, or a `tensor` that does not divide the ranks per
    machine (`local_size`, None if not known)."""
    _check_sequence_split(sharding, model)
    _check_normalized_heads(sharding, model)
    layout, t = sharding.layout, sharding.layout.tensor
    if local_size is not None and local_size % t:
        raise ConfigError(
            f"parallel.tensor={t} must divide the {local_size} processes of a machine, as its "
            "processes exchange every layer's activations; possible: "
            + listed(divisors(local_size))
        )
    if layout.n_stages > model.n_layers:
        each = f" × parallel.virtual_stages={layout.virtual_stages}"
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline}{each if layout.virtual_stages > 1 else ''} makes "
            f"{layout.n_stages} stages of model.n_layers={model.n_layers} layers; at most "
            f"{model.n_layers} are possible"
        )
    if layout.pipeline * layout.n_stages > MOST_PASSES:
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline} of {layout.n_stages} stages is too deep to plan: "
            "a step's passes are simulated one by one, and filling the pipeline takes "
            f"{layout.pipeline:,} × {layout.n_stages:,} of them; at most {MOST_PASSES:,} are "
            f"simulated, such as those of parallel.pipeline={math.isqrt(MOST_PASSES)} with a stage "
            "each"
        )


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    """Return the logical axes that must be split into equal shards, each with its sizes by their
    keys: axis → key in `[model]` → size."""
    every = dict.fromkeys(each for n in range(model.n_layers) for each in sub_layers(model, n))
    return {k: v for each in every for k, v in each.even_sizes(model).items()}


def _check_even_shards(sharding: Sharding, model: ModelConfig, dimension: str) -> None:
    """Raise ConfigError if a mesh dimension cannot shard its axes: heads and widths into equal
    shards, and the vocabulary so that every rank has rows."""
    layout, sharded = sharding.layout, sharding.sharded_axes
    n = (layout.expert_sizes | layout.sizes)[dimension]
    axes = [axis for axis, dimensions in sharded.items() if dimension in dimensions]
    even = _even_sizes(model)
    sizes = {k: v for axis in axes for k, v in even.get(axis, {}).items()}
    for key, size in sizes.items():
        if size % n:
            also = ", or a multiple" if key == "attention.n_kv_heads" else ""
            raise ConfigError(
                f"parallel.{dimension}={n} must divide model.{key}={size}; possible: "
                f"{listed(divisors(math.gcd(*sizes.values())))}{also}"
            )
    if "vocab" in axes:
        _check_vocabulary(model, f"parallel.{dimension}={n}", n)


def _check_grid(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError if a 2-D, 2.5-D or 3-D tensor mode cannot shard the model. With `edge`
    ranks along `tensor`, head counts must be multiples of `edge`, and all widths as well;
    mode 3d shards these widths twice, so that they must be multiples of edge². No shard of the
    vocabulary may be empty."""
    edge = layout.sizes["tensor"]
    n_shards = edge * edge if layout.is_3d else edge
    whose = f"{layout.grid_setting} over parallel.tensor={layout.tensor}"
    even = _even_sizes(model)
    sizes = {k: v for each in even.values() for k, v in each.items()} | {"d_model": model.d_model}
    for key, size in sizes.items():
        n = edge if key in ("attention.n_heads", "attention.n_kv_heads") else n_shards
        if size % n:
            raise ConfigError(
                f"{whose} divides model.{key}={size} by {n}; possible: "
                f"{listed(_nearest_multiples(size, n))}"
            )
    _check_vocabulary(model, whose, n_shards)


def _check_vocabulary(model: ModelConfig, setting: str, n_shards: int) -> None:
    """Raise ConfigError if the last of `n_shards` vocabulary shards would have no rows. `setting`,
    for the message, is the setting that shards the vocabulary."""
    if model.vocab_size is None:
        return
    n_rows = model.padded_vocab_size
    if not shard_size(n_rows, n_shards, n_shards - 1):
        raise ConfigError(
            f"{setting} cuts the {n_rows} rows of the vocabulary into parts of "
            f"{shard_size(n_rows, n_shards, 0)}, which leaves the last of {n_shards} none; pad it: "
            f"--model.vocab-multiple {n_shards}"
        )


def _check_normalized_heads(sharding: Sharding, model: ModelConfig) -> None:
    """Raise ConfigError if `model.attention.qk_norm` is 'width' and several `tensor` ranks compute
    the same key head. That norm takes the channels of all key heads together, and each rank then
    computes only one head."""
    if sharding.kv_replicas > 1 and model.attention.qk_norm == "width":
        raise ConfigError(
            f"model.attention.qk_norm='width' norms the channels of all model.attention.n_kv_heads="
            f"{model.attention.n_kv_heads} heads together, of which each of parallel.tensor="
            f"{sharding.layout.tensor} processes computes one; possible: "
            f"{listed(divisors(model.attention.kv_heads))}"
        )


def _nearest_multiples(n: int, base: int) -> list[int]:
    """Return the multiples of `base` next to n, below and above, without 0."""
    return [each for each in (n // base * base, -(-n // base) * base) if each]


def _check_sequence_split(sharding: Sharding, model: ModelConfig) -> None:
    """Raise ConfigError unless the context length is a multiple of the chunks that it is split
    into: 2 · context in a ring, context with all-to-all, and context · tensor with `sequence` (the
    least common multiple, if both apply)."""
    layout, ways, n_shards = sharding.layout, [], 1
    if layout.context > 1:
        chunks = layout.chunks_of_time
        n_shards = chunks * layout.context
        ways.append(f"parallel.context={layout.context}")
        ways += [f"two chunks each of parallel.context_mode='{layout.context_mode}'"] * (chunks > 1)
        _check_exchanged_heads(sharding, model)
    if layout.sequence:
        n_shards = math.lcm(n_shards, layout.context * layout.tensor)
        ways.append(f"parallel.sequence=true over parallel.tensor={layout.tensor}")
    if model.context_length % n_shards:
        raise ConfigError(
            f"{' with '.join(ways)} needs a multiple of {n_shards} as model.context_length, not "
            f"{model.context_length}: set "
            f"{either(_nearest_multiples(model.context_length, n_shards))}, or lower a degree"
        )


def _check_exchanged_heads(sharding: Sharding, model: ModelConfig) -> None:
    """Raise ConfigError if context parallelism goes by all-to-all and `context` does not divide the
    key and value heads that one tensor-parallel rank has."""
    few = model.attention.kv_heads < model.attention.n_heads
    layout, n_heads = sharding.layout, sharding.n_kv_heads_here
    if layout.exchanges_heads and n_heads % layout.context:
        raise ConfigError(
            f"parallel.context_mode='all-to-all' gives each of parallel.context={layout.context} "
            f"processes some of the {n_heads} {'key/value ' if few else ''}heads that one of "
            f"parallel.tensor={layout.tensor} has; possible: {listed(divisors(n_heads))}, or "
            "parallel.context_mode='ring'"
        )


def check_micro_batches(layout: Layout, n_micro_batches: int, micro_batch_size: int) -> None:
    """Raise ConfigError if the pipeline's schedule cannot run `n_micro_batches` micro-batches per
    step on each rank. `micro_batch_size`, in sequences, is only used to name a remedy.

    `1f1b` needs at least `layout.pipeline` micro-batches, to fill the pipeline before it alternates
    between forward and backward passes. `interleaved` and `zero-bubble` work in max(1,
    n_micro_batches // pipeline) rounds, which must be equally long: a multiple of `pipeline` always
    fits, and so does any number below 2 · pipeline. `gpipe` and `zero-bubble-v` take any number, as
    does a layout without a pipeline.
    """
    if layout.pipeline == 1:
        return
    match layout.schedule:
        case "1f1b" if n_micro_batches < layout.pipeline:
            remedy = "lower train.micro_batch_size"
            if n_micro_batches * micro_batch_size < layout.pipeline:
                least = layout.n_batch_shards * layout.pipeline
                remedy = f"raise train.batch_size to {least}, or lower parallel.data or pipeline"
            raise ConfigError(
                f"parallel.schedule='1f1b' over parallel.pipeline={layout.pipeline} processes "
                f"takes at least as many micro-batches, there are {n_micro_batches}; {remedy}, or "
                "use 'gpipe'"
            )
        case "gpipe" | "1f1b" | "zero-bubble-v":
            pass
        case "interleaved" | "zero-bubble":
            rounds = max(1, n_micro_batches // layout.pipeline)
            if n_micro_batches % rounds:
                raise ConfigError(
                    f"parallel.schedule='{layout.schedule}' takes {n_micro_batches} micro-batches "
                    f"in {rounds} equal rounds: choose train.micro_batch_size so that they are a "
                    f"multiple of parallel.pipeline={layout.pipeline}, or fewer than twice as many"
                )
        case unknown:
            refuse_unknown(unknown, "parallel.schedule", "the layout")
