"""What must stand before anything is imported."""

import os
from pathlib import Path

if not any(Path("/dev", name).exists() for name in ("nvidia0", "kfd")):
    # Triton decides when it is imported whether its kernels run as numpy or are compiled.
    os.environ.setdefault("TRITON_INTERPRET", "1")
