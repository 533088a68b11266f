"""The function of a training step that Dynamo traces, op by op: forward, gradients, the update."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._torch import tree_map
from ..compiler.private_code import with_private_code
from .accumulation import accumulate_gradients, add_accumulated, clear_accumulated, keep_gradients, share_of
from .mean import Mean, Weighted, divided, weigh, weigh_alone
from .step_inputs import StepInputs

_numbers = itertools.count()


def compiled_separately(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with code and a name of its own.

    Dynamo counts recompilations by the code, and remembers by the name which sizes have changed: those of another model's state
    would make this one's symbolic.
    """
    own = with_private_code(function)
    own.__code__ = own.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return own


class SupervisedObjective:
    """`loss_fn(model(inputs), *targets)`, as an objective."""

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self.loss_fn = loss_fn

    @staticmethod
    def check(batch: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Refuse a call without inputs, or by keyword.

        Raises:
            TypeError: how to call the step.
        """
        if named:
            raise TypeError(f"apexfx: step({', '.join(f'{name}=...' for name in named)}) was called by keyword, and a step of a "
                            "loss_fn takes inputs and targets by position: step(inputs, *targets). A dictionary of inputs is one "
                            "argument: step({...}, *targets). For batches by keyword make the step with objective=f: "
                            "step(**batch) computes f(model, **batch)")
        if not batch:
            raise TypeError("apexfx: step() was called without a batch; call step(inputs, *targets)")

    def __call__(self, model: nn.Module, inputs: Any, *targets: Any) -> Any:
        if isinstance(inputs, Mapping):
            output = model(**inputs)
        elif isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
            output = model(*inputs)
        else:
            output = model(inputs)
        return self.loss_fn(output, *targets)


def run_step(inputs: StepInputs, batch: tuple[Any, ...], named_inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute gradients, add those that earlier calls have accumulated, and apply them.

    Returns:
        The loss, what else the objective returned (a tuple of one, or of none), the mean over calls and ranks of a loss that is a
        `Mean` or None, the code of the `Verdict`, the norm of the gradients, for each parameter whether it has a gradient, and
        the gradients that leave the graph.
    """
    _check_traced()
    loss, rest, grads, weighted = compute_gradients(inputs, batch, named_inputs)
    grads = _as_rows(inputs, grads)
    if inputs.calls > 1:
        grads = add_accumulated(inputs, grads, weighted)
    return loss, rest, *apply_average(inputs, grads, weighted)


def run_accumulate(inputs: StepInputs, batch: tuple[Any, ...], named_inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute gradients and accumulate them; return the loss, what else there was, the mean of a loss that is one over the calls
    so far or None, and which parameters have a gradient.
    """
    _check_traced()
    if inputs.slices:
        loss, rest, grads, weighted = compute_gradients(inputs, batch, named_inputs, weigh=weigh_alone)
        return loss, rest, *keep_gradients(inputs, grads, weighted)
    loss, rest, grads, weighted = compute_gradients(inputs, batch, named_inputs, ends=False)
    return loss, rest, *accumulate_gradients(inputs, _as_rows(inputs, grads), weighted)


def run_update(inputs: StepInputs, present: tuple[bool, ...], is_mean: bool) -> tuple[Any, ...]:
    """Apply the gradients that calls have accumulated; return as `apply_gradients`.

    Args:
        present: for each parameter whether it has one.
        is_mean: whether the losses were each a `Mean`.
    """
    _check_traced()
    # A conversion to the same dtype is nothing, and Dynamo takes a millisecond for each.
    sums = divided(inputs.gradient_sums, inputs.means[1]) if is_mean and inputs.slices else inputs.gradient_sums
    grads = [(total if total.dtype == dtype else total.to(dtype)) if here else None
             for total, dtype, here in zip(sums, inputs.dtypes, present)]
    return apply_gradients(inputs, grads, inputs.means[1] if is_mean else None)


def run_gradients(inputs: StepInputs, batch: tuple[Any, ...], named_inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the loss, what else there was, and the gradients of the scaled loss; change nothing but what the forward writes."""
    _check_traced()
    return compute_gradients(inputs, batch, named_inputs)[:3]


def apply_average(inputs: StepInputs, grads: list[Tensor | None], weighted: Weighted | None) -> tuple[Any, ...]:
    """Apply the gradients of all calls that make up an update, and begin anew.

    Returns:
        As `run_step` behind loss and rest.
    """
    clear_accumulated(inputs.gradient_sums, inputs.means)
    return weighted and weighted.mean, *apply_gradients(inputs, grads, weighted and weighted.count)


def apply_gradients(inputs: StepInputs, grads: list[Tensor | None],
                    count: Tensor | None) -> tuple[Tensor, Tensor, tuple[bool, ...], list[Tensor]]:
    """Do what the plan says; return the code of the `Verdict`, the norm, which parameters have a gradient, and those that
    leave the step.

    Args:
        count: of how many the loss is a mean, 0-d, if it is a `Mean`.
    """
    verdict, norm, gradients = torch.ops.apexfx.apply_gradients.default(
        inputs.params, grads, inputs.slots, inputs.plan, *([] if count is None else [count]))
    return verdict, norm, tuple(g is not None for g in grads), gradients


def _as_rows(inputs: StepInputs, grads: list[Tensor | None]) -> list[Tensor | None]:
    """Return gradients as the calls of a step accumulate them."""
    if not inputs.ranks or all(g is None for g in grads):
        return grads
    rows = iter(torch.ops.apexfx.scatter_gradients.default(inputs.params, grads, inputs.ranks, inputs.group))
    return [None if g is None else next(rows) for g in grads]


class NotCompiled(RuntimeError):
    """There is no graph for a call, and Python is about to run the step op by op."""


def _check_traced() -> None:
    if not torch.compiler.is_compiling():
        raise NotCompiled("apexfx: the step was not compiled, since Dynamo is off (TORCHDYNAMO_DISABLE, "
                          "torch.compiler.set_stance or torch._dynamo.config.disable), and it runs as a graph alone")


def _differentiate(loss: Tensor, params: list[Tensor]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(loss, params, allow_unused=True)


def compute_gradients(inputs: StepInputs, batch: tuple[Any, ...], named_inputs: Mapping[str, Any],
                      differentiate: Callable[..., Sequence[Tensor | None]] = _differentiate, *, ends: bool = True,
                      weigh: Callable[..., Weighted] = weigh) -> tuple[Tensor, Any, list[Tensor | None], Weighted | None]:
    """Run forward and backward; return the loss, what else there was, the gradients of the scaled loss, and how it is weighed.

    The loss is divided by the number of calls in front of the backward, as a loop does that accumulates in `.grad`; one that is a
    `Mean` by the counts of the calls up to this one.

    Args:
        ends: whether the call ends an accumulation.
        differentiate: returns the gradients of a loss by parameters, None for one that it does not depend on.
        weigh: `mean.weigh`, or what calls it.
    """
    with torch.enable_grad():
        result = inputs.objective(inputs.model, *batch, **named_inputs)
        loss, *rest = result if isinstance(result, tuple) and len(result) == 2 else (result,)
        weighted = None
        if isinstance(loss, Mean):
            weighted = weigh(loss, inputs.means, inputs.group, inputs.divisor, ends=ends)
            loss = loss.value
        if not isinstance(loss, Tensor):
            kind = f"{type(result).__name__} of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(f"apexfx: the loss function or objective returned a {kind}; it has to return the loss, a scalar "
                            "tensor or an apexfx.Mean, or a tuple of two: the loss and something else to return")
        if loss.numel() != 1:
            raise ValueError(f"apexfx: the loss is not a scalar, its shape is {[int(size) for size in loss.shape]}; have the "
                             "loss function reduce it: .mean(), or apexfx.Mean((loss * mask).sum(), mask.sum()) by a mask")
        if loss.is_complex():
            raise ValueError(f"apexfx: the loss is {loss.dtype}, and what is trained by has to be real: take .abs(), .real or "
                             ".imag in the loss function")
        loss = loss if loss.dtype == torch.float64 else loss.float()
        share = share_of(loss, weighted, inputs.calls)
        grads = differentiate(share if inputs.scale is None else share * inputs.scale, inputs.params)
    return loss.detach(), tree_map(_detached, tuple(rest)), list(grads), weighted


def _detached(returned: Any) -> Any:
    if isinstance(returned, Tensor):
        return returned.detach()
    if isinstance(returned, (int, float)):  # perhaps an input of the graph, of which Dynamo asks for no attributes
        return returned
    held = returned if isinstance(returned, dict) else vars(returned) if dataclasses.is_dataclass(returned) else {}
    if any(isinstance(x, Tensor) for x in held.values()):
        raise TypeError(f"apexfx: the objective returned a {type(returned).__name__} of tensors beside the loss; it has to "
                        "return them in a tuple, a list or a dictionary, where the step detaches them")
    return returned
