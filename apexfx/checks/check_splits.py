"""check_splits(): whether a training step means the same however its batch is split over ranks and calls."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import BatchNorm, TorchDispatchMode, tree_leaves, tree_map
from ..compiler.forward_errors import place_of_user
from ..train_step import TrainStep
from ..train_step.mean import Mean
from ..train_step.model import check_traceable
from .check_bits import Bits, check_bits
from .in_float64 import TOLERANCE, copied, explained, relative

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_SAME = (1e-9, 1e-12)  # values of one op
_IN_FLOAT64 = ("check_splits() computes in float64, on a copy of the model. What the objective reaches otherwise (a module or "
               "a tensor of its closure) is as it was, and a cast to float32 before a layer fits no more. A part has the first "
               "rows of every tensor that is as long as the first one, whatever an index means")
_MEAN = "Return apexfx.Mean(total, count), of a total that nothing has divided."


@dataclass(frozen=True)
class Split:
    """The gradient of a batch in parts, beside that of the whole batch.

    Attributes:
        ranks, accumulate: over how many of each the batch is split.
        error: the norm of the difference over that of the gradient of the whole batch.
        ratio: by how much the gradient is longer where both have one direction; else None.
        worst: the parameter that differs most, by the same measure of its own.
    """

    ranks: int
    accumulate: int
    error: float
    ratio: float | None
    worst: str

    @property
    def is_right(self) -> bool:
        return self.error < TOLERANCE


@dataclass(frozen=True)
class Splits:
    """What `check_splits` returns: print it.

    Attributes:
        rows: in the order of the arguments.
        mixes: the first op of forward and loss that computes with several examples at once, where the rows differ; or "".
    """

    rows: tuple[Split, ...]
    mixes: str

    @property
    def is_right(self) -> bool:
        """Whether the step is the same for every split."""
        return all(row.is_right for row in self.rows)

    def __str__(self) -> str:
        table = tabulate([(row.ranks, row.accumulate, f"{row.error:.1e}", "" if row.ratio is None else f"{row.ratio:.2f}",
                           "" if row.is_right else row.worst, self._verdict(row)) for row in self.rows],
                         headers=("ranks", "calls", "error", "ratio", "worst parameter", "verdict"), disable_numparse=True)
        return f"{table}\n{self._reason()}" if not self.is_right else table

    def _verdict(self, row: Split) -> str:
        parts = row.ranks * row.accumulate
        names = {parts: "ranks x calls", row.ranks: "ranks", row.accumulate: "calls"}
        for number, name in names.items() if row.ratio is not None and not row.is_right else ():
            for ratio, text in ((number, name), (1 / number, f"1 / ({name})")):
                if number > 1 and math.isclose(row.ratio, ratio, rel_tol=1e-4):
                    return f"{row.ratio:.2f} = {text}"
        return "the same" if row.is_right else "another step"

    def _reason(self) -> str:
        wrong = [row for row in self.rows if not row.is_right]
        if all(row.ratio is not None for row in wrong):
            return ("The direction is right and the length is not: the loss divides by what is not its own count, or not at all, "
                    f"and the step averages over calls and ranks. {_MEAN}")
        if self.mixes:
            return (f"{self.mixes}\ncomputes with several examples at once, so a split batch is another function. Over ranks, "
                    "sync_bn=True joins batch norms, and the loss can gather; over calls nothing does: a batch norm takes the "
                    "statistics of one call.")
        return ("No op mixes examples, so the parts have other denominators: a mean of means weighs an example of a small part "
                f"more. {_MEAN}")


def check_splits(step: TrainStep, /, *batch: Any, ranks: Sequence[int] = (1, 2, 4), accumulate: Sequence[int] = (1, 2, 4),
                 bits: bool = False, **named: Any) -> Splits | Bits:
    """Compare the gradient of a batch with that of the batch in parts, put together as the step does over calls and ranks.

        print(apexfx.check_splits(step, inputs, targets))

    It runs in one process, in eager float64, on copies: nothing of the step, the model, the batch or torch's random state
    changes, and no collective runs. Dropout is off, of torch's modules and of any with a float whose name says so. Parts are
    along the first dimension of all tensors that are as long as the first tensor of the batch; the others go with each part.

    Args:
        step: of `train_step`.
        batch, named: as a call of the step has them; as many examples as there are parts, or a multiple of it.
        ranks, accumulate: how many of each to try.
        bits: of a step with `slices`, compare to the bit what each slice gives by so many ranks with what it gives in one
            process, `accumulate` aside.

    Raises:
        ValueError: the batch cannot be split so; parameters are in neither the model nor the objective; the loss of the whole
            batch is not finite, or another when it is computed again.
        RuntimeError, ...: what the model or the loss raises in float64; a note says so.
    """
    if bits:
        return check_bits(step, batch, named, ranks)
    check_traceable(step.model, step.options)
    size = next((len(x) for x in tree_leaves((batch, named)) if isinstance(x, Tensor) and x.dim()), 0)
    most = math.lcm(*(r * a for r in ranks for a in accumulate))
    if not size or not most or size % most:
        raise ValueError(f"apexfx: the batch has {size} examples, expected a multiple of {most}, which ranks={tuple(ranks)} x "
                         f"accumulate={tuple(accumulate)} divide; the first tensor in a tuple, list or dictionary counts")
    parts = _Parts(step, (batch, named), size)
    with torch.random.fork_rng(), torch.enable_grad(), explained(_IN_FLOAT64):
        _check_repeats(*(parts.loss(parts.part(1, 0)) for _ in range(2)))
        whole = parts.gradients(1, 1)
        rows = tuple(_compared(r, a, whole, parts.gradients(r, a)) for r in ranks for a in accumulate)
        looked_at = () if all(row.is_right for row in rows) else (parts.loss_within(parts.part(1, 0)), parts.loss)
        mixes = (_first_mixing(loss, parts.part(2, 0), parts.part(1, 0)) for loss in looked_at)
        return Splits(rows, next(filter(None, mixes), ""))


class _Parts:
    """The gradients of a batch in parts, with copies of the model and the objective."""

    def __init__(self, step: TrainStep, batch: tuple[tuple[Any, ...], dict[str, Any]], size: int) -> None:
        self._batch, self._size, memo = batch, size, dict[int, Any]()
        self._model, self._objective = copy.deepcopy((step.model, step.objective), memo)
        optimizers = [step.optimizer] if isinstance(step.optimizer, torch.optim.Optimizer) else step.optimizer
        held = [id(p) for each in optimizers for group in each.param_groups for p in group["params"]]
        if not memo.keys() >= set(held):
            raise ValueError("apexfx: the optimizer has parameters that neither model nor objective holds, as modules= gives a "
                             "step those of a closure, of which there is no copy; make the objective a module that holds them")
        trained = {id(memo[each]) for each in held}
        loss_fn = getattr(self._objective, "loss_fn", self._objective)
        modules = {"": self._model, **({"loss.": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
        self._params = {prefix + name: p for prefix, module in modules.items() for name, p in module.named_parameters()
                        if id(p) in trained and p.requires_grad}
        self._buffers = [(each, name, buffer) for module in modules.values() for each in _prepared(module)
                         for name, buffer in each.named_buffers(recurse=False)]
        norms = [each for module in modules.values() for each in module.modules() if isinstance(each, BatchNorm)]
        # In eval mode, without running statistics, one takes those of its rank alone.
        self._joins = step.config.sync_bn and all(each.training or each.running_mean is not None for each in norms)

    def part(self, num_parts: int, place: int) -> Any:
        def of_tensor(x: Any) -> Any:
            x = copied(x)  # the objective may write it
            return x.tensor_split(num_parts)[place] if isinstance(x, Tensor) and x.dim() and len(x) == self._size else x

        return tree_map(of_tensor, self._batch)

    def loss(self, part: Any, batch_norms: _SyncedBatchNorms | None = None) -> Tensor | Mean:
        for module, name, buffer in self._buffers:  # the same values for each part
            setattr(module, name, buffer.clone())
        with batch_norms or contextlib.nullcontext():
            returned = self._objective(self._model, *part[0], **part[1])
        return returned[0] if isinstance(returned, tuple) else returned

    def loss_within(self, call: Any) -> Callable[[Any], Tensor | Mean]:
        """Return the loss of one rank's part of a call."""
        if not self._joins:
            return self.loss
        self.loss(call, joined := _SyncedBatchNorms())
        return lambda part: self.loss(part, _SyncedBatchNorms(joined.statistics))

    def gradients(self, ranks: int, calls: int) -> dict[str, Tensor]:
        """Return the gradient that a step makes of the losses of its calls and ranks, by the rule of each kind."""
        losses = [loss(self.part(ranks * calls, call * ranks + rank))
                  for call in range(calls) for loss in [self.loss_within(self.part(calls, call))] for rank in range(ranks)]
        if isinstance(losses[0], Mean):
            terms = zip(*(mean.terms for mean in losses))
            loss = sum(sum(total for total, count in term if count) / sum(count for _, count in term) for term in terms)
        else:
            loss = sum(losses) / len(losses)
        grads = torch.autograd.grad(loss, list(self._params.values()), allow_unused=True)
        return {name: g for name, g in zip(self._params, grads) if g is not None}


class _SyncedBatchNorms(TorchFunctionMode):
    """Computes batch norms in training as a step under sync_bn=True does on one rank: with the statistics of the whole call.

    Args:
        given: the variance and mean of each, in order; None: those of the input, which is the whole call.

    Attributes:
        statistics: what was used.
    """

    def __init__(self, given: Sequence[tuple[Tensor, Tensor]] | None = None) -> None:
        super().__init__()
        self.statistics: list[tuple[Tensor, Tensor]] = []
        self._given = given

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))

    def _batch_norm(self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
                    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        var, mean = (torch.var_mean(input, dims, correction=0, keepdim=True) if self._given is None
                     else self._given[len(self.statistics)])
        self.statistics.append((var, mean))
        scale, shift = (default if p is None else p.view_as(mean) for p, default in ((weight, 1.0), (bias, 0.0)))
        return (input - mean) * (var + eps).rsqrt() * scale + shift


def _prepared(module: nn.Module) -> list[nn.Module]:
    """Return a module and those in it, in float64, and as no part of a batch differs by itself."""
    for each in (modules := list(module.double().modules())):
        if isinstance(each, _DROPOUTS):
            each.p = 0.0
        for name in [name for name, x in vars(each).items() if "dropout" in name and isinstance(x, float)]:
            setattr(each, name, 0.0)  # of attention, between the layers of an LSTM
    return modules


def _check_repeats(*losses: Tensor | Mean) -> None:
    first, again = (float((loss.value if isinstance(loss, Mean) else loss).detach()) for loss in losses)
    if not math.isfinite(first) or not math.isclose(first, again, rel_tol=1e-9, abs_tol=1e-12):
        raise ValueError(f"apexfx: the loss of the whole batch is {first:g}, and {again:g} when it is computed again, expected a "
                         "finite number that stays: nothing can be compared where the forward or the loss draws random numbers "
                         "(dropout of modules is off already) or keeps count of its calls; turn that off for the check")


def _compared(ranks: int, accumulate: int, whole: dict[str, Tensor], split: dict[str, Tensor]) -> Split:
    a, b = (torch.cat([grads.get(name, torch.zeros_like(g)).flatten() for name, g in whole.items()]) for grads in (whole, split))
    least = float(a.norm()) * TOLERANCE  # a bias in front of a batch norm has a gradient of roundings
    errors = {name: relative(split.get(name, torch.zeros_like(g)) - g, g, least) for name, g in whole.items()}
    ratio = float(a @ b / (a @ a))
    is_parallel = relative(b - ratio * a, b) < TOLERANCE
    return Split(ranks, accumulate, relative(b - a, a), ratio if is_parallel else None, max(errors, key=errors.__getitem__))


class _Ops(TorchDispatchMode):
    """Keeps the results of ops that compute with tensors; or, given those for half the batch, finds the first op that mixes."""

    def __init__(self, half: Iterator[tuple[Any, list[Tensor]]] | None = None) -> None:
        super().__init__()
        self.results: list[tuple[Any, list[Tensor]]] = []
        self.mixes, self._half = "", half

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
            return out
        tensors = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if self._half is None:
            self.results.append((func, [x.detach().clone() for x in tensors]))
        else:
            same, halves = next(self._half, (None, []))
            if not self.mixes and same is func and any(map(_mixes, tensors, halves)):
                self.mixes = f"{func} {place_of_user()}".rstrip()
        return out


def _first_mixing(loss: Callable[[Any], Any], half_batch: Any, batch: Any) -> str:
    """Return the first op that gives the first half of the batch other values than where it is alone, and its line."""
    with torch.no_grad(), _Ops() as alone:
        loss(half_batch)
    with torch.no_grad(), _Ops(iter(alone.results)) as whole:
        loss(batch)
    return whole.mixes


def _mixes(whole: Tensor, half: Tensor) -> bool:
    """Return whether results for the first half of a batch hold values that those for the batch have nowhere."""
    if whole.dim() != half.dim() or not whole.is_floating_point() or whole.numel() < 2 * half.numel():
        return False
    if sum(map(operator.ne, whole.shape, half.shape)) > 1:  # of pairs of examples
        return True
    among, values = whole.flatten().sort().values, half.flatten()
    places = torch.searchsorted(among, values)
    near = [among[places.add(d).clamp(0, len(among) - 1)] for d in (-1, 0)]
    return not all((torch.isclose(near[0], values, *_SAME) | torch.isclose(near[1], values, *_SAME, equal_nan=True)).tolist())
