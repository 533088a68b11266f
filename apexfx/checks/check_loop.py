"""check_loop(): whether a training step is the loop that it replaces, and where the two part first."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from .._torch import tree_map, versions
from ..buckets.bucket import dtype_name
from ..config import HALVES
from ..graph.printing import count_text, first_names
from ..train_step import TrainStep
from ..train_step.model import check_traceable
from ..train_step.wrong_call import shown
from .in_float64 import TOLERANCE, KeepFloat64, copied, explained, relative
from .watched_loop import WatchedLoop, gradients_of, listed, options_of

_SMALL = 1e-2  # of the size of all: what is smaller, as a gradient that is rounding alone, is measured against that
_SHOWN = 20  # rows
_IN_FLOAT64 = ("check_loop() computes in float64, on copies. What update() or the objective reaches otherwise than by its "
               "arguments (the weights of a loss, a module of a closure) is as it was, and a cast to float32 before a layer fits "
               "no more")


@dataclass(frozen=True)
class LoopRow:
    """A parameter, or a buffer of the model, after an update by the loop and one by the step.

    Attributes:
        name: in the model.
        gradient: by how much the gradients differ that the optimizer is given, over their size; of a buffer 0.
        update: the same of the updates, in float64.
        as_they_are: the same after all updates in the dtypes of the model and the step; None where they part in float64.
    """

    name: str
    gradient: float
    update: float
    as_they_are: float | None = None

    @property
    def is_right(self) -> bool:
        return self.update < TOLERANCE and self.gradient < TOLERANCE


@dataclass(frozen=True)
class LoopCheck:
    """What `check_loop` returns: print it.

    Attributes:
        rows: one a parameter and buffer, in the order of the model.
        part: where the two part first: "forward", "gradient", "clipping" or "update"; "" where they are one.
        update: in which update, from 1.
        reason: the line of the loop, and what is known about it; where they are one, why they round otherwise, or "".
        untried: what the batches did not try, or "".
    """

    rows: tuple[LoopRow, ...]
    part: str
    update: int
    reason: str
    untried: str = ""

    @property
    def is_right(self) -> bool:
        """Whether loop and step are one."""
        return not self.part

    def __str__(self) -> str:
        rows = sorted(self.rows, key=lambda row: (row.is_right, -row.update))[:_SHOWN]
        own = () if self.part else ("as they are",)
        table = tabulate([(row.name, f"{row.gradient:.1e}", f"{row.update:.1e}",
                           *([f"{100 * row.as_they_are:.2f} %"] if own else []),
                           "the same" if row.is_right else "another update") for row in rows],
                         headers=("parameter", "gradient", "update", *own, "verdict"), disable_numparse=True)
        more = len(self.rows) - len(rows)
        rest = f"\n... and {more} more, which differ less" if more else ""
        rounds = f", apart from rounding: {self.reason}" if self.reason else ""
        said = (f"The step is the loop: {count_text(self.update, 'update')} in float64{rounds}." if self.is_right else
                f"Update {self.update}: loop and step part in the {self.part}.\n{self.reason}")
        return "\n".join(filter(None, (f"{table}{rest}", said, self.untried)))


def check_loop(step: TrainStep, update: Callable[..., Any], batches: Sequence[Any], *, schedule: Any = None,
               optimizer: Any = None) -> LoopCheck:
    """Compare a step with the loop that it replaces: run both on copies, and say where they part first.

        def update(model, optimizer, batch):
            inputs, targets = batch
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        print(apexfx.check_loop(step, update, itertools.islice(loader, 3)))

    Both run op by op in one process, in float64 first, which tells a difference from rounding (`.float()` and other casts give
    float64 then), and in their own dtypes behind that. Nothing of the step, the model, the optimizer, the batches or torch's
    random state changes, no collective runs, and both draw the same random numbers. A safeguard and averages of the parameters
    are left out.

    Args:
        step: of `train_step`.
        update: the body of the loop, from `zero_grad()` to `optimizer.step()`, of the model and the optimizer that it is given
            (a list where the step has several); with `accumulate=n` the batch is a list of n. With `schedule` it is given that,
            too, and steps it.
        batches: of several calls; `step(*batch)` is called for a tuple or a list, `step(**batch)` for a dictionary where the step
            has an objective, and `step(batch)` for anything else.
        schedule: a learning rate scheduler, or a list of them, that is stepped after each update of the step.
        optimizer: the loop's, where it is another than the step's, over the same parameters.

    Raises:
        TypeError: the arguments are others, or in another order.
        ValueError: nothing can be compared: no batch, no update, parameters that the model does not hold, an `update` that uses
            what it is not given.
        RuntimeError, ...: what the loop or the step raises in float64; a note says so.
    """
    updates = _checked_updates(step, update, batches)
    originals = (step.model, step.objective, step.optimizer, step.optimizer if optimizer is None else optimizer, schedule)
    with torch.random.fork_rng(), torch.enable_grad(), warnings.catch_warnings(), _untouched(step, originals[3]):
        warnings.filterwarnings("ignore", r"Seems like `optimizer\.step\(\)` has been overridden|Detected call of `lr_sched")
        with explained(_IN_FLOAT64):
            found = _Sides(step, update, originals, exact=True).check(updates)
        if not found.is_right:
            return found
        sides = _Sides(step, update, originals, exact=False)
        own = sides.run(updates)
    rows = tuple(dataclasses.replace(row, as_they_are=own[row.name]) for row in found.rows)
    return dataclasses.replace(found, rows=rows, reason=sides.rounding())


def _checked_updates(step: TrainStep, update: Callable[..., Any], batches: Sequence[Any]) -> list[list[Any]]:
    """Return the batches of each update."""
    if not isinstance(step, TrainStep) or not callable(update) or callable(batches):
        raise TypeError(f"apexfx: check_loop() was called with {', '.join(type(x).__name__ for x in (step, update, batches))}, "
                        "expected check_loop(step, update, batches): a step, the function of the loop, and a list of batches")
    check_traceable(step.model, step.options)
    if any(p.is_complex() for p in step.model.parameters()):
        raise ValueError("apexfx: check_loop() compares steps in float64, and the model has complex parameters")
    accumulate, batches = step.options.accumulate, list(batches)
    if not batches or len(batches) % accumulate:
        raise ValueError(f"apexfx: batches has {len(batches)}, expected a multiple of accumulate={accumulate}, and at least one")
    return [batches[i:i + accumulate] for i in range(0, len(batches), accumulate)]


class _Sides:
    """The loop and the step on copies of their own.

    Args:
        originals: model, objective, the step's optimizer, the loop's, the schedules.
        exact: in float64, and with the gradients of the step to look at.
    """

    def __init__(self, step: TrainStep, update: Callable[..., Any], originals: tuple[Any, ...], *, exact: bool) -> None:
        self._update, self._exact, self._moved, self._longest, self._loop_clips = update, exact, False, 0.0, False
        self._model, _, _, self._optimizer, self._schedule = _copies(originals, exact)
        model, objective, optimizer, _, self._step_schedule = _copies(originals, exact)
        options = step.options
        config = dataclasses.replace(options.config, inner="eager", inner_options={}, ddp=False, sync_bn=False,
                                     process_group=None)
        if exact:
            config = dataclasses.replace(config, opt_level="O0", dtype=None, keep_batchnorm_fp32=None, precision={},
                                         passes=(*config.passes, KeepFloat64()))
        options = dataclasses.replace(options, config=config, keep_grads=exact, memory_budget=None, safeguard=None, slices=None,
                                      seed=0)
        self._step = TrainStep(model, objective, optimizer, options)
        self._by_name = not hasattr(objective, "loss_fn")
        self._loop = WatchedLoop(self._model, listed(self._optimizer), exact)

    def check(self, updates: list[list[Any]]) -> LoopCheck:
        """Compare update by update, until loop and step part."""
        for number, calls in enumerate(updates, 1):
            found = self.compare(number, calls)
            if not found.is_right:
                return found
        if not self._moved:
            raise ValueError("apexfx: the loop moved no parameter, so nothing is compared: its learning rate is 0, or its "
                             "optimizer updates something else")
        return dataclasses.replace(found, untried=self.untried())

    def run_loop(self, number: int, calls: list[Any]) -> None:
        batch = tree_map(lambda x: copied(x, self._exact), calls)
        torch.manual_seed(number)
        self._loop.start()
        with self._loop:
            one = self._step.options.accumulate == 1
            arguments = {"model": self._model, "optimizer": self._optimizer,
                         **({"batch": batch[0]} if one else {"batches": batch}),
                         **({} if self._schedule is None else {"schedule": self._schedule})}
            try:
                self._update(*arguments.values())
            except Exception as error:
                error.add_note(f"  called: update({', '.join(map(shown, arguments.values()))}), which are {', '.join(arguments)}")
                if re.search(r"\bamp\b", str(error), re.IGNORECASE):
                    error.add_note("  write update() without the lines of amp: opt_level= of the step does that")
                raise
        self._loop.finish()
        if not self._loop.steps:
            raise ValueError("apexfx: update() called no step() of the optimizer that it is given: it is the body of the "
                             "loop, of its arguments model and optimizer, up to optimizer.step()")

    def run_step(self, number: int, calls: list[Any]) -> list[Tensor]:
        torch.manual_seed(number)
        losses = []
        for batch in tree_map(lambda x: copied(x, self._exact), calls):
            named = isinstance(batch, Mapping) and self._by_name
            returned = self._step(**batch) if named else self._step(*batch) if isinstance(batch, (tuple, list)) else \
                self._step(batch)
            losses.append(returned[0] if isinstance(returned, tuple) else returned)
        for schedule in listed(self._step_schedule):
            schedule.step()
        return losses

    def run(self, updates: list[list[Any]]) -> dict[str, float]:
        """Run all updates, and return by how much the parameters differ then."""
        before = _values(self._model)
        for number, calls in enumerate(updates, 1):
            self.run_loop(number, calls)
            self.run_step(number, calls)
        return _errors(_changes(self._step.model, before), _changes(self._model, before))

    def rounding(self) -> str:
        """Return why loop and step round otherwise, a dtype or a level; "" where neither is known to differ."""
        config, params, theirs = self._step.options.config, list(self._step.model.parameters()), self._loop.autocast
        dtypes, as_written = {p.dtype for p in params}, "precision" in config.skip
        halves = not dtypes.isdisjoint(HALVES)
        if theirs is None and (as_written or not halves and dtypes != {torch.float32}):
            return ""
        ours = config.half_dtype(p.device for p in params) if config.level.casts and not as_written else None
        if ours == theirs and (config.opt_level == "O1" if theirs else not halves):
            return ""
        computes = "the dtypes of its parameters" if as_written else dtype_name(ours or torch.float32)
        computes += " and float32" if halves and ours else ""
        of_loop = f"of {dtype_name(theirs)}" if theirs else "off"
        of_loop += f", with parameters of {', '.join(sorted(map(dtype_name, dtypes)))}" if halves else ""
        cure = f"opt_level='O1', dtype={theirs}" if theirs else "opt_level='O0'" + ", skip=('precision',)" * halves
        return f"the step computes in {computes} ({config.opt_level}), the loop's autocast was {of_loop}; {cure} is that loop"

    def compare(self, number: int, calls: list[Any]) -> LoopCheck:
        """Run an update of both."""
        loop, before, options = self._loop, _values(self._model), options_of(self._step.model, self._step.optimizer)
        self.run_loop(number, calls)
        losses = [float(loss) for loss in self.run_step(number, calls)]
        if self._step.options.max_grad_norm is not None:
            self._longest = max(self._longest, float(self._step.grad_norm))
        self._loop_clips |= any("clip_grad" in written for _, written in loop.wrote)
        ours, theirs = _changes(self._step.model, before), _changes(self._model, before)
        errors = _errors(ours, theirs)
        self._moved |= any(bool(theirs[name].any()) for name in loop.params)
        grads = gradients_of({name: p for name, p in self._step.model.named_parameters() if name in loop.params})
        differ = _errors(grads, loop.stepped)
        rows = tuple(LoopRow(name, differ.get(name, 0.0), error) for name, error in errors.items())
        if all(row.is_right for row in rows):
            if (ratio := self._hidden_by_clipping(grads)) is None:
                return LoopCheck(rows, "", number, "")
            return LoopCheck(rows, "gradient", number, f"{loop.at_backward}\n{self._of_gradient(ratio)} Both are clipped, which "
                                                       "hides that until one is shorter than max_grad_norm.")
        part, reason = self._where(losses, grads, all(e < TOLERANCE for e in differ.values()), options,
                                   [row.name for row in rows if not row.is_right])
        return LoopCheck(rows, part, number, reason)

    def _hidden_by_clipping(self, grads: dict[str, Tensor]) -> float | None:
        """Return how much longer the loop's gradient was than the step's, where clipping has made them one; else None."""
        ratio = _ratio(self._loop.gradients, _unclipped(self._step, grads, _norm(grads)))
        hides = self._loop.wrote and ratio is not None and not _close(ratio, 1) and self._clips_alone(ratio)
        return ratio if hides else None

    def _clips_alone(self, ratio: float) -> bool:
        """Return whether a clip alone has written the loop's gradient: no line that unscales it or divides it by `ratio`."""
        loop, lines = self._loop, set(self._loop.wrote)
        return not lines or [unscales for unscales, _ in lines] == [False] \
            and not _close(ratio * _norm(loop.stepped), _norm(loop.gradients))

    def untried(self) -> str:
        """Say that nothing was clipped, where loop or step would, so that how they do was not compared."""
        max_norm = self._step.options.max_grad_norm
        if max_norm is None:
            return "The loop clips, and the step does not: no gradient was long enough. max_grad_norm= clips in it." \
                if self._loop_clips else ""
        return f"Nothing was clipped, so that was not compared: the longest gradient has {self._longest:.4g} of max_grad_norm=" \
               f"{max_norm:g}. A smaller one, in both, tries it." if self._longest <= max_norm < math.inf else ""

    def _where(self, losses: list[float], grads: dict[str, Tensor], same_gradients: bool, options: dict[str, dict[str, Any]],
               wrong: list[str]) -> tuple[str, str]:
        loop, calls = self._loop, len(losses)
        if loop.left_out:
            return "update", f"{loop.at_step}\n{first_names(loop.left_out)} is not called, and all optimizers update in the step."
        if max(loop.steps.values()) > 1:
            return "update", f"{loop.at_step}\nis called {max(loop.steps.values())} times, where the step updates once."
        if same_gradients and any(name in options for name in wrong):
            return "update", f"{loop.at_step}\n{self._of_update(options, wrong)}"
        line = loop.at_backward or loop.at_step
        if same_gradients:
            return "forward", f"{line}\n{self._of_forward(losses)}"
        norm = _norm(grads)
        whole = _unclipped(self._step, grads, norm)
        factor, ratio = _factor(loop.losses, losses), _ratio(loop.gradients, whole)
        is_same = ratio is not None and _close(ratio, 1)  # of other losses, too: of apexfx.Mean each has its own count
        if not is_same and not _may_be_scaled(factor, calls):
            return "forward", f"{line}\n{self._of_forward(losses)}"
        if ratio is None or not is_same and (self._clips_alone(ratio) or not _close(ratio, factor * calls)):
            return "gradient", f"{line}\n{self._of_gradient(ratio)}"
        clips = [place for place, (unscales, _) in enumerate(loop.wrote) if not unscales]
        late = clips and any(unscales for unscales, _ in loop.wrote[clips[0]:])
        scaled = f" It was {ratio:g} times as long when the loop clipped it: unscale first, by scaler.unscale_(optimizer)."
        line = loop.wrote[clips[0] if late else clips[-1]][1] if clips else loop.at_step
        max_norm = self._step.options.max_grad_norm
        missing = f"The loop does not clip; the step has max_grad_norm={max_norm}. " if not clips and max_norm is not None else \
            "The loop clips, and the step does not: max_grad_norm= clips in it. " if clips and max_norm is None else ""
        return "clipping", (f"{line}\n{missing}The loop's gradient has a norm of {_norm(loop.gradients):.4g} "
                            f"after the backward and of {_norm(loop.stepped):.4g} at optimizer.step(), the step's "
                            f"{_norm(whole):.4g} and {norm:.4g}.{scaled if late else ''}")

    def _of_forward(self, losses: list[float]) -> str:
        calls, backwards = len(losses), self._loop.losses
        divides = 1 < calls == len(backwards) and calls * sum(backwards) ** 2 < sum(losses) ** 2  # nearer to shares of them
        theirs, ours = (", ".join(f"{loss:.6g}" for loss in each)
                        for each in ([loss * calls for loss in backwards] if divides else backwards, losses))
        said = (f"The losses are {theirs or 'not known'} in the loop{f' (times {calls}, as it divides)' if divides else ''} and "
                f"{ours} in the step{f', which averages over {calls} calls' if calls > 1 else ''}.")
        if theirs == ours:
            said = (f"The losses are the same ({ours}), and what the forward writes is not: it runs more often in one of them, "
                    "or the loop writes it.")
        modes = {name: module.training for name, module in self._step.model.named_modules()}
        other = [name or "the model" for name, training in self._loop.modes.items() if training != modes.get(name)]
        mode = "training" if other and self._loop.modes["" if other[0] == "the model" else other[0]] else "evaluation"
        return said + (f" The loop runs {first_names(other)} in {mode} mode, and the step does not." if other else "")

    def _of_gradient(self, ratio: float | None) -> str:
        if self._loop.held:
            return ("The gradients of the update before were still in .grad there: the loop calls no zero_grad() before its "
                    "backward.")
        calls = self._step.options.accumulate
        if ratio is not None:
            said = f"The loop's gradient is {ratio:.6g} times that of the step"
            divides = f" (accumulate={calls} divides the loss already)" if _close(ratio, calls) else ""
            return f"{said}, which averages over {calls} calls{divides}." if calls > 1 else f"{said}."
        if self._is_mean() and calls > 1:
            return ("The loss of each call is the same, and so is not what is made of them: the step divides by the counts of "
                    f"all {calls} calls (apexfx.Mean), the loop averages the means of the calls.")
        return ("The losses are the same and their gradients are not: of another loss, of detached tensors, of other calls, or "
                "written after the backward.")

    def _is_mean(self) -> bool:
        try:
            return bool(self._step.mean_loss.isfinite())
        except RuntimeError:
            return False

    def _of_update(self, options: dict[str, dict[str, Any]], wrong: list[str]) -> str:
        for name in wrong:
            theirs, ours = self._loop.options.get(name, {}), options.get(name, {})
            differ = [f"{key} is {theirs.get(key)} in the loop and {ours.get(key)} in the step"
                      for key in sorted({*theirs, *ours}) if _number(theirs.get(key)) != _number(ours.get(key))]
            if not theirs or not ours:
                return f"{name} is in no group of the {'step' if theirs else 'loop'}'s optimizer."
            if differ:
                return f"The gradients are the same, and {', '.join(differ)} ({name})."
        if self._loop.writes:
            return "The gradients are the same, and the loop writes parameters outside of optimizer.step(), too."
        return ("The gradients and the options of the optimizer are the same: its state or its step() is another, or the loop "
                "writes .data.")


def _copies(originals: tuple[Any, ...], exact: bool) -> tuple[Any, ...]:
    """Return copies of model, objective, optimizers and schedules that belong together, in float64 where they are exact."""
    memo: dict[int, Any] = {}
    model, objective = copies = copy.deepcopy(originals[:2], memo)
    held_by_model = {id(p) for p in originals[0].parameters()}
    for each in (*listed(originals[2]), *listed(originals[3])):
        if any(id(p) not in held_by_model for group in each.param_groups for p in group["params"]):
            raise ValueError("apexfx: the optimizer has parameters that the model does not hold, as of a loss, and update() "
                             "could only reach those of the step itself; make one module that holds both")
    optimizers = copy.deepcopy(originals[2:], memo)
    if exact:
        for module in (model, getattr(objective, "loss_fn", objective)):
            if isinstance(module, nn.Module):
                module.double()
        for each in (*listed(optimizers[0]), *listed(optimizers[1])):
            each.load_state_dict(each.state_dict())  # which casts the state to the dtypes of the parameters
    return *copies, *optimizers


@contextlib.contextmanager
def _untouched(step: TrainStep, optimizer: Any) -> Iterator[None]:
    """Raise where the step's own parameters, gradients or options are written in this context: `update` does it."""
    params = dict(step.model.named_parameters())
    groups = [group for each in (*listed(step.optimizer), *listed(optimizer)) for group in each.param_groups]
    before = [(versions((p, p.grad)), p.grad) for p in params.values()]  # no other has the id of a gradient that lives
    options = [{**group} for group in groups]
    yield
    if wrote := [name for (name, p), (was, _) in zip(params.items(), before) if versions((p, p.grad)) != was]:
        raise ValueError(f"apexfx: update() wrote {wrote[0]!r} of the step's own model, or its gradient; it has to use the "
                         "model and the optimizer that it is given")
    for group, was in zip(groups, options):
        if changed := [key for key, value in was.items() if key != "params" and group[key] is not value and group[key] != value]:
            group.update(was)
            raise ValueError(f"apexfx: update() changed {changed[0]} of the step's own optimizer (it is set back); a schedule "
                             "has to be that of the copies: check_loop(..., schedule=schedule) gives it to update() after the "
                             "batch")


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() if x.is_floating_point() or x.is_complex() else x.double()
            for name, x in (*model.named_parameters(), *model.named_buffers())}


def _changes(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x - before[name] for name, x in _values(model).items()}


def _norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(x.norm()) ** 2 for x in tensors.values()))


def _errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each tensor, by name; of one much smaller than the average over a share of that."""
    size = _norm(theirs) / max(1, sum(x.numel() for x in theirs.values())) ** 0.5
    return {name: relative(ours[name] - x, x, _SMALL * size * x.numel() ** 0.5) for name, x in theirs.items()}


def _unclipped(step: TrainStep, grads: dict[str, Tensor], norm: float) -> dict[str, Tensor]:
    try:
        whole = float(step.grad_norm)
    except RuntimeError:  # nothing is clipped
        return grads
    return {name: g * (whole / norm) for name, g in grads.items()} if norm else grads


def _factor(theirs: list[float], ours: list[float]) -> float | None:
    """Return what the losses of the step are multiplied with in the loop, or None where it is not one number."""
    if not theirs:  # torch.autograd.grad()
        return 1.0 / len(ours)
    if len(theirs) != len(ours):
        theirs, ours = [sum(theirs)], [sum(ours)]
    pairs = [(a, b) for a, b in zip(theirs, ours) if math.isfinite(b) and b]
    factor = pairs[0][0] / pairs[0][1] if pairs else 1.0
    return factor if all(_close(a, factor * b) for a, b in pairs) else None


def _may_be_scaled(factor: float | None, calls: int) -> bool:
    """Return whether losses by a factor apart may be of one step: divided by the calls or not, or scaled by 2**4 or more."""
    if factor is None or factor <= 0:
        return False
    power = math.log2(factor * calls)
    return _close(factor, 1) or _close(factor * calls, 1) or power > 3 and abs(power - round(power)) < TOLERANCE


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=TOLERANCE)


def _ratio(theirs: dict[str, Tensor], ours: dict[str, Tensor]) -> float | None:
    """Return by how much their gradient is longer where both have one direction; else None."""
    a, b = (torch.cat([grads[name].double().flatten() for name in theirs]) for grads in (theirs, ours))
    ratio = float(a @ b) / max(float(b @ b), 1e-300)
    return ratio if float((a - ratio * b).norm()) < TOLERANCE * float(a.norm()) and ratio > 0 else None


def _number(option: Any) -> Any:
    return float(option) if isinstance(option, Tensor) and option.numel() == 1 else option
