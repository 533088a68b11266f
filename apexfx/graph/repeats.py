"""Runs of nodes that repeat in a graph: the same ops, constants, shapes, strides, dtypes and wiring, copy behind copy."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._torch import OpOverload
from .nodes import size_hint, value

Behind = Mapping[fx.Node, Collection[fx.Node]]  # the nodes that each node has to stay behind

_ALIGNED = 16  # bytes: compiled code takes every input for memory that begins at a multiple of these
_PHASES = 8  # places where copies may begin that are looked at
_NEXT, _DISTANCES = 8, 64  # to how many next tokens of its kind one is measured; how many distances are tried
_VIEWS = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)  # whose schema does not say that they may be


class Repeat(NamedTuple):
    """Equal copies of some nodes.

    Attributes:
        copies: the nodes of each copy, in order.
        operands: for each copy, the nodes in front of it that it reads, in the order of its first reads.
        results: the places in a copy of the nodes that are read behind it; of a view, the place of what it views.
    """

    copies: Sequence[Sequence[fx.Node]]
    operands: Sequence[Sequence[fx.Node]]
    results: Sequence[int]


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory the value of `node` may lie in, where that is its first argument."""
    if node.target is operator.getitem:
        return viewed(node.args[0]) and node.args[0]
    is_view = isinstance(node.target, OpOverload) and (
        node.target in _VIEWS or any(each.alias_info is not None for each in node.target._schema.returns))
    return node.args[0] if is_view else None


def repeats(graph: fx.Graph, may_repeat: Callable[[fx.Node], bool], behind: Callable[[], Behind], *, least_ops: int,
            least_copies: int) -> Iterator[Repeat]:
    """Yield what repeats in a graph, the longest run first; no node is in two.

    Between the nodes of a copy others may lie that can go in front of it, or behind it: `make_room` moves them.

    Args:
        may_repeat: whether a node may be in a copy.
        behind: the `dependencies` of the graph, which are asked for where something repeats.
        least_ops: of a copy.
        least_copies: of a run.
    """
    nodes = list(filter(may_repeat, graph.nodes))
    numbers: dict[Any, int] = {}
    tokens = [numbers.setdefault(_token(node), len(numbers)) for node in nodes]
    while (found := _longest(tokens, least_ops, least_copies)) is not None:
        start, _, length = found
        yield from _Run(nodes, behind(), *found).aligned(least_ops, least_copies)
        tokens[start:start + length] = range(-1 - start, -1 - start - length, -1)  # as nothing else


def make_room(copy: Sequence[fx.Node], behind: Behind) -> None:
    """Move what lies between the nodes of a copy: in front of it what one of them waits for, and the rest behind it.

    Args:
        behind: the `dependencies` of the graph, before or after moves like this.
    """
    first, last = _between(copy, behind)
    for node in first:
        copy[0].prepend(node)
    for node in reversed(last):
        copy[-1].append(node)


def _between(copy: Sequence[fx.Node], behind: Behind) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what lies between the nodes of a copy, in order: what one of them waits for, and the rest."""
    inside, between, node = set(copy), [], copy[0]
    while (node := node.next) is not copy[-1] and len(copy) > 1:
        if node not in inside:
            between.append(node)
    needed, waited = set().union(*map(behind.__getitem__, copy)), set()
    for node in reversed(between):
        if node in needed:
            waited.add(node)
            needed |= behind[node]
    return [node for node in between if node in waited], [node for node in between if node not in waited]


def _token(node: fx.Node) -> Any:
    return node.target, _constants(node.args), _constants(node.kwargs), _kind(value(node))


def _constants(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return fx.Node
    if isinstance(argument, (tuple, list)):
        return tuple(map(_constants, argument))
    if isinstance(argument, dict):
        return tuple((key, _constants(each)) for key, each in argument.items())
    return repr(argument)


def _kind(val: Any) -> Any:
    """Return what two values must have alike, so that one code can make, or read, both."""
    if isinstance(val, Tensor):
        return str(val.shape), str(val.stride()), val.dtype, val.device
    return tuple(map(_kind, val)) if isinstance(val, (tuple, list)) else repr(val)


def _longest(tokens: Sequence[int], least_ops: int, least_copies: int) -> tuple[int, int, int] | None:
    """Return (start, period, length) of the run whose copies, but for the first, hold most tokens."""
    most, found = 0, None
    for period in _distances(tokens):
        if not least_ops <= period <= len(tokens) // least_copies:
            continue
        end = 0
        for is_equal, same in itertools.groupby(map(operator.eq, tokens, tokens[period:])):
            start, end = end, end + sum(1 for _ in same)
            copies = (end - start) // period + 1 if is_equal else 0
            if copies >= least_copies and (copies - 1) * period > most:
                most, found = (copies - 1) * period, (start, period, end - start + period)
    return found


def _distances(tokens: Sequence[int]) -> list[int]:
    """Return the distances at which equal tokens most often follow each other: copies are as far apart."""
    counts: dict[int, int] = defaultdict(int)
    places: dict[int, deque[int]] = defaultdict(functools.partial(deque, maxlen=_NEXT))
    for place, token in enumerate(tokens):
        for earlier in places[token]:
            counts[place - earlier] += 1
        places[token].append(place)
    return sorted(counts, key=counts.__getitem__, reverse=True)[:_DISTANCES]


class _Run:
    """A run of nodes whose tokens repeat: `length` of `nodes` from `start` on, each equal to the one `period` behind it."""

    def __init__(self, nodes: Sequence[fx.Node], behind: Behind, start: int, period: int,
                 length: int) -> None:
        self._nodes, self._behind, self._start, self._period, self._end = nodes, behind, start, period, start + length
        self._place = {node: place for place, node in enumerate(nodes[start:start + length], start)}

    def aligned(self, least_ops: int, least_copies: int) -> list[Repeat]:
        """Return the copies that begin where the fewest bytes go from one to the next, in the parts that hold together."""
        def cost(begin: int) -> tuple[int, int]:
            copies = (self._end - begin) // self._period
            middle = begin + copies // 2 * self._period
            results = self._results(range(middle, middle + self._period))
            return -copies, sum(_nbytes(value(self._nodes[middle + place])) for place in results)

        best: list[Repeat] = []
        for begin in sorted(range(self._start, self._start + self._period), key=cost)[:_PHASES]:
            parts = [(low, high) for low, high in itertools.pairwise(self._cuts(begin)) if high - low >= least_ops]
            found = [self._wired(begin, low, high, least_copies) for low, high in parts]
            best = max(best, [repeat for repeat in found if repeat is not None], key=num_saved)
        return best

    def _cuts(self, begin: int) -> list[int]:
        """Return the places that cut a copy: its ends, and each node in between that waits for the copy, and the copy for it."""
        cuts = {0, self._period}
        for first in range(begin, self._end - self._period + 1, self._period):
            copy = self._nodes[first:first + self._period]
            inside, waited = set(copy), _between(copy, self._behind)[0]
            behind_copy = set()
            for node in waited:
                if not inside.isdisjoint(self._behind[node]) or not behind_copy.isdisjoint(self._behind[node]):
                    behind_copy.add(node)
                    while node not in inside:
                        node = node.prev
                    cuts.add(self._place[node] + 1 - first)
        return sorted(cuts)

    def _wired(self, begin: int, low: int, high: int, least_copies: int) -> Repeat | None:
        """Return the part between places `low` and `high` of the copies behind `begin` that are wired alike."""
        alike = defaultdict(list)
        for first in range(begin, self._end - self._period + 1, self._period):
            places = range(first + low, first + high)
            wiring, operands = self._wiring(places)
            if all(_is_operand(value(each)) for each in operands):
                alike[wiring, tuple(_kind(value(each)) for each in operands)].append((places, operands))
        most = max(alike.values(), key=len, default=[])
        results = sorted(set().union(*(self._results(places) for places, _ in most)))
        copies = [[self._nodes[place] for place in places] for places, _ in most]
        if len(most) < least_copies or not results:  # views alone, which are made behind a call
            return None
        if not all(isinstance(value(copies[0][place]), Tensor) for place in results):
            return None
        return Repeat(copies, [operands for _, operands in most], results)

    def _wiring(self, places: range) -> tuple[str, list[fx.Node]]:
        """Return where the arguments of a copy come from, and the nodes outside of it."""
        operands: dict[fx.Node, int] = {}

        def source(node: fx.Node) -> tuple[str, int]:
            if (place := self._place.get(node)) in places:
                return "inside", place - places.start
            return "operand", operands.setdefault(node, len(operands))

        wiring = [fx.map_arg((node.args, node.kwargs), source) for node in self._nodes[places.start:places.stop]]
        return repr(wiring), list(operands)

    def _results(self, places: range) -> set[int]:
        """Return the places of the nodes that a copy has to return."""
        results = set()
        for node in self._nodes[places.start:places.stop]:
            if all(self._place.get(user) in places for user in node.users):
                continue
            while (base := viewed(node)) is not None and self._place.get(node) in places:
                node = base
            if self._place.get(node) in places:
                results.add(self._place[node] - places.start)
        return results


def num_saved(found: Sequence[Repeat]) -> int:
    """Return how many nodes fewer there are where each of `found` is kept once, and called: calls and results are nodes."""
    return sum((len(each.copies) - 1) * len(each.copies[0]) - len(each.copies) * (1 + len(each.results)) for each in found)


def _is_operand(val: Any) -> bool:
    """Return whether code that is called may be given a value."""
    if isinstance(val, torch.SymInt):
        return True
    if not isinstance(val, Tensor) or val.is_conj() or val.is_neg():  # which a call is not implemented for
        return False
    offset = val.storage_offset() * val.element_size()
    return isinstance(offset, int) and offset % _ALIGNED == 0


def _nbytes(val: Any) -> int:
    return sum(_nbytes(each) for each in val) if isinstance(val, (tuple, list)) else \
        val.element_size() * size_hint(val.numel()) if isinstance(val, Tensor) else 0
