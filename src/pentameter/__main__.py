"""The command `pentameter`, same as `python -m pentameter`."""

import sys


def main() -> int:
    """Run one verb and return the process's exit code."""
    if sys.argv[1:2] == ["train"]:
        from pentameter.processes.stop_signals import stop_at_once

        stop_at_once()  # before seconds of imports: a scheduler may change its mind at once
    from pentameter.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    raise SystemExit(main())
