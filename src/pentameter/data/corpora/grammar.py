"""The `grammar` corpus: a hidden Markov source with an exactly known entropy rate.

The source is *unifilar*: state and emitted character together decide the next state,

    state' = (base · state + class(character)) mod n_states,

where each character has one of `base` classes and `base` is the product of the distinct primes of
`n_states`. Two properties follow.

- *The floor is exact.* For a unifilar source the entropy rate is Σ π(s) H(p(·|s)), with π the
  stationary distribution over states (Shannon 1948, section 7; Cover and Thomas, "Elements of
  Information Theory", section 4.2). A general hidden Markov source has no closed form, only a
  limit over blocks.
- *A few characters reveal the state.* Unrolled, the state is Σ baseⁱ · class(i
  characters ago) mod n_states, and baseⁱ is a multiple of n_states from some small i on. So the
  last `memory` characters decide the state (3 for 8 states): a small model with a short context
  can predict as well as the source itself, and no model can do better.

All is integer arithmetic over keyed bits: each state draws its characters from an urn with 4096
tickets, so the text is the same on every machine and the probabilities are exact fractions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pentameter import keyed
from pentameter.config.data_schema import GrammarConfig
from pentameter.data.corpora.files import FileContents
from pentameter.data.corpora.records.rows import Rows
from pentameter.errors import ConfigError

URN_BITS = 12
N_TICKETS = 1 << URN_BITS
CHUNK_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Source:
    """A hidden Markov source of random text (unifilar: a state and the character emitted in it
    determine the next state)."""

    alphabet: str
    tickets: npt.NDArray[np.int64]
    """(n_states, n_characters): each character's tickets in a state's urn, proportional to its
    probability; rows sum to 4096."""
    next_state: npt.NDArray[np.int64]
    """(n_states, n_characters): the next state after each character."""
    memory: int
    """Number of last characters that suffice to know the state."""

    @property
    def n_states(self) -> int:
        """Number of hidden states."""
        return len(self.tickets)

    def probabilities(self) -> npt.NDArray[Any]:
        """Return p(character | state), (n_states, n_characters)."""
        return self.tickets / N_TICKETS

    def stationary(self) -> npt.NDArray[Any]:
        """Return the stationary distribution over states, (n_states,)."""
        chain = np.zeros((self.n_states, self.n_states))
        rows = np.repeat(np.arange(self.n_states), len(self.alphabet))
        np.add.at(chain, (rows, self.next_state.ravel()), self.probabilities().ravel())
        # π (chain - 1) = 0 with Σ π = 1: one equation of the first set is redundant, replace it.
        equations = chain.T - np.eye(self.n_states)
        equations[-1] = 1.0
        right = np.zeros(self.n_states)
        right[-1] = 1.0
        return np.linalg.solve(equations, right)

    def entropy_rate(self) -> float:
        """Return the entropy rate Σ π(s) H(p(·|s)) in nats per character."""
        p = self.probabilities()  # no zeros: every urn has a ticket of every character
        return float(self.stationary() @ -(p * np.log(p)).sum(axis=1))


def grammar_source(config: GrammarConfig) -> Source:
    """Return the source that `config` describes, drawn from its seed.

    Raises ConfigError if the alphabet is too small for the number of states.
    """
    n_states, n_characters = config.n_states, len(config.alphabet)
    base = _radical(n_states)
    if base > n_characters:
        possible = [n for n in range(1, 2 * n_states) if _radical(n) <= n_characters]
        near = sorted(sorted(possible, key=lambda n: abs(n - n_states))[:3])
        raise ConfigError(
            f"data.grammar.n_states={n_states}: the product of its distinct primes, {base}, must "
            f"not exceed the {n_characters} characters of data.grammar.alphabet; nearest possible: "
            + ", ".join(map(str, near))
        )
    draws = keyed.bits(
        keyed.make_key("grammar", "source", config.seed),
        np.arange((n_states + 1) * n_characters, dtype=np.int32),
    ).astype(np.int64)
    draws = (draws & 0xFFFF).reshape(n_states + 1, n_characters)
    classes = np.empty(n_characters, dtype=np.int64)
    classes[np.argsort(draws[-1], kind="stable")] = np.arange(n_characters) % base
    states = np.arange(n_states)[:, None]
    return Source(
        alphabet=config.alphabet,
        tickets=np.array([_urn(row) for row in draws[:-1].tolist()], dtype=np.int64),
        next_state=(base * states + classes[None, :]) % n_states,
        memory=next(i for i in range(64) if base**i % n_states == 0),
    )


def grammar_entropy_rate(config: GrammarConfig) -> float:
    """Return the exact entropy rate of the `grammar` corpus, nats per character.

    A model's expected loss on this text is at least this, and reaches it only with the true
    conditional probabilities; on a finite text the true model's loss scatters around it.
    """
    return grammar_source(config).entropy_rate()


@dataclass(frozen=True)
class GrammarFile:
    """The `grammar` corpus as an `InputFile`, whose text is generated as it is read."""

    settings: GrammarConfig
    name: ClassVar[str] = "grammar"

    @property
    def n_bytes(self) -> int:
        """Approximate UTF-8 bytes of its text."""
        alphabet = self.settings.alphabet
        return self.settings.n_characters * len(alphabet.encode()) // len(alphabet)

    @property
    def key(self) -> str:
        """A string with the settings, which decide the text."""
        return f"grammar, version 1, {self.settings.model_dump_json()}"

    def sha256(self) -> str:
        """Return the sha256, in hex, of its key."""
        return hashlib.sha256(self.key.encode()).hexdigest()

    def documents(self, contents: FileContents) -> Iterator[Iterator[str]]:
        """Yield a single document, the generated text, as an iterator of chunks; `contents` is
        unused."""
        yield grammar_text(self.settings)

    def records(self, contents: FileContents, fields: Sequence[str]) -> Rows:
        """Yield nothing: the corpus has no records."""
        return iter(())


def grammar_text(config: GrammarConfig) -> Iterator[str]:
    """Yield `config.n_characters` characters of text in chunks; the source starts in state 0."""
    source = grammar_source(config)
    # Of each state a list of its tickets: a character, and the list of the state that follows it.
    urns: list[list[Any]] = [[] for _ in range(source.n_states)]
    for urn, tickets, states in zip(urns, source.tickets, source.next_state, strict=True):
        for character, n_tickets, state in zip(config.alphabet, tickets, states, strict=True):
            urn.extend([(character, urns[state])] * int(n_tickets))
    urn = urns[0]
    for chunk in range(math.ceil(config.n_characters / CHUNK_CHARACTERS)):
        n = min(CHUNK_CHARACTERS, config.n_characters - chunk * CHUNK_CHARACTERS)
        key = keyed.make_key("grammar", "text", config.seed, chunk)
        draws = keyed.bits(key, np.arange(n, dtype=np.int32)) & (N_TICKETS - 1)
        written = []
        for draw in draws.tolist():
            character, urn = urn[draw]
            written.append(character)
        yield "".join(written)


def _radical(n: int) -> int:
    """Return the product of n's distinct primes: the least base with a power that n divides."""
    radical, rest, prime = 1, n, 2
    while rest > 1:
        if rest % prime == 0:
            radical *= prime
            while rest % prime == 0:
                rest //= prime
        prime += 1
    return radical


def _urn(draws: list[int]) -> list[int]:
    """Return how many of the 4096 tickets in one state's urn each character gets: an eighth of them
    evenly, the rest in proportion to draw⁴. `draws` has a random number below 65,536 for each
    character. The tickets are the character's probability in that state.

    The fourth power makes a few characters likely in each state: text with a structure to learn.
    The even part lets a small alphabet still surprise, and makes every character frequent enough
    for its probability to be learned.
    """
    weights = [draw**4 for draw in draws]
    total = max(sum(weights), 1)
    least = max(N_TICKETS // (8 * len(draws)), 1)
    spare = N_TICKETS - least * len(draws)
    tickets = [least + weight * spare // total for weight in weights]
    tickets[weights.index(max(weights))] += N_TICKETS - sum(tickets)
    return tickets
