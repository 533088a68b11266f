"""The slots of a step: the tensors that its parts declare, and what a checkpoint has of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..optimizers._checkpoints import short
from ..optimizers.state_layout import WHOLE, Layout
from .parts.part import Slot

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SlotTensor:
    """A tensor that the end of a step reads or writes.

    Attributes:
        slot: the name of what it is: "exp_avg".
        name: its own: "layer1.weight.exp_avg".
        tensor: what holds it.
        place: of the parameter that it belongs to; None where it is of the step.
        compared: whether replicas are compared by it.
    """

    slot: str
    name: str
    tensor: Tensor
    place: int | None = None
    compared: bool = False


def slots_of(tensors: Iterable[SlotTensor]) -> tuple[tuple[str, int | None], ...]:
    """Return of each tensor what a `Plan` has of it."""
    return tuple((each.slot, each.place) for each in tensors)


class Slots:
    """The tensors of the slots that the parts of a step declare. Those of a parameter stay where it is not trained for a while.

    Args:
        declared: all.
        like: a parameter that is trained.

    Attributes:
        layout: what this rank has of each parameter.

    Raises:
        ValueError: two have one name.
    """

    layout: Layout = WHOLE

    def __init__(self, declared: Iterable[Slot], like: Tensor) -> None:
        self.declared: dict[str, Slot] = {}
        for slot in declared:
            if self.declared.setdefault(slot.name, slot) is not slot:
                raise ValueError(f"apexfx: the slot {slot.name!r} is declared twice by the parts of this step; give one another "
                                 "name")
        self._of_step = {name: slot.make(like) for name, slot in self.declared.items() if not slot.each}
        self._of_params: dict[str, Any] = {name: WeakIdKeyDictionary() for name, slot in self.declared.items() if slot.each}

    def __contains__(self, name: str) -> bool:
        return name in self.declared

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of a slot that the step has once."""
        return self._of_step[name]

    def of_params(self, name: str) -> Mapping[Tensor, Tensor]:
        """Return what parameters have of a slot, by parameter."""
        return self._of_params[name]

    def slot_tensors(self, params: Sequence[Tensor], names: Mapping[int, str], of_model: Collection[int]) -> Iterator[SlotTensor]:
        """Yield what a graph reads and writes of these parameters; what is missing is made.

        Args:
            names: of parameters, by id.
            of_model: ids of those of the model.
        """
        for name, slot in self.declared.items():
            members = [place for place, p in enumerate(params) if not slot.of_model or id(p) in of_model]
            if not members:
                raise ValueError(f"apexfx: {slot.saved[0]}= is of the parameters of the model, and the step trains none of them; "
                                 "leave it out")
            if not slot.each:
                yield SlotTensor(name, name, self._of_step[name], compared=slot.compared)
            elif slot.each == "number":
                held = self._of_params[name]
                vector = torch.stack([self._of(slot, params[place]) for place in members])
                held.update(zip([params[place] for place in members], vector.unbind()))
                yield SlotTensor(name, name, vector, compared=slot.compared)
            else:
                for place in members:
                    p = params[place]
                    yield SlotTensor(name, f"{names[id(p)]}.{name}", self._of(slot, p), place, slot.compared)

    def _of(self, slot: Slot, p: Tensor) -> Tensor:
        """Return what a parameter has of a slot, made where it has none."""
        held = self._of_params[slot.name]
        if p not in held:
            held[p] = self.layout.as_state(slot.make(self.layout.rows(p)), p)
        elif held[p].dtype != slot.dtype_for(p):
            held[p] = held[p].to(slot.dtype_for(p))
        return held[p]

    # ---- checkpoints ------------------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any], named: Mapping[str, Tensor]) -> None:
        """Write what a checkpoint has of the slots into `state`: of parameters the tensors themselves, as modules do.

        Args:
            named: parameters, by name.
        """
        for slot in self._saved():
            section = state
            for key in slot.saved[:-1]:
                section = section.setdefault(key, {})
            if slot.each:
                held = self._of_params[slot.name]
                section[slot.saved[-1]] = {name: held[p] for name, p in named.items() if p in held}
            else:
                section[slot.saved[-1]] = self._of_step[slot.name].clone()

    def check(self, state: Mapping[str, Any], named: Mapping[str, Tensor]) -> None:
        """Refuse a checkpoint of which the slots cannot be loaded.

        Raises:
            ValueError: the entry, and what was expected.
        """
        of_section: dict[tuple[str, ...], Collection[str]] = {}  # whose parameters have something there
        for slot in self._saved():
            held = section(state, slot.saved) if slot.each else None
            of_user = slot.saved[0] == "parts"
            if held is not None and (not of_user or slot.saved[-1] in held):  # else it begins anew
                self._check_each(slot, held, named, of_section if not of_user else {})
            for keys in (slot.saved, slot.also_saved) if not slot.each else ():
                if keys and keys[-1] in (held := section(state, keys) or {}):
                    own = self._of_step[slot.name]
                    _check(slot, f"{_said(keys[:-1])}: {keys[-1]!r}", held[keys[-1]], own.shape, own.dtype)
                    break

    def _check_each(self, slot: Slot, section: Mapping[str, Any], named: Mapping[str, Tensor],
                    of_section: dict[tuple[str, ...], Collection[str]]) -> None:
        given, what = section.get(slot.saved[-1]), ".".join(slot.saved)
        if not isinstance(given, Mapping):
            raise ValueError(f"apexfx: the state was given with {what} as {short(given)}, expected a dict; load what "
                             "state_dict() has returned")
        if others := sorted({*given} - {*named}, key=str):
            raise ValueError(f"apexfx: the state has {what} of {others[0]!r}, which is no parameter of this step; load it into a "
                             "step of the same model")
        if apart := sorted({*given} ^ {*of_section.setdefault(slot.saved[:-1], given.keys())}):
            raise ValueError(f"apexfx: the state has {what} of other parameters than what belongs to it, {apart[0]!r} among "
                             "them; load what state_dict() has returned")
        for name, tensor in given.items():
            p = named[name]
            _check(slot, f"{what}: {name!r}", tensor, p.shape if slot.each == "tensor" else torch.Size(), slot.dtype_for(p))

    def load(self, state: Mapping[str, Any], named: Mapping[str, Tensor]) -> None:
        """Load what `check` let through; what it lacks begins anew."""
        for slot in self.declared.values():
            if not slot.each:
                given = _found(state, slot) if slot.saved and slot.loaded else None
                own = self._of_step[slot.name]
                own.fill_(slot.first) if given is None else own.copy_(given)
                continue
            given = _found(state, slot) or {}
            values = [(self._of(slot, p := named[name]), self.layout.placed(tensor.clone(), p)) for name, tensor in given.items()]
            for tensor in self._of_params[slot.name].values():  # perhaps those that were given
                tensor.fill_(slot.first)
            for own, value in values:
                own.copy_(value)

    def _saved(self) -> list[Slot]:
        return [slot for slot in self.declared.values() if slot.saved]


def _found(state: Mapping[str, Any], slot: Slot) -> Any:
    """Return what a checkpoint has of a slot; None for nothing."""
    for keys in filter(None, (slot.saved, slot.also_saved)):
        if keys[-1] in (held := section(state, keys) or {}):
            return held[keys[-1]]
    return None


def _said(keys: Sequence[str]) -> str:
    return f"{'.'.join(keys)}{', of a loss scale' if keys[0] == 'scaler' else ''}"


def section(state: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any] | None:
    """Return what a checkpoint has below all of `keys` but the last one; None where it has nothing there.

    Raises:
        ValueError: it is no dict.
    """
    held = state
    for place, key in enumerate(keys[:-1], 1):
        if key not in held:
            return None
        held = held[key]
        if not isinstance(held, Mapping):
            raise ValueError(f"apexfx: the state was given with {_said(keys[:place])} as {short(held)}, expected a dict, "
                             "as all is that a step keeps; load what state_dict() has returned, without an epoch and the like")
    return held


def _check(slot: Slot, what: str, given: Any, shape: torch.Size, dtype: torch.dtype) -> None:
    if reason := _reason(slot, given, shape, dtype):
        between = "" if slot.least is None else f", of finite numbers, at least {slot.least:g}"
        raise ValueError(f"apexfx: the state was given with {what} {reason}, expected a tensor of shape {list(shape)} and "
                         f"{dtype}{between}; load what state_dict() has returned")


def _reason(slot: Slot, given: Any, shape: torch.Size, dtype: torch.dtype) -> str:
    """Return why what a checkpoint has is no value of a slot; "" where it is one."""
    if not isinstance(given, Tensor):
        return f"is {short(given)}"
    if given.shape != shape:
        return f"has the shape {list(given.shape)}"
    if given.is_complex() or given.dtype == torch.bool or given.is_floating_point() != dtype.is_floating_point:
        return f"is of {given.dtype}"
    if slot.least is not None:
        numbers = (given if slot.columns is None else given[:, slot.columns]).double()
        if not bool(((numbers >= slot.least) & (numbers <= slot.most)).all()):  # not where one is nan
            return f"holds {numbers.flatten()[:4].tolist()}"
    return ""
