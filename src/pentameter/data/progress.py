"""Progress of what takes long with much data: the passes by name, and where they report to."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the pass (one of those below), bytes done, and about how many there are."""

READING, TRAINING, ENCODING = "reading", "training", "encoding"
RESUMING, AWAITING = "resuming", "awaiting"  # what an earlier process did, what another one does
IMPORTING, VERIFYING = "importing", "verifying"
