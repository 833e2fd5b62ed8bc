"""The model card beside an export: README.md, which hubs display, and the run's loss as a picture.

A path is given by its last part only, and nothing is told about the machine. The license, the name
on a hub and the base model, which only the author knows, are arguments.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from pentameter import formatting
from pentameter.checkpoint.exports import Library
from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.gguf.architectures import choose_architecture
from pentameter.checkpoint.gguf.vocabulary import vocabulary
from pentameter.checkpoint.hugging_face.config_json import choose_family
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.tokenizer_files import has_their_chat, tokenizer_files
from pentameter.config.fields import values_of
from pentameter.config.schema import Config
from pentameter.config.urls import last_part
from pentameter.data.corpora.registry import UNKNOWN_CORPUS
from pentameter.errors import ConfigError
from pentameter.planning.flops import padding_elements
from pentameter.planning.gpt import parameter_table
from pentameter.record.events import EvalMetrics
from pentameter.record.reading import RecordedRun, holds_run, read_run
from pentameter.report.figures.markup import TEMPLATES, package_version
from pentameter.report.figures.plots import loss_figure

CARD, PICTURE = "README.md", "loss.png"
TEMPLATE = "model_card.md"
SETTINGS = (
    *("train.steps", "train.batch_size"),
    *("optimizer.name", "optimizer.learning_rate", "optimizer.weight_decay", "schedule.name"),
    *("train.precision", "seed"),
)
"""Dotted paths of the settings that matter most for training the model again, without the
layout."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_DATA = re.compile(r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)(@[^/]+)?(/.*)?")
PLACES = {"val": "validation", "val-sample": "a sample of validation"}
"""Name of a split on the card, if it differs from the split's own."""


def card_files(
    stored: StoredModel,
    library: Library,
    *,
    license_id: str | None = None,
    repository: str | None = None,
    file: str | None = None,
) -> dict[str, bytes]:
    """Render the card for a model exported for `library`. Return file name → content: README.md,
    and loss.png if the model lies in its run folder.

    license_id: as hubs know it ("apache-2.0"); None: the card says that none is granted.
    repository: `owner/name` on a hub, for the commands that open the model; None: they say FOLDER.
    file: the name of the file that holds the model, if it is one.

    Raises ConfigError for a model that no Hugging Face architecture can express.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    config, base = stored.config, stored.base_model
    chat, is_file = stored.tokenizer.chat, library == "gguf"  # which has any template
    model, record = config.model, _run_of(stored)
    is_trained = stored.step > 0
    environment = Environment(  # for Markdown, in which only `_code` escapes
        loader=FileSystemLoader(TEMPLATES),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    picture = None if record is None else _picture(record)
    text = environment.get_template(TEMPLATE).render(
        library=library,
        license_id=license_id,
        folder=repository or "FOLDER",
        model_argument=f"hf://{repository}" if repository else "FOLDER",
        base=None if base is None else _code(base if HUB_NAME.fullmatch(base) else last_part(base)),
        base_id=base if base is not None and HUB_NAME.fullmatch(base) else None,
        lora=None if stored.adapters is None else stored.adapters.lora,
        name=config.name,
        n_adapters=_n_adapters(stored),
        family=families()[choose_family(model)].label,
        n_parameters=_n_parameters(config),
        model=model,
        tokenizer=stored.tokenizer,
        has_tokenizer=bool(tokenizer_files(stored.tokenizer, model.context_length)),
        data=list(_data(config)) if is_trained else [],
        datasets=_hub_data(config) if is_trained else [],
        settings=_settings(stored) if is_trained else {},
        seen=_seen(stored),
        numbers=[] if record is None else list(_numbers(record, stored.step)),
        best=_best(stored),
        picture=None if picture is None else PICTURE,
        is_chat=chat is not None and (is_file or has_their_chat(stored.tokenizer)),
        stop_texts=list(ends := stored.ends_of_answers.texts),
        stop_json=json.dumps(ends, ensure_ascii=False),
        file=file,
        for_llama_cpp=_is_for_llama_cpp(stored),
        version=package_version(),
    )
    return {CARD: text.encode()} | ({} if picture is None else {PICTURE: picture})


def _is_for_llama_cpp(stored: StoredModel) -> bool:
    """Return True if the model can be written as a GGUF file."""
    try:
        choose_architecture(stored.config.model)
        vocabulary(stored.tokenizer)
    except ConfigError:
        return False
    return True


def _run_of(stored: StoredModel) -> RecordedRun | None:
    """Read the run whose folder holds the model's checkpoint; None for a model outside a run
    folder."""
    if stored.checkpoint is None or stored.path.parent.name != "checkpoints":
        return None
    folder = stored.path.parent.parent
    return read_run(folder) if holds_run(folder) else None


def _picture(record: RecordedRun) -> bytes | None:
    """Return the run's losses as PNG; None if it has none."""
    figure = loss_figure(record)
    if figure is None:
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _n_parameters(config: Config) -> int:
    table = [spec for spec in parameter_table(config.model) if not spec.is_state]
    return sum(spec.n_elements for spec in table) - padding_elements(table, config.model)


def _n_adapters(stored: StoredModel) -> int:
    """Count the parameters in the model's LoRA adapters, 0 without any."""
    layers = {} if stored.adapters is None else stored.adapters.layers
    return sum(math.prod(tensor.shape) for pair in layers.values() for tensor in pair)


def _data(config: Config) -> Iterator[str]:
    """Yield a Markdown line for each corpus or data set that the model was trained on."""
    data = config.data
    if data.sources:
        total = sum(source.weight for source in data.sources)
        for source in data.sources:
            named = f"the corpus `{source.corpus}`" if source.corpus else _named(source.path or "")
            yield f"{source.weight / total:.1%} {named}"
    elif data.path is not None:
        yield _named(data.path)
    elif data.corpus not in (None, UNKNOWN_CORPUS):
        yield f"the corpus `{data.corpus}`"


def _named(path: str) -> str:
    """Return Markdown that names a text: a Hugging Face data set by owner/name, else the path's
    last part."""
    found = HUB_DATA.fullmatch(path)
    return f"the data set `{found['name']}`" if found else f"`{_code(last_part(path))}`"


def _hub_data(config: Config) -> list[str]:
    """Return the Hugging Face data sets that the model was trained on, owner/name each, sorted."""
    paths = [source.path for source in config.data.sources or (config.data,)]
    found = [HUB_DATA.fullmatch(path) for path in paths if path is not None]
    return sorted({match["name"] for match in found if match})


def _settings(stored: StoredModel) -> dict[str, str]:
    """Return the settings in SETTINGS and the adapters', dotted path → value as text."""
    values = values_of(stored.config)
    settings: dict[str, Any] = {key: values[key] for key in SETTINGS}
    if stored.adapters is not None:
        lora = stored.adapters.lora
        settings |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha}
        settings["lora.targets"] = ", ".join(lora.targets) or "all linear layers of the blocks"
    return {key: str(value) for key, value in settings.items() if value is not None}


def _seen(stored: StoredModel) -> str:
    """Return the training's length, "step 5,000, 1,000,000 loss tokens"; "" for a model without
    any."""
    if stored.checkpoint is None or not stored.step:
        return ""
    tokens = stored.checkpoint.state.get("tokens")
    seen = f", {tokens:,} loss tokens" if isinstance(tokens, int) else ""
    return f"step {stored.step:,}{seen}"


def _numbers(record: RecordedRun, step: int) -> Iterator[tuple[str, str, str, str]]:
    """Yield (split, loss, perplexity, bits per byte), as text, for each evaluation that the run
    made at `step`, the step of the model's weights."""

    def shown(each: EvalMetrics) -> tuple[str, str, str, str]:
        return (
            _code(PLACES.get(each.split, each.split)),
            formatting.fixed(each.loss),
            f"{each.perplexity:,.4g}",
            formatting.fixed(each.bits_per_byte),
        )

    return (shown(each) for each in record.evaluations if each.step == step)


def _best(stored: StoredModel) -> str:
    """Return a phrase with the run's best validation loss; "" if the checkpoint does not record
    one."""
    best = None if stored.checkpoint is None else stored.checkpoint.state.get("best")
    if not isinstance(best, dict) or not isinstance(best.get("loss"), float):
        return ""
    loss = best["loss"]
    return (
        f"best validation loss {formatting.fixed(loss, 4)} nats per token (perplexity "
        f"{math.exp(min(loss, 700.0)):,.4g}), at step {best.get('step')}"
    )


def _code(text: str) -> str:
    """Replace by "?" the characters that would break inline code in a Markdown table."""
    return "".join(c if c.isprintable() and c not in "`|" else "?" for c in text)
