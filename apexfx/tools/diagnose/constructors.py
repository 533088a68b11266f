"""Notes where the script makes optimizers, data loaders, data parallel modules and compiled functions."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from inspect import currentframe
from types import MethodType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..._torch import DataLoaderIterator
from . import places
from .places import Place


@dataclass
class Compiled:
    """A call of `torch.compile`.

    Attributes:
        target: the module or function that it was given.
        options: the keyword arguments.
        num_calls: how often the result was called.
    """

    place: Place | None
    target: Any
    options: dict[str, Any]
    num_calls: int = 0

    @property
    def module(self) -> torch.nn.Module | None:
        """The module that it compiles: the target, or that whose `compile()` was called."""
        owner = self.target.__self__ if isinstance(self.target, MethodType) else self.target
        return owner if isinstance(owner, torch.nn.Module) else None


@dataclass
class Constructed:
    """What the script has made, and where.

    Attributes:
        places: of each optimizer and data parallel module.
        data_s: seconds that the script has waited for batches; who takes them sets it to 0.
        data_place: where it waits.
    """

    places: dict[Any, Place | None] = field(default_factory=dict)
    compiled: list[Compiled] = field(default_factory=list)
    data_s: float = 0.0
    data_place: Place | None = None

    def of(self, kind: type) -> list[Any]:
        """Return the objects of a class."""
        return [x for x in self.places if isinstance(x, kind)]


@contextlib.contextmanager
def noted() -> Iterator[Constructed]:
    """Note, in this context, what is made."""
    constructed = Constructed()
    with contextlib.ExitStack() as stack:
        for cls in (Optimizer, DistributedDataParallel):
            stack.enter_context(replaced(cls, "__init__", _noting(cls.__init__, constructed)))
        stack.enter_context(replaced(DataLoaderIterator, "__next__", _timed(DataLoaderIterator.__next__, constructed)))
        stack.enter_context(replaced(torch, "compile", _counting(torch.compile, constructed)))
        yield constructed


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Have an attribute of a class or module be another in this context."""
    is_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before) if is_own else delattr(owner, name)


def _noting(init: Callable[..., None], constructed: Constructed) -> Callable[..., None]:
    @functools.wraps(init)
    def noting_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        constructed.places[self] = places.here()

    return noting_init


def _timed(call: Callable[..., Any], constructed: Constructed) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed_call(self: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(self)
        finally:
            constructed.data_s += time.perf_counter() - start
            constructed.data_place = places.here()

    return timed_call


def _counting(compile: Callable[..., Any], constructed: Constructed) -> Callable[..., Any]:
    @functools.wraps(compile)
    def counting_compile(model: Any = None, **options: Any) -> Any:
        caller = currentframe().f_back
        if caller.f_globals.get("__name__", "").startswith("apexfx."):  # a step needs what torch makes
            return compile(model, **options)
        if model is None:
            return functools.partial(counting_compile, **options)
        compiled = compile(model, **options)
        note = Compiled(places.here(), model, options)
        constructed.compiled.append(note)
        if isinstance(compiled, torch.nn.Module):
            compiled.forward = _counted(compiled.forward, note)
            return compiled
        return _counted(compiled, note)

    return counting_compile


def _counted(function: Callable[..., Any], note: Compiled) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a constant for Dynamo, which would guard the count
            note.num_calls += 1
        return function(*args, **kwargs)

    return counted
