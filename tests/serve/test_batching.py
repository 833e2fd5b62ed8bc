"""The continuous batcher: a text is a function of its request alone, to the last bit."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from tiny import TOKENIZER, make_model

from pentameter.errors import CorruptError
from pentameter.fused_cpu import native
from pentameter.generation import few_rows
from pentameter.generation.loop import Generation, sampled_tokens
from pentameter.generation.sampling import Sampling
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model.experts import Experts
from pentameter.model.matmul import PLAIN
from pentameter.serve import passes
from pentameter.serve.batching import Batcher
from pentameter.serve.continuation import Continuation, Piece, TextRequest
from pentameter.serve.passes import Shapes, Slots, n_read_in_pieces

V = TOKENIZER.vocab_size


def make_slots(
    n_slots: int = 8, one_by_one: bool = False, dtype: torch.dtype = torch.float32, **model: Any
) -> Slots:
    slots = Slots(make_model(**model).to(dtype), V, n_slots)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(passes, "LEAST_COMPARED", 0)  # seconds of so small a model in 16 bits
        slots.find_shapes()
    if one_by_one:
        slots.shapes = Shapes((1,), slots.shapes.key_sizes)
    return slots


def make_slots_in_one_call(**model: Any) -> Slots | None:
    """Slots whose steps a TokenPass computes; None where no library can be built."""
    if native.load("rows", machine_capabilities()) is not None:
        return None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(few_rows, "_LEAST_WEIGHTS", 0)
        slots = make_slots(n_heads=2, **model)
    assert slots.in_one_call is not None
    return slots


def drawn_request(random: random.Random, context_length: int = 80) -> TextRequest:
    """Any request: short or long, greedy or not, past the context or not."""
    n = random.choice([1, 2, 3, 5, 16, 40, 63, 64, 66, 80, 120])
    return TextRequest(
        np.array([random.randrange(V) for _ in range(n)]),
        max_tokens=random.choice([1, 3, 20, 60]),
        sampling=Sampling(
            random.choice([0.0, 0.7, 1.0, 2.0]),
            random.choice([None, 3]),
            random.choice([None, 0.9]),
        ),
        seed=random.randrange(5),
        sample=random.randrange(3),
        stop=random.choice([(), ("ab", "hg")]),
        n_rivals=3,
    )


def finished(pieces: list[Piece]) -> tuple[Any, ...]:
    """All that a request was answered: text, tokens' probabilities bit for bit, the end."""
    chances = [(each.text, each.logprob, tuple(each.rivals)) for p in pieces for each in p.chances]
    last = pieces[-1]
    assert last.error is None
    return "".join(p.text for p in pieces), chances, last.finish_reason, last.n_tokens


def alone(slots: Slots, asked: TextRequest) -> tuple[Any, ...]:
    batcher, pieces = Batcher(slots), []
    batcher.add(Continuation(asked, TOKENIZER))
    while not batcher.is_idle:
        pieces += [piece for _, piece in batcher.step()]
    return finished(pieces)


def among_others(slots: Slots, asked: list[TextRequest], random: random.Random) -> list[Any]:
    """The answers of requests that come one after another, some of them cancelled on the way."""
    batcher = Batcher(slots)
    everyone = [Continuation(each, TOKENIZER) for each in asked]
    pieces: dict[Continuation, list[Piece]] = {each: [] for each in everyone}
    coming, cancelled = list(everyone), set[Continuation]()
    while coming or not batcher.is_idle:
        for _ in range(random.randrange(3)):
            if coming:
                batcher.add(coming.pop(0))
        if random.random() < 0.05:
            cancelled.add(victim := random.choice(everyone))
            batcher.cancel(victim)
        for continuation, piece in batcher.step():
            pieces[continuation].append(piece)
    return [
        None if each in cancelled or not pieces[each] else finished(pieces[each])
        for each in everyone
    ]


DYNAMIC: dict[str, Any] = {
    "positions": "rotary",
    "rope_scaling": {"type": "dynamic", "factor": 3.0, "original_context_length": 37},
}
LONGROPE: dict[str, Any] = {
    "positions": "rotary",
    "rope_scaling": {
        "type": "longrope",
        "original_context_length": 37,
        "long_factors": [1.0, 3.0, 9.0, 20.0],
    },
}
LLAMA: dict[str, Any] = {
    **{"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "sliding_window": 9},
    **{"qk_norm": "head", "tied_head": False},
}
SHARED: dict[str, Slots | None] = {
    "in one call": make_slots_in_one_call(),
    "a llama in one call": make_slots_in_one_call(n_kv_heads=1, **LLAMA),
    "bf16 in one call": make_slots_in_one_call(dtype=torch.bfloat16),
    "shapes found": make_slots(),
    "one by one": make_slots(one_by_one=True),
    "a llama": make_slots(n_kv_heads=2, **LLAMA),
    "bases and windows by layer": make_slots(
        positions="rotary",
        norm="rmsnorm",
        norm_position="both",
        attention={"score_size": 20, "sliding_window": 9, "sliding_window_pattern": (1,)},
        window_rope_theta=100.0,
        nope_layers=(0,),
    ),
    "rotary positions by length": make_slots(**DYNAMIC),
    "rotary factors by length": make_slots(**LONGROPE),
    "latent attention": make_slots(
        positions="rotary", attention="latent", kv_rank=12, q_rank=10, v_head_size=6
    ),
    "experts": make_slots(d_model=128, n_experts=2, d_expert=32),
    "experts in fp64": make_slots(dtype=torch.float64, n_experts=4, d_expert=128, d_model=64),
    "experts in bf16": make_slots(dtype=torch.bfloat16, n_experts=4, d_expert=24),
    "experts with a capacity": make_slots(n_experts=4, d_expert=24, expert_capacity=0.4),
}


@pytest.mark.parametrize("kind", SHARED)
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
def test_a_text_is_the_same_alone_and_among_others(kind: str, seed: int) -> None:
    slots, chance = SHARED[kind], random.Random(seed)
    if slots is None:
        pytest.skip("no kernels can be built here")
    asked = [drawn_request(chance) for _ in range(14)]
    found = among_others(slots, asked, chance)
    answered = [number for number, answer in enumerate(found) if answer is not None]
    assert len(answered) > 3
    for number in chance.sample(answered, 3):
        assert found[number] == alone(slots, asked[number])


@pytest.mark.parametrize("n_prompt", [1, 3, 4, 17, 64, 66, 80, 130])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(
    "settings", [{}, {"n_experts": 4, "expert_capacity": 0.4}, DYNAMIC, LONGROPE]
)
def test_the_text_is_that_of_sample(
    n_prompt: int, temperature: float, settings: dict[str, Any]
) -> None:
    model, like = make_model(**settings).double(), make_model(**settings).double()
    prompt = np.random.default_rng(n_prompt).integers(0, V, n_prompt)
    settings = Generation(temperature, max_new_tokens=100, num_samples=2, seed=7)
    steps = sampled_tokens(like, prompt, V, settings)
    expected = np.stack(list(steps), axis=1)
    batcher = Batcher(Slots(model, V, 4))
    asked = [TextRequest(prompt, 100, Sampling(temperature), seed=7, sample=n) for n in range(2)]
    texts = [Continuation(each, TOKENIZER) for each in asked]
    for each in texts:
        batcher.add(each)
    while not batcher.is_idle:
        batcher.step()
    assert [each.tokens for each in texts] == expected.tolist()


@pytest.mark.parametrize("n_prompt", [1, 3, 66])
def test_steps_in_one_call_write_what_sample_writes(
    monkeypatch: pytest.MonkeyPatch, n_prompt: int
) -> None:
    monkeypatch.setattr(few_rows, "_LEAST_WEIGHTS", 0)
    if (slots := make_slots_in_one_call()) is None:
        pytest.skip("no kernels can be built here")
    prompt = np.random.default_rng(n_prompt).integers(0, V, n_prompt)
    steps = sampled_tokens(make_model(n_heads=2), prompt, V, Generation(max_new_tokens=100, seed=7))
    text = Continuation(TextRequest(prompt, 100, Sampling(), seed=7), TOKENIZER)
    batcher = Batcher(slots)
    batcher.add(text)
    while not batcher.is_idle:
        batcher.step()
    assert text.tokens == [int(each[0]) for each in steps]


@pytest.mark.parametrize("by", ["rows", "busy experts"])
def test_an_expert_may_round_by_what_other_texts_choose(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    computed = Experts.expert_outputs

    def rounding(self: Experts, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        counts = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))
        n = counts if by == "rows" else (counts > 0).sum().expand_as(counts)
        factors = torch.repeat_interleave(1 + n * 2.0**-20, counts)
        return computed(self, rows, ends) * factors[:, None]

    monkeypatch.setattr(Experts, "expert_outputs", rounding)
    slots = make_slots(n_experts=4, d_expert=24)
    # Padded, all have as many rows; nothing helps against the other.
    assert (slots.shapes.batch_sizes == (1,)) == (by == "busy experts")
    chance = random.Random(0)
    asked = [drawn_request(chance) for _ in range(6)]
    for request, answer in zip(asked, among_others(slots, asked, chance), strict=True):
        assert answer in (None, alone(slots, request))


def test_more_texts_than_slots_wait_their_turn() -> None:
    slots = make_slots(n_slots=2)
    asked = [drawn_request(random.Random(n)) for n in range(5)]
    batcher = Batcher(slots)
    for each in asked:
        batcher.add(Continuation(each, TOKENIZER))
    begun: list[Continuation] = []
    while not batcher.is_idle:
        step = [continuation for continuation, _ in batcher.step()]
        assert len(step) <= 2
        begun += [each for each in step if each not in begun]
    assert [each.asked for each in begun] == asked


def test_a_cancelled_text_frees_its_slot_at_once() -> None:
    batcher = Batcher(make_slots(n_slots=1))
    first, second = (Continuation(TextRequest(np.array([1]), 50), TOKENIZER) for _ in range(2))
    batcher.add(first)
    batcher.add(second)
    batcher.step()
    batcher.cancel(first)
    assert [each for each, _ in batcher.step()] == [second]
    batcher.cancel(second)
    assert batcher.is_idle
    batcher.cancel(first)  # nothing is left to cancel


def test_what_is_not_finite_ends_its_own_text_alone() -> None:
    slots = Slots(make_model(tied_head=False), V - 1, 8)
    with torch.no_grad():  # the character "h", which is never drawn, poisons whoever reads it
        slots._model.token_embedding.weight[V - 1] = float("nan")
    good = TextRequest(np.array([1, 2]), 30, Sampling(top_k=1))
    expected = alone(slots, good)
    batcher, pieces = Batcher(slots), []
    bad = Continuation(TextRequest(np.array([V - 1]), 30), TOKENIZER)
    beside = Continuation(good, TOKENIZER)
    batcher.add(bad)
    batcher.add(beside)
    while not batcher.is_idle:
        for continuation, piece in batcher.step():
            if continuation is bad:
                assert isinstance(piece.error, CorruptError)
            else:
                pieces.append(piece)
    assert finished(pieces) == expected
    assert alone(slots, good) == expected  # in the slot that held NaN


def test_rests_of_a_prompt() -> None:
    assert [n_read_in_pieces(n) for n in (1, 3, 4, 63, 64, 67, 68)] == [0, 0, 4, 63, 64, 64, 68]


def test_shapes_that_disagree_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(make_model(), V, 8)
    write = slots._write

    def moody(rows: Any, first: int, n_rows: int) -> Any:  # another rounding in some shapes
        nudge = 1e-7 if n_rows == 4 or slots.shapes.key_sizes == (64,) else 0.0
        return write(rows, first, n_rows) * (1 + nudge)

    monkeypatch.setattr(slots, "_write", moody)
    found = slots.find_shapes()
    assert 4 not in found.batch_sizes
    assert 64 not in found.key_sizes

    def by_slot(rows: Any, first: int, n_rows: int) -> Any:  # another rounding in some slots
        return write(rows, first, n_rows) * (1 + 1e-7 * (np.arange(n_rows) > 3))[:, None]

    slots = Slots(make_model(), V, 8)
    write = slots._write
    monkeypatch.setattr(slots, "_write", by_slot)
    assert slots.find_shapes().batch_sizes == (1,)


def test_a_rare_rounding_in_16_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not reach the trial's logits, as the stream rounds it away: later ones it may."""
    attend, alone = passes._Pass.attend, []

    def moody(under_way: Any, q: Any, k: Any, v: Any, how: Any) -> Any:
        y = attend(under_way, q, k, v, how)
        if under_way.slots.stop == 1:
            alone.append(y)
            if len(alone) == 50:
                y[0, 0, 0, 0] *= 1 + 2.0**-7  # one of 1,600 values
        return y

    monkeypatch.setattr(passes._Pass, "attend", moody)
    monkeypatch.setattr(passes, "LEAST_COMPARED", 2**16)
    slots = Slots(make_model().bfloat16(), V, 3)
    assert slots.in_one_call is None
    assert 1 not in slots.find_shapes().batch_sizes
    assert len(alone) == 50 + 50 % 2


def test_kernels_for_few_rows_leave_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They let texts share passes of other sizes, and the numbers stay."""
    monkeypatch.setattr(few_rows, "_LEAST_WEIGHTS", 0)
    asked = drawn_request(random.Random(7))
    slots = make_slots()
    answer = alone(slots, asked)
    with monkeypatch.context() as patched:
        patched.setattr("pentameter.serve.passes.few_rows", lambda *_, **__: PLAIN)
        plain = make_slots()
    if plain.shapes.batch_sizes == (1,):
        pytest.skip("without them each text has a pass of its own here, which rounds by itself")
    assert set(plain.shapes.batch_sizes) <= set(slots.shapes.batch_sizes)
    assert alone(plain, asked) == answer
