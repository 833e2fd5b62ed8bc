"""The schema of a configuration: every section, key, default and rule.

A section also says what follows from its own keys alone (the padded vocabulary, which norms have a
bias). Everything else that follows from the values (accumulation, parameter counts) is computed
once, in `pentameter.planning`. A rule that needs only this file is checked here; the
loader (`config/load.py`) turns a failed check into one sentence with the dotted path.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pentameter.config.choices import (
    DECAY_KEYS,
    FINAL_NORM,
    GATES,
    MOMENTUM,
    NORM_MAY_HAVE_BIAS,
    POSITION_TABLE,
    TAKES_SEVERAL_STAGES,
    Precision,
    look_up,
)
from pentameter.config.data_schema import DataConfig
from pentameter.config.section import (
    ABSENT,
    ByteCount,
    Depth,
    Factor,
    Name,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Rate,
    Section,
    Seed,
    Switch,
    Width,
)
from pentameter.errors import ConfigError, nearest_divisors


class RopeScalingConfig(Section):
    """Rotary frequencies for a longer context than the one a model was first trained on."""

    type: Literal["linear", "llama3"] | None = None
    """`linear`: positions divided by factor (Chen et al. 2023); `llama3`: slow frequencies divided
    by factor, fast ones kept, those between interpolated (Llama 3.1). None ("none") leaves them."""
    factor: PositiveFloat = 8.0
    """Factor by which frequencies fall."""
    low_frequency_factor: PositiveFloat = 1.0
    """`llama3`: a frequency that rotates fewer times than this in the original context is slow."""
    high_frequency_factor: PositiveFloat = 4.0
    """`llama3`: one that rotates more often than this is fast."""
    original_context_length: Width = 8192
    """`llama3`: tokens of the context before it was extended."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                f"model.rope_scaling.low_frequency_factor={self.low_frequency_factor} must be "
                f"below model.rope_scaling.high_frequency_factor={self.high_frequency_factor}"
            )
        return self


class ModelConfig(Section):
    """The architecture. Names and shapes of its parameters: `pentameter.planning.gpt`."""

    vocab_size: Positive | None = None
    """Distinct tokens; taken from the tokenizer when absent."""
    vocab_multiple: Width = 1
    """Pad the embedding and head rows to a multiple of this; padded rows are never predicted."""
    context_length: Width = 256
    """Tokens the model sees at once (T)."""
    n_layers: Depth = 6
    """Transformer blocks."""
    n_heads: Width = 6
    """Attention heads (H)."""
    n_kv_heads: Width | None = None
    """Heads of keys and values, each shared by n_heads / n_kv_heads queries (grouped-query
    attention; 1 is multi-query); n_heads when absent."""
    head_size: Width | None = None
    """Channels of a head (K); d_model / n_heads when absent."""
    qk_norm: Literal["head", "width"] | None = None
    """RMSNorm of queries and keys before positions act: `head` of each head's channels (Qwen 3),
    `width` of all heads' together (OLMo 2). None ("none") has none."""
    sliding_window: Positive | None = None
    """Tokens that a query sees, itself included; all earlier ones when absent."""
    sliding_window_pattern: Positive | None = None
    """With a window, every so many layers the last one sees the whole context; none when absent."""
    d_model: Width = 384
    """Width of the residual stream (D)."""
    d_ff: Width | None = None
    """Width of the feed-forward layer; 4 × d_model when absent."""
    activation: Literal["relu", "relu2", "gelu", "gelu_tanh", "swiglu", "geglu"] = "gelu"
    """Feed-forward non-linearity; `gelu` is exact, `gelu_tanh` GPT-2's approximation, `relu2` the
    square of `relu`. `swiglu` and `geglu` are SiLU or GELU of a gate, a matrix of its own, times
    the layer's inner width (Shazeer 2020)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation of the residual stream."""
    norm_position: Literal["pre", "post", "output"] = "pre"
    """`pre`: x + f(norm(x)) and a final norm; `post`: norm(x + f(x)), as in the 2017 paper;
    `output`: x + norm(f(x)) and a final norm (OLMo 2)."""
    norm_eps: PositiveFloat = 1e-5
    """Added to a norm's variance, or to RMSNorm's mean square."""
    parallel_residual: Switch = False
    """Attention and feed-forward layer of a block read the same stream, each through its own norm,
    and are added together (GPT-NeoX)."""
    positions: Literal["learned", "sinusoidal", "rotary"] = "learned"
    """Position encoding; `rotary` rotates queries and keys (Su et al. 2021)."""
    rope_theta: PositiveFloat = 10000.0
    """Rotary: the base of the frequencies, theta^(-2i / channels)."""
    rotary_fraction: Factor = 1.0
    """Rotary: fraction of a head's channels that are rotated, the first ones."""
    rope_scaling: RopeScalingConfig = RopeScalingConfig()
    """Rotary: frequencies for a longer context."""
    tied_head: Switch = True
    """The output projection uses the token embedding's weight."""
    head_bias: Switch = False
    """A bias on the output projection."""
    qkv_bias: Switch = False
    """A bias on the query, key and value projections."""
    bias: Switch = False
    """Biases on the other linear layers and on the norms."""
    logit_softcap: PositiveFloat | None = None
    """Logits become softcap · tanh(logits / softcap), which bounds them (Gemma 2)."""
    dropout: Rate = 0.0
    """After each sub-layer's output projection."""
    attention_dropout: Rate = 0.0
    """On the attention weights."""
    embedding_dropout: Rate | None = None
    """After the embedding; `dropout` when absent."""
    init: Literal["normal", "uniform"] = "normal"
    """`normal`: weights N(0, init_std), biases 0. `uniform`: embedding and head U(±0.1), block
    matrices U(±fan_in^-0.5) with the query/key/value projection Xavier-uniform, biases 0."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of `init = "normal"`."""
    residual_init_scale: Switch = False
    """Scale both residual projections of a block by (2 · n_layers)^-0.5 initially (GPT-2)."""
    embedding_scale: Switch = False
    """Multiply token embeddings by √d_model (the 2017 Transformer)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_size is None and self.d_model % self.n_heads:
            near = ", ".join(map(str, nearest_divisors(self.d_model, self.n_heads)))
            raise ValueError(
                f"model.n_heads={self.n_heads} must divide model.d_model={self.d_model}; "
                f"nearest possible: {near}, or set model.head_size"
            )
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            near = ", ".join(map(str, nearest_divisors(self.n_heads, self.n_kv_heads)))
            raise ValueError(
                f"model.n_kv_heads={self.n_kv_heads} must divide model.n_heads={self.n_heads}; "
                f"nearest possible: {near}"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"model.d_model={self.d_model} must be even for model.positions='sinusoidal' "
                "(pairs of sine and cosine)"
            )
        if self.positions == "rotary":
            self._check_rotary()
        else:
            for key in ("rope_theta", "rotary_fraction", "rope_scaling"):
                if getattr(self, key) != ModelConfig.model_fields[key].default:
                    raise ValueError(
                        f"model.{key} is of rotary positions, and model.positions="
                        f"{self.positions!r}; set model.positions='rotary', or leave it out"
                    )
        if self.parallel_residual and self.norm_position != "pre":
            raise ValueError(
                "model.parallel_residual=true adds both layers of a block at once, and "
                f"model.norm_position={self.norm_position!r} norms between them; set "
                "model.norm_position='pre'"
            )
        if self.sliding_window_pattern is not None and self.sliding_window is None:
            raise ValueError(
                f"model.sliding_window_pattern={self.sliding_window_pattern} says which layers "
                "have no window, and model.sliding_window is not set; set it, or leave both out"
            )
        return self

    def _check_rotary(self) -> None:
        """Raise ValueError unless the rotated channels are pairs."""
        size = self.head_size or self.d_model // self.n_heads
        n_turning = size * self.rotary_fraction
        if n_turning % 2:
            raise ValueError(
                f"model.rotary_fraction={self.rotary_fraction} of the {size} channels of a head is "
                f"{n_turning:g}, which must be an even number (pairs that turn)"
            )

    @property
    def padded_vocab_size(self) -> int:
        """The row count in embedding and head: `vocab_size`, rounded up to a multiple of
        `vocab_multiple`. Raises ConfigError if `vocab_size` is not set."""
        if self.vocab_size is None:
            raise ConfigError(
                "model.vocab_size is not set; take it from the tokenizer, or set --model.vocab_size"
            )
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def feed_forward_width(self) -> int:
        """The feed-forward layer's inner width: `d_ff`, or its default."""
        return self.d_ff if self.d_ff is not None else 4 * self.d_model

    @property
    def has_gate(self) -> bool:
        """Whether the feed-forward layer has a gate: a further matrix with the shape of `up`."""
        return look_up(GATES, self.activation, "model.activation", "the parameter table")

    @property
    def head_channels(self) -> int:
        """The channels per attention head: `head_size`, or its default."""
        return self.head_size if self.head_size is not None else self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads: `n_kv_heads`, or its default."""
        return self.n_kv_heads if self.n_kv_heads is not None else self.n_heads

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several query heads share keys and values (grouped-query attention). Keys and
        values then have a separate projection matrix; otherwise one fused matrix computes queries,
        keys and values."""
        return self.kv_heads != self.n_heads

    @property
    def turning_channels(self) -> int:
        """The channels per head that rotary embeddings rotate, an even number."""
        return round(self.head_channels * self.rotary_fraction)

    def window(self, layer: int) -> int | None:
        """Return how many tokens a query in a layer attends to, itself included; None for the whole
        prefix."""
        size, every = self.sliding_window, self.sliding_window_pattern
        if size is None or size >= self.context_length:
            return None
        return None if every is not None and (layer + 1) % every == 0 else size

    @property
    def embedding_dropout_rate(self) -> float:
        """The dropout rate after the embedding: `embedding_dropout`, or its default."""
        return self.dropout if self.embedding_dropout is None else self.embedding_dropout

    @property
    def norm_has_bias(self) -> bool:
        """Whether norms have a bias; RMSNorm has none by definition."""
        possible = look_up(NORM_MAY_HAVE_BIAS, self.norm, "model.norm", "the parameter table")
        return self.bias and possible

    @property
    def has_final_norm(self) -> bool:
        """Whether there is a norm between the last block and the head."""
        key = "model.norm_position"
        return look_up(FINAL_NORM, self.norm_position, key, "the parameter table")

    @property
    def has_position_table(self) -> bool:
        """Whether position embeddings are parameters, one row per position."""
        return look_up(POSITION_TABLE, self.positions, "model.positions", "the parameter table")

    @property
    def resolved(self) -> ModelConfig:
        """The same architecture with the default sizes filled in: `d_ff`, `head_size` and
        `n_kv_heads`. Two resolved architectures can be compared."""
        sizes = {
            "d_ff": self.feed_forward_width,
            "head_size": self.head_channels,
            "n_kv_heads": self.kv_heads,
        }
        return self.model_copy(update=sizes)


class OptimizerConfig(Section):
    """The update rule."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """`adamw`: decoupled weight decay; `adam`, `sgd`: weight decay as an L2 penalty; `muon`:
    orthogonalised momentum for the matrices of the blocks, AdamW for everything else."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate; `schedule` shapes it over steps."""
    betas: tuple[Rate, Rate] = (0.9, 0.99)
    """AdamW's and Adam's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's and Adam's denominator offset."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of the parameters that `decay` selects."""
    decay: Literal["matrices", "all"] = "matrices"
    """`matrices`: biases, norms excluded (GPT-2); `all`: every parameter (PyTorch's default)."""
    momentum: Rate | None = None
    """SGD's momentum, 0 when absent; Muon's, 0.95 when absent."""
    clip_norm: NonNegativeFloat = 1.0
    """Clip the gradient's global norm to this; 0 does not clip."""

    @property
    def default_momentum(self) -> float | None:
        """The rule's momentum when absent; None for a rule that does not read `momentum`."""
        return look_up(MOMENTUM, self.name, "optimizer.name", "the planner")

    @property
    def momentum_used(self) -> float:
        """The momentum for SGD and Muon: `momentum`, or the rule's default."""
        return self.momentum if self.momentum is not None else self.default_momentum or 0.0


class ScheduleConfig(Section):
    """The learning rate as a function of the step; nothing to save."""

    name: Literal["constant", "cosine", "linear", "wsd", "step"] = "cosine"
    """`cosine`, `linear`: to min_learning_rate at decay_steps; `wsd` (warm-up, stable, decay): the
    peak until cooldown_steps before decay_steps, then linear; `step`: × gamma every decay_interval
    steps."""
    warmup_steps: NonNegative = 0
    """Linear from learning_rate/warmup_steps at step 0."""
    start_step: NonNegative = 0
    """The step that all of this counts from; `train --resume extend` sets it."""
    decay_steps: Positive | None = None
    """Where `cosine`, `linear` and `wsd` end; with train.steps when absent."""
    cooldown_steps: Positive | None = None
    """Length of `wsd`'s decay; a fifth of decay_steps when absent."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where `cosine`, `linear` and `wsd` end."""
    gamma: Factor = 0.95
    """Factor of `step`."""
    decay_interval: Positive | None = None
    """Steps between two decays of `step`; when absent those of an epoch, rounded up."""

    @property
    def decay_keys(self) -> tuple[str, ...]:
        """The keys that shape this schedule's decay."""
        return look_up(DECAY_KEYS, self.name, "schedule.name", "the planner")


MatmulPrecision = Literal["highest", "high", "medium"]


class TrainConfig(Section):
    """The loop. "Step" always means an optimizer step."""

    steps: Positive | None = None
    """Optimizer steps; 1000 when neither this nor `epochs` is set."""
    epochs: Positive | None = None
    """Instead of steps: passes over the training split."""
    batch_size: Positive | None = None
    """Sequences per step, over all devices and micro-batches."""
    tokens_per_step: ByteCount | None = None
    """Instead of batch_size: tokens per step."""
    micro_batch_size: Positive | None = None
    """Sequences per forward-backward; the whole batch when absent. Must divide it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """`auto`: the fastest present."""
    precision: Literal["auto", Precision] = "auto"
    """Arithmetic of matmuls; weights and optimizer stay fp32 (fp64 for fp64). `auto` takes the best
    that the machine supports; `doctor` says which, and why."""
    matmul_precision: MatmulPrecision | None = None
    """How exactly a GPU multiplies what stays fp32: `high` is TF32, `medium` may be bf16. When
    absent, `high` for precision tf32, else `highest`."""
    activation_checkpoint: Literal["selective", "full"] | None = None
    """Recompute activations in the backward pass to save memory: `full` keeps a block's input only,
    `selective` also the results of its matmuls and of fused attention."""
    offload: Switch = False
    """Keep weights, gradients and optimizer state in the host's memory, bringing a layer's weights
    to the device for its turn; needs parallel.zero."""
    compile: Literal["auto"] | Switch = "auto"
    """`torch.compile` the step; `auto` where a compiler is present and the run is long enough."""
    eval_interval: Positive | Literal["auto", "epoch"] | None = "auto"
    """Steps between passes over the whole validation split. `auto` evaluates at least five times in
    a run, after a round number of steps, 1000 at most; `epoch` is the steps of a pass over the
    training split, rounded up; "none" never evaluates."""
    eval_train_tokens: Positive | None = None
    """Also evaluate, without dropout, on about so many tokens of the training split, its first; the
    log shows the loss beside validation's."""
    patience: Positive | None = None
    """Stop after this many evaluations in a row without a new best."""
    check_copies: Positive | None = None
    """Steps between comparisons of the weights that several ranks replicate; every checkpoint
    compares them too. A difference ends the run with exit code 70, naming rank and tensor."""
    sample_interval: Positive | Literal["auto"] | None = None
    """Steps between text samples; `auto` is as for eval_interval."""
    sample_tokens: Positive = 256
    """Length of a sample."""
    sample_prompt: str = ""
    """What a sample continues; a newline when empty. In conversations a user's message; the first
    question that is held out when empty."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.batch_size is None) == (self.tokens_per_step is None):
            raise ValueError(
                "set exactly one of train.batch_size (sequences per step, now "
                f"{self.batch_size or ABSENT}) and train.tokens_per_step (now "
                f"{self.tokens_per_step or ABSENT})"
            )
        if self.steps is not None and self.epochs is not None:
            raise ValueError(
                f"train.steps={self.steps} and train.epochs={self.epochs} exclude each other; set "
                f"one to {ABSENT!r}"
            )
        return self


ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]
ContextMode = Literal["ring", "all-to-all"]
TensorMode = Literal["1d", "2d", "2.5d", "3d"]


class LoraConfig(Section):
    """Low-rank adapters, which alone are trained (Hu et al. 2021, "LoRA").

    To each matrix W that they adapt they add (alpha ÷ rank) · B A, with A (rank, inputs) and B
    (outputs, rank).
    """

    rank: Width | None = None
    """Rows of A and columns of B, at most the smaller side of each matrix that is adapted; without
    it, everything is trained and there are no adapters."""
    alpha: Annotated[float, Field(strict=True, gt=0, le=65_536)] = 16.0
    """Scale of what adapters add, over their rank; at most 65,536."""
    targets: tuple[str, ...] = ()
    """Names of the blocks' linear layers that are adapted, such as `qkv,out`; all when empty."""

    @property
    def factor(self) -> float:
        """The scale alpha ÷ rank by which an adapter multiplies B A."""
        assert self.rank is not None
        return self.alpha / self.rank


class ParallelConfig(Section):
    """The layout: degrees of parallelism. The training is the same for every layout."""

    data: Positive | None = None
    """Data-parallel ranks, which split the batch; when absent, the processes ÷ all other
    degrees."""
    zero: Literal[0, 1, 2, 3] = 0
    """State that data-parallel ranks shard instead of replicating it: 1 the optimizer's state, 2
    also the gradients, 3 also the weights (Rajbhandari et al. 2020, "ZeRO")."""
    replicate: Positive = 1
    """Replicas of the state that `zero` shards (HSDP): it is sharded over data ÷ replicate
    ranks."""
    tensor: Positive = 1
    """Ranks that shard each matrix: attention by head, the feed-forward layer by column, the
    vocabulary by row. They should be in one machine."""
    tensor_mode: TensorMode = "1d"
    """Way of sharding: `1d` matrices, by rows or by columns; `2d` matrices, activations and batch
    rows, over q × q ranks (SUMMA; Xu et al. 2021, "Optimus"); `2.5d` the same over d × q × q, with
    d replicas of the matrices (Wang et al. 2021, "Tesseract"); `3d` all over l × l × l (Bian et al.
    2021). `tensor` is their number."""
    tensor_depth: Positive | None = None
    """d of `2.5d`; when absent the smallest above 1 that leaves a square of `tensor`."""
    sequence: Switch = False
    """Between the sharded matrices, tensor-parallel ranks also shard the tokens."""
    context: Positive = 1
    """Ranks that shard each sequence, for contexts too long for one."""
    context_mode: ContextMode = "ring"
    """Communication in attention: keys and values travel round a `ring` while a block of them is at
    work (Liu et al. 2023), or an `all-to-all` exchanges tokens for heads, which `context` must
    divide (Jacobs et al. 2023, "DeepSpeed Ulysses")."""
    pipeline: Positive = 1
    """Pipeline stages: ranks that each hold some of the layers."""
    schedule: ScheduleName = "1f1b"
    """The order of a pipeline's forward and backward passes. `zero-bubble` fills bubbles with the
    gradients of weights (Qi et al. 2023); `zero-bubble-v` does so with two stages a rank, which run
    through the ranks and back."""
    virtual_stages: Positive = 1
    """Stages that each rank of an `interleaved` or `zero-bubble` pipeline holds; a `zero-bubble-v`
    one has two, which need not be said."""
    partition: Literal["uniform", "weighted"] = "uniform"
    """Assignment of layers to stages: evenly, or so that stages take the same time, with the
    embedding and the head counted at their cost."""
    timeout_seconds: Annotated[float, Field(strict=True, ge=1, le=2_592_000)] = 600.0
    """Longest wait for another rank; then the run ends with exit code 70 and names the rank that
    did not answer. A first step may compile for minutes in one of them."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_a_v(cls, values: Any) -> Any:
        """Give a V two stages a rank, also if the default of one is written out."""
        is_v = isinstance(values, dict) and values.get("schedule") == "zero-bubble-v"
        if is_v and values.get("virtual_stages", 1) == 1:
            return {**values, "virtual_stages": 2}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.replicate > 1 and self.zero == 0:
            raise ValueError(
                f"parallel.replicate={self.replicate} makes copies of what parallel.zero shares "
                "out, and parallel.zero=0 shares nothing; set it to 1, 2 or 3"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence=true shares tokens among tensor-parallel processes, and "
                "parallel.tensor=1; raise it, or leave sequence out"
            )
        if self.sequence and self.tensor_mode != "1d":
            raise ValueError(
                "parallel.sequence=true divides time, and parallel.tensor_mode="
                f"{self.tensor_mode!r} divides the stream already, by rows and by channels; leave "
                "sequence out"
            )
        if self.tensor_depth not in (None, 1) and self.tensor_mode != "2.5d":
            raise ValueError(
                f"parallel.tensor_depth={self.tensor_depth} is the depth of parallel.tensor_mode="
                f"'2.5d', which is {self.tensor_mode!r}; leave it out"
            )
        several = look_up(TAKES_SEVERAL_STAGES, self.schedule, "parallel.schedule", "the schema")
        if self.virtual_stages > 1 and not several:
            possible = " or ".join(
                f"'{name}'" for name, takes in TAKES_SEVERAL_STAGES.items() if takes
            )
            raise ValueError(
                f"parallel.virtual_stages={self.virtual_stages} needs parallel.schedule "
                f"{possible}, not '{self.schedule}'"
            )
        if self.schedule == "interleaved" and self.virtual_stages == 1:
            raise ValueError(
                "parallel.schedule='interleaved' alternates between stages of one process; set "
                "parallel.virtual_stages to 2 or more, or use '1f1b'"
            )
        if self.schedule == "zero-bubble-v" and self.virtual_stages != 2:
            raise ValueError(
                "parallel.schedule='zero-bubble-v' has two stages a process; set "
                f"parallel.virtual_stages to 2 instead of {self.virtual_stages}"
            )
        return self


class CheckpointConfig(Section):
    """When to save and which checkpoints to keep."""

    interval: Positive | None = None
    """Steps between checkpoints; train.eval_interval when absent. The last step always saves."""
    keep_last: Positive = 2
    """Newest checkpoints kept; one from whose weights a finite loss was computed always stays."""
    keep_best: Switch = True
    """Also keep the one with the best validation loss."""
    asynchronous: Literal["auto"] | Switch = "auto"
    """Overlap writing checkpoints with training, which waits for a snapshot of weights and
    optimizer in the host's memory and no longer; `auto` if that memory has room for it."""
    on_error: Literal["stop", "warn"] = "stop"
    """A save that fails (disk full): `stop` ends with exit 74, `warn` goes on until the last. A log
    that cannot be written is a warning in either case."""


class LogConfig(Section):
    """Reports: lines, metrics, trackers."""

    interval: Positive = 10
    """Steps between log lines."""
    perplexity: Switch = False
    """Say the perplexity in the lines of steps, too, as evaluations and epochs do."""
    tensorboard: Switch = False
    """Write the same metrics, samples and the configuration as TensorBoard event files, into
    RUN_DIR/tensorboard."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Tell the same to this project of Weights & Biases."""
    trackio: Annotated[str, Field(min_length=1)] | None = None
    """Tell the same to this project of trackio."""


class Config(Section):
    """A whole run: `load_config` reads it, `make_plan` derives the rest."""

    name: Name = "run"
    """Names the run folder, runs/NAME."""
    seed: Seed = 1337
    """Initial weights, batches and dropout are functions of it."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        peak, floor = self.optimizer.learning_rate, self.schedule.min_learning_rate
        if "decay_steps" in self.schedule.decay_keys and floor > peak:
            raise ValueError(
                f"schedule.min_learning_rate={floor} is above optimizer.learning_rate={peak}, "
                "where the decay begins; lower the one or raise the other"
            )
        held_out = self.data.validation_fraction > 0 or self.data.validation_path is not None
        evaluates = held_out and self.train.eval_interval is not None
        if self.train.patience is not None and not evaluates:
            raise ValueError(
                f"train.patience={self.train.patience} counts evaluations, and there are none: set "
                "train.eval_interval and data.validation_fraction, or leave patience out"
            )
        if self.train.offload and self.parallel.zero == 0:
            raise ValueError(
                "train.offload=true keeps what parallel.zero shares out in the host's memory, and "
                "parallel.zero=0 shares nothing; set it to 1, 2 or 3"
            )
        return self
