"""Reading a configuration: sources, `extends`, overrides, and sentences for what is wrong."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pentameter.config import messages
from pentameter.config.fields import leaves, sections
from pentameter.config.files.load import BOUND_TO_TEXT, load_config, preset_names
from pentameter.errors import ConfigError

MINIMAL = '[data]\ncorpus = "stdlib"\n[train]\nbatch_size = 4\n'


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str | bytes, name: str = "run.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def refusal(source: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    message = str(caught.value)
    assert "pydantic" not in message
    assert "Traceback" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return message


def test_a_file_needs_only_data_and_batch(toml):
    config = load_config(toml(MINIMAL))
    assert (config.data.corpus, config.train.batch_size, config.model.n_layers) == ("stdlib", 4, 6)


def test_a_file_may_be_named_by_text(toml):
    assert load_config(str(toml(MINIMAL))) == load_config(toml(MINIMAL))


def test_bom_and_windows_line_ends_are_read(toml):
    assert load_config(toml(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()))


def test_extends_reaches_through_files_and_presets(toml):
    toml('extends = "quickstart"\n[train]\nsteps = 7\nbatch_size = 2\n', "base/middle.toml")
    path = toml('extends = "base/middle.toml"\nname = "top"\n[train]\nsteps = 9\n')
    config = load_config(path)
    assert (config.name, config.train.steps, config.train.batch_size) == ("top", 9, 2)
    assert config.model == load_config("quickstart").model


def test_extends_is_relative_to_its_own_file(toml):
    toml(MINIMAL, "a/sibling.toml")
    toml('extends = "sibling.toml"\n', "a/inner.toml")
    assert load_config(toml('extends = "a/inner.toml"\n')).train.batch_size == 4


def test_extends_in_a_circle_is_named(toml):
    toml('extends = "b.toml"\n', "a.toml")
    toml('extends = "a.toml"\n', "b.toml")
    message = refusal(toml('extends = "a.toml"\n', "start.toml"))
    assert "circle: a.toml extends b.toml extends a.toml" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('extends = "shakespear-char"\n', "did you mean shakespeare-char?"),
        ("extends = 3\n", "extends=3"),
        ('extends = ["quickstart"]\n', "extends=['quickstart']"),
        ('extends = "."\n', "is a folder"),
        ('extends = "\\u0000"\n', "cannot be the name of a file"),
    ],
)
def test_a_wrong_extends_says_which(toml, text, said):
    message = refusal(toml(text))
    assert said in message
    assert "run.toml" in message


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["--train.steps", "5"], "train.steps", 5),
        (["--train.steps=1e4"], "train.steps", 10_000),
        (["--train.batch-size", "2"], "train.batch_size", 2),
        (["train.batch_size=3"], "train.batch_size", 3),
        (["--seed", "-1"], "seed", -1),
        (["--name", "7"], "name", "7"),
        (["--data.grammar.seed", "-3"], "data.grammar.seed", -3),
        (["--optimizer.betas", "0.9, 0.95"], "optimizer.betas", (0.9, 0.95)),
        (["--optimizer.betas", "[0.5,0]"], "optimizer.betas", (0.5, 0.0)),
        (["--optimizer.clip-norm", "0"], "optimizer.clip_norm", 0.0),
        (["--optimizer.learning-rate", "3e-4"], "optimizer.learning_rate", 3e-4),
        (["--train.eval-interval", "none"], "train.eval_interval", None),
        (["--train.sample-prompt", "none"], "train.sample_prompt", "none"),
        (["--train.sample-prompt=--a = b"], "train.sample_prompt", "--a = b"),
        (["--train.sample-prompt", " x "], "train.sample_prompt", " x "),
        (["--train.compile", "False"], "train.compile", False),
        (["--train.compile", "auto"], "train.compile", "auto"),
        (["--model.bias", "true"], "model.bias", True),
        (["--train.steps", "5", "--train.steps", "6"], "train.steps", 6),
        ({"train.steps": 5}, "train.steps", 5),
        ({"train": {"steps": 5}, "seed": 2}, "train.steps", 5),
        ({"train": {"eval-interval": None}}, "train.eval_interval", None),
    ],
)
def test_overrides(overrides, path, value):
    found = load_config("quickstart", overrides)
    for part in path.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("precision", ["auto", "fp32", "fp16", "fp64"])
def test_a_stream_in_bf16_needs_that_precision(precision):
    asked = ["--train.stream", "bf16", "--train.precision"]
    assert load_config("quickstart", [*asked, "bf16"]).train.stream == "bf16"
    with pytest.raises(ConfigError, match=r"train\.stream='bf16' .*set train\.precision='bf16'"):
        load_config("quickstart", [*asked, precision])


def test_the_newer_of_an_exclusive_pair_wins(toml):
    config = load_config("quickstart", ["--train.tokens-per-step", "1024"])
    assert (config.train.batch_size, config.train.tokens_per_step) == (None, 1024)
    config = load_config("quickstart", ["--data.path", "my.txt"])
    assert (config.data.corpus, config.data.path) == (None, "my.txt")
    path = toml('extends = "quickstart"\n[data]\npath = "x"\n[train]\ntokens_per_step = 256\n')
    config = load_config(path, ["--train.batch_size", "3"])
    assert (config.train.batch_size, config.train.tokens_per_step) == (3, None)
    assert (config.data.corpus, config.data.path) == (None, "x")


@pytest.mark.parametrize(
    "overrides",
    [["--data.path", "tales/novel.txt"], {"data.path": "tales/novel.txt"}],
    ids=["command line", "mapping"],
)
def test_another_text_leaves_behind_what_suits_the_old_one(overrides):
    config, quickstart = load_config("quickstart", overrides), load_config("quickstart")
    assert (quickstart.data.max_bytes, quickstart.train.sample_prompt) == (4_000_000, "def ")
    assert (config.name, config.data.max_bytes, config.train.sample_prompt) == ("novel", None, "")
    assert config.data.validation_fraction == quickstart.data.validation_fraction
    assert (config.model, config.train.steps) == (quickstart.model, quickstart.train.steps)


def test_what_is_said_with_the_other_text_stays(toml):
    own = [
        "--data.path=x.txt", "--data.max-bytes=9", "--name=mine", "--train.sample-prompt=A",
        "--data.validation-path=y.txt",
    ]  # fmt: skip
    config = load_config("quickstart", own)
    assert (config.name, config.data.max_bytes, config.train.sample_prompt) == ("mine", 9, "A")
    path = toml('extends = "quickstart"\n[data]\npath = "a.txt"\nvalidation_path = "b.txt"\n')
    assert (load_config(path).name, load_config(path).data.validation_path) == ("a", "b.txt")
    again = load_config(path, ["--data.path", "a.txt"])  # the same text
    assert again.data.validation_path == "b.txt"
    other = load_config(path, ["--data.path", "c.jsonl.gz"])
    assert (other.name, other.data.validation_path) == ("c", None)
    assert load_config(load_config(path), {"data": {"path": "c.jsonl.gz"}}) == other


def test_another_corpus_is_another_text_and_takes_the_grammars_settings_away():
    grammar = load_config("grammar", ["--data.grammar.seed", "7"])
    assert (grammar.name, grammar.data.grammar.seed) == ("grammar", 7)
    config = load_config(grammar, ["--data.corpus", "wikitext-2"])
    assert (config.name, config.data.grammar.seed) == ("wikitext-2", 0)
    again = load_config(config, ["--data.corpus=grammar", "--data.grammar.n-states=2"])
    assert (again.name, again.data.grammar.n_states) == ("grammar", 2)


def test_what_suits_a_text_are_keys_of_the_schema():
    assert set(BOUND_TO_TEXT) <= {*leaves(), *sections()}


def test_a_layer_without_a_text_keeps_its_settings(toml):
    toml('name = "mine"\n[train]\nbatch_size = 4\nsample_prompt = "A"\n', "settings.toml")
    config = load_config(toml('extends = "settings.toml"\n[data]\npath = "x.txt"\n'))
    assert (config.name, config.train.sample_prompt) == ("mine", "A")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("/a b/My novel (1).txt", "My-novel-1"),
        ("wikitext-2", "wikitext-2"),
        ("books/", "books"),
        (".", "text"),
        ("война.txt", "война"),
        ("小说/西游记 (上).txt", "西游记-上"),
        ("re\u0301sume\u0301.txt", "r\u00e9sum\u00e9"),  # NFC
        ("हिन्दी.txt", "हिन्दी"),  # with vowel signs, which are marks
        ("a\u202eb\x07c.txt", "a-b-c"),
        ("--..txt", "text"),
        ("记" * 200, "记" * 60),  # 180 bytes
        ("x" * 200, "x" * 100),
    ],
)
def test_the_name_made_of_a_text_is_a_name(text, name):
    assert load_config("quickstart", {"data.path": text}).name == name


@pytest.mark.parametrize("name", ["西游记", "Übung-1", "x" * 100, "हिन्दी", "1.5_a"])
def test_names_have_any_alphabet(name):
    assert load_config("quickstart", {"name": name}).name == name


def test_a_name_is_one_however_it_was_typed():
    assert load_config("quickstart", {"name": "e\u0301"}).name == "\u00e9"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".x",
        "-x",
        "_x",
        "a/b",
        "a b",
        "a\nb",
        "a\u202eb",
        "a\0b",
        "\u0301a",
        "x" * 101,
        "记" * 61,
    ],
)
def test_what_no_file_should_be_called_is_no_name(name):
    with pytest.raises(
        ConfigError, match=r"name=.* must be a name: letters and digits of any alpha"
    ):
        load_config("quickstart", {"name": name})
    evaluations = [{"name": name, "path": "x"}]
    with pytest.raises(ConfigError, match="name"):
        load_config("quickstart", {"data.evaluations": evaluations})


@pytest.mark.parametrize("given", [{}, {"path": "x.txt", "multiple_choice": "x.jsonl"}])
def test_an_evaluation_is_of_text_or_of_questions(given):
    with pytest.raises(
        ConfigError, match=r"evaluations\[0\] needs one of path \(now .*\) and multiple"
    ):
        load_config("quickstart", {"data.evaluations": [{"name": "arc", **given}]})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"weight": 0}, "data.sources[1].weight=0 must be a number above 0"),
        ({"weight": -1}, "data.sources[1].weight=-1 must be a number above 0"),
        ({"weight": "2"}, "data.sources[1].weight='2' must be a number above 0"),
        ({"weight": float("nan")}, "data.sources[1].weight=nan must be a number above 0"),
        ({"weight": float("inf")}, "data.sources[1].weight=inf must be finite, a number above 0"),
        ({"path": 3}, "data.sources[1].path=3 must be text or none"),
        (3, "data.sources[1]=3 must be a table of corpus, path, weight"),
    ],
)
def test_a_wrong_value_in_a_table_of_a_list_is_named(source, said):
    other = {"path": "x", **source} if isinstance(source, dict) else source
    with pytest.raises(ConfigError) as refused:
        load_config("quickstart", {"data.sources": [{"corpus": "grammar"}, other]})
    assert said in str(refused.value)


def test_a_misspelt_file_is_looked_for_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("novel.txt", "novels.txt", "西游记.txt", "other.jsonl"):
        Path(name).write_text("x")
    with pytest.raises(ConfigError, match=r"did you mean novel\.txt or novels\.txt\?"):
        load_config("novle.txt")
    with pytest.raises(ConfigError, match=r"did you mean 西游记\.txt\?"):
        load_config("西遊记.txt")
    with pytest.raises(ConfigError, match=r"beside it are novel\.txt, novels\.txt, other"):
        load_config("zzz.md")
    with pytest.raises(ConfigError) as refused:
        load_config(str(tmp_path / "novl.txt"))
    assert f"did you mean {tmp_path / 'novel.txt'}" in str(refused.value)
    assert "presets" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"did you mean quickstart\? presets: "):
        load_config("quikstart")


def test_both_of_an_exclusive_pair_at_once_is_refused():
    message = refusal("quickstart", "--train.batch-size=4", "--train.tokens-per-step=1024")
    assert "train.batch_size" in message
    assert "1024" in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--model.n-layers", "0"], "model.n_layers=0 must be a whole number from 1 to 10000"),
        (["--model.n-layers", "x"], "model.n_layers='x' must be a whole number"),
        (["--model.n_layers", "2.5"], "model.n_layers='2.5' must be a whole number"),
        (["--model.n_layer", "4"], "model.n_layer is no key; did you mean model.n_layers?"),
        (["--modle.n_layers", "4"], "modle.n_layers is no key; did you mean model.n_layers?"),
        (["--n-layers", "4"], "n_layers is no key; did you mean model.n_layers?"),
        (["--model.n_embd", "4"], "did you mean model.d_model?"),
        (["--train.log_interval", "4"], "did you mean log.interval?"),
        (["--model.learning_rate", "1"], "did you mean optimizer.learning_rate?"),
        (["--model", "4"], "model is a section, not a value"),
        (["--train.steps.x", "4"], "train.steps is a value, not a section"),
        (["--train.zzqq", "4"], "train has steps, epochs, batch_size"),
        (
            ["--model.feed-forward.activation", "gleu"],
            "geglu, geglu_tanh, swiglu_clamped; did you mean gelu?",
        ),
        (
            ["--model.attention.n_heads", "5"],
            "model.attention.n_heads=5 must divide model.d_model=128",
        ),
        (["--optimizer.betas", "0.9"], "optimizer.betas=[0.9] must be 2 values"),
        (["--model.dropout", "1"], "model.dropout=1.0 must be a number of at least 0 and below 1"),
        (["--optimizer.learning_rate", "nan"], "optimizer.learning_rate=nan"),
        (["--model.bias", "1"], "model.bias='1' must be true or false"),
        (["--seed", "none"], "seed='none' must be a whole number"),
        (["--name", "../up"], "name='../up' must be a name"),
        (["--data.validation-fraction", "0.9", "--data.test-fraction", "0.1"], "data.test_fra"),
        (["--data.grammar.alphabet", "abca"], "data.grammar.alphabet repeats 'a'"),
        (["--train.steps"], "--train.steps needs a value"),
        (["--train.steps", "--seed", "1"], "--train.steps needs a value"),
        (["steps"], "'steps' is no option"),
    ],
)
def test_a_refusal_teaches(overrides, said):
    assert said in refusal("quickstart", *overrides)


def test_every_problem_is_listed_at_once(toml):
    path = toml('[model]\nn_layers = -1\nn_layer = 3\n[train]\nsteps = "8"\n[optimizer]\nlr = 1\n')
    message = refusal(path, "--log.intervall", "3")
    assert re.search(r"run\.toml: 6 problems\n", message)
    for said in (
        "model.n_layers=-1 must",
        "model.n_layer is no key",
        "train.steps='8' must",
        "optimizer.lr is no key; did you mean optimizer.learning_rate?",
        "log.intervall is no key; did you mean log.interval?",
        "set data.corpus",
    ):
        assert said in message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("seed = 1\nname = run\n", "line 2"),
        ("[model\n", "line 1"),
        ("seed = 1\nseed = 2\n", "line 2"),
        (b"seed = 1\n\n# \xff\n", "line 3"),
        ("x = " + "[" * 50_000, "too deeply"),
        ("x = " + "9" * 5_000, "not valid TOML"),
        ("x = 0x" + "f" * 9_000, "x is no key"),
        ("seed = 0x" + "f" * 9_000, "seed="),
        ("d = 2026-13-45\n", "line 1"),
    ],
)
def test_broken_toml_names_file_and_place(toml, text, place):
    message = refusal(toml(text))
    assert "run.toml" in message
    assert place in message
    assert len(message) < 2_000


@pytest.mark.parametrize("text", ["model = 3\n", "train = []\n", "data = 'x'\n", "model = true\n"])
def test_a_value_for_a_section_is_refused(toml, text):
    assert f"{text.split()[0]}=" in refusal(toml(text))


def test_an_unknown_source_offers_the_presets():
    message = refusal("quikstart")
    assert "did you mean quickstart?" in message
    for name in preset_names():
        assert name in message


def test_odd_sources_are_refused(tmp_path):
    assert "name a preset (" in refusal("")
    assert "is a folder" in refusal(tmp_path)
    assert "neither" in refusal(tmp_path / "absent.toml")
    assert "cannot" in refusal("a\0b")
    refusal("x" * 5_000)


def test_one_string_of_overrides_is_a_programming_error():
    with pytest.raises(TypeError):
        load_config("quickstart", "--train.steps 5")


def test_a_cosine_that_rises_is_refused(toml):
    message = refusal(
        toml(MINIMAL),
        "--optimizer.learning_rate=1e-4",
        "--schedule.name=cosine",
        "--schedule.min_learning_rate=1e-3",
    )
    assert "schedule.min_learning_rate=0.001 is above optimizer.learning_rate=0.0001" in message


@pytest.mark.parametrize("none", ["--train.eval_interval=none", "--data.validation_fraction=0"])
def test_patience_without_evaluations_is_refused(toml, none):
    message = refusal(toml(MINIMAL), "--train.patience=3", none)
    assert "train.patience=3 counts evaluations, and there are none" in message
    load_config(toml(MINIMAL), [none])


@pytest.mark.parametrize("none", ["--train.eval_interval=none", "--data.validation_fraction=0"])
def test_a_presets_patience_goes_with_its_evaluations(none):
    assert load_config("shakespeare-char").train.patience is not None
    assert load_config("shakespeare-char", [none]).train.patience is None


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_other_programs_words_for_experts_are_understood(key):
    with pytest.raises(ConfigError, match=r"did you mean model\.experts\.count"):
        load_config("quickstart", [f"--model.{key}=4"])


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"d_expert": 8}, "model.experts.width is of experts, and model.experts.count is not set"),
        ({"n_experts": 4, "experts_per_token": 5}, "model.experts.per_token=5 must be at most"),
        ({"n_experts": 4, "dense_layers": 4}, "model.experts.dense_layers=4 leaves none"),
        ({"n_experts": 4, "dense_layers": [4]}, "model.experts.dense_layers has layer 4"),
        ({"n_experts": 4, "dense_layers": [0, 1, 2, 3]}, "leaves none"),
        ({"n_experts": 4, "shared_expert_gate": True}, "gates shared experts"),
        (
            {"n_experts": 4, "router": "sigmoid", "router_top_k_first": True},
            "model.router.score_function='sigmoid' does not go with it",
        ),
        (
            {"n_experts": 4, "router_top_k_first": True, "balance": "bias"},
            "model.router.balance='bias' is added to scores",
        ),
        ({"n_experts": 4, "router_groups": 2}, "set both, or neither"),
        (
            {"n_experts": 6, "router_groups": 4, "router_open_groups": 2},
            "must divide model.experts.count=6",
        ),
        (
            {
                "n_experts": 8,
                "experts_per_token": 4,
                "router_groups": 4,
                "router_open_groups": 1,
            },
            "must hold model.experts.per_token=4",
        ),
        (
            {"n_experts": 4, "router_groups": 2, "router_open_groups": 1, "router_group_scores": 3},
            "into groups of at least model.router.group_scores=3; possible: 1",
        ),
        (
            {"n_experts": 8, "router_groups": 8, "router_open_groups": 1},
            "into groups of at least model.router.group_scores=2; possible: 1, 2, 4",
        ),
        (
            {
                "n_experts": 1,
                "experts_per_token": 1,
                "router_groups": 1,
                "router_open_groups": 1,
            },
            "into groups of at least model.router.group_scores=2; set that to at most 1",
        ),
        ({"n_experts": 4, "router_group_scores": 1}, "model.router.group_scores=1 compares groups"),
        (
            {"n_experts": 4, "balance_rate": 0.1},
            "model.router.balance_rate has no effect with model.router.balance='none'",
        ),
    ],
)
def test_keys_of_experts_that_do_not_fit_are_refused(keys, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        load_config("quickstart", {f"model.{key}": value for key, value in keys.items()})


@pytest.mark.parametrize("statement", ["{} = 1", "[{}]", "x = {{ {} = 1 }}"])
@pytest.mark.parametrize("part", ["a", ' "" ', r'"\"."', "'.'"])
def test_a_key_of_many_parts_is_refused_before_it_is_read(toml, statement, part):
    message = refusal(toml("# a run\n" + statement.format(".".join([part] * 20_000))))
    assert "line 2: a key has more than 32 dotted parts" in message


@pytest.mark.parametrize("deep", ["x = {}1{}", "x = [{}1{}]"])
def test_values_of_many_levels_are_refused(toml, deep):
    for opening, closing in (("[", "]"), ("{a=", "}")):
        text = deep.format(opening * 40, closing * 40)
        assert "nested too deeply" in refusal(toml(text))


def test_text_with_many_dots_is_read(toml):
    prompt = "a." * 100 + " x = {a." * 20
    assert load_config(toml(MINIMAL + f'sample_prompt = "{prompt}"')).train.sample_prompt == prompt


@pytest.mark.parametrize("through", ["", "extends"])
def test_only_a_regular_file_is_read(toml, tmp_path, through):
    """A pipe without a writer would wait for ever, and a device may have no end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for source in (pipe, Path("/dev/zero")):
        named = toml(f"extends = '{source}'") if through else source
        assert f"{source} is a device or a pipe" in refusal(named)


@pytest.mark.parametrize("through", ["", "extends"])
def test_a_file_too_large_for_a_configuration_is_not_read(toml, tmp_path, through):
    large = tmp_path / "weights.bin"
    with large.open("wb") as file:
        file.truncate(2**40)  # a hole: it takes no room
    named = toml(f"extends = '{large}'") if through else large
    assert "weights.bin is larger than 1,048,576 bytes" in refusal(named)


def test_of_many_problems_the_first_are_told_and_the_rest_counted(toml, monkeypatch):
    looked_up = []
    nearest = messages.nearest
    monkeypatch.setattr(
        messages, "nearest", lambda word, known: looked_up.append(word) or nearest(word, known)
    )
    message = refusal(toml(MINIMAL + "".join(f"key_{number} = 1\n" for number in range(50_000))))
    first, *lines = message.splitlines()
    assert first.endswith("50,000 problems")
    assert len(lines) == messages.MOST_PROBLEMS + 1
    assert lines[-1] == "  and 49,990 more"
    assert len(looked_up) <= 3 * messages.MOST_PROBLEMS


def test_problems_of_overrides_count_with_those_of_the_file(toml):
    path = toml(MINIMAL.replace("= 4", "= 0") + "stpes = 1\n")
    many = [f"--train.key_{number}=1" for number in range(30)]
    assert "and 22 more" in refusal(path, *many)
    assert "2 problems" in refusal(path)


def test_a_familiar_value_is_told_ours():
    with pytest.raises(ConfigError, match="did you mean cuda"):
        load_config("quickstart", ["--train.device", "gpu"])
    with pytest.raises(ConfigError, match="did you mean bf16"):
        load_config("quickstart", ["--train.precision", "bfloat16"])


def test_a_v_of_stages_has_two_a_process_unasked():
    asked = {"parallel.pipeline": 2, "parallel.schedule": "zero-bubble-v"}
    config = load_config("shakespeare-char", asked)
    assert config.parallel.virtual_stages == 2
    plain = load_config("shakespeare-char", {"parallel.pipeline": 2})
    assert load_config(plain, asked).parallel.virtual_stages == 2  # its 1 is the default
    with pytest.raises(ConfigError, match="has two stages a process"):
        load_config("shakespeare-char", {**asked, "parallel.virtual_stages": 3})


@pytest.mark.parametrize(
    "override", [["--data.path=https://[x/y.txt"], ["--data.path", "s3://\u2100/"]]
)
def test_what_only_looks_like_a_url_is_refused_as_none(override):
    with pytest.raises(ConfigError, match="is no URL"):
        load_config("quickstart", override)


def test_links_in_a_circle_are_no_configuration(tmp_path):
    (tmp_path / "a.toml").symlink_to("b.toml")
    (tmp_path / "b.toml").symlink_to("a.toml")
    with pytest.raises(ConfigError, match=r"a\.toml cannot be read"):
        load_config(tmp_path / "a.toml")


def test_a_head_of_one_channel_cannot_turn():
    model = {"positions": "rotary", "d_model": 6, "n_heads": 6}
    with pytest.raises(ConfigError, match="give heads two channels or more"):
        load_config("quickstart", {"model": model})
