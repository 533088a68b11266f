"""Remove casts that change nothing, and cast each value once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult
from torch.multiprocessing.reductions import StorageWeakRef

from ..graph.gradient_modes import ON, gradient_modes
from ..graph.marks import CAST_ROW, NAME
from ..graph.mutation import bodies, storages, written
from ..graph.nodes import value
from ..precision.casts import RemovedCast, dtype_of, is_inserted_cast, ledger_row, user_cast
from ..precision.rules import FLOATS
from ..report.records import Artifacts
from .base import Pass

# What each dtype holds exactly besides itself.
_EXACT_IN = {
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}  # fmt: skip


class CancelCasts(Pass):
    """Drop casts to the same dtype and exact round trips, and let all uses of one value share one cast.

    Nothing is shared or dropped across a write to the value, into or out of a region of no_grad or inference mode, where the
    cast itself is written, or on the way to something that the program differentiates by. A cast down and up again (float32,
    bfloat16, float32) rounds, and stays. The forward keeps its bits; the gradients of uses that share a cast add up in its
    dtype, as under autocast, which caches casts of weights.

    Before:  a = _to_copy(w, bf16); y = linear(x, a); b = _to_copy(w, bf16); c = _to_copy(y, f32); d = _to_copy(c, bf16)
             z = linear(d, b)
    After:   a = _to_copy(w, bf16); y = linear(x, a); z = linear(y, a)
    """

    name = "cancel_casts"
    stage = "forward"
    numeric = "bitwise"

    def begin(self) -> None:
        super().begin()
        self.removed: list[RemovedCast] = []

    def call(self, gm: fx.GraphModule) -> PassResult:
        before = len(self.removed)
        for body in bodies(gm):
            if _Graph(self, body).cancel() and body is not gm:
                body.recompile()
        return PassResult(gm, len(self.removed) > before)

    def drop(self, cast: fx.Node, instead: fx.Node, why: str) -> None:
        """Let `instead` take the place of `cast`, and keep the cast's row of the ledger with why it went."""
        self.erase(cast, why=f"{why}: {instead.meta.get(NAME, instead.name)} serves", instead=instead)

    def erase(self, cast: fx.Node, *, why: str, instead: fx.Node | None = None) -> None:
        row = cast.meta.get(CAST_ROW) or \
            ledger_row(cast, cast.args[0], op="cast", rule="", reason="not made by precision")
        self.record(cast, f"{why}; {row.bytes} bytes saved")
        self.removed.append(RemovedCast(**vars(row), removed=why))
        if instead is not None:
            cast.replace_all_uses_with(instead)
        cast.graph.erase_node(cast)

    def artifacts(self) -> Artifacts:
        return Artifacts(removed_casts=self.removed)


class _Graph:
    """The casts of one graph, with when each piece of memory is written and where gradients are off."""

    def __init__(self, pass_: CancelCasts, gm: fx.GraphModule) -> None:
        self.pass_ = pass_
        self.gm = gm
        self.place: dict[fx.Node, int] = {}
        self.writes: dict[StorageWeakRef, list[int]] = defaultdict(list)
        self.mode = gradient_modes(gm.graph)
        for place, node in enumerate(gm.graph.nodes):
            self.place[node] = place
            for source in written(node):
                for storage in storages(value(source)):
                    self.writes[storage].append(place)

    def cancel(self) -> bool:
        seen: dict[tuple[fx.Node, torch.dtype, str], fx.Node] = {}
        changed = False
        for node in list(self.gm.graph.nodes):
            if not is_inserted_cast(node) or not isinstance(value(node), Tensor) or value(node).dtype not in FLOATS:
                continue
            why, instead = self._replacement(node, seen)
            if instead is None:
                seen[(node.args[0], value(node).dtype, self.mode[node])] = node
                continue
            source = node.args[0]
            self.pass_.drop(node, instead, why)
            changed = True
            self._drop_dead(source)
        return changed

    def _replacement(self, cast: fx.Node, seen: dict[Any, fx.Node]) -> tuple[str, fx.Node | None]:
        source, dtype = cast.args[0], value(cast).dtype
        if self._written_after(cast, -1):
            return "", None
        now = self.place[cast]
        if dtype_of(source) == dtype and self._plain(cast) and not self._written_after(source, now):
            return "same dtype", source
        if dtype_of(source) in _EXACT_IN.get(dtype, ()) and (is_inserted_cast(source) or user_cast(source)):
            origin = source.args[0]
            if dtype_of(origin) == dtype and self._plain(cast) and self._plain(source) \
                    and value(origin).device == value(cast).device \
                    and not any(user.target is torch.autograd.grad for user in source.users) \
                    and not self._written_after(source, -1) and not self._written_after(origin, self.place[source]):
                return "exact round trip", origin
        earlier = seen.get((source, dtype, self.mode[cast]))
        if earlier is not None and not self._written_after(earlier, -1) \
                and not self._written_after(source, self.place[earlier], until=now):
            return "cast before", earlier
        return "", None

    def _plain(self, cast: fx.Node) -> bool:
        # Under no_grad the cast also detaches; its source does not.
        return self.mode[cast] is ON

    def _written_after(self, node: fx.Node, place: int, *, until: int | None = None) -> bool:
        return any(
            place < when and (until is None or when < until)
            for storage in storages(value(node)) for when in self.writes.get(storage, ())
        )

    def _drop_dead(self, node: fx.Node) -> None:
        if not node.users and (is_inserted_cast(node) or user_cast(node) is not None):
            source = node.args[0]
            if is_inserted_cast(node):
                self.pass_.erase(node, why="no use is left")
            else:
                self.gm.graph.erase_node(node)
            self._drop_dead(source)
