"""The same computation on several numbers of threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def on_some_threads(compute: Callable[[], Sequence[Tensor]]) -> list[Sequence[Tensor]]:
    """What `compute` returns on one, on two and on three threads."""
    before, answers = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            answers.append(compute())
    finally:
        torch.set_num_threads(before)
    return answers


def check_same_on_any_threads(compute: Callable[[], Sequence[Tensor]]) -> None:
    """What `compute` returns has the same bits on any number of threads."""
    first, *others = on_some_threads(compute)
    for answer in others:
        assert all(map(torch.equal, answer, first))
