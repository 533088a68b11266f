"""Ranks that use different outputs: as torch DDP with find_unused_parameters=True."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from torch import nn

import apexfx
from tests.distributed.launch import on_ranks
from tests.small_models import take_step
from tests.unused_output_models import (
    MODELS,
    Broken,
    BrokenView,
    Rows,
    Through,
    TwoHeads,
    Written,
    broken,
    objective,
    optimizer_of,
)

SMALL = apexfx.BucketConfig(message_size=100, timeout_s=20)
# The outputs that each of two ranks uses, step by step.
STEPS = (((0,), (0,)), ((0,), (1,)), ((1,), (1,)), ((0, 1), (0,)), ((1,), (0, 1)))


class Loss(nn.Module):
    """torch DDP wants to know of every output that a loss uses it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, used):
        return objective(self.model, x, used)


def _twins(cls, factor):
    """Return a model and its twin under torch DDP; `factor`, another on each rank, is not to matter on any but the first."""
    model, other = cls(), cls()
    for net in (model, other):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(factor)
    return model, nn.parallel.DistributedDataParallel(Loss(other), find_unused_parameters=True)


def _assert_equal(model, optimizer, wrapped, theirs):
    ours, other = dict(model.named_parameters()), dict(wrapped.module.model.named_parameters())
    assert [name for name, p in ours.items() if p.grad is not None] == [name for name, p in other.items() if p.grad is not None]
    torch.testing.assert_close([p.grad for p in ours.values()], [p.grad for p in other.values()])
    torch.testing.assert_close(ours, other)
    for name in ours:
        got, want = optimizer.state[ours[name]], theirs.state[other[name]]
        assert not want and not (got and got["step"]) or got.keys() == want.keys()
        torch.testing.assert_close([got[key] for key in want], [*want.values()])


@pytest.mark.long
@on_ranks(2)
def test_transform_averages_what_any_rank_uses(rank, world_size):
    for cls in (TwoHeads, Broken, Written):
        source, wrapped = _twins(cls, 1 + rank)
        _train(apexfx.transform(source, opt_level="O0", ddp=SMALL, inner="eager"), source, wrapped, rank, STEPS)


@pytest.mark.long
@on_ranks(2)
def test_the_wrapper_averages_what_any_rank_uses_of_a_compiled_model(rank, world_size):
    source, wrapped = _twins(TwoHeads, 1 + rank)
    compiled = torch.compile(source, backend="apex", options={"opt_level": "O0", "inner": "eager"})
    model = apexfx.parallel.DistributedDataParallel(compiled, timeout_s=20, find_unused_parameters=True)
    _train(model, source, wrapped, rank, STEPS)


@pytest.mark.long
@on_ranks(2)
def test_more_models_average_what_any_rank_uses(rank, world_size):
    for cls in [cls for cls in MODELS if cls not in (BrokenView, Through, Rows)]:  # of which a rank may leave out a whole graph
        source, wrapped = _twins(cls, 1 + rank)
        steps = [(used, other, used) for used, other in itertools.product(MODELS[cls], repeat=2)]
        _train(apexfx.transform(source, opt_level="O0", ddp=SMALL, inner="eager"), source, wrapped, rank, steps)


@pytest.mark.long
@on_ranks(2)
def test_under_inductor(rank, world_size):
    source, wrapped = _twins(TwoHeads, 1 + rank)
    _train(apexfx.transform(source, opt_level="O0", ddp=SMALL), source, wrapped, rank, STEPS[:4])


def _train(model, source, wrapped, rank, steps, step=None):
    optimizer, theirs = optimizer_of(source), optimizer_of(wrapped)
    update = step(optimizer) if step else lambda x, used: take_step(optimizer, objective(model, x, used))
    torch.manual_seed(rank + 1)
    for used in steps:
        x = torch.randn(2, 4)
        update(x, used[rank])
        take_step(theirs, wrapped(x, used[rank]))
        _assert_equal(source, optimizer, wrapped, theirs)


@pytest.mark.long
@on_ranks(2)
def test_a_step_in_pieces_averages_what_any_rank_uses(rank, world_size):
    model, wrapped = _twins(TwoHeads, 1 + rank)
    options = {"opt_level": "O0", "inner": "eager", "ddp": SMALL, "fallback": "transform", "keep_grads": True}
    _train(model, model, wrapped, rank, STEPS, lambda optimizer: apexfx.train_step(model, None, optimizer, objective=broken,
                                                                                   **options))


@pytest.mark.long
@on_ranks(2)
def test_accumulates(rank, world_size):
    """Gradients add up over backwards through different outputs, inside of no_sync() and not."""
    for quiet in (False, True):
        source, wrapped = _twins(TwoHeads, 1 + rank)
        model = apexfx.transform(source, opt_level="O0", ddp=SMALL, inner="eager")
        optimizer, theirs = optimizer_of(source), optimizer_of(wrapped)
        torch.manual_seed(rank + 1)
        for place, used in enumerate(STEPS):
            x, local = torch.randn(2, 4), quiet and place % 2 == 0
            with model.no_sync() if local else contextlib.nullcontext():
                objective(model, x, used[rank]).backward()
            with wrapped.no_sync() if local else contextlib.nullcontext():
                wrapped(x, used[rank]).backward()
            if not local:
                _assert_equal(source, optimizer, wrapped, theirs)


@on_ranks(2)
def test_a_graph_that_no_output_of_is_used_raises(rank, world_size):
    """... where nothing told the ranks to ask each other: between two models of one program."""
    body = apexfx.transform(nn.Linear(4, 4), opt_level="O0", ddp=SMALL, inner="eager")
    heads = apexfx.transform(_Sides(), opt_level="O0", ddp=SMALL, inner="eager")
    _, second = heads(body(torch.randn(2, 4)), torch.randn(2, 4))
    with pytest.raises(apexfx.UnsynchronizedGradientError, match="nothing uses what it computes on this rank"):
        second.sum().backward()


class _Sides(TwoHeads):
    def forward(self, x, y):
        return self.a(x), self.b(y)


@pytest.mark.long
@on_ranks(2)
def test_graphs_that_need_not_ask_do_not(rank, world_size):
    """One output, or outputs that all depend on all parameters."""
    class Same(TwoHeads):
        def forward(self, x):
            y = self.trunk(x)
            return y, y.sum()

    asked = []
    from apexfx.distributed import gradient_sync

    for cls, expected in ((Same, 0), (TwoHeads, 1)):
        model = apexfx.transform(cls(), opt_level="O0", ddp=SMALL, inner="eager")
        used_anywhere = gradient_sync.UsedAnywhere
        gradient_sync.UsedAnywhere = lambda *args: asked.append(cls) or used_anywhere(*args)
        try:
            objective(model, torch.randn(2, 4), (0, 1)).backward()
        finally:
            gradient_sync.UsedAnywhere = used_anywhere
        assert asked.count(cls) == expected
