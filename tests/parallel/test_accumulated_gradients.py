"""Reduced gradients that are set aside while new ones are accumulated: they come back, unless they are not wanted any more."""

from __future__ import annotations

import torch

from apexfx.parallel.overlapped_reducer import AccumulatedGradients


def reduced(value=3.0):
    """Return a parameter with a reduced gradient, and what keeps that apart."""
    p, accumulated = torch.nn.Parameter(torch.zeros(2)), AccumulatedGradients()
    p.grad = torch.full((2,), value)
    accumulated.add_up([p])
    return p, accumulated


def local_backward(p, accumulated):
    accumulated.set_aside(p)
    p.grad = torch.ones(2) if p.grad is None else p.grad + 1
    accumulated.restore()


def test_a_gradient_that_does_not_come_leaves_the_reduced_one():
    p, accumulated = reduced()
    accumulated.set_aside(p)
    assert p.grad is None
    accumulated.restore()
    assert (p.grad == 3).all()


def test_local_gradients_are_added_to_the_reduced_one():
    p, accumulated = reduced()
    local_backward(p, accumulated)
    local_backward(p, accumulated)
    assert (p.grad == 2).all()
    accumulated.add_up([p])
    assert (p.grad == 5).all()


def test_zero_grad_after_a_local_backward_drops_the_reduced_one():
    p, accumulated = reduced()
    local_backward(p, accumulated)
    p.grad = None
    accumulated.restore()  # before the next forward, and after a backward that does not use it
    assert p.grad is None
    p.grad = torch.full((2,), 7.0)
    accumulated.add_up([p])
    assert (p.grad == 7).all()
