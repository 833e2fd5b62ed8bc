"""Runs on conversations: read whole and packed unless asked otherwise, and shown as they ask."""

import json

import numpy as np
import pytest
from tiny_runs import config, events, fit

from pentameter.config.files.load import load_config
from pentameter.data.batches.step import suited_to, training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.planning.architecture import IGNORED_TARGET


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "chat.jsonl"
    records = [
        {
            "messages": [
                {"role": "user", "content": "ab" * n},
                {"role": "assistant", "content": "cd" * n},
            ]
        }
        for n in range(1, 31)
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"corpus": None, "path": str(file), "tokenizer": "char", "chat_template": "chatml"}


def test_a_run_packs_conversations_and_says_what_it_learns(data, tmp_path):
    sections = {
        "data": data,
        "model": {"context_length": 128},
        "schedule": {"name": "constant"},
        "train": {"steps": 4, "sample_interval": 4, "sample_tokens": 3},
    }
    trainer, _ = fit(tmp_path / "run", sections=sections)
    written = load_config(tmp_path / "run" / "config.toml").data
    assert (written.order, written.packing) == ("documents", True)
    log = (tmp_path / "run" / "log.txt").read_text()
    n_learnt = round(trainer.batches.target_fraction * trainer.plan.total_tokens)
    assert f"learns  {n_learnt:,} loss tokens of these" in log
    assert (
        "answers are learnt without a token that ends them, as the tokenizer (char) has none: "
        "they end at the text '<|im_end|>', which messages can forge and exports lack; "
        "data.tokenizer='bpe:1024'"
    ) in log
    assert "data.order='documents', data.packing=true" in log
    sample = (tmp_path / "run" / "samples" / "step-00000004.txt").read_text()
    question = f"<|im_start|>user\n{'ab' * 28}<|im_end|>\n<|im_start|>assistant\n"
    assert sample.startswith(question)  # the first that is held out
    likeliest, drawn = sample.removeprefix(question).split("\n\n(drawn at temperature 1:)\n")
    assert max(len(likeliest), len(drawn)) <= 3 + 1
    # The same command goes on, and so does one that names what was chosen.
    named = {**data, "order": "documents", "packing": True}
    longer = {**sections, "data": named, "train": {**sections["train"], "steps": 6}}
    fit(tmp_path / "run", sections=longer)
    assert [event["step"] for event in events(tmp_path / "run", "train")] == [*range(1, 7)]


@pytest.mark.parametrize(("tokenizer", "ends"), [("char", False), ("bpe:270", True)])
def test_answers_that_do_not_end_are_told_beside_a_text_too(data, tmp_path, tokenizer, ends):
    text = "<|im_start|>user\nabcd<|im_end|>\n<|im_start|>assistant\n"  # all characters
    (tmp_path / "text.txt").write_text(text * 20)
    sources = [{"path": str(tmp_path / "text.txt")}, {"path": data["path"]}]
    blend = {"corpus": None, "sources": sources, "order": "documents", "chat_template": "chatml"}
    sections = {"data": {**blend, "tokenizer": tokenizer}, "model": {"context_length": 128}}
    fit(tmp_path / "run", sections={**sections, "train": {"steps": 1}})
    log = (tmp_path / "run" / "log.txt").read_text()
    assert ("answers are learnt without a token that ends them" not in log) == ends


def test_one_conversation_a_row_stays_so_and_its_padding_is_told(data, tmp_path):
    sections = {"data": {**data, "order": "documents"}, "train": {"steps": 2}}
    sections["model"] = {"context_length": 512}
    fit(tmp_path / "run", sections=sections)
    assert not load_config(tmp_path / "run" / "config.toml").data.packing
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "rows of model.context_length=512 are filled to" in log
    assert "answers alone are, and rows are padded" in log


@pytest.mark.parametrize("changes", [{}, {"order": "documents"}])
def test_shares_are_those_of_the_batches(data, changes):
    settings = config(
        data={**data, **changes}, train={"batch_size": 1}, model={"context_length": 128}
    )
    batches = training_batches(settings, open_dataset(settings.data).split("train"))
    rows = [batches.batch(step) for step in range(batches.rows_per_epoch)]
    n_learnt = sum(batch.n_targets for batch in rows)
    share = n_learnt / (len(rows) * 128)
    if changes:
        assert batches.target_fraction == share
        n_filled = sum(int(np.flatnonzero(batch.inputs[0]).max(initial=-1)) + 2 for batch in rows)
        assert abs(batches.filled_fraction - n_filled / (129 * len(rows))) < 0.1
    else:  # but for the tokens at an epoch's end that fill no row
        assert abs(batches.target_fraction - share) < 0.02
        assert all((batch.targets[0] != IGNORED_TARGET).any() for batch in rows)


@pytest.mark.parametrize("context_length", [1 << 16, 64])
def test_too_few_or_too_long_conversations_are_not_packed(data, context_length):
    settings = config(data=data, model={"context_length": context_length})
    split = open_dataset(settings.data).split("train")
    suited = suited_to(split, settings).data
    assert (suited.order, suited.packing) == ("documents", False)
    text = config()
    assert suited_to(open_dataset(text.data).split("train"), text) is text


def test_a_question_of_ones_own_is_asked_by_the_template(data, tmp_path):
    train = {"steps": 2, "sample_interval": 2, "sample_prompt": "abab", "sample_tokens": 2}
    fit(tmp_path / "run", sections={"data": data, "model": {"context_length": 128}, "train": train})
    sample = (tmp_path / "run" / "samples" / "step-00000002.txt").read_text()
    assert sample.startswith("<|im_start|>user\nabab<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_is_sampled_likeliest_and_drawn_by_the_step(data, tmp_path):
    train = {"steps": 4, "sample_interval": 2, "sample_tokens": 24}
    sections = {
        "data": data,
        "model": {"context_length": 128},
        "optimizer": {"learning_rate": 1e-12},
    }

    def samples(name, **more):
        fit(tmp_path / name, sections={**sections, "train": {**train, **more}})
        paths = [tmp_path / name / "samples" / f"step-0000000{step}.txt" for step in (2, 4)]
        return [path.read_text().split("\n\n(drawn at temperature 1:)\n") for path in paths]

    first, second = samples("a")
    assert first[0] == second[0]  # the weights stay: so does the likeliest answer
    assert first[1] != second[1]  # and an unlucky draw does not
    assert samples("b") == [first, second]
    assert samples("greedy", sample_temperature=0.0) == [[first[0]], [second[0]]]
    log = (tmp_path / "a" / "log.txt").read_text()
    assert "  │ (drawn at temperature 1:)\n" in log
