"""An exponential moving average of the parameters: a part of the update, and a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..._torch import under_fully_shard
from ...config import brief, is_number
from ...errors import NotKeptError
from ...optimizers.end_of_step import EndOfStep
from ...optimizers.state_layout import WHOLE
from .part import Part, Slot

if TYPE_CHECKING:
    from ..slots import Slots

aten = torch.ops.aten
AVERAGE, COUNT = "average", "num_averaged"


@dataclass(frozen=True)
class EMA(Part):
    """Average the model's parameters as they are after each update: `average = decay * average + (1 - decay) * parameter`.

    The first update copies, as that of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`.

    Args:
        decay: what remains of an average in an update, 0 or more and less than 1.
    """

    decay: float = 0.9999
    place, by_element = "after_update", True

    def __post_init__(self) -> None:
        if not is_number(self.decay) or not 0 <= self.decay < 1:
            raise ValueError(f"apexfx: decay={self.decay!r} was given, expected a number from 0 up to but not 1")

    @classmethod
    def checked(cls, option: Any) -> EMA | None:
        """Return what `train_step` was given, if it is one, or None."""
        if option is not None and type(option) is not cls:
            raise TypeError(f"apexfx: ema={brief(option)} was given, expected an apexfx.EMA, as apexfx.EMA(decay=0.999), or "
                            "None; an average of your own is a part, parts=[...]")
        return option

    def slots(self) -> Sequence[Slot]:
        return (Slot(AVERAGE, each="tensor", dtype=None, of_model=True, compared=True, saved=("ema", "averages")),
                Slot(COUNT, each="number", dtype=torch.int64, of_model=True, saved=("ema", "counts"), least=0.0))

    def apply(self, end: EndOfStep) -> None:
        averages, counts = end.slots(AVERAGE), end.slot(COUNT)
        end.commit(averages, followed(averages, [end.updated[place] for place in end.places(AVERAGE)], counts, self.decay))
        end.count_up([counts])

    def describe(self) -> str:
        return f"averages of the parameters, decay {self.decay!r}"


def followed(averages: Sequence[Tensor], values: Sequence[Tensor], counts: Tensor, decay: float) -> list[Tensor]:
    """Return averages that have moved towards what their parameters are now; one that has followed no update is the parameter.

    Args:
        averages: float32, float64 where the parameter is; 0 before the first update, which so needs no case of its own.
        values: for each the updated parameter, or its master.
        counts: how many updates each has followed, int64.
        decay: what remains of an average in an update.
    """
    remains = (counts > 0).double() * decay
    # As torch.lerp: the number that is rounded to float32 is the smaller one of decay and 1 - decay.
    factors = -(remains - 1.0) if decay > 0.5 else remains
    result: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(average.dtype for average in averages):
        members = [place for place, average in enumerate(averages) if average.dtype == dtype]
        old, own_factors = [averages[place] for place in members], factors.to(dtype)
        now = [values[place].to(dtype) for place in members]
        near, far = (old, now) if decay > 0.5 else (now, old)
        result.update(zip(members, aten._foreach_addcmul(
            near, aten._foreach_sub(far, near), [own_factors[place] for place in members], 1.0)))
    return [result[place] for place in range(len(averages))]


def check_averaged(slots: Slots) -> None:
    """Raise where a step averages nothing."""
    if AVERAGE not in slots:
        raise NotKeptError("apexfx: step.ema_model is a model of averages, and this step has none; make it with "
                           "ema=apexfx.EMA(decay=0.9999)")


@torch.no_grad()
def averaged_model(model: nn.Module, slots: Slots) -> nn.Module:
    """Return a copy of `model`, in eval mode, whose parameters are their averages, where they have followed an update.

    Raises:
        TypeError: it holds what cannot be copied.
    """
    if under_fully_shard([model]):
        raise TypeError("apexfx: step.ema_model copies the model, which torch does not for one under fully_shard(); load "
                        "step.state_dict()['ema']['averages'] into another one that is sharded alike")
    averages, counts = slots.of_params(AVERAGE), slots.of_params(COUNT)
    copied: dict[int, Any] = {}  # by id, what `deepcopy` takes
    for p in model.parameters():
        if p in averages:
            copied[id(p)] = nn.Parameter(torch.where(counts[p] > 0, WHOLE.placed(averages[p], p), p).to(p.dtype), p.requires_grad)
    try:
        return copy.deepcopy(model, copied).eval()
    except Exception as error:
        raise TypeError(f"apexfx: step.ema_model copies the model, which holds what cannot be copied ({error}); give its "
                        "class a __deepcopy__, or load step.state_dict()['ema']['averages'] into another model") from error
