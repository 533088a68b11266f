"""check_splits(bits=True): whether a step with slices= gives the same bits on any number of ranks, tried in one process."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate
from torch import Tensor

from .._torch import tree_leaves, tree_map
from ..observe.digests import digest
from ..train_step import TrainStep
from ..train_step.model import check_traceable
from ..train_step.step import insides


@dataclass(frozen=True)
class BitsRow:
    """What so many ranks would add up.

    Attributes:
        ranks: how many.
        digest: a sha256 of what all slices give: gradients, and what the forward writes.
        where: the first slice that gives something else than in one process, and what; "" where none does.
    """

    ranks: int
    digest: str
    where: str


@dataclass(frozen=True)
class Bits:
    """What `check_splits(bits=True)` returns: print it."""

    rows: tuple[BitsRow, ...]

    @property
    def is_right(self) -> bool:
        """Whether all numbers of ranks have the same bits."""
        return not any(row.where for row in self.rows)

    def __str__(self) -> str:
        table = tabulate([(row.ranks, row.digest[:16], row.where or "the same") for row in self.rows],
                         headers=("ranks", "sha256", "verdict"), disable_numparse=True)
        return table if self.is_right else (
            f"{table}\nA slice gives something else where the process has computed others before it: the forward keeps something "
            "from call to call that is no registered buffer, in an attribute, a list or a count. Register it, or make it anew.")


def check_bits(step: TrainStep, batch: tuple[Any, ...], named: dict[str, Any], ranks: Sequence[int]) -> Bits:
    """Compare what each slice of a global batch gives where one process computes all, and where ranks compute a share each.

    Args:
        batch, named: of an update; parts are along the first dimension of all tensors that are as long as the first one.
        ranks: how many to try.

    Raises:
        ValueError: the step has no slices, or the batch, or the slices, cannot be split so.
    """
    check_traceable(step.model, step.options)
    slices = step.options.slices
    if slices is None:
        raise ValueError("apexfx: check_splits(bits=True) is of a step with slices=, which alone promises bits")
    size = next((len(x) for x in tree_leaves((batch, named)) if isinstance(x, Tensor) and x.dim()), 0)
    if not size or size % slices or any(slices % each for each in ranks):
        raise ValueError(f"apexfx: the batch has {size} examples, expected a multiple of slices={slices}, which ranks="
                         f"{tuple(ranks)} have to divide")
    parts = [tree_map(lambda x: x.tensor_split(slices)[place] if isinstance(x, Tensor) and x.dim() and len(x) == size else x,
                      (batch, named)) for place in range(slices)]
    alone = _given(step, parts, 0)
    rows = []
    for number in ranks:
        share = slices // number
        given = [row for first in range(0, slices, share) for row in _given(step, parts[first:first + share], first)]
        where = next((f"slice {place} parts at {name}" for place, (one, many) in enumerate(zip(alone, given)) for name in one
                      if one[name] != many[name]), "")
        digests = "".join(each for row in given for each in row.values())
        rows.append(BitsRow(number, hashlib.sha256(digests.encode()).hexdigest(), where))
    return Bits(tuple(rows))


def _given(step: TrainStep, parts: Sequence[Any], first: int) -> list[dict[str, str]]:
    """Return digests of what slices give, gradients, counts and buffers, by name, as a copy of the step computes them.

    Args:
        parts: the batch of each, by position and by keyword.
        first: which slice of an update the first one is.
    """
    model, objective, optimizer = copy.deepcopy((step.model, step.objective, step.optimizer))
    config = dataclasses.replace(step.config, inner="eager", inner_options={}, ddp=False, process_group=None)
    copied = TrainStep(model, objective, optimizer, dataclasses.replace(step.options, config=config, memory_budget=None))
    (components, state), given = insides(copied), list[dict[str, str]]()
    slices = components.slices
    slices.first, slices.num_updates = first, insides(step)[0].slices.num_updates

    def observe(own: list[Tensor]) -> None:
        names = [*(f"the gradient of {state.now.names[id(p)]}" for p in state.now.params), "the count of the loss",
                 *(f"the buffer {name}" for name in state.kept_buffers.names())]
        given.append({name: digest(each) for name, each in zip(names, own, strict=True)})

    slices.observe = observe
    for batch, named in parts:
        copied(*batch, **named)
    return given
