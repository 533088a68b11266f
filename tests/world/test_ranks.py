"""Programs of the world on two ranks, each with data of its own: as a loop in eager that averages each gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import on_ranks
from tests.world import public  # noqa: F401
from tests.world.script import STEPS, Run


def averaged(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def train(name, entry, rank, **options):
    run = Run(name, entry, "O0", **options)
    batch = run.script.batch

    def own_batch(step, carried):
        torch.manual_seed(100 + 2 * step + rank)
        return batch(step, carried)

    run.script.batch = own_batch
    if entry == "eager":
        for update in run.script.updates:
            for group in update.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(averaged)
    return [float(loss) for number in range(STEPS) for loss in run.step(number)], run.moved()


@pytest.mark.long
@on_ranks(2)
def test_a_program_trains_on_ranks_as_a_loop_that_averages(rank, world_size):
    for name, entry in (("selective_state_space", "train_step"), ("trajectories", "transform")):
        losses, moved = train(name, entry, rank, ddp=True, inner="eager")
        expected, expected_moved = train(name, "eager", rank)
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(moved, expected_moved, rtol=1e-4, atol=1e-6)
