"""What we use of PyTorch that it does not document: a release that has moved it fails here by name.

Each row is held to the table in docs/architecture.md and to the files of ours that may use it.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from source_files import SOURCE

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
ATTENTION = "torch.ops.aten._scaled_dot_product_"


def takes(name: str, arguments: str, n_results: int) -> Callable[[], bool]:
    """A check that an operation's first arguments are these, and how many results it has."""

    def check() -> bool:
        schema = getattr(torch.ops.aten, name.rpartition(".")[2]).default._schema
        first = [each.name for each in schema.arguments][: len(arguments.split())]
        return first == arguments.split() and len(schema.returns) == n_results

    return check


def has(module: str, *names: str) -> Callable[[], bool]:
    """A check that a module has these, of which `a.b` is an attribute of an attribute."""

    def check() -> bool:
        for name in names:
            found = importlib.import_module(module)
            for part in name.split("."):
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
        return True

    return check


def is_the_compiler() -> bool:
    """The module that is imported before anything can be compiled."""
    torch.compiler.disable(len)
    return "torch._dynamo" in sys.modules


def leaves_out_an_update() -> bool:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(4)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    is_left_out = bool((weight == 1).all()) and not optimizer.state[weight]["exp_avg"].any()
    del optimizer.found_inf
    optimizer.step()
    return is_left_out and not bool((weight == 1).any())


def is_in_the_c_interface() -> bool:
    """The functions of PyTorch's library for compiled models, where there is one as on Linux."""
    names = (
        *("aoti_torch_cpu_mm_out", "aoti_torch_cpu_bmm_out", "aoti_torch_create_tensor_from_blob"),
        *("aoti_torch_dtype_bfloat16", "aoti_torch_dtype_float32", "aoti_torch_device_type_cpu"),
        "aoti_torch_delete_tensor_object",
    )
    path = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    return not path.exists() or all(hasattr(ctypes.CDLL(str(path)), name) for name in names)


def is_on_the_stack() -> bool:
    """The files of PyTorch's that a stack names are those of its modules and collectives."""
    forward = inspect.getsourcefile(torch.nn.Module.__call__) or ""
    sums = inspect.getsourcefile(inspect.unwrap(torch.distributed.all_reduce)) or ""
    return forward.endswith("torch/nn/modules/module.py") and sums.endswith(
        "torch/distributed/distributed_c10d.py"
    )


def keeps_receives(name: str) -> Callable[[], bool]:
    """A check that a pipeline stage keeps what it receives under a name."""

    def check() -> bool:
        stage = importlib.import_module("torch.distributed.pipelining.stage")
        return re.search(rf"self\.{name}\b.* = ", inspect.getsource(stage)) is not None

    return check


class Interface(NamedTuple):
    """One row: the only file that may name it, or the only files, by what, and whether this PyTorch
    has it."""

    files: str
    pattern: str
    check: Callable[[], bool]


def attention(kernel: str, arguments: str, n_results: int) -> tuple[str, Interface]:
    name = ATTENTION + kernel
    used = rf"_scaled_dot_product_{kernel}$"
    where = "parallel/context/block_kernels.py"
    return name, Interface(where, used, takes(name, arguments, n_results))


PASSED = "query key value"
TABLE = dict(
    [
        attention("flash_attention_for_cpu", f"{PASSED} dropout_p is_causal", 2),
        attention(
            "flash_attention_for_cpu_backward",
            f"grad_out {PASSED} out logsumexp dropout_p is_causal",
            3,
        ),
        attention("flash_attention", f"{PASSED} dropout_p is_causal", 9),
        attention(
            "flash_attention_backward",
            f"grad_out {PASSED} out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
            "philox_seed philox_offset",
            3,
        ),
        attention(
            "efficient_attention",
            f"{PASSED} attn_bias compute_log_sumexp dropout_p is_causal",
            4,
        ),
        attention(
            "efficient_attention_backward",
            f"grad_out_ {PASSED} attn_bias out logsumexp philox_seed philox_offset dropout_p "
            "grad_input_mask is_causal",
            4,
        ),
    ]
)
TABLE |= {
    "torch._inductor.custom_graph_pass": Interface(
        "parallel/memory/recomputed_attention.py",
        r"torch\._inductor\.custom_graph_pass",
        has("torch._inductor.custom_graph_pass", "CustomGraphPass", "get_hash_for_files"),
    ),
    "torch._inductor.config": Interface(
        "model/compiled.py",
        r"from torch\._inductor import config",
        has(
            "torch._inductor.config",
            "joint_custom_post_pass",
            "triton.cudagraphs",
            "cpp.cxx",
            "cpp.simdlen",
            "cpp.enable_floating_point_contract_flag",
            "cpp_cache_precompile_headers",
        ),
    ),
    "torch._dynamo": Interface("model/compiled.py", r"\"torch\._dynamo\"", is_the_compiler),
    "torch._functorch.config": Interface(
        "parallel/stage_module.py",
        r"from torch\._functorch import config",
        has("torch._functorch.config", "force_non_lazy_backward_lowering", "patch"),
    ),
    "torch.utils._python_dispatch": Interface(
        "fused_cpu/captured/passes.py parallel/memory/recomputation.py",
        r"torch\.utils\._python_dispatch",
        has("torch.utils._python_dispatch", "TorchDispatchMode"),
    ),
    "_should_skip_dynamo": Interface(
        "fused_cpu/captured/passes.py",
        r"_should_skip_dynamo",
        has("torch.utils._python_dispatch", "TorchDispatchMode._should_skip_dynamo"),
    ),
    "_schema.is_mutable": Interface(
        "fused_cpu/captured/passes.py",
        r"\._schema\.",
        has("torch", "ops.aten.add_.Tensor._schema.is_mutable"),
    ),
    "torch.autograd._profiler_enabled": Interface(
        "fused_cpu/captured/passes.py",
        r"_profiler_enabled",
        has("torch.autograd", "_profiler_enabled"),
    ),
    "aoti_torch_cpu_mm_out": Interface(
        "fused_cpu/captured/matmul_parts.py", r"aoti_torch_", is_in_the_c_interface
    ),
    "torch._foreach_zero_": Interface(
        "parallel/gradients.py", r"torch\._foreach_", has("torch", "_foreach_zero_")
    ),
    "torch._foreach_mul_": Interface(
        "parallel/gradients.py", r"torch\._foreach_", has("torch", "_foreach_mul_")
    ),
    "torch.cuda.memory._record_memory_history": Interface(
        "train/say/profile.py",
        r"memory\._record_memory_history",
        has("torch.cuda.memory", "_record_memory_history"),
    ),
    "torch.cuda.memory._dump_snapshot": Interface(
        "train/say/profile.py",
        r"memory\._dump_snapshot",
        has("torch.cuda.memory", "_dump_snapshot"),
    ),
    "args_recv_info": Interface(
        "parallel/pipeline/bounded_stage.py",
        r"\.args_recv_info\b",
        keeps_receives("args_recv_info"),
    ),
    "grad_recv_info": Interface(
        "parallel/pipeline/bounded_stage.py",
        r"\.grad_recv_info\b",
        keeps_receives("grad_recv_info"),
    ),
    "found_inf": Interface("optim/build.py", r"\.found_inf\b", leaves_out_an_update),
    "torch/nn/modules/module.py": Interface(
        "processes/failures/waiting.py", r"torch/nn/modules/module\.py", is_on_the_stack
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_this_pytorch_has_what_we_use_of_it_undocumented(name):
    assert TABLE[name].check(), f"torch {torch.__version__} has moved {name}"


@pytest.mark.parametrize("name", TABLE)
def test_no_other_file_uses_it(name):
    pattern = re.compile(TABLE[name].pattern, re.MULTILINE)
    using = [
        str(path.relative_to(SOURCE))
        for path in sorted(SOURCE.rglob("*.py"))
        if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert using == TABLE[name].files.split()


def test_the_page_lists_them():
    page = PAGE.read_text(encoding="utf-8")
    rows = page.split("## Private names of PyTorch")[1].split("\n## ")[0].splitlines()[2:]
    cells = [row.split(" | ")[0] for row in rows if row.startswith("| `")]
    assert {name for cell in cells for name in re.findall("`([^`]+)`", cell)} == TABLE.keys()
