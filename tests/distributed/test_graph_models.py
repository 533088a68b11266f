"""Two data-parallel models on one process group: a skipped backward of one meets a backward of the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import apexfx
from apexfx.distributed.step_check import ALWAYS
from apexfx.parallel import RankFailureError
from tests.distributed.faults import Net, train
from tests.distributed.launch import on_ranks


def transformed(model):
    return apexfx.transform(model, opt_level="O0", inner="eager", ddp=apexfx.BucketConfig(timeout_s=15))


def check_skipped(generator, critic, rank):
    """Rank 1 skips a backward of the generator, and all are told; the step after works again."""
    x = torch.full((2, 3), rank + 1.0)
    losses = generator(x).sum(), critic(x).sum()
    model = r"model transform/\d+ \(a\.weight, a\.bias, b\.weight and 1 more\), \d+ forwards so far"
    said = f"different models, .*\n  rank 0: {model}\n  rank 1: {model}\nA rank skipped a backward, or runs them"
    with pytest.raises(RankFailureError, match=said):
        losses[rank].backward()
    for _ in range(2):
        train_both(generator, critic, rank)


def train_both(generator, critic, rank):
    for model in (generator, critic):
        train(model, rank)
        assert (model.b.bias.grad == 2).all()


@on_ranks(2)
def test_a_skipped_backward_of_one_of_two_models(rank, world_size):
    for width in (5, 4):  # other buckets, which gloo would refuse, and the same, which it would add up
        generator, critic = transformed(Net()), transformed(Net(width))
        for _ in range(2):
            train_both(generator, critic, rank)
        check_skipped(generator, critic, rank)


@on_ranks(2)
def test_a_later_skipped_backward_of_one_of_two_models(rank, world_size):
    generator, critic = transformed(Net()), transformed(Net(5))
    for _ in range(ALWAYS + 3):
        train_both(generator, critic, rank)
        train(critic, rank, ALWAYS // 2)  # still compared before its graph runs
    check_skipped(generator, critic, rank)




class TwoHeads(nn.Module):
    """Two layers of equal shape, of which a forward runs the one it is told."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x, head):
        return (self.a if head == "a" else self.b)(x)


@on_ranks(2)
def test_ranks_that_run_different_graphs_of_one_model(rank, world_size):
    model = transformed(TwoHeads())

    def train_head(head):
        model.zero_grad()
        model(torch.full((2, 3), rank + 1.0), head).sum().backward()

    for head in "ab" * ALWAYS:
        train_head(head)
    with pytest.raises(RankFailureError, match=r"different graphs of one.*\n  rank 0: .*\(a\.weight.*\n  rank 1: .*\(b\.weight"):
        train_head("ab"[rank])
    train_head("a")
    assert (model.a.bias.grad == 2).all()
