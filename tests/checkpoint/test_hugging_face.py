"""GPT-2 both ways, held against `transformers` itself."""

from __future__ import annotations

import json
import os

import pytest
import torch

from pentameter.checkpoint.folders.load_model import load_model, open_model
from pentameter.checkpoint.folders.model_folder import save_model
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.hugging_face.folder import export_hf, read_hf
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.files.write import to_toml
from pentameter.config.schema import Config
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.generation.loop import generate
from pentameter.model.gpt import build_model

os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
transformers = pytest.importorskip("transformers")

TEXT = "the cat sat on the mat, and that was that; then the hat sat on the cat.\n" * 4
BPE = train_bpe([TEXT], 300)
CHARACTERS = CharTokenizer(TEXT + "é😀")

HARD = [
    "the mat",
    "",
    " ",
    "a  b\t\n\n c",
    "naïve — 😀 日本語",
    "it's that's",
    "\x00\x7f\r\n",
    "12345",
]


def configuration(**model):
    section = {
        "vocab_size": BPE.vocab_size,
        "vocab_multiple": 64,
        "context_length": 24,
        "n_layers": 3,
        "n_heads": 4,
        "d_model": 32,
        "init_std": 0.3,
        "dropout": 0.1,
        **model,
    }
    data = {"corpus": "stdlib", "tokenizer": "bpe:300"}
    return Config.model_validate({"model": section, "data": data, "train": {"batch_size": 2}})


def saved(folder, config, tokenizer=BPE, *, dtype=torch.float64):
    """A run with one checkpoint; every parameter is random, biases too."""
    model = build_model(config.model, seed=5, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if name.endswith("bias") or "norm" in name:
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    extra = {"config.toml": to_toml(config).encode(), "tokenizer.json": tokenizer.to_bytes()}
    store = CheckpointStore(folder / "checkpoints", run_id="r", config_hash="c")
    store.save(Contents(3, {"model": model_state(model)}, {"step": 3}, extra))
    return model


def open_there(folder, **options):
    return transformers.GPT2LMHeadModel.from_pretrained(folder, **options).eval()


@torch.inference_mode()
def logits_there(model, tokens):
    return model(tokens).logits


@torch.inference_mode()
def logits_here(model, tokens):
    return model(tokens)[..., : model.config.vocab_size]


def some_tokens(vocab_size):
    return torch.randint(vocab_size, (2, 24), generator=torch.Generator().manual_seed(2))


FORMS = [
    {},
    {"bias": True, "qkv_bias": True},
    {"bias": True, "activation": "relu", "vocab_multiple": 1},
    {"qkv_bias": True, "activation": "gelu_tanh", "tied_head": False},
    {"bias": True, "qkv_bias": True, "tied_head": False, "d_ff": 40, "embedding_dropout": 0.2},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_exported_model_computes_the_same_there(form, tmp_path):
    config = configuration(**form)
    model = saved(tmp_path / "run", config)
    exported = export_hf(open_model(tmp_path / "run"), tmp_path / "hf")
    assert exported.notes == ()
    theirs = open_there(tmp_path / "hf", dtype=torch.float64)
    tokens = some_tokens(BPE.vocab_size)
    expected = logits_here(model, tokens)
    found = logits_there(theirs, tokens)
    assert found.shape == (2, 24, BPE.vocab_size)  # rows that pad the vocabulary are gone
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert (theirs.config.resid_pdrop, theirs.config.attn_pdrop) == (0.1, 0.0)
    assert theirs.config.embd_pdrop == form.get("embedding_dropout", 0.1)
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == BPE.end_of_text
    assert theirs.config.n_ctx == 24  # GPT-2's first name for it, which llama.cpp asks for
    single = open_there(tmp_path / "hf", dtype=torch.float32)
    model.float()
    torch.testing.assert_close(
        logits_there(single, tokens), logits_here(model, tokens), rtol=0, atol=1e-5
    )


def test_transformers_finds_nothing_missing_and_nothing_too_much(tmp_path):
    saved(tmp_path / "run", configuration(), dtype=torch.float32)
    export_hf(open_model(tmp_path / "run"), tmp_path / "hf")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True
    )
    assert isinstance(model, transformers.GPT2LMHeadModel)
    assert next(model.parameters()).dtype == torch.float32
    assert {kind: list(names) for kind, names in report.items() if names} == {}


def their_model(folder, *, body_only=False, half=None, **options):
    """A random GPT-2 as `transformers` saves it, with our BPE's files beside it."""
    torch.manual_seed(3)
    settings = {
        "vocab_size": BPE.vocab_size,
        "n_positions": 24,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "initializer_range": 0.3,
        "bos_token_id": BPE.end_of_text,
        "eos_token_id": BPE.end_of_text,
    }
    save = {key: options.pop(key) for key in ("max_shard_size",) if key in options}
    config = transformers.GPT2Config(**{**settings, **options})
    model = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.to(half or torch.float64)
    (model.transformer if body_only else model).save_pretrained(folder, **save)
    tokenizer = transformers.GPT2Tokenizer(
        vocab=dict(BPE.vocabulary), merges=[tuple(merge) for merge in BPE.merges]
    )
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_inner": 48, "activation_function": "relu"},
        {"activation_function": "gelu", "tie_word_embeddings": False},
        {"activation_function": "gelu_pytorch_tanh", "max_shard_size": "60KB"},
        {"body_only": True},
        {"vocab_size": BPE.vocab_size + 7},
    ],
    ids=str,
)
def test_a_model_of_theirs_computes_the_same_here(options, tmp_path):
    theirs = their_model(tmp_path / "hf", **options)
    if "max_shard_size" in options:
        assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 2
    loaded = load_model(tmp_path / "hf")
    tokens = some_tokens(theirs.config.vocab_size)
    expected = logits_there(theirs, tokens)
    torch.testing.assert_close(logits_here(loaded.model, tokens), expected, rtol=0, atol=1e-10)
    assert loaded.checkpoint is None
    assert loaded.step == 0
    assert loaded.tokenizer.hash == BPE.hash
    assert loaded.config.model.dropout == 0.1


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32_exactly(half, tmp_path):
    theirs = their_model(tmp_path / "hf", half=half)
    loaded = load_model(tmp_path / "hf")
    assert loaded.model.token_embedding.weight.dtype == torch.float32
    tokens = some_tokens(BPE.vocab_size)
    expected = logits_there(theirs.float(), tokens)
    torch.testing.assert_close(logits_here(loaded.model, tokens), expected, rtol=0, atol=1e-5)


def test_there_and_back_is_the_same_bit_for_bit(tmp_path):
    theirs = their_model(tmp_path / "hf", half=torch.float32)
    export_hf(read_hf(tmp_path / "hf"), tmp_path / "again")
    again = open_there(tmp_path / "again")
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    kept = ("n_inner", "activation_function", "resid_pdrop", "attn_pdrop", "embd_pdrop")
    for key in ("n_positions", "n_embd", "n_head", "tie_word_embeddings", *kept[1:]):
        assert getattr(theirs.config, key) == getattr(again.config, key)


def test_greedy_text_is_the_same_there_and_here(tmp_path):
    model = saved(tmp_path / "run", configuration(context_length=64), dtype=torch.float32)
    export_hf(open_model(tmp_path / "run"), tmp_path / "hf")
    theirs = open_there(tmp_path / "hf")
    theirs.generation_config.eos_token_id = None  # neither stops
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    prompt = tokenizer("the cat", return_tensors="pt")
    ids = theirs.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
    (text,) = generate(model, BPE, "the cat", max_new_tokens=40, temperature=0)
    assert tokenizer.decode(ids) == "the cat" + text
    assert len(set(ids.tolist())) > 5
    loaded = load_model(tmp_path / "hf")
    assert generate(
        loaded.model, loaded.tokenizer, "the cat", max_new_tokens=40, temperature=0
    ) == [text]


@pytest.mark.parametrize("name", ["AutoTokenizer", "GPT2Tokenizer", "GPT2TokenizerFast"])
@pytest.mark.parametrize("kept", [None, "tokenizer.json", "vocab.json"])
def test_the_exported_bpe_encodes_the_same_there(name, kept, tmp_path):
    saved(tmp_path / "run", configuration())
    export_hf(open_model(tmp_path / "run"), tmp_path / "hf")
    others = {"tokenizer.json", "vocab.json", "merges.txt"}
    if kept is not None:
        for other in others - {kept, *(["merges.txt"] if kept == "vocab.json" else [])}:
            (tmp_path / "hf" / other).unlink()
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "hf")
    assert len(theirs) == BPE.vocab_size
    assert theirs.eos_token_id == BPE.end_of_text
    assert theirs.model_max_length == 24
    for text in HARD:
        ids = theirs(text)["input_ids"]
        assert ids == BPE.encode(text).tolist()
        assert theirs.decode(ids) == text
    ours = read_hf(tmp_path / "hf").tokenizer
    assert ours.hash == BPE.hash
    # The one difference: there the words of the special token become it.
    assert theirs("a<|endoftext|>")["input_ids"][-1] == BPE.end_of_text


def test_the_exported_characters_encode_the_same_there(tmp_path):
    config = configuration(vocab_size=CHARACTERS.vocab_size)
    saved(tmp_path / "run", config, CHARACTERS)
    assert export_hf(open_model(tmp_path / "run"), tmp_path / "hf").notes == ()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert len(theirs) == CHARACTERS.vocab_size
    for text in [TEXT, "é😀", "\n\n  the", ""]:
        ids = theirs(text)["input_ids"]
        assert ids == CHARACTERS.encode(text).tolist()
        assert theirs.decode(ids) == text
    with pytest.raises(Exception, match=r"unk|UNK"):  # the library raises plain Exception
        theirs("X")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] is None
    assert open_there(tmp_path / "hf").config.eos_token_id is None
    assert load_model(tmp_path / "hf").tokenizer.hash == CHARACTERS.hash


def of_another_kind(folder):
    """Give the folder's tokenizer.json a normaliser, cuts and an end of text unlike GPT-2's."""
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.normalizer = tokenizers.normalizers.Lowercase()
    pattern = r"\p{N}{1,3}| ?[^\s\p{N}]+|\s+"
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.add_special_tokens(["<|eot|>"])
    library.add_tokens(["<gap>"])
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eot|>"})
    )


def test_a_tokenizer_of_another_kind_is_taken_as_it_is(tmp_path):
    their_model(tmp_path / "hf", vocab_size=BPE.vocab_size + 2)
    of_another_kind(tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    stored = read_hf(tmp_path / "hf")
    ours = stored.tokenizer
    assert (ours.kind, ours.vocab_size) == ("library", BPE.vocab_size + 2)
    assert ours.end_of_text == theirs.eos_token_id == BPE.vocab_size
    for text in [*HARD, "THE CAT 12345", "a<gap>b"]:
        assert ours.encode(text).tolist() == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == text.lower()
    assert ours.end_of_text not in ours.encode("a<|eot|>b")  # no text forges the end of another
    assert ours.decode([ours.end_of_text]) == "<|eot|>"
    export_hf(stored, tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("THE CAT 12345")["input_ids"] == theirs("THE CAT 12345")["input_ids"]
    assert again.eos_token_id == theirs.eos_token_id
    written = json.loads((tmp_path / "again" / "tokenizer.json").read_text())
    assert written == json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    assert read_hf(tmp_path / "again").tokenizer.hash == ours.hash
    save_model(stored, tmp_path / "own")
    assert load_model(tmp_path / "own").tokenizer.hash == ours.hash
    assert read_hf(tmp_path / "hf", tokenizer=BPE).tokenizer is BPE


def test_added_tokens_keep_their_ids_and_are_named(tmp_path):
    model = their_model(tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs.add_special_tokens({"pad_token": "[PAD]"})
    theirs.save_pretrained(tmp_path / "hf")
    model.resize_token_embeddings(len(theirs))
    model.save_pretrained(tmp_path / "hf")
    warnings: list[str] = []
    stored = read_hf(tmp_path / "hf", warnings=warnings)
    assert stored.tokenizer.vocab_size == BPE.vocab_size + 1
    assert stored.tokenizer.decode([theirs.pad_token_id]) == "[PAD]"
    assert len(warnings) == 1
    assert "[PAD]" in warnings[0]


@pytest.mark.parametrize(
    ("temperature", "drawn"),
    [(1.0, {}), (0.0, {"do_sample": False}), (0.7, {"do_sample": True, "temperature": 0.7})],
)
def test_generation_there_knows_how_far_and_how(tmp_path, temperature, drawn):
    config = configuration()
    train = config.train.model_copy(update={"sample_temperature": temperature})
    saved(tmp_path / "run", config.model_copy(update={"train": train}))
    export_hf(open_model(tmp_path / "run"), tmp_path / "hf")
    theirs = open_there(tmp_path / "hf").generation_config
    end = BPE.end_of_text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (end, end, end)
    assert theirs.max_length == 24
    said = json.loads((tmp_path / "hf/generation_config.json").read_text())
    keys = ("do_sample", "temperature", "top_k", "top_p")
    assert {key: said[key] for key in keys if key in said} == drawn


def test_generation_there_begins_as_the_model_learned_and_so_does_what_comes_back(tmp_path):
    saved(tmp_path / "run", configuration())
    stored = open_model(tmp_path / "run")
    newline = int(BPE.encode("\n")[0])
    stored.tokenizer.opening = (newline,)
    export_hf(stored, tmp_path / "hf")
    assert open_there(tmp_path / "hf").generation_config.bos_token_id == newline
    back = open_model(tmp_path / "hf").tokenizer
    assert (tuple(back.opening), back.end_of_text) == ((newline,), BPE.end_of_text)
