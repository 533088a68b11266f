"""What a call of a training step was, and what it computes, in words: a note on the error that it raises."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_dtensor, step_pre_hooks, tensor_version, tree_leaves
from ..compiler.forward_errors import name_precision
from ..errors import RankFailureError, RankMismatchError
from ..report.data import Report
from .function import SupervisedObjective

_NARROW = (torch.int32, torch.int16, torch.int8, torch.uint8)
_OUT_OF_RANGE = re.compile(r"index out of bounds: (?:(-?\d+)L? <= )?\w+ < (\d+)")  # of Inductor's code, with the file of a kernel
_MODIFIED = "needed for gradient computation has been modified"
_OF_INTEGERS = r"Input type \((unsigned char|long|int|torch\.u?int)"
_BATCH = re.compile(r"\bat \S+:\d+, in .*|\bbatch\[(\d+)\](?:\['\w+'\])*")  # but not in a line of the program
_APPLIED = "_apexfx_applied"  # of a gradient: its version when it was applied
_MOST_SHOWN, _LONGEST = 6, 60  # elements of a container, characters of one


class Call:
    """One call of a step, for the errors that it raises: they keep type and text, and get a note.

    Args:
        objective: the step's.
        batch, named: what the step was called with, by position and by keyword.
        report: of the step, for the op that an error names; None for no such note.
        device: of the model, for an error of another one.
    """

    def __init__(self, objective: Callable[..., Any], batch: tuple[Any, ...], named: dict[str, Any],
                 report: Report | None = None, device: torch.device | None = None) -> None:
        self._objective, self.batch, self.named, self._report, self._device = objective, batch, named, report, device

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Note on what is raised in this context how the step was called, and how it is to be.

        Raises:
            TypeError: the call cannot be one, whatever the model is.
        """
        self.check()
        try:
            yield
        except (RankMismatchError, RankFailureError):
            raise
        except Exception as error:
            for kind, pattern, cause in _CAUSES:
                if isinstance(error, kind) and re.search(pattern, str(error)) and (said := cause(self)):
                    error.args = (f"apexfx: {said}{getattr(error, 'explained', error)}",)
            if error.args and str(error.args[0]).startswith("apexfx:"):
                error.args = (_BATCH.sub(self._called, error.args[0]), *error.args[1:])
            is_named = _MODIFIED in str(error) or self._report is not None and name_precision(error, self._report)
            if not is_named and not _is_noted(error) and not getattr(error, "of_compiler", False):
                error.add_note(f"  called: {self.call}, which computes {self.computes}\n  expected: {self.expected}")
            dtypes = [str(x.dtype) for x in tree_leaves((self.batch, self.named)) if isinstance(x, Tensor) and x.dtype in _NARROW]
            if re.search("(?i)dtype|scalar type" if dtypes else "(?i)dtype int32/int64|scalar type long", str(error)):
                what = f"what is {dtypes[0]}" if dtypes else "those that are floats"
                error.add_note(f"  class labels and indices are int64 in torch: call .long() on {what}")
            for with_loss_fn, with_objective, note in _NOTES:
                if re.search(with_loss_fn if isinstance(self._objective, SupervisedObjective) else with_objective, str(error)):
                    error.add_note(f"  {note}")
            if (bounds := _OUT_OF_RANGE.search(str(error))) is not None:
                raise _out_of_range(bounds, error) from error
            raise

    def check(self) -> None:
        """Refuse a call that cannot be one."""
        if isinstance(self._objective, SupervisedObjective):
            self._objective.check(self.batch, self.named)

    @property
    def expected(self) -> str:
        """How to call."""
        if isinstance(self._objective, SupervisedObjective):
            return ("step(inputs, *targets), where inputs that are a tuple, list or dictionary are unpacked; f(model, *batch) is "
                    "given as objective=f")
        return "step(...) with what objective takes after the model; step(*batch) unpacks a tuple, step(**batch) a dictionary"

    @property
    def call(self) -> str:
        """What was called: "step(float32[8, 3], int64[8])"."""
        return f"step({', '.join(self._shown_arguments())})"

    @property
    def computes(self) -> str:
        """What that computes: "loss_fn(model(float32[8, 3]), int64[8])"."""
        arguments = self._shown_arguments()
        if not isinstance(self._objective, SupervisedObjective):
            return f"objective({', '.join(['model', *arguments])})"
        inputs = _arguments(self.batch[0]) if self.batch else ""
        return f"loss_fn({', '.join([f'model({inputs})', *arguments[1:]])})"

    def _shown_arguments(self) -> list[str]:
        return [*map(shown, self.batch), *(f"{name}={shown(x)}" for name, x in self.named.items())]

    def _elsewhere(self) -> str:
        """Say which arguments are on another device than the model: "batch[0] is on cpu"; "" where none are."""
        arguments = {**{f"batch[{place}]": x for place, x in enumerate(self.batch)}, **self.named}
        devices = {name: x.device for name, held in arguments.items() for x in tree_leaves(held)
                   if isinstance(x, Tensor) and self._device not in (None, x.device)}
        elsewhere = ", ".join(f"{name} is on {device}" for name, device in devices.items())
        return elsewhere and f"{elsewhere}, and the model on {self._device}: call .to({str(self._device)!r}). "

    def _unpacked(self) -> str:
        """Say what came in the place of inputs and targets; "" where those are there."""
        [batch] = self.batch if len(self.batch) == 1 and isinstance(self._objective, SupervisedObjective) else [None]
        return (f"step(batch) was called with one {type(batch).__name__} of {len(batch)}, all inputs of the model: call "
                "step(*batch), which is step(inputs, *targets). ") if isinstance(batch, (tuple, list)) and len(batch) > 1 else ""

    def _not_taken(self) -> str:
        """Say which name an objective has no parameter of; "" where it has all."""
        parameters = _parameters(self._objective)
        takes_all = not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return next((f"objective takes no {name!r}: " for name in self.named if name not in parameters and not takes_all), "")

    def _called(self, place: re.Match[str]) -> str:
        """Return "batch[1]" with the objective's own name of it: "labels (batch[1])"."""
        names = [] if place[1] is None or isinstance(self._objective, SupervisedObjective) else [
            name for name, p in _parameters(self._objective).items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = names[1:][int(place[1]):][:1] if names else []
        return f"{named[0]} ({place[0]})" if named else place[0]


# What is said in front of an error's text: of which errors, by their class and their text.
_CAUSES = ((RuntimeError, "(same|expected) device|two .*devices", Call._elsewhere),
           (TypeError, "positional argument", Call._unpacked),
           (TypeError, "missing|nexpected keyword", Call._not_taken))
# What is noted on an error: by its text where a loss function was given, and where an objective was.
_NOTES = (
    (_OF_INTEGERS, _OF_INTEGERS, "the model computes in floats: give it x.float() / 255 of images that are whole numbers"),
    (_MODIFIED, _MODIFIED, "model or loss writes in place what the backward reads; write it out of place: x = x + 1"),
    (r"must be Tensor, not (tuple|list|\w*dict|\w*Output)", "(?!)",  # which nothing holds
     "the loss function gets what the model returns, which is no tensor: give objective=f, as f(model, x, y) = "
     "loss_fn(model(x)[0], y), or of model(x)['logits']"),
    ("multi-target not supported|Index tensor must have the same number of dim", "multi-target",
     "class labels have one number for each example, or pixel: call .squeeze(1) on those of shape [N, 1] or [N, 1, H, W], "
     ".argmax(1) on one-hot rows; class probabilities have as many columns as the model's output"),
    ("for target with class probabilities", "for target with class probabilities",
     "rows of class probabilities are floats: call .float() on one-hot rows, or .argmax(1) for labels"),
)


def _parameters(objective: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return what an objective takes when it is called: of a decorated one, what the decorator's function does."""
    try:
        return inspect.signature(objective, follow_wrapped=False).parameters
    except (TypeError, ValueError):  # of what is written in C
        return {}


def _is_noted(error: Exception) -> bool:
    """Return whether an error is an object of the program's that a call before has raised, too."""
    return any(note.startswith("  called: step(") for note in getattr(error, "__notes__", ()))


class _LossBackward:
    """`backward` of a loss that a step returns: it raises. Of a loss that is saved, an empty dictionary is in its place."""

    def __call__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("apexfx: backward() was called on the loss that a training step returned. The step has computed "
                           "the gradients and updated the parameters already: leave out zero_grad(), backward(), clipping, "
                           "GradScaler and optimizer.step() around it")

    def __deepcopy__(self, memo: Any) -> _LossBackward:
        return self

    def __reduce__(self) -> Any:  # which torch.load() takes with weights_only=True
        return OrderedDict, ()


LOSS_BACKWARD = _LossBackward()


class _SecondUpdate:
    """A hook on an optimizer's `step()`: says once that it does nothing after a training step, and refuses it over rows, and of
    gradients that a training step has applied.
    """

    only_observes = True

    def __init__(self, report: Report) -> None:
        self._report: Report | None = report

    def __call__(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        if any(given is not None for given in (*args[1:], *named.values())):  # a closure, which computes others
            return
        if any(p.grad is not None and not is_dtensor(p) and any(map(is_dtensor, held.values()))
               for p, held in optimizer.state.items() if isinstance(held, dict)):
            raise RuntimeError("apexfx: optimizer.step() was called on whole gradients, and with shard= this rank has the state "
                               "of its rows alone: update by the training step, or train without shard=")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(getattr(gradient, _APPLIED, None) == tensor_version(gradient) for gradient in gradients):
            raise RuntimeError("apexfx: optimizer.step() was called on gradients that keep_grads=True has left in .grad, and the "
                               "training step has updated the parameters by them already: leave out optimizer.step()")
        if self._report is not None and not gradients:
            self._report.warn("apexfx: optimizer.step() was called, and no parameter has a gradient, so it did nothing: a "
                              "training step has updated the parameters already. Leave out zero_grad(), backward(), "
                              "clip_grad_norm_() and optimizer.step() around it (max_grad_norm= clips in the step)")
            self._report = None


def mark_applied(gradients: Iterable[Tensor]) -> None:
    """Have an `optimizer.step()` refuse gradients as they are now."""
    for gradient in gradients:
        setattr(gradient, _APPLIED, tensor_version(gradient))


def note_second_updates(optimizers: Iterable[torch.optim.Optimizer], report: Report) -> None:
    """Have an `optimizer.step()` beside the training step noticed."""
    for each in optimizers:
        hooks = step_pre_hooks(each)
        if hooks is not None and not any(isinstance(hook, _SecondUpdate) for hook in hooks):
            each.register_step_pre_hook(_SecondUpdate(report))


def _out_of_range(bounds: re.Match[str], error: Exception) -> IndexError:
    found = IndexError(f"apexfx: an index that model or loss computes, perhaps from the batch's, is out of range, expected "
                       f"{bounds[1] or 0} <= index < {bounds[2]}; inner='eager' names the op and its line. What comes of the "
                       "batch by views and casts is looked at before a call, on the CPU; with check_indices=True, on a device, "
                       "too")
    found.__notes__ = [*getattr(error, "__notes__", ())]
    return found


def _arguments(inputs: Any) -> str:
    if isinstance(inputs, Mapping):
        return _joined([f"{name}={shown(x)}" for name, x in inputs.items()])
    return _joined([shown(x) for x in inputs]) if isinstance(inputs, (tuple, list)) else shown(inputs)


def shown(value: Any) -> str:
    """Return a value as a type, with shape and dtype: "float32[8, 3]"."""
    if isinstance(value, Tensor) or type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        kind = "" if type(value) in (Tensor, nn.Parameter) else f"{type(value).__name__} "
        device = f" on {value.device}" if isinstance(value, Tensor) and value.device.type != "cpu" else ""
        return f"{kind}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{device}"
    if isinstance(value, Mapping):
        return f"{{{_joined([f'{name!r}: {shown(x)}' for name, x in value.items()])}}}"
    if isinstance(value, (list, tuple)):
        if value and not any(isinstance(x, Tensor) for x in tree_leaves(value)):
            return f"{type(value).__name__} of {len(value)} {type(value[0]).__name__}s"
        items = _joined(list(map(shown, value)))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"
    return repr(value)[:40] if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _joined(shown: list[str]) -> str:
    shown = [text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in shown]
    return ", ".join(shown[:_MOST_SHOWN] + (["..."] if len(shown) > _MOST_SHOWN else []))


