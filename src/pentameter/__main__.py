"""The command `pentameter`, same as `python -m pentameter`."""

import sys

from pentameter.errors import NO_WINDOWS

_TELLING = {"-h", "--help", "help", "-V", "--version", "completion"}


def main() -> int:
    """Run the verb of the command line and return the process's exit code. On Windows all verbs are
    refused, with exit code 2, but help, version and completion."""
    if sys.platform == "win32" and not set(sys.argv[1:2]) <= _TELLING:
        print(f"pentameter: {NO_WINDOWS}", file=sys.stderr)
        return 2
    from pentameter.processes.standard_streams import open_standard_streams

    open_standard_streams()  # before any file is opened, which would get the number of one
    if sys.argv[1:2] == ["train"]:
        from pentameter.processes.launch.stop_signals import stop_at_once

        stop_at_once()  # before seconds of imports: a scheduler may change its mind at once
    from pentameter.cli.main import main as run_command

    return run_command()


if __name__ == "__main__":
    raise SystemExit(main())
