"""Copies and pickles of a data-parallel model on real gloo ranks: those that one rank makes alone shift no other's."""

from __future__ import annotations

import copy
import pickle

import torch

import apexfx
from tests.distributed.launch import run_ranks
from tests.distributed.test_transform import batches, check_trains, model_and_reference
from tests.tables import table


def evaluate(model, x):
    training = model.training
    with torch.no_grad():
        assert model.eval()(x).isfinite().all()
    model.train(training)


def again(model):
    return pickle.loads(pickle.dumps(model))


def one_rank_makes_more(rank, world_size, make):
    model, reference = model_and_reference(rank, ddp=apexfx.BucketConfig(message_size=200, timeout_s=10))
    [x] = batches(rank, 1)
    if rank == 0:
        evaluate(make(model), x)
    first = make(model)
    evaluate(first, x)
    if rank == 1:
        evaluate(make(first), x)
        make(model)
    check_trains(first, reference, rank, world_size)
    check_trains(make(first), reference, rank, world_size)
    if rank == 0:
        make(model)
    second, third = make(model), make(model)
    check_trains(third, reference, rank, world_size)
    check_trains(model, reference, rank, world_size)
    check_trains(second, reference, rank, world_size)


def one_rank_makes_more_with_batch_norm(rank, world_size, make):
    torch.manual_seed(rank)
    norm = torch.nn.BatchNorm1d(4)
    model = apexfx.transform(torch.nn.Sequential(torch.nn.Linear(8, 4), norm), opt_level="O0", sync_bn=True, inner="eager")
    [x] = batches(rank, 1)
    if rank == 0:
        evaluate(make(model), x)
    made = make(model)
    made(x).sum().backward()
    assert made[1].running_mean.abs().sum() > 0


@table(0, "case, make", [(one_rank_makes_more, copy.deepcopy), (one_rank_makes_more_with_batch_norm, again)])
def test_copies_that_one_rank_makes_alone(case, make):
    run_ranks(case, 2, make)
