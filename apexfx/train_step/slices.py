"""An update of slices of the global batch, to the same bits on any number of ranks.

Each slice runs one graph, which writes its gradients. Its random numbers follow from (seed, update, slice). What slices give is
added up in pairs, in their order: a rank adds up its own, then what all ranks have is added up in pairs of ranks. That is one
tree, whatever number of ranks there are: a power of two of neighbors is a part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import tensor_version
from ..compiler.buffers_put_back import KeptBuffers
from ..graph.collectives import summed, wait
from ..graph.inputs import Placeholder
from ..graph.shared_memory import is_expanded
from ..random_state import forked_random
from .options import StepOptions

log = logging.getLogger(__name__)

_MOST_ELEMENTS = 2**20  # that travel at once


def check_slice(written: Sequence[Placeholder], collectives: Sequence[Any]) -> None:
    """Refuse the graph of a slice that does more than compute a slice and write buffers.

    Raises:
        ValueError: it writes something else, or it communicates.
    """
    if collectives:
        raise ValueError(f"apexfx: forward or loss communicates ({collectives[0][0]}), and a slice of slices= is computed by one "
                         "rank, whatever their number is; leave slices= out")
    if others := [p.name.removeprefix("inputs.") for p in written if p.kind not in ("buffer", "state")]:
        raise ValueError(f"apexfx: the forward writes {others[0]!r}, which is no buffer of the model or of modules=, and with "
                         "slices= each rank would go on with another one; register it by register_buffer(), name its module in "
                         "modules=[...], or leave slices= out")


def check_saved(given: Mapping[str, Any]) -> int:
    """Return after how many updates a checkpoint was saved.

    Raises:
        ValueError: it does not say.
    """
    if not isinstance(updates := given.get("updates"), int) or updates < 0:
        raise ValueError(f"apexfx: the state was given with slices.updates={updates!r}, expected a whole number, 0 or more; load "
                         "what state_dict() has returned")
    return updates


class Slices:
    """Which slices of an update this rank computes, their random numbers, and their sums.

    Args:
        options: of the step.
        group: whose ranks share the slices; None for one process.
        device: of the step.

    Attributes:
        first: of an update, the first slice that this rank computes.
        num_updates: how many there were, of a run that a checkpoint has gone on with, too.
        observe: is shown what each slice gives, before it is added to anything.
    """

    def __init__(self, options: StepOptions, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._options, self._device = options, device
        self.first = options.accumulate * group.rank() if group is not None else 0
        self.num_updates = 0
        self.observe: Callable[[list[Tensor]], None] = lambda own: None
        self._waiting: list[tuple[int, list[Tensor]]] = []  # sums over 2**height slices, which wait for as many more
        self._left: list[tuple[str, Tensor, int]] = []

    def settings(self) -> dict[str, Any]:
        """Return what the bits depend on besides model, data and the other options: the same bits are promised where it is."""
        on_device = self._device.type == "cuda"
        return {"slices": self._options.slices, "seed": self._options.seed, "torch": str(torch.__version__),
                "device": torch.cuda.get_device_name(self._device) if on_device else self._device.type,
                "capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}

    def save(self) -> dict[str, Any]:
        """Return what a checkpoint has of them."""
        return {"updates": self.num_updates, **self.settings()}

    def load(self, given: Mapping[str, Any] | None) -> None:
        """Go on behind the updates that a checkpoint was saved after; warn where the bits are other ones from there on."""
        self.num_updates = 0 if given is None else check_saved(given)
        if given is None:
            return
        others = [f"{name}={given.get(name)!r} (now {now!r})" for name, now in self.settings().items() if given.get(name) != now]
        if others:
            log.warning("apexfx: the state was saved with %s: training goes on, to other bits than there", ", ".join(others))

    def forget(self) -> None:
        """Drop what slices have given: a state was loaded."""
        self._waiting.clear()

    def leave(self, modules: Iterable[nn.Module]) -> None:
        """Note how a slice leaves parameters and buffers, for the next one of the update."""
        self._left = _tensors(modules)

    def check_left(self, modules: Iterable[nn.Module]) -> None:
        """Refuse a slice that does not begin with what the one before it has left.

        Raises:
            RuntimeError: a parameter or buffer was written since, or another is in its place.
        """
        for (_, left, before), (name, each, now) in zip(self._left, _tensors(modules)):
            if each is not left or now != before:
                raise RuntimeError(f"apexfx: {name!r} was written between two slices of an update, which would then depend on "
                                   "how many of them a rank computes; compute all slices of an update by one step before "
                                   "another step, or anything else, writes what it reads")

    @contextlib.contextmanager
    def random_numbers(self, call: int) -> Iterator[None]:
        """Have random numbers be those of the slice that this call of an update computes, in this context."""
        name = f"{self._options.seed} {self.num_updates} {self.first + call}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        on_device = self._device.type == "cuda"
        with forked_random([self._device] if on_device else []):
            torch.default_generator.manual_seed(seed)
            if on_device:
                with torch.cuda.device(self._device):
                    torch.cuda.manual_seed(seed)
            random.seed(seed)
            yield

    def add(self, own: list[Tensor], *, ends: bool) -> None:
        """Add what a slice gives to what those before it gave, in `own`; keep a copy of the sum where others are to come."""
        self.observe(own)
        height, total = 0, own
        while self._waiting and self._waiting[-1][0] == height:
            before = self._waiting.pop()[1]
            into = own if ends else before
            for left, right, result in zip(before, total, into):
                torch.add(left, right, out=result)
            height, total = height + 1, into
        if not ends:
            self._waiting.append((height, [each.clone() for each in own] if total is own else total))


class BuffersOfSlices(KeptBuffers):
    """Registered buffers as they were before an update: all its slices begin with these, and it has what they add.

    That is the mean of floats, and the sum of integers.
    """

    def holds(self, tensor: Any) -> bool:
        """Return whether it is one of the buffers."""
        return any(buffer is tensor for _, _, buffer, _ in self._kept or ())

    @torch.no_grad()
    def taken(self) -> list[Tensor]:
        """Return what a slice has left in the buffers, for a sum over slices, and put back what was there before.

        Raises:
            ValueError: it has made or dropped a buffer, or changed the shape of one.
        """
        left = []
        for buffers, name, _, before in self._kept:
            now = buffers.get(name)
            if _kind(now) != _kind(before):
                raise ValueError(f"apexfx: the forward has made another buffer {name!r}, {_kind(now)} in the place of "
                                 f"{_kind(before)}, and slices= adds up what slices leave there; make it before the first call")
            if before is not None:
                left.append(now ^ before if before.dtype == torch.bool else now - before if not _has_fractions(before)
                            else now.to(torch.promote_types(before.dtype, torch.float32), copy=True))
        for buffers, name, buffer, before in self._kept:
            buffers[name] = buffer
            if buffer is not None and not is_expanded(buffer):
                buffer.copy_(before)
        return left

    @property
    def _held(self) -> list[tuple[dict[str, Any], str, Tensor, Tensor]]:
        return [row for row in self._kept if row[3] is not None]

    def names(self) -> list[str]:
        """Return the names that modules have for what is `taken`."""
        return [name for _, name, *_ in self._held]

    @torch.no_grad()
    def changed(self, sums: Sequence[Tensor], slices: int) -> list[Tensor]:
        """Return of each sum of what so many slices have left whether one of them has changed anything."""
        return [(total != (before.to(total.dtype) * slices if _has_fractions(before) else 0)).any()
                for (*_, before), total in zip(self._held, sums, strict=True)]

    @torch.no_grad()
    def add(self, sums: Sequence[Tensor], changed: Sequence[bool], slices: int) -> None:
        """Write to the buffers that have changed what so many slices have left, by the sums of what each of them has `taken`."""
        for (buffers, name, buffer, before), total, written in zip(self._held, sums, changed, strict=True):
            if not written:
                continue
            now = before ^ total if before.dtype == torch.bool else total / slices if _has_fractions(before) else before + total
            if is_expanded(buffer):
                buffers[name] = now.to(before.dtype)
            else:
                buffer.copy_(now)


def _kind(buffer: Tensor | None) -> str:
    return "None" if buffer is None else f"{buffer.dtype} of shape {list(buffer.shape)}"


def _has_fractions(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _tensors(modules: Iterable[nn.Module]) -> list[tuple[str, Tensor, int]]:
    """Return parameters and buffers with their names and versions."""
    return [(name, each, tensor_version(each)) for module in modules
            for name, each in itertools.chain(module.named_parameters(), module.named_buffers()) if not each.is_inference()]


def found_by_any(found: Sequence[Tensor], group: dist.ProcessGroup) -> list[bool]:
    """Return for each of several questions whether a rank says yes; waits for the device."""
    answers = torch.cat([each.reshape(-1) for each in found]).int()
    return [number > 0 for number in summed(answers, group.group_name).tolist()]


def sum_over_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Add up tensors over the ranks, in pairs of neighbors, in place; all ranks get the same bits, as of one process.

    Process groups add up in an order of their own, so they only carry: of each buffer every rank gets a part from all, adds that
    up, and sends it to all, which is as much as a ring moves. Meanwhile the next one is under way.
    """
    tensors = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
    ends: list[Callable[[], None]] = []
    for dtype in dict.fromkeys(each.dtype for each in tensors):
        same = [each for each in tensors if each.dtype == dtype]
        places = itertools.accumulate(each.numel() for each in same)
        for _, members in itertools.groupby(zip(same, places), lambda member: member[1] // _MOST_ELEMENTS):
            ends.append(_begin([each for each, _ in members], group))
            if len(ends) > 1:
                ends.pop(0)()
    for end in ends:
        end()


def _begin(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    """Begin to add up tensors of one dtype; return what ends it."""
    size, name, functional = group.size(), group.group_name, torch.ops._c10d_functional
    sizes = [each.numel() for each in tensors]
    flat = torch.cat([*(each.reshape(-1) for each in tensors), tensors[0].new_zeros(-sum(sizes) % size)])
    parts = functional.all_to_all_single.default(flat, [len(flat) // size] * size, [len(flat) // size] * size, name)

    def end() -> None:
        rows = wait(parts).view(size, -1)
        while len(rows) > 1:
            rows = rows[::2] + rows[1::2]
        whole = wait(functional.all_gather_into_tensor.default(rows[0], size, name))
        for each, own in zip(tensors, whole.split([*sizes, len(whole) - sum(sizes)])):
            each.copy_(own.view(each.shape))

    return end
