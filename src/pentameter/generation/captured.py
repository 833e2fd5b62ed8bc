"""Steps of fixed shapes on a GPU, recorded once as a CUDA graph and replayed.

A pass over one token is some hundreds of small kernels, and starting them one by one takes the host
several times as long as the GPU needs to compute them. A replay starts all of them at once.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from functools import cache, partial

import torch
from torch import Tensor

from pentameter.config.schema import ModelConfig

Step = Callable[[], Tensor]
"""Function that computes from tensors which stay where they are, and returns its result."""
_RECORDING = threading.Lock()  # a server has a thread for each model


def can_be_captured(device: torch.device, config: ModelConfig) -> bool:
    """Return whether steps of a model on `device` are recorded: on a GPU, unless it has experts,
    for which the host waits to learn how many tokens each gets."""
    return device.type == "cuda" and config.experts.count is None


class Captured:
    """Steps of one model on `device`, each recorded at its first call if `is_on`, else computed at
    every call."""

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self.is_on = is_on
        self._device = device
        self._steps: dict[Hashable, tuple[Tensor, Step]] = {}

    def __call__(
        self, key: Hashable, inputs: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return `compute(inputs)`, with `inputs` moved from the host to the device. The result is
        valid until the next call.

        key: names the step. All calls with one key have inputs of one shape and the same `compute`,
        which must wait for no number of the device, and give the same when it is called again.
        """
        if not self.is_on:
            return compute(inputs.to(self._device))
        if key not in self._steps:
            there = inputs.to(self._device)
            self._steps[key] = there, recorded(partial(compute, there), self._device)
        there, step = self._steps[key]
        there.copy_(inputs)
        return step()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which steps are recorded: a matrix product's workspace on a stream
    is 32 MiB, and stays."""
    return torch.cuda.Stream(device)


def recorded(step: Step, device: torch.device) -> Step:
    """Return a replay of `step` as a CUDA graph, which has given the same bits as the step itself;
    if it cannot be recorded, or its bits differ, `step`, with a warning."""
    try:
        with _RECORDING, torch.cuda.device(device):
            stream = _stream(device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # a first call makes workspaces and plans
                step()
                expected = step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads, such as a watchdog, may go on asking the device.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        if torch.allclose(replay(), expected, rtol=0, atol=0, equal_nan=True):
            return replay
        why = "its bits differ"
    except RuntimeError as error:
        why = str(error).split("\n", 1)[0]
    warnings.warn(f"a step is not replayed as a CUDA graph: {why}", stacklevel=2)
    return step
