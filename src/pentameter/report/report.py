"""Writes a run's report.html, and other pages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pentameter.errors import StorageError
from pentameter.report.page import render_page
from pentameter.report.reading import read_run


def write_report(run_dir: Path) -> Path:
    """The path of `run_dir/report.html`, written anew from what the run folder holds.

    Raises:
        StorageError: the folder is not there, or cannot be read or written.
    """
    return write_page(run_dir / "report.html", render_page(read_run(run_dir)))


def write_page(path: Path, page: str) -> Path:
    """`path`, which holds the page now.

    Raises:
        StorageError: it cannot be written.
    """
    temporary = None
    try:
        # a reader who reloads the page during a run never sees half of it
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.stem}-", suffix=".html", dir=path.parent
        )
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path
