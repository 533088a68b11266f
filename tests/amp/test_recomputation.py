"""An activation checkpoint under O1 gives the gradients of the same model without it, to the bit, however its backward runs."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from apexfx import amp
from apexfx.testing import assert_close
from tests.small_models import Model

B = torch.bfloat16


def linear(**options):
    return nn.Linear(8, 8, **options)


def block():
    return nn.Sequential(nn.LayerNorm(8), linear(), nn.GELU(), nn.Dropout(0.2), linear(), nn.Softmax(-1))


def attention(m, h, mask):
    q, k, v = m.qkv(h).chunk(3, -1)
    return torch.softmax(q @ k.mT + mask, -1) @ v


def disabled_inside(m, h):
    with amp.disable_casts():
        h = m.a(h)
    return m.b(h)


def disabled_around(m, x, run):
    with amp.disable_casts():
        return run(m.a, x)


def padded(x):
    """An additive mask with float32's own limit; half has no such number, and the first row has no other."""
    return torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu().bool(), torch.finfo(torch.float32).min)


# What is inside of the checkpoint; `run` is the checkpoint, or calls the function directly.
CASES = {
    "function": (lambda m, x, run: m.b(run(lambda h: F.gelu(m.a(h)), x)), lambda: {"a": linear(), "b": linear()}),
    "module": (lambda m, x, run: m.b(run(m.a, x)), lambda: {"a": block(), "b": linear()}),
    "chain": (lambda m, x, run: run(m.b, run(m.a, x)), lambda: {"a": block(), "b": block()}),
    "nested": (lambda m, x, run: run(lambda h: m.b(run(m.a, h)), x), lambda: {"a": block(), "b": block()}),
    "one weight inside and outside": (lambda m, x, run: m.a(run(lambda h: m.a(h).relu(), m.a(x))), lambda: {"a": linear()}),
    "aside": (lambda m, x, run: (m.a(x), run(m.b, x))[0].sum() + run(m.b, x).sum(), lambda: {"a": linear(), "b": block()}),
    "cast by hand": (lambda m, x, run: run(lambda h: F.linear(h, m.a.weight.float()), m.b(x).float()),
                     lambda: {"a": linear(bias=False), "b": linear()}),
    "additive mask": (lambda m, x, run: run(lambda h, mask: attention(m, h, mask), x, padded(x)),
                      lambda: {"qkv": nn.Linear(8, 24)}),
    "disabled inside": (lambda m, x, run: run(lambda h: disabled_inside(m, h), x), lambda: {"a": linear(), "b": linear()}),
    "disabled around": (lambda m, x, run: m.b(disabled_around(m, x, run)), lambda: {"a": linear(), "b": linear()}),
}


def in_thread(backward):
    """As autograd runs the backward of what is on a GPU."""
    errors = []

    def run():
        try:
            backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def scaled(loss, optimizer, backward=torch.Tensor.backward):
    with amp.scale_loss(loss, optimizer) as loss:
        backward(loss)


def disabled(loss, optimizer):
    with amp.disable_casts():
        loss.backward()


BACKWARDS = {
    "plain": lambda loss, optimizer: loss.backward(),
    "autograd.backward": lambda loss, optimizer: torch.autograd.backward([loss]),
    "thread": lambda loss, optimizer: in_thread(loss.backward),
    "scaled": scaled,
    "scaled in a thread": lambda loss, optimizer: scaled(loss, optimizer, lambda loss: in_thread(loss.backward)),
    "disabled": disabled,
}


def gradients(case, backward, run):
    torch.manual_seed(0)
    forward, held = CASES[case]
    model = Model(lambda m, x: forward(m, x, run), **held())
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), dtype=B, verbosity=0, loss_scale=128.0)
    x = torch.randn(4, 8, requires_grad=True)
    result = model(x)
    BACKWARDS[backward](result.square().sum(), optimizer)
    return [result.detach(), x.grad / (128.0 if "scaled" in backward else 1.0), *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_recomputes_under_the_casts_of_its_forward(case, reentrant):
    expected = gradients(case, "plain", lambda function, *args: function(*args))
    for backward in BACKWARDS:
        actual = gradients(case, backward, lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant))
        for a, b in zip(actual, expected, strict=True):
            assert b is not None and b.isfinite().all()
            if reentrant and case == "one weight inside and outside":  # two gradients, added in half without the checkpoint
                assert_close(a, b, dtype=B)
            else:
                assert torch.equal(a, b), backward


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_outside_of_initialised_models_is_left_alone(reentrant):
    model = amp.initialize(Model(lambda m, x: m.a(x), a=linear()), dtype=B, verbosity=0)
    plain, x = block().eval(), torch.randn(4, 8, requires_grad=True)
    for run in (lambda function, x: checkpoint(function, x, use_reentrant=reentrant), lambda function, x: function(x)):
        with torch.no_grad():
            model(x)
        run(plain, x).square().sum().backward()
        first, x.grad = x.grad, None
    assert first.dtype == torch.float32
    outside = checkpoint(model, x, use_reentrant=reentrant)
    outside.square().sum().backward()
    through, x.grad = x.grad, None
    model(x).square().sum().backward()
    assert torch.equal(through, x.grad)


def test_a_sequence_and_a_copy_of_the_model():
    torch.manual_seed(0)
    layers = nn.Sequential(linear(), nn.ReLU(), linear(), nn.GELU(), linear())
    x, results = torch.randn(4, 8, requires_grad=True), []
    for forward in (lambda m, x: checkpoint_sequential(m.layers, 2, x, use_reentrant=False), lambda m, x: m.layers(x)):
        model = Model(forward, layers=copy.deepcopy(layers))
        amp.initialize(model, dtype=B, verbosity=0)
        model = copy.deepcopy(model)
        model(x).square().sum().backward()
        results.append([x.grad, *[p.grad for p in model.parameters()]])
        x.grad = None
    assert all(map(torch.equal, *results))
