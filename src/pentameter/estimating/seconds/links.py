"""Communication times, from the bytes sent and the links that a group's ranks span.

A ring with n ranks moves (n - 1) / n of a gathered tensor through each link, and twice that for an
all-reduce. Between nodes, all group members within a node use its network together. A small message
costs one latency per hop: a ring's from one member of a node to the next, and between nodes a
tree's depth, of gathers too, which published runs are nearer to than to a ring of nodes
(docs/decisions.md); between processes on a CPU it is one hop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pentameter.estimating.bytes.communication import WORLD, Communication, StepCommunication
from pentameter.estimating.bytes.operation_communication import Kind
from pentameter.estimating.seconds.cluster import Cluster, group_shape
from pentameter.planning.layouts.layout import Layout

Link = Literal["inside a node", "between nodes"]


@dataclass(frozen=True)
class Links:
    """Estimates how long a layout's communication takes on a cluster, for each mesh dimension."""

    layout: Layout
    cluster: Cluster

    def group(self, dimension: str) -> tuple[int, int, int]:
        """Return (size, members per node, node count) for a rank's group along a mesh dimension, or
        along WORLD for all ranks."""
        if dimension == WORLD:
            size, stride = self.layout.world_size, 1
        elif dimension == "expert":  # the ranks that exchange rows
            size, stride = self.layout.expert * self.layout.expert_tensor, 1
        else:
            layout, parameters = self.layout, self.layout.parameter_sizes
            sizes = layout.sizes if dimension in layout.sizes else layout.expert_sizes
            names = list(sizes)  # outermost first
            size = sizes[dimension]
            stride = math.prod(sizes[name] for name in names[names.index(dimension) + 1 :])
            if dimension in ("data", "shard"):  # their collectives span context too
                stride //= parameters[dimension] // size
                size = parameters[dimension]
        within, nodes = group_shape(stride, size, self.cluster.node_size)
        return size, within, nodes

    def link(self, dimension: str) -> Link:
        """Return the slowest link that groups along a mesh dimension span."""
        return "inside a node" if self.group(dimension)[2] == 1 else "between nodes"

    def seconds(self, dimension: str, kind: Kind, sent: Communication) -> float:
        """Return the seconds for all calls that `sent` counts, one after another without
        overlap: collectives or messages of one `kind` along a mesh dimension, or WORLD. 0 for a
        group with one rank."""
        size, within, nodes = self.group(dimension)
        if size == 1 or not sent.calls:
            return 0.0
        n_bytes = sent.n_bytes / sent.calls
        return sent.calls * (
            n_bytes * self._passes(kind, size) / self._bandwidth(kind, size, within, nodes)
            + self._hops(kind, within, nodes)
        )

    def total(self, sent: StepCommunication, *dimensions: str) -> float:
        """Return the seconds for all communication in `sent`, one rank's by (dimension, kind),
        along the named mesh dimensions, one call after another."""
        return sum(
            self.seconds(dimension, kind, counted)
            for (dimension, kind), counted in sent.items()
            if dimension in dimensions
        )

    def seconds_and_calls(
        self, sent: StepCommunication, dimension: str, kind: Kind
    ) -> tuple[float, int]:
        """Return (seconds, number of calls) in `sent`, one rank's by (dimension, kind), for one
        kind of collective along a mesh dimension; (0.0, 0) if there are none."""
        counted = sent.get((dimension, kind))
        if counted is None:
            return 0.0, 0
        return self.seconds(dimension, kind, counted), counted.calls

    def exposed_seconds(self, compute: float, sent: float) -> float:
        """Return the seconds that communication with a duration of `sent` adds to overlapped
        compute: the excess over `compute` seconds, and a fraction (the device's
        `interference_share`) of the overlap, by which the communication slows compute."""
        cost = self.cluster.device.calibration.interference_share
        return max(0.0, sent - compute) + cost * min(compute, sent)

    def message_seconds(self, n_bytes: int) -> float:
        """Return the seconds to send a message with `n_bytes` to the next pipeline rank."""
        return self.seconds("pipeline", "send", Communication(1, n_bytes))

    def _bandwidth(self, kind: Kind, size: int, within: int, nodes: int) -> float:
        """Return the bytes per second that enter each group member in a call of this kind. The
        group has `size` ranks, `within` per node, in `nodes` nodes."""
        device = self.cluster.device
        assert device.link_bytes_per_second is not None  # checked by parse_cluster
        link = device.link_bytes_per_second * device.calibration.link_share
        if nodes == 1:
            return link
        assert device.network_bytes_per_second is not None
        network = device.network_bytes_per_second * device.calibration.network_share
        if kind in ("send", "receive"):
            return network
        if kind == "all_to_all":  # each rank sends its shard out; bytes inside the node overlap
            return network * (size - 1) / max(1, size - within)
        return min(link, network * within) if within > 1 else network

    def _hops(self, kind: Kind, within: int, nodes: int) -> float:
        calibration = self.cluster.device.calibration
        inside, between = calibration.hop_seconds, calibration.network_hop_seconds
        if self.cluster.device.shared and nodes == 1:  # who arrives first waits to be woken, once
            return inside
        match kind:
            case "send" | "receive":
                return inside if nodes == 1 else between
            case "all_reduce":
                return 2 * ((within - 1) * inside + math.ceil(math.log2(nodes)) * between)
            case _:
                return (within - 1) * inside + math.ceil(math.log2(nodes)) * between

    def _passes(self, kind: Kind, size: int) -> float:
        """Return how many times a call's bytes pass through each member's link (a fraction for all
        but broadcasts and messages). Between CPUs, a reduce-scatter is an all-reduce, after which
        each member keeps its shard (torch's gloo)."""
        if kind == "reduce_scatter" and self.cluster.device.shared:
            kind = "all_reduce"
        match kind:
            case "all_reduce":
                return 2 * (size - 1) / size
            case "all_gather" | "reduce_scatter" | "all_to_all":
                return (size - 1) / size
            case "broadcast" | "reduce" | "send" | "receive":
                return 1.0
