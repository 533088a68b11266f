"""train_step(): two tensors over one memory are refused wherever the graph writes one of them, from the first call or later."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam, RAdam

import apexfx
from tests.tables import table
from tests.train_step.changing_models import WIDTH, Eager, Heads, assert_same_training, heads, samples
from tests.train_step.test_step import ROUNDING, SGD, assert_same
from tests.ways import updates


@pytest.mark.parametrize("given", [lambda p: p.data, lambda p: p.detach()[:2], lambda p: p.detach().t()],
                         ids=["all", "part", "turned"])
def test_a_batch_in_the_memory_of_a_parameter_is_refused(given):
    model = nn.Linear(4, 4)
    step = updates("step", model, lambda m, x, anchor: (m(x).sum(), anchor * 2))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="share memory that it updates"):
        step(torch.ones(2, 4), given(model.weight))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    step(torch.ones(2, 4), given(model.weight).clone())
    with pytest.raises(ValueError, match="share memory that it updates"):
        step(torch.ones(2, 4), given(model.weight))


def test_a_tensor_that_comes_to_lie_in_the_memory_of_a_parameter_is_refused():
    class Anchored(nn.Linear):
        def forward(self, x):
            return super().forward(x) * self.anchor

    model, x = Anchored(4, 4), torch.ones(2, 4)
    model.anchor = model.bias.detach().clone()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = apexfx.train_step(model, optimizer=optimizer, opt_level="O0", inner="eager", objective=lambda m, x: m(x).sum())
    for _ in range(2):
        step(x)
    model.anchor = model.bias.detach()
    with pytest.raises(ValueError, match="share memory that it updates"):
        step(x)
    for moved in (model.bias, optimizer.state[model.bias]["momentum_buffer"]):
        model.anchor, before = model.bias.detach().clone(), moved.data
        step(x)
        moved.data = model.anchor
        with pytest.raises(ValueError, match="share memory that it updates"):
            step(x)
        moved.data = before


def lay_over(model):
    model[3].running_mean.data = model[1].running_mean.data


def lay_apart(model):
    model[3].running_mean.data = model[3].running_mean.data.clone()


@table(1, "accumulate", [1, 2])
@pytest.mark.parametrize(("at_first", "later", "change"),
                         [(lay_apart, lay_over, "share"), (lay_over, lay_apart, "no longer share")], ids=["over", "apart"])
def test_running_statistics_that_come_to_lie_otherwise_are_refused(at_first, later, change, accumulate):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4))
    at_first(model)
    reference = copy.deepcopy(model)
    step = updates("step", model, lambda m, x: m(x).sum(), lr=0.0, accumulate=accumulate)
    for number in range(3):
        x = torch.randn(8, 4) + number
        step(x)
        reference(x)
    assert_same(dict(model.named_buffers()), dict(reference.named_buffers()), **ROUNDING)
    later(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"'1.running_mean' and '3.running_mean' {change} memory that the forward writes"):
        step(x)
    assert_same(model.state_dict(), before, rtol=0, atol=0)
    at_first(model)
    step(x)


def test_running_statistics_that_come_to_lie_otherwise_behind_capture_are_refused():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.BatchNorm1d(4)), torch.randn(8, 4)
    step = updates("step", model, lambda m, x: m(x).square().mean())
    step.capture(x)
    lay_over(model)
    with pytest.raises(ValueError, match="share memory that the forward writes"):
        step(x)


def test_what_comes_to_lie_beside_a_part_of_what_the_forward_writes_or_apart_from_it_is_refused():
    class Table(nn.Linear):
        def forward(self, x):
            self.table.add_(1)
            return super().forward(x) * self.part

    model, x = Table(4, 2), torch.ones(2, 4)
    model.register_buffer("table", torch.zeros(16))
    model.register_buffer("part", model.table[2:4])
    step = updates("step", model, lambda m, x: m(x).square().mean())
    step(x)
    step(x)
    with pytest.raises(ValueError, match="share memory that the forward writes"):
        step(model.table[8:].view(2, 4))
    model.part.data = model.part.data.clone()  # while all that is written stays where it is
    with pytest.raises(ValueError, match="'part' and 'table' no longer share|'table' and 'part' no longer share"):
        step(x)


def test_state_that_comes_to_lie_in_other_state_is_refused():
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = apexfx.train_step(model, optimizer=optimizer, opt_level="O0", inner="eager", objective=lambda m, x: m(x).sum())
    for _ in range(2):
        step(torch.ones(2, 4))
    of_weight, of_bias = (optimizer.state[p]["momentum_buffer"] for p in (model.weight, model.bias))
    of_bias.data = of_weight.data[0]
    with pytest.raises(ValueError, match="share memory that it updates"):
        step(torch.ones(2, 4))


def test_two_parameters_that_come_to_lie_over_one_memory_are_refused():
    both = torch.randn(2, WIDTH)
    model = nn.ParameterList([nn.Parameter(both[0]), nn.Parameter(both[1])])  # beside each other, as an LSTM has them on CUDA
    step = updates("step", model, lambda m, x: (x * m[0] * m[1]).sum())
    step(torch.ones(WIDTH))
    model[0].data = model[1].data
    with pytest.raises(ValueError, match="share memory that it updates"):
        step(torch.ones(WIDTH))


def test_state_that_another_optimizer_holds_is_refused():
    models = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
    optimizers = [SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    step = apexfx.train_step(models, objective=lambda models, x, y: F.mse_loss(models[1](models[0](x)), y), optimizer=optimizers,
                             opt_level="O0", inner="eager")
    first, second, third = samples(3)
    step(*first)
    state = optimizers[0].state_dict()
    optimizers[1].load_state_dict(state)
    with pytest.raises(ValueError, match="'0.weight.momentum_buffer' and '1.weight.momentum_buffer' share memory"):
        step(*second)
    optimizers[1].load_state_dict(copy.deepcopy(state))
    step(*third)


def test_a_parameter_that_a_group_holds_twice_is_refused():
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = SGD([model.weight, model.weight], lr=0.1)
    with pytest.raises(ValueError, match="a group of SGD holds 'weight' more than once"):
        apexfx.train_step(model, F.mse_loss, optimizer)


@pytest.mark.parametrize("share", [
    lambda one, other: other.__setitem__("step", one["step"]),
    lambda one, other: setattr(other["step"], "data", one["step"].data),
], ids=["tensor", "memory"])
def test_a_count_of_updates_that_two_parameters_share_is_refused(share):
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", inner="eager")
    first, second = samples(2)
    step(*first)
    own = {p: dict(held) for p, held in optimizer.state.items()}
    share(optimizer.state[model.weight], optimizer.state[model.bias])
    with pytest.raises(ValueError, match="'weight.step' and 'bias.step' share memory"):
        step(*second)
    assert optimizer.state[model.weight]["step"] is own[model.weight]["step"]


# ---- numbers of the state, which the graph has as elements of one vector -----------------------------------------------------


def move(state, key):
    """As programs do that put an optimizer on a device."""
    state[key].data = state[key].data.clone()


def move_and_write(state, key):
    state[key].data = torch.full((), 0.5)


def write(state, key):
    state[key].fill_(0.5)


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "key", "change", "name"), [
    (Adam, "step", move, "weight"), (Adam, "step", write, "bias"), (RAdam, "step", move_and_write, "weight"),
    (RAdam, "step", write, "bias")])
def test_a_number_of_the_state_that_is_moved_or_written_is_read_again(change, optimizer, key, name):
    step, reference = heads(optimizer), Eager(Heads(), optimizer)
    for number, batch in enumerate(samples(6)):
        if number == 3:
            for each in (step, reference):
                change(each.optimizer.state[getattr(each.model.body, name)], key)
        step(*batch)
        reference(*batch)
    assert_same_training(step, reference)
    numbers, expected = ({n: float(each.optimizer.state[p][key]) for n, p in each.model.named_parameters() if "body" in n}
                         for each in (step, reference))
    assert numbers == pytest.approx(expected)


def test_overlapping_slices_of_a_batch_that_move_in_their_memory_are_refused():
    def objective(model, written, read):
        written.mul_(0.5)
        return model(read).square().mean()

    model, samples = nn.Linear(4, 4), torch.randn(12, 4)
    reference, expected = copy.deepcopy(model), samples.clone()
    step = apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.0), opt_level="O0", inner="eager", objective=objective)
    loss = step(samples[:4], samples[2:6])
    torch.testing.assert_close(loss, objective(reference, expected[:4], expected[2:6]).detach(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"'written \(batch\[0\]\)' and 'read \(batch\[1\]\)' share other memory"):
        step(samples[4:8], samples[6:10])
    torch.testing.assert_close(samples, expected, rtol=0, atol=0)
