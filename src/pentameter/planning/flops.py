"""FLOPs per token, the embedding's and the head's cost in a pipeline, and vocabulary padding, as a
Plan records or obeys them.

These are sums over the one operation list in `planning/gpt.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import Operation, ParameterSpec

CONVENTION = "6·N + 12·n_layers·d_model·context_length per token, full attention"


def flops_per_token(run: Sequence[Operation]) -> int:
    """Return the forward and backward FLOPs per trained token for a run's operations: 6·N +
    12·n_layers·d_model·context_length.

    N counts every parameter except position embeddings, which are only added, and except an untied
    token embedding, because a look-up multiplies nothing. Attention counts in full although half is
    masked. This is PaLM's convention (Chowdhery et al. 2022, appendix B). If only adapters are
    trained, each frozen parameter counts 4 rather than 6: its gradient is not computed.
    """
    used = [op for op in run if op.kind != "look_up"]
    multiplied = {spec for op in used for spec in op.parameters}
    n_multiplications = sum(op.token_products for op in used)
    return 6 * n_multiplications + sum(
        (6 if spec.is_trained else 4) * spec.n_active for spec in multiplied
    )


def causal_flops_per_token(model: ModelConfig, run: Sequence[Operation]) -> int:
    """Return `flops_per_token`, but with attention counted only over the tokens that a position
    sees: on average half the context, or fewer in a window. Published speeds of mixtures of experts
    count so."""
    masked = 0.0
    for op in run:
        if op.kind == "attention":
            n_attended = model.window(op.layer or 0) or model.context_length
            masked += op.token_products * n_attended / (2 * model.context_length)
    return flops_per_token(run) - round(6 * masked)


def end_weights(
    run: Sequence[Operation], partition: Literal["uniform", "weighted"]
) -> tuple[float, float]:
    """Return (embedding's cost, head's cost), each in units of one layer's cost, by which layers
    are distributed over pipeline stages. A cost is the number of multiplications per token; `run`
    are the run's operations. With the partition `uniform` both are 0, so that stages have equally
    many layers; with `weighted` they count. An embedding costs almost nothing, as it only looks up;
    a head is a matmul with V · D weights."""
    match partition:
        case "uniform":
            return 0.0, 0.0
        case "weighted":
            before = itertools.takewhile(lambda op: op.layer is None, run)
            behind = itertools.takewhile(lambda op: op.layer is None, reversed(run))
            first, layer, last = (
                sum(op.weight_products + op.token_products for op in group)
                for group in (before, (op for op in run if op.layer == 0), behind)
            )
            return first / layer, last / layer
        case unknown:
            refuse_unknown(unknown, "parallel.partition", "the planner")


def padding_elements(table: Sequence[ParameterSpec], model: ModelConfig) -> int:
    """Return how many embedding and head elements in a parameter table only pad the vocabulary:
    those in rows from `vocab_size` up to `padded_vocab_size`."""
    assert model.vocab_size is not None
    n_rows = model.padded_vocab_size
    in_rows = sum(spec.n_elements for spec in table if "vocab" in spec.axes)
    return in_rows // n_rows * (n_rows - model.vocab_size)
