"""The time of collectives and messages: by size, by the links that a group's ranks span.

A ring of n moves (n - 1) / n of a gathered tensor through each link, twice that for an all-reduce;
between nodes all members that a group has in a node use the node's network together. The hops of a
small message count by the ring's length, in an all-reduce between nodes by the depth of a tree
(NCCL's algorithms); between processes of a CPU a message is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pentameter.planning.cluster import Cluster, group_shape
from pentameter.planning.layout import MESH_DIMENSIONS, Layout
from pentameter.planning.traffic import WORLD, Kind, StepTraffic, Traffic

Link = Literal["inside a node", "between nodes"]


@dataclass(frozen=True)
class Links:
    """The links of a layout's groups on a cluster."""

    layout: Layout
    cluster: Cluster

    def group(self, dimension: str) -> tuple[int, int, int]:
        """Of the group of a rank along a dimension of the mesh: its size, members in a node, and
        nodes."""
        if dimension == WORLD:
            size, stride = self.layout.world_size, 1
        else:
            sizes, parameters = self.layout.sizes, self.layout.parameter_sizes
            place = MESH_DIMENSIONS.index(dimension)
            size = sizes[dimension]
            stride = math.prod(sizes[name] for name in MESH_DIMENSIONS[place + 1 :])
            if dimension in ("data", "shard"):  # which sum over context too
                stride //= parameters[dimension] // size
                size = parameters[dimension]
        within, nodes = group_shape(stride, size, self.cluster.node_size)
        return size, within, nodes

    def link(self, dimension: str) -> Link:
        """The slowest link that a dimension's groups span."""
        return "inside a node" if self.group(dimension)[2] == 1 else "between nodes"

    def seconds(self, dimension: str, kind: Kind, traffic: Traffic) -> float:
        """Time of these calls, one after another."""
        size, within, nodes = self.group(dimension)
        if size == 1 or not traffic.calls:
            return 0.0
        n_bytes = traffic.n_bytes / traffic.calls
        return traffic.calls * (
            n_bytes * self._passes(kind, size) / self._bandwidth(kind, size, within, nodes)
            + self._hops(kind, within, nodes)
        )

    def total(self, traffic: StepTraffic, *dimensions: str) -> float:
        """Time of all that is sent along some dimensions."""
        return sum(
            self.seconds(dimension, kind, counted)
            for (dimension, kind), counted in traffic.items()
            if dimension in dimensions
        )

    def message_seconds(self, n_bytes: int) -> float:
        """Time of a message to the next process of the pipeline."""
        return self.seconds("pipeline", "send", Traffic(1, n_bytes))

    def _bandwidth(self, kind: Kind, size: int, within: int, nodes: int) -> float:
        """Bytes per second into each member of a group."""
        device = self.cluster.device
        assert device.link_bytes_per_second is not None  # checked by parse_cluster
        link = device.link_bytes_per_second * device.calibration.link_share
        if nodes == 1:
            return link
        assert device.network_bytes_per_second is not None
        network = device.network_bytes_per_second * device.calibration.network_share
        if kind in ("send", "receive"):
            return network
        if kind == "all_to_all":  # each sends its own part out, what stays inside beside it
            return network * (size - 1) / max(1, size - within)
        return min(link, network * within) if within > 1 else network

    def _hops(self, kind: Kind, within: int, nodes: int) -> float:
        calibration = self.cluster.device.calibration
        inside, between = calibration.hop_seconds, calibration.network_hop_seconds
        if self.cluster.device.shared and nodes == 1:  # who is done first waits once, to be woken
            return inside
        match kind:
            case "send" | "receive":
                return inside if nodes == 1 else between
            case "all_reduce":
                return 2 * ((within - 1) * inside + math.ceil(math.log2(nodes)) * between)
            case _:
                return (within - 1) * inside + math.ceil(math.log2(nodes)) * between

    def _passes(self, kind: Kind, size: int) -> float:
        """How often a call's bytes pass through each member's link. Between CPUs a reduce-scatter
        is an all-reduce of which each member keeps its part (torch's gloo)."""
        if kind == "reduce_scatter" and self.cluster.device.shared:
            kind = "all_reduce"
        match kind:
            case "all_reduce":
                return 2 * (size - 1) / size
            case "all_gather" | "reduce_scatter" | "all_to_all":
                return (size - 1) / size
            case "broadcast" | "reduce" | "send" | "receive":
                return 1.0
