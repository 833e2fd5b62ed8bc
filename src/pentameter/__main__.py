"""`python -m pentameter` is the same as `pentameter`."""

from pentameter.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
