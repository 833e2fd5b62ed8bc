"""Random bits as a pure function of a key and a counter, and permutations made from them.

Nothing here has state: the same key and index give the same bits on any device, in any slice of the
index space, today and after a restart. Initial weights, dropout masks, batches and samples are all
drawn from here. Only Python operators are used, so that numpy arrays and torch tensors, eager or
compiled, run the very same arithmetic; this file imports neither.

A counter has 32 bits, so that draw 2^32 of a key is draw 0 again. These count, all of them:

| file | what is drawn | counter | counters of one key |
| --- | --- | --- | --- |
| `model/dropout.py` | a mask of the residual stream | token · channels + channel | folded |
| | a mask of attention weights | (head · tokens + query) · tokens + key | folded |
| | the keys of a batch row's masks | 2 · row + word | 2 · rows of a batch |
| `model/attention/dropout_kernels.py` | the same mask of attention weights | the same | folded |
| `model/initial.py` | an initial weight | element of the parameter | folded |
| `model/attention/checked_attention.py` | inputs of a check | element | some millions |
| `model/gpu/forms.py` | inputs of a trial | element | some millions |
| `parallel/sources/custom_model.py` | the generator's seed | row | rows of a batch |
| `data/batches/orders.py` | where a random row starts | 2 · row + word | 2 · rows of a batch |
| | documents, rows or blocks, permuted | index | up to 2^62, by `permute` |
| `data/batches/mixture.py` | which source a row has | row of a block | a block's rows |
| `data/corpora/grammar.py` | the source; its text | state, character; character | some 10^6 |
| `evaluate/sampled_split.py` | which windows are evaluated | index | up to 2^62, by `permute` |
| `generation/sampling.py` | a token | position in the text | tokens of a text |
| `checkpoint/state/upcycling.py` | channels begun anew | channel | an expert's width |
| `checkpoint/state/replicas.py` | multipliers of a hash | word | 2^18 |
| `serve/passes.py` | tokens and keys to try | element | elements of a slot |
| `train/faults/checking.py` | the micro-batch to compare | none | 1 |
| `train/user_components.py` | the generator's seed of an update | none | 1 |
| `verify/steps.py` | tokens | position in the batch | tokens of a batch |

Where more than 2^32 are possible, numbers are folded: each block of 2^32 has a key of its own
(`folded`; initial weights put the block into `make_key`), and the first block the key itself.
"""

from __future__ import annotations

import operator
from hashlib import blake2b
from typing import Any

Key = tuple[int, int]
"""A key for `bits` and `permute`: two signed 32-bit words, a digest. Derive related keys through
`make_key` or `bits`, since keys that differ in a single chosen bit give related streams."""

# Multipliers and shifts of the "triple32" mixer (C. Wellons, "Prospecting for hash functions",
# 2018) without its first xor-shift, which a counter does not need. With two multiplications the
# bytes of consecutive indices come out visibly too even, and keys that share a word correlate.
MULTIPLIER_1, SHIFT_1 = 0xED5AD4BB, 11
MULTIPLIER_2, SHIFT_2 = 0xAC4C1B51, 15
MULTIPLIER_3, SHIFT_3 = 0x31848BAB, 14

WORD = 0xFFFFFFFF
N_FEISTEL_ROUNDS = 10  # fewer leave a visible bias where n is below ten


def make_key(*parts: int | str) -> Key:
    """Return the key for `parts`: equal parts give equal keys, others unrelated ones.

    `make_key(seed, "dropout", step)` names a stream, all random numbers drawn with that key. Parts
    are hashed with type and length (BLAKE2b, RFC 7693), so that `1`, `"1"` and `("a", "b")`,
    `("ab",)` all differ. Raises TypeError for a part that is neither a string nor an integer.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        kind = "s" if isinstance(part, str) else "i"
        text = (part if isinstance(part, str) else str(operator.index(part))).encode()
        digest.update(f"{kind}{len(text)}:".encode() + text)
    words = digest.digest()
    return (
        int.from_bytes(words[:4], "little", signed=True),
        int.from_bytes(words[4:], "little", signed=True),
    )


def bits(key: tuple[Any, Any], index: Any) -> Any:
    """Return 32 random bits per element in `index`: int32 in its shape, uniform over all 2^32
    values.

    index: an int32 numpy array (at least one dimension) or torch tensor, with any 32-bit values,
    that numbers the draws. key: two words, each an int or an int32 array that broadcasts with
    `index`, such as one word per batch row. For one key, different indices give different values:
    the map is a bijection on 32-bit words.

    The first word is combined with the index by exclusive or; the second enters between two
    multiplications. So two keys' streams are not one sequence in two orders. Multiplications wrap
    at 32 bits.
    """
    # In place where arrays can be: a third of the time of what allocates. `>>` copies the sign bit
    # downwards; the masks take the copies away, as a logical shift does.
    x = index ^ key[0]
    x *= MULTIPLIER_1 - 2**32
    high = x >> SHIFT_1
    high &= WORD >> SHIFT_1
    x ^= high
    x = x ^ key[1]  # which may be of more dimensions
    x *= MULTIPLIER_2 - 2**32
    high = x >> SHIFT_2
    high &= WORD >> SHIFT_2
    x ^= high
    x *= MULTIPLIER_3
    high = x >> SHIFT_3
    high &= WORD >> SHIFT_3
    x ^= high
    return x


def folded(key: tuple[Any, Any], block: Any) -> tuple[Any, Any]:
    """Return the key with which to draw a random number whose index is too large for `bits`, which
    takes 32 bits. The lower 32 bits of the index are passed to `bits`; the rest of it is `block`.
    Block 0 has `key` itself, each other block an unrelated key.

    key: as for `bits`.
    block: an int32 numpy array (at least one dimension) or torch tensor, from 0 to 2^30. The two
        words of the result have the shape to which key and block broadcast.
    """
    first, second = (bits(key, 2 * block + word) for word in (0, 1))
    is_later = block != 0
    return key[0] ^ (first ^ key[0]) * is_later, key[1] ^ (second ^ key[1]) * is_later


def permute(key: Key, n: int, index: Any) -> Any:
    """Return `index`'s image under a permutation on `range(n)` that `key`, from `make_key`,
    determines.

    index: an int, or an int64 numpy array, with values in `range(n)`; n is at most 2^62. The result
    has its type and shape. Nothing with size n is stored: a Feistel network permutes the smallest
    power of two ≥ n, and a value that falls outside is mapped again until it falls inside (Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002); fewer than two rounds on average.
    Raises ValueError if n is not in 1 … 2^62, or an index not in `range(n)`.
    """
    if not 1 <= n <= 2**62:
        raise ValueError(f"n={n} must be in 1 … 2^62")
    if getattr(index, "ndim", 0) == 0:  # an int, or a numpy scalar, whose products warn
        image = operator.index(index)
        if not 0 <= image < n:
            raise ValueError(f"index={image} must be in 0 … {n - 1}")
        image = _feistel(key, n, image)
        while image >= n:
            image = _feistel(key, n, image)
        return image
    if index.size and not (index.min() >= 0 and index.max() < n):
        raise ValueError(f"every index must be in 0 … {n - 1}")
    images = _feistel(key, n, index)
    while (outside := images >= n).any():
        images[outside] = _feistel(key, n, images[outside])
    return images


def _feistel(key: Key, n: int, x: Any) -> Any:
    """Return x's image (an int, or an int64 array in x's shape) under a bijection on `range(2**b)`
    that the key determines; 2^b is the least power of two ≥ n."""
    n_bits = (n - 1).bit_length()
    low_bits, high_bits = n_bits // 2, n_bits - n_bits // 2
    for round_number in range(1, N_FEISTEL_ROUNDS + 1):
        # x is (high, low); it becomes (low, high ^ f(low)): the parts change places and widths.
        high, low = x >> low_bits, x & ((1 << low_bits) - 1)
        scrambled = _word(key, round_number, low) & ((1 << high_bits) - 1)
        x = (low << high_bits) | (high ^ scrambled)
        low_bits, high_bits = high_bits, low_bits
    return x


def _word(key: Key, round_number: int, x: Any) -> Any:
    """Return 32 random bits, as numbers in 0 … 2^32 - 1, for x: an int or an int64 array, with 0 ≤
    x < 2^31. They depend on the key and the Feistel round's number, from 1.

    It is the mixer in `bits` on non-negative numbers, because Python's ints do not wrap. The
    product of two 32-bit words may pass 2^63; int64 then wraps, and its low 32 bits are right all
    the same.
    """
    # The multiples of two odd words give each round a key of its own.
    x = x ^ ((key[0] + round_number * 0x9E3779B9) & WORD)
    x = (x * MULTIPLIER_1) & WORD
    x = x ^ (x >> SHIFT_1) ^ ((key[1] ^ (round_number * 0x85EBCA6B)) & WORD)
    x = (x * MULTIPLIER_2) & WORD
    x = x ^ (x >> SHIFT_2)
    x = (x * MULTIPLIER_3) & WORD
    return x ^ (x >> SHIFT_3)
