"""Runs' folders for the tests."""

from recorded_runs import make_run, run_end, run_events

__all__ = ["make_run", "run_end", "run_events"]
