"""The optimizer's side of a training step: its state as tensors of the graph, its hyperparameters as numbers and scalars."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .._torch import has_own_step, has_step_hooks, tensor_version
from ..optimizers.update_rules import Labels, Option, Placed, TracedUpdate, options_of, schedulable, updates, whole
from .parts.update import ApplyStep, ApplyUpdate
from .slots import Row

_END = object()  # of a list, among objects of several
_PLAIN = (bool, int, float, str, torch.dtype, type(None))  # hyperparameters that are compared by value


class OptimizerState:
    """The state of optimizers as the lists that a training step reads and writes, in each optimizer's own format.

    Args:
        optimizers: those of which `unsupported_reason` has nothing to say.
        trained: ids of the parameters to update.
        labels: parameters of two labels have not always been updated together, and are counted apart from then on.
        scheduled: the options besides the learning rate that change from step to step.
        placed: as of `update_rules.updates`.

    Attributes:
        params: the parameters, in the order of the updates.
        scalars: the learning rates, scheduled hyperparameters, and the counts of updates, by name.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], trained: Collection[int], labels: Labels,
                 scheduled: Collection[Option] = (), placed: Placed = whole) -> None:
        self.labels = dict(labels)
        self.updates = [update for optimizer, each in enumerate(optimizers)
                        for update in updates(each, trained, self.labels, options_of(optimizer, scheduled), placed)]
        self.params = [p for update in self.updates for p in update.params]
        self.scalars: dict[str, Tensor] = {
            f"{name}_{place}": torch.zeros((), dtype=update.number_dtype, device=update.params[0].device)
            for place, update in enumerate(self.updates) for name, _ in update.hyperparameters()}
        self._counts = {id(count): count for update in self.updates for count, _ in update.counts_of()}
        self._step_names = {count: f"step_{place}" for place, count in enumerate(self._counts)}
        self.scalars.update((self._step_names[count], step) for count, step in self._counts.items())
        self._numbers: dict[str, float] = {}  # of the host, that scalars have now
        # The elements of the counts that the optimizers' states hold.
        self._elements = [tensor for each in optimizers for held in each.state.values() if isinstance(held, dict)
                          for tensor in held.values() if isinstance(tensor, Tensor) and not tensor.dim()]
        self._where = self._where_now()
        self.note_run()

    def set_hyperparameters(self) -> None:
        """Read the learning rates, and what else a scheduler may have changed; each keeps its tensor."""
        for place, update in enumerate(self.updates):
            for name, number in update.hyperparameters():
                scalar = f"{name}_{place}"
                if isinstance(number, str):
                    raise _text_for_number(name, number)
                if isinstance(number, Tensor) and number.device.type != "cpu":
                    self.scalars[scalar].copy_(number.detach().reshape(()))
                    self._numbers.pop(scalar, None)
                elif self._numbers.get(scalar) != (number := float(number)):
                    self.scalars[scalar].fill_(number)
                    self._numbers[scalar] = number

    def parts(self) -> Iterator[ApplyUpdate | ApplyStep]:
        """Yield the updates as parts of the end of a step."""
        first = 0
        for place, update in enumerate(self.updates):
            last = first + len(update.params)
            if isinstance(update, TracedUpdate):
                places = {id(p): number for number, p in enumerate(update.params, first)}
                yield ApplyStep(update.op, first, last, update.trace.digest,
                                tuple((name, places[id(p)]) for p, name, _ in update.held),
                                tuple((self._step_names[id(vector)], tuple(places[id(p)] for p in members))
                                      for vector, members in update.vectors),
                                tuple(f"{name}_{place}" for name, _ in update.hyperparameters()))
            else:
                yield ApplyUpdate(update.op, first, last, tuple(update.states), f"lr_{place}",
                                  self._step_names[id(update.step)] if update.step is not None else None, update.numbers,
                                  bool(update.masters))
            first = last

    def rows(self, names: dict[int, str]) -> Iterator[Row]:
        """Yield what the updates read and write: "layer1.weight.exp_avg", "lr_0".

        Args:
            names: of the parameters, by id.
        """
        first = 0
        for update in self.updates:
            places = {id(p): place for place, p in enumerate(update.params, first)}
            yield from (Row(key, f"{names[id(p)]}.{key}", tensor, places[id(p)]) for p, key, tensor in update.named())
            first += len(update.params)
        yield from (Row(name, name, tensor) for name, tensor in self.scalars.items())

    def note_run(self) -> None:
        """Note that counts of updates, and other numbers of the state, are as the graph left them."""
        self._versions = [tensor_version(step) for step in self._counts.values()]

    def was_counted_by_others(self) -> bool:
        """Return whether something else than the graph has written or moved such numbers since, or a schedule takes a branch."""
        if not all(update.holds() for update in self.updates):
            return True
        return self._versions != [tensor_version(step) for step in self._counts.values()] or self._where != self._where_now()

    def _where_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._elements))

    def split(self, updated: Collection[int]) -> bool:
        """Give parameters that are counted together and were not all updated other labels; return whether there were any.

        Args:
            updated: ids of the parameters that a run has updated.
        """
        apart = {tuple(map(id, params)) for update in self.updates for count, params in update.counts_of()
                 if count.dim() and len({id(p) in updated for p in params}) > 1}
        free = max(self.labels.values(), default=0) + 1
        for number, params in enumerate(apart):
            self.labels.update((p, free + number) for p in params if p in updated)
        return bool(apart)


def cycled(optimizers: Iterable[torch.optim.Optimizer]) -> set[Option]:
    """Return momentum or betas where a scheduler of torch cycles them: OneCycleLR and CyclicLR write the bounds in the group."""
    return {(optimizer, place, name) for optimizer, each in enumerate(optimizers) for place, group in enumerate(each.param_groups)
            if "max_momentum" in group for name in ("momentum", "betas") if name in group}


def schedulable_options(optimizers: Iterable[torch.optim.Optimizer]) -> dict[Option, Any]:
    """Return what a schedule may change besides the learning rates, to be compared."""
    return {(optimizer, place, name): option for optimizer, each in enumerate(optimizers)
            for place, group in enumerate(each.param_groups) for name, option in schedulable(each, group).items()}


class Structure:
    """What a step's graph and its state follow from, of optimizers: all but the learning rates.

    None of that has a version, so that each call compares it.

    Args:
        scheduled: as of `OptimizerState`: left out.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], scheduled: Collection[Option] = ()) -> None:
        self._optimizers = optimizers
        self._scheduled = [options_of(place, scheduled) for place in range(len(optimizers))]
        self._facts, self._params = self._facts_now(), [p for each in optimizers for group in each.param_groups
                                                        for p in group["params"]]
        self._guarded = self._guarded_now()
        self._objects = [*self._objects_now()]  # which keeps all of it alive, so that nothing is taken for another in its place

    def has_changed(self, *, cached: bool) -> bool:
        """Return whether something is not as it was.

        Args:
            cached: for graphs that were compiled before alone, whose guards see what is of the parameters themselves.
        """
        return not all(map(is_, self._objects_now(), self._objects)) or self._facts_now() != self._facts \
            or not cached and self._guarded_now() != self._guarded

    def _guarded_now(self) -> list[Any]:
        return [(p.requires_grad, p.dtype, p.device) for p in self._params]

    def _facts_now(self) -> list[Any]:
        return [part for each, scheduled in zip(self._optimizers, self._scheduled) for part in _facts(each, scheduled)]

    def _objects_now(self) -> Iterator[Any]:
        """Return parameters by group, and state by name, to be compared by identity: tensors of equal numbers are two.

        No tensors are compared, which a mode would have to forbid: an interrupt may leave it on.
        """
        parts: list[Any] = []
        for each in self._optimizers:
            parts += (part for group in each.param_groups for part in (group["params"], (_END,)))
            every = list(each.state.values())
            held = [of_one for of_one in every if isinstance(of_one, dict)]
            others = every if len(held) < len(every) else ()  # what an optimizer keeps of itself
            parts += each.state, chain.from_iterable(held), chain.from_iterable(map(dict.values, held)), others, (_END,)
        return chain.from_iterable(parts)


def _facts(optimizer: torch.optim.Optimizer, scheduled: dict[int, set[str]]) -> list[Any]:
    facts: list[Any] = [has_step_hooks(optimizer), has_own_step(optimizer), id(optimizer.state)]
    facts += [named for named in vars(optimizer).items() if isinstance(named[1], _PLAIN) and not named[0].startswith("_")]
    for place, group in enumerate(optimizer.param_groups):
        changing = scheduled.get(place, ())
        facts.append(id(group))
        facts += [(name, id(value) if name == "step" else _comparable(value)) for name, value in group.items()
                  if name not in ("lr", "params", "initial_lr") and name not in changing]
    return facts


def check_numbers(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a text in the place of a number, as a file of options has one ("1e-3" is a text in YAML)."""
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, str) and isinstance(optimizer.defaults.get(name), (int, float)):
                raise _text_for_number(name, value)


def _text_for_number(name: str, value: str) -> TypeError:
    return TypeError(f"apexfx: {name} of the optimizer is {value!r} (str), expected a number: float({value!r})")


def _comparable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    if isinstance(value, Tensor):  # on a device, without waiting for it
        return (id(value), tensor_version(value)) if value.device.type != "cpu" or value.numel() != 1 else float(value)
    return value if isinstance(value, _PLAIN) else id(value)
