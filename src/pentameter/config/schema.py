"""The schema of a configuration: every section, key, default and rule.

A section also says what follows from its own keys alone (the padded vocabulary, which norms have a
bias). Everything else that follows from the values (accumulation, parameter counts) is computed
once, in `pentameter.planning`. A rule that needs only this file is checked here; the
loader (`config/files/load.py`) turns a failed check into one sentence with the dotted path.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from pentameter.config.choices import (
    BESIDE,
    DECAY_KEYS,
    MOMENTUM,
    TAKES_SEVERAL_STAGES,
    Precision,
    look_up,
)
from pentameter.config.data_schema import DataConfig
from pentameter.config.model.architecture import ModelConfig
from pentameter.config.section import (
    ABSENT,
    ByteCount,
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
from pentameter.config.urls import is_remote, url_problem


class OptimizerConfig(Section):
    """The update rule."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """`adamw`: decoupled weight decay; `adam`, `sgd`: weight decay as an L2 penalty; `muon`:
    orthogonalised momentum for the matrices of the blocks, each expert's by itself, AdamW for
    everything else, routers among it."""
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
        """The momentum that this optimizer uses if `momentum` is None: 0 for SGD, 0.95 for Muon;
        None for an optimizer that does not read `momentum`."""
        return look_up(MOMENTUM, self.name, "optimizer.name", "the planner")

    @property
    def momentum_used(self) -> float:
        """The momentum for SGD and Muon: `momentum`, or `default_momentum` if that is None; 0 if
        both are None."""
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
    """Step at which the schedule begins: warm-up and decay count from it. `train --resume extend`
    sets it."""
    decay_steps: Positive | None = None
    """Where `cosine`, `linear` and `wsd` end; with train.steps when absent."""
    cooldown_steps: Positive | None = None
    """Length of `wsd`'s decay; a fifth of decay_steps when absent."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where `cosine`, `linear` and `wsd` end."""
    gamma: Factor = 0.95
    """Factor of `step`."""
    decay_interval: Positive | None = None
    """Steps between two decays of `step`; when absent, the steps of an epoch, rounded up."""

    @property
    def decay_keys(self) -> tuple[str, ...]:
        """The keys in [schedule] that shape this schedule's decay, such as `decay_steps`; () for
        `constant`."""
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
    """Sequences in one forward and backward pass; when absent the whole batch, or on a GPU the most
    that fit. Must divide it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """`auto`: the fastest present."""
    precision: Literal["auto", Precision] = "auto"
    """Arithmetic of matmuls; weights and optimizer stay fp32 (fp64 for fp64). `auto` takes the best
    that the machine supports; `doctor` says which, and why."""
    matmul_precision: MatmulPrecision | None = None
    """Precision at which a GPU multiplies fp32 matrices: `high` is TF32, `medium` may be bf16.
    When absent, `high` for precision tf32, else `highest`."""
    matmuls: Literal["fp8"] | None = None
    """Number format in which linear layers in blocks multiply. `fp8` rounds the factors of outputs
    and of inputs' gradients to 8 bits (e4m3), with a scale for each row; weights' gradients,
    experts, router and head stay in bf16. It needs an NVIDIA GPU of compute capability 8.9 or
    higher, and no parallel.tensor; a CPU emulates it."""
    stream: Literal["weights", "bf16"] = "weights"
    """Dtype of the residual stream in training. `bf16` halves what blocks read, keep and send
    between pipeline stages, and rounds each sum into the stream; needs precision bf16."""
    activation_checkpoint: Literal["selective", "full"] | None = None
    """Recompute activations in the backward pass to save memory: `full` keeps a block's input only,
    `selective` also the results of its matmuls and of fused attention."""
    offload: Switch = False
    """Keep weights, gradients and optimizer state in the host's memory, bringing a layer's weights
    to the device for its turn; needs parallel.zero."""
    compile: Literal["auto"] | Switch = "auto"
    """`torch.compile` the step; `auto` where a compiler is present and the run is long enough."""
    eval_interval: Positive | Literal["auto", "epoch"] | None = "auto"
    """Steps between passes over the validation split. `auto` evaluates at least five times in
    a run, after a round number of steps, 1000 at most; `epoch` is the steps of a pass over the
    training split, rounded up; "none" never evaluates."""
    eval_tokens: Positive | Literal["auto"] | None = None
    """Evaluate on a sample of the validation split, the same windows each time, with about this
    many tokens that count; it is recorded as `val-sample`, and the best is chosen by it. At the end
    the best weights are evaluated on the whole split, recorded as `val`. `auto`: as many as cost a
    fiftieth of the training between two evaluations. The whole split each time when absent."""
    eval_train_tokens: Positive | None = None
    """Also evaluate, without dropout, on about this many tokens from the start of the training
    split; the log shows that loss beside validation's."""
    patience: Positive | None = None
    """Stop after this many evaluations in a row without a new best."""
    upcycle_noise: NonNegativeFloat = 0.0
    """With `--init-from` a dense model and model.experts.count: each expert begins as a copy of the
    feed-forward layer, to which so much of the expert's random initial values is added, so that
    experts differ."""
    upcycle_drop: Rate = 0.0
    """As above: fraction of each expert's inner channels that keep their random initial values
    instead of copying (Nakamura et al. 2025, "Drop-Upcycling")."""
    check_copies: Positive | None = None
    """Steps between comparisons of the weights that several ranks replicate; every checkpoint
    compares them too. A difference ends the run with exit code 70, naming rank and tensor."""
    check_every: Positive | None = None
    """Steps between checks for silent corruption, in computing and in memory; every checkpoint is
    checked too. A difference ends the run with exit code 70, naming the rank."""
    sample_interval: Positive | Literal["auto"] | None = None
    """Steps between text samples; `auto` is as for eval_interval."""
    sample_tokens: Positive = 256
    """Length of a sample."""
    sample_temperature: NonNegativeFloat = 1.0
    """The temperature at which samples are drawn, each step's by other random numbers; 0 takes the
    likeliest tokens. In conversations the likeliest answer stands above the drawn one."""
    sample_prompt: str = ""
    """Text that samples continue; when empty, `<|endoftext|>`, or a newline where the text has too
    few documents to learn what that begins. In conversations a user's message; the first question
    that is held out when empty."""

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
        if self.stream not in ("weights", self.precision):
            raise ValueError(
                f"train.stream={self.stream!r} rounds the residual stream of a run whose matmuls "
                f"are in {self.stream}, and train.precision is {self.precision!r}; set "
                f"train.precision={self.stream!r}, or train.stream='weights'"
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
    """Scale of the adapters, which add (alpha ÷ rank) · B A; at most 65,536."""
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
    expert: Positive = 1
    """Ranks that shard the experts of each layer: each holds count ÷ expert of them, and tokens are
    sent to the ranks of their experts. They are no additional ranks, but are taken from the data ×
    context × tensor ones, whichever of these degrees those come from."""
    expert_tensor: Positive = 1
    """Ranks that shard each expert's matrices. Each expert then has data × context × tensor ÷
    (expert × expert_tensor) replicas, which `zero` shards."""
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
        """Return the section's raw values. With the schedule `zero-bubble-v`, `virtual_stages`
        becomes 2 if it is 1 or absent, as that schedule has two stages on each rank."""
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
    """Settings of checkpoints: when to save, which to keep."""

    interval: Positive | None = None
    """Steps between checkpoints; train.eval_interval when absent. The last step always saves."""
    keep_last: Positive = 2
    """Number of newest checkpoints that are kept. The newest one from whose weights a finite loss
    was computed always stays too."""
    keep_best: Switch = True
    """Also keep the one with the best validation loss."""
    keep_before_cooldown: Switch = False
    """Also save one at the step from which a `wsd` schedule cools down, and keep it: a longer run
    can go on from there. It takes a checkpoint's space more. `train --time` sets it."""
    asynchronous: Literal["auto"] | Switch = "auto"
    """Overlap writing checkpoints with training, which waits for a snapshot of weights and
    optimizer in the host's memory and no longer; `auto` if that memory has room for it."""
    copy_to: str | None = None
    """URL of a folder (`s3://bucket/runs/NAME`, `gs://…`, `file:///…`: whatever fsspec opens) for
    copies of checkpoints and logs, made while training goes on. If a run folder lacks the newest
    checkpoint, it is fetched from there. Each run needs a folder of its own."""
    copy_wait_seconds: NonNegativeFloat = 60.0
    """Longest wait for copies at a run's end, all copies together. After a signal it bounds the
    whole wait. A complete run waits until they are made; it gives up on a store that fails for so
    long."""
    on_error: Literal["stop", "warn"] = "stop"
    """A save or copy that fails (disk full, no network): `stop` ends with exit 74, a failed copy
    once the next checkpoint is saved; `warn` goes on until the last. A log that cannot be written
    is a warning in either case."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.copy_to is None:
            return self
        if not is_remote(self.copy_to):
            raise ValueError(
                f"checkpoint.copy_to={self.copy_to!r} is no URL; write s3://bucket/folder, or "
                "file:///folder for a mounted disk"
            )
        if (problem := url_problem(self.copy_to, "leave checkpoint.copy_to out")) is not None:
            raise ValueError(problem)
        return self


class GuardConfig(Section):
    """The response to a loss or gradient norm that is not finite, or a spike.

    The update is left out; after several in a row the run rolls back, then it gives up with exit
    code 70.
    """

    spike_factor: PositiveFloat | None = None
    """Also leave out an update that is a spike: its loss or gradient norm lies above the median of
    the last `window` updates by this many times their scatter (1.4826 × the median absolute
    deviation) or more; 20, for example. When absent, only updates that are not finite are left
    out."""
    window: Annotated[int, Field(strict=True, ge=8, le=10_000)] = 128
    """Number of last updates over which that median is taken. There are no spikes before so many
    updates were made."""
    skips: NonNegative = 3
    """Most updates left out in a row. When another one would be, the run rolls back, or gives
    up."""
    rollback_interval: Positive | None = None
    """Steps between the checkpoints to which a run can roll back; the newest two are kept beside
    all others. A rollback skips the batches that were read since its checkpoint. When absent, the
    run gives up instead."""
    rollbacks: Positive = 3
    """Most rollbacks in a run. It gives up when another one is due, or when it has rolled back to
    every checkpoint that is left."""


class LogConfig(Section):
    """Log lines, and the trackers that get a run's metrics and samples."""

    interval: Positive = 10
    """Steps between log lines."""
    perplexity: Switch = False
    """Show the perplexity in the lines of steps too; those of evaluations and epochs always have
    it."""
    tensorboard: Switch = False
    """Write metrics, samples and the configuration as TensorBoard event files, into
    RUN_DIR/tensorboard."""
    wandb: Annotated[str, Field(min_length=1)] | None = None
    """Send metrics, samples and the configuration to this project of Weights & Biases."""
    trackio: Annotated[str, Field(min_length=1)] | None = None
    """Send metrics, samples and the configuration to this project of trackio."""


class Config(Section):
    """The configuration of a run, with all sections. `load_config` reads it; `make_plan` derives
    the rest."""

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
    guard: GuardConfig = GuardConfig()
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
        for key in ("upcycle_noise", "upcycle_drop"):
            if getattr(self.train, key) and self.model.experts.count is None:
                raise ValueError(
                    f"train.{key}={getattr(self.train, key)} is of experts that begin as copies, "
                    "and model.experts.count is not set; set it, or leave both out"
                )
        matmuls, precision = self.train.matmuls, self.train.precision
        if matmuls is not None and precision not in BESIDE[matmuls]:
            raise ValueError(
                f"train.matmuls={matmuls!r} goes with train.precision='bf16', in which all else is "
                f"multiplied, not {precision!r}"
            )
        if self.train.offload and self.parallel.zero == 0:
            raise ValueError(
                "train.offload=true keeps what parallel.zero shares out in the host's memory, and "
                "parallel.zero=0 shares nothing; set it to 1, 2 or 3"
            )
        return self
