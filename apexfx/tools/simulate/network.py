"""How long a collective takes: the alpha-beta model of a hierarchy of links, in closed form.

With p ranks, n bytes a rank, latency a of one message and bandwidth B of one rank's link:

    ring   2 (p - 1) a + 2 (p - 1) / p n / B     reduce-scatter, then all-gather (Patarasuk and Yuan 2009)
    tree   2 ceil(log2 p) a + 2 n / B            up and down two complementary binary trees, each with half of the bytes
                                                 (Sanders, Speck and Traeff 2009); filling the pipeline is left out

Over several levels a ring reduces and scatters within each group of the inner level, the groups reduce the n / p that each
of their ranks holds over the next level, and the inner rings gather. `Network.allreduce_seconds` is the faster of the two at
the outermost level, as libraries choose by size. A reduce_scatter, and a gather, are half of the rings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What connects a rank to others.

    Attributes:
        latency_s: seconds from one rank's send to another's receive of an empty message.
        bytes_per_s: in one direction, for one rank while all the ranks that share the link send.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Level:
    """`ranks` of the level below (single ranks, at the innermost) joined by a link; None: however many there are."""

    link: Link
    ranks: int | None = None


@dataclass(frozen=True)
class Network:
    """Levels from the innermost (ranks of one node) outwards.

    Attributes:
        levels: only the last one's `ranks` is None.
        base_s: seconds that every collective takes on top, whatever its size: launch, and hand-over to the transport.
        source: where the numbers come from.
    """

    levels: tuple[Level, ...]
    base_s: float = 0.0
    source: str = ""

    def allreduce_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds in which `num_ranks` ranks sum `num_bytes` each; 0 for one rank alone."""
        if num_ranks == 1:
            return 0.0
        seconds, left = self.base_s, num_ranks
        for level in self.levels:
            members = left if level.ranks is None else min(left, level.ranks)
            left = math.ceil(left / members)
            seconds_of_ring = ring(level.link, num_bytes, members)
            if left == 1:
                return seconds + min(seconds_of_ring, tree(level.link, num_bytes, members))
            seconds += seconds_of_ring
            num_bytes /= members
        raise AssertionError("the last level takes all ranks")

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the seconds in which ranks gather what each has a part of, or sum it so that each has a part; 0 for one alone.

        Args:
            num_bytes: of the whole.
            num_ranks: how many.
        """
        seconds, left = self.base_s if num_ranks > 1 else 0.0, num_ranks
        for level in self.levels:
            members = left if level.ranks is None else min(left, level.ranks)
            seconds += ring(level.link, num_bytes, members) / 2
            left, num_bytes = math.ceil(left / members), num_bytes / members
        return seconds


def ring(link: Link, num_bytes: float, num_ranks: int) -> float:
    """Return 2 (p - 1) a + 2 (p - 1) / p n / B."""
    return 2 * (num_ranks - 1) * (link.latency_s + num_bytes / num_ranks / link.bytes_per_s)


def tree(link: Link, num_bytes: float, num_ranks: int) -> float:
    """Return 2 ceil(log2 p) a + 2 n / B; 0 for one rank."""
    if num_ranks == 1:
        return 0.0
    return 2 * (math.ceil(math.log2(num_ranks)) * link.latency_s + num_bytes / link.bytes_per_s)


def flat(latency_s: float, bytes_per_s: float, *, ranks_per_node: int = 1) -> Network:
    """Return a network of one kind of link, or of nodes of `ranks_per_node` ranks joined inside by NVLink.

    Args:
        latency_s, bytes_per_s: between nodes; the ranks of a node share the bandwidth.
        ranks_per_node: ranks behind one such link.
    """
    outer = Level(Link(latency_s, bytes_per_s / ranks_per_node))
    return Network((outer,) if ranks_per_node == 1 else (Level(NVLINK4, ranks_per_node), outer))


_NCCL = "latencies: src/graph/tuning.cc of NCCL (LL protocol; the tree's for the network)"
NVLINK4 = Link(0.6e-6, 450e9)
PRESETS: Mapping[str, Network] = {
    "nvlink4+ib400": Network(
        (Level(NVLINK4, 8), Level(Link(5e-6, 50e9))), 8.4e-6,
        f"DGX H100: 900 GB/s NVLink both ways, one 400 Gb/s adapter a GPU (data sheets); {_NCCL}"),
    "nvlink3+ib200": Network(
        (Level(Link(0.6e-6, 300e9), 8), Level(Link(5e-6, 25e9))), 8.4e-6,
        f"DGX A100: 600 GB/s NVLink both ways, one 200 Gb/s adapter a GPU (data sheets); {_NCCL}"),
    "pcie4+ethernet-100g": Network(
        (Level(Link(1.0e-6, 32e9 / 2), 8), Level(Link(15e-6, 12.5e9 / 8))), 8.4e-6,
        f"8 GPUs behind PCIe 4.0 x16 (32 GB/s, shared by both neighbours) and one 100 Gb/s adapter; {_NCCL}; "
        "TCP latency: an assumption"),
    "ethernet-25g": Network((Level(Link(25e-6, 25e9 / 8)),), 8.4e-6,
                            "one rank behind each 25 Gb/s adapter; TCP latency: an assumption"),
    "ethernet-10g": Network((Level(Link(25e-6, 10e9 / 8)),), 8.4e-6,
                            "one rank behind each 10 Gb/s adapter; TCP latency: an assumption"),
}
