"""The network model: a hierarchy by hand, and what holds for every network."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apexfx.tools.simulate.network import PRESETS, Level, Link, Network, flat

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # beside other work
LINK = Link(3e-6, 2e9)


def test_a_hierarchy_reduces_inside_the_node_and_sends_one_share_between_nodes():
    inner, outer = Link(1e-6, 100e9), Link(5e-6, 10e9)
    network = Network((Level(inner, 4), Level(outer)), base_s=7e-6)
    inside, between = 6 * (1e-6 + 2e6 / 100e9), 4 * (5e-6 + 2e6 / 3 / 10e9)  # rings of four, then of three
    assert network.allreduce_seconds(8e6, 12) == pytest.approx(7e-6 + inside + between)
    assert network.allreduce_seconds(8e6, 4) == pytest.approx(7e-6 + inside)
    assert network.gather_seconds(8e6, 12) == pytest.approx(7e-6 + (inside + between) / 2) and network.gather_seconds(8e6, 1) == 0
    assert Network((Level(LINK),)).allreduce_seconds(64, 64) == pytest.approx(2 * (6 * 3e-6 + 64 / 2e9))  # a tree of six levels


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
