"""The emulated instructions compute what the manual says, and what this processor's own do where it
has them."""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from pentameter.fused_cpu import native
from pentameter.machine.capabilities import compiler_command, machine_capabilities

HERE = Path(__file__).parent
MASK = torch.tensor([0b1010_0110_0000_1011 >> lane & 1 for lane in range(16)]).bool()
SMALLEST, INFINITE = 2.0**-126, 2.0**128
"""The smallest normal fp32 number, and what is rounded to beyond the largest."""
CPU = machine_capabilities().cpu
OWN = ["processor"] if CPU.vector == "AVX512" and CPU.avx512_bf16 else []


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compiles the instructions, `emulated` or of this `processor`, into a library."""

    def built(whose):
        native_flags = native.machine_flags("AMX" if CPU.amx_bf16 else "vector", CPU) or ()
        flags = [f"-I{HERE}"] if whose == "emulated" else native_flags
        library = tmp_path_factory.mktemp(whose) / "instructions.so"
        command = [
            compiler_command(),
            "-std=c++17",
            "-O1",
            "-Wno-psabi",
            "-shared",
            "-fPIC",
            *flags,
        ]
        subprocess.run([*command, HERE / "instructions.cpp", "-o", library], check=True)
        return ctypes.CDLL(str(library))

    if compiler_command() is None:
        pytest.skip("there is no C++ compiler")
    return built


@pytest.fixture(scope="module", params=["emulated", *OWN])
def library(request, build):
    return build(request.param)


@pytest.fixture(scope="module")
def emulated(build):
    return build("emulated")


def call(function, *tensors):
    function(*(ctypes.c_void_p(each.data_ptr()) for each in tensors))


def same(found, expected):
    """To the bit, but that any number that is none equals another."""
    nan = found.isnan()
    bits = torch.equal(found[~nan].view(torch.int32), expected[~nan].view(torch.int32))
    return torch.equal(nan, expected.isnan()) and bits


def exact_sum(a, b, c, *, flush=True):
    """a · b + c rounded once to fp32, to the nearest, halves to even, by rational numbers. With
    `flush`, denormals given and returned are 0."""
    if flush:
        a, b, c = (math.copysign(0, x) if abs(x) < SMALLEST else x for x in (a, b, c))
    plain = a * b + c
    if not math.isfinite(plain) or (exact := Fraction(a) * Fraction(b) + Fraction(c)) == 0:
        return plain
    exponent = math.frexp(float(exact))[1] - 1
    spacing = Fraction(2) ** ((exponent if flush else max(exponent, -126)) - 23)
    near = round(exact / spacing) * spacing
    if abs(near) >= INFINITE:
        return math.copysign(math.inf, near)
    return math.copysign(0.0, near) if flush and abs(near) < SMALLEST else float(near)


def low(x):
    """Rounded to bf16; denormals become 0."""
    return torch.where(x.abs() < SMALLEST, x * 0, x).bfloat16()


def halved_sums(x):
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x.expand(16)


def scaled(x, y, z):
    """x times a power of two. Where y is infinite the power is 0 or infinite, of a number that is
    none as well; a large y leaves 0 and what is infinite as they are."""
    power = y.double().floor().exp2()
    finite = x.double() * y.double().floor().clamp(-1000, 1000).exp2()
    infinite = torch.where(x.isnan(), power, x.double() * power)
    return torch.where(y.isinf(), infinite, finite).float()


def test_every_instruction_of_the_kernels_is_tested():
    used = {
        name
        for path in native.FOLDER.iterdir()
        for name in re.findall(r"\b_(?:mm\d*|tile|cvt)\w+", path.read_text(encoding="utf-8"))
    }
    tested = (HERE / "instructions.cpp").read_text(encoding="utf-8")
    assert "_tile_dpbf16ps" in used
    assert not [name for name in sorted(used) if name not in tested]


def shuffled(x, y, which):
    x, y = x.view(4, 4), y.view(4, 4)
    return torch.cat([(x, y)[i // 2][which >> 2 * i & 3] for i in range(4)])


def permuted(x, which):
    return x.view(4, 4)[:, [which >> 2 * i & 3 for i in range(4)]].flatten()


OF_FLOATS = {
    "add": lambda x, y, z: x + y,
    "sub": lambda x, y, z: x - y,
    "mul": lambda x, y, z: x * y,
    "whole": lambda x, y, z: x.round(),
    "scalef": scaled,
    "zero": lambda x, y, z: torch.zeros(16),
    "repeated": lambda x, y, z: x[3].expand(16),
    "reduce_add": lambda x, y, z: halved_sums(x),
    "masked_max": lambda x, y, z: torch.where(MASK, torch.where(x > y, x, y), z),
    "masked_move": lambda x, y, z: torch.where(MASK, x, 0.0),
    "masked_load": lambda x, y, z: torch.where(MASK, x, 0.0),
    "compressed": lambda x, y, z: torch.cat((x[MASK], torch.zeros(int((~MASK).sum())))),
    "permuted_4e": lambda x, y, z: permuted(x, 0x4E),
    "permuted_b1": lambda x, y, z: permuted(x, 0xB1),
    "quarters_44": lambda x, y, z: shuffled(x, y, 0x44),
    "quarters_ee": lambda x, y, z: shuffled(x, y, 0xEE),
    "quarters_88": lambda x, y, z: shuffled(x, y, 0x88),
    "quarters_dd": lambda x, y, z: shuffled(x, y, 0xDD),
    "quarter_stored": lambda x, y, z: torch.cat((x[:4], y[4:])),
    "masked_store": lambda x, y, z: torch.where(MASK, x, z),
    "rounded": lambda x, y, z: torch.cat((low(x), low(y))).view(torch.float32),
    "rounded_half": lambda x, y, z: torch.cat((x[:8], low(y).view(torch.float32))),
}


def odd_floats(generator):
    """Ordinary numbers, halves between two, and the ends of the range, in any order."""
    x = torch.randn(16, generator=generator) * 8.0
    odd = [
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        -0.0,
        1e-40,
        -1e-45,
        2.5,
        -0.5,
        1 + 2**-8,
        3.4e38,
        -150,
    ]
    x[:12] = torch.tensor(odd)
    return x[torch.randperm(16, generator=generator)].contiguous()


@pytest.mark.parametrize("name", OF_FLOATS)
def test_an_instruction_on_floats(library, name):
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        x, y, z = (odd_floats(generator) for _ in range(3))
        found = torch.empty(16)
        call(library[name], found, x, y, z)
        expected = OF_FLOATS[name](x, y, z)
        if name.startswith("rounded"):  # halves that must be equal one by one
            found, expected = (each.view(torch.bfloat16).float() for each in (found, expected))
        assert same(found, expected), (found, expected)


@pytest.mark.parametrize(("name", "sign"), [("fmadd", 1.0), ("fmsub", -1.0)])
def test_a_product_and_a_sum_round_once(library, name, sign):
    generator = torch.Generator().manual_seed(2)
    for _ in range(30):
        x, y, z = (torch.randn(16, generator=generator) for _ in range(3))
        z *= torch.randint(-30, 30, (16,), generator=generator).exp2()
        z[0], x[0], y[0] = sign, 1 + 2**-23, 2.0**-24 - 2.0**-48  # in double a half, and rounded up
        found = torch.empty(16)
        call(library[name], found, x, y, z)
        each = zip(x.tolist(), y.tolist(), (sign * z).tolist(), strict=True)
        assert same(found, torch.tensor([exact_sum(*xyz, flush=False) for xyz in each]))


def test_the_largest_lane(library):
    x, found = torch.randn(16, generator=torch.Generator().manual_seed(3)), torch.empty(16)
    call(library.reduce_max, found, x, x, x)
    assert same(found, x.max().expand(16))


def unpacked(x, y, first, size):
    x, y = (each.view(4, 2, 2 // size, size)[:, first] for each in (x, y))
    return torch.stack((x, y), 2).flatten()


def halves(x):
    return x.view(torch.int16).int() & 0xFFFF


OF_WORDS = {
    "add_words": lambda x, y: x + y,
    "multiply_words": lambda x, y: x * y,
    "or_words": lambda x, y: x | y,
    "shift_words": lambda x, y: x << 16,
    "repeated_word": lambda x, y: x[0].expand(16),
    "lane_numbers": lambda x, y: torch.arange(16).int(),
    "unpack_low_words": lambda x, y: unpacked(x, y, 0, 1),
    "unpack_high_words": lambda x, y: unpacked(x, y, 1, 1),
    "unpack_low_pairs": lambda x, y: unpacked(x, y, 0, 2),
    "unpack_high_pairs": lambda x, y: unpacked(x, y, 1, 2),
    "shuffle_44": lambda x, y: shuffled(x, y, 0x44),
    "shuffle_ee": lambda x, y: shuffled(x, y, 0xEE),
    "shuffle_88": lambda x, y: shuffled(x, y, 0x88),
    "shuffle_dd": lambda x, y: shuffled(x, y, 0xDD),
    "low_halves_widened": lambda x, y: halves(x)[:16],
    "high_halves_widened": lambda x, y: halves(x)[16:],
    "inserted": lambda x, y: torch.cat((x[:8], y[:8])),
    "half_of_zeros": lambda x, y: torch.cat((torch.zeros(8).int(), x[8:])),
    "half_stored": lambda x, y: torch.cat((x[:8], y[8:])),
}


@pytest.mark.parametrize("name", OF_WORDS)
def test_an_instruction_on_words(library, name):
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randint(-(2**31), 2**31, (16,), generator=generator).int() for _ in range(2))
    found = torch.empty(16).int()
    call(library[name], found, x, y, x)
    assert torch.equal(found, OF_WORDS[name](x, y))


def random_bf16(generator, shape, exponents):
    """Random bf16 numbers of such exponents; of every 16 one is 0, and one denormal."""
    x = torch.randn(shape, generator=generator)
    x *= torch.randint(*exponents, shape, generator=generator).float().exp2()
    kinds = torch.randint(16, shape, generator=generator)
    x = torch.where(kinds == 0, 0.0, x)
    return torch.where(kinds == 1, x.sign() * 1e-39, x).bfloat16()


RANGES = {"ordinary": (-12, 12), "smallest": (-66, -60), "largest": (60, 65)}
"""Exponents of factors whose products lie in the middle of fp32's numbers, or at an end."""


@pytest.mark.parametrize("exponents", RANGES.values(), ids=RANGES)
def test_sums_of_two_products_of_bf16(library, exponents):
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        x, y = (random_bf16(generator, (16, 2), exponents) for _ in range(2))
        z = random_bf16(generator, (16,), [2 * each for each in exponents]).float() * (1 + 2**-20)
        found = torch.empty(16)
        call(library.pair_products, found, x, y, z)
        expected = []
        for a, b, total in zip(x.tolist(), y.tolist(), z.tolist(), strict=True):
            first = exact_sum(a[1], b[1], total)
            expected.append(exact_sum(a[0], b[0], first))
        assert same(found, torch.tensor(expected))


def tile_config(*shapes):
    """The 64 bytes that configure tiles, of (rows, bytes in a row) each."""
    config = torch.zeros(64, dtype=torch.uint8)
    config[0] = 1
    for number, (rows, n_bytes) in enumerate(shapes):
        config[16 + 2 * number], config[48 + number] = n_bytes, rows
    return config


def documented(c, a, b):
    """c + a · b for bf16 a (m, k, 2) and b (k, n, 2): TDPBF16PS as the manual has it."""
    out = torch.empty_like(c)
    a, b, c = a.tolist(), b.tolist(), c.tolist()
    for m, n in ((m, n) for m in range(len(c)) for n in range(len(c[0]))):
        sums = [0.0, 0.0]
        for k in range(len(b)):
            for half in range(2):
                sums[half] = exact_sum(a[m][k][half], b[k][n][half], sums[half])
        out[m, n] = exact_sum(1.0, c[m][n], exact_sum(1.0, *sums))
    return out


def padded(x):
    """x (rows, words) in rows of 64 bytes, behind which stands something else."""
    rows = torch.full((16, 16), 7.0)
    rows[: len(x), : x.shape[1]] = x
    return rows


@pytest.mark.parametrize("sizes", [(16, 16, 16), (3, 5, 7)], ids=str)
@pytest.mark.parametrize("exponents", RANGES.values(), ids=RANGES)
def test_tiles_multiply_as_the_manual_says(emulated, exponents, sizes):
    M, K, N = sizes
    generator = torch.Generator().manual_seed(6)
    a = random_bf16(generator, (M, K, 2), exponents)
    b = random_bf16(generator, (K, N, 2), exponents)
    c = random_bf16(generator, (M, N), [2 * each for each in exponents]).float() * (1 + 2**-20)
    found = padded(c)
    words = [padded(each.view(torch.float32).squeeze(-1)) for each in (a, b)]
    config, zeros = tile_config((M, 4 * N), (M, 4 * K), (K, 4 * N)), torch.full((16, 16), 7.0)
    call(emulated.tile_matmul, config, found, *words, zeros)
    expected = documented(c, a, b)
    assert same(found[:M, :N], expected)
    assert (found[M:] == 7).all()  # a tile's rows and columns alone are stored
    assert (found[:, N:] == 7).all()
    assert (zeros[:K, :N] == 0).all()
    if exponents != RANGES["ordinary"]:  # or the ends were not met
        assert expected.isinf().any() or (expected == 0).any()


@pytest.mark.parametrize("whose", ["emulated", *(["processor"] if CPU.amx_bf16 else [])])
def test_tiles_round_no_more_than_their_sums(build, whose):
    """Near the exact result, whatever the order in which a processor adds."""
    if whose == "processor" and (why := native.load("AMX", machine_capabilities())) is not None:
        pytest.skip(why)  # it asks the system, too
    native.unload()
    generator = torch.Generator().manual_seed(7)
    a, b = (random_bf16(generator, (16, 16, 2), RANGES["ordinary"]) for _ in range(2))
    found = torch.zeros(16, 16)
    zeros = torch.empty(16, 16)
    call(build(whose).tile_matmul, tile_config(*[(16, 64)] * 3), found, a, b, zeros)
    left, right = a.double().flatten(1), b.double().transpose(1, 2).flatten(0, 1)
    size = left.abs() @ right.abs()
    assert ((found.double() - left @ right).abs() <= 34 * 2.0**-24 * size).all()


FAULTS = {
    "a tile that is not configured": "load_unconfigured(config)",
    "a factor that is both": "square(config)",
    "a configuration with a reserved byte": "config[2] = 1; matmul(config)",
    "a row that is too long": "config[16] = 65; matmul(config)",
    "sizes that do not fit": "config[50] = 15; matmul(config)",
}
WITH_TILES = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
config, memory = bytearray(64), (ctypes.c_char * 1024)()
config[0], config[16:22:2], config[48:51] = 1, [64] * 3, [16] * 3
def passed(config):
    return (ctypes.c_char * 64).from_buffer(config)
def load_unconfigured(config):
    library.load_unconfigured(memory)
def square(config):
    library.square(passed(config))
def matmul(config):
    library.tile_matmul(passed(config), *[memory] * 4)
matmul(config)
print("went well", flush=True)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_processor_refuses_ends_the_process(emulated, fault):
    command = [sys.executable, "-c", WITH_TILES + FAULTS[fault], emulated._name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-6, "went well\n")
