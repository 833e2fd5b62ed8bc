"""Decorators for functions and PyTorch's compiler: `kernel` has `torch.compile` compile a function
by itself, once for each kind of arguments (shapes, dtypes, numbers); `uncompiled` keeps one out of
compiled code; `constant` makes its result a constant of it.

Importing a file that uses them compiles nothing and does not import the compiler, which takes a
second of a start, on some hosts four: the first call of a kernel does, or a caller's own
`torch.compile`.
"""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from pentameter.machine.capabilities import compiler_error
from pentameter.machine.kernel_checks import (
    LEVELS,
    Level,
    careful_compiler,
    disagreement,
    key_of,
    recall,
    record,
    stand_in,
    worst,
)
from pentameter.tree import Tree, leaves, map_leaves

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def uncompiled(function: AnyFunction) -> AnyFunction:
    """Decorator: compiled code calls this function or method as it is written, with all that it
    calls, and its graph ends before the call. Like `torch.compiler.disable`, which imports the
    compiler."""
    return cast(AnyFunction, Uncompiled(function))


def uncompiled_alone(function: AnyFunction) -> AnyFunction:
    """Decorator: as `uncompiled`, but what the function calls may be compiled by itself: `disable`
    with `recursive=False`."""
    return cast(AnyFunction, _UncompiledAlone(function))


def constant(function: AnyFunction) -> AnyFunction:
    """Decorator: this function's result is a constant of compiled code that calls it, like
    `torch.compiler.assume_constant_result`, which imports the compiler."""
    return cast(AnyFunction, _Constant(function))


class Uncompiled:
    """A function or method that compiled code calls as it is written. Made by `uncompiled`.

    PyTorch's compiler reads its marks on the class's `__call__`, which gets them as soon as the
    compiler is imported, by whomever.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._plain = function

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Return the function's result for these arguments."""
        return self._plain(*arguments, **named)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the method of an instance; of the class, this object."""
        # The compiler does not take a MethodType of what is not a function.
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> str:
        """Copy and pickle this by its name, like a function."""
        return str(vars(self)["__qualname__"])  # of the function

    def _always_plain(self, *arguments: Any, **named: Any) -> Any:
        return self._plain(*arguments, **named)


class _UncompiledAlone(Uncompiled):
    @functools.cached_property
    def _alone(self) -> Callable[..., Any]:
        return torch.compiler.disable(self._plain, recursive=False)

    def _always_plain(self, *arguments: Any, **named: Any) -> Any:
        return self._alone(*arguments, **named)


class _Constant(Uncompiled):
    pass


def _mark() -> None:
    """Put the compiler's marks on the classes above. The compiler has been imported."""
    disable, plain = torch.compiler.disable, Uncompiled._always_plain
    marks: dict[type, Callable[..., Any]] = {
        Uncompiled: disable(plain),
        _UncompiledAlone: disable(_UncompiledAlone._always_plain, recursive=False),
        _Constant: torch.compiler.assume_constant_result(plain),
    }
    for kind, marked in marks.items():
        type.__setattr__(kind, "__call__", marked)


class _MarksWhenImported(MetaPathFinder):
    """Finder of modules that lets PyTorch's compiler be found as always, and has it mark what is
    not to be compiled once it is imported."""

    COMPILER = "torch._dynamo"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the compiler's spec, with a loader that marks; None for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name == self.COMPILER else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_mark(module: ModuleType) -> None:
                execute(module)
                _mark()

            spec.loader.exec_module = execute_and_mark  # type: ignore[method-assign]
        return spec


if _MarksWhenImported.COMPILER in sys.modules:
    _mark()
else:
    sys.meta_path.insert(0, _MarksWhenImported())


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of `function` with its own code object, to be passed to `torch.compile`.

    PyTorch counts recompilations per code object and gives up after eight, and a process may
    train several models.
    """
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        argdefs=function.__defaults__,
        closure=function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def kernel(function: Callable[..., Any]) -> Kernel:
    """Decorator: compile `function` at its first call for each kind of arguments.

    On a CPU, what was compiled is checked before it is used. If its results disagree with those of
    `function` itself (`machine/kernel_checks.py`), it is compiled with less optimization; if they
    still do, or if it cannot be compiled, `function` runs eagerly.

    Arguments are positional. Calls whose tensors have the same shapes, strides, dtypes and
    `requires_grad`, and whose other arguments are equal, are of one kind and use the same compiled
    code.
    """
    return Kernel(function)


class Kernel(Uncompiled):  # or within compiled code the plain form would be compiled, too
    """A function that is compiled by `torch.compile` and checked against its eager form; call it
    like the function itself. Made by the decorator `kernel`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(self._checked_call)
        functools.update_wrapper(self, function)
        self._name = function.__name__
        self._function = function
        self._checked: dict[Hashable, Level] = {}
        self._compiled = functools.cache(self._compile)

    def _checked_call(self, *arguments: Any) -> Any:
        """Return the function's result for these arguments."""
        if _PLAIN.get():
            return self._function(*arguments)
        if _CAPTURED.get():
            raise CaptureError(f"{self._name} is compiled")
        kind = _kind(arguments)
        is_first = kind not in self._checked
        if is_first:
            self._checked[kind] = level = self._level(kind, arguments)
            hold({self._name: level})
        level = _held.get(self._name, LEVELS[0])
        try:
            return self._form(level, kind)(*arguments)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not is_first or level == LEVELS[-1]:
                raise
            hold({self._name: self._failed(error)})  # on a GPU it is compiled here: nothing is done
            return self._function(*arguments)

    def _form(self, level: Level, kind: Hashable) -> Callable[..., Any]:
        return self._function if level == "plain" else self._compiled(level, kind)

    def _compile(self, level: Level, kind: Hashable) -> Callable[..., Any]:
        # Fused multiply-add: a tenth faster in these kernels, and rounds less.
        options: dict[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
        if level == "-O2":
            options |= careful_options()
        own = with_own_code(self._function)
        return torch.compile(own, fullgraph=True, dynamic=False, options=options)

    def _level(self, kind: Hashable, arguments: tuple[Any, ...]) -> Level:
        """Return the level of optimization at which to run a call with this kind of arguments: the
        first at which a check, now or in an earlier run, found the compiled code right."""
        if any(x.device.type != "cpu" for x in _tensors(arguments)):
            return LEVELS[0]
        key = key_of(self._name, kind, torch.get_num_threads(), _settings())
        if (verdict := recall(key)) is not None:
            return cast(Level, verdict["level"])
        expected = _results(self._function, arguments)
        level: Level = LEVELS[-1]
        for tried in LEVELS[:-1]:
            try:
                wrong = disagreement(_results(self._form(tried, kind), arguments), expected)
            except Exception as error:
                if tried == LEVELS[0]:
                    return self._failed(error)
                break
            if wrong is None:
                level = tried
                break
            warnings.warn(f"{self._name}, compiled with {tried}, is wrong: {wrong}", stacklevel=4)
        record(key, self._name, level)
        return level

    def _failed(self, error: Exception) -> Level:
        """Record and warn that the kernel cannot be compiled, and return the level at which
        `function` runs eagerly. It holds in this process; the next one tries again, as the disk may
        have been full."""
        _failures[self._name] = compiler_error(error)
        warnings.warn(
            f"{self._name} cannot be compiled, and is left to PyTorch: {_failures[self._name]}",
            stacklevel=5,
        )
        return LEVELS[-1]


_held: dict[str, Level] = {}
_failures: dict[str, str] = {}
_PLAIN = ContextVar("_PLAIN", default=False)
_CAPTURED = ContextVar("_CAPTURED", default=False)


def refused() -> dict[str, Level]:
    """Return the levels at which kernels run in this process, by name, for those that do not run as
    the compiler makes them by default."""
    return dict(_held)


def failures() -> dict[str, str]:
    """Return the compiler's errors, by kernel name, for kernels that could not be compiled in this
    process."""
    return dict(_failures)


def hold(levels: Mapping[str, Level]) -> None:
    """From now on, run each kernel in `levels` (name → level of optimization) at that level or a
    more careful one, for all kinds of arguments."""
    for name, level in levels.items():
        if (held := worst(level, _held.get(name, LEVELS[0]))) != LEVELS[0]:
            _held[name] = held


def careful_options() -> dict[str, Any]:
    """Return options for `torch.compile` with which C++ is built with -O2, and without a
    precompiled header: PyTorch keeps one, 155 MB, for every path to a compiler. Raises StorageError
    if the cache folder cannot be written."""
    return {"cpp.cxx": (None, careful_compiler()), "cpp_cache_precompile_headers": False}


@contextmanager
def plainly() -> Iterator[None]:
    """Context manager: every kernel runs eagerly inside it."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


class CaptureError(RuntimeError):
    """Raised within `capturing` by what cannot be captured as operations."""


@contextmanager
def capturing() -> Iterator[None]:
    """Context manager for code whose operations are captured: a kernel raises CaptureError inside
    it, as what the compiler has made of its operations cannot be seen."""
    token = _CAPTURED.set(True)
    try:
        yield
    finally:
        _CAPTURED.reset(token)


def _kind(argument: Any) -> Hashable:
    """Return a hashable description of an argument on which compiled code depends: shape, strides,
    dtype and `requires_grad` for a tensor, the items' for a tuple or list, any other value
    itself."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.requires_grad
    if isinstance(argument, tuple | list):
        return tuple(map(_kind, argument))
    return argument


def _settings() -> tuple[object, ...]:
    """Return the settings of PyTorch's compiler that change a kernel's code and that a caller may
    have changed."""
    from torch._inductor import config  # its options have no other home

    march = getattr(config.cpp, "march", None)  # which PyTorch has from 2.12 on
    return march, config.cpp.simdlen, config.cpp.cxx


def _results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Call `function` with stand-ins for these arguments, and return all tensors that it gives: its
    results, the stand-ins, to which it may have written, and their gradients. Two forms of a
    function are compared by them."""
    given = _stand_ins(arguments, itertools.count())
    returned = _tensors(function(*given))
    outputs = [x for x in returned if x.requires_grad]
    inputs = [x for x in _tensors(given) if x.requires_grad]
    results = [*returned, *_tensors(given)]
    if outputs:
        ones = [torch.ones_like(x) for x in outputs]
        gradients = torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
        results += [x for x in gradients if x is not None]
    return results


def _stand_ins(arguments: Tree, seeds: Iterator[int]) -> Tree:
    """Return the arguments with each tensor replaced by a stand-in of the same kind, drawn from one
    of the `seeds`."""
    return map_leaves(lambda x: stand_in(x, next(seeds)) if isinstance(x, Tensor) else x, arguments)


def _tensors(tree: Tree) -> list[Tensor]:
    """Return the tensors among a tree's leaves."""
    return [x for x in leaves(tree) if isinstance(x, Tensor)]
