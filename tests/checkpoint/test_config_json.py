"""A config.json with anything in it is read or refused in words, and at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.config_json import from_their_config, read_n_extra_layers
from pentameter.checkpoint.hugging_face.families.table import families, not_read
from pentameter.checkpoint.hugging_face.weights.fp8_weights import block_size, dequantized
from pentameter.errors import ConfigError, CorruptError

PATH = Path("config.json")
PLAIN = {
    "use_sliding_window": True,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_experts_per_tok": 2,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 16, "mscale_all_dim": 1.0}
RULES = (
    *("layer_types", "max_window_layers", "use_sliding_window", "sliding_window"),
    *("mlp_only_layers", "decoder_sparse_step", "norm_topk_prob", "topk_method", "n_group"),
    *("shared_expert_intermediate_size", "first_k_dense_replace", "num_nextn_predict_layers"),
    *("attention_bias", "mlp_bias", "partial_rotary_factor", "rope_theta", "quantization_config"),
    *("rope_scaling", "rope_parameters"),
)
ODD = (
    *(None, "a", [], {}, -1, 1.5, True, float("nan"), 2**70, ["full_attention"], [[]]),
    *({**YARN, "factor": factor} for factor in (0, -3.0, float("inf"), 2**2000, "x", 1e-300)),
)


@pytest.mark.parametrize("name", families())
def test_odd_values_are_refused_in_words(name):
    family = families()[name]
    for key in {*RULES, *(theirs for theirs, _ in family.written.values()), *family.not_ours}:
        for value in ODD:
            content, said = {"model_type": name, **PLAIN, key: value}, ""
            try:
                from_their_config(content, PATH)
                block_size(content, PATH)
                read_n_extra_layers(content, family, PATH)
            except ConfigError as error:
                said = str(error)
            assert "pydantic" not in said


@pytest.mark.parametrize("kind", ["gemma3", "llama4_text"])
def test_an_architecture_that_is_known_and_not_read_is_refused_with_the_reason(kind):
    said = f"model_type='{kind}' is not supported: {not_read()[kind]}; these are read: gpt2"
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_their_config({"model_type": kind}, PATH)
    assert not_read().keys().isdisjoint(families())


@pytest.mark.parametrize("every", [None, 2, 3, 4])
def test_layers_without_a_window_are_counted(every):
    kinds = ["sliding_attention", "full_attention"]
    types = [kinds[every is not None and (layer + 1) % every == 0] for layer in range(4)]
    content = {"model_type": "qwen3", **PLAIN, "sliding_window": 16, "layer_types": types}
    attention = from_their_config(content, PATH)["attention"]
    assert (attention["sliding_window"], attention["sliding_window_pattern"]) == (16, every)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_fp8_that_is_no_matrix_is_refused(shape):
    weight = torch.ones(shape).to(torch.float8_e4m3fn)
    scales = torch.ones(1)
    tensors = {
        name: LazyTensor(tuple(each.shape), each.dtype, lambda target, region: None)
        for name, each in (("a", weight), ("a_scale_inv", scales))
    }
    with pytest.raises(CorruptError, match=r"a is .* of FP8"):
        dequantized(tensors, (2, 2), PATH)
