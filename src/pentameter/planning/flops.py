"""Arithmetic a training step needs, in one convention that every MFU in the project uses."""

from __future__ import annotations

from collections.abc import Sequence

from pentameter.config.schema import ModelConfig
from pentameter.planning.architecture import ParameterSpec

CONVENTION = "6·N + 12·n_layers·d_model·context_length per token, full attention"


def flops_per_token(model: ModelConfig, table: Sequence[ParameterSpec]) -> int:
    """Forward and backward FLOPs per trained token: 6·N + 12·n_layers·d_model·context_length.

    N counts every parameter except position embeddings, which are only added, and except the
    token embedding when the head does not share it, because a look-up multiplies nothing.
    Attention is counted in full although half of it is masked. The convention is the one of PaLM
    (Chowdhery et al. 2022, appendix B).
    """
    not_multiplied = {"position_embedding.weight"}
    if not model.tied_head:
        not_multiplied.add("token_embedding.weight")
    n = sum(spec.n_elements for spec in table if spec.name not in not_multiplied)
    return 6 * n + 12 * model.n_layers * model.d_model * model.context_length
