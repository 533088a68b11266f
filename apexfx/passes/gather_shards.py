"""Gather sharded parameters in front of what reads them."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.passes.infra.pass_base import PassResult

from ..graph.gradient_modes import ON, gradient_modes
from ..graph.inputs import Placeholder, apply_node, written_parameter
from ..graph.marks import NAME
from ..graph.mutation import storages, written_storages
from ..graph.nodes import call, evaluate, fake_mode, set_value, value
from ..graph.printed_names import identifier
from ..graph.printing import count_text
from ..precision.casts import is_inserted_cast
from .base import Pass

_GATHER = torch.ops.apexfx.gather_shards.default


@dataclass(frozen=True)
class ShardGroup:
    """Parameters that are gathered at once.

    Attributes:
        name: path of the module that they belong to.
        parameters: the places of those among a graph's inputs.
        lengths: of each, how many rows the whole one has.
        reduce_dtype: in which their gradients are summed; None as they are.
        reshards: whether whole parameters are dropped after the forward.
    """

    name: str
    parameters: tuple[int, ...]
    lengths: tuple[int, ...]
    reduce_dtype: torch.dtype | None = None
    reshards: bool = True


def as_rows(placeholders: Sequence[Placeholder], rows: Mapping[int, Tensor]) -> tuple[Placeholder, ...]:
    """Return the inputs of a graph, sharded parameters, by place, as the rows that this rank has of them."""
    return tuple(replace(p, shape=tuple(rows[p.index].shape), stride=rows[p.index].stride()) if p.index in rows else p
                 for p in placeholders)


class GatherShards(Pass):
    """Make inputs of the rows that this rank has of each parameter, and gather whole parameters in front of their first reader.

    The gradient of a gather sums the ranks' gradients and gives each rank its rows of their mean: parameters, gradients and
    optimizer state of a step are rows. One gather, and one sum, for what `fully_shard` was told to gather at once. A parameter
    that is read in half alone is cast before it is gathered, and its gradients are summed in half unless `reduce_dtype` says
    otherwise.

    Before:  y = linear(x, w, b); grad = autograd.grad(loss, [w, b]); apply_gradients([w, b], ...)
    After:   w_whole, b_whole = gather_shards([w, b], ...)
             y = linear(x, w_whole, b_whole); grad = autograd.grad(loss, [w, b]); apply_gradients([w, b], ...)

    Args:
        placeholders: the inputs of the captured graph, sharded parameters by their rows.
        shards: which are gathered together.
        sums: the places of what accumulates their gradients.
        group_name: the process group's.
        world_size: the process group's.

    Raises:
        ValueError: the forward writes a sharded parameter.
    """

    name = "gather_shards"
    stage = "forward"
    numeric = "reassociates"

    def __init__(self, *, placeholders: Sequence[Placeholder], shards: Sequence[ShardGroup], group_name: str,
                 world_size: int, sums: Sequence[int] = ()) -> None:
        super().__init__()
        self.placeholders, self.shards, self.sums = placeholders, shards, sums
        self.group_name, self.world_size = group_name, world_size
        self._gathered: list[Any] = []

    def begin(self) -> None:
        super().begin()
        self._gathered = []

    def options(self) -> dict[str, Any]:
        shards = [{**asdict(each), "reduce_dtype": str(each.reduce_dtype)} for each in self.shards]
        return {"shards": shards, "group": self.group_name, "world_size": self.world_size}

    def collectives(self) -> list[Any]:
        return self._gathered

    def call(self, gm: fx.GraphModule) -> PassResult:
        if gm.graph.find_nodes(op="call_function", target=_GATHER):
            return PassResult(gm, False)
        inputs, place = gm.graph.find_nodes(op="placeholder"), {node: at for at, node in enumerate(gm.graph.nodes)}
        self._check_unwritten(gm, inputs)
        mode, modes = fake_mode(gm.graph), gradient_modes(gm.graph)
        ends = {apply_node(gm), gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)[-1]}
        gathers = []
        for group in self.shards:
            by_dtype: dict[torch.dtype, list[_Member]] = {}
            for index, length in zip(group.parameters, group.lengths):
                whole, users = _gathered(inputs[index], ends)
                if users:
                    member = _Member(inputs[index], length, whole, users)
                    by_dtype.setdefault(member.whole.dtype, []).append(member)
                rows = self.placeholders[index]
                with mode:
                    empty = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device, requires_grad=rows.requires_grad)
                set_value(inputs[index], empty)
            for members in by_dtype.values():
                first = min((user for member in members for user, _ in member.users), key=place.__getitem__)
                gathers.append((place[first], first, group, members))
        for _, first, group, members in sorted(gathers, key=lambda each: each[0]):
            while modes.get(first.prev, ON) != ON:  # or it would have no gradient
                first = first.prev
            self._gather(first, group, members, mode)
        sums = self._set_sums(inputs, mode)
        _set_gradients(gm, sums, mode)
        return PassResult(gm, bool(gathers))

    def _set_sums(self, inputs: Sequence[fx.Node], mode: Any) -> list[fx.Node]:
        """Have what accumulates gradients be rows; return it."""
        for place in self.sums:
            with mode:  # in the same memory, which other nodes write
                set_value(inputs[place], value(inputs[place]).narrow(0, 0, self.placeholders[place].shape[0]))
        return [inputs[place] for place in self.sums]

    def _check_unwritten(self, gm: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
        memory = written_storages(gm)
        for index in (index for group in self.shards for index in group.parameters):
            if storages(value(inputs[index])) & memory:
                raise written_parameter(self.placeholders[index].name)

    def _gather(self, first: fx.Node, group: ShardGroup, members: Sequence[_Member], mode: Any) -> None:
        """Insert the gather of `members` in front of `first`, and have their users read what it gives."""
        nodes, lengths, dtype = [member.node for member in members], [member.length for member in members], members[0].whole.dtype
        names = [node.meta[NAME] for node in nodes]
        with first.graph.inserting_before(first):
            gathered = call(first.graph, _GATHER, (nodes, lengths, self.world_size, self.group_name, dtype, group.reduce_dtype),
                            like=first, mode=mode, name=f"{identifier(group.name or 'root')}_gathered")
            for at, (name, member) in enumerate(zip(names, members)):
                item = call(first.graph, operator.getitem, (gathered, at), like=first, mode=mode,
                            name=f"{identifier(name)}_whole")
                set_value(item, member.whole)
                for user, source in member.users:
                    user.replace_input_with(source, item)
                for cast in {source for _, source in member.users} - {member.node}:
                    first.graph.erase_node(cast)
        self._gathered.append(["gather", group.name, names, str(dtype), str(group.reduce_dtype), group.reshards])
        self.record(gathered, f"{count_text(len(members), 'parameter')} of {group.name or 'the model itself'}")


class _Member(NamedTuple):
    """A parameter in a gather.

    Attributes:
        node: its input.
        length: how many rows the whole one has.
        whole: the value of that, as it is gathered: in the dtype of its one cast where nothing else reads it.
        users: what reads it, and by which node.
    """

    node: fx.Node
    length: int
    whole: Tensor
    users: list[tuple[fx.Node, fx.Node]]


def _gathered(parameter: fx.Node, ends: Container[fx.Node | None]) -> tuple[Tensor, list[tuple[fx.Node, fx.Node]]]:
    """Return the value to gather for a parameter (its cast, where that alone reads it), and (reader, source) of each reader.

    Args:
        ends: what takes the parameter itself: as rows.
    """
    users = [user for user in parameter.users if user not in ends]
    source = users[0] if len(users) == 1 and is_inserted_cast(users[0]) else parameter
    return value(source), [(user, source) for user in (source.users if source is not parameter else users)]


def _set_gradients(gm: fx.GraphModule, sums: Sequence[fx.Node], mode: Any) -> None:
    """Give the gradients, and all that is computed from them and from earlier sums, values of the shapes of rows."""
    grad = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)[-1]
    behind = {grad, *sums}
    for item in (user for user in grad.users if user.target is operator.getitem):
        with mode:
            set_value(item, torch.empty_like(value(grad.args[1][item.args[1]]), requires_grad=False))
        behind.add(item)
    for node in gm.graph.nodes:
        if node.op.startswith("call_") and node not in behind and behind.intersection(node.all_input_nodes):
            set_value(node, evaluate(node, mode))
            behind.add(node)
