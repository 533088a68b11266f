"""What a training step cannot do, in the words of its user."""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .._torch import close_frames, quiet_fakes
from ..compiler.capture import local_name
from ..compiler.forward_errors import InnerCompilerError, as_in_eager, frames_of_user, is_told, place, with_place
from ..compiler.recompiles import LENGTHS, of_each_value
from ..report.data import Report
from .derivatives import REFUSED_AT_THIRD_ORDER, composed_at_capture

_IN_PIECES = "pass fallback='transform' to run the step in pieces"
_DATA_DEPENDENT = r"data-dependent|got SymInt|PendingUnbackedSymbolNotFound"
_DUAL_NUMBERS = re.compile(r"convert all Tensors to FakeTensors|InferenceMode::is_enabled\(\) && self")  # of fake tensors
_TENSOR_CALLED = re.compile(r"how to trace the function .Tensor\(|Tensor method .forward. is not|'Tensor' object is not callable")
_DRAW = ("Draw by torch.rand(()) or torch.distributions, and choose by torch.where(torch.rand(()) < p, a, b) in the place of an "
         "if; or draw outside, and give the step the number as a tensor, which compiles once")
_MOVE = "Move that out of the model and the loss (what is to be logged: return it as a tensor beside the loss)"
_LINE = r"\.?(?:\n|$)(?:(?:.*\n)*?  Explanation: (.+))?"  # the end of its first, and what explains that
_CHOOSE = f"Choose by torch.where(condition, a, b) in the place of an if, or m{_MOVE[1:]}"


def _type(*gb_types: str) -> str:
    return rf"\A(?:{'|'.join(map(re.escape, gb_types))})\n"  # the first line of what Dynamo says


class _Obstacle(NamedTuple):
    """What stands in the way of one graph.

    Attributes:
        said: what torch says of it, by the `gb_type` of a graph break or by its words.
        reason: what the user gets for that; "{0}" is the first group of `said`.
        advice: what to do.
    """

    said: re.Pattern[str]
    reason: str
    advice: str


_IN_NO_WAY = (  # as one graph or in pieces
    (_DUAL_NUMBERS,
     "torch cannot differentiate forward (jvp, jacfwd, hessian) through every op, norms among others, while it captures a graph",
     "Differentiate backward: jacrev(f) in the place of jacfwd(f), jacrev(grad(f)) in that of hessian(f)"),
    ("disjoint backward regions", "the loss holds a derivative of what checkpoints activations, and torch computes "
     "those again for one backward", "Leave the checkpoint out"),
    (r"torch/distributed/fsdp/",
     "a module is under fully_shard() that was not when the step was made, or is not of the step's model",
     "Call fully_shard() before train_step(), and leave a frozen model of the loss whole, or give the step what it returns"),
    (_TENSOR_CALLED,
     "a tensor is called as a model is: loss_fn takes what the model returns, loss_fn(model(inputs), *targets)",
     "What takes the model itself is an objective: train_step(model, objective=f, optimizer=...) computes f(model, *batch)"),
)
_IN_PIECES_ALONE = (
    (r"does not support RNG ops", "the model checkpoints activations around random numbers (dropout), which a graph cannot "
     "compute again", "Checkpoint without dropout"),
    (r"apexfx: (.* reads a number or a size from data, and .*)", "{0}", "Give it from outside"),
    (r"apexfx: (Inductor of torch .* cannot compile this graph.*)", "{0}", "Give inner='eager', which runs it op by op"),
    (r"(?:method `acquire` of class|how to enter a) `R?[lL]ock`", "a lock is taken, which no graph does (in Python 3.11 "
     "functools.cached_property takes one, too)", "Leave it out, or call the model once before the step if it is taken in "
     "a first call alone"),
    (r"UserDefinedObjectVariable\(Mean\)", "torch computes nothing with an apexfx.Mean",
     "Add Mean(scalar, 1) to it in the place of a scalar; weigh it by a number, or its total by a tensor"),
    (_type("HOP: Unsafe side effect"), "what is under a checkpoint, or given to another function of functions, sets "
     "something outside of it, as spectral_norm does its buffers",
     "Leave the checkpoint out there, which in eager sets that twice"),
    (r"NYI Sym\w+ ", "an op is given a number that differs from call to call, and takes a constant alone",
     "Give it as a tensor, x ** torch.tensor(k)"),
    (r"^(.*, where eager raises nothing)\n", "{0}", "Write that otherwise"),
    (_type("autograd.grad consumed returned tensor's grad_fn") + r"(?s:.*\nkept|)(.*)",
     "the model keeps a tensor of this step{0} for the next one, with its history",
     "Clear what the forward or a hook keeps for the objective after its use (loss, model.aux = loss + model.aux, None), "
     "and keep tensor.detach() of anything else. torch.nn.utils.weight_norm, spectral_norm and prune keep the weight that "
     "they compute; use those of torch.nn.utils.parametrizations, whose spectral_norm begins by other vectors, and a "
     "parametrization of your own that multiplies by the mask"),
    (r"setattr\(.*RemovableHandle", "a hook is registered inside of the step",
     "Register it before the step is made, or return from the forward what it reads"),
    (_type("Unsupported Tensor.requires_grad_() call", "setattr() on Tensor.requires_grad",
           "Attempted to use tensor creation function with requires_grad=True"),
     "requires_grad is set in a way that a graph cannot hold", "Write x.detach().requires_grad_()"),
    (_type("returning intermediate with requires_grad_()"), "a tensor that requires_grad_() was called on stays in what the "
     "step was given, as in a dictionary of the batch",
     "Put it into a new one: pos = batch['pos'].detach().requires_grad_(), batch = {**batch, 'pos': pos}"),
    (r"use_numpy_random_stream|bound method RandomState\.|method `(?!\w*seed)\w+` of class `(?:Generator|RandomState)`|"
     r"cyfunction default_rng", "np.random of NumPy is called, whose numbers are in no graph", _DRAW),
    (r"(?:how to trace .*`(?:<unknown module>\.)?|that the function `)Random\.(\w+)\.?`",
     "random.{0}() of Python is called, which is in no graph", _DRAW),
    (r"Data-dependent branching(?s:.*)random_value_\d+|partial tensor op: .*UnspecializedPythonVariable",
     "a number that Python's random draws in each call is branched on or computed with", _DRAW),
    (r"(?:does not support next\(\) on |name=__next__, type=)(\w+)",
     "next() is called on a {0} of Python, which a graph cannot advance",
     "Call next() outside, and give the step what it returns"),
    (r"how to trace (?:builtin operator|the builtin) `(?:<unknown module>\.)?([\w.]*\w)",
     "{0}() of Python is called, which is in no graph", _MOVE),
    (f"^.*(?:{_DATA_DEPENDENT})", "a branch, an index, a shape or a function of math depends on a number that is known when "
     "the graph runs only: read from a tensor (.item(), int(t)) or drawn by Python's random", _CHOOSE),
    *((f"^({begin}.*?){_LINE}", "{0}", advice) for begin, advice in (("Data-dependent branching", _CHOOSE), ("", _MOVE))),
)
_OBSTACLES = (*(_Obstacle(re.compile(said), *told) for said, *told in _IN_NO_WAY),
              *(_Obstacle(re.compile(said), reason, f"{advice}, or {_IN_PIECES}") for said, reason, advice in _IN_PIECES_ALONE))
# Graph breaks of Dynamo's at what fails in eager, too.
_OF_USER = ("failed to bind arguments when attempting to inline", "TypeError when making fake tensor call",
            "RuntimeError when making fake tensor call")
_EXTERNAL = re.compile(r"inputs with external grad_fn: \[(['\"])(.+?)\1(?:, |\])")
# Where model or loss are about to raise what Dynamo cannot: a false assert of Python's, an exception with an __init__ of its own.
_ASSERTS = re.compile(r"Data-dependent assertion failed(?s:.*)ConstantVariable\(bool: False\)")
_INITIALIZES = re.compile(r"call_method SuperVariable\(\) __init__")
# What model or loss raised while Dynamo traced it: its type, and its text as Python writes it. In it, what an op raised (2.14).
_EXCEPTION = r"""(\w+)\(('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")?"""
_RAISED = re.compile(f"raised exception {_EXCEPTION}")
_RAISED_BY_OP = re.compile(f"with fake tensors: (?s:.*): got {_EXCEPTION}")
_RAISED_AGAIN = (TypeError, ValueError, IndexError, KeyError, AttributeError, NotImplementedError, AssertionError, RuntimeError)


class NotOneGraph(RuntimeError):
    """Raised where a training step cannot be captured as one graph.

    Attributes:
        reason: what stood in the way, and where, in a line.
        explained: the same in lines, with the text of that line.
        of_compiler: whether it was captured, and the inner compiler failed.
    """

    of_compiler = False

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
    """Return the error of an objective that adds to the `.grad` of parameters that the step updates."""
    return RuntimeError("apexfx: the objective or the model calls backward() itself, and what that adds to .grad is in no update "
                        "of the step; add that loss to the one that the objective returns. If it calls torch.autograd.grad(), "
                        "that needs create_graph=True")


def untrainable_loss() -> ValueError:
    """Return the error of a loss that has no history, or none that leads to what the step trains."""
    return ValueError("apexfx: the loss does not depend on any parameter that is trained, of a step those that the "
                      "optimizer holds: it is detached, computed under no_grad(), or of other parameters; a derivative in it "
                      "needs create_graph=True, by a tensor that requires a gradient")


def counts_apart() -> ValueError:
    """Return the error of a `Mean` whose ranks know each other's gradients, and not their counts."""
    return ValueError("apexfx: calls accumulate the gradients of an apexfx.Mean whose backward communicates, so that each rank "
                      "has gradients of what others have counted, and the step averages over no ranks, whose counts it would add "
                      "up; give ddp=True, or leave accumulate out")


@contextlib.contextmanager
def capture_errors(report: Report) -> Iterator[None]:
    """Raise `NotOneGraph`, or what the model or the loss raises in eager, in the place of Dynamo's errors.

    Args:
        report: the report of the step.
    """
    from .. import _torch_compilers as compilers

    try:
        with quiet_fakes():
            yield
    except compilers.FailOnRecompileLimitHit as error:
        if str(error).startswith("apexfx"):  # of the model's graphs in a step in pieces
            raise
        raise _compiled_too_often(report, compilers.dynamo_config.recompile_limit) from error
    except compilers.BackendCompilerFailed as error:
        found, cause = _of_backend(error)
        raise found from cause
    except (compilers.Unsupported, compilers.UserError, compilers.InternalTorchDynamoError, compilers.TorchRuntimeError) as error:
        found = _of_dynamo(error)  # whose text has the program's own frames
        raise found from error if compilers.dynamo_config.verbose else error.with_traceback(None)
    except Exception as error:
        if is_told(error) or not _while_compiling(error):
            raise
        raise _not_one_graph(f"{type(error).__name__}: {error}") from error


def _compiled_too_often(report: Report, limit: int) -> NotOneGraph:
    reason = f"the step was compiled {limit} times, each for other values of something that keeps changing"
    what = of_each_value(report.graphs) or (
        f"{LENGTHS}, a number or a list of numbers that the step is called with or the model holds (give a tensor), a list "
        "that model or objective append to (return what goes there beside the loss), which parameters have a gradient, or a "
        "hyperparameter other than the learning rate (OneCycleLR changes momentum or betas, which torch's SGD, Adam and "
        "AdamW take as inputs)")
    return NotOneGraph(f"apexfx: {reason}: {what}. print(step.report) says which, graph by graph; raise "
                       f"torch._dynamo.config.recompile_limit, the limit, or {_IN_PIECES}", reason)


def _of_backend(error: Any) -> tuple[Exception, BaseException | None]:
    """Return what is raised, and its cause, where our compiler has failed at a captured graph."""
    inner, said = error.inner_exception, str(error.inner_exception)
    if "One of the differentiated Tensors" in said or "element 0 of tensors does not require grad" in said:
        return ValueError("apexfx: the forward writes a parameter in place (Embedding(max_norm=) does), and a training step as "
                          "one graph updates it at the end alone; train with apexfx.transform()"), error
    if "The differentiated Tensor at index" in said:
        return ValueError("apexfx: a hook of the forward calls torch.autograd.grad() on tensors that are cast in front of it, by "
                          "which it cannot differentiate; use opt_level='O0', or keep the modules that compute them in float32 "
                          "(precision=)"), error
    if isinstance(inner, InnerCompilerError):
        refused = _not_one_graph(said)
        refused.of_compiler = True
        return refused, inner.__cause__
    return (inner, inner.__cause__) if is_told(inner) else (_not_one_graph(f"{type(inner).__name__}: {said}"), inner)


def _while_compiling(error: BaseException) -> bool:
    """Return whether an error was raised while Dynamo compiled, and not by a graph that ran."""
    modules = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return "torch._dynamo.convert_frame" in modules


def run_or_raise_as_eager(run: Callable[[], Any], run_in_eager: Callable[[], bool]) -> Any:
    """Return what `run` does under `capture_errors`; where model or loss raise something themselves, raise what eager does.

    Args:
        run_in_eager: returns False where it has not run.
    """
    from .._torch_compilers import InternalTorchDynamoError, TorchRuntimeError, Unsupported, UserError

    try:
        return run()
    except Exception as error:
        if REFUSED_AT_THIRD_ORDER in str(error):
            with composed_at_capture():
                return run()
        if not isinstance(cause := error.__cause__, (Unsupported, UserError, InternalTorchDynamoError, TorchRuntimeError)) \
                or not _raises_itself(str(cause)) and not isinstance(error, AssertionError):  # of what torch traces an op by
            raise
        explained = error
    if not run_in_eager() or isinstance(explained, NotOneGraph) or is_told(explained):
        raise explained
    said = f"{type(explained).__name__}: {explained}, where eager raises nothing\n{explained.__cause__}"
    raise _not_one_graph(said) from explained.__cause__


def _raises_itself(said: str) -> bool:
    if _INITIALIZES.search(said):
        return any(re.search(r"\braise\b", linecache.getline(file, number)) for file, number, _ in frames_of_user(said))
    if _RAISED_BY_OP.search(said) or _TENSOR_CALLED.search(said):
        return False
    return bool(_RAISED.search(said) or _ASSERTS.search(said))


def _of_dynamo(error: Exception) -> Exception:
    from .._torch_compilers import TorchRuntimeError, read_of_data, told_of_kept, with_numbers

    said = str(error)
    if _DUAL_NUMBERS.search(said):
        close_frames(error)
    if "does not require grad" in said or "One of the differentiated Tensors" in said:
        return untrainable_loss()
    if "already consumed grad_fn" in said:  # as of a loss that is returned after its own backward()
        return calls_backward()
    if (external := _EXTERNAL.search(said)) is not None:
        return has_history(local_name(external[2]))
    if (raised := _RAISED.search(said)) is not None and not _DUAL_NUMBERS.search(said) and not _TENSOR_CALLED.search(said):
        name, text = raised[1], _literal(raised[2])
        if (by_op := _RAISED_BY_OP.search(text)) is not None:
            name, text = by_op[1], _literal(by_op[2])
        text = with_numbers(text, error)
        kind = getattr(builtins, name, None)
        return with_place(kind(text) if kind in _RAISED_AGAIN else RuntimeError(f"{name}: {text}"), said)
    of_user = getattr(error, "gb_type", "") in _OF_USER or isinstance(error, TorchRuntimeError)
    if of_user and not _DUAL_NUMBERS.search(said) and "INTERNAL ASSERT FAILED" not in said:
        return as_in_eager(error) or _not_one_graph(said)
    return _not_one_graph(f"{said}\n{told_of_kept(error)}", read_of_data(error))


def _literal(text: str | None) -> str:
    return ast.literal_eval(text) if text else ""


def _not_one_graph(said: str, read: str = "") -> NotOneGraph:
    """Return the error of a step that Dynamo refuses: why, at which line of the program, and what to write.

    Args:
        said: torch's text, which names the frames.
        read: the stack of the line that has read the number which Dynamo cannot know.
    """
    found, obstacle = next((found, each) for each in _OBSTACLES if (found := each.said.search(said.strip())))
    reason = obstacle.reason.format(*found.groups())
    explained = ". ".join(filter(None, (reason, *found.groups()[1:])))
    if frames := frames_of_user(said):
        file, number, function = frames[-1]
        explained, reason = f"{explained}\n  {place(*frames[-1])}", f"{reason} at {file}:{number}, in {function}"
        if (read_in := frames_of_user(read)[-1:]) and read_in != frames[-1:]:
            explained += f"\n  the number is read {place(*read_in[0])}"
    return NotOneGraph(f"apexfx: the training step cannot be captured as one graph: {explained}\n  {obstacle.advice}. All "
                       "that Dynamo says is in __cause__, above", reason, explained)
