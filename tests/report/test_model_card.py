"""The model card: front matter that the Hub reads, numbers of the exported step, and no path."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from pentameter.checkpoint.folders.load_model import open_model
from pentameter.checkpoint.folders.model_folder import Adapters, StoredModel
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.cli.main import main
from pentameter.config.schema import Config, LoraConfig
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import CHATML_TEMPLATE, ChatTemplate
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.model.gpt import build_model
from pentameter.report.pages.model_card import CARD, PICTURE, card_files

TEXT = "the cat sat on the mat, and that was that.\n" * 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps on a file below a folder whose name nobody should read, with a test
    split."""
    folder = tmp_path_factory.mktemp("card")
    (folder / "own-secret").mkdir()
    (folder / "own-secret" / "cats.txt").write_text(TEXT)
    options = [
        *("--data.path", folder / "own-secret" / "cats.txt", "--data.tokenizer", "char"),
        *("--data.test-fraction", "0.1", "--name", "cats", "--run-dir", folder / "run"),
        *(
            "--model.n-layers=1",
            "--model.attention.n-heads=2",
            "--model.d-model=8",
            "--train.steps=4",
        ),
        *("--model.context-length=8", "--train.batch-size=2", "--train.eval-interval=2"),
        *("--train.compile=false", "--train.sample-interval=none", "--log.interval=1"),
    ]
    assert main(["train", "quickstart", *map(str, options)]) == 0
    return folder / "run"


def front_of(card):
    _, front, rest = card.decode().split("---\n", 2)
    return yaml.safe_load(front), rest


def test_a_run_s_card_says_what_it_is(run):
    stored = open_model(run)
    files = card_files(stored, "transformers", license_id="mit", repository="owner/cats")
    front, text = front_of(files[CARD])
    assert front == {
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["pentameter"],
    }
    assert files[PICTURE].startswith(b"\x89PNG")
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {
        event["split"]: event
        for event in events
        if event["event"] == "eval" and event["step"] == stored.step
    }
    assert found.keys() == {"val", "test"}
    for split, place in (("val", "validation"), ("test", "test")):
        row = next(line for line in text.splitlines() if line.startswith(f"| {place} |"))
        values = [float(cell) for cell in row.split("|")[2:5]]
        expected = [found[split][key] for key in ("loss", "perplexity", "bits_per_byte")]
        assert values == pytest.approx(expected, rel=1e-3)
    for said in (
        "# cats\n", "- `cats.txt`\n", f"- step {stored.step}, {stored.step * 16} loss tokens",
        "| `optimizer.learning_rate` |", "![Loss of training and validation",
        'AutoTokenizer.from_pretrained("owner/cats")', "pentameter sample hf://owner/cats",
        "It reads 8 tokens at once", f"the {len(set(TEXT))} characters of its training text",
    ):  # fmt: skip
        assert said in text, said
    assert "No license is named" not in text
    for hidden in ("own-secret", str(run), str(Path.home()), "FOLDER"):
        assert hidden not in files[CARD].decode()


def test_a_card_without_a_license_grants_none(run):
    files = card_files(open_model(run), "transformers")
    front, text = front_of(files[CARD])
    assert "license" not in front
    assert "No license is named, so none is granted" in text
    assert "FOLDER is the folder of this file." in text


def stored_model(tokenizer, **sections):
    config = Config.model_validate(
        {
            "model": {
                **{"vocab_size": tokenizer.vocab_size, "context_length": 8, "n_layers": 1},
                **{"n_heads": 2, "d_model": 8},
            },
            "data": {"corpus": "stdlib"},
            "train": {"batch_size": 2},
            **sections,
        }
    )
    weights = model_state(build_model(config.model, seed=5))
    return StoredModel(Path("/somewhere/own"), config, tokenizer, weights, (), None)


def test_adapters_name_their_base_model():
    stored = stored_model(CharTokenizer("abc"))
    a, b = stored.weights["blocks.0.mlp.up.weight"][:2], stored.weights["blocks.0.mlp.up.weight"]
    stored = replace(
        stored, base_model="owner/small", adapters=Adapters(LoraConfig(rank=2), {"a": (a, b)})
    )
    front, text = front_of(card_files(stored, "peft")[CARD])
    assert (front["library_name"], front["base_model"]) == ("peft", "owner/small")
    assert front["base_model_relation"] == "adapter"
    assert front["tags"] == ["pentameter", "lora"]
    assert f"adapters ({a.numel() + b.numel()} parameters)" in text
    assert "It began with the weights of `owner/small`." in text
    assert "AutoPeftModelForCausalLM" in text
    local = replace(stored, base_model="/home/me/own/small")
    front, text = front_of(card_files(local, "peft")[CARD])
    assert "base_model" not in front
    assert "the weights of `small`" in text
    assert "/home/me" not in text


def test_a_tokenizer_that_stays_behind_is_said():
    stored = stored_model(WordTokenizer.from_documents([TEXT]))
    text = card_files(stored, "transformers")[CARD].decode()
    assert "Its tokenizer (`word`) is not in this folder" in text
    assert "AutoTokenizer" not in text
    assert "pentameter sample" not in text


def test_data_of_the_hub_is_named_as_it_is_there():
    sources = [
        {"path": "hf://datasets/owner/poems/data/*.parquet", "weight": 3},
        {"corpus": "stdlib", "weight": 1},
    ]
    stored = stored_model(CharTokenizer("abc"), data={"sources": sources})

    class Trained(StoredModel):
        step = 5

    stored = Trained(*(getattr(stored, name) for name in stored.__dataclass_fields__))
    front, text = front_of(card_files(stored, "transformers")[CARD])
    assert front["datasets"] == ["owner/poems"]
    assert "- 75.0% the data set `owner/poems`\n- 25.0% the corpus `stdlib`\n" in text


def test_a_chat_model_s_card_shows_a_conversation():
    bpe = train_bpe([TEXT], 280)
    bpe.chat = ChatTemplate.from_json(
        {"template": "{% for m in messages %}{{ m['content'] }}{% endfor %}", "tokens": {}}, "it"
    )
    stored = stored_model(bpe)
    text = card_files(stored, "transformers", repository="owner/cats")[CARD].decode()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    compile(program, "card", "exec")
    for said in (
        'messages = [{"role": "user", "content": "Hello!"}]', "tokenizer.apply_chat_template(",
        "vllm serve owner/cats --max-model-len 8\n", "pentameter serve hf://owner/cats\n",
    ):  # fmt: skip
        assert said in text, said
    of_file = card_files(stored, "gguf", file="cats-Q8_0.gguf")[CARD].decode()
    (program,) = re.findall(r"```python\n(.*?)```", of_file, flags=re.S)
    compile(program, "card", "exec")
    assert "model.create_chat_completion(messages)" in program
    assert "stop_strings" not in text + of_file
    for said in ("llama-cli -m cats-Q8_0.gguf -cnv\n", "FROM ./cats-Q8_0.gguf", "ollama run"):
        assert said in of_file, said


def test_a_card_names_the_text_that_ends_answers_where_no_token_does():
    bpe = train_bpe([TEXT], 280)
    bpe.chat = ChatTemplate(CHATML_TEMPLATE)
    text = card_files(stored_model(bpe), "transformers")[CARD].decode()
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    compile(program, "card", "exec")
    assert """ends = {"stop_strings": ['<|im_end|>'], "tokenizer": tokenizer}""" in program
    assert "max_new_tokens=100, **ends)" in program
    assert 'Ask it with `"stop": ["<|im_end|>"]`: no token ends an answer.' in text
    of_file = card_files(stored_model(bpe), "gguf", file="cats.gguf")[CARD].decode()
    (program,) = re.findall(r"```python\n(.*?)```", of_file, flags=re.S)
    compile(program, "card", "exec")
    assert "model.create_chat_completion(messages, stop=['<|im_end|>'])" in program
    assert 'Ask its server with `"stop": ["<|im_end|>"]`: no token ends an answer.' in of_file


def test_a_card_shows_no_conversation_where_the_export_has_no_template():
    char = CharTokenizer(TEXT)
    char.chat = ChatTemplate(CHATML_TEMPLATE)
    text = card_files(stored_model(char), "transformers")[CARD].decode()
    assert "apply_chat_template" not in text
    assert 'pentameter sample FOLDER --prompt "Once upon a time"' in text


def test_llama_cpp_is_named_where_it_can_open_the_model():
    text = card_files(stored_model(train_bpe([TEXT], 280)), "transformers")[CARD].decode()
    assert "pentameter export FOLDER --to gguf" in text
    assert '-no-cnv -p "Once upon a time"' in text
    word = stored_model(WordTokenizer.from_documents([TEXT]))
    assert "gguf" not in card_files(word, "transformers")[CARD].decode()
