"""What must stand before anything is imported."""

import os
import signal
from pathlib import Path

if not any(Path("/dev", name).exists() for name in ("nvidia0", "kfd")):
    # Triton decides when it is imported whether its kernels run as numpy or are compiled.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A suite that nohup, or a shell's `&`, has started ignores these, and so would every command that
# tests send them to.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
