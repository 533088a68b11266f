"""A training script as data: what it trains, in which order, and the loops by which `test_programs.py` runs it."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import apexfx

STEPS = 5
ENTRIES = tuple((entry, level) for entry in ("transform", "train_step") for level in ("O0", "O1", "O2"))


@dataclass
class Update:
    """One backward and what follows: `objective(model, *batch)` returns the loss, or (loss, what the script carries on)."""

    objective: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    clip: float | None = None
    loop: Callable[..., Any] | None = None  # loop(objective, optimizer, model, *batch), where a script has its own
    in_a_step: Callable[..., Any] | None = None  # the objective of train_step(), where it has to be another one
    around: Callable[[], Any] = contextlib.nullcontext  # a context of every call of the objective, and of a step

    def run(self, model: nn.Module, *batch: Any, autocast: bool = False, **named: Any) -> Any:
        def objective(*arguments: Any, **named: Any) -> Any:
            with self.around(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return self.objective(*arguments, **named)

        if self.loop is not None:
            return self.loop(objective, self.optimizer, model, *batch)
        out = objective(model, *batch, **named)
        loss = out[0] if isinstance(out, tuple) else out
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], self.clip)
        self.optimizer.step()
        return out


@dataclass
class Script:
    """What a user writes.

    Attributes:
        model: all that is trained.
        updates: of every step, one after the other.
        batch: (step, what the last update carried on, None at first) -> the arguments of the objectives.
        nets: children of the model that the objectives call; the model itself where there are none.
        after: called with the model and the step after each: averages, queues, schedules.
    """

    model: nn.Module
    updates: Sequence[Update]
    batch: Callable[[int, Any], tuple[Any, ...] | dict[str, Any]]
    nets: tuple[str, ...] = ()
    after: Callable[[nn.Module, int], None] = lambda model, step: None


@dataclass(frozen=True)
class Program:
    """A script and what is known of it.

    Attributes:
        build: every call gives the same script, from the default generator.
        needs: a package without which it cannot be built, or "".
        refused: what an entry says that cannot run it, by the name of the entry.
    """

    build: Callable[[], Script]
    needs: str = ""
    refused: dict[str, str] = field(default_factory=dict)


PROGRAMS: dict[str, Program] = {}


def program(needs: str = "", **refused: str) -> Callable[[Callable[[], Script]], Callable[[], Script]]:
    """Register a script under its function's name."""
    def register(build: Callable[[], Script]) -> Callable[[], Script]:
        PROGRAMS[build.__name__] = Program(build, needs, refused)
        return build

    return register


class Run:
    """A script at work through an entry: "eager", "compile" (both under torch.autocast but at O0), "transform", "train_step".

    Attributes:
        script: a new one.
        model: what the objectives are called with.
        reports: of the graphs.
    """

    def __init__(self, name: str, entry: str, level: str = "O0", **options: Any) -> None:
        torch.manual_seed(0)
        self.script = PROGRAMS[name].build()
        self.start = self._trained()
        self._batch: Any = None
        self._carried: Any = None
        options = {"opt_level": level, **({"dtype": torch.bfloat16} if level != "O0" else {}), **options}
        updates, self.model, self._owners = self.script.updates, self.script.model, []
        autocast = entry in ("eager", "compile") and level != "O0"
        self._updates = [functools.partial(update.run, autocast=autocast) for update in updates]
        if entry == "compile":
            self.model, _ = _wrapped(self.script, torch.compile)
        if entry == "transform":
            self.model, self._owners = _wrapped(self.script, functools.partial(apexfx.transform, **options))
        if entry == "train_step":
            self._owners = [apexfx.train_step(self.model, objective=each.in_a_step or each.objective, optimizer=each.optimizer,
                                              max_grad_norm=each.clip, **options) for each in updates]
            self._updates = [functools.partial(_call, step, each.around) for step, each in zip(self._owners, updates)]

    @property
    def reports(self) -> list[Any]:
        return [owner.report for owner in self._owners]

    def step(self, number: int) -> list[Tensor]:
        """Return the losses of a step's updates, on data that depends on its number alone."""
        torch.manual_seed(number)
        self._batch = self.script.batch(number, self._carried)
        losses = self.again()
        self.script.after(self.model, number)
        return losses

    def again(self) -> list[Tensor]:
        """Train on the last batch once more."""
        losses, batch = [], self._batch
        for update in self._updates:
            out = update(self.model, **batch) if isinstance(batch, dict) else update(self.model, *batch)
            loss, self._carried = out if isinstance(out, tuple) else (out, None)
            losses.append(loss.detach())
        return losses

    def moved(self) -> Tensor:
        """Return how far all that is trained, and every buffer, went."""
        return self._trained() - self.start

    def _trained(self) -> Tensor:
        leaves = [p for update in self.script.updates for group in update.optimizer.param_groups for p in group["params"]]
        buffers = [b for b in self.script.model.buffers() if b.is_floating_point()]
        return torch.cat([x.detach().double().flatten() for x in (*leaves, *buffers)])


@dataclass
class Curve:
    """What a run leaves: losses of every update, how far everything moved, reports, processor seconds of the first step."""

    losses: list[float]
    moved: Tensor
    reports: list[Any]
    seconds: float


def train(name: str, entry: str, level: str = "O0", **options: Any) -> Curve:
    """Run a program for its steps."""
    run, losses, seconds = Run(name, entry, level, **options), [], 0.0
    for number in range(STEPS):
        start = time.process_time()
        losses += map(float, run.step(number))
        seconds = seconds or time.process_time() - start
    return Curve(losses, run.moved(), run.reports, seconds)


def distance(found: Curve, expected: Curve) -> tuple[float, float]:
    """Return the largest error of the losses, over the usual loss at least, and that of how far everything moved (2-norm)."""
    usual = sum(map(abs, expected.losses)) / len(expected.losses)
    losses = max(abs(a - b) / max(abs(b), usual) for a, b in zip(found.losses, expected.losses, strict=True))
    return losses, float((found.moved - expected.moved).norm() / expected.moved.norm())


def _call(step: Any, around: Callable[[], Any], model: nn.Module, *batch: Any, **named: Any) -> Any:
    with around():
        return step(*batch, **named)


def _wrapped(script: Script, wrap: Callable[[nn.Module], Any]) -> tuple[nn.Module, list[Any]]:
    if not script.nets:
        model = wrap(script.model)
        return model, [model]
    model, nets = copy.copy(script.model), [wrap(getattr(script.model, name)) for name in script.nets]
    model._modules = {**model._modules, **dict(zip(script.nets, nets))}
    return model, nets
