"""Tables from a key's possible values to facts about them, for facts that several modules need.

A table or a `match` refuses, by name, a value without an entry. With an `else` for the last one
known, a new value in the schema would silently compute as an old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Never, NoReturn, TypeVar

from pentameter.errors import ConfigError

Entry = TypeVar("Entry")


def look_up(table: Mapping[Any, Entry], value: object, key: str, reader: str) -> Entry:
    """Return the entry for `value` in `table`. Raises ConfigError if there is none; the message
    names value, the configuration key and `reader`, the part of the program that has the table, in
    words ("the planner")."""
    if value not in table:
        known = ", ".join(map(str, table))
        raise ConfigError(f"{key}={value!r} is not known to {reader}; possible there: {known}")
    return table[value]


def refuse_unknown(value: Never, key: str, reader: str) -> NoReturn:
    """Raise ConfigError for a `value` of the configuration key `key` that no case in a `match`
    covers. `reader` names the part of the program with the `match`, in words. The type Never lets
    mypy find a `match` that lacks a case for a new value in the schema."""
    raise ConfigError(f"{key}={value!r} is not known to {reader}; choose another value")


Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
"""`train.precision`, once `auto` is resolved."""
LoadedPrecision = Literal["weights", "auto", Precision]
"""The precision in which a model is loaded: `weights` keeps that of its weights (`load_model`)."""


class NumberFormats(NamedTuple):
    """The dtypes (torch's names) that a precision computes with."""

    weights: Literal["float64", "float32"]
    """Dtype of weights, gradients, optimizer state and, unless `train.stream` narrows it, the
    residual stream."""
    products: Literal["float64", "float32", "bfloat16", "float16"]
    """Dtype of matmul inputs."""
    roundoff: float
    """Largest relative error of rounding a number for a matmul."""
    float32_matmul: Literal["highest", "high"] = "highest"
    """Torch's fp32 matmul precision on a GPU if `train.matmul_precision` is absent."""


PRECISIONS: Mapping[str, NumberFormats] = {
    "fp64": NumberFormats("float64", "float64", 2.0**-53),
    "fp32": NumberFormats("float32", "float32", 2.0**-24),
    "tf32": NumberFormats("float32", "float32", 2.0**-11, "high"),
    "bf16": NumberFormats("float32", "bfloat16", 2.0**-9),
    "fp16": NumberFormats("float32", "float16", 2.0**-11),
}
"""`train.precision` → its dtypes and rounding error."""

BESIDE = {"fp8": ("auto", "bf16", "fp32", "fp64")}
"""`train.matmuls` → the values of `train.precision` that go with it. On a GPU it is bf16 alone; a
CPU emulates the 8 bits, in fp64 to compare layouts."""

STREAMS: Mapping[str, Literal["bfloat16"] | None] = {"weights": None, "bf16": "bfloat16"}
"""`train.stream` → the residual stream's dtype in training; None for the weights' dtype."""

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

NORM_MAY_HAVE_BIAS = {"layernorm": True, "rmsnorm": False}
"""`model.norm` → True if it adds a bias with `model.bias`."""

FINAL_NORM = {"pre": True, "post": False, "output": True, "both": True}
"""`model.norm_position` → True if a norm comes between the last block and the head."""

NORM_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("pre", "post", "output"), ("{}_norm",)),
    "both": ("{}_norm", "{}_output_norm"),
}
"""`model.norm_position` → the names of a sub-layer's norms in its block, {} being its own name."""

POSITION_TABLE = {"learned": True, "sinusoidal": False, "rotary": False}
"""`model.positions` → True if they are parameters."""

GATES = {
    **dict.fromkeys(("relu", "relu2", "gelu", "gelu_tanh"), False),
    **dict.fromkeys(("swiglu", "geglu", "geglu_tanh", "swiglu_clamped"), True),
}
"""`model.feed_forward.activation` → True if a third matrix gates the feed-forward layer."""

DECAY_KEYS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "cosine": ("decay_steps",),
    "linear": ("decay_steps",),
    "wsd": ("decay_steps", "cooldown_steps"),
    "step": ("decay_interval",),
}
"""`schedule.name` → the keys that shape its decay. Those with `decay_steps` fall to
`min_learning_rate`."""

MOMENTUM: Mapping[str, float | None] = {"adamw": None, "adam": None, "sgd": 0.0, "muon": 0.95}
"""`optimizer.name` → its default momentum (Muon's: Jordan et al. 2024); None for a rule that does
not read `optimizer.momentum`."""

MOMENTS: Mapping[str, int] = {"adamw": 2, "adam": 2, "sgd": 1, "muon": 2}
"""`optimizer.name` → the most numbers that it keeps per weight. SGD without momentum keeps none,
and Muon one for a matrix in a block."""

TAKES_SEVERAL_STAGES = {
    **dict.fromkeys(("gpipe", "1f1b"), False),
    **dict.fromkeys(("interleaved", "zero-bubble", "zero-bubble-v"), True),
}
"""`parallel.schedule` → True if a rank may hold several stages."""

SPLITS_BACKWARD = {
    **dict.fromkeys(("gpipe", "1f1b", "interleaved"), False),
    **dict.fromkeys(("zero-bubble", "zero-bubble-v"), True),
}
"""`parallel.schedule` → True if gradients for inputs and for weights are computed apart."""

TURNS_BACK = {
    **dict.fromkeys(("gpipe", "1f1b", "interleaved", "zero-bubble"), False),
    "zero-bubble-v": True,
}
"""`parallel.schedule` → True if its stages run through the ranks and back, as a V, so that the
first rank holds the last stage too."""

CHUNKS_OF_TIME = {"ring": 2, "all-to-all": 1}
"""`parallel.context_mode` → chunks of each sequence that a rank computes."""

EXCHANGES_HEADS = {"ring": False, "all-to-all": True}
"""`parallel.context_mode` → True if ranks exchange tokens for heads, which are sharded then."""

VALIDATION_FRACTION = 0.1
"""Default for `data.validation_fraction`, and for `prepare`."""

TEMPLATE_DATE = "2024-07-26"
"""Default for `data.template_date`, and for `prepare`. It is the date that Llama 3's templates
write if they get no other."""

FILE_DEFAULTS = {
    "text_field": "text",
    "form": "auto",
    "bad_rows": "refuse",
    "encoding": "utf-8",
}
"""Keys in `[data]` about what files hold → their defaults, in `prepare` too."""

ROWS_ARE_DOCUMENTS = {
    **dict.fromkeys(("random", "shuffled", "sequential", "streamed", "columns"), False),
    "documents": True,
}
"""`data.order` → True if a row is (the beginning of) one document."""

ENDS_RUN = {"stop": True, "warn": False}
"""`checkpoint.on_error` → True if a failed save ends the run."""
