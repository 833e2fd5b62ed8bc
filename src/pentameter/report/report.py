"""Writes a run's report.html."""

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
    page = render_page(read_run(run_dir))
    path = run_dir / "report.html"
    temporary = None
    try:
        # a reader who reloads the page during a run never sees half of it
        handle, temporary = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=run_dir)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        Path(temporary).chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    return path
