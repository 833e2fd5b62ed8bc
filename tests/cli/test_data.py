"""`pentameter data`: what it prints is what the training read."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_of_a_folder import cache_of_a_file  # noqa: F401
from tiny_runs import fit

from pentameter.cli.data import run
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError

ORDERS = {
    "random": {"order": "random"},
    "shuffled": {"order": "shuffled"},
    "columns": {"order": "columns"},
    "padded": {"order": "documents"},
    "packed": {"order": "documents", "packing": True},
}


class Reads:
    """A hook that keeps the hash of every batch that the engine was given, by step."""

    def __init__(self):
        self.batches = {}

    def on_start(self, run):
        forward_backward = run.engine.forward_backward

        def noted(batch, step, **options):
            self.batches[step + 1] = batch
            return forward_backward(batch, step, **options)

        run.engine.forward_backward = noted


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "chat.jsonl"
    records = [
        {"messages": [{"role": "user", "content": f"ab{n}" * (n % 7)},
                      {"role": "assistant", "content": f"cd{n}"}]}
        for n in range(40)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": "xyz "[: n % 5] * n}) + "\n" for n in range(60)))
    return str(file)


def shown(capsys, folder, step, *options):
    capsys.readouterr()
    assert run([str(folder), "--step", str(step), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def check_same(record, batch):
    """What is shown of a step agrees with the arrays that it trained on."""
    assert record["batch_sha256"] == batch.hash()
    assert record["n_targets"] == batch.n_targets == sum(row["n_targets"] for row in record["rows"])
    for row in record["rows"]:
        tokens, counts = np.array(row["tokens"]), np.array(row["counts"])
        inputs, targets = batch.inputs[row["row"]], batch.targets[row["row"]]
        n = len(tokens) - 1
        assert (inputs[:n] == tokens[:-1]).all()
        assert len(inputs) - n == row["n_padded"]
        assert (targets[:n][counts[1:]] == tokens[1:][counts[1:]]).all()
        assert (targets[:n][~counts[1:]] == -1).all()
        assert (targets[n:] == -1).all()
        assert not counts[0]
        assert sum(span["stop"] - span["start"] for span in row["spans"]) == len(tokens)


@pytest.mark.parametrize("name", ORDERS)
def test_a_step_is_shown_as_it_was_trained_on(name, documents, tmp_path, capsys):
    data = {"corpus": None, "path": documents, "tokenizer": "bpe:260", **ORDERS[name]}
    reads, folder = Reads(), tmp_path / "run"
    trained, _ = fit(folder, sections={"data": data}, hooks=[reads])
    assert [*reads.batches] == [*range(1, 13)]
    for step in (1, 2, 12):
        check_same(shown(capsys, folder, step), reads.batches[step])
    if name == "padded":
        assert trained.plan.epoch(12) >= 1  # so a pass has begun anew
    record = shown(capsys, folder, 12)
    split = trained.dataset.split("train")
    for row in record["rows"]:
        tokens = [i for span in row["spans"] for i in split.tokens[span["start"] : span["stop"]]]
        assert tokens == row["tokens"]
        assert "".join(each["text"] for each in row["stretches"]) == (
            trained.dataset.tokenizer.decode(row["tokens"])
        )
        for span in row["spans"]:
            first = int(split.document_starts[span["first_document"]])
            assert span["start"] == first + span["offset"]
            assert first <= split.document_bounds[span["last_document"]] < span["stop"]


@pytest.mark.parametrize("changes", [{}, {"order": "documents"}])
def test_conversations_and_a_mixture_that_was_resumed(changes, chat, tmp_path, capsys):
    sources = [{"path": chat, "weight": 0.75}, {"corpus": "grammar", "weight": 0.25}]
    grammar = {"n_characters": 3000, "alphabet": "abcd"}  # the chat's tokenizer has them
    data = {"sources": sources, "chat_template": "chatml", "grammar": grammar, **changes}
    sections = {
        "data": {"corpus": None, **data},
        "model": {"context_length": 128},
        "schedule": {"name": "constant"},
    }
    reads, folder = Reads(), tmp_path / "run"
    fit(folder, sections={**sections, "train": {"steps": 5}}, hooks=[reads])
    fit(folder, sections=sections, hooks=[reads])
    longer = {**sections, "train": {"steps": 15}, "schedule": {"name": "cosine"}}
    fit(folder, sections=longer, hooks=[reads], resume="extend")
    assert [*reads.batches] == [*range(1, 16)]
    from_sources = []
    for step in range(1, 16):
        record = shown(capsys, folder, step)
        check_same(record, reads.batches[step])
        from_sources += [row["source"] for row in record["rows"]]
    assert record["sources"] == [chat, "grammar"]
    assert 0.1 < from_sources.count(1) / len(from_sources) < 0.4


@pytest.fixture(scope="module")
def chat_run(chat, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a run"
    data = {"corpus": None, "path": chat, "chat_template": "chatml", "order": "documents"}
    sections = {"data": {**data, "split_by": "document"}, "model": {"context_length": 96}}
    fit(folder, sections=sections)
    return folder


def test_the_text_marks_what_does_not_count(chat_run, capsys):
    capsys.readouterr()
    assert run([str(chat_run), "--step", "7", "--rows", "1:3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny, step 7: batch 6 (counted from 0), 4 rows × 96 tokens · ")
    assert text.count("⟦<|im_start|>user\n") == 2
    assert "<|im_start|>assistant\n  │ ⟧cd" in text
    assert "row 1 · " in text
    assert "row 3 · " not in text
    assert "2 of 4 rows are not shown: --rows :, or --json" in text
    assert " padded" in text
    run([str(chat_run), "--step", "7", "--rows", ":"])
    assert "not shown" not in capsys.readouterr().out
    run([str(chat_run), "--step", "7", "--rows", "3"])
    assert capsys.readouterr().out.count("\nrow ") == 1


def test_a_terminal_shows_styles_in_place_of_marks(chat_run, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    run([str(chat_run), "--step", "7", "--rows", "1"])
    _, _, text = capsys.readouterr().out.partition("special token")
    assert "⟦" not in text
    assert "\x1b[2m<|im_start|>assistant\x1b[0m\n  │ cd" in text


def test_special_tokens_are_told_from_the_same_characters(tmp_path, monkeypatch, capsys):
    file = tmp_path / "texts.jsonl"
    texts = ["say <|endoftext|> to me"] * 60
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"corpus": None, "path": str(file), "tokenizer": "bpe:280", "order": "sequential"}
    fit(tmp_path / "run", sections={"data": data, "model": {"context_length": 40}})
    capsys.readouterr()
    run([str(tmp_path / "run"), "--step", "1", "--rows", "0"])
    assert "say <|endoftext|> to me‹<|endoftext|>›say" in capsys.readouterr().out.replace("⟧", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    run([str(tmp_path / "run"), "--step", "1", "--rows", "0"])
    assert "say <|endoftext|> to me\x1b[1m‹<|endoftext|>›\x1b[0msay" in (
        capsys.readouterr().out.replace("\x1b[2ms\x1b[0may", "say")
    )


@pytest.mark.parametrize("step", ["0", "-3", "13"])
def test_a_step_that_the_run_does_not_make(chat_run, step):
    with pytest.raises(ConfigError, match=r"is no step of this run, which makes the steps 1 … 12"):
        run([str(chat_run), "--step", step])


@pytest.mark.parametrize("rows", ["0:5", "4", "2:2", "", "a:b", "-1:2"])
def test_rows_outside_the_batch(chat_run, rows):
    with pytest.raises(ConfigError, match="within the batch's rows 0:4"):
        run([str(chat_run), "--step", "1", f"--rows={rows}"])


def test_tokens_that_are_gone_are_not_prepared_anew(chat_run, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(chat_run, folder)
    plan = json.loads((folder / "plan.json").read_text())
    (kept,) = map(Path, plan["data"]["shards"])
    moved = tmp_path / "other" / "pentameter" / "prepared" / kept.name
    shutil.copytree(kept, moved)
    plan["data"]["shards"] = [f"/nowhere/{kept.name}"]
    (folder / "plan.json").write_text(json.dumps(plan))
    before = shown(capsys, chat_run, 3)
    assert shown(capsys, folder, 3) == before  # found in the cache by its name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(CorruptError, match="are gone: /nowhere/"):
        run([str(folder), "--step", "3"])
    assert not (tmp_path / "empty").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    plan["data"]["hash"] = "0" * 64
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(CorruptError, match="are not those of the run in"):
        run([str(folder), "--step", "3"])
    del plan["data"]
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match="an earlier version wrote it"):
        run([str(folder), "--step", "3"])


def test_a_branch_does_not_answer_for_the_steps_of_its_parent(chat_run, tmp_path, capsys):
    config = {"data": {"corpus": "grammar"}}
    fit(tmp_path / "parent", sections={**config, "train": {"steps": 4}})
    checkpoint = tmp_path / "parent" / "checkpoints" / "step-00000004"
    reads = Reads()
    changed = {"data": {"order": "shuffled"}}
    fit(tmp_path / "branch", sections=changed, resume=str(checkpoint), hooks=[reads])
    check_same(shown(capsys, tmp_path / "branch", 5), reads.batches[5])
    with pytest.raises(ConfigError, match="from which this one branched off after step 4"):
        run([str(tmp_path / "branch"), "--step", "4"])


def test_batches_of_the_user_are_refused(tmp_path):
    def batches(step, rows):
        return np.zeros((len(rows), 16), dtype=int), np.ones((len(rows), 16), dtype=int)

    fit(tmp_path / "run", sections={"train": {"steps": 2}}, batches=batches)
    with pytest.raises(ConfigError, match=r"reads batches from a function of its user \(.*batches"):
        run([str(tmp_path / "run"), "--step", "1"])


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        run([str(tmp_path), "--step", "1"])


def test_the_tokenizer_of_the_tokens_decodes_them(chat_run, capsys):
    record = shown(capsys, chat_run, 1)
    (folder,) = json.loads((chat_run / "plan.json").read_text())["data"]["shards"]
    tokenizer = load_tokenizer(Path(folder) / "tokenizer.json")
    for row in record["rows"]:
        assert tokenizer.decode(row["tokens"]) == "".join(e["text"] for e in row["stretches"])


def test_it_needs_no_torch(chat_run):
    code = (
        "import sys\n"
        "from pentameter.cli.data import run\n"
        f"run([{str(chat_run)!r}, '--step', '3'])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
