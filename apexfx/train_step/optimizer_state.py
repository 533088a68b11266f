"""The optimizer's side of a training step: its state as tensors of the graph, the parts that update it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from .._torch import tensor_version
from ..optimizers.state_layout import WHOLE, Layout
from ..optimizers.traced.traced_update import TracedUpdate
from ..optimizers.update import Labels
from ..optimizers.update_rules import Option, options_of, updates
from .hyperparameters import Hyperparameters
from .parts.apply_update import ApplyStep, ApplyUpdate
from .slots import SlotTensor


class OptimizerState:
    """The state of optimizers as the lists that a training step reads and writes, in each optimizer's own format.

    Args:
        optimizers: those of which `unsupported_reason` has nothing to say.
        trained: ids of the parameters to update.
        labels: parameters of two labels have not always been updated together, and are counted apart from then on.
        scheduled: the options besides the learning rate that change from step to step.
        layout: what this rank has of each parameter.

    Attributes:
        params: the parameters, in the order of the updates.
        hyperparameters: what a schedule may change of them.
        scalars: these, and the counts of updates, by name.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], trained: Collection[int], labels: Labels,
                 scheduled: Collection[Option] = (), layout: Layout = WHOLE) -> None:
        self.labels = dict(labels)
        self.updates = [update for optimizer, each in enumerate(optimizers)
                        for update in updates(each, trained, self.labels, options_of(optimizer, scheduled), layout)]
        self.params = [p for update in self.updates for p in update.params]
        self.hyperparameters = Hyperparameters(self.updates)
        self._counts = {id(count): count for update in self.updates for count, _ in update.counts_of()}
        self._step_names = {count: f"step_{place}" for place, count in enumerate(self._counts)}
        self.scalars = {**self.hyperparameters.scalars,
                        **{self._step_names[count]: step for count, step in self._counts.items()}}
        # The elements of the counts that the optimizers' states hold.
        self._elements = [tensor for each in optimizers for held in each.state.values() if isinstance(held, dict)
                          for tensor in held.values() if isinstance(tensor, Tensor) and not tensor.dim()]
        self._where = self._where_now()
        self.note_run()

    def parts(self) -> Iterator[ApplyUpdate | ApplyStep]:
        """Yield the updates as parts of the end of a step."""
        first = 0
        for place, update in enumerate(self.updates):
            last = first + len(update.params)
            if isinstance(update, TracedUpdate):
                places = {id(p): number for number, p in enumerate(update.params, first)}
                yield ApplyStep(f"{update.trace.name}.step()", first, last, update.trace.digest,
                                tuple((name, places[id(p)]) for p, name, _ in update.held),
                                tuple((self._step_names[id(vector)], tuple(places[id(p)] for p in members))
                                      for vector, members in update.vectors),
                                tuple(f"{name}_{place}" for name, _ in update.hyperparameters()), update.trace)
            else:
                yield ApplyUpdate(update.op, first, last, tuple(update.states), f"lr_{place}",
                                  self._step_names[id(update.step)] if update.step is not None else None, update.numbers,
                                  bool(update.masters))
            first = last

    def slot_tensors(self, names: dict[int, str]) -> Iterator[SlotTensor]:
        """Yield what the updates read and write: "layer1.weight.exp_avg", "lr_0".

        Args:
            names: of the parameters, by id.
        """
        first = 0
        for update in self.updates:
            places = {id(p): place for place, p in enumerate(update.params, first)}
            yield from (SlotTensor(key, f"{names[id(p)]}.{key}", tensor, places[id(p)]) for p, key, tensor in update.named())
            first += len(update.params)
        yield from (SlotTensor(name, name, tensor) for name, tensor in self.scalars.items())

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
