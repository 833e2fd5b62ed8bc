from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    """`dropout_kernels.py`: compiled where there is a GPU, else as Triton interprets it."""
    reason = "Triton is not installed: `pip install triton` interprets its kernels on a CPU"
    pytest.importorskip("triton", reason=reason)
    from pentameter.model.attention import dropout_kernels

    return dropout_kernels
