"""The model card, README.md in an exported folder, which hubs show; rendered from `templates/`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pentameter import formatting
from pentameter.checkpoint.model_folder import StoredModel
from pentameter.config.fields import values_of
from pentameter.config.schema import Config
from pentameter.config.urls import last_part
from pentameter.data.corpora.registry import UNKNOWN_CORPUS
from pentameter.planning.flops import padding_elements
from pentameter.planning.gpt import parameter_table

CARD = "README.md"
TEMPLATES = Path(__file__).parent / "templates"
SETTINGS = (
    *("train.steps", "train.batch_size"),
    *("optimizer.name", "optimizer.learning_rate", "optimizer.weight_decay", "schedule.name"),
    *("train.precision", "seed"),
)
"""Keys of the settings most needed to train the model again."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LOADS = {
    "transformers": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")  # this one
tokenizer = AutoTokenizer.from_pretrained("FOLDER")""",
    "peft": """\
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")  # this one, beside its base model""",
}


def model_card(stored: StoredModel, family: str, library: Literal["transformers", "peft"]) -> bytes:
    """Render the card for a model exported to a library: its description, training data and
    settings, results, and how to load it."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    config, base = stored.config, stored.base_model
    model = config.model
    is_trained = stored.step > 0
    lora = None if stored.adapters is None else stored.adapters.lora
    environment = Environment(  # for Markdown, in which only `_code` escapes
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    table = parameter_table(model)
    n_parameters = sum(spec.n_elements for spec in table) - padding_elements(table, model)
    text = environment.get_template(CARD).render(
        library=library,
        base=None if base is None else _code(base),
        base_id=base if base is not None and HUB_NAME.fullmatch(base) else None,
        lora=lora,
        name=config.name,
        kind="Low-rank adapters of a language model" if library == "peft" else "A language model",
        family=family,
        n_parameters=f"{n_parameters:,}",
        model=model,
        tokenizer=stored.tokenizer.kind,
        data=list(_data(config)) if is_trained else [],
        settings=_settings(stored) if is_trained else {},
        results=list(_results(stored)),
        code=LOADS[library],
        version=_version(),
    )
    return text.encode()


def _data(config: Config) -> Iterator[str]:
    """Yield one line per text that the model was trained on. For files, only the name is told."""
    data = config.data
    if data.sources:
        total = sum(source.weight for source in data.sources)
        for source in data.sources:
            where = source.corpus or last_part(source.path or "")
            yield f"{source.weight / total:.1%} `{_code(where)}`"
    elif data.path is not None:
        yield f"`{_code(last_part(data.path))}`"
    elif data.corpus not in (None, UNKNOWN_CORPUS):
        yield f"the corpus `{data.corpus}`"


def _settings(stored: StoredModel) -> dict[str, str]:
    """Map the settings most needed to train the model again to their values as text."""
    values = values_of(stored.config)
    settings: dict[str, Any] = {key: values[key] for key in SETTINGS}
    if stored.adapters is not None:
        lora = stored.adapters.lora
        settings |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha}
        settings["lora.targets"] = ", ".join(lora.targets) or "all linear layers of the blocks"
    return {key: str(value) for key, value in settings.items() if value is not None}


def _results(stored: StoredModel) -> Iterator[str]:
    """Yield the steps, tokens and best loss that the checkpoint records, a line each."""
    if stored.checkpoint is None:
        return
    state = stored.checkpoint.state
    tokens, best = state.get("tokens"), state.get("best")
    seen = f", {tokens:,} tokens" if isinstance(tokens, int) else ""
    yield f"step {stored.step:,}{seen}"
    if isinstance(best, dict) and isinstance(best.get("loss"), float):
        loss = best["loss"]
        yield (
            f"best validation loss {formatting.fixed(loss, 4)} nats per token (perplexity "
            f"{math.exp(min(loss, 700.0)):,.4g}), at step {best.get('step')}"
        )


def _code(text: str) -> str:
    """Replace characters that cannot stand between backquotes in a line of Markdown."""
    return "".join(c if c.isprintable() and c not in "`|" else "?" for c in text)


def _version() -> str:
    try:
        return metadata.version("pentameter")
    except metadata.PackageNotFoundError:  # run from a source tree
        return ""
