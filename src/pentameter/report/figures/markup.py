"""Pages rendered from `templates/`, with untrusted text made harmless, and written to disk."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import math
import operator
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pentameter import formatting
from pentameter.disk.atomic import write_atomic
from pentameter.record.events import number

TEMPLATES = Path(__file__).parents[1] / "templates"

# Control characters become their pictures (U+2400 …); half of a surrogate pair, which JSON and file
# names may contain and UTF-8 may not, becomes U+FFFD.
_PRINTED = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PRINTED |= dict.fromkeys((127, *range(0xD800, 0xE000)), 0xFFFD)


def render(
    template: str,
    *,
    scripts: Sequence[str] = ("hover.js",),
    live: str = "",
    live_version: str = "",
    **values: Any,
) -> str:
    """Render a file in `templates/` as HTML or SVG; every text among `values` is escaped.

    scripts: files in `templates/` that are joined to the page's one script.
    live: address that the page polls for a new version, with live.js; "" for a page in a file,
        which may connect to nothing.
    live_version: the version that this page shows.
    """
    scripts = (*scripts, "live.js") if live else scripts
    script = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        _environment()
        .get_template(template)
        .render(
            script=Markup(script),
            script_hash=f"sha256-{digest}",
            live=live,
            live_version=live_version,
            style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
            version=package_version(),
            **values,
        )
    )


def package_version() -> str:
    """Return this package's version; "" if it is not installed but run from a source tree."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("pentameter")
    return ""


@functools.cache
def _environment() -> Environment:
    """Return the Jinja environment for `templates/`, made once per process."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "dotted": _dotted,
        "duration": formatting.duration,
        "fixed": formatting.fixed,
        "key": _sort_key,
        "multiply": operator.mul,
        "number": number,
        "scalar": formatting.scalar,
        "size": formatting.size,
        "whole": formatting.whole,
    }
    return environment


def visible(text: str) -> str:
    """Return text with each character that HTML or UTF-8 forbids replaced."""
    return text.translate(_PRINTED)


def _visible(value: Any) -> Any:
    """Return text made `visible`; markup and other values stay as they are."""
    if isinstance(value, Markup) or not isinstance(value, str | Path):
        return value
    return visible(str(value))


def _sort_key(value: float | str) -> str:
    """Return a sort key as text for an HTML attribute; "" for a number that is not finite."""
    return value if isinstance(value, str) else f"{value:.9g}" if math.isfinite(value) else ""


def _dotted(path: str) -> Markup:
    """Return a setting's path with line break opportunities after dots and underscores, escaped."""
    text = escape(_visible(path))
    return text.replace(".", Markup(".<wbr>")).replace("_", Markup("_<wbr>"))


def write_page(path: Path, page: str) -> Path:
    """Write the page to `path` atomically and return `path`, so that reloading during a run never
    shows half a page. Raises StorageError."""
    write_atomic(path, page.encode())
    return path
