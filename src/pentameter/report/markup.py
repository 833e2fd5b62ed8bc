"""The HTML that all pages are made of: frame, sections, tabs, tables, notes; text of unknown origin
made harmless; and the writing of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import metadata
from pathlib import Path

from pentameter.disk.atomic import write_atomic
from pentameter.errors import StorageError
from pentameter.report.hover import SCRIPT, SCRIPT_HASH
from pentameter.report.stylesheet import STYLESHEET

# Even if something in the text slipped through escaping, the browser would load nothing and run
# nothing but the one script that has this hash.
_POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src '{SCRIPT_HASH}'; "
    "base-uri 'none'; form-action 'none'"
)


def document(title: str, sections: Iterable[str], source: str) -> str:
    """A whole page as HTML; `source` says in its footer what it was made from."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLESHEET}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(section for section in sections if section)
        + f"\n<footer>Written by pentameter {text(_version())} from {text(source)}.</footer>\n"
        f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def section(title: str, body: str) -> str:
    """A part of a page under its heading."""
    return f"<section><h2>{text(title)}</h2>{body}</section>"


def nothing(words: str) -> str:
    """A pale card in the place of what there is none of."""
    return f'<div class="card muted">{text(words)}</div>'


def note(words: str) -> str:
    """A small pale line under something; "" where there are no words."""
    return f'<p class="note">{text(words)}</p>' if words else ""


def badge(kind: str, label: str) -> str:
    """A word in a frame, of a class in the style sheet (good, bad, live)."""
    return f'<span class="badge {kind}">{text(label)}</span>'


def pair(cards: Iterable[str]) -> str:
    """Cards side by side where the window is wide enough."""
    return f'<div class="pair">{"".join(cards)}</div>'


def plot_card(title: str, svg: str) -> str:
    """A figure in a card under its title."""
    return f'<figure class="card plot"><h3>{text(title)}</h3>{svg}</figure>'


def table(heads: Iterable[str], rows: Iterable[str], kind: str = "rows") -> str:
    """A table in a card that scrolls sideways.

    Args:
        heads: HTML of the cells above the columns, made by `head`.
        rows: HTML of each row.
        kind: classes in the style sheet.
    """
    return (
        f'<div class="card scroll"><table class="{kind}"><thead><tr>{"".join(heads)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def head(label: str, kind: str = "") -> str:
    """The cell above a column; `label` is HTML."""
    of_kind = f' class="{kind}"' if kind else ""
    return f'<th scope="col"{of_kind}>{label}</th>'


def tabs(name: str, views: Sequence[tuple[str, str]]) -> str:
    """Labelled views of which the reader sees one, by the style sheet alone; one stands as it is.

    Args:
        name: unique on the page, of letters and hyphens.
        views: at most four pairs of label and HTML; the first is seen at the start.
    """
    if len(views) == 1:
        return f"<div>{views[0][1]}</div>"
    buttons = "".join(
        f'<input type="radio" name="{name}" id="{name}-{index}"{" checked" * (index == 0)}>'
        f'<label for="{name}-{index}">{text(label)}</label>'
        for index, (label, _) in enumerate(views)
    )
    return f'<div class="tabs">{buttons}{"".join(f"<div>{view}</div>" for _, view in views)}</div>'


def _version() -> str:
    try:
        return metadata.version("pentameter")
    except metadata.PackageNotFoundError:  # run from a source tree
        return ""


def text(value: str) -> str:
    """The value with markup escaped and what no HTML file may hold replaced.

    Control characters become their pictures (U+2400 …); half of a surrogate pair, which JSON and
    file names may contain and UTF-8 may not, becomes U+FFFD.
    """
    return escape("".join(map(_visible, value)))


def dotted(path: str) -> str:
    """A setting's path, which a narrow column may break where its words end."""
    return text(path).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _visible(character: str) -> str:
    code = ord(character)
    if code < 32 and character not in "\n\t":
        return chr(0x2400 + code)
    return "\ufffd" if code == 127 or 0xD800 <= code < 0xE000 else character


def write_page(path: Path, page: str) -> Path:
    """`path`, which holds the page now; who reloads it during a run never sees half of it.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        write_atomic(path, page.encode())
    except StorageError as error:
        cause = error.__cause__
        assert isinstance(cause, OSError)  # nothing else is turned into a StorageError there
        raise StorageError(f"{path} cannot be written: {cause.strerror or cause}") from cause
    return path
