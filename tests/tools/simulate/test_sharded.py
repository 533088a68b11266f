"""Predicted steps that are sharded: what their graphs communicate, and the profile's seconds among their ops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apexfx._torch import fake_process_group
from apexfx.config import BucketConfig
from apexfx.tools.simulate.devices import DEVICES, Costs, LinearCost
from apexfx.tools.simulate.models import load
from apexfx.tools.simulate.network import PRESETS
from apexfx.tools.simulate.profile import analytic
from apexfx.tools.simulate.sharded import TracedStep, program, traced
from apexfx.tools.simulate.simulator import simulate
from apexfx.tools.simulate.timeline import Start, Wait, Work
from tests.tables import table

DEVICE = DEVICES["a100"]
COSTS = Costs(fill=LinearCost(fixed_s=1e-3, tensor_s=1e-4))


def two_layers():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False)), torch.empty(2, 8)


def tasks_of(model, inputs, *, optimizer="sgd", sync_bn=False, **options):
    """Return the tasks of one of four ranks, and the profile of the model."""
    with fake_process_group(4):
        step = traced(model, inputs, optimizer=optimizer, sync_bn=sync_bn, **options)
    profile = analytic(model, inputs, DEVICE, sync_bn=sync_bn, muon=optimizer == "muon")
    return program(step, profile, DEVICE, PRESETS["ethernet-10g"], COSTS), profile


def communicated(tasks):
    return [("wait " if isinstance(task, Wait) else "") + task.name for task in tasks if not isinstance(task, Work)]


@pytest.mark.long
def test_a_model_under_fully_shard():
    tasks, _ = tasks_of(*two_layers(), shard="model", blocks="*")
    # The second is gathered while the first computes, and kept; the first is not read again, as the input has no gradient.
    assert communicated(tasks) == [
        "gather 0", "wait gather 0", "gather 1", "wait gather 1",
        "bucket 0", "bucket 1", "wait bucket 0", "wait bucket 1"]
    assert [(task.kind, task.num_bytes) for task in tasks if isinstance(task, Start)] == [
        ("all_gather_into_tensor", 256)] * 2 + [("reduce_scatter_tensor", 256)] * 2
    tasks, _ = tasks_of(*load("mlp", 2, device="meta"), shard="model", blocks="*", dtype=torch.bfloat16, clips=True)
    names = communicated(tasks)
    assert names.index("gather 1 again") > names.index("wait gather 8") and names[-2:] == ["exchange 0", "wait exchange 0"]
    assert {task.num_bytes for task in tasks if isinstance(task, Start) and task.name.startswith("gather 1")} == {2 * 512 * 513}


@pytest.mark.long
def test_an_update_that_is_shared():
    config = BucketConfig(message_size=64)
    tasks, _ = tasks_of(*two_layers(), shard="optimizer", config=config)
    assert communicated(tasks) == [
        "bucket 0", "wait bucket 0", "gather 0", "bucket 1", "wait bucket 1", "gather 1", "wait gather 0", "wait gather 1"]
    clipped, _ = tasks_of(*two_layers(), shard="optimizer", config=config, clips=True)
    assert communicated(clipped) == [
        "bucket 0", "bucket 1", "wait bucket 0", "wait bucket 1", "exchange 0", "wait exchange 0",
        "gather 0", "gather 1", "wait gather 0", "wait gather 1"]


@table(0, "name, options", [
    ("mlp", {"shard": "model", "blocks": "*"}), ("cnn", {"shard": "optimizer", "sync_bn": True}),
    ("mlp", {"shard": "optimizer", "optimizer": "muon", "clips": True})])
def test_the_seconds_are_those_of_the_profile_and_of_copies(name, options):
    tasks, profile = tasks_of(*load(name, 2, device="meta"), **options)
    works = [task for task in tasks if isinstance(task, Work)]
    forward, backward, optimizer = (sum(task.seconds for task in works if task.kind == kind)
                                    for kind in ("forward", "backward", "optimizer"))
    assert forward == pytest.approx(sum(segment.seconds for segment in profile.forward))
    assert backward == pytest.approx(sum(segment.seconds for segment in profile.backward))
    held = profile.optimizer_s / 4  # of rows; a rank has more of a parameter that has no multiple of four
    assert held <= optimizer <= 1.1 * held + profile.matrices_s
    num_sums = sum(task.name.startswith("bucket") for task in tasks if isinstance(task, Start))
    assert sum(task.seconds for task in works if task.kind == "fill") >= num_sums * 1e-3 + len(profile.gradients) * 1e-4
    statistics = [task for task in tasks if isinstance(task, Start) and task.name.startswith("statistics")]
    assert [task.num_bytes for task in statistics] == [
        segment.sync_bytes for segment in (*profile.forward, *profile.backward) if segment.sync_bytes]
    assert all(task.channel == 1 for task in statistics)


def test_a_step_of_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="a step of 2 ranks was given for 4; trace one for those"):
        simulate(analytic(*two_layers(), DEVICE), PRESETS["ethernet-10g"], 4, step=TracedStep([], 2, "model"), device=DEVICE)
