"""Predicted steps that are sharded: the same collectives, of as many bytes and in the same order, as in the graph of the step."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import apexfx
from apexfx.buckets.bucket import GradientSpec
from apexfx.config import BucketConfig
from apexfx.tools.simulate.devices import DEVICES
from apexfx.tools.simulate.models import MODELS, load
from apexfx.tools.simulate.network import PRESETS, Level, Link, Network, ring
from apexfx.tools.simulate.profile import Group, Profile, Segment, analytic, groups_of
from apexfx.tools.simulate.sharded import sharded_program
from apexfx.tools.simulate.simulator import Costs, plan_for, simulate
from apexfx.tools.simulate.timeline import Start, Wait
from tests.distributed.collectives import communicated
from tests.fake_group import fake_process_group
from tests.tables import table

CPU = torch.device("cpu")
_CONFIG = BucketConfig(message_size=30_000)


def real(name, shard, num_ranks, muon, **options):
    """Return what the graph of a step communicates, in order: (what, bytes), and ("wait", bytes) where it is waited for."""
    model, inputs = load(name, 2)
    with fake_process_group(num_ranks):
        if shard == "model":
            mesh = {"mesh": init_device_mesh("cpu", (num_ranks,))}
            for block in [model.get_submodule(group.name) for group in groups_of(model, MODELS[name].blocks) if group.name]:
                fully_shard(block, **mesh)
            fully_shard(model, **mesh)
        else:
            options |= {"ddp": _CONFIG, "shard": "optimizer"}
        ours, others = ([p for p in model.parameters() if (muon and p.ndim == 2) is wanted] for wanted in (True, False))
        optimizers = [*([torch.optim.Muon(ours)] if ours else []), torch.optim.SGD(others, 0.1)]
        step = apexfx.train_step(model, lambda out: out.square().mean(), optimizers, opt_level="O0", inner="eager", **options)
        step(inputs)
        return list(communicated(step.report.code(stage="step"), num_ranks))


def predicted(name, shard, num_ranks, clips, muon):
    model, inputs = load(name, 2, device="meta")
    profile = analytic(model, inputs, DEVICES["a100"], muon=muon, blocks=MODELS[name].blocks if shard == "model" else None)
    plan = None if shard == "model" else plan_for(profile, _CONFIG, num_ranks)
    started = {}
    for task in sharded_program(profile, PRESETS["ethernet-10g"], num_ranks, plan, Costs(), clips):
        if isinstance(task, Start):
            started[task.name] = task.num_bytes
            yield task.kind, task.num_bytes
        elif isinstance(task, Wait):
            yield "wait", started[task.name]


@table(0, "name, shard, clips, muon", [
    ("mlp", "model", False, False), ("cnn", "optimizer", False, False), ("transformer", "model", True, False),
    ("mlp", "optimizer", True, False), ("cnn", "model", True, False), ("cnn", "optimizer", True, False),
    ("mlp", "optimizer", False, True), ("mlp", "optimizer", True, True), ("transformer", "model", False, True)])
def test_what_is_communicated_is_what_the_graph_communicates(name, shard, clips, muon):
    options = {"max_grad_norm": 1.0} if clips else {}
    assert list(predicted(name, shard, 4, clips, muon)) == real(name, shard, 4, muon, **options)


# ---- by hand: one byte takes 1/4 s, of which a gather, and a sum, of two ranks is the half ------------------------------------

NETWORK = Network((Level(Link(0.0, 2.0)),))


def profile_of(reads_again=()):
    """Two blocks of 4 elements, read after 1 s of forward each; 3 s of backward each; 4 s of update on one rank."""
    specs = [GradientSpec(name, (4,), torch.float32, torch.float32, CPU) for name in "ab"]
    forward = (Segment("x", 1.0, reads=0), Segment("x", 1.0, reads=1), Segment("rest", 1.0))
    backward = [Segment("again", 0.0, reads=number) for number in reads_again]
    backward += [Segment(name, 3.0, (name,)) for name in "ba"]
    return Profile(forward, tuple(backward), 4.0, tuple(reversed(specs)), "", tuple(Group(s.name, (s,)) for s in specs))


def spans(made):
    return {event.name: (event.begin, event.end) for event in (*made.timeline.events,) if event.kind != "wait"}


def test_a_model_under_fully_shard_by_hand():
    made = simulate(profile_of(reads_again=(1, 0)), NETWORK, 2, shard="model")
    found = spans(made)
    # A gather of 16 bytes takes 4 s. The first is exposed, the next starts behind it; b is whole in the backward, a is not.
    assert (found["gather 0"], found["gather 1"], found["gather 0 again"]) == ((1.0, 5.0), (5.0, 9.0), (10.0, 14.0))
    # b's gradient is there at 17 and its sum at 21, a's at 20 and 25, when b is updated behind the start of that.
    assert (found["group 1"], found["group 0"]) == ((17.0, 21.0), (21.0, 25.0))
    assert (found["update 1"], found["update 0"], made.step_s) == ((21.0, 22.0), (25.0, 26.0), 26.0)
    assert simulate(profile_of(), NETWORK, 2, shard="model").gathers[-1].name == "gather 1"


def test_a_sharded_update_by_hand():
    config = BucketConfig(message_size=4)
    made = simulate(profile_of(), NETWORK, 2, config, shard="optimizer")
    found = spans(made)
    # Halfway through a's backward, at 7.5, b's sum is waited for, so that a's is started at 12.5.
    assert (found["bucket 0"], found["update 0"], found["gather 0"]) == ((6.0, 10.0), (10.0, 11.0), (11.0, 15.0))
    assert (found["bucket 1"], found["update 1"], found["gather 1"]) == ((15.0, 19.0), (19.0, 20.0), (20.0, 24.0))
    assert made.step_s == 24.0
    clipped = simulate(profile_of(), NETWORK, 2, config, shard="optimizer", clips=True)
    assert spans(clipped)["norm"][0] == 14.0 and [gather.begin for gather in clipped.gathers] == [24.0, 28.0]


def test_half_of_the_rings_gather():
    for num_ranks in (2, 8, 20):
        network = PRESETS["nvlink4+ib400"]
        inner, outer = (level.link for level in network.levels)
        half = ring(inner, 8e6, min(num_ranks, 8)) / 2 + (ring(outer, 1e6, 3) / 2 if num_ranks > 8 else 0)
        assert network.gather_seconds(8e6, num_ranks) == pytest.approx(network.base_s + half)
    assert network.gather_seconds(8e6, 1) == 0
