"""A kernel that the compiler makes wrong is not used."""

import copy
import pickle
import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from pentameter.machine import kernel_checks
from pentameter.model import compiled

WRONG_UNLESS_CAREFUL = """#!{python}
import subprocess, sys
arguments = sys.argv[1:]
if "-O2" not in arguments:
    for i, argument in enumerate(arguments):
        if argument.endswith(".cpp"):
            text = open(argument).read()
            if "3.25" in text:
                arguments[i] = argument + ".planted.cpp"
                open(arguments[i], "w").write(text.replace("3.25", "3.5"))
sys.exit(subprocess.run(["g++", *arguments]).returncode)
"""
"""A compiler that takes a constant for another, unless it is told to optimize less."""


@pytest.fixture(autouse=True)
def own_verdicts(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_checks, "_folder", lambda: tmp_path / "proofs")
    monkeypatch.setattr(compiled, "_held", {})
    monkeypatch.setattr(compiled, "_failures", {})


@pytest.fixture
def options():
    """Sets an option of PyTorch's compiler for C++ until the test ends."""
    from torch._inductor import config

    with ExitStack() as stack:
        yield lambda name, value: stack.enter_context(config.patch({f"cpp.{name}": value}))


def rectified(x, y, by):
    return torch.relu(x) * by + y, x


def test_a_wrong_kernel_is_left_to_pytorch_in_every_later_call_and_start(options):
    options("inject_relu_bug_TESTING_ONLY", "accuracy")
    x, y = torch.randn(64, 96).bfloat16().t(), torch.randn(96, 64)
    kernel = compiled.kernel(rectified)
    with pytest.warns(UserWarning, match=r"rectified, compiled with -O3, is wrong"):
        result = kernel(x, y, 2.0)[0]
    assert torch.equal(result, rectified(x, y, 2.0)[0])
    assert compiled.refused() == {"rectified": "plain"}
    assert list(kernel_checks.verdicts()) == [("rectified", "plain")]
    # Of the same kernel, no kind of arguments is trusted any longer.
    options("inject_relu_bug_TESTING_ONLY", None)
    assert torch.equal(kernel(y, y, 2.0)[0], rectified(y, y, 2.0)[0])
    again = compiled.kernel(rectified)
    assert again(x, y, 2.0)[0].equal(result)


def test_a_kernel_that_cannot_be_compiled_is_left_to_pytorch_until_the_next_start(options):
    options("inject_relu_bug_TESTING_ONLY", "compile_error")
    x, y = torch.randn(64, 96), torch.randn(64, 96)
    kernel = compiled.kernel(rectified)
    with pytest.warns(UserWarning, match=r"rectified cannot be compiled, .* error: "):
        result = kernel(x, y, 2.0)[0]
    assert torch.equal(result, rectified(x, y, 2.0)[0])
    assert compiled.refused() == {"rectified": "plain"}
    assert list(compiled.failures()) == ["rectified"]
    assert list(kernel_checks.verdicts()) == []  # the reason may be gone by then


def test_within_compiled_code_a_kernel_is_compared_with_what_is_not_compiled(options):
    options("inject_relu_bug_TESTING_ONLY", "accuracy")
    x, y = torch.randn(64, 96), torch.randn(64, 96)
    kernel = compiled.kernel(rectified)
    whole = torch.compile(lambda x: kernel(x, y, 2.0)[0], dynamic=False)
    with pytest.warns(UserWarning, match=r"rectified, compiled with -O3, is wrong"):
        result = whole(x)
    assert torch.equal(result, rectified(x, y, 2.0)[0])
    assert torch.equal(whole(x), result)


def test_a_right_kernel_is_proved_once(monkeypatch):
    x, y = torch.randn(64, 96), torch.randn(64, 96)
    kernel = compiled.kernel(rectified)
    torch.testing.assert_close(kernel(x, y, 3.0)[0], rectified(x, y, 3.0)[0])
    assert compiled.refused() == {}
    assert list(kernel_checks.verdicts()) == [("rectified", "-O3")]
    monkeypatch.setattr(compiled, "disagreement", None)  # or it is called
    again = compiled.kernel(rectified)
    assert torch.equal(again(x, y, 3.0)[0], kernel(x, y, 3.0)[0])


def scaled(x):
    return x * 3.25 + 1


def test_a_kernel_that_less_optimization_mends_is_built_with_it(options, tmp_path, monkeypatch):
    planted = tmp_path / "g++"
    planted.write_text(WRONG_UNLESS_CAREFUL.format(python=sys.executable))
    planted.chmod(0o755)
    monkeypatch.setenv("CXX", str(planted))
    options("cxx", (None, str(planted)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    x = torch.randn(32, 64)
    kernel = compiled.kernel(scaled)
    with pytest.warns(UserWarning, match="scaled, compiled with -O3, is wrong"):
        torch.testing.assert_close(kernel(x), scaled(x))
    assert compiled.refused() == {"scaled": "-O2"}


def written(out, x):
    out.copy_(x.t())


def test_what_a_kernel_writes_to_its_arguments_is_compared_too():
    out, x = torch.zeros(96, 80)[:, :64], torch.relu(torch.randn(64, 96))
    compiled.kernel(written)(out, x)
    assert torch.equal(out, x.t())
    given = compiled._results(written, (out, x))
    assert len(given) == 2
    assert torch.equal(given[0], given[1].t())


def test_gradients_are_compared_too():
    x = torch.randn(8, 4, requires_grad=True)
    y, given, g = compiled._results(lambda x: x * 2, (x,))
    assert torch.equal(y, given * 2)
    assert torch.equal(g, torch.full((8, 4), 2.0))


def test_ranks_hold_to_the_slowest():
    compiled.hold({"unfold": "-O2", "fold": "-O3"})
    compiled.hold({"unfold": "-O3"})
    assert compiled.refused() == {"unfold": "-O2"}
    compiled.hold({"unfold": "plain"})
    assert compiled.refused() == {"unfold": "plain"}


def doubled(x):
    return x.sin() * 2


class Holder:
    @compiled.uncompiled
    def method(self, x, *, times):
        return x.cos() * times


@compiled.uncompiled
def named(x):
    return x


def test_what_is_uncompiled_is_copied_and_pickled_like_a_function():
    assert copy.deepcopy([named])[0] is named
    assert pickle.loads(pickle.dumps(named)) is named


graphless = compiled.uncompiled(doubled)
alone = compiled.uncompiled_alone(lambda x: compiled.Tensor.exp(doubled(x)))
is_small = compiled.constant(lambda n: n < 3)


@pytest.fixture(params=["of its own code", "as it is"])
def graphs(request):
    """Compiles a function, and has a list with the operations of each of its graphs."""
    made = []

    def backend(graph, _):
        made.append([n.name for n in graph.graph.nodes if n.op.startswith("call")])
        return graph.forward

    def compile_(function):
        if request.param == "of its own code":
            function = compiled.with_own_code(function)
        return torch.compile(function, backend=backend, dynamic=False)

    torch.compiler.reset()
    return compile_, made


def test_compiled_code_calls_what_is_uncompiled_as_it_is(graphs):
    compile_, made = graphs
    holder = Holder()

    def whole(x):
        return holder.method(graphless(x + 1) + 2, times=3) + 4

    x = torch.randn(5)
    run = compile_(whole)
    for _ in range(2):
        torch.testing.assert_close(run(x), whole(x))
    assert made == [["add"]] * 3
    assert graphless.__name__ == "doubled"


def test_compiled_code_compiles_what_a_function_calls_that_is_uncompiled_alone(graphs):
    compile_, made = graphs

    def whole(x):
        return alone(x + 1) + 4

    x = torch.randn(5)
    run = compile_(whole)
    for _ in range(2):
        torch.testing.assert_close(run(x), whole(x))
    assert made == [["add"], ["sin", "mul"], ["add"]]


def test_a_constant_is_one_of_compiled_code(graphs):
    compile_, made = graphs

    def whole(x):
        return x + 1 if is_small(2) else x - 1

    assert compile_(whole)(torch.zeros(())) == 1
    assert ["add"] in made


FIRST = """
import torch
from pentameter.config.schema import ModelConfig
from pentameter.model.gpt import build_model
from pentameter.model.matmul import exact_linear

keys = {"context_length": 16, "n_layers": 1, "d_model": 16}
config = ModelConfig(vocab_size=32, attention={"n_heads": 2, "n_kv_heads": 1}, **keys)
model, tokens = build_model(config, 0).eval(), torch.arange(16)[None]
x, weight = torch.randn(3, 16), torch.randn(4, 16)
whole = {"fullgraph": True, "backend": "eager"}
with torch.no_grad():
    print(torch.equal(torch.compile(model, **whole)(tokens), model(tokens)))
    y = torch.compile(exact_linear, **whole)(x, weight, None)
print(torch.equal(y, exact_linear(x, weight, None)))
"""


def test_who_compiles_first_gets_whole_graphs():
    """In a process of its own, where nothing has imported the compiler yet."""
    command = [sys.executable, "-c", FIRST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n" * 2, done.stderr
