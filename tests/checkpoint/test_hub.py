"""Models to the Hub and from it, over HTTP: whole, verified, and without a secret in a message."""

import json
import sys
from pathlib import Path

import pytest
from local_hub import TOKEN, Repository, local_hub

from pentameter.checkpoint.folders.load_model import load_model, open_model
from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.hugging_face.folder import export_hf
from pentameter.checkpoint.hugging_face.hub import HubAddress, hub_address
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.cli.main import main
from pentameter.config.schema import Config
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.model.gpt import build_model

hub_library = pytest.importorskip("huggingface_hub", reason="needs the extra hub")

NAME = "owner/small"
TOKENIZER = CharTokenizer("the cat sat on the mat.")


@pytest.fixture(scope="module")
def one_hub():
    with local_hub() as server:
        yield server


@pytest.fixture
def hub(one_hub, tmp_path, monkeypatch):
    """A Hub without repositories, to which this process is logged in."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name, value in {
        "ENDPOINT": one_hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": one_hub.endpoint
        + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_OFFLINE": False,  # other tests switch the network off
        "HF_TOKEN_PATH": str(tmp_path / "token"),
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the library asks again
    one_hub.repositories.clear()
    one_hub.stored.clear()
    one_hub.failures.clear()
    one_hub.push_failures.clear()
    one_hub.requests.clear()
    one_hub.status = None
    return one_hub


@pytest.fixture
def model(tmp_path):
    """A checkpoint folder."""
    config = Config.model_validate(
        {
            "model": {
                **{"vocab_size": TOKENIZER.vocab_size, "context_length": 16, "n_layers": 2},
                **{"n_heads": 2, "d_model": 16, "init_std": 0.3},
            },
            "data": {"corpus": "stdlib"},
            "train": {"batch_size": 2},
        }
    )
    weights = model_state(build_model(config.model, seed=5))
    stored = StoredModel(tmp_path, config, TOKENIZER, weights, (), None)
    return save_model(stored, tmp_path / "model")


@pytest.fixture
def published(hub, model, tmp_path):
    """The Hub with that model in it, and files beside that nobody should fetch."""
    folder = export_hf(open_model(model), tmp_path / "exported").path
    repository = hub.repositories[NAME] = Repository()
    repository.files = {path.name: path.read_bytes() for path in folder.iterdir()}
    repository.files |= {
        "pytorch_model.bin": b"a pickle", "modeling_own.py": b"raise SystemExit",
        "README.md": b"a card", "model.fp16.safetensors": b"another precision",
        "onnx/config.json": b"{}", "onnx/model.safetensors": b"of another folder",
    }  # fmt: skip
    return hub


def said(capsys, *arguments, code=0):
    assert main(list(map(str, arguments))) == code
    output = capsys.readouterr()
    assert TOKEN not in output.out + output.err
    if code:
        assert len(output.err.splitlines()) == 1
    return output.err if code else output.out


def greedy(capsys, model):
    options = ["--prompt", "the", "--temperature", "0", "--max-new-tokens", "30"]
    return said(capsys, "sample", model, *options)


def test_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_address("hf://owner/small") == HubAddress("owner/small")
    assert hub_address("hf://owner/small@v1.0") == HubAddress("owner/small", "v1.0")
    (tmp_path / "runs").mkdir()
    assert hub_address(Path("hf://owner/small@refs/pr/1")) == HubAddress("owner/small", "refs/pr/1")
    for text in ("owner/small", "runs/small", "hf://small", "hf://a/b/c", "s3://a/b", "/a/b"):
        assert hub_address(text) is None
    assert hub_address("owner/small", scheme=False) == HubAddress("owner/small")
    assert hub_address("runs/small", scheme=False) is None  # a typing error, not asked of the Hub


def test_a_model_goes_out_and_comes_in(hub, model, tmp_path, capsys):
    text = greedy(capsys, model)
    out = ["--to", "hf", "--out", tmp_path / "out", "--push", NAME, "--license", "mit"]
    assert f"{hub.endpoint}/{NAME}/commit/" in said(capsys, "export", model, *out)
    repository = hub.repositories[NAME]
    assert repository.n_commits == 1
    assert not repository.private
    assert repository.files == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
    }
    card = repository.files["README.md"].decode()
    assert f'from_pretrained("{NAME}")' in card
    assert f"pentameter sample hf://{NAME}" in card
    said(capsys, "import", NAME, "--out", tmp_path / "in")
    assert greedy(capsys, tmp_path / "in") == text
    assert greedy(capsys, f"hf://{NAME}") == text
    assert open_model(f"hf://{NAME}@main").base_model == NAME
    assert load_model(tmp_path / "in").tokenizer.hash == TOKENIZER.hash


def test_only_what_a_model_is_made_of_is_fetched(published, capsys, tmp_path):
    said(capsys, "import", NAME, "--out", tmp_path / "in")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert published.asked_for() == {*names, "tokenizer_config.json", "special_tokens_map.json"}
    published.requests.clear()
    said(capsys, "import", f"{NAME}@main", "--out", tmp_path / "again")
    assert published.asked_for() == set()


def test_a_push_replaces_weights_in_one_commit(published, model, tmp_path, capsys):
    files = published.repositories[NAME].files
    files["model-00001-of-00002.safetensors"] = files["model.safetensors.index.json"] = b"old"
    out = ["--to", "hf", "--out", tmp_path / "out", "--push", NAME]
    said(capsys, "export", model, *out)
    files = published.repositories[NAME].files
    assert published.repositories[NAME].n_commits == 1
    assert not {"model-00001-of-00002.safetensors", "model.safetensors.index.json"} & files.keys()
    assert files["README.md"] != b"a card"
    assert "modeling_own.py" in files


def test_a_private_push_never_becomes_public(published, model, tmp_path, capsys):
    out = ["--to", "hf", "--out", tmp_path / "out", "--license", "mit", "--private", "--push"]
    error = said(capsys, "export", model, *out, NAME, code=2)
    assert "exists and is public" in error
    assert published.repositories[NAME].n_commits == 0
    out[3] = tmp_path / "other"
    said(capsys, "export", model, *out, "owner/new")
    assert published.repositories["owner/new"].private


@pytest.mark.parametrize("failure", ["cut", "short", "500", "503"])
def test_a_download_that_fails_once_is_whole(published, failure, capsys, tmp_path):
    published.failures += [failure]
    said(capsys, "import", NAME, "--out", tmp_path / "in")
    assert load_model(tmp_path / "in").tokenizer.hash == TOKENIZER.hash


@pytest.mark.parametrize(
    ("failure", "code"), [("cut", 74), ("short", 74), ("500", 74), ("wrong", 65)]
)
def test_a_download_that_fails_leaves_nothing(published, failure, code, capsys, tmp_path):
    published.failures += [failure] * 200
    before = {path.name for path in tmp_path.iterdir()}
    said(capsys, "import", NAME, "--out", tmp_path / "in", code=code)
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == before


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"name": "owner/none"}, 2, "it is not on the Hub, or is private"),
        ({"name": f"{NAME}@v9"}, 2, "has no such revision"),
        ({"status": 401}, 74, "the Hub does not know who asks"),
        ({"status": 403}, 74, "the Hub forbids it"),
        ({"status": 502}, 74, "HTTP status 502; try again later"),
        ({"gated": True}, 74, "it is gated: accept its conditions"),
        ({"without": "config.json"}, 2, "has no config.json"),
        ({"without": "model.safetensors"}, 2, "has no model.safetensors"),
    ],
    ids=str,
)
def test_refusals_say_what_to_do(published, change, code, message, capsys, tmp_path):
    published.status = change.get("status")
    published.repositories[NAME].gated = change.get("gated", False)
    published.repositories[NAME].files.pop(change.get("without"), None)
    name = change.get("name", NAME)
    error = said(capsys, "import", name, "--out", tmp_path / "in", code=code)
    assert message in error
    assert name in error
    assert not (tmp_path / "in").exists()


def test_without_a_network_the_copy_serves(published, capsys, tmp_path, monkeypatch):
    closed = "http://127.0.0.1:9"
    text = greedy(capsys, f"hf://{NAME}")
    monkeypatch.setattr(hub_library.constants, "ENDPOINT", closed)
    assert greedy(capsys, f"hf://{NAME}") == text
    error = said(capsys, "import", "owner/other", "--out", tmp_path / "in", code=74)
    assert "owner/other: the Hub does not answer" in error
    warnings: list[str] = []
    open_model(f"hf://{NAME}", warnings=warnings)
    assert "the Hub does not answer" in warnings[0]


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"preupload": 403}, "the Hub forbids it"),
        ({"objects/batch": 500}, "HTTP status 500"),
        ({"/lfs/": 500}, "HTTP status 500"),
        ({"/commit/": 500}, "HTTP status 500"),
    ],
    ids=str,
)
def test_a_push_that_fails_changes_nothing_there(hub, model, tmp_path, capsys, failures, message):
    repository = hub.repositories[NAME] = Repository()
    repository.files = {"README.md": b"a card"}
    hub.push_failures = failures
    out = ["--to", "hf", "--out", tmp_path / "out", "--push", NAME, "--license", "mit"]
    assert main(list(map(str, ["export", model, *out]))) == 74
    error = capsys.readouterr().err
    assert message in error
    assert f"`hf upload {NAME} {tmp_path / 'out'}` pushes it" in error
    assert TOKEN not in error
    assert repository.files == {"README.md": b"a card"}


def test_a_push_is_refused_before_anything_is_written(hub, model, tmp_path, capsys, monkeypatch):
    out = ["export", model, "--out", tmp_path / "out", "--push"]
    assert "is not OWNER/NAME" in said(capsys, *out, "small", "--to", "hf", code=2)
    assert "goes with --to hf" in said(capsys, *out, NAME, "--to", "safetensors", code=2)
    assert "goes with --push" in said(capsys, *out[:-1], "--to", "hf", "--private", code=2)
    assert "--license GPL 3" in said(capsys, *out[:-1], "--to", "hf", "--license", "GPL 3", code=2)
    monkeypatch.setenv("HF_TOKEN", "hf_anotherOne")
    error = said(capsys, *out, NAME, "--to", "hf", code=74)
    assert "the Hub does not know who asks" in error
    assert "hf_anotherOne" not in error
    monkeypatch.delenv("HF_TOKEN")
    assert "log in" in said(capsys, *out, NAME, "--to", "hf", code=74)
    assert not (tmp_path / "out").exists()
    assert hub.repositories == {}


def test_a_card_that_the_hub_refuses_says_why(hub, model, tmp_path, capsys):
    out = ["--to", "hf", "--out", tmp_path / "out", "--push", NAME, "--license", "none-such"]
    error = said(capsys, "export", model, *out, code=74)
    assert '"license" must be one of' in error


@pytest.mark.parametrize("name", [NAME, f"hf://{NAME}"])
def test_a_run_begins_with_a_model_of_the_hub(published, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own-cache"))
    text = tmp_path / "cats.txt"
    text.write_text("the cat sat on the mat. " * 40)
    given = ["train", "--init-from", name, "--data.path", text, "--run-dir", tmp_path / "run"]
    given += ["--train.steps", "1", "--train.batch-size", "2", "--train.compile", "false"]
    told = said(capsys, *given)
    assert "cats-tuned · seed" in told
    record = json.loads((tmp_path / "run" / "plan.json").read_text())["init_from"]
    assert record["base_model"] == NAME
    published.status = 503  # the Hub is away: the copy in the cache has the same weights
    assert "complete already" in said(capsys, *given)


def test_the_library_is_named_where_it_is_missing(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    error = said(capsys, "import", NAME, "--out", tmp_path / "in", code=2)
    assert "pip install 'pentameter[hub]'" in error
