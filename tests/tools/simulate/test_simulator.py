"""Predicted steps: by hand, against what the library issues in a fake process group, and what holds for all of them."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import apexfx
from apexfx._torch import fake_process_group
from apexfx.buckets.plan import GradientSpec
from apexfx.config import BucketConfig
from apexfx.parallel import convert_syncbn_model
from apexfx.testing import tolerance
from apexfx.tools.simulate.devices import DEVICES, Costs, Device, LinearCost
from apexfx.tools.simulate.models import MODELS, load
from apexfx.tools.simulate.network import PRESETS, Level, Link, Network, flat
from apexfx.tools.simulate.profile import Profile, Segment, analytic, combine, measured
from apexfx.tools.simulate.simulator import best_bucket, plan_for, simulate
from tests.tables import table

CPU = torch.device("cpu")
CLOSE = {"rel": tolerance(torch.float64)["rtol"], "abs": tolerance(torch.float64)["atol"]}
NETWORK = Network((Level(Link(0.0, 4.0)),))  # two ranks: n bytes take n / 4 seconds
DEVICE = DEVICES["a100"]


def profile_of(seconds, *, forward=1.0, optimizer=0.0, numel=4, sync_bytes=0):
    """Backward segments of so many seconds, each ending in a gradient of `numel` elements (4 s of network for 16 bytes)."""
    specs = tuple(GradientSpec(f"p{i}", (numel,), torch.float32, torch.float32, CPU) for i in range(len(seconds)))
    segments = tuple(Segment(f"p{i}", float(s), (f"p{i}",), sync_bytes) for i, s in enumerate(seconds))
    return Profile((Segment("f", forward),), segments, optimizer, specs)


@pytest.fixture
def world_of():
    """Make this process one of so many ranks, of which the others are not there."""
    with contextlib.ExitStack() as stack:
        yield lambda num_ranks: stack.enter_context(fake_process_group(num_ranks))


def test_a_step_by_hand():
    made = simulate(profile_of([2, 5, 1], optimizer=0.5), NETWORK, 2, BucketConfig(message_size=4))
    # Forward 0-1. p0 is ready at 3 and sent 3-7; p1 at 8, 8-12; p2 at 9, 12-16. The optimizer runs 16-16.5.
    assert [(b.started, b.begin, b.end) for b in made.buckets] == [(3, 3, 7), (8, 8, 12), (9, 12, 16)]
    assert (made.step_s, made.compute_s, made.communication_s, made.exposed_s) == (16.5, 9.5, 12.0, 7.0)
    assert made.efficiency == 9.5 / 16.5
    assert simulate(profile_of([2, 5, 1]), NETWORK, 2, BucketConfig(delay_allreduce=True)).buckets[0].begin == 9


def test_copies_and_hooks_take_their_time():
    costs = Costs(gradient_s=0.25, fill=LinearCost(1.0, 0.5, 0.125), write=LinearCost(0.0, 0.0, 0.25), per_step_s=3.0)
    made = simulate(profile_of([2, 5]), NETWORK, 2, BucketConfig(message_size=8), costs=costs)
    [bucket] = made.plan.buckets
    fill, write = 1.0 + 2 * 0.5 + 0.125 * bucket.total_bytes, 0.25 * bucket.total_bytes
    assert made.bookkeeping_s == 2 * 0.25 + fill + 3.0 + write
    assert made.exposed_s == made.communication_s - 3.0, "the executor's own work hides some"


def test_statistics_are_waited_for_on_the_spot():
    local = simulate(profile_of([2, 5]), NETWORK, 2, BucketConfig(message_size=100))
    made = simulate(profile_of([2, 5], sync_bytes=8), NETWORK, 2, BucketConfig(message_size=100))
    assert (local.sync_tax_s, made.sync_tax_s) == (0.0, 4.0)
    assert made.step_s == local.step_s + 4.0


def test_the_best_bucket_is_the_best_of_all_sizes():
    profile = profile_of([1] * 12, numel=2**16)
    network = Network((Level(Link(0.05, 2e6)),))
    choices = best_bucket(profile, network, 2)
    assert [c.step_s for c in choices] == sorted(c.step_s for c in choices)
    assert {c.num_buckets for c in choices} >= {1, 2, 3, 4, 6, 12}
    for choice in choices:
        made = simulate(profile, network, 2, BucketConfig(message_size=choice.message_size))
        assert (made.step_s, len(made.buckets)) == (choice.step_s, choice.num_buckets)
    slow = Network((Level(Link(5.0, 2e6)),))
    assert best_bucket(profile, slow, 2)[0].num_buckets == 1, "where latency is all, one message"


PROFILES = st.builds(profile_of, st.lists(st.floats(0, 5), min_size=1, max_size=8), forward=st.floats(0, 5),
                     optimizer=st.floats(0, 2), numel=st.integers(1, 50), sync_bytes=st.sampled_from((0, 8)))
COSTS = st.builds(Costs, st.floats(0, 1), st.builds(LinearCost, st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.01)),
                  st.builds(LinearCost, st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.01)), st.floats(0, 1), st.floats(0.2, 1),
                  st.floats(0.2, 1))


@settings(max_examples=60, deadline=None)
@given(PROFILES, COSTS, st.integers(1, 4096), st.integers(1, 400))
@example(profile_of([0, 0], forward=0, optimizer=0, numel=1, sync_bytes=8),
         Costs(0.0, LinearCost(0.0, 1.0, 0.0), LinearCost(0.0, 0.0, 0.0), 0.0, 0.25, 0.21875), 2, 1)
def test_every_prediction_adds_up(profile, costs, num_ranks, message_size):
    config = BucketConfig(message_size=message_size)
    made = simulate(profile, PRESETS["ethernet-25g"], num_ranks, config, costs=costs)
    assert made.exposed_s >= -1e-9
    # Where computing and communicating slow one another down, what delays the one may spare the other more.
    assert made.sync_tax_s >= -1e-9 - made.communication_s
    undisturbed = dataclasses.replace(costs, compute_rate=1.0, network_rate=1.0)
    assert simulate(profile, PRESETS["ethernet-25g"], num_ranks, config, costs=undisturbed).sync_tax_s >= -1e-9
    assert made.step_s == pytest.approx(made.compute_s + made.bookkeeping_s + made.exposed_s, **CLOSE)
    begins = [bucket.begin for bucket in made.buckets]
    assert begins == sorted(begins)
    free = Network((Level(Link(0.0, float("inf"))),))
    alone = simulate(profile, free, num_ranks, config, costs=dataclasses.replace(costs, compute_rate=1.0))
    assert alone.exposed_s == pytest.approx(0.0, **CLOSE)
    bare = simulate(profile, free, num_ranks, config)
    assert bare.step_s == pytest.approx(profile.compute_s, **CLOSE)


def test_a_hierarchy_reduces_inside_the_node_and_sends_one_share_between_nodes():
    inner, outer = Link(1e-6, 100e9), Link(5e-6, 10e9)
    network = Network((Level(inner, 4), Level(outer)), base_s=7e-6)
    inside, between = 6 * (1e-6 + 2e6 / 100e9), 4 * (5e-6 + 2e6 / 3 / 10e9)  # rings of four, then of three
    assert network.allreduce_seconds(8e6, 12) == pytest.approx(7e-6 + inside + between)
    assert network.allreduce_seconds(8e6, 4) == pytest.approx(7e-6 + inside)
    assert network.gather_seconds(8e6, 12) == pytest.approx(7e-6 + (inside + between) / 2) and network.gather_seconds(8e6, 1) == 0
    of_six_levels = 2 * (6 * 3e-6 + 64 / 2e9)  # a tree
    assert Network((Level(Link(3e-6, 2e9)),)).allreduce_seconds(64, 64) == pytest.approx(of_six_levels)


def test_the_ranks_of_a_node_share_its_link():
    inner, outer = flat(5e-6, 80e9, ranks_per_node=8).levels
    assert (inner.ranks, inner.link, outer.link) == (8, PRESETS["nvlink4+ib400"].levels[0].link, Link(5e-6, 10e9))
    assert flat(5e-6, 80e9) == Network((Level(Link(5e-6, 80e9)),))


# ---- against the library in a fake process group ----------------------------------------------------------------------


@table(1, "name", ["mlp", "cnn"])
def test_the_buckets_are_those_of_the_transform_for_4096_ranks(world_of, name):
    world_of(4096)
    model, inputs = load(name, 2)
    config = BucketConfig(message_size=30_000)
    graph = apexfx.transform(model, opt_level="O0", inner="eager", ddp=config)
    graph.capture(inputs)
    made = plan_for(analytic(load(name, 2, device="meta")[0], inputs, DEVICE), config, 4096)
    shown = graph.report.buckets()
    assert made.total_bytes == shown.total_bytes and len(made.buckets) == len(shown.buckets) > 1
    assert [sorted(bucket.parameters) for bucket in made.buckets] == [sorted(bucket.parameters) for bucket in shown.buckets]
    assert {(b.predivide, b.postdivide) for b in made.buckets} == {(b.predivide, b.postdivide) for b in shown.buckets}


class Collectives(TorchDispatchMode):
    """Notes the bytes of every functional allreduce."""

    def __init__(self):
        super().__init__()
        self.num_bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.num_bytes.append(args[0].numel() * args[0].itemsize)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["cnn", pytest.param("resnet50", marks=pytest.mark.long)])
def test_statistics_have_the_bytes_and_the_order_that_the_library_communicates(world_of, name):
    world_of(512)
    model, inputs = load(name, 2, device="meta")
    profile = analytic(load(name, 2, device="meta")[0], inputs, DEVICE, sync_bn=True)
    model = convert_syncbn_model(model)
    with Collectives() as forward:
        loss = model(inputs).square().mean()
    with Collectives() as backward:
        loss.backward()
    assert [segment.sync_bytes for segment in profile.forward if segment.sync_bytes] == forward.num_bytes
    assert [segment.sync_bytes for segment in profile.backward if segment.sync_bytes] == backward.num_bytes
    assert len(forward.num_bytes) == sum("BatchNorm" in type(m).__name__ for m in model.modules())


# ---- profiles ---------------------------------------------------------------------------------------------------------------


def test_an_analytic_profile_prices_products_by_flops_and_the_rest_by_bytes():
    device = Device("one", {torch.float32: 1e12}, 1e12, 0.0, 1.0, 1.0)
    model, x = nn.Linear(1000, 1000, bias=False), torch.empty(1000, 1000)
    profile = analytic(model, x, device, optimizer_passes=3)
    product, reading = 2e9 / 1e12, 12e6 / 1e12
    assert product > reading
    assert profile.optimizer_s == 3 * 4e6 / 1e12
    assert [segment.name for segment in profile.backward] == ["weight", "rest"]
    assert product < profile.forward[0].seconds < 1.02 * product
    slow = dataclasses.replace(device, flops_per_s={torch.float32: 1e11})
    assert analytic(nn.Linear(1000, 1000, bias=False), x, slow).forward[0].seconds > 9 * product


@table(3, "name", MODELS)
def test_every_model_has_a_profile_with_all_of_its_gradients(name):
    model, inputs = load(name, 1, device="meta")
    names = {n for n, _ in model.named_parameters()}
    profile = analytic(model, inputs, DEVICE, dtype=torch.bfloat16)
    ready = [n for segment in profile.backward for n in segment.gradients]
    assert ready == [spec.name for spec in profile.gradients] and set(ready) == names and len(ready) == len(names)
    assert profile.compute_s > 0 and profile.num_bytes == 2 * sum(spec.numel for spec in profile.gradients)


def test_a_measured_profile_has_the_same_segments_as_the_analytic_one():
    model, inputs = load("cnn", 2)
    timed = measured(model, inputs, steps=2, warmup=1, sync_bn=True)
    priced = analytic(load("cnn", 2, device="meta")[0], inputs, DEVICE, sync_bn=True)
    for name in ("forward", "backward"):
        assert [(p.name, p.gradients, p.sync_bytes) for p in getattr(timed, name)] == \
            [(p.name, p.gradients, p.sync_bytes) for p in getattr(priced, name)]
    assert timed.compute_s > 0 and all(segment.seconds >= 0 for segment in (*timed.forward, *timed.backward))
    assert all(not handles for m in model.modules() for handles in (m._forward_hooks, m._forward_pre_hooks))


def test_profiles_are_combined_by_the_median_of_their_stamps():
    samples = [profile_of(seconds) for seconds in ([1, 5], [2, 1], [3, 3])]
    made = combine(samples, "three")
    assert [segment.seconds for segment in made.backward] == [2.0, 4.0], "ends at 2 and at 6, the medians of 1 2 3 and 6 3 6"


def test_a_model_that_reads_values_is_sent_to_measuring():
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    with pytest.raises(ValueError, match="Reads cannot be run on shapes alone .* measure it instead"):
        analytic(Reads(4, 4), torch.randn(2, 4), DEVICE)
    assert measured(Reads(4, 4), torch.randn(2, 4), steps=1, warmup=1).compute_s > 0


def test_a_model_without_gradients_and_a_sparse_one_are_refused():
    with pytest.raises(ValueError, match="no output of Linear takes a gradient"):
        analytic(nn.Linear(4, 4).requires_grad_(False), torch.randn(2, 4), DEVICE)
    with pytest.raises(ValueError, match="'weight' is torch.sparse_coo"):
        measured(nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2]), steps=1)
