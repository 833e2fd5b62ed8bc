"""A chat model of Hugging Face: imported, tuned by adapters on conversations, and back again."""

import json
import re
import shutil
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.cli.main import main
from pentameter.data.open_dataset import open_dataset
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.chat import CHATML_TEMPLATE
from pentameter.generation.loop import Generation, sampled_tokens

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATS = [
    [
        {"role": "user", "content": f"Wie heißt {n}?"},
        {"role": "assistant", "content": f"Er heißt {n * n}."},
        {"role": "user", "content": "Danke"},
        {"role": "assistant", "content": "Gern!"},
    ]
    for n in range(12)
]


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def theirs(request, tmp_path_factory):
    """A folder with a small random model and its tokenizer, as `transformers` saves them."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("hf")
    library = Tokenizer(models.BPE({token: n for n, token in enumerate(BYTE_CHARACTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if request.param == "qwen3":  # which cuts text before it: no tokenizer of GPT-2's kind
        words = pre_tokenizers.Split(Regex(r"\\p{L}+|\\s|[^\\p{L}\\s]"), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|im_end|>", chat_template=CHATML_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=259, n_positions=160, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=256, eos_token_id=258,
    )  # fmt: skip
    transformers.set_seed(3)
    model: Any = transformers.GPT2LMHeadModel(config)
    if request.param == "qwen3":
        qwen3 = transformers.Qwen3Config(
            vocab_size=259, max_position_embeddings=160, hidden_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=10, intermediate_size=48,
            tie_word_embeddings=True, bos_token_id=256, eos_token_id=258,
        )  # fmt: skip
        model = transformers.Qwen3ForCausalLM(qwen3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 'a' * 3 * 10**9 }}", "MiB of memory"),
        ("{% break %}", "not valid Jinja: 'break'"),
    ],
)
def test_a_template_that_cannot_be_is_refused_by_its_file(theirs, tmp_path, capsys, source, words):
    folder = tmp_path / "theirs"
    shutil.copytree(theirs, folder)
    file = folder / "chat_template.jinja"
    file.write_text(source)
    named = re.escape(f"the chat template {file}")
    assert main(["import", str(folder), "--out", str(tmp_path / "base")]) == 2
    assert re.search(f"{named} .*{words}.* remove it", capsys.readouterr().err)
    assert not (tmp_path / "base").exists()
    assert main(["sample", str(folder), "--chat", "--prompt", "hi"]) == 2  # of the folder itself
    assert re.search(f"{named} .*{words}", capsys.readouterr().err)


def test_import_tune_export(theirs, tmp_path, monkeypatch, capsys):
    import torch
    import transformers

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chat, base, run = tmp_path / "chat.jsonl", str(tmp_path / "base"), tmp_path / "run"
    chat.write_text("".join(json.dumps({"messages": each}) + "\n" for each in CHATS))
    assert main(["import", str(theirs), "--out", base]) == 0
    arguments = ["train", f"{base}/config.toml", "--init-from", base, "--run-dir", str(run)]
    arguments += ["--data.path", str(chat), "--lora.rank", "4"]
    arguments += ["--train.steps", "6", "--train.batch-size", "4", "--train.eval-interval", "6"]
    arguments += ["--optimizer.learning-rate", "0.01", "--train.compile", "false"]
    assert main([*arguments, "--train.precision", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "rank 4 of every linear layer" in said
    assert f"sample {run} --chat --prompt=Hello" in said

    loaded = load_model(run)
    template = transformers.AutoTokenizer.from_pretrained(theirs)
    train = open_dataset(loaded.config.data, tokenizer=loaded.tokenizer).split("train")
    mask = train.assistant.mask(0, train.n_tokens)
    for messages, (start, stop) in zip(
        CHATS, np.stack([train.document_bounds[:-1], train.document_bounds[1:]], 1), strict=False
    ):
        expected = template.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert train.tokens[start:stop].tolist() == expected["input_ids"]
        assert mask[start:stop].astype(int).tolist() == expected["assistant_masks"]

    capsys.readouterr()
    assert main(["eval", str(run), "--split", "train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == train.assistant.n_tokens
    assert main(["export", str(run), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    assert main(["export", str(run), "--to", "peft", "--out", str(tmp_path / "peft")]) == 0
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    question = CHATS[0][:1]
    ids = template.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    assert back.apply_chat_template(question, add_generation_prompt=True)["input_ids"] == ids
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    greedy = model.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    settings = Generation(0.0, max_new_tokens=24)
    ours = sampled_tokens(loaded.model, np.array(ids), 259, settings)
    assert greedy[0, len(ids) :].tolist() == [int(tokens[0]) for tokens in ours]
    written = {"gpt2": [256, 258], "qwen3": 258}  # the end of text, and of the template's answers
    assert model.generation_config.eos_token_id == written[model.config.model_type]
    # The same as an answer, which ends there, too.
    asked = ["sample", str(run), "--chat", "--prompt", CHATS[0][0]["content"], "--json"]
    capsys.readouterr()
    assert main([*asked, "--temperature", "0", "--max-new-tokens", "24"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, pad_token_id=0)
    ended = answer[0, len(ids) :].tolist()
    assert sample["token_ids"] == ended
    assert sample["text"] == back.decode(ended, skip_special_tokens=True)
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    n_modules = {"gpt2": 4, "qwen3": 7}[model.config.model_type]
    assert len(adapters) == 2 * n_modules * 2
    assert any(each.any() for name, each in adapters.items() if "lora_B" in name)


def test_templates_with_names_survive_import_and_export(theirs, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, base, out = tmp_path / "theirs", tmp_path / "base", tmp_path / "out"
    shutil.copytree(theirs, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert main(["import", str(folder), "--out", str(base)]) == 0
    assert main(["export", str(base), "--to", "hf", "--out", str(out)]) == 0
    for each in (folder, out):
        found = transformers.AutoTokenizer.from_pretrained(each).chat_template
        assert found == {"default": CHATML_TEMPLATE, "tool_use": "{{ tools }}"}
