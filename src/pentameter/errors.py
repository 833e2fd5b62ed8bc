"""One exception per exit code: what a verb raises decides how the process ends."""

from __future__ import annotations


class PentameterError(Exception):
    """Anything the user can act on. The message says what, where and what to do instead."""

    exit_code = 1


class ConfigError(PentameterError):
    """Wrong usage or configuration."""

    exit_code = 2


class CorruptError(PentameterError):
    """Data or a checkpoint is damaged, malformed or does not belong here."""

    exit_code = 65


class TrainingFailedError(PentameterError):
    """Training gave up: the loss is not finite, or a worker hangs."""

    exit_code = 70


class RunFolderInUseError(PentameterError):
    """Another process owns the run folder."""

    exit_code = 73


class StorageError(PentameterError):
    """Reading or writing failed: disk full, permission denied, folder gone."""

    exit_code = 74


class InterruptedRunError(PentameterError):
    """A signal stopped the run after it was saved; the same command continues it."""

    exit_code = 75

    def __init__(self, message: str, *, agreed: bool = True) -> None:
        super().__init__(message)
        self.agreed = agreed
        """Whether all processes stop at this step; else this one left alone, before any."""
