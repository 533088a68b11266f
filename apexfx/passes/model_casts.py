"""The casts at a graph's entry: parameters and floating inputs are cast once, for the uses that want it."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx

from .._torch import HigherOrderOperator, set_grad_enabled
from ..config import HALVES
from ..graph.marks import KIND, OUTSIDE_OF_MODEL, REPLACED
from ..graph.mutation import body_of, statistics, storages, written_storages
from ..graph.nodes import argument, evaluate, set_value, value
from ..graph.op_names import canonical_name, is_foreign
from ..precision.casts import dtype_of, insert_cast, is_inserted_cast, ledger_row, user_cast
from ..precision.policy import Policy, additive_mask

CAST, KEEP = "cast", "keep"


def cast_entries(
    gm: fx.GraphModule, policy: Policy, record: Callable[[fx.Node, Any], None], mode: Any
) -> dict[fx.Node, fx.Node]:
    """Cast the floating placeholders of `gm`; return the new nodes, each with the node that it stands for.

    float32 to half under O2 and O3, half to float32 under O0. Left alone are: what any node writes in place, so that
    the write reaches the real tensor; what the forward puts another in the place of (`self.n = self.n + 1`), which would round
    from call to call; what batch norm reads as parameters or statistics, where the level keeps them; what an override wants
    otherwise; the weight of a sparse embedding; what goes straight into a cast of the user's own or to the output.
    """
    touched = written_storages(gm)
    # Behind a node that switches gradients on, or the parameters would get none.
    first = next(n for n in gm.graph.nodes if n.op != "placeholder" and (n.target is not set_grad_enabled or not n.args[0]))
    originals: dict[fx.Node, fx.Node] = {}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        source = dtype_of(placeholder)
        target = _target(policy, source) if not placeholder.meta.get(REPLACED) else None
        if target is None or storages(value(placeholder)) & touched:
            continue
        if CAST not in _desired_by_users(placeholder, policy, touched):
            continue
        kind = placeholder.meta.get(KIND, "input").replace("param", "parameter")
        cast = insert_cast(placeholder, target, before=first, like=placeholder, mode=mode)
        originals[cast] = placeholder
        _move_users(placeholder, cast, policy, mode, originals, touched)
        reason = "the model is half; one cast serves all uses" if policy.level.cast_model else "float32 throughout"
        record(cast, ledger_row(cast, placeholder, op=kind, rule="model", reason=reason))
    return originals


def _target(policy: Policy, dtype: torch.dtype | None) -> torch.dtype | None:
    if policy.level.cast_model:
        return policy.half if dtype == torch.float32 else None
    return torch.float32 if dtype in HALVES else None


def _desired_by_users(tensor: fx.Node, policy: Policy, touched: Set[Any]) -> set[str]:
    """Return whether the users of `tensor` want it cast, kept, or both."""
    if any(user.target == "requires_grad_" or user.target is torch.autograd.grad and tensor.op != "placeholder"
           for user in tensor.users):  # what is differentiated by: a cast would be another leaf, a view made twice another tensor
        return {KEEP}
    desired: set[str] = set()
    for user in tensor.users:
        desired |= _desired_by(tensor, user, policy, touched)
    return desired


def _desired_by(tensor: fx.Node, user: fx.Node, policy: Policy, touched: Set[Any]) -> set[str]:
    if user.op == "output" or user.meta.get(OUTSIDE_OF_MODEL) or is_inserted_cast(user) or user_cast(user) is not None \
            or user.target is torch.autograd.grad:
        return {KEEP}
    if isinstance(user.target, HigherOrderOperator):
        pair = body_of(user)
        if pair is None:
            return {KEEP}
        inputs = pair[0].graph.find_nodes(op="placeholder")
        inside = set().union(*(_desired_by_users(p, policy, touched) for o, p in zip(pair[1], inputs) if o is tensor))
        return {CAST} if inside == {CAST} else {KEEP}
    name = canonical_name(user.target)
    rule = policy.rules.get(name)
    if is_foreign(name) and rule is None:
        return {KEEP}
    if rule is not None and rule.family == "view":
        desired = _desired_by_users(user, policy, touched) or {KEEP}
        return {CAST} if len(desired) > 1 and storages(value(user)) & touched else desired  # of a copy that is written, not two
    if policy.overridden(user) or tensor is additive_mask(name, user.args, user.kwargs):
        return {KEEP}  # a mask is cast where it is used, because there it is cast within half's range
    if name in ("embedding", "embedding_bag") and argument(user, "sparse"):
        return {KEEP}  # its gradient is sparse, which the backward of a cast cannot take
    if rule is not None and rule.kind == "batch_norm" and (user.args[0] if user.args else argument(user, "input")) is not tensor:
        return {KEEP} if policy.level.keep_batchnorm_fp32 or tensor in statistics(user) else {CAST}
    return {CAST}


def _move_users(tensor: fx.Node, cast: fx.Node, policy: Policy, mode: Any, originals: dict[fx.Node, fx.Node],
                touched: Set[Any]) -> None:
    """Let the users of `tensor` that want it cast read `cast`; a view with users of both kinds is made twice."""
    for user in list(tensor.users):
        if user is cast:
            continue
        desired = _desired_by(tensor, user, policy, touched)
        if desired == {CAST}:
            user.replace_input_with(tensor, cast)
        elif CAST in desired:
            with tensor.graph.inserting_after(user):
                twin = tensor.graph.node_copy(user, lambda n: cast if n is tensor else n)
            set_value(twin, evaluate(twin, mode))
            originals[twin] = user
            _move_users(user, twin, policy, mode, originals, touched)
