"""The function of a training step that Dynamo traces, and what its errors mean to a user."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from .._torch import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
    dynamo_config,
    quiet_fakes,
    tree_map,
)
from ..compiler.capture import local_name
from ..compiler.compiled_model import with_private_code

_numbers = itertools.count()
_EXTERNAL = re.compile(r"inputs with external grad_fn: \[(['\"])(.+?)\1(?:, |\])")
_IN_PIECES = "pass fallback='transform' to run the step in pieces"


def of_one_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with code and a name of its own.

    Dynamo counts recompilations by the code, and remembers by the name which sizes have changed: those of another model's state
    would make this one's symbolic.
    """
    own = with_private_code(function)
    own.__code__ = own.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return own


class OfOutput:
    """The objective of a loss function of the model's output."""

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


def run_step(model: nn.Module, objective: Callable[..., Any], params: list[Tensor], buffers: list[Tensor], gathered: list[bool],
             states: list[Tensor], scalars: list[Tensor], scale: Tensor | None, calls: int, plan: str,
             batch: tuple[Any, ...], named_inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute gradients, add those that earlier calls have gathered in `buffers`, and apply them.

    Returns:
        The loss, what else the objective returned (a tuple of one, or of none), found_inf, the norm of the gradients, for each
        parameter whether it has a gradient, and the gradients that leave the graph.
    """
    _check_traced()
    loss, rest, grads = compute_gradients(model, objective, params, scale, calls, batch, named_inputs)
    if calls > 1:
        grads = add_gathered(buffers, gathered, grads)
        for buffer in buffers:
            buffer.zero_()
    return loss, rest, *apply_gradients(params, grads, states, scalars, plan)


def run_accumulate(model: nn.Module, objective: Callable[..., Any], params: list[Tensor], buffers: list[Tensor],
                   scale: Tensor | None, calls: int, batch: tuple[Any, ...], named_inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute gradients and add them to `buffers`; return the loss, what else there was, and which parameters have one."""
    _check_traced()
    loss, rest, grads = compute_gradients(model, objective, params, scale, calls, batch, named_inputs)
    return loss, rest, gather(buffers, grads)


def gather(buffers: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[bool]:
    """Add gradients to `buffers`; return which of them there are."""
    for buffer, gradient in zip(buffers, grads):
        if gradient is not None:
            buffer.add_(gradient)
    return [g is not None for g in grads]


def add_gathered(buffers: Sequence[Tensor], gathered: Sequence[bool],
                 grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sum of these gradients, the last ones, and those in `buffers`.

    Args:
        gathered: for each buffer whether it has a gradient.
    """
    return [_sum(buffer, held, g) for buffer, held, g in zip(buffers, gathered, grads)]


def apply_gradients(params: list[Tensor], grads: list[Tensor | None], states: list[Tensor], scalars: list[Tensor],
                    plan: str) -> tuple[Tensor, Tensor, list[bool], list[Tensor]]:
    """Do what `plan` says; return found_inf, the norm, which parameters have a gradient, and those that leave the step."""
    found_inf, norm, gradients = torch.ops.apexfx.apply_gradients.default(params, grads, states, scalars, plan)
    return found_inf, norm, [g is not None for g in grads], gradients


def _sum(buffer: Tensor, held: bool, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return buffer.clone() if held else None
    return buffer + gradient if held else gradient


def _check_traced() -> None:
    if not torch.compiler.is_compiling():
        raise RuntimeError("apexfx: the step was not compiled, since Dynamo is off (TORCHDYNAMO_DISABLE, "
                           "torch.compiler.set_stance or torch._dynamo.config.disable), and it runs as a graph alone")


def _differentiate(loss: Tensor, params: list[Tensor]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(loss, params, allow_unused=True)


def compute_gradients(model: nn.Module, objective: Callable[..., Any], params: list[Tensor], scale: Tensor | None, calls: int,
                      batch: tuple[Any, ...], named_inputs: Mapping[str, Any],
                      differentiate: Callable[..., Sequence[Tensor | None]] = _differentiate,
                      ) -> tuple[Tensor, Any, Sequence[Tensor | None]]:
    """Run forward and backward; return the loss, what else there was, and the gradients of the scaled loss.

    Args:
        calls: by which the loss is divided in front of the backward, as a loop does that accumulates in `.grad`.
        differentiate: returns the gradients of a loss by parameters, None for one that it does not depend on.
    """
    with torch.enable_grad():
        result = objective(model, *batch, **named_inputs)
        loss, *rest = result if isinstance(result, tuple) and len(result) == 2 else (result,)
        if not isinstance(loss, Tensor):
            given = f"{type(result).__name__} of {len(result)}" if isinstance(result, tuple) else type(result).__name__
            raise TypeError(f"apexfx: the loss function or objective returned a {given}; it has to return the loss, a scalar "
                            "tensor, or a tuple of two: the loss and something else to return")
        loss = loss if loss.dtype == torch.float64 else loss.float()
        share = loss / calls if calls > 1 else loss
        grads = differentiate(share if scale is None else share * scale, params)
    return loss.detach(), tree_map(_detached, tuple(rest)), list(grads)


def _detached(returned: Any) -> Any:
    if isinstance(returned, Tensor):
        return returned.detach()
    if dataclasses.is_dataclass(returned) and any(isinstance(x, Tensor) for x in getattr(returned, "__dict__", {}).values()):
        raise TypeError(f"apexfx: the objective returned a {type(returned).__name__} of tensors beside the loss; it has to "
                        "return them in a tuple, a list or a dictionary, where the step detaches them")
    return returned


class CaptureError(RuntimeError):
    """Raised where a training step cannot be captured: for the call, which may be wrong, or for what the model does."""


class NotOneGraph(CaptureError):
    """Raised where a training step cannot be captured as one graph.

    Attributes:
        reason: what stood in the way, and where, in a line.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def has_history(name: str) -> NotOneGraph:
    """Return the error of a loss that depends on a tensor which was computed, with gradients, outside of the step."""
    reason = (f"the loss depends on {name}, which has a history (grad_fn): it was computed outside of the step from what "
              "requires a gradient")
    return NotOneGraph(f"apexfx: {reason}. Give the step {name}.detach(), or compute it inside of the objective, from a module "
                       f"or a leaf; or {_IN_PIECES}, where gradients flow on into that history", reason)


def sparse_gradient(name: str) -> ValueError:
    """Return the error of a parameter whose gradient is sparse."""
    return ValueError(f"apexfx: the gradient of {name!r} is sparse, and a training step updates by dense ones only. Use "
                      "sparse=False in the embedding, or give its weight to an optimizer of its own")


def meaning(text: str) -> Exception | None:
    """Return the error that says in the words of its user what a step cannot do with a loss; None for any other error."""
    if ours := re.search(r"apexfx: the (?:loss|objective)[^'\"\n]*", text):
        return (TypeError if "has to return" in text else ValueError)(ours[0])
    if "only for scalar outputs" in text:
        return ValueError("apexfx: the loss is no scalar; have the loss function reduce it: .mean(), .sum()")
    if "does not require grad" in text or "One of the differentiated Tensors" in text:
        return ValueError("apexfx: the loss does not depend on any parameter that the optimizer holds: it is detached, "
                          "computed under no_grad(), or of other parameters")
    return None


@contextlib.contextmanager
def clear_errors() -> Iterator[None]:
    """Say what a step cannot do in the words of its user."""
    try:
        with quiet_fakes():
            yield
    except BackendCompilerFailed as error:
        if "does not support RNG ops" in str(error.inner_exception):
            reason = "the model checkpoints activations around random numbers (dropout)"
            raise NotOneGraph(f"apexfx: {reason}, which a training step as one graph cannot compute again; checkpoint without "
                              f"dropout, or {_IN_PIECES}", reason) from error
        if "One of the differentiated Tensors" in str(error.inner_exception):
            reason = "the forward writes a parameter in place (Embedding(max_norm=) does)"
            raise ValueError(f"apexfx: {reason}, and a training step as one graph updates it at the end alone; train with "
                             "apexfx.transform()") from error
        raise error.inner_exception from None
    except FailOnRecompileLimitHit as error:
        if str(error).startswith("apexfx"):  # of the model's graphs in a step in pieces
            raise
        reason = (f"the step was compiled {dynamo_config.recompile_limit} times, each for other values of something that keeps "
                  "changing")
        raise NotOneGraph(
            f"apexfx: {reason}: the length of sequences that the model loops over (pad to a few lengths; torch.nn.LSTM, GRU and "
            "RNN are one op for all), a number that the step is called with or the model holds (give it as a tensor), a list in "
            "the model, which parameters have a gradient, or a hyperparameter other than the learning rate (OneCycleLR changes "
            "the momentum unless cycle_momentum=False). TORCH_LOGS=recompiles says what it is; raise "
            f"torch._dynamo.config.recompile_limit, the limit, or {_IN_PIECES}", reason) from error
    except (Unsupported, UserError, InternalTorchDynamoError, TorchRuntimeError) as error:
        text = str(error)
        if (clearer := meaning(text)) is not None:
            raise clearer from error
        if isinstance(error, TorchRuntimeError) or "failed to run FX node with fake tensors" in text:  # 2.15: Unsupported
            raise CaptureError(f"apexfx: the model, the loss or their gradients failed: {text}") from error
        if (external := _EXTERNAL.search(text)) is not None:
            raise has_history(local_name(external[2])) from error
        if "consumed returned tensor's grad_fn" in text:
            kept = re.search(r"Leaked output tensors: (.+)", text)
            name = f" ({kept[1]})" if kept else ""
            text = (f"the model keeps a tensor of this step{name} for the next one, with its history. Clear a part of the "
                    "loss that the forward keeps for the objective after its use (loss, model.aux = loss + model.aux, None), and "
                    "keep tensor.detach() of anything else. torch.nn.utils.weight_norm, spectral_norm and prune keep the weight "
                    "that they compute; those of torch.nn.utils.parametrizations do not")
        raise NotOneGraph(f"apexfx: the training step cannot be captured as one graph: {text}\nMove that out of the model and "
                          f"the loss, or {_IN_PIECES}", _in_a_line(text)) from error


def _in_a_line(text: str) -> str:
    """Return the first line of what Dynamo says, and the last place in the user's code that it names."""
    places = re.findall(r'File "(.+)", line (\d+), in (\w+)', text)
    where = " at {}:{}, in {}".format(*places[-1]) if places else ""
    return text.strip().partition("\n")[0].rstrip(".") + where
