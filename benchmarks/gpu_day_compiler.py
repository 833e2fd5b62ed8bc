"""The item `compiler` of a GPU day: does a machine without a working C compiler go on eager, and
say why?

`as it is` must say works=True and "triton with gcc" (or clang), where the machine has a compiler
and Python.h; the others works=False, one line, a remedy in brackets, and nothing of gcc on stderr
for `no headers`. `triton fails` shows how the error of Triton itself reads (stub passes, its own
build fails).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRIAL = """
import json, sys, time
import torch
from pentameter.machine import capabilities
if sys.argv[2] == "no headers":
    capabilities.sysconfig.get_path = lambda *_, **__: "/nowhere"
from pentameter.machine.choices import choose_compile
start = time.perf_counter()
compiles, reason = choose_compile("auto", torch.device(sys.argv[1]), total_flops=1e30)
print(json.dumps({"compiles": compiles, "reason": reason, "s": time.perf_counter() - start}))
"""
FAILS = """#!/bin/sh
case " $* " in *" -x c - "*) exec gcc "$@" ;; esac
echo "driver.c:1:10: fatal error: cuda.h: No such file or directory" >&2
exit 1
"""


def of_compiler(tell: Callable[..., None], device: Any, folder: Path) -> None:
    """Tell what is chosen, and why, with the machine's compiler, without one, and with one that
    fails."""
    fails = folder / "cc-that-fails"
    fails.write_text(FAILS)
    fails.chmod(0o755)
    cases = {
        "as it is": {},
        "no compiler": {"CC": "/nowhere/gcc", "CXX": "/nowhere/g++"},
        "no headers": {},
        "triton fails": {"CC": str(fails)},
    }
    running = {}
    for case, variables in cases.items():
        caches = folder / "caches" / case.replace(" ", "-")
        places = {name: str(caches) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        running[case] = subprocess.Popen(
            [sys.executable, "-c", TRIAL, device.type, case],
            env={**os.environ, **places, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    for case, process in running.items():
        out, err = process.communicate(timeout=90 if device.type == "cuda" else 900)
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        tell(compiler=case, found=found, exit=process.returncode, stderr=err[-600:])
