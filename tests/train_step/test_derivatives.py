"""Losses that hold derivatives train as in eager torch: to the bit at O0, and near autocast at O1 and O2."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.func import jvp

import apexfx
from tests.small_models import take_step
from tests.tables import table
from tests.train_step.derivative_losses import ENERGY, FORCE, LOSSES, X, forces, heat, mlp, written_out
from tests.ways import updates

NO_AUTOCAST = "directional_derivative"  # which eager torch fails at
NEAR = 0.05  # how far bfloat16 may take an update from that of autocast, in the 2-norm


def changes(name, level, inner):
    """Return what one step of SGD changes in eager torch under autocast, and what ours does."""
    torch.manual_seed(0)
    source, objective, batch = LOSSES[name]()
    changed = []
    for ours in (False, True):
        model = copy.deepcopy(source)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if ours:
            apexfx.train_step(model, objective=objective, optimizer=optimizer, opt_level=level, inner=inner)(*batch)
        else:
            with torch.autocast("cpu", enabled=level != "O0"):
                loss = objective(model, *batch)
            loss.backward()
            optimizer.step()
        changed.append(torch.cat([(p.float() - q).flatten() for p, q in zip(model.parameters(), source.parameters())]))
    return changed


@table(2, "name", LOSSES)
def test_a_step_is_that_of_eager(name):
    expected, found = changes(name, "O0", "eager")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert expected.norm() > 1e-6


@table(1, "name, level", [(name, level) for name in LOSSES for level in ("O1", "O2") if name != NO_AUTOCAST])
def test_low_precision_is_near_autocast(name, level):
    expected, found = changes(name, level, "eager")
    assert (found - expected).norm() <= NEAR * expected.norm()


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_code_of_inductor_is_that_of_eager(name):
    expected, found = changes(name, "O0", "inductor")
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.long
def test_tangents_that_are_zero_have_memory():
    model, objective, batch = LOSSES["directional_derivative"]()
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0")
    _, [code] = run_and_get_code(step, *batch)
    assert "efficientzerotensor" in code and "aten._efficientzerotensor.default(" not in code


@pytest.mark.long
def test_sizes_that_vary_take_one_graph():
    torch.manual_seed(0)
    model, objective, _ = LOSSES["forces_on_a_graph"]()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    step = updates("step", model, objective, dynamic=True)
    for atoms in (8, 5, 12, 9, 6):
        source = torch.arange(2 * atoms) % atoms
        batch = torch.randn(atoms, 3), source, (source + torch.randint(1, atoms, source.shape)) % atoms, torch.randn(atoms, 3)
        take_step(optimizer, objective(expected, *batch))
        step(*batch)
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert len(step.report.graphs) == 1


def of_images(channels):
    return nn.Sequential(nn.Unflatten(1, (4, channels // 4)), nn.InstanceNorm1d(4, affine=True), nn.Flatten())


@pytest.mark.long
@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, of_images])
def test_a_third_derivative_of_a_norm_is_right(norm):
    """That of torch takes the statistics for constants."""
    torch.manual_seed(0)
    model = mlp(norm)
    source, expected = copy.deepcopy(model), written_out(model)
    heat(expected, X.double()).backward()
    step = updates("step", model, heat, lr=1.0)
    step(X)
    for before, after, want in zip(source.parameters(), model.parameters(), expected.parameters()):
        torch.testing.assert_close(before - after, torch.zeros_like(before) if want.grad is None else want.grad.float(),
                                   rtol=1e-3, atol=1e-5)
    for (name, buffer), want in zip(model.named_buffers(), source.buffers()):
        assert name.endswith("num_batches_tracked") or not torch.equal(buffer, want)
    assert any("is composed of ops" in note for note in step.report.notes)


def of_c(x):
    return torch.layer_norm(x, (16,))


RUNNING = nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4, track_running_stats=True), nn.Flatten())


@pytest.mark.parametrize("norm", [of_c, RUNNING])
def test_a_third_derivative_of_a_norm_that_is_not_composed_is_refused(norm):
    first, last = nn.Linear(3, 16), nn.Linear(16, 1)
    params = [*first.parameters(), *last.parameters()]
    step = apexfx.train_step(nn.ModuleList([first, last]), optimizer=torch.optim.SGD(params, lr=0.1), opt_level="O0",
                             inner="eager", objective=lambda m, x: heat(lambda x: m[1](norm(m[0](x)).tanh()), x))
    with pytest.raises(ValueError, match=r"a derivative of a derivative, .*, and \S+:\d+ calls \w+_norm, whose"):
        step(X)


SPELLINGS = {
    "a generator": lambda loss, m: torch.autograd.grad(loss, m.parameters(), create_graph=True),
    "by keyword": lambda loss, m: torch.autograd.grad(outputs=loss, inputs=m.parameters(), create_graph=True),
    "a ParameterList": lambda loss, m: torch.autograd.grad(loss, m.kept, create_graph=True),
    "a dictionary": lambda loss, m: torch.autograd.grad(loss, dict(m.named_parameters()), create_graph=True).values(),
    "a tensor": lambda loss, m: torch.autograd.grad(loss, m.weight, create_graph=True),
    "what they are weighed by": lambda loss, m: torch.autograd.grad(
        [loss, loss], iter(m.parameters()), (torch.full_like(loss, k) for k in (1, 2)), True, True),
}


def squared_gradients(spelling, m, x):
    return sum(g.square().sum() for g in SPELLINGS[spelling](m(x).tanh().square().mean(), m))


@table(2, "spelling", SPELLINGS)
def test_tensors_come_in_any_iterable_to_grad(spelling):
    torch.manual_seed(0)
    source = nn.Linear(3, 2)
    source.kept = nn.ParameterList(source.parameters())
    expected, objective = copy.deepcopy(source), functools.partial(squared_gradients, spelling)
    objective(expected, X).backward()
    step = updates("step", source, objective, lr=1.0)
    before = [p.detach().clone() for p in source.parameters()]
    step(X)
    for old, p, of_eager in zip(before, source.parameters(), expected.parameters()):
        torch.testing.assert_close(old - p, torch.zeros_like(p) if of_eager.grad is None else of_eager.grad)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.head = kind(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.cells(x[:, None].expand(-1, 4, -1))[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_second_derivative_of_a_recurrent_layer_is_refused(kind):
    """Its op has none, and autograd would take it for zero."""
    model = Recurrent(kind)
    step = apexfx.train_step(model, objective=forces, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), inner="eager")
    with pytest.raises(RuntimeError, match="the loss holds a derivative through torch.*; loop over cells"):
        step(X, ENERGY, FORCE)


def slope_by(make):
    def objective(model, x):
        x = make(x)
        return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0].square().mean()

    return objective


@pytest.mark.parametrize("make", [lambda x: x.requires_grad_(), lambda x: setattr(x, "requires_grad", True) or x,
                                  lambda x: torch.zeros(x.shape, requires_grad=True)])
def test_a_tensor_that_is_to_require_a_gradient_is_refused_with_what_to_write(make):
    model = mlp()
    refused, step = (updates("step", model, slope_by(how)) for how in (make, lambda x: x.detach().requires_grad_()))
    with pytest.raises(RuntimeError, match=r"Write x\.detach\(\)\.requires_grad_\(\)"):
        refused(X.clone())
    expected = slope_by(lambda x: x.requires_grad_())(model, X.clone())
    torch.testing.assert_close(step(X.clone()), expected.detach())


@pytest.mark.long
def test_a_forward_derivative_that_is_not_captured_leaves_autograd_on():
    """torch's frames, closed by the garbage collector, would switch it off for this thread."""
    def objective(model, x):
        return jvp(model, (x,), (x,))[1].square().mean()

    model = mlp(nn.LayerNorm)
    step = updates("step", model, objective)
    expected = objective(model, X)
    with pytest.raises(RuntimeError, match=r"Differentiate backward: .* in that of hessian\(f\)\. All"):
        step(X)
    gc.collect()
    assert torch.equal(objective(model, X), expected)


def forward_derivative(function, model, x):
    return jvp(lambda x: function(model(x)), (x,), (x + 1,))[1].square()


@pytest.mark.parametrize("function", [torch.linalg.det, Tensor.logdet, lambda h: torch.slogdet(h)[1]])
def test_a_wrong_derivative_of_a_forward_one_is_refused(function):
    model = nn.Linear(4, 4)
    step = updates("step", model, functools.partial(forward_derivative, function))
    with pytest.raises(ValueError, match=r"a forward derivative .*, and test_derivatives.py:\d+ calls \w*det, of which"):
        step(torch.eye(4))


@pytest.mark.long
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("norm", [lambda h: F.layer_norm(h, (3,)), lambda h: F.batch_norm(h, None, None, training=True)])
def test_the_gradient_of_a_forward_derivative_of_a_norm_is_right(norm, inner):
    """That of torch is not, in eager code, too: the reference differentiates backward twice."""
    torch.manual_seed(0)
    model, x, w = nn.Linear(3, 3).double(), torch.randn(4, 3).double().requires_grad_(), torch.randn(4, 3).double()
    [slope] = torch.autograd.grad((norm(model(x)) * w).sum(), x, create_graph=True)
    [expected] = torch.autograd.grad((slope * (x + 1)).sum().square(), model.weight)
    step = apexfx.train_step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), opt_level="O0", inner=inner,
                             objective=functools.partial(forward_derivative, lambda h: (norm(h) * w).sum()), keep_grads=True)
    step(x.detach())
    torch.testing.assert_close(model.weight.grad, expected)
