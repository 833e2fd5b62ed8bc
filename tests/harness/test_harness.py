"""`lm-eval` with a model of ours: its numbers are those of a pass for each token, and of `eval`."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pentameter.config.schema import Config
from pentameter.data.shards.dataset import TokenSplit
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import ConfigError
from pentameter.evaluate.multiple_choice import (
    encode_questions,
    evaluate_multiple_choice,
    read_questions,
)
from pentameter.evaluate.split import evaluate
from pentameter.generation.loop import generate
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'pentameter[lm-eval]'")

from pentameter.harness.model import HarnessModel
from pentameter.harness.tasks import _result, find_tasks, run_tasks

CONTEXT = 12
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TOKENIZER = train_bpe([" ".join(WORDS) * 3], 280)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}, train: {file}}}}}
test_split: test
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 2}}
"""


def engine_for(tokenizer, **model):
    config = {
        "model": {
            "vocab_size": tokenizer.vocab_size,
            "vocab_multiple": 16,
            "context_length": CONTEXT,
            "n_layers": 2,
            "n_heads": 2,
            "d_model": 16,
            "init_std": 0.5,  # logits that differ
            **model,
        },
        "data": {"corpus": "grammar"},
        "train": {"steps": 1, "batch_size": 1},
    }
    plan = make_plan(Config.model_validate(config))
    return assemble(plan, torch.device("cpu"), "fp64", compiled=False)


ENGINE = engine_for(TOKENIZER)


def model_of(batch_size=3):
    return HarnessModel(ENGINE, TOKENIZER, batch_size)


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def next_log_probabilities(ids):
    """(V,), by a pass of its own."""
    with torch.inference_mode():
        logits = ENGINE.model.eval()(torch.tensor([ids]))[0, -1, : TOKENIZER.vocab_size]
    return logits.log_softmax(0).numpy()


def one_by_one(context, scored):
    score, likeliest = 0.0, True
    for number, token in enumerate(scored):
        found = next_log_probabilities([*context, *scored[:number]])
        score += found[token]
        likeliest &= int(found.argmax()) == token
    return score, likeliest


def text(n_words, seed):
    return " ".join(np.random.default_rng(seed).choice(WORDS, n_words))


def test_log_probabilities_are_those_of_a_pass_for_each_token():
    pairs = [(text(n, n), " " + text(1 + n % 3, 99 - n)) for n in range(1, 9)]
    pairs.append(("", "one two"))
    found = model_of().loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), (score, is_likeliest) in zip(pairs, found, strict=True):
        scored = TOKENIZER.encode(continuation).tolist()
        ids = TOKENIZER.encode(context).tolist() or [TOKENIZER.end_of_text]
        expected = one_by_one(ids[-(CONTEXT + 1 - len(scored)) :], scored)
        assert score == pytest.approx(expected[0], abs=1e-10)
        assert is_likeliest == expected[1]


def test_texts_begin_with_the_prefix_of_the_tokenizer():
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.prefix = (5, 3)
    model = HarnessModel(ENGINE, tokenizer, 3)
    pairs = [("one two", " one"), ("", "two one"), (" ", "two")]
    found = model.loglikelihood(requests(*pairs), disable_tqdm=True)
    found += [(each, None) for each in model.loglikelihood_rolling(requests(("one two",)))]
    before = [tokenizer.encode_document("one two").tolist(), [3], [5, 3], [3]]
    assert before[0][:2] == [5, 3]
    scored = [" one", "two one", " two", "one two"]
    for context, text, (score, _) in zip(before, scored, found, strict=True):
        expected, _ = one_by_one(context, tokenizer.encode(text).tolist())
        assert score == pytest.approx(expected, abs=1e-10)
    (text,) = model.generate_until(requests(("one", {"until": ["|"], "max_gen_toks": 4})))
    (alone,) = generate(
        ENGINE.model, tokenizer, "one", max_new_tokens=4, temperature=0.0, context_length=CONTEXT
    )
    assert text == alone.partition("<|endoftext|>")[0].partition("|")[0]


def test_an_expert_s_capacity_does_not_depend_on_what_runs_together():
    engine = engine_for(TOKENIZER, n_experts=4, expert_capacity=0.5)
    pairs = [(text(n, n), " " + text(1 + n % 3, 99 - n)) for n in range(1, 9)]
    alone, together = (
        HarnessModel(engine, TOKENIZER, size).loglikelihood(requests(*pairs), disable_tqdm=True)
        for size in (1, 8)
    )
    for one, other in zip(alone, together, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-10)


def test_a_continuation_of_the_likeliest_tokens_is_known_as_one():
    ids = TOKENIZER.encode(text(4, 4)).tolist()
    likely = [int(next_log_probabilities(ids).argmax())]
    likely.append(int(next_log_probabilities([*ids, *likely]).argmax()))
    other = [likely[0], (likely[1] + 1) % TOKENIZER.vocab_size]
    found = model_of()._loglikelihood_tokens([(None, ids, each) for each in (likely, other)])
    assert [flag for _, flag in found] == [True, False]
    assert found[0][0] == pytest.approx(one_by_one(ids, likely)[0], abs=1e-10)


@pytest.mark.parametrize("n_windows", [1, 3])
def test_a_text_that_fills_its_windows_has_the_loss_of_a_split(n_windows):
    ids = TOKENIZER.encode(text(60, 5))[: n_windows * CONTEXT]
    written = TOKENIZER.decode(ids)
    assert TOKENIZER.encode(written).tolist() == ids.tolist()
    (score,) = model_of().loglikelihood_rolling(requests((written,)))
    tokens = np.array([TOKENIZER.end_of_text, *ids])
    metrics = evaluate(
        ENGINE, TokenSplit("val", tokens, len(written)), name="val", step=0, batch_size=2
    )
    assert metrics.tokens == len(ids)
    assert -score / len(ids) == pytest.approx(metrics.loss, abs=1e-12)


def test_the_last_window_of_a_text_reaches_back():
    written = text(9, 6)
    ids = TOKENIZER.encode(written).tolist()
    n_last = len(ids) - CONTEXT
    assert 0 < n_last < CONTEXT
    first, last = ids[:CONTEXT], ids[CONTEXT:]
    expected = one_by_one([TOKENIZER.end_of_text], first)[0]
    expected += one_by_one(ids[n_last - 1 : CONTEXT], last)[0]
    short = text(1, 3)
    found = model_of().loglikelihood_rolling(requests((written,), (short,)))
    alone = one_by_one([TOKENIZER.end_of_text], TOKENIZER.encode(short).tolist())[0]
    np.testing.assert_allclose(found, [expected, alone], rtol=0, atol=1e-10)


def test_continuations_end_at_a_stop_and_do_not_depend_on_the_batch():
    contexts = [text(n, n) for n in (3, 3, 5, 3, 1)]
    whole = [
        generate(ENGINE.model, TOKENIZER, each, max_new_tokens=16, temperature=0)[0]
        for each in contexts
    ]
    asked = [(each, {"until": ["zzz"], "max_gen_toks": 16}) for each in contexts]
    ended = [each.split("<|endoftext|>")[0] for each in whole]
    assert model_of(batch_size=2).generate_until(requests(*asked)) == ended
    stop = ended[0][2:4]
    cut = (contexts[0], {"until": stop, "max_gen_toks": 16, "do_sample": False})
    [found] = model_of().generate_until(requests(cut))
    assert found == ended[0][: ended[0].index(stop)]


def test_where_a_continuation_ends_does_not_depend_on_the_batch():
    first, *others = (text(3, seed) for seed in range(3, 40))
    n_tokens = len(TOKENIZER.encode(first))
    contexts = [first, *(each for each in others if len(TOKENIZER.encode(each)) == n_tokens)]
    settings = {"max_gen_toks": 16}
    [whole] = model_of().generate_until(requests((contexts[0], {"until": [], **settings})))
    # The second begins before the first, and is complete long after it.
    short, long = whole[2:4], whole[1:]
    assert whole.index(short) == 2
    asked = [(each, {"until": [short, long], **settings}) for each in contexts]
    [alone] = model_of().generate_until(requests(asked[0]))
    assert alone == whole[:2]
    assert model_of(batch_size=64).generate_until(requests(*asked))[0] == alone


def test_settings_that_are_not_obeyed_are_named(caplog):
    asked = {"until": [], "max_gen_toks": 1, "num_beams": 4, "min_p": 0.1}
    model_of().generate_until(requests(("one", asked)))
    assert [record.getMessage() for record in caplog.records] == [
        "generation settings of the tasks that are not obeyed: min_p, num_beams"
    ]


def test_a_context_of_white_space_belongs_to_what_is_scored():
    pairs = [("\n", "one two"), (text(5, 1), " two three")]
    found = model_of().loglikelihood(requests(*pairs), disable_tqdm=True)
    ids = TOKENIZER.encode("\none two").tolist()
    expected = one_by_one([TOKENIZER.end_of_text], ids)
    assert found[0] == (pytest.approx(expected[0], abs=1e-10), expected[1])


def test_a_metric_of_numpy_s_is_a_metric():
    metrics = {"alias": "quiz", "own,none": np.float32(0.25), "own_stderr,none": "N/A"}
    assert _result("quiz", {"results": {"quiz": metrics}}).metrics == {"own": 0.25}


def test_drawn_continuations_depend_neither_on_the_batch_nor_on_other_questions():
    contexts = [text(3, 1), text(3, 2), text(5, 3)]
    drawn = {"until": ["zzz"], "max_gen_toks": 16, "do_sample": True, "temperature": 1.5}
    asked = [(each, drawn) for each in contexts for _ in range(4)]  # `repeats: 4`
    found = model_of(batch_size=1).generate_until(requests(*asked))
    for first in (0, 4, 8):
        assert len(set(found[first : first + 4])) == 4
    for batch_size in (2, 3, 64):
        assert model_of(batch_size=batch_size).generate_until(requests(*asked)) == found
    assert model_of().generate_until(requests(*asked[4:6], asked[0])) == [*found[4:6], found[0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    with (folder / "quiz.jsonl").open("w") as file:
        for seed in range(30):
            choices = [text(1 + number, 4 * seed + number) for number in range(3)]
            record = {"context": text(seed % 9 + 1, seed), "choices": choices, "answer": seed % 3}
            file.write(json.dumps(record) + "\n")
    (folder / "quiz.yaml").write_text(TASK.format(name="quiz", file=folder / "quiz.jsonl"))
    (folder / "gone.yaml").write_text(TASK.format(name="gone", file=folder / "gone.jsonl"))
    return folder


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


def test_a_local_task_has_the_accuracies_of_eval(folder):
    [result] = run_tasks(model_of(), find_tasks(["quiz"], folder), n_fewshot=None, limit=None)
    questions = encode_questions(read_questions(folder / "quiz.jsonl"), TOKENIZER, CONTEXT)
    ours = evaluate_multiple_choice(ENGINE, questions, name="quiz", step=0, batch_size=7)
    assert result.examples == ours.examples == 30
    assert 0 < ours.accuracy < 1
    assert 0 < ours.accuracy_per_byte < 1
    assert result.metrics["acc"] == ours.accuracy
    assert result.metrics["acc_norm"] == ours.accuracy_per_byte  # of ASCII: bytes are characters
    assert (result.n_shot, result.version) == (0, "2")
    deviation = math.sqrt(ours.accuracy * (1 - ours.accuracy) / 29)
    assert result.metrics["acc_stderr"] == pytest.approx(deviation)
    assert str(result).startswith(f"quiz: acc {ours.accuracy:.4f} ± {deviation:.4f} · acc_norm ")
    assert str(result).endswith(" · 0-shot · 30 examples")


def test_examples_before_a_question_and_a_limit(folder):
    [result] = run_tasks(model_of(), find_tasks(["quiz"], folder), n_fewshot=2, limit=4)
    assert (result.n_shot, result.examples) == (2, 4)


@pytest.mark.slow  # it reads the files of the harness's own tasks, as does the next
def test_a_name_that_is_not_known_has_near_ones(folder):
    with pytest.raises(ConfigError, match=r"quizz: lm-eval knows no such task .did you mean quiz"):
        find_tasks(["quiz", "quizz"], folder)
    with pytest.raises(ConfigError, match="is no folder"):
        find_tasks(["quiz"], folder / "nowhere")


@pytest.mark.slow
def test_a_task_without_its_data_is_refused_in_words(folder):
    with pytest.raises(ConfigError, match=r"the task gone cannot be opened: .*gone.*--tasks-dir"):
        find_tasks(["gone"], folder)


def test_a_tokenizer_without_end_of_text_scores_no_text_without_context():
    tokenizer = CharTokenizer("".join(sorted(set("".join(WORDS)))))
    model = HarnessModel(engine_for(tokenizer), tokenizer, 2)
    with pytest.raises(ConfigError, match="char tokenizer has no end-of-text"):
        model.loglikelihood(requests(("", "one")), disable_tqdm=True)
    with pytest.raises(ConfigError, match="the task's text 'oneONE'"):
        model.loglikelihood(requests(("one", "ONE")), disable_tqdm=True)
