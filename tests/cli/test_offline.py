"""What needs no network: planning with GPT-2's vocabulary, fine-tuning a folder with its own."""

import json
import shutil
import urllib.request

import pytest

from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.hugging_face.folder import export_hf
from pentameter.checkpoint.hugging_face.tokenizer_files import read_tokenizer
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.cli.main import main
from pentameter.config.schema import Config
from pentameter.data.tokenizers.setting import gpt2_tokenizer
from pentameter.errors import StorageError
from pentameter.model.gpt import build_model

TINY = ("context_length", "n_layers", "n_heads", "d_model")


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    """A tiny GPT-2 with GPT-2's own tokenizer."""
    try:
        tokenizer = gpt2_tokenizer()
    except StorageError:
        pytest.skip("GPT-2's tokenizer files are not at hand")
    config = Config.model_validate(
        {
            "model": {"vocab_size": tokenizer.vocab_size, **dict.fromkeys(TINY, 2)},
            "data": {"corpus": "stdlib"},
            "train": {"batch_size": 2},
        }
    )
    weights = model_state(build_model(config.model, seed=5))
    stored = StoredModel(None, config, tokenizer, weights, (), None)
    return export_hf(stored, tmp_path_factory.mktemp("hf") / "gpt2").path


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Nothing at hand, and every download is told."""
    downloads = []

    def refuse(url, **_):
        downloads.append(url)
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.delenv("PENTAMETER_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return downloads


@pytest.mark.parametrize(
    "preset",
    ["gpt2-124m", "gpt2-124m-budget", "gpt2-350m", "gpt2-774m", "gpt2-1558m", "gpt3-175b"],
)
def test_a_dry_run_needs_neither_tokenizer_nor_text(offline, capsys, tmp_path, preset):
    for stated in ([], ["--model.vocab-size", "none"]):
        assert main(["train", preset, *stated, "--dry-run"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["steps"] > 0
        assert plan["model"]["vocab_size_padded"] >= 50257
    assert offline == []
    assert list(tmp_path.iterdir()) == []


def test_an_epoch_that_nobody_can_count_is_null(offline, capsys):
    assert main(["train", "gpt2-xl-hybrid", "--dry-run"]) == 0
    said = capsys.readouterr()
    plan = json.loads(said.out)
    assert plan["model"]["parameters"] == 1_557_686_400
    unknown = ["rows_per_epoch", "steps", "total_tokens", "total_flops"]
    assert [key for key in plan if plan[key] is None] == sorted(unknown, key=list(plan).index)
    assert f"null are {', '.join(unknown)}" in said.err
    assert main(["train", "gpt2-xl-hybrid", "--train.steps", "5", "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["steps"] == 5  # only evaluation is counted in epochs
    assert plan["total_tokens"] == 5 * 196_608
    assert plan["rows_per_epoch"] is None
    asked = ["plan", "gpt2-xl-hybrid", "--cluster", "a100-40gb:8x1"]
    assert main([*asked, "--price", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "how many steps, the text must tell" in said
    assert "device-hours" not in said
    assert main([*asked, "--price", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["price"] is found["time"]["run_seconds"] is found["time"]["device_hours"] is None
    assert offline == []


def test_a_folder_is_fine_tuned_with_its_own_tokenizer(hf_folder, offline, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It is what it is, and that is that.\n" * 50)
    assert main(["import", str(hf_folder), "--out", "in"]) == 0
    tune = ["train", "in/config.toml", "--data.path", str(text), "--data.tokenizer", "gpt2"]
    tune += ["--train.batch-size=2", "--train.compile=false", "--train.eval-interval=none"]
    assert main([*tune, "--init-from", "in", "--train.steps=2", "--run-dir", "run"]) == 0
    again = [*tune, "--init-from", "in", "--train.steps=3", "--run-dir", "run"]
    shutil.move("in/tokenizer.json", "elsewhere.json")
    assert main(again) == 0  # the run has its own by now
    shutil.move("elsewhere.json", "in/tokenizer.json")
    assert 'tokenizer = "gpt2"' in (tmp_path / "run" / "config.toml").read_text()
    capsys.readouterr()
    for model in ("in", "run", str(hf_folder)):
        counted = ["--train.epochs=1", "--init-from", model, "--dry-run"]
        assert main([*tune, *counted]) == 0
        assert json.loads(capsys.readouterr().out)["rows_per_epoch"] > 0
    assert main([*tune, "--train.steps=3", "--run-dir", "other"]) == 74  # there is no folder to ask
    assert len(offline) == 1


def test_prepared_shards_bring_their_tokenizer(hf_folder, offline, tmp_path):
    (tmp_path / "text.txt").write_text("It is what it is, and that is that.\n" * 50)
    read_tokenizer(hf_folder, []).save(tmp_path / "tokenizer.json")
    prepare = ["prepare", "text.txt", "--tokenizer"]
    assert main([*prepare, "tokenizer.json", "--out", "shards"]) == 0
    assert main([*prepare, "bpe:260", "--out", "others"]) == 0
    plan = ["train", "gpt2-xl-hybrid", "--dry-run", "--data.order=shuffled"]
    plan += ["--model.context-length=8", "--data.path"]
    assert main([*plan, "shards"]) == 0
    assert main([*plan, "others"]) == 2
    assert offline == []
