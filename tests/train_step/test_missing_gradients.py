"""train_step(): a parameter without a gradient in a call, in several, or in those that accumulate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.optimizers import FusedAdam
from tests.own_optimizers import RMSprop
from tests.small_models import take_step
from tests.tables import table
from tests.train_step.changing_models import Eager, Heads, assert_same_training, heads, samples
from tests.train_step.test_step import ROUNDING, SGD, Adam, assert_same
from tests.ways import updates


@pytest.mark.parametrize("optimizer", [RMSprop, SGD])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_parameter_without_a_gradient_shifts_no_other(optimizer, inner):
    step, reference = heads(optimizer, keep_grads=True, inner=inner), Eager(Heads(), optimizer)
    for x, y in samples(2):
        step((x, 1), y)
        reference((x, 1), y)
    assert_same_training(step, reference)
    for p, q in zip(step.model.parameters(), reference.model.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert_same(p.grad, q.grad, **ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [Adam, *(pytest.param(each, marks=pytest.mark.long) for each in (RMSprop, FusedAdam))])
def test_accumulated_gradients_of_parameters_that_few_calls_use(optimizer):
    """AdamW would decay, and count, a parameter whose gradient is zero and not None."""
    step, reference = heads(optimizer, accumulate=2), Eager(Heads(), optimizer, accumulate=2)
    for (x, y), head in zip(samples(8), (0, 0, 1, 0, 0, 1, 1, 1)):
        step((x, head), y)
        reference((x, head), y)
    assert_same_training(step, reference)
    assert torch.equal(step.model.unused.weight, Heads().unused.weight)


def breaking(model, inputs, targets):
    loss = F.mse_loss(model(*inputs), targets)
    return loss * 2 if loss.item() > 1000 else loss


@table(1, "options", [{"max_grad_norm": 1e9}, {"objective": breaking, "fallback": "transform"}, {"loss_scale": "dynamic"},
                      {"skip": ["update_early"]}], ids=["clipped", "in pieces", "scaled", "updated late"])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_one_call_has_gathered_alone_is_applied_whatever_comes_first(options, inner):
    """Inductor drops the copy of a buffer that is emptied before its end."""
    step, reference = heads(accumulate=2, inner=inner, **options), Eager(Heads(), accumulate=2)
    for (x, y), head in zip(samples(4), (0, 1, 1, 0)):
        step((x, head), y)
        reference((x, head), y)
    assert_same_training(step, reference)


class ReadsCopy(torch.autograd.Function):
    """x * w, with a gradient of w that is a copy of a buffer."""

    @staticmethod
    def forward(ctx, w, held):
        ctx.save_for_backward(held)
        return (w * held).sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


class WritesHeld(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))
        self.register_buffer("held", torch.ones(64))

    def forward(self, x):
        loss = ReadsCopy.apply(self.w, self.held.clone())
        self.held.add_(x)
        return loss


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_gradient_that_is_a_buffer_which_is_written_is_taken_as_it_was(inner):
    model, reference = WritesHeld(), WritesHeld()
    step = updates("step", model, lambda m, x: m(x), inner=inner, max_grad_norm=1e9)
    theirs = SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        step(torch.ones(64))
        take_step(theirs, reference(torch.ones(64)))
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


@table(1, ("optimizer", "inner"), [
    (RMSprop, "eager"), (SGD, "eager"), *(pytest.param(each, "inductor", marks=pytest.mark.long) for each in (SGD, RMSprop))])
def test_what_leaves_an_accumulation_is_no_buffer(optimizer, inner):
    step = heads(optimizer, accumulate=2, keep_grads=True, inner=inner)
    reference = Eager(Heads(), optimizer, accumulate=2)
    for (x, y), head in zip(samples(4), (1, 0, 1, 0)):  # head 1 has a gradient of the first call alone
        step((x, head), y)
        reference((x, head), y)
    for p, q in zip(step.model.parameters(), reference.model.parameters()):
        if q.grad is not None:
            assert_same(p.grad, q.grad, **ROUNDING)
    (x, y), = samples(1)
    left = [(p.grad, p.grad.clone()) for p in step.model.parameters() if p.grad is not None]
    step((x, 1), y)  # what accumulates now is elsewhere
    assert all(torch.equal(*pair) for pair in left)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_each_parameter_has_a_gradient_of_its_own(inner):
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    step = updates("step", model, lambda m, x: ((m[0] + m[1]) * x).sum(), inner=inner, keep_grads=True)
    step(torch.ones(2))
    model[0].grad.mul_(2)
    assert torch.equal(model[1].grad, torch.ones(2))


@pytest.mark.long
@pytest.mark.parametrize("num_heads, scale", [(2, 8.0), (3, None)])
def test_heads_that_take_turns_are_corrected_by_their_own_counts(num_heads, scale):
    step, reference = heads(model=Heads(num_heads), loss_scale=scale), Eager(Heads(num_heads))
    for place, (x, y) in enumerate(samples(4 * num_heads)):
        step((x, place % num_heads), y)
        reference((x, place % num_heads), y)
    assert_same_training(step, reference)
    counts = [int(step.optimizer.state[head.weight]["step"]) for head in step.model.heads]
    assert counts == [4] * num_heads and int(step.optimizer.state[step.model.body.weight]["step"]) == 4 * num_heads
    graphs = len(step.report.graphs)
    for place, (x, y) in enumerate(samples(2 * num_heads)):
        step((x, place % num_heads), y)
    assert len(step.report.graphs) == graphs


@table(2, "optimizer, frozen", [(optimizer, frozen) for frozen in (False, True) for optimizer in
                                (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)])
def test_what_no_loss_depends_on_is_named_with_what_it_costs(optimizer, frozen, caplog):
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "spare": nn.Linear(4, 4)})
    model["spare"].requires_grad_(not frozen)
    step = apexfx.train_step(model, optimizer=optimizer(model.parameters()), opt_level="O0", inner="eager",
                             objective=lambda model, x: model["used"](x).square().mean())
    for _ in range(3):
        step(torch.randn(2, 4))
    said = "depends on no spare.weight, spare.bias: that is counted apart" in caplog.text
    assert (len(step.report.graphs), said) == ((1, False) if frozen else (2, True))
