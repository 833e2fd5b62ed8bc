"""Checkpoints of other programs, made of models of `transformers` by what each program does with
their weights, compute the logits of these models."""

import json
import os
import pickle
import sys

import numpy as np
import pytest
import torch

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.programs.nanochat import read_encoding
from pentameter.checkpoint.programs.table import find_program
from pentameter.cli import import_
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.render_client import Rendering
from pentameter.data.tokenizers.renderer import RenderRequest
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
transformers = pytest.importorskip("transformers")

CHARACTERS = sorted(set("It was the best of times, it was the worst\n"))
BPE = train_bpe(["the cat sat on the mat, and that was that.\n" * 4], 300)


def drawn(model):
    """The model with weights that no initialisation has, so that each takes part."""
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def gpt2(vocab_size, activation):
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": vocab_size}
    config = transformers.GPT2Config(**sizes, activation_function=activation)
    return drawn(transformers.GPT2LMHeadModel(config))


def as_nanogpt(model):
    """GPT-2's weights by nanoGPT's names, matrices transposed."""
    matrices = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = model.state_dict()
    return {name: w.t() if name.endswith(matrices) else w for name, w in state.items()}


def imported(source, out, *options):
    assert import_.run([str(source), "--out", str(out), *options]) == 0
    return load_model(out)


def difference(loaded, model, n_tokens):
    ids = torch.randint(n_tokens, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits[..., :n_tokens]
        found = loaded.model(ids)[..., :n_tokens]
    assert expected.abs().max() > 1
    return (found - expected).abs().max().item()


def nanogpt_folder(path, model, prefix="", **more):
    path.mkdir(parents=True)
    config = model.config
    sizes = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    sizes |= {"block_size": config.n_positions, "vocab_size": config.vocab_size}
    whole = {
        "model": {prefix + name: weight for name, weight in as_nanogpt(model).items()},
        "model_args": {**sizes, "bias": True, "dropout": 0.1},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []},
        "config": {"dataset": "some_text"},
        "best_val_loss": torch.tensor(1.5),
        **more,
    }
    torch.save(whole, path / "ckpt.pt")
    return path


def write_characters(path, characters=CHARACTERS):
    path.parent.mkdir(parents=True, exist_ok=True)
    ids = {character: number for number, character in enumerate(characters)}
    path.write_bytes(pickle.dumps({"vocab_size": len(ids), "stoi": ids, "itos": CHARACTERS}))


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(tmp_path, prefix, capsys):
    model = gpt2(len(CHARACTERS), "gelu")
    folder = nanogpt_folder(tmp_path / "nano" / "out", model, prefix)
    write_characters(tmp_path / "nano" / "data" / "some_text" / "meta.pkl")
    loaded = imported(folder, tmp_path / "model")
    assert difference(loaded, model, len(CHARACTERS)) < 1e-5
    assert loaded.tokenizer.characters == tuple(CHARACTERS)
    assert loaded.config.model.dropout == loaded.config.model.attention.dropout == 0.1
    assert "2 layers, d_model 16, 2 heads, context 12" in capsys.readouterr().out


def test_nanogpt_without_biases(tmp_path):
    model = gpt2(len(CHARACTERS), "gelu")
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.zero_()
    folder = nanogpt_folder(tmp_path / "out", model)
    whole = torch.load(folder / "ckpt.pt")
    whole["model_args"]["bias"] = False
    whole["model"] = {name: w for name, w in whole["model"].items() if not name.endswith(".bias")}
    torch.save(whole, folder / "renamed.pt")
    write_characters(folder / "meta.pkl")
    loaded = imported(folder / "renamed.pt", tmp_path / "model")
    assert not loaded.config.model.bias
    assert difference(loaded, model, len(CHARACTERS)) < 1e-5


def refused(path, sentence, error=ConfigError):
    program, file = find_program(path)
    with pytest.raises(error, match=sentence):
        program.read(file, None).stored()


def test_nanogpt_that_is_not_read(tmp_path):
    model = gpt2(len(CHARACTERS), "gelu")
    folder = nanogpt_folder(tmp_path / "out", model)
    refused(folder, "has 16 tokens, so not GPT-2's, and there is no meta.pkl: copy")
    (folder / "meta.pkl").write_bytes(pickle.dumps(pytest.raises))
    refused(folder, "asks for _pytest.raises.raises, and a pickle can run code")
    write_characters(folder / "meta.pkl", CHARACTERS[::-1])
    refused(folder, "not in the order of their codes")
    write_characters(folder / "meta.pkl")
    whole = torch.load(folder / "ckpt.pt")
    lacks = {**whole, "model": {**whole["model"]}}
    del lacks["model"]["transformer.h.1.ln_2.weight"]
    torch.save(lacks, folder / "ckpt.pt")
    refused(folder, r"ckpt.pt lacks transformer.h.1.ln_2.weight", CorruptError)
    torch.save({**whole, "model_args": {**whole["model_args"], "n_expert": 2}}, folder / "ckpt.pt")
    refused(folder, "GPTConfig has no n_expert")
    torch.save({**whole, "config": pytest.raises}, folder / "ckpt.pt")
    refused(folder, "more than tensors and plain values, and is not read, as a pickle can run code")
    (folder / "ckpt.pt").write_bytes((folder / "ckpt.pt").read_bytes()[:3000])
    refused(folder, "cannot be opened", CorruptError)


def test_a_name_in_a_checkpoint_is_no_path(tmp_path):
    """`data/DATASET` is looked into for a plain name alone."""
    model = gpt2(len(CHARACTERS), "gelu")
    write_characters(tmp_path / "elsewhere" / "meta.pkl")
    found = nanogpt_folder(tmp_path / "out", model, config={"dataset": "../elsewhere"})
    (tmp_path / "data").mkdir()
    refused(found, "there is no meta.pkl")


@pytest.mark.parametrize(("version", "dtype"), [(3, torch.float32), (5, torch.bfloat16)])
def test_llm_c(tmp_path, version, dtype):
    model = gpt2(BPE.vocab_size, "gelu_new")
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()
    state, padded = as_nanogpt(model), BPE.vocab_size + 20
    state["transformer.wte.weight"] = torch.nn.functional.pad(
        state["transformer.wte.weight"], (0, 0, 0, 20), value=7.0
    )
    config = model.config
    header = np.zeros(256, dtype="<i4")
    header[:5] = 20240326, version, config.n_positions, config.vocab_size, config.n_layer
    header[5:8] = config.n_head, config.n_embd, padded
    in_layers = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    for module in in_layers:
        for kind in ("weight", "bias"):
            names += [f"transformer.h.{layer}.{module}.{kind}" for layer in range(config.n_layer)]
    names += ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    whole = torch.cat([state[name].flatten() for name in names]).to(dtype)
    path, tokenizer = tmp_path / "gpt2.bin", tmp_path / "tokenizer.json"
    numbers = whole.view(torch.uint8 if dtype == torch.float32 else torch.int16).numpy()
    path.write_bytes(header.tobytes() + numbers.tobytes())
    tokenizer.write_bytes(BPE.to_bytes())
    loaded = imported(path, tmp_path / "model", "--tokenizer", str(tokenizer))
    assert difference(loaded, model, BPE.vocab_size) < 1e-5
    path.write_bytes(path.read_bytes()[:-4])
    refused(path, r"has [\d,]+ bytes; its header asks for [\d,]+", CorruptError)
    header[1] = 4
    path.write_bytes(header.tobytes())
    refused(path, "has version 4 of llm.c's format; 3, 5 are read")
    header[1:3] = 3, -5
    path.write_bytes(header.tobytes())
    refused(path, "no sizes of a model", CorruptError)


class Encoding:
    """What tiktoken pickles of its encodings."""

    __module__, __qualname__ = "tiktoken.core", "Encoding"


@pytest.fixture(scope="module")
def tiktoken():
    return pytest.importorskip("tiktoken")


def encoding(tiktoken):
    """nanochat's kind of tokenizer: some merges, and its special tokens behind them."""
    ranks = {bytes([number]): number for number in range(256)}
    for token in (b"th", b"the", b" a", b"at", b" the", b"\xc3\xa4", b"ab", b"bc", b"abc", b"  "):
        ranks[token] = len(ranks)
    names = ["bos", "user_start", "user_end", "assistant_start", "assistant_end"]
    special = {f"<|{name}|>": len(ranks) + i for i, name in enumerate(names)}
    pattern = r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s+(?!\S)|\s+"
    return tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def renamed(name, parts):
    """A tensor's name with each part of it replaced that is a key."""
    for theirs, its in parts.items():
        name = name.replace(theirs, its)
    return name


def nanochat_folder(path, model, tokenizer, **more):
    """A checkpoint of nanochat with the weights of transformers' model, rows padded to 64."""
    path.mkdir(parents=True)
    names = {"embed_tokens": "wte", "self_attn.q_proj": "attn.c_q", "self_attn.k_proj": "attn.c_k"}
    names |= {"self_attn.v_proj": "attn.c_v", "self_attn.o_proj": "attn.c_proj", "layers.": "h."}
    names |= {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj", "model.": "transformer."}
    state = {}
    for name, weight in model.state_dict().items():
        n_padding = -weight.shape[0] % 64 if weight.shape[0] == tokenizer.n_vocab else 0
        padded = torch.nn.functional.pad(weight, (0, 0, 0, n_padding), value=9.0)
        state[renamed(name, names)] = padded
    torch.save(state | more, path / "model_000020.pt")
    torch.save({}, path / "model_000010.pt")
    config = model.config
    sizes = {"sequence_len": config.max_position_embeddings, "vocab_size": config.vocab_size}
    sizes |= {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": config.hidden_size}
    (path / "meta_000020.json").write_text(json.dumps({"step": 20, "model_config": sizes}))
    return path


def nanochat_model(tokenizer):
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 12}
    config = transformers.NanoChatConfig(
        **sizes, vocab_size=tokenizer.n_vocab, rms_norm_eps=2.0**-23, rope_theta=10000.0
    )
    return drawn(transformers.NanoChatForCausalLM(config))


def test_nanochat(tmp_path, tiktoken):
    tokenizer = encoding(tiktoken)
    model = nanochat_model(tokenizer)
    base = tmp_path / "cache"
    folder = nanochat_folder(base / "base_checkpoints" / "d2", model, tokenizer)
    refused(folder, "has no tokenizer: copy nanochat's tokenizer.pkl to")
    (base / "tokenizer").mkdir()
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(tokenizer))
    loaded = imported(folder, tmp_path / "model")
    assert difference(loaded, model, tokenizer.n_vocab) < 2e-5
    bos, start, end, answer, answered = range(266, 271)
    assert [*loaded.tokenizer.prefix] == [bos]
    text = "the äther, abc at 12345  <|bos|>\n\n x"
    assert loaded.tokenizer.encode(text).tolist() == tokenizer.encode_ordinary(text)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the?"},
        {"role": "assistant", "content": " abc"},
    ]
    with Rendering(loaded.tokenizer.chat) as rendering:
        ((segments,),) = rendering.documents([RenderRequest(messages, targets=[2])])
    ((ids, mask),) = loaded.tokenizer.encode_segments([segments], is_rendered=True)
    read = tokenizer.encode_ordinary("be brief\n\nthe?")
    written = [*tokenizer.encode_ordinary(" abc"), answered]
    assert ids.tolist() == [bos, start, *read, end, answer, *written]
    assert ids[mask].tolist() == written
    (folder / "meta_000020.json").unlink()
    refused(folder, "meta_000020.json, which has its sizes, is not beside it")


def test_nanochat_of_later_months_is_refused(tmp_path, tiktoken):
    tokenizer = encoding(tiktoken)
    later = {"resid_lambdas": torch.ones(2), "value_embeds.1.weight": torch.ones(3, 2)}
    folder = nanochat_folder(tmp_path / "d2", nanochat_model(tokenizer), tokenizer, **later)
    refused(folder, "since January 2026, with resid_lambdas, value_embeds, which no model here has")


def test_an_encoding_is_no_other_object(tmp_path):
    path = tmp_path / "tokenizer.pkl"
    path.write_bytes(pickle.dumps(os.path.join))
    with pytest.raises(ConfigError, match=r"asks for posixpath.join, and a pickle can run code"):
        read_encoding(path)
    path.write_bytes(pickle.dumps({"pat_str": "x"}))
    with pytest.raises(ConfigError, match=r"holds no tiktoken.Encoding"):
        read_encoding(path)


LITGPT = {
    "name": "some",
    "hf_config": {"org": "someone", "name": "some"},
    "block_size": 12,
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 8,
    "vocab_size": BPE.vocab_size,
    "padded_vocab_size": BPE.vocab_size + 4,
    "norm_class_name": "RMSNorm",
    "norm_eps": 1e-5,
    "parallel_residual": False,
    "rotary_percentage": 1.0,
    "rope_base": 10000,
    "bias": False,
    "attn_bias": False,
    "intermediate_size": 24,
    "mlp_class_name": "LLaMAMLP",
    "n_expert": 0,
    "rope_condense_ratio": 1,
    "sliding_window_size": None,
}


def litgpt_folder(path, sizes, state):
    yaml = pytest.importorskip("yaml")
    path.mkdir()
    (path / "model_config.yaml").write_text(yaml.safe_dump(sizes))
    (path / "tokenizer.json").write_bytes(BPE.to_tokenizer_json())
    (path / "config.json").write_text('{"model_type": "llama"}')  # litgpt copies it
    torch.save(state, path / "lit_model.pth")
    return path


def as_litgpt(model):
    """Llama's weights by litgpt's names, with queries, keys and values in one matrix."""
    names = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    names |= {"model.layers": "transformer.h", "input_layernorm": "norm_1"}
    names |= {"post_attention_layernorm": "norm_2", "self_attn.o_proj": "attn.proj"}
    names |= {"gate_proj": "fc_1", "up_proj": "fc_2", "down_proj": "proj"}
    state, apart = {}, {}
    for theirs, weight in model.state_dict().items():
        name = renamed(theirs, names)
        (apart if "self_attn" in name else state)[name] = weight
    for layer in range(2):
        where = f"transformer.h.{layer}"
        parts = [apart[f"{where}.self_attn.{part}_proj.weight"] for part in "qkv"]
        state[f"{where}.attn.qkv.weight"] = torch.cat(parts)
    return state


LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 12,
    "vocab_size": BPE.vocab_size + 4,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("theirs", "its"),
    [
        ({}, {}),
        (
            {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 6},
            {"rope_adjustments": {**LLAMA3, "original_max_seq_len": 6}},
        ),
        ({"rope_type": "linear", "factor": 2.0}, {"rope_condense_ratio": 2}),
    ],
)
def test_litgpt(tmp_path, theirs, its):
    scaled = {"rope_parameters": {"rope_theta": 10000.0, **theirs}} if theirs else {}
    model = drawn(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **scaled)))
    folder = litgpt_folder(tmp_path / "out", {**LITGPT, **its}, {"model": as_litgpt(model)})
    loaded = imported(folder, tmp_path / "model")
    assert difference(loaded, model, BPE.vocab_size + 4) < 1e-5
    assert load_tokenizer(tmp_path / "model" / "tokenizer.json").vocab_size == BPE.vocab_size


@pytest.mark.parametrize(
    ("its", "sentence"),
    [
        ({"post_mlp_norm": True}, "post_mlp_norm=True is no part of a model here"),
        ({"a_new_key": 3}, "a_new_key=3 is no part"),
        ({"name": "Gemma-2-2b"}, "litgpt computes norms of Gemma in another way"),
        ({"mlp_class_name": "Other"}, "mlp_class_name='Other' is not read; possible: GptNeoxMLP"),
        ({"rope_adjustments": {"factor": 2}}, "is not read; it is with the keys factor"),
        (
            {"sliding_window_size": 4, "sliding_window_indices": [1, 0]},
            r"sliding_window_indices=\[1, 0\] is not read",
        ),
        ({"n_layer": "two"}, "model.n_layers"),
    ],
)
def test_litgpt_that_is_not_read(tmp_path, its, sentence):
    refused(litgpt_folder(tmp_path / "out", {**LITGPT, **its}, {}), sentence)


def test_litgpt_without_a_reader_of_yaml(tmp_path, monkeypatch):
    folder = litgpt_folder(tmp_path / "out", LITGPT, {})
    monkeypatch.setitem(sys.modules, "yaml", None)
    refused(folder, r"pip install 'pentameter\[litgpt\]'")


def test_litgpt_without_its_files(tmp_path):
    folder = litgpt_folder(tmp_path / "out", LITGPT, [1])
    refused(folder, "holds no state dict", CorruptError)
    (folder / "tokenizer.json").unlink()
    refused(folder, "has no tokenizer.json; copy the model's there")
    (folder / "model_config.yaml").write_text("a: [")
    refused(folder, "is no YAML", CorruptError)
    (folder / "model_config.yaml").unlink()
    refused(folder, "model_config.yaml is missing")


def test_a_folder_of_two_programs_asks_for_a_file(tmp_path):
    (tmp_path / "ckpt.pt").touch()
    (tmp_path / "lit_model.pth").touch()
    with pytest.raises(ConfigError, match=r"several programs: lit_model.pth .*; name a file"):
        find_program(tmp_path)
    assert find_program(tmp_path / "nothing") is None


def test_a_source_of_no_program_is_told_what_is_read(tmp_path):
    (tmp_path / "other.txt").touch()
    with pytest.raises(ConfigError, match=r"nor is it nanoGPT's ckpt.pt, nanochat's"):
        import_.run([str(tmp_path), "--out", str(tmp_path / "model")])
