"""The simulator calibrated on real ranks: every rank comes to the same numbers, and a prediction can be made of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import apexfx
from apexfx.config import BucketConfig
from apexfx.parallel import DistributedDataParallel
from apexfx.tools.simulate.models import load
from apexfx.tools.simulate.profile import Profile, Segment, combine, sampler
from apexfx.tools.simulate.simulator import simulate
from tests.distributed.launch import on_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

from calibration import SIZES, Calibration, MeasuredNetwork, fit_line, slowest_profile
from harness import interleave, ratios, slowest


@pytest.mark.long
@on_ranks(2)
def test_two_ranks_calibrate_and_predict(rank, world_size):
    assert slowest([rank, -rank], dist.group.WORLD) == [1.0, 0.0]
    early = Profile((Segment("f", 1.0 + rank),), (Segment("a", 3.0 - rank), Segment("b", 2.0 * rank)), 1.0 - rank, ())
    late = slowest_profile(early, dist.group.WORLD)
    assert [p.seconds for p in (*late.forward, *late.backward)] == [2.0, 3.0, 1.0] and late.optimizer_s == 1.0

    calibration = Calibration(dist.group.WORLD)
    model, x = load("cnn", 2)
    take = sampler(model, x)
    profiles = []
    for _ in range(4):
        calibration.take()
        profiles.append(slowest_profile(take(), dist.group.WORLD))
        calibration.take_overlap("cnn", take, profiles[0].compute_s)
    profile, network = combine(profiles, "measured"), calibration.network()
    costs = calibration.costs("cnn", profile.compute_s)
    assert [num_bytes for num_bytes, _ in network.samples] == list(SIZES)
    assert all(seconds > 0 for _, seconds in network.samples)
    assert 0 < costs.compute_rate <= 1 and 0 < costs.network_rate <= 1
    assert costs.fill.byte_s > 0 and costs.write.byte_s > 0 and costs.fill.fixed_s > 0

    config = BucketConfig(message_size=30_000)
    made = simulate(profile, network, world_size, config, costs=costs)
    numbers = [made.step_s, made.exposed_s, costs.gradient_s, costs.per_step_s]
    assert slowest([*numbers, *(-n for n in numbers)], dist.group.WORLD) == [*numbers, *(-n for n in numbers)], "ranks differ"
    assert made.step_s > profile.compute_s > 0

    wrapped = DistributedDataParallel(apexfx.transform(model, opt_level="O0", inner="eager"), config.message_size)
    wrapped(x).square().mean().backward()
    planned, predicted = ([sorted(b.parameters) for b in plan.buckets] for plan in (wrapped.bucket_plan, made.plan))
    assert planned == predicted


def test_a_fitted_line_has_no_negative_part():
    fixed, slope = fit_line([(2.0**k, 3e-6 + 2.0**k / 5e9) for k in range(4, 30)])
    assert (fixed, slope) == (pytest.approx(3e-6), pytest.approx(2e-10))
    assert fit_line([(1, 3.0), (2, 2.0), (3, 1.0)])[1] == 0.0 == fit_line([(1, 0.5), (2, 2.0), (3, 4.0)])[0]


def test_a_measured_network_goes_straight_between_its_samples():
    network = MeasuredNetwork(((100, 1.0), (200, 3.0), (400, 4.0)))
    assert [network.allreduce_seconds(b, 2) for b in (10, 100, 150, 200, 400, 800)] == [1.0, 1.0, 2.0, 3.0, 4.0, 8.0]


def test_candidates_take_turns_and_ratios_have_their_spread():
    called = []
    times = interleave({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=3)
    assert called == ["a", "b", "b", "a", "a", "b"] and {name: len(taken) for name, taken in times.items()} == {"a": 3, "b": 3}
    assert ratios([2, 4, 6], [2, 2, 2]) == (1.0, 2.0, 3.0)
