"""The region of a tensor that lies in a process, where placements do not tell it."""

import pytest
import torch

from pentameter.parallel.local_shards import local_shard


class Diagonal:
    """A placement that nobody has invented yet."""

    def is_partial(self) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False


class Placed(torch.Tensor):
    placements = (Diagonal(),)
    device_mesh = type("Mesh", (), {"get_coordinate": lambda self: [0], "size": lambda _, i: 1})()

    def to_local(self) -> torch.Tensor:
        return torch.ones(4)


def test_an_unknown_placement_is_an_error_and_not_a_guess():
    with pytest.raises(ValueError, match="not known here"):
        local_shard(torch.ones(4).as_subclass(Placed))
