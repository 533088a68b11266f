"""Run a graph before and after a pass on real inputs, and name the first node that leaves the pass's numeric tier.

No collective is issued: an all_reduce is answered as if every rank held what this one holds, so that the sum is
`x * world size`, and averaged gradients must come out equal to local ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import FakeTensor, tree_leaves, tree_map, unset_fake_temporarily
from ..config import HALVES
from ..errors import PassError
from ..graph.inputs import apply_node
from ..graph.mutation import written
from ..graph.nodes import graphs, size_hint
from ..observe.code_errors import real_parts
from ..observe.interpreter import Interpreter
from ..testing import tolerance


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of `gm` whose graph, and those of its nested bodies, later edits do not reach."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {})).meta.update(gm.graph.output_node().meta)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    for node in gm.graph.find_nodes(op="get_attr"):
        body = gm.get_submodule(str(node.target)) if isinstance(getattr(gm, str(node.target), None), fx.GraphModule) else None
        if body is not None:
            setattr(copy, str(node.target), snapshot(body))
    return copy


def real_inputs(example_inputs: Sequence[Any]) -> Callable[[], Sequence[Any]] | None:
    """Return what makes a fresh copy of the inputs of a captured graph; None where the user gave fakes, which have no values."""
    if any(isinstance(x, FakeTensor) for x in example_inputs):
        return None
    return lambda: [_copy(x) for x in example_inputs]


def _copy(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad and x.is_leaf)
    return size_hint(x) if isinstance(x, torch.SymInt) else x


def differ(before: fx.GraphModule, after: fx.GraphModule) -> bool:
    """Return whether two graphs, or bodies in them, are written differently."""
    return [str(gm.graph) for gm in graphs(before)] != [str(gm.graph) for gm in graphs(after)]


class _Local(Interpreter):
    """Evaluates a graph without talking to other ranks; keeps a copy of every tensor it produces.

    Attributes:
        gradients: those that the graph, of a training step, computes last; else those of its outputs by its inputs.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.seen: dict[str, Any] = {}
        self.gradients: Sequence[Any] = ()

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except RuntimeError:
            # The graph of a half model need not run as it is: batch norm on the CPU refuses half parameters beside float32
            # statistics, and its fake kernel gives saved statistics another dtype than the real one.
            args, kwargs = tree_map(_float32, self.fetch_args_kwargs_from_env(n))
            result = getattr(self, n.op)(n.target, args, kwargs)
        if n.op in ("call_function", "call_method"):
            self.seen[n.name] = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, result)
        if n.target is torch.autograd.grad:
            self.gradients = result
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A checkpoint refuses to compute again what has written a buffer meanwhile, such as a batch norm's count.
        if str(target) == "tag_activation_checkpoint":
            return args[0](*args[1:])
        return super().call_function(target, args, kwargs)

    def differentiate(self, outputs: Any, inputs: Sequence[Any]) -> None:
        """Compute the gradients of outputs, weighted at random, by the inputs that require them."""
        leaves = [x for x in inputs if isinstance(x, Tensor) and x.is_leaf and x.requires_grad]
        # A view that was made under no_grad says that it requires gradients, and has no history.
        roots = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad
                 and (x.grad_fn is not None or any(x is leaf for leaf in leaves))]
        if leaves and roots:
            self.gradients = torch.autograd.grad(roots, leaves, [torch.rand_like(root) for root in roots], allow_unused=True)


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def check_tier(
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
    expected, wanted = _run(before, inputs())
    actual, got = _run(after, inputs())
    halves = any(isinstance(leaf, Tensor) and leaf.dtype in HALVES for run in (wanted, got) for leaf in tree_leaves(run.seen))
    # Casts that are shared add gradients in half, and rounding may change an update by all of it: Adam divides a gradient by its
    # own size, and one that is rounding alone (of a bias in front of a batch norm) moves its parameter as far as any other.
    exact = numeric == "bitwise" and not halves
    results = [_results(gm, values, () if exact else _of_update(gm)) for gm, values in ((after, actual), (before, expected))]
    if _agree(got.gradients, wanted.gradients, "changes_dtype" if halves else "reassociates") and all(
            _within(a, e, numeric) for a, e in zip(*results, strict=True)):
        return
    skipped = () if exact else _of_update(after)
    for name, result in got.seen.items():
        for a, e in zip(tree_leaves(result), tree_leaves(wanted.seen.get(name))):
            if isinstance(a, Tensor) and isinstance(e, Tensor) and not _within(a, e, numeric):
                node = next(n for g in graphs(after) for n in g.graph.nodes if n.name == name)
                if node not in skipped:
                    raise PassError(pass_name, f"leaves its tier {numeric!r}: off by {_distance(a, e):.2g}", node)
    raise PassError(pass_name, "the outputs, their gradients, or the inputs that are written in place, leave its tier "
                    f"{numeric!r}, though every node common to both graphs agrees")


def _results(gm: fx.GraphModule, values: tuple[Any, list[Any]], skipped: Collection[fx.Node]) -> list[Any]:
    """Return what a graph has returned, and left in its inputs, but for the nodes `skipped`."""
    nodes = tree_leaves((gm.graph.output_node().args[0], gm.graph.find_nodes(op="placeholder")))
    return [value for node, value in zip(nodes, tree_leaves(values), strict=True) if node not in skipped]


def _agree(gradients: Sequence[Any], expected: Sequence[Any], numeric: str) -> bool:
    """Return whether the same gradients are there, and agree all together: a small one may be rounding alone."""
    present = [g is not None for g in expected]
    if [g is not None for g in gradients] != present:
        return False
    if not any(present):
        return True
    a, e = (torch.cat([real_parts(g.to_dense()).double().flatten() for g in some if g is not None])
            for some in (gradients, expected))
    scaled_too_far = not (a.isfinite().all() and e.isfinite().all())  # in float16, where the step is skipped
    return scaled_too_far or _within(a, e, numeric)


def _of_update(gm: fx.GraphModule) -> set[fx.Node]:
    """Return what follows from the gradients of a training step: nodes, and the inputs that they write."""
    update = set([node for node in gm.graph.nodes if node.target is torch.autograd.grad][-1:])
    if not update:
        return update
    for node in gm.graph.nodes:
        if any(source in update for source in node.all_input_nodes):
            update |= {node, *written(node)}
    if (node := apply_node(gm)) is not None:
        update |= {*node.args[0], *node.args[2], *node.args[3]}
    return update


def _run(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, _Local]:
    """Return the outputs and what the graph left in its inputs, some of which it may write in place."""
    interpreter = _Local(gm)
    with torch.random.fork_rng(), torch.set_grad_enabled(torch.is_grad_enabled()):  # a graph may switch gradients
        torch.manual_seed(0)
        outputs = interpreter.run(*inputs)
        if not interpreter.gradients:
            interpreter.differentiate(outputs, inputs)
    return (outputs, list(inputs)), interpreter


def _distance(a: Tensor, e: Tensor) -> float:
    """Relative error of `a` in the 2-norm, or infinity when only one of them is finite somewhere."""
    if a.shape != e.shape:
        return float("inf")
    a, e = a.detach().double(), e.detach().double()
    if not torch.equal(a.isfinite(), e.isfinite()):
        return float("inf")
    a, e = a[a.isfinite()], e[e.isfinite()]
    return float((a - e).norm() / e.norm().clamp_min(1e-30)) if a.numel() else 0.0


def _within(a: Any, e: Any, numeric: str) -> bool:
    if not isinstance(a, Tensor) or not isinstance(e, Tensor):
        return type(a) is type(e)
    if a.is_complex() and e.is_complex():
        return a.dtype == e.dtype and _within(real_parts(a), real_parts(e), numeric)
    if not a.dtype.is_floating_point or numeric == "bitwise":
        return a.dtype == e.dtype and torch.equal(a.nan_to_num(), e.nan_to_num()) if a.is_floating_point() \
            else a.dtype == e.dtype and torch.equal(a, e)
    lowest = torch.bfloat16 if numeric == "changes_dtype" else torch.float32
    # A graph is some tens of ops deep and the 2-norm averages their roundings: ten times one op's tolerance.
    return _distance(a, e) <= 10 * tolerance(lowest)["rtol"]
