"""The steps of a run, one phase behind the other: warm up, watch, and then with and without each change in turn."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..._torch import Compilation, is_dtensor
from ..._torch_compilers import compilations
from ...ranks import num_ranks
from . import places
from .constructors import Constructed
from .experiments import Experiment
from .findings import Saving, saving, typical
from .observer import Observer
from .places import Place

WARM_UP, WATCHED = 5, 4
BLOCK = 5  # steps of a kind in a row, of which the first is not timed
_PLAIN = "plain"
_DROPPED = BLOCK - 1  # of the timed steps of a kind: those of its first block compile


class Enough(BaseException):
    """All steps that were asked for have been run."""


class Session:
    """Counts and times steps, each of which ends behind `step()` of the optimizer that steps first.

    Attributes:
        num_steps: that have ended.
        observer: has watched some of them; None before.
        step_places: optimizer -> line that calls its `step()`.
        unequal_gradients: optimizer -> which parameters' gradients differ between ranks, in words.
        num_ranks: while the script had a process group.
        compilations: what the script has had compiled -> in which step.
    """

    def __init__(self, constructed: Constructed, num_steps: int | None, plan: Any) -> None:
        """Prepare.

        Args:
            num_steps: that are timed with and without each change; 0: all there are, None: a second's worth, 20 to 100.
            plan: has `note_loops(session)` and `experiments(session)`, called behind the watched steps; the latter returns
                name -> experiment, the same on all ranks.
        """
        self.num_steps = 0
        self.observer: Observer | None = None
        self.step_places: dict[Optimizer, Place | None] = {}
        self.unequal_gradients: dict[Optimizer, list[str]] = {}
        self.num_ranks = 1
        self.compilations: dict[Compilation, int] = {}
        self._seen = set(compilations())
        self._constructed, self._num_asked, self._plan = constructed, num_steps, plan
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._data_s: dict[str, list[float]] = defaultdict(list)
        self._update_s: dict[str, list[float]] = defaultdict(list)
        self._experiments: dict[str, Experiment] = {}
        self._variant = "warm up"
        self._is_settling = True  # the first step of a kind is not timed; before the very first the script sets up
        self._num_samples = math.inf
        self._phase = contextlib.ExitStack()
        self._clock: Optimizer | None = None
        self._step_began = self._update_began = 0.0
        self._own_s = self._in_updates_s = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """See the steps of all optimizers in this context."""
        before = torch.compiler.disable(self._before_update)
        after = torch.compiler.disable(self._after_update)
        before.only_observes = after.only_observes = True
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._leave()

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next(iter(_parameters(self._clock))).device if self._clock is not None else torch.device("cpu")

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped."""
        return list(self.step_places)

    def typical_ms(self) -> tuple[float, float, float]:
        """Return milliseconds a step, and of them for data and in the optimizer; 0 before there was an undisturbed step."""
        step, data, update = (1e3 * typical(seconds[_PLAIN]) for seconds in (self._seconds, self._data_s, self._update_s))
        return step, data, update

    def saving(self, name: str) -> Saving | None:
        """Return what an experiment has saved; None where there were too few steps."""
        seconds = self._update_s if name in self._experiments and self._experiments[name].is_of_update else self._seconds
        changed, plain = seconds[name][_DROPPED:] or seconds[name][1:], seconds[_PLAIN]
        return saving(changed, plain) if min(len(changed), len(plain)) > 2 else None

    # ---- hooks ---------------------------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        began = time.perf_counter()
        if optimizer not in self.step_places:
            self.step_places[optimizer] = places.here()
        self.num_ranks = max(self.num_ranks, num_ranks())
        if self.num_steps == WARM_UP - 1 and self.num_ranks > 1 and (unequal := unequal_gradients(optimizer)):
            parameters = list(_parameters(optimizer))
            self.unequal_gradients[optimizer] = [f"parameter {place}, {list(parameters[place].shape)}" for place in unequal]
        if self._variant == "watched" and self.observer is not None:
            self.observer.in_optimizer = True
        if (experiment := self._experiments.get(self._variant)) is not None:
            experiment.before_update(optimizer)
        self._update_began = time.perf_counter()
        self._own_s += self._update_began - began

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        synchronize(self.device)
        began = time.perf_counter()
        self._in_updates_s += began - self._update_began
        if (experiment := self._experiments.get(self._variant)) is not None:
            experiment.after_update(optimizer)
        if self.observer is not None:
            self.observer.in_optimizer = False
        if self._clock is None:
            self._clock = optimizer
        if optimizer is self._clock:
            self._end_step(began)
            self._step_began, self._own_s = time.perf_counter(), 0.0
        else:
            self._own_s += time.perf_counter() - began

    # ---- phases --------------------------------------------------------------------------------------------------------------

    def _end_step(self, now: float) -> None:
        self.num_steps += 1
        if not self._is_settling:
            self._seconds[self._variant].append(now - self._step_began - self._own_s)
            self._update_s[self._variant].append(self._in_updates_s)
            self._data_s[self._variant].append(self._constructed.data_s)
        new = [each for each in compilations() if each not in self._seen]
        self._seen.update(new)
        if self._variant not in self._experiments:
            self.compilations |= dict.fromkeys(new, self.num_steps)
        self._constructed.data_s = self._in_updates_s = 0.0
        if self.observer is not None:
            self.observer.num_steps += self._variant == "watched"
        following = self._following()
        self._is_settling = following != self._variant
        if self._is_settling:
            self._leave()
            self._enter(following)

    def _following(self) -> str:
        """Return what the next step is for."""
        if self.num_steps < WARM_UP:
            return "warm up"
        if self.num_steps < WARM_UP + WATCHED:
            return "watched"
        if self.num_steps == WARM_UP + WATCHED:
            self._leave()
            self._plan.note_loops(self)
            self._experiments = self._plan.experiments(self)
            self._num_samples = self._samples()
        variants = [_PLAIN, *self._experiments]
        turn, place = divmod(self.num_steps - WARM_UP - WATCHED, len(variants) * BLOCK)
        if turn * (BLOCK - 1) >= self._num_samples:
            raise Enough
        return variants[place // BLOCK]

    def _samples(self) -> float:
        """Return how many steps to time of each kind: a second's worth, within limits, or as many as were asked for."""
        if self._num_asked is not None:
            return self._num_asked or math.inf
        fastest = min(self._seconds["warm up"][-2:], default=1.0)
        return agreed(min(max(1.0 / max(fastest, 1e-9), 20.0), 100.0))

    def _enter(self, variant: str) -> None:
        self._variant = variant
        if variant == "watched":
            self.observer = Observer(p for optimizer in self.optimizers for p in _parameters(optimizer))
            self._phase.enter_context(self.observer)
            self._phase.enter_context(self.observer.watching_methods())
        elif (experiment := self._experiments.get(variant)) is not None:
            experiment.switch(True)
            self._phase.callback(experiment.switch, False)

    def _leave(self) -> None:
        self._phase.close()
        self._variant = ""


def synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def agreed(value: Any) -> Any:
    """Return rank 0's value. A collective call."""
    if num_ranks() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def unequal_gradients(optimizer: Optimizer) -> list[int]:
    """Return which of an optimizer's parameters, by their place, have other gradients on another rank. A collective call."""
    own = [(tuple(p.shape), None if p.grad is None or is_dtensor(p) else p.grad.detach().double().abs().sum().item())
           for p in _parameters(optimizer)]
    of_ranks: list[Any] = [None] * num_ranks()
    dist.all_gather_object(of_ranks, own)
    if any([shape for shape, _ in each] != [shape for shape, _ in own] for each in of_ranks):
        return []  # no replicas: every rank has parameters of its own
    return [place for place, each in enumerate(zip(*of_ranks)) if not _agree([size for _, size in each])]


def _agree(sizes: list[float | None]) -> bool:
    known = [size for size in sizes if size is not None and math.isfinite(size)]
    return len(known) < 2 or max(known) - min(known) <= 1e-3 * max(known)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
