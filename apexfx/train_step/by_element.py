"""Which optimizers, and which parts of a user's own, a step may have of which each rank has rows of the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..optimizers.fused_adagrad import FusedAdagrad
from ..optimizers.fused_adam import FusedAdam
from ..optimizers.fused_sgd import FusedSGD
from .optimizer_list import OptimizerList
from .parts.part import Part

# All but Muon, which makes matrices whole, update each element by itself.
_OPTIMIZERS = (*(getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "RAdam", "Adamax",
                                                         "Adadelta", "Muon")), FusedAdagrad, FusedAdam, FusedSGD)
OF_ROWS = "a step of which each rank updates its rows of the parameters (under fully_shard(), or by shard=)"


def check_by_element(optimizers: OptimizerList, parts: Sequence[Part]) -> None:
    """Refuse optimizers, and parts of a user's own, that make an element of others: each rank has rows.

    Raises:
        ValueError: there is one.
    """
    if others := [part for part in parts if not part.by_element]:
        raise ValueError(f"apexfx: the part {others[0]} was given, and in {OF_ROWS} a part has those rows; give its class "
                         "by_element = True if what it makes of an element follows from that element, end.norm and end.norms "
                         "alone")
    if whole := [type(each).__name__ for each in optimizers if type(each) not in _OPTIMIZERS]:
        raise ValueError(f"apexfx: {whole[0]} was given, and {OF_ROWS} has "
                         f"{', '.join(each.__name__ for each in _OPTIMIZERS)} alone; use one of them")
