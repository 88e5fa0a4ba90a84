"""How long collectives take over the links of a cluster (docs/planner.md: alpha-beta model of rings)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.constants import Constants


@dataclass(frozen=True)
class Group:
    """Ranks of a collective: ``size`` of them, ``stride`` apart in the order of ranks."""

    size: int
    stride: int = 1


@dataclass(frozen=True)
class Links:
    """Times of collectives in seconds; sizes are bytes of the whole tensor, uncut."""

    cluster: Cluster
    constants: Constants

    def crosses(self, group: Group) -> bool:
        """Whether the group reaches beyond one NVLink domain."""
        return group.size * group.stride > self.cluster.domain

    def bandwidth(self, group: Group) -> float:
        """Bytes per second that a rank of a ring over the group gets: its narrowest link.

        Between nodes every member in a node brings its own network card, so a ring that enters a node once is carried
        by as many cards as the group has members there.
        """
        inside = self.cluster.nvlink_bandwidth * self.constants.nvlink
        if not self.crosses(group):
            return inside
        members = max(1, self.cluster.domain // group.stride)
        return min(inside, members * self.cluster.network_bandwidth * self.constants.network)

    def latency(self, group: Group) -> float:
        """Of a ring's pass over the group: every hop, those between domains at the network's latency."""
        if not self.crosses(group):
            return (group.size - 1) * self.constants.latency_us * 1e-6
        members = max(1, self.cluster.domain // group.stride)
        outside = max(1, group.size // members)
        inside = outside * (members - 1) * self.constants.latency_us
        return (inside + (outside - 1) * self.constants.network_latency_us) * 1e-6

    def gather(self, num_bytes: float, group: Group) -> float:
        """All-gather or reduce-scatter: ``(N - 1) alpha + (N - 1)/N n/B``."""
        if group.size == 1:
            return 0.0
        return self.latency(group) + (group.size - 1) / group.size * num_bytes / self.bandwidth(group)

    def all_reduce(self, num_bytes: float, group: Group) -> float:
        """All-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather(num_bytes, group)

    def all_to_all(self, num_bytes: float, group: Group) -> float:
        """Each rank sends parts of its own ``num_bytes`` to all; those to other nodes by its own network card."""
        if group.size == 1:
            return 0.0
        inside = self.cluster.nvlink_bandwidth * self.constants.nvlink
        each = num_bytes / group.size
        if not self.crosses(group):
            return self.constants.latency_us * 1e-6 + (group.size - 1) * each / inside
        outside = self.cluster.network_bandwidth * self.constants.network
        members = min(group.size, max(1, self.cluster.domain // group.stride))
        slower = max((group.size - members) * each / outside, (members - 1) * each / inside)
        return self.constants.network_latency_us * 1e-6 + slower

    def send(self, num_bytes: float, distance: int) -> float:
        """A message to the rank ``distance`` further on: ``alpha + n/B``."""
        if distance >= self.cluster.domain:
            speed, latency = self.cluster.network_bandwidth * self.constants.network, self.constants.network_latency_us
        else:
            speed, latency = self.cluster.nvlink_bandwidth * self.constants.nvlink, self.constants.latency_us
        return latency * 1e-6 + num_bytes / speed
