"""The thread that computes for all served models, and the requests that wait for it.

Loading and computing stay in this one thread: OpenMP gives each computing thread a pool of its own,
and two pools on the same cores cost a quarter of the speed. Requests live in the event loop. They
send commands to the thread, and receive new text at most once per step.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import TypeVar

from pentameter.checkpoint.folders.load_model import LoadedModel
from pentameter.data.tokenizers.base import Ends, Tokenizer
from pentameter.data.tokenizers.chat import TemplateBoundsError
from pentameter.data.tokenizers.render_client import Rendering, ends_of_answers, unlike_its_prompt
from pentameter.data.tokenizers.renderer import RenderRequest
from pentameter.errors import ConfigError
from pentameter.formatting import size
from pentameter.generation.sampling import usual_sampling
from pentameter.model.gpt import GPT
from pentameter.serve.answer_forms.recognizing import AnswerForm, recognized
from pentameter.serve.batching import Batcher
from pentameter.serve.constraints import Constraints
from pentameter.serve.continuation import CachedDecoder, Continuation, Piece, TextRequest
from pentameter.serve.passes import Slots

EVENT_SECONDS = 0.05
"""Shortest time in seconds between two events of an answer. Readers see no difference, and the
processor computes tokens meanwhile."""


_Result = TypeVar("_Result")


class ServerBusyError(Exception):
    """Raised when a request cannot be taken, as the queue is full or the server is stopping; the
    message says which."""


class TakesTooLongError(Exception):
    """Raised when a request has reached its time limit."""


@dataclass(eq=False)
class ServedModel:
    """A model that the server offers, under the name by which requests call it, with its tokenizer,
    its cache and its Batcher."""

    name: str
    tokenizer: Tokenizer
    slots: Slots
    created: int = field(default_factory=lambda: int(time.time()))
    n_texts: int = 0
    """Number of texts in the queue or being written; changed only in the event loop."""

    def __post_init__(self) -> None:
        self.batcher, self.decoder = Batcher(self.slots), CachedDecoder(self.tokenizer)
        self.n_slots, self.context_length = self.slots.n_slots, self.slots.context_length
        self.sampling = usual_sampling(self.tokenizer.published_generation)
        self._rendering: Rendering | None = None
        self._lock = threading.Lock()

    def described(self) -> str:
        """Return a line to print about this model: its context length, what answers by its chat
        template may hold, slots and cache size, and whether texts are computed in common
        passes."""
        shapes, cache = self.slots.shapes, size(self.slots.cache_bytes)
        if self.slots.in_one_call is not None:
            how = "each step of theirs in one call"
        elif shapes.batch_sizes == (1,):
            how = (
                "each in a pass of its own: on this machine, passes over several round differently"
            )
        else:
            how = f"in passes over {', '.join(map(str, shapes.batch_sizes))}, which round alike"
        chat = "without chat template"
        if self.tokenizer.chat is not None:
            chat = f"with chat template{self.answer_form.described()}"
        return (
            f"context {self.context_length}, {chat}; {self.n_slots} texts at once, "
            f"{how}; cache {cache}"
        )

    def remarks(self) -> list[str]:
        """Return warnings about the model's chat template, one sentence each, to be printed when
        the server starts."""
        chat = self.tokenizer.chat
        remark = None if chat is None else unlike_its_prompt(chat, self.render)
        return [] if remark is None else [f"{self.name}: {remark}"]

    def render(self, asked: RenderRequest) -> str:
        """Return the messages in `asked` as a prompt, by the tokenizer's chat template. A child
        process renders them; it is kept for the next call. Raises ConfigError for messages that the
        template refuses. Thread-safe."""
        with self._lock:
            if self._rendering is None:
                assert self.tokenizer.chat is not None
                self._rendering = Rendering(self.tokenizer.chat).__enter__()
            try:
                return self._rendering.text(asked)
            except TemplateBoundsError:  # which ended the process
                self._close_rendering()
                raise

    @cached_property
    def ends_of_answers(self) -> Ends:
        """The tokens and texts that end an answer."""
        return ends_of_answers(self.tokenizer, self.render)

    @cached_property
    def answer_form(self) -> AnswerForm:
        """The form of the model's answers beside content, by the tokenizer's chat template."""
        assert self.tokenizer.chat is not None
        tokens, texts = self.ends_of_answers
        ends = [*(self.tokenizer.decode([each]) for each in tokens), *texts]
        return recognized(self.tokenizer.chat, self.render, ends)

    @cached_property
    def constraints(self) -> Constraints:
        """The compiler of the grammars to which answers are held. Raises ConfigError if it cannot,
        for want of a package or as of the tokenizer."""
        return Constraints(self.tokenizer)

    def close(self) -> None:
        """End the child process that renders chat templates."""
        with self._lock:
            self._close_rendering()

    def _close_rendering(self) -> None:
        if self._rendering is not None:
            self._rendering.__exit__(None, None, None)
            self._rendering = None


@dataclass(eq=False)
class Job:
    """One request's texts on their way from the worker's thread, where the model `served` writes
    them, to the request's coroutine, which reads them from a queue."""

    served: ServedModel
    texts: list[Continuation]
    n_left: int
    """Number of texts that have not ended."""
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _pieces: list[tuple[int, Piece]] = field(default_factory=list)

    def tell(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Put new pieces of text, (text index, Piece) each, into the queue from which `pieces`
        yields them. Must be called in the event loop."""
        for index, piece in pieces:
            self._pieces.append((index, piece))
            if piece.finish_reason or piece.error:
                self.n_left -= 1
                self.served.n_texts -= 1
        self._news.set()

    async def pieces(self, seconds: float) -> AsyncGenerator[list[tuple[int, Piece]], None]:
        """Yield lists of (text index, Piece) until all texts have ended; the new pieces of a text
        are joined to one.

        Raises TakesTooLongError after `seconds`, and any error that ended a text.
        """
        ends_at = time.monotonic() + seconds
        while self.n_left or self._pieces:
            left = ends_at - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                raise TakesTooLongError from None
            if left <= 0:  # news that are there already leave no time for a timeout
                raise TakesTooLongError
            self._news.clear()
            joined: dict[int, Piece] = {}
            for index, piece in self._pieces:
                if piece.error is not None:
                    raise piece.error
                joined[index] = joined[index].joined(piece) if index in joined else piece
            self._pieces = []
            yield list(joined.items())
            if self.n_left:
                await asyncio.sleep(EVENT_SECONDS)


class Worker:
    """The thread that computes for all served models, one after another. It starts with this
    object, and `close` ends it. For each model, at most `most_waiting` texts wait besides those
    that have slots.

    Before the first request, add the models and call `use_running_loop`.
    """

    def __init__(self, *, most_waiting: int) -> None:
        self.models: dict[str, ServedModel] = {}
        self._most_waiting = most_waiting
        self.is_stopping = False
        """True once new requests are refused."""
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._jobs: dict[Continuation, tuple[Job, int]] = {}  # of the thread
        self._thread = threading.Thread(target=self._run, name="pentameter-serve", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], _Result]) -> _Result:
        """Call a function in the worker's thread, wait for it, and return its result or raise its
        error."""
        result: Future[_Result] = Future()

        def command() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        self._commands.put(command)
        return result.result()

    def add(self, model: ServedModel) -> None:
        """Serve a further model; only before the first request."""
        self.models[model.name] = model

    def use_running_loop(self) -> None:
        """Deliver new text to the event loop in which this is called."""
        self._loop = asyncio.get_running_loop()

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End unfinished texts with an error, then the thread and the models' child processes."""
        self.is_stopping = True
        self.fail_all("the server stops")
        self._commands.put(None)
        self._thread.join()
        for served in self.models.values():
            served.close()

    def submit(self, served: ServedModel, asked: Sequence[TextRequest]) -> Job:
        """Queue a request's texts and return them as a Job. Raises ServerBusyError if the server is
        stopping, or if more texts than the model's slots and `most_waiting` would then be queued or
        written."""
        if self.is_stopping:
            raise ServerBusyError("the server is stopping; ask again once it is back")
        most = served.n_slots + self._most_waiting
        if served.n_texts + len(asked) > most:
            raise ServerBusyError(
                f"{served.n_texts} texts are written or wait, of at most {most} "
                f"({served.n_slots} at once and {self._most_waiting} in the queue); ask again later"
            )
        job = Job(served, [Continuation(each, served.decoder) for each in asked], len(asked))
        served.n_texts += len(asked)
        self._commands.put(lambda: self._add(job))
        return job

    def cancel(self, job: Job) -> None:
        """Stop writing a request's texts; does nothing once they have ended."""
        if job.n_left:
            job.served.n_texts -= job.n_left
            job.n_left = 0
            self._commands.put(lambda: self._cancel(job))

    def fail_all(self, why: str) -> None:
        """End all texts with a ServerBusyError that has the message `why`."""
        self._commands.put(lambda: self._fail(list(self._jobs), ServerBusyError(why)))

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                is_idle = all(each.batcher.is_idle for each in self.models.values())
                while (command := self._commands.get(block=is_idle)) is not None:
                    command()
                    is_idle = False
                return
            except Empty:
                pass
            for served in self.models.values():
                if not served.batcher.is_idle:
                    self._step(served)

    def _step(self, served: ServedModel) -> None:
        try:
            pieces = served.batcher.step()
        except Exception as error:
            # Every text's state is in doubt; the next ones begin anew.
            traceback.print_exc(file=sys.stderr)
            of_model = [text for text, (job, _) in self._jobs.items() if job.served is served]
            self._fail(of_model, error)
            return
        self._tell(pieces)

    def _add(self, job: Job) -> None:
        for index, text in enumerate(job.texts):
            self._jobs[text] = (job, index)
            job.served.batcher.add(text)

    def _cancel(self, job: Job) -> None:
        for text in job.texts:
            if self._jobs.pop(text, None) is not None:
                job.served.batcher.cancel(text)

    def _fail(self, texts: Sequence[Continuation], error: Exception) -> None:
        for text in texts:
            self._jobs[text][0].served.batcher.cancel(text)
        self._tell([(text, Piece(n_tokens=len(text.tokens), error=error)) for text in texts])

    def _tell(self, pieces: Sequence[tuple[Continuation, Piece]]) -> None:
        """Deliver pieces to their jobs, in one call into the event loop."""
        by_job: dict[Job, list[tuple[int, Piece]]] = {}
        for text, piece in pieces:
            job, index = self._jobs[text]
            by_job.setdefault(job, []).append((index, piece))
            if piece.finish_reason or piece.error:
                del self._jobs[text]

        def tell() -> None:
            for job, news in by_job.items():
                if job.n_left:  # else it was cancelled meanwhile
                    job.tell(news)

        if by_job:
            with suppress(RuntimeError):  # the event loop has ended
                self._loop.call_soon_threadsafe(tell)


def served_model(name: str, loaded: LoadedModel, n_slots: int) -> ServedModel:
    """Make a loaded model ready to be served under `name`: give it a cache for `n_slots` texts, and
    find by trial the padded shapes of its passes. The module must not be used for anything else
    from now on. Raises ConfigError if there is no memory for the cache."""
    model, tokenizer = loaded.model, loaded.tokenizer
    assert isinstance(model, GPT)  # no other is loaded without its function
    try:
        slots = Slots(model, tokenizer.vocab_size, n_slots)
    except RuntimeError as error:  # torch's, on every kind of device
        raise ConfigError(
            f"--slots {n_slots}: there is no memory for the cache of {name}, which holds a whole "
            f"context for each; give fewer ({str(error).splitlines()[0]})"
        ) from error
    slots.find_shapes()
    return ServedModel(name, tokenizer, slots)
