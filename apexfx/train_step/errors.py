"""What a training step cannot do, in the words of its user."""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from .._torch import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    GuardOnDataDependentSymNode,
    InternalTorchDynamoError,
    TorchRuntimeError,
    Unsupported,
    UserError,
    dynamo_config,
    quiet_fakes,
)
from ..compiler.capture import local_name
from ..compiler.forward_errors import LENGTHS, DataDependentError
from ..graph.nodes import stack_frames

_EXTERNAL = re.compile(r"inputs with external grad_fn: \[(['\"])(.+?)\1(?:, |\])")
# What model, loss or an op raised while Dynamo traced it: its type, and its text as Python writes it.
_RAISED = re.compile(r"""(?:raised exception|\bgot) (\w+)\(('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")?""")
_UNBOUND = re.compile(r"failed to bind arguments.*func='(\w+)' \S+; args = \[(.*?)\]; kwargs = \{(.*?)\}\n", re.DOTALL)
_REFUSED = re.compile(r"Developer debug context: (\w+Error) <.*?>: (.+)")  # by a function of torch
_CLASS = re.compile(r"<class '(?:[\w<>]+\.)*(\w+)'>")
_RAISED_AGAIN = (TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError, AssertionError, RuntimeError)
_BUILTIN = re.compile(r"how to trace (?:builtin operator|the builtin) `(?:<unknown module>\.)?([\w.]*\w)")
_EXPLAINED = re.compile(r"^  Explanation: (.+)$", re.MULTILINE)
# What the names of files begin with that have no lines of the user's; torchvision has.
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_DATA_DEPENDENT = re.compile(r"data-dependent|got SymInt|PendingUnbackedSymbolNotFound")
_IN_PIECES = "pass fallback='transform' to run the step in pieces"


class NotOneGraph(RuntimeError):
    """Raised where a training step cannot be captured as one graph.

    Attributes:
        reason: what stood in the way, and where, in a line.
        explained: the same in lines, with the text of that line.
    """

    def __init__(self, message: str, reason: str, explained: str = "") -> None:
        super().__init__(message)
        self.reason, self.explained = reason, explained or reason


def has_history(name: str) -> NotOneGraph:
    """Return the error of a loss that depends on a tensor which was computed, with gradients, outside of the step."""
    reason = (f"the loss depends on {name}, which has a history (grad_fn): it was computed outside of the step from what "
              "requires a gradient")
    return NotOneGraph(f"apexfx: {reason}. Give the step {name}.detach(), or compute it inside of the objective, from a module "
                       "or a leaf", reason)


def sparse_gradient(name: str) -> ValueError:
    """Return the error of a parameter whose gradient is sparse."""
    return ValueError(f"apexfx: the gradient of {name!r} is sparse, and a training step updates by dense ones only. Use "
                      "sparse=False in the embedding")


def calls_backward() -> RuntimeError:
    """Return the error of an objective that adds to the `.grad` of what the step updates."""
    return RuntimeError("apexfx: the objective or the model calls backward() itself, and what that adds to .grad is in no update "
                        "of the step; add that loss to the one that the objective returns")


def untrainable_loss() -> ValueError:
    """Return the error of a loss that has no history, or none that leads to what the step trains."""
    return ValueError("apexfx: the loss does not depend on any parameter that is trained, of a step those that the "
                      "optimizer holds: it is detached, computed under no_grad(), or of other parameters")


def error_of_loss(text: str) -> Exception | None:
    """Return the error for a text of torch's that is about a loss which nothing can be trained by; None for any other text."""
    if ours := re.search(r"apexfx: the (?:loss|objective)[^'\"\n]*", text):
        return (TypeError if "has to return" in text else ValueError)(ours[0])
    if "does not require grad" in text or "One of the differentiated Tensors" in text:
        return untrainable_loss()
    return None


@contextlib.contextmanager
def capture_errors() -> Iterator[None]:
    """Raise `NotOneGraph`, or what the model or the loss raises in eager, in the place of Dynamo's errors."""
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
        if isinstance(error.inner_exception, DataDependentError):
            reason = str(error.inner_exception).removeprefix("apexfx: ")
            raise NotOneGraph(f"apexfx: {reason}. Give it from outside, or {_IN_PIECES}", reason) from error
        if "The differentiated Tensor at index" in str(error.inner_exception):
            raise ValueError("apexfx: a hook of the forward calls torch.autograd.grad() on tensors that are cast in front of it, "
                             "by which it cannot differentiate; use opt_level='O0', or keep the modules that compute them in "
                             "float32 (precision=)") from error
        if _DATA_DEPENDENT.search(said := str(error.inner_exception)):
            raise _not_one_graph(said, said) from error
        raise error.inner_exception from None
    except FailOnRecompileLimitHit as error:
        if str(error).startswith("apexfx"):  # of the model's graphs in a step in pieces
            raise
        reason = (f"the step was compiled {dynamo_config.recompile_limit} times, each for other values of something that keeps "
                  "changing")
        raise NotOneGraph(
            f"apexfx: {reason}: {LENGTHS}, a number that the step is called with or the model holds (give it as a tensor), a "
            "list in the model, which parameters have a gradient, or a hyperparameter other than the learning rate (OneCycleLR "
            "changes momentum or betas, which torch's SGD, Adam and AdamW take as inputs). TORCH_LOGS=recompiles says what it "
            f"is; raise torch._dynamo.config.recompile_limit, the limit, or {_IN_PIECES}", reason) from error
    except (Unsupported, UserError, InternalTorchDynamoError, TorchRuntimeError) as error:
        text = said = str(error)
        if (of_loss := error_of_loss(text)) is not None:
            raise of_loss from error
        if "convert all Tensors to FakeTensors" in text:  # torch's own: the gradient of vmap(hessian(f)) on fake tensors
            reason = "torch cannot differentiate a hessian() under vmap() while it captures a graph"
            raise NotOneGraph(f"apexfx: {reason}; write jacrev(grad(f)) or jacfwd(grad(f)), which is the same, in the place of "
                              f"hessian(f), or {_IN_PIECES}", reason) from error
        if (raised := _raised(text)) is not None:
            raise raised from error
        if "already consumed grad_fn" in text:  # as of a loss that is returned after its own backward()
            raise calls_backward() from error
        if (external := _EXTERNAL.search(text)) is not None:
            raise has_history(local_name(external[2])) from error
        if "consumed returned tensor's grad_fn" in text:
            kept = re.search(r"Leaked output tensors: (.+)", text)
            name = f" ({kept[1]})" if kept else ""
            text = (f"the model keeps a tensor of this step{name} for the next one, with its history. Clear a part of the "
                    "loss that the forward keeps for the objective after its use (loss, model.aux = loss + model.aux, None), and "
                    "keep tensor.detach() of anything else. torch.nn.utils.weight_norm, spectral_norm and prune keep the weight "
                    "that they compute; those of torch.nn.utils.parametrizations do not")
        raise _not_one_graph(text, said) from error
    except (IndexError, GuardOnDataDependentSymNode) as error:
        if not _DATA_DEPENDENT.search(str(error)):
            raise
        raise _not_one_graph(str(error), str(error)) from error


def _raised(said: str) -> Exception | None:
    """Return what model, loss or an op raised while Dynamo traced it, noting the line of the user's; None where nothing did.

    Args:
        said: Dynamo's text.
    """
    if (unbound := _UNBOUND.search(said)) is not None:
        arguments = ", ".join(filter(None, (_CLASS.sub(r"\1", unbound[2]), _CLASS.sub(r"\1", unbound[3]))))
        name, text = "TypeError", f"{unbound[1]}() does not take the arguments ({arguments})"
    elif (raised := _RAISED.search(said)) is not None:
        name, text = raised[1], ast.literal_eval(raised[2]) if raised[2] else ""
    elif (refused := _REFUSED.search(said)) is not None:
        name, text = refused[1], refused[2]
    elif "failed to run FX node with fake tensors" in said:
        name, text = "RuntimeError", said
    else:
        return None
    kind = getattr(builtins, name, None)
    error = kind(text) if kind in _RAISED_AGAIN else RuntimeError(f"{name}: {text}")
    if frames := _frames_of_user(said):
        error.add_note("  " + place(*frames[-1]))
    return error


def _frames_of_user(said: str) -> list[tuple[str, int, str]]:
    return [frame for frame in stack_frames(said) if not frame[0].startswith(LIBRARIES)]


def _not_one_graph(text: str, said: str) -> NotOneGraph:
    """Return the error of a step that Dynamo refuses: what, at which line of the user's, and what to do.

    Args:
        text: why; where it is Dynamo's text, its first line and explanation.
        said: Dynamo's text, which names the frames.
    """
    reason, explained = text.strip().partition("\n")[0].rstrip("."), _EXPLAINED.search(text)
    if _DATA_DEPENDENT.search(reason):
        reason, explained = ("a branch, an index or a shape depends on a number that is known when the graph runs only: read "
                             "from a tensor (.item(), int(t)) or drawn by Python's random"), None
    if "use_numpy_random_stream" in text:
        reason, explained = "np.random of NumPy is called, whose numbers are in no graph (torch.rand is)", None
    if (builtin := _BUILTIN.search(text)) is not None:
        name = builtin[1].replace("Random.", "random.")
        instead = ": draw by torch.rand(())" if name.startswith("random.") else ""
        reason, explained = f"{name}() of Python is called, which is in no graph{instead}", None
    lines = [f"{reason}. {explained[1]}" if explained else reason]
    if frames := _frames_of_user(said):
        file, number, function = frames[-1]
        reason += f" at {file}:{number}, in {function}"
        lines.append("  " + place(file, number, function))
    text = "\n".join(lines)
    return NotOneGraph(f"apexfx: the training step cannot be captured as one graph: {text}\n  Move that out of the model and the "
                       f"loss, or {_IN_PIECES}. All that Dynamo says is in __cause__, above", reason, text)


def place(file: str, number: int, function: str) -> str:
    """Return a line of a program as a message has it."""
    return f"at {file}:{number}, in {function}: {linecache.getline(file, number).strip()[:120]}"
