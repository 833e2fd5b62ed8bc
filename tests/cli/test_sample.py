"""`pentameter sample` on a small untrained model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from scripted import byte_tokenizer, model_that_says

from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.cli.main import main
from pentameter.cli.sample import run
from pentameter.config.data_schema import DataConfig
from pentameter.config.files.write import to_toml
from pentameter.config.schema import Config, ModelConfig, TrainConfig
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import CHATML_TEMPLATE, ChatTemplate
from pentameter.data.tokenizers.render_client import Rendering
from pentameter.errors import ConfigError
from pentameter.generation.detokenizer import Detokenizer
from pentameter.generation.loop import generate
from pentameter.model.gpt import GPT, build_model

TOKENIZER = CharTokenizer("\n abcdé")
CONFIG = Config(
    model=ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        vocab_multiple=8,
        context_length=10,
        n_layers=1,
        n_heads=2,
        d_model=8,
        init_std=1.0,
    ),
    data=DataConfig(corpus="stdlib"),
    train=TrainConfig(batch_size=1),
)


@pytest.fixture(scope="module")
def model() -> GPT:
    return build_model(CONFIG.model, seed=3).eval()


@pytest.fixture(scope="module")
def run_folder(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    save(folder, CONFIG, model, TOKENIZER)
    return str(folder)


def test_text_is_the_prompt_and_what_follows(
    run_folder: str, model: GPT, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "25", "--temperature", "0.7", "--top-k", "5", "--top-p", "0.9"]
    assert run([run_folder, "--prompt", "bad ", "--seed", "4", *options]) == 0
    (text,) = generate(
        model, TOKENIZER, "bad ", max_new_tokens=25, temperature=0.7, top_k=5, top_p=0.9, seed=4
    )
    assert capsys.readouterr().out == "bad " + text + "\n"


def test_without_a_prompt_only_new_text_is_printed(
    run_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([run_folder, "--max-new-tokens", "12", "--device", "cpu"])
    assert len(capsys.readouterr().out) == 12 + 1


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_precision_is_that_of_the_weights(
    run_folder: str, model: GPT, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}[precision]
    run([run_folder, "--prompt", "a", "--max-new-tokens", "25", "--precision", precision])
    (text,) = generate(deepcopy(model).to(dtype), TOKENIZER, "a", max_new_tokens=25)
    assert capsys.readouterr().out == "a" + text + "\n"


def test_a_precision_that_the_device_lacks_is_refused_by_its_option(run_folder: str) -> None:
    with pytest.raises(ConfigError, match=r"^precision=tf32 is not possible on cpu .*: fp64, fp32"):
        run([run_folder, "--device", "cpu", "--precision", "tf32"])


def test_several_samples_are_told_apart(
    run_folder: str, model: GPT, capsys: pytest.CaptureFixture[str]
) -> None:
    run([run_folder, "--prompt", "a", "--num-samples", "3", "--max-new-tokens", "9"])
    texts = generate(model, TOKENIZER, "a", num_samples=3, max_new_tokens=9)
    assert capsys.readouterr().out == "".join(
        f"--- sample {i} of 3 ---\na{text}\n" for i, text in enumerate(texts, start=1)
    )


def test_several_prompts_are_continued_each_as_if_alone(
    run_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [run_folder, "--max-new-tokens", "6", "--num-samples", "2"]
    alone = []
    for prompt in ("bad", "add"):
        run([*options, "--prompt", prompt])
        alone.append(capsys.readouterr().out)
    run([*options, "--prompt", "bad", "--prompt=add"])
    first, second = (f"--- prompt {n} of 2 ---\n{text}" for n, text in enumerate(alone, 1))
    assert capsys.readouterr().out == first + second
    run([*options, "--prompt", "bad", "--prompt", "add", "--json"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["prompt"] for each in found] == ["bad", "add"]


def test_json(
    run_folder: str, model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("dé\n", encoding="utf-8-sig")  # with the mark that Windows writes
    options = ["--num-samples", "2", "--max-new-tokens", "15", "--json"]
    run([run_folder, "--prompt-file", str(prompt), *options])
    said = json.loads(capsys.readouterr().out)
    assert said["prompt"] == "dé\n"
    assert said["tokens_per_second"] > 0
    texts = generate(model, TOKENIZER, "dé\n", num_samples=2, max_new_tokens=15)
    assert [sample["text"] for sample in said["samples"]] == texts
    for sample in said["samples"]:
        assert sample["tokens"] == len(sample["token_ids"]) == 15
        assert TOKENIZER.decode(sample["token_ids"]) == sample["text"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--top-k", "-3"], "top_k=-3"),
        (["--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--num-samples", "0"], "num_samples=0"),
        (["--prompt", "xyz"], "U\\+0078"),
        (["--prompt", "a", "--prompt-file", "b"], "exclude each other"),
        (["--prompt-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_wrong_usage_is_refused(
    run_folder: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=said):
        run([run_folder, *options])
    assert main(["sample", run_folder, *options]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert len(written.err.splitlines()) == 1


def test_a_prompt_file_must_be_utf8(run_folder: str, tmp_path: Path) -> None:
    prompt = tmp_path / "latin.txt"
    prompt.write_bytes(b"ab\xe9")
    with pytest.raises(ConfigError, match="not UTF-8 at byte 2"):
        run([run_folder, "--prompt-file", str(prompt)])


def test_a_url_is_shown_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^s3://bucket/run is a URL, and a model is read"):
        run(["s3://bucket/run"])


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a run folder"):
        run([str(tmp_path)])


def test_a_reader_that_goes_away_is_no_error(run_folder: str) -> None:
    """Like `pentameter sample … | head -c 5`: no traceback, no message after the first line."""
    code = "import sys; from pentameter.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "sample", run_folder, "--max-new-tokens", "20000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(5)) == 5
    process.stdout.close()
    (said,) = process.stderr.read().splitlines()
    assert said.startswith(b"pentameter: reading the model")
    process.stderr.close()
    assert process.wait(timeout=30) == 0


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from pentameter.cli.sample import run\n"
        "try: run(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-new-tokens" in shown.stdout


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A person at a terminal, who writes these lines and then ends the input."""
    left = iter(lines)

    def read(_: str) -> str:
        for line in left:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)


def test_on_a_terminal_it_asks_for_prompts(
    run_folder: str,
    model: GPT,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed(monkeypatch, "bad ", "xyz", "")
    assert run([run_folder, "--max-new-tokens", "12", "--seed", "4"]) == 0
    said = capsys.readouterr()
    # Each has a seed of its own, also the one that this model cannot read.
    texts = [
        generate(model, TOKENIZER, prompt, max_new_tokens=12, seed=seed)[0]
        for prompt, seed in (("bad ", 4), ("", 6))
    ]
    assert said.out == "".join(f"{text}\n" for text in texts) + "\n"
    assert "Ctrl-D ends" in said.err
    assert "U+0078" in said.err


def test_ctrl_c_ends_a_text_and_not_the_loop(
    run_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "bad ", "bad ")
    n_pushed = iter(range(100))
    push = Detokenizer.push

    def interrupted(self: Detokenizer, token: int) -> str:
        if next(n_pushed) == 5:
            raise KeyboardInterrupt
        return push(self, token)

    monkeypatch.setattr(Detokenizer, "push", interrupted)
    assert run([run_folder, "--max-new-tokens", "12"]) == 0
    first, second = capsys.readouterr().out.removesuffix("\n\n").split("\n", 1)
    assert (len(first), len(second)) == (5, 12)


def save_talker(folder: Path, model: GPT) -> CharTokenizer:
    """A run folder whose tokenizer, which is returned, has a chat template."""
    tokenizer = CharTokenizer("\nabcdésu")
    tokenizer.chat = ChatTemplate(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}\n{% endfor %}a"
    )
    save(folder, CONFIG, model, tokenizer)
    return tokenizer


def save(folder: Path, config: Config, model: GPT, tokenizer: Tokenizer) -> None:
    """Write a run folder with one checkpoint."""
    files = {"config.toml": to_toml(config).encode(), "tokenizer.json": tokenizer.to_bytes()}
    store = CheckpointStore(folder / "checkpoints", run_id="r", config_hash="h")
    store.save(Contents(7, {"model": model_state(model)}, {"step": 7}, files))


@pytest.mark.parametrize("system", ["", "abc"])
def test_an_answer_sees_the_conversation(
    tmp_path: Path,
    model: GPT,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    system: str,
) -> None:
    tokenizer = save_talker(tmp_path, model)
    typed(monkeypatch, "bad", "add", "/new", "bad")
    options = ["--chat", "--max-new-tokens", "6", *(["--system", system] if system else [])]
    run([str(tmp_path), *options])
    expected, opening = [], f"s{system}\n" if system else ""
    asked = opening
    for seed, message in ((0, "bad"), (1, "add"), (3, "bad")):
        asked = (asked if seed < 3 else opening) + f"u{message}\na"
        (answer,) = generate(model, tokenizer, asked, max_new_tokens=6, seed=seed)
        expected.append(answer)
        asked += f"{answer}\n"
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in expected) + "\n"


def test_an_answer_ends_at_a_text_where_the_tokenizer_lacks_the_template_s_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer(CHATML_TEMPLATE, has_special=False)
    asked = "<|im_start|>user\nbad<|im_end|>\n<|im_start|>assistant\n"
    longer = f"{asked}abc.<|im_end|>\n{asked}"  # the mark stands there once
    said = {len(asked): "abc.<|im_end|>\nabc", len(longer): "<|no<|im_end|>\n"}
    script = {n_before: tokenizer.encode(text).tolist() for n_before, text in said.items()}
    talking = model_that_says(script, tokenizer)
    save(tmp_path, CONFIG.model_copy(update={"model": talking.config}), talking, tokenizer)
    command = [str(tmp_path), "--chat", "--temperature", "0", "--max-new-tokens", "19"]
    run([*command, "--prompt", "bad"])
    assert capsys.readouterr().out == "abc.\n"
    run([*command, "--prompt", "bad", "--json"])
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert (sample["text"], sample["tokens"]) == ("abc.", len("abc.<|im_end|>"))
    typed(monkeypatch, "bad", "bad")
    run(command)
    assert capsys.readouterr().out == "abc.\n<|no\n\n"


def test_one_process_renders_the_template_of_a_chat(
    tmp_path: Path, model: GPT, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_talker(tmp_path, model)
    started, start = [], Rendering.__enter__
    monkeypatch.setattr(Rendering, "__enter__", lambda self: started.append(self) or start(self))
    run([str(tmp_path), "--chat", "--prompt", "bad", "--max-new-tokens", "3"])
    assert len(started) == 1


def test_a_system_message_comes_before_the_prompt(
    tmp_path: Path, model: GPT, run_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = save_talker(tmp_path, model)
    asked = ["--chat", "--system", "cab", "--prompt", "bad", "--max-new-tokens", "6"]
    assert run([str(tmp_path), *asked]) == 0
    (answer,) = generate(model, tokenizer, "scab\nubad\na", max_new_tokens=6)
    assert capsys.readouterr().out == f"{answer}\n"
    with pytest.raises(ConfigError, match=r"--system 'cab' .* needs --chat"):
        run([run_folder, "--system", "cab", "--prompt", "bad"])


def test_a_model_s_own_settings_hold_until_others_are_given(
    model: GPT, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = CharTokenizer(TOKENIZER.characters)
    said = {"do_sample": True, "temperature": 0.25, "top_k": 4}
    tokenizer.published = {"generation_config.json": json.dumps(said)}
    stored = StoredModel(tmp_path, CONFIG, tokenizer, model_state(model), (), None)
    folder = str(save_model(stored, tmp_path / "published"))
    command = ["sample", folder, "--prompt", "bad ", "--max-new-tokens", "25", "--seed", "3"]
    assert main(command) == 0
    found, line = capsys.readouterr()
    assert "temperature=0.25, top_k=4, as the model was published with" in line
    explicit = [*command, "--temperature", "0.25", "--top-k", "4"]
    assert main(explicit) == 0
    assert capsys.readouterr() == (found, "")
