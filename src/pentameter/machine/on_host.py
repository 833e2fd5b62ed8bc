"""Numbers of a device as the host computes with them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor


def on_host(tensor: Tensor) -> npt.NDArray[np.float64]:
    """Return a tensor's values in float64, same shape, in the host's memory: copied there first,
    then widened. Apple's GPU has no float64: a copy that widens on its way is an error in torch
    2.13, and in 2.14.0 leaves the result unwritten, so that logits come out uniform."""
    return tensor.cpu().double().numpy()
