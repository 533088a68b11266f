"""gather_shards and schedule_shards: which gathers and sums a step of a sharded model makes, and in which order."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import apexfx
from apexfx._torch import fake_process_group
from apexfx.passes.gather_shards import GatherShards
from apexfx.passes.schedule_shards import ScheduleShards

OPS = {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "sum", "all_reduce": "norm", "addmm": "forward",
       "mm": "backward", "sgd_": "update"}


class Net(nn.Module):
    """Blocks of 6, 7, ... channels, so that a size says which it is."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6 + i, 7 + i) for i in range(blocks))
        self.head = nn.Linear(6 + blocks, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def step_of(blocks=3, reshard=None, policy=None, **options):
    model, shared = Net(blocks), {"mesh": init_device_mesh("cpu", (4,)), "mp_policy": policy or MixedPrecisionPolicy()}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, **shared)
    fully_shard(model, **shared)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1),
                             **{"opt_level": "O0", "inner": "eager", **options})
    step(torch.randn(2, 6), torch.tensor([0, 1]))
    return step


def events(step):
    """Return what communicates and computes in the step, in order; a group goes by the rows of a rank that it gathers or sums."""
    found, started = [], {}
    for line in step.report.code(stage="step").splitlines():
        if match := re.match(r'\s+(\w+)(?:: "\w+\[([\d, ]*)\]")? = torch\.ops\.\w+\.(\w+)\.\w+\((\w*)', line):
            name, shape, op, first = match.groups()
            if op in ("all_gather_into_tensor", "reduce_scatter_tensor"):
                started[name] = f"{OPS[op]} {int(shape) // (4 if op.startswith('all') else 1)}"
                found.append(started[name])
            elif op == "wait_tensor" and first in started:
                found.append(f"{started[first]} is there")
            elif op in OPS:
                found.append(OPS[op])
    return ", ".join(found)


FORWARD = ("gather 14, gather 14 is there, gather 16, forward, gather 16 is there, gather 27, forward, gather 27 is there, "
           "gather 10, forward, gather 10 is there, forward, ")


@pytest.mark.long
def test_the_next_group_is_gathered_while_one_computes():
    with fake_process_group(4):
        assert events(step_of(max_grad_norm=1.0)) == FORWARD + (
            "gather 27, backward, backward, sum 10, gather 27 is there, gather 16, backward, backward, sum 27, sum 10 is there, "
            "gather 16 is there, backward, backward, sum 16, sum 27 is there, backward, sum 14, sum 16 is there, "
            "sum 14 is there, norm, update")


@pytest.mark.long
def test_what_is_kept_is_not_gathered_again_and_updates_follow_their_sums():
    with fake_process_group(4):
        assert events(step_of(reshard=False)) == FORWARD + (
            "backward, backward, sum 10, backward, backward, sum 27, sum 10 is there, update, backward, backward, sum 16, "
            "sum 27 is there, update, backward, sum 14, sum 16 is there, update, sum 14 is there, update")
        assert events(step_of(blocks=1, max_grad_norm=1.0)).count("gather 14 is there") == 1  # nothing is gathered in between


def test_the_report_says_where_the_plan_is():
    with fake_process_group(4), pytest.raises(RuntimeError, match=r"report.diff\('schedule_shards'\)"):
        step_of(blocks=1).report.buckets()


@pytest.mark.long
def test_a_second_run_changes_nothing(monkeypatch):
    for kind in (GatherShards, ScheduleShards):
        def twice(self, gm, call=kind.call):
            result = call(self, gm)
            assert result.modified and not call(self, gm).modified
            return result

        monkeypatch.setattr(kind, "call", twice)
    with fake_process_group(4):
        step_of()


@pytest.mark.long
def test_gradients_are_summed_in_the_dtype_that_fully_shard_was_told():
    with fake_process_group(4):
        code = step_of(blocks=1, policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)).report.code(stage="step")
        dtypes = [set(re.findall(rf"{op}_tensor\w*: .(\w+)\[", code)) for op in ("all_gather_into", "reduce_scatter")]
        assert dtypes == [{"f32"}, {"bf16"}]
        code = step_of(blocks=1, policy=MixedPrecisionPolicy(reduce_dtype=torch.float64)).report.code(stage="step")
        assert code.count("'sum', 4") == 2 and code.count("div.Tensor") == 4  # by 2 before and after it, as FSDP2 does


def test_a_step_that_is_not_sharded_has_neither_pass():
    model = Net()
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters()), opt_level="O0", inner="eager")
    step(torch.randn(2, 6), torch.tensor([0, 1]))
    assert "shards" not in str(step.report)


@pytest.mark.long
def test_inductor_keeps_the_order():
    with fake_process_group(4):
        code = events(step_of(max_grad_norm=1.0, inner="inductor"))
        assert code.count("gather 27 is there") == 2 and code.startswith("gather 14, gather 14 is there, gather 16, forward")
