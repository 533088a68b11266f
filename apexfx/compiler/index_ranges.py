"""Whole numbers of a batch that an op takes for indices: a call whose numbers are out of range is refused before it runs.

Inductor's code takes some indices that eager refuses (rows below zero), and stops at others in the middle of a step, which has
changed something by then; neither names the tensor. What the batch gives is looked at where it goes to the op as it is, or by
views, casts and constants added; an index that the forward computes otherwise is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .._torch import OpOverload, OpOverloadPacket
from ..graph.inputs import Placeholder
from ..graph.mutation import storages, written_storages
from ..graph.nodes import module_path, source_line, value
from ..graph.op_names import canonical_name


class _Takes(NamedTuple):
    """How an op takes indices: the names of its arguments, in order; which is the index, and which tensor it is into.

    Attributes:
        dim: of that tensor: a number, or the name of the argument that says which.
        counts_back: whether numbers below zero count from the end.
    """

    arguments: tuple[str, ...]
    index: str
    into: str
    dim: int | str = "dim"
    counts_back: bool = False


_BY_DIM = _Takes(("input", "dim", "index"), "index", "input")
_ROWS = _Takes(("input", "weight"), "input", "weight", 0)
_CLASSES = _Takes(("input", "target", "weight", "size_average", "ignore_index"), "target", "input", 1)
_TAKES = {
    "embedding": _ROWS, "embedding_bag": _ROWS,
    **dict.fromkeys(("gather", "index_select", *(f"{name}{end}" for end in ("", "_") for name in (
        "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce"))), _BY_DIM),
    **dict.fromkeys(("index_fill", "index_fill_"), _BY_DIM._replace(counts_back=True)),
    "cross_entropy": _CLASSES, "nll_loss": _CLASSES, "multi_margin_loss": _CLASSES._replace(arguments=("input", "target")),
}
_SUBSCRIPTS = ("getitem", "setitem", "index_put", "index_put_")
# What holds the same numbers, if its dtype is the same; and some of them, or others by a constant.
_SAME = frozenset((
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "transpose", "permute", "movedim", "t", "T", "mT",
    "attribute", "contiguous", "clone", "detach", "to", "type", "long", "int", "expand", "view_as", "reshape_as", "expand_as"))
_SOME = frozenset(("getitem", "narrow", "select", "chunk", "split", "unbind", "tensor_split", "pad", "add", "sub"))


class _Index(NamedTuple):
    """An index that comes in with the batch.

    Attributes:
        place, name: of the input.
        view: makes of `inputs` what the op gets; None where that has the same numbers.
        inputs: places of what it takes.
        low, high: numbers that are in range are as large as `low`, and smaller than `high`.
        ignored: one that is, whatever the range; None for none.
        op: what takes it, and where.
    """

    place: int
    name: str
    view: Callable[..., Tensor] | None
    inputs: tuple[int, ...]
    low: int
    high: int
    ignored: int | None
    op: str


class IndexRanges:
    """Refuses calls of a graph whose indices are out of range.

    Args:
        gm: as captured.
        placeholders: its inputs.
        looks: True: at tensors that are on a device, too, for which a call waits; None: at those on the CPU; False: at none.
    """

    def __init__(self, gm: fx.GraphModule, placeholders: Sequence[Placeholder], looks: bool | None) -> None:
        inputs = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        changed = written_storages(gm)
        found: dict[Any, _Index] = {}
        for node in gm.graph.nodes if looks is not False else ():
            if node.op not in ("call_function", "call_method"):
                continue
            for index, size, counts_back, ignored in _indices(node):
                source, views = _source(index)
                p = placeholders[inputs[source]] if source in inputs else None
                if p is None or p.kind != "input" or value(index).dtype not in (torch.int64, torch.int32) or \
                        not isinstance(size, int) or \
                        p.device.type != "cpu" and not looks or any(storages(value(each)) & changed for each in (source, *views)):
                    continue
                views = _without_same(views)
                if (made := _made_by(views, source, inputs)) is not None:
                    path = f" of {module_path(node)!r}" if module_path(node) else ""
                    where = f" at {line}" if (line := source_line(node)) else ""
                    found.setdefault((source, tuple(views), size, counts_back, ignored), _Index(
                        inputs[source], p.name, *made, -size if counts_back else 0, size, ignored,
                        f"{canonical_name(node.target)}{path}{where}"))
        self._indices = list(found.values())

    def __call__(self, args: Sequence[Any]) -> None:
        """Look at the inputs of a call.

        Raises:
            IndexError: it names the tensor, the number and the op.
        """
        for each in self._indices:
            if type(args[each.place]) is not Tensor:  # but one without numbers, a fake one
                continue
            numbers = args[each.place] if each.view is None else each.view(*[args[place] for place in each.inputs])
            if not numbers.numel() or _within(numbers, each):
                continue
            if each.ignored is not None:
                numbers = numbers.masked_fill(numbers == each.ignored, 0)
                if _within(numbers, each):
                    continue
            wrong = (numbers < each.low) | (numbers >= each.high)
            at = wrong.nonzero()[0].tolist()
            view = f", of size {list(numbers.shape)} as the op gets it," if each.view is not None else ""
            besides = f", or {each.ignored}" if each.ignored is not None else ""
            raise IndexError(
                f"apexfx: {each.name}{view} has {int(numbers[tuple(at)])} at {at}, and {int(wrong.sum())} of its "
                f"{numbers.numel()} numbers are out of range: {each.op} takes {each.low} <= index < {each.high}{besides}. "
                "Nothing has run, and nothing has changed")


def _within(numbers: Tensor, index: _Index) -> bool:
    least, largest = numbers.aminmax()
    return least.item() >= index.low and largest.item() < index.high


def _indices(node: fx.Node) -> list[tuple[fx.Node, Any, bool, int | None]]:
    """Return what an op takes for indices: (the node, the size that it is an index into, `counts_back`, `ignored`)."""
    name = canonical_name(node.target)
    if name in _SUBSCRIPTS:
        new = 1 if isinstance(node.target, (OpOverload, OpOverloadPacket)) else 0  # None: a dimension of the tensor, or a new one
        return [(index, size, True, None) for index, size in _subscripts(*node.args[:2], new)] if len(node.args) > 1 else []
    if name == "one_hot":
        classes = node.args[1] if len(node.args) > 1 else node.kwargs.get("num_classes")
        return [(node.args[0], classes, False, None)] if classes not in (None, -1) and node.args else []
    if (takes := _TAKES.get(name)) is None:
        return []
    given = {**dict(zip(takes.arguments, node.args)), **node.kwargs}
    index, into = given.get(takes.index), value(given.get(takes.into))
    if not (isinstance(index, fx.Node) and isinstance(into, Tensor) and into.dim()):
        return []
    dim = given.get(takes.dim) if isinstance(takes.dim, str) else min(takes.dim, into.dim() - 1)
    if not isinstance(dim, int):
        return []
    return [(index, into.shape[dim], takes.counts_back,
             given.get("ignore_index", -100) if "ignore_index" in takes.arguments else None)]


def _subscripts(into: Any, keys: Any, of_none: int) -> list[tuple[fx.Node, Any]]:
    """Return the tensors of whole numbers among the keys of `into[keys]`, each with the size that it is an index into.

    Args:
        of_none: how many dimensions None stands for.
    """
    if not isinstance(of := value(into), Tensor):
        return []
    keys, found, dim = keys if isinstance(keys, (tuple, list)) else (keys,), [], 0
    taken = [of_none if key is None else _dims(key) for key in keys]
    for key, dims in zip(keys, taken):
        if key is Ellipsis:
            dim = of.dim() - sum(taken[keys.index(key) + 1:])
            continue
        if isinstance(key, fx.Node) and isinstance(value(key), Tensor) and value(key).dtype in (torch.int64, torch.int32):
            found.append((key, of.shape[dim]))
        dim += dims
    return found


def _dims(key: Any) -> int:
    """Return how many dimensions a key stands for."""
    key = value(key)
    if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8):
        return key.dim()
    return int(key is not None and key is not ... and not isinstance(key, bool))


def _source(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return what a tensor is made of, and what makes it, in order."""
    views: list[fx.Node] = []
    while node.op in ("call_function", "call_method") and canonical_name(node.target) in _SAME | _SOME \
            and node.args and isinstance(node.args[0], fx.Node):
        views, node = [node, *views], node.args[0]
    return node, views


def _without_same(views: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """Leave out those at the end that hold the same numbers."""
    return views if not views or canonical_name(views[-1].target) in _SOME or \
        value(views[-1]).dtype != value(views[-1].args[0]).dtype else _without_same(views[:-1])


def _made_by(views: Sequence[fx.Node], source: fx.Node, inputs: dict[fx.Node, int]) -> tuple[
        Callable[..., Tensor] | None, tuple[int, ...]] | None:
    """Return what makes the views, and the places of what it takes; None where they depend on more than the inputs."""
    if not views:
        return None, ()
    sizes = [node for view in views for node in view.all_input_nodes if node is not source and node not in views]
    if any(node not in inputs or isinstance(value(node), Tensor) for node in sizes):
        return None
    graph, new = fx.Graph(), {}
    for node in dict.fromkeys([source, *sizes]):
        new[node] = graph.placeholder(node.name)
    for view in views:
        new[view] = graph.node_copy(view, new.__getitem__)
    graph.output(new[views[-1]])
    return fx.GraphModule(nn.Module(), graph).forward, tuple(inputs[node] for node in dict.fromkeys([source, *sizes]))
