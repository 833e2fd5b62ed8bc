"""C++ functions are called again with what they were called with, in order."""

import ctypes

import pytest
import torch

from pentameter.fused_cpu import native
from pentameter.fused_cpu.captured.native_calls import MOST_ARGUMENTS, NativeCalls
from pentameter.fused_cpu.native import NativeCall, function_address


def told(*calls):
    """The calls of the vector library, as they were told, and their arguments."""
    found = []
    with native.telling(lambda *call: found.append(call)):
        for kernel, *arguments in calls:
            native.call("vector", kernel, *arguments)
    return found


def test_calls_follow_one_another(loaded):
    x, y, z = torch.arange(12.0).view(3, 4), torch.empty(4, 3), torch.empty(3, 4)
    calls = [call for call, _ in told(("transpose", y, x, 3, 4, 3), ("transpose", z, y, 4, 3, 4))]
    x.add_(1)
    NativeCalls(calls)()
    assert torch.equal(z, x)
    assert torch.equal(y, x.t())


def test_what_fails_ends_them(loaded):
    c = ctypes.CDLL(None)
    fails, succeeds = (
        NativeCall(function_address(c.labs), (n,), c, is_checked=True) for n in (-7, 0)
    )
    x, y = torch.ones(2, 2), torch.zeros(2, 2)
    ((after, _),) = told(("transpose", y, x, 2, 2, 2))
    y.zero_()
    with pytest.raises(RuntimeError, match="failed: 7"):
        NativeCalls([succeeds, fails, after])()
    assert not y.any()
    NativeCalls([fails._replace(is_checked=False), succeeds, after])()
    assert y.all()


@pytest.mark.parametrize("n", range(MOST_ARGUMENTS + 1))
def test_all_arguments_arrive(loaded, n):
    passed = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * n)
    function = kind(lambda *given: passed.append(given) or 0)
    values = tuple((-1) ** i * (2**40 + i) for i in range(n))
    NativeCalls([NativeCall(function_address(function), values, function)] * 2)()
    assert passed == [values] * 2
