"""What is sent to a worker, and what comes back where it fails."""

from __future__ import annotations

from dataclasses import dataclass

from pentameter.config.schema import Config


@dataclass(frozen=True)
class Job:
    """What one of the `world_size` processes of a case is to do."""

    config: Config
    n_steps: int
    rank: int
    world_size: int
    meeting_file: str
    timeout_seconds: float
    prepare: str | None = None
    """`module:function`, called first, without arguments. Tests plant faults with it."""


@dataclass(frozen=True)
class Failed:
    """A worker's answer to a job that raised."""

    message: str
    """The last line of the traceback."""
    traceback: str
    is_consequence: bool
    """Whether it only says that another worker is gone."""
