"""Run a graph before and after a pass on real inputs, and name the first node that leaves the pass's numeric tier.

No collective is issued: an all_reduce is answered as if every rank held what this one holds, so that the sum is
`x * world size`, and averaged gradients must come out equal to local ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from .._torch import OpOverload, resolve_process_group, tree_leaves, tree_map, unset_fake_temporarily
from ..errors import PassError
from ..graph.collectives import is_collective, is_wait
from ..graph.nodes import graphs
from ..testing import tolerance


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of `gm` whose graph, and those of its nested bodies, later edits do not reach."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy = fx.GraphModule(gm, graph)
    for node in gm.graph.find_nodes(op="get_attr"):
        body = gm.get_submodule(str(node.target)) if isinstance(getattr(gm, str(node.target), None), fx.GraphModule) else None
        if body is not None:
            setattr(copy, str(node.target), snapshot(body))
    return copy


class _Local(fx.Interpreter):
    """Evaluates a graph without talking to other ranks; keeps a copy of every tensor it produces."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.seen: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = self._collective(n) if is_collective(n) or is_wait(n) else super().run_node(n)
        if n.op in ("call_function", "call_method"):
            self.seen[n.name] = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, result)
        return result

    def _collective(self, n: fx.Node) -> Any:
        args = self.fetch_args_kwargs_from_env(n)[0]
        if is_wait(n):
            return args[0]
        world = _world_size(args[-1])
        return tree_map(lambda t: t * world if isinstance(t, Tensor) else t, args[0])

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, OpOverload) and target.namespace == "apexfx":
            # An op that would talk to its group computes over this rank alone when the group's name is empty.
            names = [a.name for a in target._schema.arguments]
            if "group_name" in names:
                place = names.index("group_name")
                if place < len(args):
                    args = (*args[:place], "", *args[place + 1:])
                else:
                    kwargs = {**kwargs, "group_name": ""}
        return super().call_function(target, args, kwargs)


def _world_size(group_name: Any) -> int:
    return dist.get_world_size(resolve_process_group(group_name)) if isinstance(group_name, str) else group_name.size()


def compare(
    before: fx.GraphModule,
    after: fx.GraphModule,
    inputs: Callable[[], Sequence[Any]],
    *,
    pass_name: str,
    numeric: str,
) -> None:
    """Raise `PassError` when `after` differs from `before` by more than `numeric` allows.

    A backward compiled together with its forward arrives here under AOTAutograd's fake mode, which is left for the comparison.

    Args:
        inputs: makes a fresh copy of the same real inputs each time it is called.
        numeric: the tier the pass declares.
    """
    with unset_fake_temporarily():
        _compare(before, after, inputs, pass_name, numeric)


def _compare(before: fx.GraphModule, after: fx.GraphModule, inputs: Callable[[], Sequence[Any]], pass_name: str,
             numeric: str) -> None:
    expected, wanted = _expected(before, inputs, numeric)
    actual, got = _run(after, inputs())
    if all(_within(a, e, numeric) for a, e in zip(tree_leaves(actual), tree_leaves(expected), strict=True)):
        return
    for name, result in got.seen.items():
        pairs = list(zip(tree_leaves(result), tree_leaves(wanted.seen.get(name))))
        for a, e in pairs:
            if isinstance(a, Tensor) and isinstance(e, Tensor) and not _within(a, e, numeric):
                node = next(n for g in graphs(after) for n in g.graph.nodes if n.name == name)
                raise PassError(pass_name, f"leaves its tier {numeric!r}: off by {_distance(a, e):.2g}", node)
    raise PassError(pass_name, f"the outputs, or the inputs that are written in place, leave its tier {numeric!r}, though every "
                    "node common to both graphs agrees")


def _expected(before: fx.GraphModule, inputs: Callable[[], Sequence[Any]], numeric: str) -> tuple[Any, _Local]:
    """Run the graph before the pass, in float32 where it does not run as it is.

    A half model's graph need not: on the CPU, batch norm refuses half parameters beside float32 statistics.
    """
    try:
        return _run(before, inputs())
    except RuntimeError:
        if numeric != "changes_dtype":
            raise
        return _run(before, [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs()])


def _run(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, _Local]:
    """Return the outputs and what the graph left in its inputs, some of which it may write in place."""
    interpreter = _Local(gm)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        return (interpreter.run(*inputs), list(inputs)), interpreter


def _distance(a: Tensor, e: Tensor) -> float:
    """Relative error of `a` in the 2-norm, or infinity when only one of them is finite somewhere."""
    if a.shape != e.shape:
        return float("inf")
    a, e = a.double(), e.double()
    if not torch.equal(a.isfinite(), e.isfinite()):
        return float("inf")
    a, e = a[a.isfinite()], e[e.isfinite()]
    return float((a - e).norm() / e.norm().clamp_min(1e-30)) if a.numel() else 0.0


def _within(a: Any, e: Any, numeric: str) -> bool:
    if not isinstance(a, Tensor) or not isinstance(e, Tensor):
        return type(a) is type(e)
    if not a.dtype.is_floating_point or numeric == "bitwise":
        return a.dtype == e.dtype and torch.equal(a.nan_to_num(), e.nan_to_num()) if a.is_floating_point() \
            else a.dtype == e.dtype and torch.equal(a, e)
    lowest = torch.bfloat16 if numeric == "changes_dtype" else torch.float32
    # A graph is some tens of ops deep and the 2-norm averages their roundings: ten times one op's tolerance.
    return _distance(a, e) <= 10 * tolerance(lowest)["rtol"]
