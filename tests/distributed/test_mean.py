"""apexfx.Mean over real ranks: however words are spread over ranks and calls, the update is that of one batch with all."""

from __future__ import annotations

import random

import pytest
import torch

import apexfx
from tests.distributed.launch import on_ranks, run_ranks
from tests.tables import table
from tests.train_step.test_mean import batch, branching, make, net, objective, reference

OPTIONS = {"alone": {}, "clipped": {"max_grad_norm": 0.05}, "safe": {"safeguard": True}, "in pieces": {"fallback": "transform"},
           "sums": {"ddp": apexfx.BucketConfig(gradient_average=False)},
           "float32 buckets": {"ddp": apexfx.BucketConfig(allreduce_always_fp32=True, gradient_predivide_factor=2.0)}}


def train(rank, world_size, accumulate, dtype, tolerance, options):
    """Update three times, and by a flush; compare with a step of one process over all words."""
    expected, model, choices = net(dtype), net(dtype), random.Random(accumulate)
    step = make(model, branching if "fallback" in options else objective, accumulate=accumulate, **{"ddp": True, **options})
    theirs = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.9)
    for number in range(4):
        last = accumulate if number < 3 else max(accumulate - 1, 1)
        batches = [[batch(100 * number + 10 * place + each, choices.choice((0, 1, 4, 10)) if number else 0)
                    for place in range(last)] for each in range(world_size)]
        for each in batches[rank]:
            step(*each)
        if last < accumulate:
            step.flush()
        if any((labels >= 0).any() for row in batches for _, labels in row):
            mean = reference(expected, sum(batches, []), theirs, options.get("max_grad_norm"))
            torch.testing.assert_close(step.mean_loss, mean.double(), rtol=tolerance, atol=0)
        else:
            assert step.mean_loss.isnan() and not step.updated
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=tolerance, atol=tolerance)


@table(1, "row", [(3, torch.float64, 1e-12, OPTIONS["alone"]), (1, torch.float32, 1e-6, OPTIONS["float32 buckets"])])
def test_words_of_all_ranks_and_calls_are_one_batch(row):
    run_ranks(train, 2, *row)


@pytest.mark.long
@on_ranks(2, 3)
def test_the_same_with_every_option(rank, world_size):
    for options in OPTIONS.values():
        for accumulate in range(1, 5):
            train(rank, world_size, accumulate, torch.float64, 1e-12, options)
        train(rank, world_size, 2, torch.float32, 1e-6, options)


@pytest.mark.long
@on_ranks(2)
def test_counts_travel_before_the_forward_and_totals_after_it(rank, world_size):
    """Two collectives of eight bytes besides the buckets; nothing waits for the counts before the backward."""
    step = make(net(torch.float32), ddp=True)
    step(*batch(rank, 4))
    code = step.report.code(stage="step").split("\n")
    starts = [place for place, line in enumerate(code) if "= torch.ops._c10d_functional.all_reduce.default(" in line]
    forward = next(place for place, line in enumerate(code) if "= torch.ops.aten.tanh" in line)
    assert len(starts) == 2 and starts[0] < forward < starts[1]


@pytest.mark.long
@on_ranks(2)
def test_ranks_of_other_kinds_of_losses_are_told(rank, world_size):
    step = make(net(), objective if rank else lambda *args: objective(*args).value, ddp=True)
    with pytest.raises(apexfx.RankMismatchError, match="all_reduce"):
        step(*batch(rank, 4))
