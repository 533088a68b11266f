"""The optimizer's side of a training step: its state as tensors of the graph, its hyperparameters as numbers and scalars."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch import has_gradient_hooks, has_own_step, has_step_hooks, tensor_version, tree_leaves, viewed
from ..ops.apply_gradients import Update, UpdateRow

_Labels = Mapping[int, int]  # of parameters, by id
_PLAIN = (bool, int, float, str, torch.dtype, type(None))  # hyperparameters that are compared by value


class OptimizerState:
    """The state of an optimizer as the lists that a training step reads and writes, in the optimizer's own format.

    Args:
        optimizer: one of which `why_outside` has nothing to say.
        trained: ids of the parameters to update.
        labels: parameters of two labels have not always been updated together, and are counted apart from then on.

    Attributes:
        params: the parameters, in the order of the updates.
        states: their state and masters.
        scalars: the learning rates and the counts of updates, by name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, trained: Collection[int], labels: _Labels) -> None:
        self.labels = dict(labels)
        self.updates = _updates(optimizer, trained, self.labels)
        self.params = [p for update in self.updates for p in update.params]
        self.states = [t for update in self.updates for tensors in (*update.states.values(), update.masters) for t in tensors]
        self.scalars: dict[str, Tensor] = {
            f"lr_{place}": torch.zeros((), dtype=torch.float32, device=update.params[0].device)
            for place, update in enumerate(self.updates)}
        self._counts = {id(update.step): update.step for update in self.updates if update.step is not None}
        self._step_names = {count: f"step_{place}" for place, count in enumerate(self._counts)}
        self.scalars.update((self._step_names[count], step) for count, step in self._counts.items())
        self._rates: list[float | None] = [None] * len(self.updates)
        self.note_run()

    def set_learning_rates(self) -> None:
        """Read the learning rates, which a scheduler may have changed; each keeps its tensor."""
        for place, update in enumerate(self.updates):
            lr, scalar = update.group["lr"], self.scalars[f"lr_{place}"]
            if isinstance(lr, Tensor) and lr.device.type != "cpu":
                scalar.copy_(lr.detach().reshape(()))
            elif self._rates[place] != (number := float(lr)):
                scalar.fill_(number)
                self._rates[place] = number

    def rows(self, names: list[str]) -> tuple[UpdateRow, ...]:
        """Return the updates as a plan has them; `names` are those of all scalars of the graph."""
        return tuple(
            UpdateRow(update.op, len(update.params), len(update.states), bool(update.masters), names.index(f"lr_{place}"),
                      names.index(self._step_names[id(update.step)]) if update.step is not None else None,
                      tuple(x if isinstance(x, (bool, int)) else float(x) for x in update.numbers()))
            for place, update in enumerate(self.updates))

    def named(self, names: dict[int, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the state: "layer1.weight.exp_avg".

        Args:
            names: of the parameters, by id.
        """
        for update in self.updates:
            for key, tensors in (*update.states.items(), ("master_param", update.masters)):
                yield from ((f"{names[id(p)]}.{key}", tensor) for p, tensor in zip(update.params, tensors))
        yield from self.scalars.items()

    def note_run(self) -> None:
        """Note that the counts of updates are as the graph left them."""
        self._versions = [tensor_version(count) for count in self._counts.values()]

    def was_counted_by_others(self) -> bool:
        """Whether something else than the graph has counted updates since, and perhaps not those of all parameters alike."""
        return self._versions != [tensor_version(count) for count in self._counts.values()]

    def split(self, updated: Collection[int]) -> _Labels | None:
        """Return new labels where parameters that are counted together were not all updated; None where nothing changes.

        Args:
            updated: ids of the parameters that a run has updated.
        """
        apart = [update for update in self.updates if update.step is not None and update.step.dim()
                 and len({id(p) in updated for p in update.params}) > 1]
        if not apart:
            return None
        free = max(self.labels.values(), default=0) + 1
        for number, update in enumerate(apart):
            self.labels.update((id(p), free + number) for p in update.params if id(p) in updated)
        return self.labels


def structure(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return what a step's graph and its lists follow from, to be compared from call to call: all but the learning rates."""
    found: list[Any] = [has_step_hooks(optimizer), has_own_step(optimizer), id(optimizer.state)]
    found += [named for named in vars(optimizer).items() if isinstance(named[1], _PLAIN) and not named[0].startswith("_")]
    for group in optimizer.param_groups:
        found.append(id(group))
        found += [(name, _comparable(value)) for name, value in group.items() if name not in ("lr", "params", "initial_lr")]
        for p in group["params"]:
            found += (id(p), p.requires_grad, p.dtype, p.device, has_gradient_hooks(p))
    for held in optimizer.state.values():
        found.append(id(held))
        found += map(id, held.values()) if isinstance(held, dict) else ()
    return found


def _comparable(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_comparable, value))
    return value if isinstance(value, _PLAIN) else id(value)


def why_outside(optimizer: torch.optim.Optimizer, half: torch.dtype | None = None) -> str:
    """Return why `optimizer` cannot update inside of the graph; "" where it can.

    Args:
        half: what float32 parameters are about to be cast to.
    """
    if has_step_hooks(optimizer):
        return "hooks are registered around its step"
    if has_own_step(optimizer):
        return "its step() was replaced"
    ours = type(optimizer).__module__.startswith("apexfx.optimizers.")
    if not ours and type(optimizer) not in _TORCH:
        return f"there is no op for {type(optimizer).__module__}.{type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for option in ("amsgrad", "maximize", "differentiable", "dampening"):
            if group.get(option):
                return f"it has {option}={group[option]}"
        for option in ("betas", "eps", "weight_decay", "momentum"):
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(group.get(option))):
                return f"its {option} is a tensor, and in the graph only the learning rate may be one"
        for p in group["params"]:
            dtype = half if half is not None and p.dtype == torch.float32 else p.dtype
            if dtype == torch.float64:
                return "it has parameters of torch.float64, and in the graph its learning rate is float32"
            if not ours and dtype != torch.float32:
                return f"it keeps the state of a parameter of {dtype} in that dtype, and the op in float32"
    return ""


def _updates(optimizer: torch.optim.Optimizer, trained: Collection[int], labels: _Labels) -> list[Update]:
    if type(optimizer) not in _TORCH:  # apexfx.optimizers
        return optimizer.updates_in_graph(trained)
    return [update for group in optimizer.param_groups for update in _torch_updates(optimizer, group, trained, labels)]


def _torch_updates(optimizer: torch.optim.Optimizer, group: dict[str, Any], trained: Collection[int],
                   labels: _Labels) -> Iterator[Update]:
    """Yield the updates of a group: one for all parameters that were updated equally often, whose moments are corrected alike.

    What is missing of the state is made as torch makes it, so that a checkpoint of either resumes in the other. The counts, which
    torch keeps in a tensor a parameter, become elements of one vector, which the graph counts up at once.
    """
    op, keys, numbers, counts = _TORCH[type(optimizer)]
    by_count: dict[tuple[float, int], list[Tensor]] = {}
    for p in group["params"]:
        if id(p) in trained:
            count = float(optimizer.state.get(p, {}).get("step", 0.0)) if counts else 0.0
            by_count.setdefault((count, labels.get(id(p), 0) if counts else 0), []).append(p)
    for (count, _), members in by_count.items():
        states: dict[str, list[Tensor]] = {key: [] for key in keys if key != "momentum_buffer" or group["momentum"]}
        for p in members:
            for key, tensors in states.items():
                if optimizer.state[p].get(key) is None:
                    optimizer.state[p][key] = torch.zeros_like(p, memory_format=torch.preserve_format)
                tensors.append(optimizer.state[p][key])
        step = _one_vector(optimizer, members, count) if counts else None
        yield Update(op, members, states, [], step, group, functools.partial(numbers, group))


def _one_vector(optimizer: torch.optim.Optimizer, members: list[Tensor], count: float) -> Tensor:
    """Return the vector whose elements count the updates of the members; another step on this optimizer may have made it."""
    held = [optimizer.state[p].get("step") for p in members]
    base = viewed(held[0]) if isinstance(held[0], Tensor) else None
    if base is not None and base.dim() == 1 and len(base) == len(held) and all(
            isinstance(step, Tensor) and viewed(step) is base and step.storage_offset() == i for i, step in enumerate(held)):
        return base
    vector = torch.full((len(members),), count, dtype=torch.float32, device=members[0].device)
    for p, own in zip(members, vector.unbind()):
        optimizer.state[p]["step"] = own
    return vector


def _adam(group: dict[str, Any]) -> tuple[Any, ...]:
    beta1, beta2 = map(float, group["betas"])
    return beta1, beta2, group["eps"], group["weight_decay"], bool(group["decoupled_weight_decay"]), True


def _sgd(group: dict[str, Any]) -> tuple[Any, ...]:
    # Not as a first run: without dampening, a first buffer of zeros gives what torch's first step does.
    return group["momentum"], 0.0, group["weight_decay"], bool(group["nesterov"]), False, False


# Optimizer -> op, the names of its state in the op's order, the numbers after the learning rate, whether updates are counted.
_TORCH: dict[type, tuple[str, tuple[str, ...], Callable[[dict[str, Any]], tuple[Any, ...]], bool]] = {
    torch.optim.SGD: ("sgd_", ("momentum_buffer",), _sgd, False),
    torch.optim.Adam: ("adam_", ("exp_avg", "exp_avg_sq"), _adam, True),
    torch.optim.AdamW: ("adam_", ("exp_avg", "exp_avg_sq"), _adam, True),
}
