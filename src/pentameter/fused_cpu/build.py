"""Builds the C++ kernels of `fused_cpu/amx.py` where this machine can run them."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from pentameter.disk.cache import cache_folder
from pentameter.fused_cpu import amx
from pentameter.machine.capabilities import Capabilities, find_compiler

FLAGS = ("-O3", "-std=c++17", "-march=sapphirerapids", "-shared", "-fPIC", "-fopenmp")
BUILD_SECONDS = 120  # it takes one


def load_amx(capabilities: Capabilities) -> str | None:
    """Load the AMX kernels, built into the cache at the first call; None, or why there are none.

    Their absence costs time, never a run, so nothing is raised.
    """
    if not capabilities.cpu.amx_bf16:
        return "the CPU has no AMX"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the AMX kernels are for Linux on x86-64"
    try:
        works = amx.load(_built())
    except (OSError, subprocess.SubprocessError) as error:
        return f"the AMX kernels cannot be built: {error}"
    return None if works else "the system does not let this process use AMX"


def _built() -> Path:
    """The library's path; its name is the hash of the sources, so that none is out of date.

    Raises:
        OSError: the cache cannot be written, or the compiler fails.
    """
    content = b"".join(source.read_bytes() for source in amx.SOURCES) + " ".join(FLAGS).encode()
    library = cache_folder() / "native" / f"amx-{hashlib.sha256(content).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = find_compiler("cpu")
    if not compiler.works or compiler.command is None:
        raise OSError(compiler.reason)
    library.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may build at once: each writes its own file and puts it in place.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        fresh = Path(folder) / library.name
        command = [compiler.command, *FLAGS, str(amx.SOURCES[0]), "-o", str(fresh)]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
        )
        if result.returncode != 0:
            raise OSError(next(iter(result.stderr.splitlines()), f"exit {result.returncode}"))
        os.replace(fresh, library)
    return library
