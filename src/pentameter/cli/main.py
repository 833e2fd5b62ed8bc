"""The `pentameter` command: runs a verb, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib
import io
import keyword
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from types import ModuleType

from pentameter.disk.cache import find_folder_for_matplotlib
from pentameter.errors import ConfigError, did_you_mean
from pentameter.processes.failures.failure import (
    explanation,
    failure_of,
    print_failure,
    tell_failure,
)
from pentameter.processes.standard_streams import named_standard_streams, outlived

VERBS = {
    "train": "train a model, or continue a run: train PRESET-or-FILE-or-TEXT [--KEY VALUE …]",
    "sample": "write text with a model: sample MODEL [--prompt TEXT]",
    "serve": "answer over HTTP with OpenAI's interface: serve MODEL [MODEL …]",
    "eval": "loss, perplexity and bits per byte of a model over a whole split: eval MODEL",
    "prepare": "turn text into token shards: prepare CORPUS-or-FILES --out DIR",
    "export": "write a model for other programs: export MODEL --to hf|safetensors --out DIR",
    "import": "make a MODEL of a Hugging Face folder: import HF_DIR-or-OWNER/NAME --out DIR",
    "plan": "memory, time, fit and best layouts on a cluster: plan PRESET-or-FILE [--cluster …]",
    "verify": "verify layouts against one process: verify PRESET-or-FILE [--layouts all]",
    "data": "what a step of a run reads, token by token: data RUN_DIR --step N",
    "replay": "compute a step of a run again, and compare: replay RUN_DIR --step N [--layout …]",
    "report": "write report.html for a run: report RUN_DIR",
    "compare": "curves, settings that differ and results of runs on one page: compare RUN RUN…",
    "watch": "a live page of the runs in a folder, with reports and comparisons: watch [RUNS]",
    "doctor": "what this machine can do, and what training on it would choose",
    "completion": "complete commands in a shell, or configurations in an editor: completion bash",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb (None: `sys.argv`) and return the process's exit code. Errors are printed in one
    line; exit codes are in `pentameter.errors`."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows a "?"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    with named_standard_streams():
        try:
            try:
                code = _run(arguments)
            except SystemExit:  # of tyro, after it has printed help
                sys.stdout.flush()
                raise
            sys.stdout.flush()  # a full disk is told here; as the interpreter ends, it is too late
            return code
        except (Exception, KeyboardInterrupt) as error:
            with outlived():
                sys.stdout.flush()
                if not tell_failure(error, debug=debug):  # one process of several tells it itself
                    print_failure(failure_of(error), debug=debug)
            return explanation(error)[1]


def _run(arguments: list[str]) -> int:
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else ConfigError.exit_code
    if arguments[0] in ("--version", "-V"):
        print(f"pentameter {metadata.version('pentameter')}")
        return 0
    return _run_verb(arguments[0], arguments[1:])


def _run_verb(verb: str, arguments: list[str]) -> int:
    if verb not in VERBS:
        hint = did_you_mean(verb, VERBS) or "."
        raise ConfigError(f"unknown verb {verb!r}{hint} Known: {', '.join(VERBS)}")
    if not {"-h", "--help"} & set(arguments):
        find_folder_for_matplotlib()
    run: Callable[[list[str]], int] = module_of(verb).run
    return run(arguments)


def module_of(verb: str) -> ModuleType:
    """Import a verb's module, which has `run` and the verb's options, and return it."""
    name = f"{verb}_" if keyword.iskeyword(verb) else verb  # `import` is in import_.py
    return importlib.import_module(f"pentameter.cli.{name}")


def usage() -> str:
    """Return the text that `pentameter --help` prints."""
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    return (
        "usage: pentameter VERB …\n\n"
        "Trains GPT language models from one configuration file.\n\n"
        f"{verbs}\n\n"
        "pentameter VERB --help tells more of one verb. Start with: pentameter train quickstart\n"
        "--debug shows the traceback of an error, --version the version."
    )
