"""Generated configurations: a valid Config, or a ConfigError that names the path; nothing else.

This is the quick tier of the fault battery's class F1.
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pentameter.cli.main import main
from pentameter.config.fields import leaves
from pentameter.config.files.load import load_config
from pentameter.config.files.write import to_toml
from pentameter.config.fingerprint import config_hash, diff_configs
from pentameter.config.messages import shortened
from pentameter.config.schema import Config
from pentameter.errors import ConfigError, printable

# Anything a UTF-8 file can hold; "none" reads as absent where a key may be absent.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(1, 2**31 - 1)
rates = st.floats(0, 1, exclude_max=True)
positive = st.floats(0, exclude_min=True, allow_infinity=False)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """A valid configuration, each section drawn over its whole range."""
    n_heads = draw(st.integers(1, 64))
    batch = draw(st.sampled_from(["batch_size", "tokens_per_step"]))
    source = draw(st.sampled_from(["corpus", "path"]))
    fraction = draw(st.floats(0, 0.5))
    return Config.model_validate(
        {
            "name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)),
            "seed": draw(st.integers(-(2**63), 2**63 - 1)),
            "model": {
                "n_heads": n_heads,
                "d_model": n_heads * 2 * draw(st.integers(1, 64)),
                "n_layers": draw(st.integers(1, 10_000)),
                "d_ff": draw(st.none() | st.integers(1, 2**20)),
                "vocab_size": draw(st.none() | counts),
                "positions": draw(st.sampled_from(["learned", "sinusoidal"])),
                "bias": draw(st.booleans()),
                "dropout": draw(rates),
                "init_std": draw(positive),
            },
            "data": {
                source: draw(texts.filter(lambda text: text != "none")),
                "tokenizer": draw(texts.filter(bool)),
                "validation_fraction": fraction,
                "test_fraction": draw(st.floats(0, 0.49)),
                "max_bytes": draw(st.none() | counts),
                "grammar": {"alphabet": draw(st.sampled_from(["ab", '"\\', "äöü", "\t\n\x7f"]))},
            },
            "optimizer": {
                "name": draw(st.sampled_from(["adamw", "sgd"])),
                "learning_rate": draw(positive),
                "betas": (draw(rates), draw(rates)),
                "weight_decay": draw(positive | st.just(0.0)),
            },
            "schedule": {
                "name": draw(st.sampled_from(["constant", "cosine", "step"])),
                "decay_steps": draw(st.none() | counts),
            },
            "train": {
                batch: draw(counts),
                "steps": draw(counts),
                "compile": draw(st.sampled_from(["auto", True, False])),
                "eval_interval": draw(st.none() | counts),
                "sample_prompt": draw(texts),
            },
        }
    )


VALUES = st.one_of(
    st.integers(-5, 5),
    st.integers(),
    st.sampled_from([10**19, -(10**400), 2**31, 1e308, 5e-324]),
    st.floats(),
    st.booleans(),
    texts,
    st.sampled_from(["none", "auto", "char", "adamw", "8", "1e3", "\ud800"]),
    st.lists(st.floats(), max_size=3),
    st.just({}),
    st.dictionaries(st.sampled_from(["x", "seed", "steps"]), st.integers(), max_size=2),
)
"""Values of every TOML type, few of them right for the key they meet."""

PATHS = st.one_of(
    st.sampled_from(sorted(leaves())),
    st.sampled_from(sorted(leaves())).map(lambda path: path[:-1]),  # a slip of the finger
    st.sampled_from(["model", "data.grammar", "train.steps.more", "trian.steps", "n_layers", ""]),
    texts,
)


def reread(config: Config) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        return load_config(path)


@given(configs())
@settings(max_examples=150, deadline=None)
def test_written_and_read_is_equal(config):
    again = reread(config)
    assert again == config
    assert config_hash(again) == config_hash(config)


@given(configs())
@settings(max_examples=50, deadline=None)
def test_no_difference_iff_equal_hashes(config):
    other = load_config("quickstart")
    assert (diff_configs(config, other) == []) == (config_hash(config) == config_hash(other))
    assert diff_configs(config, config) == []


def loads_or_teaches(source, overrides=()) -> str | None:
    """The refusal, or None where the configuration is valid."""
    try:
        config = load_config(source, overrides)
    except ConfigError as error:
        message = str(error)
        assert message.isprintable() or "\n" in message
        message.encode()  # can be printed
        assert "pydantic" not in message.lower()
        assert "validation error" not in message
        return message
    assert isinstance(config, Config)
    return None


@given(PATHS, VALUES)
@settings(max_examples=300, deadline=None)
@example("model.attention.n_heads", 7)
@example("model.d_model", 2**20 - 3)  # a prime: nearest divisors must not take long
@example("train.steps", {"x": 1})
@example("model.rope_scaling.factor", 2.0)
def test_one_wrong_value_is_named(path, value):
    message = loads_or_teaches("quickstart", {path: value})
    if message is not None and not isinstance(value, dict):
        named = printable(path.replace("-", "_"))
        # A whole table within a section may have no effect, with each of its keys.
        table = named.rpartition(".")[0] if named.count(".") == 2 else named
        assert shortened(named) in message or f" {table} has no effect with " in message


@given(st.lists(st.tuples(PATHS, st.text(max_size=10) | VALUES.map(str)), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_command_line(pairs):
    loads_or_teaches("quickstart", [f"--{path}={text}" for path, text in pairs])


@given(st.lists(st.text(max_size=12) | st.sampled_from(["--seed", "--train.steps", "5"])))
@settings(max_examples=100, deadline=None)
def test_any_arguments(arguments):
    loads_or_teaches("quickstart", arguments)


@given(configs(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_damaged_file(config, data):
    content = bytearray(to_toml(config).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.toml"
        path.write_bytes(content)
        message = loads_or_teaches(path)
        assert message is None or "damaged.toml" in message


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode(errors="replace")))
@settings(max_examples=100, deadline=None)
def test_any_bytes(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bytes.toml"
        path.write_bytes(content)
        assert "bytes.toml" in (loads_or_teaches(path) or "")


# The command itself: 0 or 2, one message that a terminal can show, no traceback.

any_text = st.text(max_size=20) | st.sampled_from(["\x1b[31m", "\u202e", "\ud800", "é" * 5000])
bare_keys = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)
quoted = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8).map(
    lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
)
scalars = st.one_of(
    st.integers().map(str),
    st.sampled_from([str(2**63), str(-(10**400)), "9" * 5000, hex(16**9000), "0o7", "1__0"]),
    st.floats().map(lambda x: "nan" if math.isnan(x) else repr(x)),
    st.sampled_from(["1979-05-27T07:32:00Z", "07:32:00", "true", "1e400", "-inf"]),
    quoted,
    st.sampled_from(['"' + "x" * 100_000 + '"', "'''\n\x1b'''"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.tuples(bare_keys, inner).map(lambda pair: f"{{{pair[0]} = {pair[1]}}}"),
    ),
    max_leaves=8,
)
nested = st.tuples(st.integers(1, 300), st.sampled_from(["[]", "{a=}"]), scalars).map(
    lambda drawn: drawn[1][:-1] * drawn[0] + drawn[2] + drawn[1][-1] * drawn[0]
)
dotted = st.one_of(
    st.sampled_from(sorted(leaves())),
    st.lists(bare_keys | quoted, min_size=1, max_size=5).map(".".join),
    st.tuples(bare_keys | quoted, st.integers(1, 200)).map(
        lambda pair: ".".join([pair[0]] * pair[1])
    ),
)
statements = st.one_of(
    st.tuples(dotted, values | nested).map(lambda pair: f"{pair[0]} = {pair[1]}"),
    dotted.map(lambda key: f"[{key}]"),
    dotted.map(lambda key: f"[[{key}]]"),
    quoted.map(lambda source: f"extends = {source}"),
)


def answers(*arguments: str) -> None:
    """Run `train ARGUMENTS --print-config` as the command does."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["train", *arguments, "--print-config"])
        except SystemExit as stop:  # wrong usage
            code = stop.code
    said = err.getvalue()
    assert code in (0, 2), said
    assert "Traceback" not in said
    assert said.replace("\n", "").isprintable()
    assert len(said) < 10_000
    assert bool(said) == (code == 2)


@given(st.lists(statements, max_size=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_command_reads_or_refuses_any_statements(lines, builds_on_a_preset):
    first = 'extends = "quickstart"\n' if builds_on_a_preset else ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.toml"
        path.write_text(first + "\n".join(lines), encoding="utf-8")
        answers(str(path))


@given(st.lists(st.tuples(dotted, any_text | scalars | nested), max_size=4), any_text)
@settings(max_examples=100, deadline=None)
def test_the_command_reads_or_refuses_any_arguments(pairs, source):
    overrides = [f"--{path}={text}" for path, text in pairs]
    answers("quickstart", *overrides)
    answers(source, *overrides)
