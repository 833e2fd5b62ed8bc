"""C++ kernels of the fused step and of generation: compiled at run time into shared libraries,
cached and loaded.

The files in `cpp/` explain the algorithms. Without a library the step uses PyTorch's matmuls and
kernels built by `torch.compile`, and generation PyTorch's matmuls.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from pentameter.config.schema import ModelConfig
from pentameter.disk.atomic import FolderExistsError
from pentameter.disk.cache import cache_folder
from pentameter.disk.lock import building
from pentameter.errors import StorageError, remark
from pentameter.machine.capabilities import Capabilities, CpuCapabilities, compiler_command
from pentameter.machine.cores_and_memory import n_usable_cores
from pentameter.machine.kernel_checks import LEVELS, Level

Name = Literal["vector", "AMX", "rows"]

FILES: dict[Name, tuple[str, ...]] = {
    "vector": (
        *("add_norm", "activation", "between_matmuls", "calls", "expert_rows", "grouped_matmul"),
        *("linear", "loss", "matmul_parts", "router"),
    ),
    "AMX": ("attention", "feed_forward", "grouped_tiles", "weight_gradient"),
    "rows": ("few_rows", "token_pass"),
}
"""Maps a library to its sources in `cpp/`, without their suffix: "vector" and "rows" (generation's)
need AVX2 or AVX-512, "AMX" matrix tiles."""
DTYPES: dict[Name, tuple[torch.dtype, ...]] = {
    "vector": (torch.float32, torch.bfloat16),
    "AMX": (torch.bfloat16,),
}
"""Maps a library of the fused step to the matmul dtypes that it computes in; parameters are
fp32."""
CHANNELS = 16
"""Divisor that the vector kernels need of channel counts: the fp32 values in one AVX-512
register."""
FOLDER = Path(__file__).with_name("cpp")
FLAGS = (
    *("-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-Wno-psabi"),
    "--param=avoid-fma-max-bits=0",
)
"""With the last one all products are fused with the additions behind them. GCC from 13 on leaves
that out of some loops of AVX2, and a row's bits depended on how many rows there were."""
SLOW_SECONDS = 60.0  # to build a library; a quiet machine takes some ten
_AVX2 = (
    "-mcx16", "-msahf", "-mpopcnt", "-msse3", "-mssse3", "-msse4.1", "-msse4.2", "-mavx", "-mavx2",
    "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mlzcnt", "-mmovbe", "-mxsave",
)  # fmt: skip
"""x86-64-v3, spelled out, as GCC knows that name from 11 on; the machine code is the same."""
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
"""x86-64-v4."""
_AVX512_BF16 = "-mavx512bf16"  # GCC has it from 10 on

_loaded: dict[Name, ctypes.CDLL] = {}


class NativeCall(NamedTuple):
    """A call of a C++ function, which can be made again: its address, and its arguments, which are
    addresses and int64 numbers. `held` keeps alive what lies there, but for tensors. If it
    `is_checked`, the function returns 0 unless it fails."""

    function: int
    arguments: Sequence[int]
    held: object
    is_checked: bool = False


_Tell = Callable[[NativeCall, Sequence[Any]], None]
_told: ContextVar[_Tell | None] = ContextVar("_told", default=None)


def load(name: Name, capabilities: Capabilities, level: Level = LEVELS[0]) -> str | None:
    """Load a library for use by later steps or passes; the first call compiles it into the cache.
    Return None on success, else a phrase that says why not: CPU, system or compiler.

    capabilities: this machine's. level: the compiler's level of optimization. Never raises: without
    the library a run is slower, not impossible. However long the compiler takes, it is waited for:
    else a run's bits would depend on what else the machine does.
    """
    if (obstacle := machine_obstacle(name, capabilities)) is not None:
        return obstacle
    machine = machine_flags(name, capabilities.cpu)
    assert machine is not None
    try:
        try:
            path = build(name, (level, *machine))
        except CompilerError:
            if _AVX512_BF16 not in machine:
                raise
            # Without it bf16 is widened to fp32, as on a CPU that has no such instructions.
            path = build(name, (level, *(flag for flag in machine if flag != _AVX512_BF16)))
        library = ctypes.CDLL(str(path))
        works = name != "AMX" or library.pentameter_amx_works() == 1
    except (OSError, StorageError, CompilerError) as error:
        return f"the {name} kernels cannot be built: {error}"
    if not works:
        return "the system does not let this process use AMX"
    _loaded[name] = library
    return None


def machine_obstacle(name: Name, capabilities: Capabilities) -> str | None:
    """Return a phrase that says why this CPU or system has no use for a library; None if it has."""
    if machine_flags(name, capabilities.cpu) is None:
        lacks = "AMX" if name == "AMX" else "neither AVX2 nor AVX-512"
        return f"the CPU has {'no ' if name == 'AMX' else ''}{lacks}"
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the {name} kernels are for Linux on x86-64"
    return None


def vector_widths(config: ModelConfig) -> dict[str, int]:
    """Return the widths in channels, by key of `[model]`, of what the vector kernels compute:
    d_model of sub-layer ends, and the widths of activations. They refuse a width that CHANNELS does
    not divide."""
    widths = {"d_model": config.d_model}
    for layer in range(config.n_layers):
        if config.experts.are_in(layer) and config.experts.width is not None:
            widths["experts.width"] = config.experts.width
        else:
            widths["feed_forward.width"] = config.feed_forward_width
    return widths


def machine_flags(name: Name, cpu: CpuCapabilities) -> tuple[str, ...] | None:
    """Return the compiler flags (`-mavx2`, …) for a library on this CPU; None if the CPU lacks the
    instructions."""
    if name == "AMX":
        return ("-march=sapphirerapids",) if cpu.amx_bf16 else None
    match cpu.vector:
        case "AVX512":
            return (*_AVX512, *((_AVX512_BF16,) if cpu.avx512_bf16 else ()))
        case "AVX2":
            return _AVX2
        case _:
            return None


def build(name: Name, machine: Sequence[str]) -> Path:
    """Return the path to a compiled library in the cache, compiling it unless it exists: its
    sources side by side on the cores at hand. If several processes ask for it at once, such as the
    ranks of a machine, one compiles and the others wait. After SLOW_SECONDS a line on stderr says
    what is waited for.

    `machine` are the compiler's level of optimization and instruction set. The folder is named by a
    hash over sources and flags, so that it is never out of date.

    Raises:
        CompilerError: the compiler fails, or there is none.
        StorageError: the cache cannot be written.
    """
    headers = sorted(FOLDER.glob("*.h"))
    sources, flags = [FOLDER / f"{file}.cpp" for file in FILES[name]], (*FLAGS, *machine)
    content = b"".join(path.read_bytes() for path in (*sources, *headers))
    number = hashlib.sha256(content + " ".join(flags).encode()).hexdigest()[:16]
    folder = cache_folder() / "native" / f"{name.lower()}-{number}"
    library = folder / f"{name.lower()}.so"
    if library.exists():
        return library
    compiler = compiler_command()
    if compiler is None:
        raise CompilerError("no C++ compiler found")
    with (
        _saying_that(
            f"the {name} kernels are still being compiled by {compiler}, which happens once"
        ),
        suppress(FolderExistsError),
        building(folder) as part,
        tempfile.TemporaryDirectory() as own,
    ):
        objects = [Path(own) / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(n_usable_cores()) as pool:
            for _ in pool.map(_compile, commands):
                pass
        _compile([compiler, *flags, *map(str, objects), "-o", str(part / library.name)])
    return library


@contextmanager
def _saying_that(line: str) -> Iterator[None]:
    """Context manager: `line` is printed for the user if the `with` block takes SLOW_SECONDS."""
    timer = threading.Timer(SLOW_SECONDS, remark, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class CompilerError(Exception):
    """Raised when the C++ compiler fails, with its first words, or cannot be found."""


def _compile(command: Sequence[str]) -> None:
    """Run the compiler. Raises CompilerError with its first words if it fails or cannot be
    started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompilerError(str(error)) from error
    if done.returncode != 0:
        raise CompilerError(next(iter(done.stderr.splitlines()), f"exit {done.returncode}"))


def unload(*names: Name) -> None:
    """Forget the named libraries, or all if none is named: later steps compute without them."""
    for name in names or tuple(_loaded):
        _loaded.pop(name, None)


@contextmanager
def without(*names: Name) -> Iterator[None]:
    """Context manager: inside it, the named libraries are as if they were not loaded."""
    kept = {name: _loaded.pop(name) for name in names if name in _loaded}
    try:
        yield
    finally:
        _loaded.update(kept)


def serves(name: Name, parameters: torch.dtype, products: torch.dtype) -> bool:
    """Return whether the library `vector` or `AMX` is loaded and computes with parameters in the
    dtype `parameters` (fp32 only) and matmuls in the dtype `products`."""
    return name in _loaded and parameters is torch.float32 and products in DTYPES[name]


def is_loaded(name: Name) -> bool:
    """Return whether a library is loaded."""
    return name in _loaded


class Struct(ctypes.Structure):
    """Base class for the C++ structs that hold a kernel's arguments. A tensor among the values is
    stored as its address, and the caller must keep it alive."""

    def __init__(self, *values: Any) -> None:
        super().__init__(
            *(_address(x) if x is None or isinstance(x, Tensor) else x for x in values)
        )


def fields(
    pointers: str = "", *, int64: str = "", int32: str = "", float32: str = ""
) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a Struct: first pointers, then numbers, by type. Each argument is a
    string of names, separated by blanks."""
    kinds = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float)
    names = (pointers, int64, int32, float32)
    return [(name, kind) for kind, each in zip(kinds, names, strict=True) for name in each.split()]


def call(library: Name, kernel: str, *arguments: Any) -> int:
    """Call the C++ function `pentameter_<kernel>` of a library, which must be loaded. Structs are
    passed by reference, tensors and tuples of tensors by address, None as null, numbers as int64.
    Returns the function's result, which is meaningless for a function that returns void."""
    function = getattr(_loaded[library], f"pentameter_{kernel}")
    passed = tuple(map(_passed, arguments))
    result: int = function(*passed)
    if (tell := _told.get()) is not None:
        words = [
            ctypes.addressof(x) if isinstance(x, ctypes.Array) else x.value or 0 for x in passed
        ]
        held = passed, [each for each in arguments if isinstance(each, Struct)]
        tell(NativeCall(function_address(function), words, held), arguments)
    return result


@contextmanager
def telling(tell: _Tell) -> Iterator[None]:
    """Context manager: within it, `tell` is told each `call`, with its arguments as they were
    given."""
    token = _told.set(tell)
    try:
        yield
    finally:
        _told.reset(token)


def address(of: Struct) -> int:
    """Return the memory address of a Struct, which the caller must keep alive."""
    return ctypes.addressof(of)


def function(library: Name, kernel: str, *, n_pointers: int, n_numbers: int) -> Callable[..., Any]:
    """Return the C++ function `pentameter_<kernel>` of a library, which must be loaded, as one that
    takes addresses and then int64 numbers, all as `int`. For kernels that take microseconds, of
    which `call` would be a part."""
    found: Any = _loaded[library][f"pentameter_{kernel}"]  # an object of its own at each look-up
    found.argtypes = [ctypes.c_void_p] * n_pointers + [ctypes.c_int64] * n_numbers
    return cast(Callable[..., Any], found)


def function_address(function: Any) -> int:
    """Return the address of a function that ctypes has found."""
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found


def _passed(argument: Any) -> Any:
    match argument:
        case Struct():
            return ctypes.c_void_p(address(argument))
        case int():
            return ctypes.c_int64(argument)
        case tuple():
            return (ctypes.c_void_p * len(argument))(*map(_address, argument))
        case _:
            return _address(argument)


def _address(x: Tensor | None) -> ctypes.c_void_p:
    """Return the memory address at which a tensor's data begins; null if x is None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())
