"""The end of a training step: unscale, clip, update and adapt the loss scale, in as few ops as there are optimizer groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.infra.pass_base import PassResult

from ..config import HALVES
from ..graph.inputs import apply_node, trained_inputs
from ..graph.marks import SKIP_VERDICT, TRACED_UPDATE
from ..graph.mutation import storages, written_storages
from ..graph.nodes import CASTS, before_upcast, call, fake_mode, inline, insert_after, value
from ..ops.apply_gradients import Plan, plan_of
from ..optimizers.end_of_step import run_parts
from .base import Pass


class UnscaleClipUpdate(Pass):
    """Put the ops that finish a training step in the place of its `apply_gradients` node.

    One op an optimizer group reads each gradient once, where it lies (in its bucket, after an allreduce), and unscales, clips
    and updates in that pass. A half gradient that was widened for its float32 parameter is read as it was, which is the same
    number in half of the bytes. Where a gradient is not finite the ops write nothing, without a device sync. A
    gradient that is the memory of a parameter, or of another input that the graph writes, is copied first.

    Before:  apply_gradients([w, b], [gw, gb], [scale, growth, m_w, m_b, v_w, v_b, lr, steps], plan)
    After:   norm, _, found_inf = multi_tensor_l2norm([gw, gb], 1 / scale)
             adam_([w, b], [gw, gb], [m_w, m_b], [v_w, v_b], ..., lr, scale, found_inf, clip)
             _amp_update_scale_(scale, growth, found_inf, 2.0, 0.5, 2000)
    """

    name = "unscale_clip_update"
    stage = "step"
    numeric = "reassociates"

    def __init__(self, decompositions: Callable[[], Mapping[Any, Any]] = dict) -> None:
        super().__init__()
        self._decompositions = decompositions

    def options(self) -> dict[str, Any]:
        return {"decomposes": bool(self._decompositions())}

    def call(self, gm: fx.GraphModule) -> PassResult:
        node = apply_node(gm)
        if node is None:
            return PassResult(gm, False)
        trained_inputs(node)  # or it is refused
        params, grads, slots, text, *count = node.args
        plan, mode = plan_of(text), fake_mode(gm.graph)
        for part in plan.updates:
            part.prepare([g is not None for g in grads])
        memory = storages([value(node) for node in (*params, *slots)])
        written = written_storages(gm)
        memory |= storages([value(node) for node in gm.graph.find_nodes(op="placeholder")]) & written
        own = [_copied(g, mode) if g is not None and storages(value(g)) & memory else g for g in _as_read(plan, grads, written)]
        for g in (g for part in plan.updates if part.is_traced for g in own[part.first:part.last] if g is not None):
            g.meta[TRACED_UPDATE] = True
        # At the end: what reads a parameter may have been moved behind the node, which does not say that it writes.
        with gm.graph.inserting_before(gm.graph.output_node()):
            traced = any(part.is_traced for part in plan.updates)
            verdict, norm, gradients = inline(gm.graph, run_parts, (plan, params, own, slots, *count), like=node, mode=mode,
                                              decompositions=self._decompositions() if traced else {})
        verdict.meta[SKIP_VERDICT] = bool(count) or any(part.may_skip for part in plan.parts)
        for user in list(node.users):
            place = user.args[1]
            if place == 2:
                for item in list(user.users):
                    for cast in (each for each in item.users if each.op != "output"):  # to the parameter's dtype
                        gm.graph.output_node().prepend(cast)
                    item.replace_all_uses_with(gradients[item.args[1]])
                    gm.graph.erase_node(item)
            else:
                user.replace_all_uses_with((verdict, norm)[place])
            gm.graph.erase_node(user)
        for part in plan.parts:
            if described := part.describe():
                self.record(node, described)
        if not plan.updates:
            self.record(node, "the gradients leave the graph, for an optimizer that runs outside of it")
        gm.graph.erase_node(node)
        gm.graph.eliminate_dead_code(is_impure_node=lambda node: node.target not in CASTS)  # of gradients
        return PassResult(gm, True)


def _as_read(plan: Plan, grads: Sequence[fx.Node | None], written: frozenset[Any]) -> list[fx.Node | None]:
    """Return the gradients, in place of each that an op may read before it was widened what it was."""
    if plan.keeps_gradients:  # as are those of an optimizer outside of the graph
        return list(grads)
    by_op = {place for part in plan.updates if part.reads_halves for place in range(part.first, part.last)}
    return [_narrow(g, written) if g is not None and place in by_op else g for place, g in enumerate(grads)]


def _narrow(gradient: fx.Node, written: frozenset[Any]) -> fx.Node:
    """Return the half value that `gradient` is in float32, or `gradient` where there is none or its memory is written."""
    narrow = before_upcast(gradient)
    is_half = value(narrow).dtype in HALVES and value(gradient).dtype == torch.float32
    return narrow if is_half and not storages(value(narrow)) & written else gradient


def _copied(gradient: fx.Node, mode: Any) -> fx.Node:
    """Return a copy of a gradient, made before anything is written."""
    with insert_after(gradient):
        return call(gradient.graph, torch.ops.aten.clone.default, (gradient,), like=gradient, mode=mode)
