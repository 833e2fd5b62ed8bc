"""Questions to other programs, such as `git` or `sysctl`, which may be absent, slow, or fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_ANSWER_SECONDS = 5.0


def said_by(*command: str, folder: Path | None = None) -> str:
    """Return what a program prints on stdout, stripped, in English and with times in UTC; empty if
    it cannot be started, fails, or takes longer than five seconds. `folder` is its working
    directory, by default this process's."""
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin{os.pathsep}/bin"  # under launchd
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PATH": path, "LC_ALL": "C", "TZ": "UTC"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
