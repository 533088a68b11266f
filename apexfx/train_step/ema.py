"""An exponential moving average of the parameters: a part of the update, and a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..config import is_number
from ..ops.apply_gradients import EmaRow
from ..optimizers._checkpoints import short
from ..optimizers.ema_update import follow
from .saved_numbers import Saved, check_saved

COUNTS = "num_averaged"


@dataclass(frozen=True)
class EMA:
    """Average the model's parameters as they are after each update: `average = decay * average + (1 - decay) * parameter`.

    The first update copies, as that of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`.

    Args:
        decay: what remains of an average in an update, 0 or more and less than 1.
    """

    decay: float = 0.9999

    def __post_init__(self) -> None:
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise ValueError(f"apexfx: decay={self.decay!r} was given, expected a number from 0 up to but not 1")


class EmaState:
    """The averages of a step: each belongs to a parameter, and stays where that is not trained for a while.

    Args:
        options: what the user asked for.

    Attributes:
        averages: those of the parameters that `hold` was given, in their order.
        counts: how many updates each has followed, int64.
    """

    def __init__(self, options: EMA) -> None:
        self._options = options
        self._held: Any = WeakIdKeyDictionary()  # parameter -> its average, and an element of `counts`
        self.averages: list[Tensor] = []

    def hold(self, params: Sequence[Tensor]) -> None:
        """Make what is missing, and bring what is there into the order of `params`."""
        if not params:
            raise ValueError("apexfx: ema= averages the parameters of the model, and the step trains none of them; leave it out")
        held = [self._of(p) for p in params]
        self.averages, self.counts = [average for average, _ in held], torch.stack([count for _, count in held])
        self._held.update(zip(params, zip(self.averages, self.counts.unbind())))

    def row(self, scalars: list[str], left_out: Iterable[int]) -> EmaRow:
        """Return what a plan says of it; `scalars` are the names of all."""
        return EmaRow(scalars.index(COUNTS), self._options.decay, tuple(left_out))

    def average(self, param: Tensor) -> list[Tensor]:
        """Return the average of a parameter, if it has one."""
        return [self._held[param][0]] if param in self._held else []

    @torch.no_grad()
    def follow(self, values: Sequence[Tensor]) -> None:
        """Follow an update that was made outside of the graph; `values` are the parameters, or their masters."""
        follow(self.averages, values, self.counts, self._options.decay, None)

    @torch.no_grad()
    def module(self, model: nn.Module) -> nn.Module:
        """Return a copy of `model` whose parameters are their averages, where they have followed an update.

        Raises:
            TypeError: it holds what cannot be copied.
        """
        copied: dict[int, Any] = {}  # by id, what `deepcopy` takes
        for p in model.parameters():
            if p in self._held:
                average, count = self._held[p]
                copied[id(p)] = nn.Parameter(torch.where(count > 0, average, p).to(p.dtype), p.requires_grad)
        try:
            return copy.deepcopy(model, copied)
        except Exception as error:
            raise TypeError(f"apexfx: step.ema_model copies the model, which holds what cannot be copied ({error}); give its "
                            "class a __deepcopy__, or load step.state_dict()['ema']['averages'] into another model") from error

    def state_dict(self, model: nn.Module) -> dict[str, dict[str, Tensor]]:
        """Return averages and counts by the names of parameters: the tensors themselves, as modules do."""
        held = {name: self._held[p] for name, p in model.named_parameters() if p in self._held}
        return {"averages": {name: average for name, (average, _) in held.items()},
                "counts": {name: count for name, (_, count) in held.items()}}

    def check(self, state: Any, model: nn.Module) -> None:
        """Refuse the averages of another model.

        Raises:
            ValueError: the entry, and what was expected.
        """
        params = dict(model.named_parameters())
        if not isinstance(state, dict) or not all(isinstance(state.get(part), dict) for part in ("averages", "counts")):
            raise ValueError(f"apexfx: the averages of ema= were given as {short(state)}, expected 'averages' and 'counts', each "
                             "a dict; load what state_dict() has returned")
        averages, counts = state["averages"], state["counts"]
        if others := sorted({*averages, *counts} - {*params}, key=str):
            raise ValueError(f"apexfx: the state holds an average of {others[0]!r}, which is no parameter of this model; load it "
                             "into a step of the same model")
        check_saved("the averages of ema=", averages, {name: Saved(params[name], None) for name in counts}, missing=False)
        zero = torch.zeros((), dtype=torch.int64)
        check_saved("how many updates an average of ema= has followed", counts, {name: Saved(zero) for name in averages},
                    missing=False)

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]], model: nn.Module) -> None:
        """Load what `state_dict` returned and `check` let through; what has no average there begins anew."""
        named = dict(model.named_parameters())
        loaded = [(self._of(named[name]), average, state["counts"][name]) for name, average in state["averages"].items()]
        values = [(average.clone(), count.clone()) for _, average, count in loaded]  # they may be those that are zeroed now
        for tensors in self._held.values():
            for tensor in tensors:
                tensor.zero_()
        for (own, _, _), new in zip(loaded, values):
            for tensor, value in zip(own, new):
                tensor.copy_(value)

    def _of(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the average of a parameter and its count, made where it has none."""
        dtype = torch.promote_types(p.dtype, torch.float32)
        if p not in self._held:
            average = torch.zeros_like(p, dtype=dtype, requires_grad=False)
            self._held[p] = average, torch.zeros((), dtype=torch.int64, device=p.device)
        average, count = self._held[p]
        if average.dtype != dtype:
            self._held[p] = average.to(dtype), count
        return self._held[p]
