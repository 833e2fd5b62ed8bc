import hashlib
import itertools
import math

import numpy as np
import pytest

from pentameter.config.data_schema import GrammarConfig
from pentameter.data.corpora import grammar
from pentameter.data.corpora.grammar import grammar_entropy_rate, grammar_source, grammar_text
from pentameter.errors import ConfigError

CONFIGS = [
    GrammarConfig(n_characters=300_000),
    GrammarConfig(n_states=1, alphabet="ab", n_characters=100_000, seed=1),
    GrammarConfig(n_states=7, n_characters=200_000, seed=2),
    GrammarConfig(n_states=12, alphabet="αβγδεζηθ", n_characters=200_000, seed=3),
]


def log_losses(source, text, state=0):
    """Nats of each character given the true hidden state."""
    places = {character: i for i, character in enumerate(source.alphabet)}
    log_p = np.log(source.probabilities())
    losses = np.empty(len(text))
    for i, character in enumerate(text):
        losses[i] = -log_p[state, places[character]]
        state = source.next_state[state, places[character]]
    return losses


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.n_states} states")
def test_the_entropy_rate_is_the_loss_of_one_who_knows_the_state(config):
    losses = log_losses(grammar_source(config), "".join(grammar_text(config)))
    # Losses of neighbours hardly correlate: twice the plain standard error leaves room for it.
    error = 2 * losses.std() / math.sqrt(losses.size)
    assert abs(losses.mean() - grammar_entropy_rate(config)) < 3 * error


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.n_states} states")
def test_the_last_characters_give_the_state(config):
    source = grammar_source(config)
    states = np.arange(source.n_states)
    rng = np.random.default_rng(0)
    for word in rng.integers(0, len(config.alphabet), (50, source.memory)):
        ends = states
        for character in word:
            ends = source.next_state[ends, character]
        assert len(set(ends.tolist())) == 1


def test_the_rate_is_the_limit_of_block_entropies():
    """H(next | last m characters) from the exact joint distribution, by brute force."""
    source = grammar_source(GrammarConfig(n_states=4, alphabet="abc", seed=5))
    p = source.probabilities()
    conditional = 0.0
    for word in itertools.product(range(3), repeat=source.memory):
        reached = dict.fromkeys(range(4), 0.0)
        for start, share in enumerate(source.stationary()):
            state, probability = start, share
            for character in word:
                probability *= p[state, character]
                state = source.next_state[state, character]
            reached[int(state)] += probability
        total = sum(reached.values())
        following = sum(reached[s] / total * p[s] for s in reached)
        conditional -= total * float((following * np.log(following)).sum())
    assert conditional == pytest.approx(source.entropy_rate(), rel=1e-12)


def test_the_stationary_distribution_is_left_alone_by_a_step():
    source = grammar_source(CONFIGS[3])
    share = source.stationary()
    after = np.zeros_like(share)
    np.add.at(after, source.next_state, share[:, None] * source.probabilities())
    np.testing.assert_allclose(after, share, atol=1e-15)
    assert share.sum() == pytest.approx(1)
    assert (source.tickets.sum(axis=1) == grammar.N_TICKETS).all()
    assert source.tickets.min() >= 1


@pytest.mark.parametrize("config", CONFIGS[:1])
def test_a_model_of_few_characters_comes_within_a_hundredth_and_never_below(config):
    """Counts of what follows each `memory` characters: learnable, and no leak below the floor."""
    source = grammar_source(config)
    codes = np.array([source.alphabet.index(c) for c in "".join(grammar_text(config))])
    floor, size = source.entropy_rate(), len(source.alphabet)

    def loss(memory):
        context = np.zeros(codes.size - memory, dtype=np.int64)
        for back in range(memory):
            context = context * size + codes[back : codes.size - memory + back]
        following = codes[memory:]
        train = slice(0, 250_000)
        counts = np.full((size**memory, size), 0.5)
        np.add.at(counts, (context[train], following[train]), 1)
        p = counts / counts.sum(axis=1, keepdims=True)
        return float(-np.log(p[context[250_000:], following[250_000:]]).mean())

    # 4,096 contexts × 16 counts are many for 250,000 characters; one character is too few.
    assert floor < loss(source.memory) < 1.05 * floor < loss(1) < loss(0)
    # Told the state, 8 × 16 counts are enough to come within a hundredth.
    state, states = 0, []
    for code in codes:
        states.append(state)
        state = source.next_state[state, code]
    counts = np.full((source.n_states, size), 0.5)
    np.add.at(counts, (states[:250_000], codes[:250_000]), 1)
    p = counts / counts.sum(axis=1, keepdims=True)
    told = float(-np.log(p[states[250_000:], codes[250_000:]]).mean())
    assert 0.99 * floor < told < 1.01 * floor


def test_the_text_is_the_walk_taken_step_by_step(monkeypatch):
    """Tiny chunks cross many borders."""
    monkeypatch.setattr(grammar, "CHUNK_CHARACTERS", 64)
    config = GrammarConfig(n_states=9, n_characters=1001)
    source = grammar_source(config)
    text = "".join(grammar_text(config))
    assert len(text) == 1001
    state = 0
    for number, character in enumerate(text):
        chunk, place = divmod(number, 64)
        key = grammar.keyed.make_key("grammar", "text", config.seed, chunk)
        draw = grammar.keyed.bits(key, np.array([place], dtype=np.int32))[0] & 4095
        code = int(np.searchsorted(source.tickets[state].cumsum(), draw, side="right"))
        assert character == source.alphabet[code]
        state = source.next_state[state, code]


def test_text_and_rate_are_pinned():
    config = GrammarConfig(n_characters=10_000)
    text = "".join(grammar_text(config))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "3072b8327e1e2809"
    assert grammar_entropy_rate(config) == pytest.approx(2.0056902790056648, rel=1e-12)
    longer = "".join(grammar_text(config.model_copy(update={"n_characters": 12_345})))
    assert longer.startswith(text)
    assert text != "".join(grammar_text(config.model_copy(update={"seed": 1})))


def test_states_that_the_alphabet_cannot_tell_apart_are_refused():
    with pytest.raises(ConfigError, match=r"n_states=7: .* 7, .* 2 characters .*: 2, 4, 8"):
        grammar_source(GrammarConfig(n_states=7, alphabet="ab"))
