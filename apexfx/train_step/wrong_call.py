"""What a call of a training step computes, in words, and what is wrong with one that cannot be captured."""

from __future__ import annotations

import contextlib
import copy
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import FakeCopyMode, FakeTensorMode, is_of_fakes, quiet_fakes, tree_leaves, tree_map
from ..compiler.mixed_dtypes import INTEGERS, advice_on_inputs
from .errors import LIBRARIES, CaptureError, place
from .function import SupervisedObjective
from .objective import copy_objective

_MOST_SHOWN, _LONGEST = 6, 60  # elements of a container, characters of one
_MOST_LINES, _MOST_CHARACTERS = 4, 200  # of an error's own text
_INTERPRETED = "\n\nWhile executing %"  # behind it, what fx adds where it runs a graph
_FUNCTIONAL = nn.functional.__name__
_OUT_OF_BOUNDS = re.compile(r"\bis out of bounds|index out of range in self")
# Made again with more text. A class of the user's, or one that a program tells apart (OutOfMemoryError), is left as it is.
_PLAIN = (TypeError, ValueError, IndexError, AttributeError, NotImplementedError, AssertionError, RuntimeError)


class WrongCall:
    """One call of a step: what it was, and what to raise where it fails.

    Args:
        model, objective: the step's.
        batch, named: what the step was called with, by position and by keyword.

    Attributes:
        batch, named: as given.
    """

    def __init__(self, model: nn.Module, objective: Callable[..., Any], batch: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._model, self._objective, self.batch, self.named = model, objective, batch, named

    @contextlib.contextmanager
    def explained(self, traceable: Callable[[], contextlib.AbstractContextManager[Any]], *, by_kernels: bool) -> Iterator[None]:
        """Say how the step was called where that is why it fails.

        Args:
            traceable: in its context the model is as it was traced.
            by_kernels: whether compiled kernels compute, whose errors name a line of generated code.
        """
        self.check()
        try:
            yield
        except CaptureError as failed:
            with traceable():
                if (error := self.find() or self._explain_refusal(failed)) is None:
                    raise self.explain_capture(failed) from failed.__cause__
            raise error from None
        except Exception as error:
            explained = self.explain(error)
            unplaced = by_kernels and type(error) is RuntimeError or not _place(error, self._model)
            if unplaced and explained is not error and not _is_distributed():
                with traceable():
                    explained = self.find(on_values=True) or explained
            if explained is error:
                raise
            raise explained from error

    def find(self, *, on_values: bool = False) -> Exception | None:
        """Run model and objective on fake tensors, without Dynamo; return the error of that, None where there is none.

        They are copies (as of `copy_objective`), and no op computes or communicates. Fake tensors have no values: None too where
        the run needs one, and where model or objective cannot be copied.

        Args:
            on_values: compute the forward on copies of the tensors themselves, for an error that their values make.
        """
        mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True) if not on_values else None
        memo: dict[int, Any] = {}
        try:
            with FakeCopyMode(mode) if mode is not None else contextlib.nullcontext():
                model = copy.deepcopy(self._model, memo)
                objective = copy_objective(self._objective, memo)
            batch, named = tree_map(lambda x: mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) else x,
                                    (self.batch, self.named)) if mode is not None \
                else copy.deepcopy((self.batch, self.named), memo)
            devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"}) if on_values else []
        except Exception:  # of whatever the user's objects do when they are copied
            return None
        try:
            with quiet_fakes(), torch.random.fork_rng(devices), mode or contextlib.nullcontext(), \
                    torch.set_grad_enabled(not on_values):
                objective(model, *batch, **named)
        except Exception as error:
            return None if is_of_fakes(error) else self._explain(error, model)
        return None

    def explain(self, error: Exception, where: Sequence[str] | None = None) -> Exception:
        """Return what to raise in the place of an error of the model, the loss or their graph; `error` where it is not that.

        Args:
            where: it was raised, in lines, where that is known.
        """
        if type(error) not in _PLAIN or str(error).startswith("apexfx"):
            return error
        return self._explain(error, self._model, where)

    def check(self) -> None:
        """Refuse a call that cannot be one, whatever the model is.

        Raises:
            TypeError: how to call.
        """
        if isinstance(self._objective, SupervisedObjective):
            self._objective.check(self.batch, self.named)

    def explain_capture(self, failed: CaptureError) -> Exception:
        """Return what to raise where model and loss run, and cannot be captured."""
        return failed

    def _explain_refusal(self, failed: CaptureError) -> Exception | None:
        """Return the error of an op that refuses the dtype of an input under Dynamo alone: fake convolutions may take any."""
        return self._explain(RuntimeError(failed.refusal), self._model) if self._advice(failed.refusal) else None

    def _advice(self, refusal: str) -> str:
        named = {**{f"batch[{i}]": x for i, x in enumerate(self.batch)}, **self.named}
        if not _OUT_OF_BOUNDS.search(refusal):
            return advice_on_inputs(refusal, named)
        ranges = [f"{name} holds {int(x.min())} to {int(x.max())}" for name, x in _integers(named)]
        return f"{', '.join(ranges)}: classes and rows count from 0" if ranges else ""

    def _explain(self, error: Exception, model: nn.Module, where: Sequence[str] | None = None) -> Exception:
        kind = type(error) if type(error) in _PLAIN else RuntimeError
        name = "" if type(error).__module__.startswith(("builtins", "torch")) else f"{type(error).__name__}: "
        advice = self._advice(str(error))
        lines = [f"apexfx: {name}{_shortened(str(error))}", *(_place(error, model) if where is None else where)]
        lines += [f"  called: {self}", *([f"  {advice}"] if advice else []), f"  expected: {self.expected}"]
        return kind("\n".join(lines))

    @property
    def expected(self) -> str:
        """How to call."""
        if isinstance(self._objective, SupervisedObjective):
            return "step(inputs, *targets), where inputs that are a tuple, list or dictionary are unpacked"
        return "step(...) with what objective takes behind the model; step(*batch) unpacks a tuple"

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

    def __str__(self) -> str:
        return f"{self.call}, which computes {self.computes}"


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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
    if isinstance(value, (list, tuple)) and value and not any(isinstance(x, Tensor) for x in tree_leaves(value)):
        return f"{type(value).__name__} of {len(value)} {type(value[0]).__name__}s"
    if isinstance(value, list):
        return f"[{_joined([shown(x) for x in value])}]"
    if isinstance(value, tuple):
        return f"({_joined([shown(x) for x in value])}{',' if len(value) == 1 else ''})"
    return repr(value)[:40] if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _joined(shown: list[str]) -> str:
    shown = [text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..." for text in shown]
    return ", ".join(shown[:_MOST_SHOWN] + (["..."] if len(shown) > _MOST_SHOWN else []))


def _shortened(text: str) -> str:
    lines = [line for line in text.partition(_INTERPRETED)[0].strip().splitlines() if line.strip()]
    return "\n".join(line[:_MOST_CHARACTERS] for line in lines[:_MOST_LINES]).replace("FakeTensor", "Tensor")


def _place(error: Exception, model: nn.Module) -> list[str]:
    """Return the innermost module of the model, and the last line outside of torch, that an error was raised in; where it is of
    neither, the function of torch that is the loss.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    where, line, functional = "", "", ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and paths.get(id(module)):
            where = f"in module {paths[id(module)]!r}, {' '.join(repr(module).split())[:80]}"
        if frame.f_globals.get("__name__") == _FUNCTIONAL:
            functional = f"in {_FUNCTIONAL}.{frame.f_code.co_name}"
        file = frame.f_code.co_filename
        if not file.startswith((*LIBRARIES, "<")) and not linecache.getline(file, number).strip().startswith("def "):
            line = place(file, number, frame.f_code.co_name)  # what Dynamo compiled gives no line within a function
    return [f"  {text}" for text in ((where, line) if where or line else (functional,)) if text]


def _integers(named: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the integers on the CPU: a device that has found an index out of bounds computes no more."""
    for name, x in named.items():
        if isinstance(x, Mapping):
            yield from _integers({f"{name}[{key!r}]": part for key, part in x.items()})
        elif isinstance(x, (tuple, list)):
            yield from _integers({f"{name}[{place}]": part for place, part in enumerate(x) if isinstance(part, Tensor)})
        elif isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() and x.dtype in INTEGERS:
            yield name, x
