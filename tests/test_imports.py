"""The layers of the package: imports point down only, and the light ones stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from source_files import SOURCE, circles, file_imports, files, imports, nodes

from pentameter.cli.main import VERBS

LAYER = {
    "config": 0, "errors": 0, "keyed": 0, "formatting": 0, "tree": 0,
    "disk": 1, "planning": 1,
    "estimating": 2,
    "machine": 3,
    "model": 4, "data": 4,
    "fused_cpu": 5, "processes": 5, "record": 5,
    "parallel": 6,
    "calibrate": 7, "optim": 7,
    "checkpoint": 8, "evaluate": 8, "generation": 8,
    "harness": 9, "train": 9,
    "verify": 10, "report": 10, "serve": 10,
    "autotune": 11, "replay": 11,
    "cli": 12,
    "__main__": 13, "__init__": 13,
}  # fmt: skip
"""A module may import what is in a lower layer, or in its own package."""

SIDEWAYS = {("config", "errors"), ("processes", "record")}
"""The only imports within a layer that cross packages."""

ROOMS = {
    "data": {
        "messages": 0, "progress": 0,
        "corpora": 1, "tokenizers": 1,
        "shards": 2,
        "prepare": 3, "batches": 3,
        "open_dataset": 4,
        "__init__": 5, "sizes": 5,
    },
    "parallel": {
        "__init__": 0, "gradients": 0, "local_shards": 0, "mesh": 0, "precision": 0,
        "waits": 0,
        "context": 1, "linear": 1, "links": 1,
        "memory": 2, "tensor": 2,
        "experts": 3, "grid": 3,
        "sources": 5,
        "stage_module": 6,
        "data_parallel": 7, "pipeline": 7,
        "names": 8,
        "engine": 9,
        "assemble": 10,
    },
}  # fmt: skip
"""Package → its rooms and the files beside them, each with its layer within the package."""

MOST_FILES = 12
"""Most files of a folder's own, without its rooms; `cli` has one for each verb."""
READERS = {"record", "report"}
"""Packages that know a run by what it has recorded, and not by what trains it."""

FREE_OF_TORCH = {"config", "errors", "keyed", "tree", "disk", "planning", "estimating", "data"}
FREE_OF_ESTIMATES = {
    "model", "data", "fused_cpu", "parallel", "optim", "checkpoint", "evaluate",
    "generation",
}  # fmt: skip
"""Packages of what a run computes, which obeys the Plan and not what is estimated of it."""
FREE_OF_DISTRIBUTED = {"model", "fused_cpu", "evaluate", "train", "generation", "optim"}
READS_ENVIRONMENT = {"config", "disk", "data", "machine", "processes"}


def package_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@pytest.mark.parametrize(
    "in_b",
    [
        "from pentameter.train import a",
        "def later():\n    from pentameter.train.a import name",
        "if TYPE_CHECKING:\n    from pentameter.train.a import name",
        "fork('pentameter.train.a:name')",
        "fork('pentameter.train.a')",
    ],
    ids=["top", "later", "types", "function in a string", "module in a string"],
)
def test_a_circle_is_found_however_a_file_is_named(tmp_path, in_b):
    (tmp_path / "train").mkdir()
    a, b = tmp_path / "train" / "a.py", tmp_path / "train" / "b.py"
    a.write_text("from pentameter.train.b import other")
    b.write_text(in_b)
    assert circles(file_imports(tmp_path)) == [[a, b]]
    b.write_text("import os")
    assert circles(file_imports(tmp_path)) == []


def is_or_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def places(found: list[tuple[Path, int, str]]) -> str:
    return "\n".join(f"{path.relative_to(SOURCE)}:{line}: {what}" for path, line, what in found)


def test_every_package_has_a_layer():
    packages = {package_of(path) for path in files()}
    assert packages == set(LAYER), "LAYER and docs/architecture.md name the packages that exist"


def test_imports_point_down():
    wrong = []
    for path in files():
        package = package_of(path)
        for item in imports(path):
            if not is_or_inside(item.module, "pentameter"):
                continue
            target = [*item.module.split("."), "__init__"][1]
            if target in {"__version__", package}:
                continue
            if target not in LAYER:
                wrong.append((path, item.line, f"takes {target} from the package's top"))
            elif LAYER[target] >= LAYER[package] and (package, target) not in SIDEWAYS:
                wrong.append((path, item.line, f"{package} must not import {item.module}"))
    assert not wrong, places(wrong)


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_from_those_below(package):
    layer, folder = ROOMS[package], SOURCE / package
    rooms, wrong = set(), []
    for path in files():
        if folder not in path.parents:
            continue
        room = path.relative_to(folder).with_suffix("").parts[0]
        rooms.add(room)
        for item in imports(path):
            if is_or_inside(item.module, f"pentameter.{package}"):
                other = [*item.module.split("."), "__init__"][2]
                if other != room and layer[other] >= layer[room]:
                    wrong.append((path, item.line, f"{room} must not import {item.module}"))
    assert not wrong, places(wrong)
    assert rooms == set(layer)


def test_a_folder_has_few_files_of_its_own():
    counts = Counter(path.parent for path in files() if path.stem != "__init__")
    full = {str(folder.relative_to(SOURCE)) for folder, n in counts.items() if n > MOST_FILES}
    assert full == {"cli"}, "give files that belong together a room"


def test_no_files_import_each_other_in_a_circle():
    found = [
        [str(path.relative_to(SOURCE)) for path in circle] for circle in circles(file_imports())
    ]
    assert not found, "give what they share a file below both"


@pytest.mark.parametrize(
    ("packages", "module"),
    [
        (FREE_OF_TORCH, "torch"),
        (FREE_OF_DISTRIBUTED, "torch.distributed"),
        (FREE_OF_ESTIMATES, "pentameter.estimating"),
        (READERS, "pentameter.train"),
    ],
    ids=["torch", "torch.distributed", "estimates", "training"],
)
def test_packages_stay_free_of(packages, module):
    wrong = [
        (path, item.line, f"imports {item.module}")
        for path in files()
        if package_of(path) in packages
        for item in imports(path)
        if is_or_inside(item.module, module)
    ]
    assert not wrong, places(wrong)


def test_training_knows_of_estimates_their_bytes_alone():
    """Whether a run fits is asked before it starts; seconds are a plan's, of whoever plans."""
    wrong = [
        (path, item.line, f"imports {item.module}")
        for path in files()
        if package_of(path) == "train"
        for item in imports(path)
        if is_or_inside(item.module, "pentameter.estimating")
        and not is_or_inside(item.module, "pentameter.estimating.bytes")
    ]
    assert not wrong, places(wrong)


def test_cli_imports_nothing_heavy_at_the_top():
    heavy = ("torch", "numpy", "pydantic", "matplotlib", "tokenizers", "safetensors")
    wrong = [
        (path, item.line, f"imports {item.module} at the top")
        for path in files()
        if package_of(path) in {"cli", "__main__", "__init__"}
        for item in imports(path)
        if item.at_top and any(is_or_inside(item.module, name) for name in heavy)
    ]
    assert not wrong, places(wrong)


def test_private_names_stay_in_their_package():
    wrong = []
    for path in files():
        for item in imports(path):
            name = item.module.rpartition(".")[2]
            private = name.startswith("_") and not name.startswith("__")
            if private and is_or_inside(item.module, "pentameter"):
                wrong.append((path, item.line, f"imports {item.module}"))
    assert not wrong, places(wrong)


def test_environment_is_read_in_few_places():
    wrong = []
    for path in files():
        for node in nodes(path):
            reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            if reads and package_of(path) not in READS_ENVIRONMENT:
                wrong.append((path, node.lineno, "reads an environment variable"))
    assert not wrong, places(wrong)


def loaded_by(code: str) -> set[str]:
    """The modules in `sys.modules` after `code` ran in a process of its own."""
    tail = "\nimport sys; print('\\n'.join(['loaded:', *sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("loaded:\n")[2].split())


HELP = """
import runpy, sys
for arguments in {commands!r}:
    sys.argv = ["pentameter", *arguments, "--help"]
    try:
        runpy.run_module("pentameter", run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, (arguments, stop.code)
    heavy = sys.modules.keys() & {{"torch", "numpy", "pydantic", "matplotlib"}}
    assert not heavy, (arguments, heavy)
"""


def test_help_loads_nothing_heavy():
    """Nor does that of any verb before it, as one process shows them all."""
    loaded_by(HELP.format(commands=[[], *[[verb] for verb in sorted(VERBS)]]))


@pytest.mark.parametrize("package", sorted(FREE_OF_TORCH))
def test_importing_a_light_package_loads_no_torch(package):
    modules = [
        ".".join(["pentameter", *path.relative_to(SOURCE).with_suffix("").parts])
        for path in files()
        if package_of(path) == package and path.stem != "__init__"
    ]
    loaded = loaded_by("".join(f"import {module}\n" for module in modules))
    assert "torch" not in loaded


def test_what_renders_templates_in_little_memory_loads_no_numpy():
    """Nor anything that takes address space by the core, as OpenBLAS does."""
    loaded = loaded_by("import pentameter.data.tokenizers.renderer\nimport jinja2.sandbox")
    assert not loaded & {"torch", "numpy", "tokenizers", "pydantic"}


def test_what_may_compile_nothing_imports_no_compiler():
    """PyTorch's is a second of a start, on some hosts four; `tests/train/test_light_starts.py` has
    what these compute."""
    verbs = [f"pentameter.cli.{verb}" for verb in ("train", "sample", "eval", "serve")]
    modules = [
        "pentameter.train.loop",
        *verbs,
        "pentameter.serve.server",
        "pentameter.serve.worker",
    ]
    loaded = loaded_by("".join(f"import {module}\n" for module in modules))
    assert not loaded & {"torch._dynamo", "torch._inductor"}
