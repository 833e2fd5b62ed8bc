"""`train --init-from FOLDER` without a preset: the model's own configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pentameter.checkpoint.folders.load_model import load_model, open_model
from pentameter.cli.main import main
from pentameter.config.files.load import load_config
from pentameter.config.model.architecture import architecture

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))  # for `their_models`
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"{n} plus {n}?"},
            {"role": "assistant", "content": f"It is {2 * n}."},
        ]
    }
    for n in range(40)
]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SMALL = ["--train.steps=1", "--train.batch-size=4", "--train.precision=fp32"]
SMALL += ["--train.compile=false", "--train.sample-interval=none"]
FAMILIES = {
    "gpt2": {},
    "llama": {"hidden_size": 24},
    "qwen3_moe": {"head_dim": 6, "num_key_value_heads": 2},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, short_measurement) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    return tmp_path


def theirs(path: Path, family: str) -> Path:
    """A folder of Hugging Face with a chat template."""
    from their_models import BPE, their_model, transformers

    if family == "gpt2":
        small = {"n_embd": 24, "n_head": 2, "n_layer": 2, "n_positions": 64}
        ids = {f"{use}_token_id": BPE.end_of_text for use in ("bos", "eos")}
        config = transformers.GPT2Config(vocab_size=BPE.vocab_size, **small, **ids)
        transformers.GPT2LMHeadModel(config).save_pretrained(path)
        transformers.GPT2Tokenizer(
            vocab=dict(BPE.vocabulary), merges=[tuple(merge) for merge in BPE.merges]
        ).save_pretrained(path)
    else:
        sizes = {**FAMILIES[family], "max_position_embeddings": 64}
        import torch

        their_model(path, family, sizes, dtype=torch.float32)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_trained_on_by_itself(folder, capsys, family):
    pytest.importorskip("transformers")
    model = theirs(folder / "model", family)
    command = ["train", "--init-from", "model", "--data.path", "chats.jsonl", *SMALL]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "chats-tuned · seed" in said
    assert "init    the weights of model\n" in said
    assert "answers alone are" in said  # the template has marked them
    run, stored = load_model(folder / "runs" / "chats-tuned"), open_model(model)
    different = {"embedding_dropout"}  # which a plan resolves
    ours, theirs_ = (architecture(each.config.model.resolved) for each in (run, stored))
    assert {key for key in ours if ours[key] != theirs_[key]} <= different
    assert run.tokenizer.hash == stored.tokenizer.hash
    assert run.tokenizer.chat.source == TEMPLATE
    shutil.rmtree(folder / "cache")  # which is written again
    assert main(command) == 0
    assert "complete already" in capsys.readouterr().out
    assert main(["sample", "runs/chats-tuned", "--chat", "--prompt", "Hi", *["--seed", "1"]]) == 0


def test_a_text_is_trained_on_with_a_folder(folder, capsys):
    pytest.importorskip("transformers")
    theirs(folder / "model", "llama")
    (folder / "cats.txt").write_text("the cat sat on the mat. " * 60)
    assert main(["train", "cats.txt", "--init-from", "model", "--print-config"]) == 0
    said = capsys.readouterr().out
    assert "d_model = 24" in said
    assert 'name = "cats-tuned"' in said


def test_a_folder_gives_its_own_learning_rate_and_any_key_is_overridden(folder, capsys):
    pytest.importorskip("transformers")
    theirs(folder / "model", "llama")
    given = ["train", "--init-from", "model", "--data.path", "chats.jsonl", "--train.steps", "7"]
    assert main([*given, "--print-config"]) == 0
    (folder / "printed.toml").write_text(capsys.readouterr().out)
    config = load_config(folder / "printed.toml")
    assert (config.train.steps, config.optimizer.learning_rate) == (7, 3e-5)
    assert Path(config.data.tokenizer).is_relative_to(folder / "cache")


def test_a_run_is_trained_on_by_itself(folder, capsys):
    (folder / "cats.txt").write_text("the cat sat on the mat. " * 60)
    tiny = ["--model.n-layers=1", "--model.d-model=16", "--model.attention.n-heads=2"]
    assert main(["train", "cats.txt", *tiny, "--model.context-length=16", *SMALL]) == 0
    given = ["train", "--init-from", "runs/cats", "--data.path", "cats.txt", *SMALL]
    assert main(given) == 0
    assert "init    the weights of runs/cats\n" in capsys.readouterr().out
    assert (folder / "runs" / "cats-tuned" / "config.toml").is_file()


def test_what_is_missing_is_said(folder, capsys):
    assert main(["train"]) == 2
    assert "what to train is not said" in capsys.readouterr().err
    assert main(["train", "--init-from", "nothing", "--data.path", "chats.jsonl"]) == 2
    assert "nothing does not exist" in capsys.readouterr().err


def test_a_run_is_trained_on_other_text_with_its_own_tokenizer(folder, capsys):
    (folder / "cats.txt").write_text("the cat sat on the mat. " * 60)
    (folder / "dogs.txt").write_text("dogs bark at night; so does Bert. " * 60)
    tiny = ["--model.n-layers=1", "--model.d-model=16", "--model.attention.n-heads=2"]
    tiny += ["--model.context-length=16", "--data.tokenizer=bpe:270"]
    assert main(["train", "cats.txt", *tiny, *SMALL]) == 0
    command = ["train", "--init-from", "runs/cats", "--data.path", "dogs.txt", *SMALL]
    assert main(command) == 0
    runs = (load_model(folder / "runs" / name) for name in ("cats", "dogs-tuned"))
    assert len({run.tokenizer.hash for run in runs}) == 1
    shutil.rmtree(folder / "cache")  # which is written again
    assert main(command) == 0
    assert "complete already" in capsys.readouterr().out
    assert main([*command, "--name=another", "--data.tokenizer=bpe:260"]) == 2
    assert "is not the data's" in capsys.readouterr().err
