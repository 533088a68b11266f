"""The network model: closed forms against rings and trees carried out message by message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apexfx.testing import tolerance
from apexfx.tools.simulate.network import PRESETS, Level, Link, Network, flat, ring, tree

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # beside other work
CLOSE = {"rel": tolerance(torch.float64)["rtol"], "abs": 0.0}
LINK = Link(3e-6, 2e9)


def ring_by_hand(num_ranks, num_bytes):
    """Reduce-scatter and all-gather around a ring: return the seconds and what every rank holds at the end."""
    held = [[{rank} for _ in range(num_ranks)] for rank in range(num_ranks)]
    seconds = 0.0
    for phase in ("reduce", "gather"):
        for step in range(num_ranks - 1):
            first = 0 if phase == "reduce" else 1
            moved = [(rank, (rank + first - step) % num_ranks) for rank in range(num_ranks)]
            sent = [(rank, chunk, set(held[rank][chunk])) for rank, chunk in moved]
            for rank, chunk, what in sent:  # all at once, each rank to the next one
                target = held[(rank + 1) % num_ranks]
                target[chunk] = target[chunk] | what if phase == "reduce" else what
            seconds += LINK.latency_s + num_bytes / num_ranks / LINK.bytes_per_s
    return seconds, held


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 13])
def test_the_ring_formula_is_a_ring_carried_out(num_ranks):
    seconds, held = ring_by_hand(num_ranks, 1200)
    assert all(chunk == set(range(num_ranks)) for rank in held for chunk in rank)
    assert ring(LINK, 1200, num_ranks) == pytest.approx(seconds, **CLOSE)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8, 9, 1024])
def test_the_tree_formula_counts_the_levels_of_a_tree(num_ranks):
    depth = 0
    while 2**depth < num_ranks:
        depth += 1
    assert tree(LINK, 0, num_ranks) == pytest.approx(2 * depth * LINK.latency_s, **CLOSE)
    assert tree(LINK, 1e6, num_ranks) - tree(LINK, 0, num_ranks) == pytest.approx(2e6 / LINK.bytes_per_s, **CLOSE)


def test_a_hierarchy_reduces_inside_the_node_and_sends_one_share_between_nodes():
    inner, outer = Link(1e-6, 100e9), Link(5e-6, 10e9)
    network = Network((Level(inner, 4), Level(outer)), base_s=7e-6)
    expected = 7e-6 + ring(inner, 8e6, 4) + min(ring(outer, 2e6, 3), tree(outer, 2e6, 3))
    assert network.allreduce_seconds(8e6, 12) == pytest.approx(expected, **CLOSE)
    inside = min(ring(inner, 8e6, 4), tree(inner, 8e6, 4))
    assert network.allreduce_seconds(8e6, 4) == pytest.approx(7e-6 + inside, **CLOSE)


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    network = Network((Level(LINK),))
    assert network.allreduce_seconds(64, 64) == tree(LINK, 64, 64)
    assert network.allreduce_seconds(1e9, 64) == ring(LINK, 1e9, 64)


@any_speed
@given(st.sampled_from(sorted(PRESETS)), st.integers(0, 10**9), st.integers(0, 10**9), st.integers(1, 5000))
def test_more_bytes_and_less_bandwidth_never_take_less_time(preset, few, more, num_ranks):
    network = PRESETS[preset]
    low, high = sorted((few, more))
    assert 0 <= network.allreduce_seconds(low, num_ranks) <= network.allreduce_seconds(high, num_ranks)
    halved = (Level(Link(level.link.latency_s, level.link.bytes_per_s / 2), level.ranks) for level in network.levels)
    slower = Network(tuple(halved), network.base_s)
    assert network.allreduce_seconds(low, num_ranks) <= slower.allreduce_seconds(low, num_ranks)


def test_the_ranks_of_a_node_share_its_link():
    inner, outer = flat(5e-6, 80e9, ranks_per_node=8).levels
    assert (inner.ranks, inner.link, outer.link) == (8, PRESETS["nvlink4+ib400"].levels[0].link, Link(5e-6, 10e9))
    assert flat(5e-6, 80e9) == Network((Level(Link(5e-6, 80e9)),))


def test_half_of_the_rings_gather():
    for num_ranks in (2, 8, 20):
        network = PRESETS["nvlink4+ib400"]
        inner, outer = (level.link for level in network.levels)
        half = ring(inner, 8e6, min(num_ranks, 8)) / 2 + (ring(outer, 1e6, 3) / 2 if num_ranks > 8 else 0)
        assert network.gather_seconds(8e6, num_ranks) == pytest.approx(network.base_s + half)
    assert network.gather_seconds(8e6, 1) == 0
