"""`pentameter export` and `pentameter import`, and the folders they make as MODEL."""

from __future__ import annotations

import json

import pytest
import torch

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.cli.main import main
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import CHATML_TEMPLATE, ChatTemplate
from pentameter.data.tokenizers.render_client import Rendering
from pentameter.model.gpt import build_model
from pentameter.train.keep.own_configuration import with_micro_batch

TEXT = "the cat sat on the mat, and that was that.\n" * 40
BPE = train_bpe([TEXT], 280)


@pytest.fixture
def make(tmp_path):
    def make(tokenizer=BPE, **model):
        config = Config.model_validate(
            {
                "model": {
                    "vocab_size": tokenizer.vocab_size,
                    "vocab_multiple": 64,
                    "context_length": 16,
                    "n_layers": 2,
                    "n_heads": 2,
                    "d_model": 16,
                    "init_std": 0.3,
                    **model,
                },
                "data": {"corpus": "stdlib"},
                "train": {"batch_size": 2},
            }
        )
        weights = model_state(build_model(config.model, seed=5))
        stored = StoredModel(tmp_path, config, tokenizer, weights, (), None)
        return save_model(stored, tmp_path / "model")

    return make


def said(capsys, *arguments):
    assert main(list(map(str, arguments))) == 0
    return capsys.readouterr().out


def greedy(capsys, model):
    return said(
        capsys, "sample", model, "--prompt", "the", "--temperature", "0", "--max-new-tokens", "30"
    )


def test_out_and_in_again_every_folder_is_a_model(make, tmp_path, capsys):
    model = make()
    text = greedy(capsys, model)
    assert "step 0" in said(capsys, "export", model, "--to", "hf", "--out", tmp_path / "hf")
    assert "2 layers, d_model 16" in said(
        capsys, "import", tmp_path / "hf", "--out", tmp_path / "in"
    )
    said(capsys, "export", tmp_path / "hf", "--to", "safetensors", "--out", tmp_path / "plain")
    said(capsys, "export", tmp_path / "in", "--to", "hf", "--out", tmp_path / "hf2")
    for name in ("hf", "in", "plain", "hf2"):
        assert greedy(capsys, tmp_path / name) == text, name
    for name in ("config.json", "model.safetensors", "tokenizer.json", "vocab.json", "merges.txt"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "hf2" / name).read_bytes()
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert names == {
        *("model.safetensors", "config.toml", "tokenizer.json", "state.json", "manifest.json")
    }


@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_an_export_says_what_ends_answers_and_asks_the_template_once(
    make, tmp_path, capsys, monkeypatch, to
):
    started, start = [], Rendering.__enter__
    monkeypatch.setattr(Rendering, "__enter__", lambda it: (started.append(it), start(it))[1])
    tokenizer = train_bpe([TEXT], 280)
    tokenizer.chat = ChatTemplate(CHATML_TEMPLATE)
    model = make(tokenizer)
    assert main(["export", str(model), "--to", to, "--out", str(tmp_path / to)]) == 0
    told = capsys.readouterr().err
    assert "no token ends an answer, but the text '<|im_end|>', which an export cannot name" in told
    assert len(started) == 1


def test_an_export_of_characters_says_that_it_has_no_template(make, tmp_path, capsys):
    tokenizer = CharTokenizer(TEXT)
    tokenizer.chat = ChatTemplate(CHATML_TEMPLATE)
    out = tmp_path / "hf"
    assert main(["export", str(make(tokenizer)), "--to", "hf", "--out", str(out)]) == 0
    assert "the chat template is left out: the tokenizer (char)" in capsys.readouterr().err
    assert not (out / "chat_template.jinja").exists()


def test_an_exported_checkpoint_keeps_its_configuration(make, tmp_path, capsys):
    model = make(CharTokenizer(TEXT), norm_position="post", head_bias=True)
    said(capsys, "export", model, "--to", "safetensors", "--out", tmp_path / "plain")
    before, after = load_model(model), load_model(tmp_path / "plain")
    assert before.config == after.config
    tokens = torch.tensor([[3, 1, 2]])
    assert torch.equal(before.model(tokens), after.model(tokens))


def test_eval_reads_a_hugging_face_folder(make, tmp_path, capsys):
    model = make()
    said(capsys, "export", model, "--to", "hf", "--out", tmp_path / "hf")
    (tmp_path / "text.txt").write_text(TEXT * 5)
    data = ["--data.path", tmp_path / "text.txt", "--data.validation-fraction", "0.2", "--json"]
    found = [json.loads(said(capsys, "eval", path, *data)) for path in (model, tmp_path / "hf")]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-6)
    assert found[1]["step"] == 0
    assert main(["eval", str(tmp_path / "hf")]) == 2
    assert (
        "is a Hugging Face folder, which names no text: add --data.path" in capsys.readouterr().err
    )


def test_an_imported_configuration_names_its_tokenizer(make, tmp_path, capsys):
    said(capsys, "export", make(), "--to", "hf", "--out", tmp_path / "hf")
    output = said(capsys, "import", tmp_path / "hf", "--out", tmp_path / "in")
    command = f"train {tmp_path}/in/config.toml --init-from {tmp_path}/in --name in-tuned"
    assert f"{command} --data.path FILE" in output
    assert main(["import", str(tmp_path / "hf"), "--out", str(tmp_path / "hf")]) == 2
    assert "is the folder to import; choose another" in capsys.readouterr().err
    config = load_config(tmp_path / "in" / "config.toml", ["--data.path", "x.txt"])
    assert config.data.tokenizer == str((tmp_path / "in" / "tokenizer.json").resolve())
    assert config.data.corpus is None
    assert config.model.vocab_size == BPE.vocab_size


def test_a_tokenizer_can_be_given(make, tmp_path, capsys):
    said(capsys, "export", make(), "--to", "hf", "--out", tmp_path / "hf")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (tmp_path / "hf" / name).unlink()
    arguments = ["import", str(tmp_path / "hf"), "--out", str(tmp_path / "in")]
    assert main(arguments) == 2
    assert "--tokenizer gpt2" in capsys.readouterr().err
    assert main([*arguments, "--tokenizer", "bpe:280"]) == 2
    assert "weights go with the tokenizer" in capsys.readouterr().err
    BPE.save(tmp_path / "bpe.json")
    said(capsys, *arguments, "--tokenizer", tmp_path / "bpe.json")
    assert load_model(tmp_path / "in").tokenizer.hash == BPE.hash


def test_refusals_are_one_line_and_leave_nothing(make, tmp_path, capsys):
    model = make(positions="sinusoidal")
    for arguments, code, message in [
        (["export", model, "--to", "hf", "--out", tmp_path / "x"], 2, "positions='sinusoidal'"),
        (["export", model, "--to", "hf", "--out", model], 2, "not an empty folder"),
        (["export", tmp_path / "no", "--to", "hf", "--out", tmp_path / "x"], 2, "does not exist"),
        (["import", model, "--out", tmp_path / "x"], 2, "it has no config.json"),
        (["import", tmp_path / "no", "--out", tmp_path / "x"], 2, "it has no config.json"),
    ]:
        assert main(list(map(str, arguments))) == code
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_damaged_checkpoint_is_not_exported(make, tmp_path, capsys):
    model = make()
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert main(["export", str(model), "--to", "hf", "--out", str(tmp_path / "x")]) == 65
    assert "model.safetensors is damaged" in capsys.readouterr().err


def test_a_moved_import_still_fine_tunes(make, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said(capsys, "export", make(), "--to", "hf", "--out", tmp_path / "hf")
    said(capsys, "import", tmp_path / "hf", "--out", tmp_path / "in")
    moved = (tmp_path / "in").rename(tmp_path / "moved")
    (tmp_path / "song.txt").write_text(TEXT)
    options = ["--data.path", tmp_path / "song.txt", "--train.steps", "1", "--run-dir"]
    options += [tmp_path / "run", "--train.batch-size", "1", "--train.compile", "false"]
    said(capsys, "train", moved / "config.toml", "--init-from", moved, *options)
    assert load_model(tmp_path / "run").tokenizer.hash == BPE.hash


def test_an_imported_models_batch_is_whole_where_its_activations_are_few():
    for preset, size in (("quickstart", None), ("gpt2-1558m", 1)):
        train = {"train.tokens_per_step": "none", "train.batch_size": 32}
        one = {"model.vocab_size": 50257, **train, "train.micro_batch_size": 1}
        sized = with_micro_batch(load_config(preset, one)).train.micro_batch_size
        assert sized == size, preset
