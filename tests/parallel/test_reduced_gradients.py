"""What was reduced of a gradient and what was not, through the backwards of one parameter and what a user does in between."""

from __future__ import annotations

import pytest
import torch

from apexfx.parallel.reduced_gradients import ReducedGradients


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.zeros(2))


@pytest.fixture
def parts(parameter):
    """The parts of the gradient of `parameter`, which is 3 and reduced."""
    parts = ReducedGradients()
    backward(parameter, parts, 3.0)
    return parts


def backward(p, parts, value=None, *, synchronizes=True, in_buffers=False):
    """Run a backward that adds `value`; return what it would reduce, or why it cannot. The sum over the ranks is as much."""
    for _ in range(2):  # before the gradient comes, and where the ranks' records are made
        if why := parts.set_aside(p):
            return why
    if value is not None:
        p.grad = torch.full((2,), value) if p.grad is None else p.grad + value
    own = None if p.grad is None else p.grad.clone()
    if synchronizes and own is not None:
        parts.add_reduced([p], in_buffers=in_buffers)
    parts.restore()
    return own


def is_now(p, value):
    return p.grad is None if value is None else bool((p.grad == value).all())


NOTHING = lambda p: None  # noqa: E731
CASES = {  # what is done between two backwards, and what the second then finds of its own and leaves in all
    "nothing": (NOTHING, 4, 7), "dropped": (lambda p: setattr(p, "grad", None), 4, 4),
    "zeroed": (lambda p: p.grad.zero_(), 4, 4), "halved": (lambda p: p.grad.mul_(0.5), 4, 5.5),
    "other zeros": (lambda p: setattr(p, "grad", torch.zeros(2)), 4, 4),
}


@pytest.mark.parametrize("in_buffers", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_was_reduced_is_not_reduced_again(case, in_buffers, parameter, parts):
    between, own, total = CASES[case]
    between(parameter)
    before = parameter.grad
    sent = backward(parameter, parts, 4.0, in_buffers=in_buffers)
    assert (sent == own).all() and is_now(parameter, total)
    assert case != "nothing" or (parameter.grad is before) != in_buffers


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_that_does_not_come_leaves_what_is_there(case, parameter, parts):
    between, _, total = CASES[case]
    between(parameter)
    backward(parameter, parts)
    assert is_now(parameter, {7: 3, 5.5: 1.5}.get(total, None if case == "dropped" else 0))


def test_local_gradients_are_shown_with_the_reduced_one_and_reduced_alone(parameter, parts):
    for total in (4, 5):
        backward(parameter, parts, 1.0, synchronizes=False)
        assert is_now(parameter, total)
    assert (backward(parameter, parts) == 2).all() and is_now(parameter, 5)
    assert backward(parameter, parts) is None and is_now(parameter, 5)


@pytest.mark.parametrize("case, total", [("dropped", 7), ("zeroed", 7), ("other zeros", 7)])
def test_zero_grad_after_a_local_backward_drops_both(case, total, parameter, parts):
    backward(parameter, parts, 1.0, synchronizes=False)
    CASES[case][0](parameter)
    assert (backward(parameter, parts, 7.0) == 7).all() and is_now(parameter, total)


@pytest.mark.parametrize("local, change", [
    (False, lambda p: setattr(p, "grad", p.grad * 0.5)), (True, lambda p: p.grad.mul_(0.5)),
])
def test_a_change_after_which_the_parts_cannot_be_told_apart_is_refused(local, change, parameter, parts):
    if local:
        backward(parameter, parts, 1.0, synchronizes=False)
    change(parameter)
    for _ in range(2):
        assert "must not be reduced again. Call zero_grad()" in backward(parameter, parts, 1.0)
    parameter.grad = None
    backward(parameter, parts, 1.0)
    assert is_now(parameter, 1)


def test_a_hook_that_puts_back_what_was_set_aside_is_seen(parameter, parts):
    main_grad = parameter.grad
    parts.set_aside(parameter)
    parameter.grad = torch.ones(2)
    assert not parts.is_reduced(parameter)
    parameter.grad = main_grad.add_(1)
    assert parts.is_reduced(parameter)
