"""One backward under way: which gradients have come, which buckets are sent, and what `p.grad` is meanwhile and after.

A large gradient that autograd made in this backward is copied to its slot in the flat buffer at once, and `p.grad` becomes
the slot's own memory: autograd's copy is freed while it is in cache, and nothing is copied back. Small ones are copied when
their bucket is full, and back. So is a `p.grad` from before this backward, which is the user's to hold and keeps its memory,
and one that a hook of the user's has seen. A buffer of which anybody holds a part besides is left to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._torch import post_accumulate_hooks, storage_users
from ..buckets.reduce import sparse_message
from ..distributed.status import StatusMessage
from .layout import Layout
from .sums import SeparateSums

_OWN_USERS = 2  # of a gradient's storage: the gradient, and the Python object by which they are counted


@dataclass
class Round:
    """One backward.

    Attributes:
        layout: the parameters and their buckets.
        fresh: positions of the large parameters that had no gradient before this backward.
        divides: False where a comm hook does.
        lends: `p.grad` may become a part of a buffer; False for gradients that are told apart by their identity.
        rides: the status travels in the buffer of the last bucket.
        hold: launch nothing before the end.
        waiting: `layout.places` of the parameters whose gradients are not ready.
        repeats: by the `id` of a parameter, how often its gradient is accumulated before the time that counts.
        extra: by position, how often a gradient was accumulated beyond once, where that is to be learned.
        order: positions of the parameters in the order in which their gradients were ready.
        missing: for each bucket, how many gradients are not ready.
        next_bucket: the first that is not sent.
        works: of the buckets sent.
        message: this rank's status, once composed.
        failure: what this rank has to report, or "".
    """

    layout: Layout
    fresh: set[int]
    divides: bool
    lends: bool
    rides: bool
    hold: bool
    waiting: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    repeats: dict[int, int] = field(default_factory=dict)
    extra: Counter[int] = field(default_factory=Counter)
    order: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    next_bucket: int = 0
    works: list[Any] = field(default_factory=list)
    message: StatusMessage | None = None
    failure: str = ""
    _lent: dict[int, Tensor] = field(init=False)  # by position, `p.grad` where it is a slot
    _laid: set[int] = field(init=False)  # positions of the gradients in their slots
    _undivided: set[int] = field(init=False)  # those of them that are to be divided with their bucket

    def __post_init__(self) -> None:
        self.waiting = self.layout.places.copy()
        if not self.hold:
            self.repeats = self.layout.repeats.copy()
        self.take()

    def take(self) -> None:
        """Take the layout's buffers into use; a parameter that still has the gradient one lent it goes on in place."""
        layout = self.layout
        self.missing = list(map(len, layout.members))
        self._lent, self._laid, self._undivided = {}, set(), set()
        adds_in_place = not torch.is_grad_enabled()  # backward(create_graph=True) makes another `p.grad`
        for buffer, members, large in zip(layout.buffers, layout.members, layout.large):
            in_place = {}
            for slot in large if adds_in_place else ():
                if (i := members[slot]) not in self.fresh:
                    p = layout.parameters[i]
                    gradient = p.grad
                    if gradient is not None and buffer.is_lent(slot, gradient) and _has_our_hook_only(p):
                        in_place[i] = gradient
            if buffer.is_free(len(in_place)):
                self._lent.update(in_place)
            else:
                buffer.replace()

    def fail(self, why: str) -> None:
        """Note what this rank reports; the first counts."""
        self.failure = self.failure or why

    def used(self, pending: Container[int]) -> list[int]:
        """Return for each parameter whether it has a gradient here, from this backward or (`pending`) from local ones."""
        if not self.waiting:
            return [1] * len(self.layout.names)
        return [int(key not in self.waiting or key in pending) for key in self.layout.places]

    # ---- gradients in --------------------------------------------------------------------------------------------------

    def lay(self, index: int, p: Tensor) -> None:
        """Lay a large gradient out, while it is in cache, and let `p.grad` be its slot where it may."""
        layout = self.layout
        buffer, slot, gradient = layout.buffers[layout.bucket_of[index]], layout.slot_of[index], p.grad
        if not self._is_dense(index, gradient):
            return
        self._laid.add(index)
        if gradient is self._lent.get(index):
            self._undivided.add(index)
        elif self._may_lend(index, p, gradient, buffer.bucket.dtype):
            buffer.lay(slot, gradient, divide=False)  # autograd may add to it, until the bucket is sent
            self._undivided.add(index)
            self._lent[index] = p.grad = buffer.lend(slot)
        else:
            buffer.lay(slot, gradient.detach() if gradient.requires_grad else gradient, divide=self.divides)
            self._undivided.discard(index)

    def _may_lend(self, index: int, p: Tensor, gradient: Tensor, dtype: torch.dtype) -> bool:
        """Whether nobody can tell a gradient from a copy of it: it has no history, no holder, and was not there before."""
        return (self.lends and index in self.fresh and gradient.dtype == dtype and not gradient.requires_grad
                and _has_our_hook_only(p) and storage_users(gradient.untyped_storage()) <= _OWN_USERS)

    def lay_again(self, index: int, p: Tensor) -> bool:
        """Lay out a gradient accumulated once more; False where its bucket is sent."""
        bucket = self.layout.bucket_of[index]
        if bucket < self.next_bucket:
            return bucket < 0
        if index in self._laid:
            self.lay(index, p)
        return True

    def _is_dense(self, index: int, gradient: Tensor | None) -> bool:
        """Whether a gradient can be laid out; if not, its parameter counts as one without."""
        if gradient is not None and gradient.layout == torch.strided:
            return True
        if gradient is not None:
            self.fail(sparse_message(self.layout.names[index], gradient))
        key = id(self.layout.parameters[index])
        if key not in self.waiting:
            self.waiting[key] = self.layout.places[key]
            self.order.remove(index)
        return False

    def fill(self, number: int, sums: SeparateSums | None) -> None:
        """Lay out what is not yet, all at once; zeros for a missing gradient."""
        layout = self.layout
        members, slots = layout.members[number], layout.small[number]
        rest = [slot for slot in layout.large[number] if members[slot] not in self._laid]
        if rest:
            slots = sorted(slots + rest)
        gradients = []
        for slot in slots:
            i = members[slot]
            p = layout.parameters[i]
            if sums is not None and id(p) in self.waiting:
                sums.set_aside(id(p), p)
            gradient = p.grad
            gradients.append(gradient if self._is_dense(i, gradient) else None)
        buffer = layout.buffers[number]
        buffer.fill(gradients, slots, divide=self.divides)
        if self.divides and self._undivided:
            buffer.divide([slot for slot in layout.large[number] if members[slot] in self._undivided])

    # ---- averages out --------------------------------------------------------------------------------------------------

    def write_back(self, number: int, used: Sequence[bool] | None, *, lend_all: bool) -> None:
        """Give the parameters of a reduced bucket their averages.

        Args:
            used: which parameters some rank uses; the others' `grad` stays None.
            lend_all: every gradient becomes a part of the buffer.
        """
        layout = self.layout
        buffer, lent, slots, targets = layout.buffers[number], self._lent, [], []
        for slot, i in enumerate(layout.members[number]):
            p = layout.parameters[i]
            gradient = p.grad
            if i in lent and gradient is lent[i]:
                continue
            if used is not None and not used[i]:
                continue
            if lend_all:
                p.grad = buffer.lend(slot)
                continue
            if gradient is None:
                gradient = p.grad = torch.empty_like(p)
            slots.append(slot)
            targets.append(gradient)
        buffer.write(targets, slots)

    def forsake(self) -> None:
        """Drop the gradients that lie in buffers: after a failure they are neither this rank's nor averages.

        Leave the buffers as well: a peer that comes late still gets what was sent in them.
        """
        for i, lent in self._lent.items():
            if self.layout.parameters[i].grad is lent:
                self.layout.parameters[i].grad = None
        for buffer in self.layout.buffers:
            if not buffer.casts:
                buffer.replace()


def _has_our_hook_only(p: Tensor) -> bool:
    # Another may keep the gradient, or put its own in place: what it holds is to be averaged too.
    return len(post_accumulate_hooks(p)) == 1
