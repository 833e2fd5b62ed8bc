"""`pentameter sample`: text from a trained model, printed as it comes, or a loop to write in."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from pentameter.cli.options.arguments import device_for_verb, load_for_verb, parse, print_tables
from pentameter.config.choices import LoadedPrecision
from pentameter.disk.atomic import storage_errors
from pentameter.errors import ConfigError, remark
from pentameter.machine.load.beside_others import BesideOthers

if TYPE_CHECKING:
    import numpy as np

    from pentameter.checkpoint.folders.load_model import LoadedModel
    from pentameter.generation.detokenizer import Detokenizer
    from pentameter.generation.loop import Generation
    from pentameter.generation.prompts import Prompt

WIDTH = 80
"""Line width of tables without a terminal, in characters."""
PROMPT = "› "
NEW = "/new"
LOOP_HELP = "Write what the model is to continue. Ctrl-C stops a text, Ctrl-D ends."
CHAT_HELP = f"Write to the model. Ctrl-C stops an answer, {NEW} forgets all, Ctrl-D ends."


@dataclass(frozen=True)
class SampleArguments:
    """Continue a prompt with a trained model. The text is printed as it comes, after the prompt.

    On a terminal, without a prompt, it asks for one after the other, with the model loaded once:
    lines that the model continues or, with --chat, a conversation.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder (its best checkpoint, else its last), a checkpoint folder, or a Hugging Face
    folder."""
    prompt: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")
    ] = ()
    """The text to continue; given several times, each text is, as if alone. Without one it starts
    after the token with which the tokenizer begins texts, else after <|endoftext|> where it has it;
    else, and where the model was trained on too few documents to learn what these begin, after a
    newline; none is printed."""
    prompt_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Read the prompt from this UTF-8 file instead."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Take the prompt as a user's message, in the chat template of the model's tokenizer; the
    answer ends at the token, or text, with which the template ends one, or at the end of text."""
    system: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """With --chat: the system message before the conversation, where its template has one."""
    experts: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print, instead of a continuation, which experts the prompt's tokens are sent to, for each
    layer of a mixture of experts."""
    max_new_tokens: int = 256
    """Tokens per sample. Past the model's context length only the last tokens are seen."""
    temperature: float | None = None
    """Below 1 likelier tokens are preferred; 0 always takes the likeliest. Absent, it is 1. Where a
    model came with a generation_config.json, absent ones of --temperature, --top-k and --top-p are
    its own, and a line says so."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None
    """Keep only the K likeliest tokens."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None
    """Keep only the fewest likeliest tokens that hold this much probability together."""
    num_samples: int = 1
    """Texts of each prompt, sampled as one batch."""
    seed: int = 0
    """The same seed gives the same texts."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the model runs; auto takes the fastest present."""
    precision: LoadedPrecision = "weights"
    """In what matrix products are computed; in bf16 and fp16, weights, keys and values have 16
    bits, too. `weights` is what the weights were saved in, or fp32 if a model was published in 16
    bits."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object at the end of each prompt instead of text."""


def run(arguments: list[str]) -> int:
    """Print texts sampled as `arguments` (the command line after the verb) ask, and return the exit
    code 0."""
    asked = parse(SampleArguments, arguments, verb="sample")
    prompts = _prompts(asked)
    from pentameter.generation.loop import Generation

    if asked.system and not asked.chat:
        raise ConfigError(
            f"--system {asked.system!r} is a message of a conversation: it needs --chat"
        )
    given = {
        key: value
        for key in ("temperature", "top_k", "top_p")
        if (value := getattr(asked, key)) is not None
    }
    settings = Generation(
        **given,
        max_new_tokens=asked.max_new_tokens,
        num_samples=asked.num_samples,
        seed=asked.seed,
    )
    loaded = load_for_verb(asked.model, device_for_verb(asked.device), asked.precision)
    settings = _as_published(settings, given, loaded)
    with BesideOthers():
        if _is_loop(asked):
            _ask_for_prompts(loaded, settings, is_chat=asked.chat, system=asked.system)
            return 0
        for number, prompt in enumerate(prompts, 1):
            if len(prompts) > 1 and not asked.json:
                print(f"--- prompt {number} of {len(prompts)} ---")
            _print_samples(loaded, settings, asked, prompt)
    return 0


def _print_samples(
    loaded: LoadedModel, settings: Generation, asked: SampleArguments, prompt: str
) -> None:
    """Print what `asked` asks of one prompt: its samples, or its experts."""
    from pentameter.generation.prompts import chat_prompt, text_prompt

    if asked.experts:
        _print_expert_choices(loaded, prompt, as_json=asked.json)
        return
    if asked.chat:
        opening = chat_prompt(loaded.tokenizer, prompt, system=asked.system)
    else:
        opening = text_prompt(loaded.tokenizer, prompt)
    steps, samples = _sampled(loaded, opening, settings)
    if asked.json:
        _print_json(steps, samples, prompt)
    else:
        _print_text(steps, samples, opening.text)


def _as_published(settings: Generation, given: Collection[str], loaded: LoadedModel) -> Generation:
    """Return the settings with those that the model came with in place of what is not `given`, and
    say so in a line if they differ."""
    from pentameter.generation.sampling import Sampling, usual_sampling

    usual, plain = usual_sampling(loaded.tokenizer.published_generation), Sampling()
    theirs = {
        key: getattr(usual, key)
        for key in ("temperature", "top_k", "top_p")
        if key not in given and getattr(usual, key) != getattr(plain, key)
    }
    if not theirs:
        return settings
    said = ", ".join(f"{key}={value:g}" for key, value in theirs.items())
    remark(f"{said}, as the model was published with (generation_config.json)")
    return replace(settings, **theirs)


def _print_expert_choices(loaded: LoadedModel, text: str, *, as_json: bool) -> None:
    """Print the table of each layer with experts; with `as_json` every token's experts and their
    weights. Raises ConfigError for a model without experts, and for a text that is empty or cannot
    be encoded."""
    from pentameter.evaluate.expert_choices import expert_choices, expert_table

    if not text:
        raise ConfigError("--experts needs a text: --prompt TEXT, or --prompt-file FILE")
    tokens = loaded.tokenizer.encode_document(text)
    layers = expert_choices(loaded.model, tokens)
    ids = tokens.tolist()
    shown = [loaded.tokenizer.decode([token]) for token in ids]
    if as_json:
        pairs = zip(ids, shown, strict=True)
        record = {"prompt": text, "tokens": [{"id": i, "text": word} for i, word in pairs]}
        print(json.dumps({**record, "layers": [each.to_json() for each in layers]}), flush=True)
    else:
        tables = [expert_table(each, shown) for each in layers]
        print_tables(itertools.chain(*((table, "") for table in tables)), WIDTH)


def _is_loop(asked: SampleArguments) -> bool:
    """Return True to ask for prompts on the terminal: input and output are a terminal, and no
    prompt, --json, --experts or several samples were given."""
    has_prompt = bool(asked.prompt) or asked.prompt_file is not None
    given = has_prompt or asked.json or asked.experts or asked.num_samples > 1
    return not given and sys.stdin.isatty() and sys.stdout.isatty()


def _sampled(
    loaded: LoadedModel, prompt: Prompt, settings: Generation
) -> tuple[Iterator[np.ndarray], list[Detokenizer]]:
    """Start sampling. Return an iterator over each step's tokens (B,), for B samples, and a
    detokenizer for each sample. The iterator ends once all samples have ended."""
    from pentameter.generation.detokenizer import Detokenizer
    from pentameter.generation.loop import sampled_tokens

    tokenizer = loaded.tokenizer
    steps = sampled_tokens(loaded.model, prompt.ids, tokenizer.vocab_size, settings)
    before = prompt.ids.tolist() if prompt.text else ()  # after it a space between words is kept
    samples = [Detokenizer(tokenizer, before, prompt.ends) for _ in range(settings.num_samples)]
    return _until_ended(steps, samples), samples


def _ask_for_prompts(
    loaded: LoadedModel, settings: Generation, *, is_chat: bool, system: str
) -> None:
    """Read prompts, a line each, until the input ends, and print the model's continuation. If
    `is_chat`, print its answer to the conversation so far, which begins with the message `system`
    unless that is empty. Seeds count up from that in `settings`."""
    from pentameter.data.tokenizers.base import NO_ENDS
    from pentameter.data.tokenizers.render_client import ends_of_answers, render
    from pentameter.generation.prompts import Prompt, encode_messages, template_of, text_prompt

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and come again with the arrow keys)

    template = template_of(loaded.tokenizer) if is_chat else None
    ends = ends_of_answers(loaded.tokenizer) if is_chat else NO_ENDS
    print(LOOP_HELP if template is None else CHAT_HELP, file=sys.stderr)
    opening = [{"role": "system", "content": system}] if system else []
    messages = opening
    for seed in itertools.count(settings.seed):
        try:
            line = input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if template is not None and line.strip() == NEW:
            messages = opening
            continue
        turn = [*messages, {"role": "user", "content": line}]
        try:
            if template is None:
                prompt = text_prompt(loaded.tokenizer, line)
            else:
                ids = encode_messages(loaded.tokenizer, turn, partial(render, template))
                prompt = Prompt("", ids, ends)
        except ConfigError as error:  # such as a character that the model does not know
            remark(str(error))
            continue
        steps, samples = _sampled(loaded, prompt, replace(settings, seed=seed))
        (text,) = _print_text(steps, samples, "", KeyboardInterrupt)
        messages = [*turn, {"role": "assistant", "content": text}]


def _until_ended(steps: Iterator[np.ndarray], samples: list[Detokenizer]) -> Iterator[np.ndarray]:
    """Yield each step's tokens (B,) until every sample has ended."""
    for tokens in steps:
        yield tokens
        if all(sample.is_ended for sample in samples):
            return


def _prompts(asked: SampleArguments) -> tuple[str, ...]:
    if asked.prompt_file is None:
        return asked.prompt or ("",)
    if asked.prompt:
        raise ConfigError(
            f"--prompt {asked.prompt[0]!r} and --prompt-file {asked.prompt_file} exclude each "
            "other; keep one"
        )
    with storage_errors(asked.prompt_file, "read"):
        try:
            return (asked.prompt_file.read_bytes().decode("utf-8-sig"),)
        except FileNotFoundError as error:
            raise ConfigError(f"--prompt-file {asked.prompt_file} does not exist") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--prompt-file {asked.prompt_file} is not UTF-8 at byte {error.start}; convert it"
            ) from error


def _print_json(steps: Iterator[np.ndarray], samples: list[Detokenizer], prompt: str) -> None:
    """Print the samples as one JSON object; `tokens_per_second` counts all samples' tokens."""
    start = time.perf_counter()
    found: list[dict[str, Any]] = [{"text": "", "tokens": 0, "token_ids": []} for _ in samples]
    for tokens in steps:
        for sample, shown, token in zip(samples, found, tokens.tolist(), strict=True):
            if not sample.is_ended:
                shown["token_ids"].append(token)
                shown["text"] += sample.push(token)
    seconds = time.perf_counter() - start
    for sample, shown in zip(samples, found, strict=True):
        shown["text"] += sample.flush()
        shown["tokens"] = len(shown["token_ids"])
    rate = sum(shown["tokens"] for shown in found) / seconds
    print(json.dumps({"prompt": prompt, "samples": found, "tokens_per_second": rate}), flush=True)


def _print_text(
    steps: Iterator[np.ndarray],
    samples: list[Detokenizer],
    prompt: str,
    *ended_by: type[BaseException],
) -> list[str]:
    """Print the first sample, after the prompt, while it grows, and the others once they are
    complete. Return the texts of all. An exception of the types `ended_by` ends the samples and is
    not raised."""
    texts = [""] * len(samples)
    if len(samples) > 1:
        _write(_rule(0, len(samples)))
    _write(prompt)
    with contextlib.suppress(*ended_by):
        for tokens in steps:
            for index, token in enumerate(tokens.tolist()):
                chunk = samples[index].push(token)
                texts[index] += chunk
                _write(chunk if index == 0 else "")
    for index, sample in enumerate(samples):
        rest = sample.flush()
        texts[index] += rest
        _write(
            f"{rest}\n" if index == 0 else f"{_rule(index, len(samples))}{prompt}{texts[index]}\n"
        )
    return texts


def _rule(index: int, num_samples: int) -> str:
    return f"--- sample {index + 1} of {num_samples} ---\n"


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()
