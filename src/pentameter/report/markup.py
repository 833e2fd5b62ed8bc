"""Pages made from `templates/`: text of unknown origin made harmless, and the writing of a page."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pentameter import wording
from pentameter.disk.atomic import write_atomic
from pentameter.errors import StorageError
from pentameter.report.reading import number

TEMPLATES = Path(__file__).parent / "templates"

# Control characters become their pictures (U+2400 …); half of a surrogate pair, which JSON and file
# names may contain and UTF-8 may not, becomes U+FFFD.
_PRINTED = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PRINTED |= dict.fromkeys((127, *range(0xD800, 0xE000)), 0xFFFD)


def render(template: str, **values: Any) -> str:
    """The page that a file of `templates/` makes of `values`; every text in them is escaped."""
    script = (TEMPLATES / "hover.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    try:
        version = metadata.version("pentameter")
    except metadata.PackageNotFoundError:  # run from a source tree
        version = ""
    return (
        _environment()
        .get_template(template)
        .render(
            script=Markup(script),
            script_hash=f"sha256-{digest}",
            style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
            version=version,
            **values,
        )
    )


@functools.cache
def _environment() -> Environment:
    """The templates and their filters, compiled once a process."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "dotted": _dotted,
        "duration": wording.duration,
        "fixed": wording.fixed,
        "number": number,
        "scalar": wording.scalar,
        "size": wording.size,
        "whole": wording.whole,
    }
    return environment


def _visible(value: Any) -> Any:
    """`value`, in which a text that is no markup yet holds only what an HTML file may."""
    if isinstance(value, Markup) or not isinstance(value, str | Path):
        return value
    return str(value).translate(_PRINTED)


def _dotted(path: str) -> Markup:
    """A setting's path, which a narrow column may break where its words end."""
    text = escape(_visible(path))
    return text.replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>"))


def write_page(path: Path, page: str) -> Path:
    """`path`, which holds the page now; who reloads it during a run never sees half of it."""
    try:
        write_atomic(path, page.encode())
    except StorageError as error:
        cause = error.__cause__
        assert isinstance(cause, OSError)  # nothing else is turned into a StorageError there
        raise StorageError(f"{path} cannot be written: {cause.strerror or cause}") from cause
    return path
