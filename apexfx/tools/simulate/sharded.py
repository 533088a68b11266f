"""A step that is sharded, as the graph that would run: a model under `fully_shard`, or `shard="optimizer"`.

`traced` makes the step by `train_step`, in a process group whose other ranks are not there, and captures it; nothing runs.
`program` reads the graph as all passes have left it, node by node. Its collectives and waits are those of a rank's program. Among
its ops the seconds of the profile's forward, backward and update are divided, in proportion to what each would take alone. Copies
around collectives have costs of their own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.fx.passes.infra.pass_base import PassResult

from ..._torch import OpOverload, tree_leaves, tree_map
from ...config import BucketConfig
from ...graph.collectives import is_collective, is_wait
from ...graph.marks import BUCKET, BUCKET_OF_ROWS, MAKES_WHOLE
from ...graph.nodes import value
from ...graph.order import aliases
from ...passes.base import Pass
from ...train_step import train_step
from .devices import Costs, Device, op_cost
from .network import Network
from .profile import Profile, blocks_of, loss_of, muons, orthogonal_seconds
from .timeline import Start, Task, Wait, Work

SHARDS = ("model", "optimizer")
_OPS, _ATEN = torch.ops.apexfx, torch.ops.aten
_FLATTENS = (_OPS.flatten_bucket.default, _ATEN._chunk_cat.default)


@dataclass(frozen=True)
class TracedStep:
    """A step's graph.

    Attributes:
        nodes: in order.
        num_ranks, shard: for which it was made.
    """

    nodes: Sequence[fx.Node]
    num_ranks: int
    shard: str


class _ReadNodes(Pass):
    """Keep the nodes of the graph as all other passes have left it."""

    name = "read_nodes"
    stage = "step"

    def call(self, gm: fx.GraphModule) -> PassResult:
        self.nodes = list(gm.graph.nodes)
        return PassResult(gm, False)


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    named, matrices = list(model.named_parameters()), muons(model)
    ours, others = ([p for name, p in named if (name in matrices) is wanted] for wanted in (True, False))
    return [make(params) for make, params in ((torch.optim.Muon, ours), (torch.optim.AdamW, others)) if params]


# Reads and writes of each parameter, and what makes the optimizer of a model.
OPTIMIZERS: Mapping[str, tuple[int, Callable[[nn.Module], Any]]] = {
    "sgd": (3, lambda model: torch.optim.SGD(model.parameters())),
    "momentum": (5, lambda model: torch.optim.SGD(model.parameters(), momentum=0.9)),
    "adam": (7, lambda model: torch.optim.Adam(model.parameters())),
    "muon": (5, _muon),
}


def traced(model: nn.Module, inputs: Any, *, shard: str, optimizer: str = "sgd",
           dtype: torch.dtype = torch.float32, sync_bn: bool = False, clips: bool = False, blocks: str | None = None,
           config: BucketConfig | None = None) -> TracedStep:
    """Return the graph of a step of `model` as this rank of the process group would run it.

    Args:
        model, inputs: on the CPU or the meta device; they stay as they are. Parameters are taken to be float32.
        shard: "model": it is under `fully_shard`; "optimizer": the option of `train_step`.
        optimizer: a key of `OPTIMIZERS`.
        dtype: of compute.
        sync_bn, clips: whether batch norms are synchronized, and gradients clipped.
        blocks: with "model", see `blocks_of`.
        config: with "optimizer", that of the buckets.

    Raises:
        ValueError, TypeError, RuntimeError: as `train_step` and `capture`.
    """
    model, read = copy.deepcopy(model).float().train(), _ReadNodes()
    options: dict[str, Any] = {"opt_level": "O0"}
    if shard == "model":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second, of any command

        policy = MixedPrecisionPolicy(param_dtype=dtype if dtype != torch.float32 else None)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for path in [*blocks_of(model, blocks), ""]:
            fully_shard(model.get_submodule(path), mesh=mesh, mp_policy=policy)
    else:
        options |= {"ddp": config or True, "shard": shard}
        if dtype != torch.float32:
            options |= {"opt_level": "O2", "dtype": dtype}
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu")  # memory that nothing touches
    make = OPTIMIZERS[optimizer][1]
    step = train_step(model, objective=lambda model, *batch: loss_of(model(*batch)), optimizer=make(model), inner="eager",
                      max_grad_norm=1.0 if clips else None, sync_bn=sync_bn, passes=[read], **options)
    batch = tree_map(_on_cpu, inputs)
    step.capture(*(batch if isinstance(batch, (tuple, list)) else (batch,)))
    return TracedStep(read.nodes, dist.get_world_size(), shard)


def _on_cpu(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.zeros_like(x, dtype=torch.float32 if x.is_floating_point() else None, device="cpu")


def program(step: TracedStep, profile: Profile, device: Device, network: Network, costs: Costs) -> list[Task]:
    """Return what a rank does in a step, in order.

    Args:
        profile: of one rank without communication; a rank takes of its update the share of the gradients that it has.
        device: on which a node takes how long beside another.
        network, costs: as of `simulate`.
    """
    parts, copies = _parts(step.nodes), _copies(step.nodes)
    alone = {node: device.seconds(*_cost(node)) for node in step.nodes if node not in copies}
    held = sum(value(node).numel() for node in step.nodes if is_collective(node) and BUCKET in node.meta)
    share = held / max(sum(spec.numel for spec in profile.gradients), 1)
    profiled = {"forward": sum(segment.seconds for segment in profile.forward),
                "backward": sum(segment.seconds for segment in profile.backward), "optimizer": share * profile.optimizer_s}
    sums = {part: sum(seconds for node, seconds in alone.items() if parts[node] == part) for part in profiled}
    names, numbers = dict[str, str](), Counter[str]()
    tasks: list[Task] = []
    for node in step.nodes:
        if is_collective(node):
            names[node.name] = _name(node, parts[node], names, numbers)
            kind, num_bytes = node.target._schema.name.partition("::")[2], max(_num_bytes(node), _num_bytes(node.args[0]))
            takes = network.allreduce_seconds if kind == "all_reduce" else network.gather_seconds
            # On a GPU statistics have a communicator of their own beside buckets (compiler/process_groups.py).
            apart = step.shard == "optimizer" and parts[node] != "optimizer" and BUCKET not in node.meta
            tasks.append(Start(names[node.name], takes(num_bytes, step.num_ranks), int(apart), num_bytes, kind))
        elif is_wait(node):
            start = node.args[0]
            tasks.append(Wait(names[start.name]))
            if MAKES_WHOLE in node.meta:
                write = costs.write.seconds(len(start.args[0].args[0]), _num_bytes(node))
                tasks.append(Work(f"write {names[start.name]}", write, "write"))
        elif node.target in _FLATTENS:
            tasks.append(Work(node.name, costs.fill.seconds(len(node.args[0]), _num_bytes(node)), "fill"))
        elif node.target is _OPS.orthogonalize_own.default:
            tasks.append(Work(node.name, _orthogonal_seconds(node, device), "optimizer"))
        elif copies.get(node):
            tasks.append(Work(node.name, device.seconds(*_cost(node)), copies[node]))
        elif alone.get(node):
            tasks.append(Work(node.name, alone[node] * profiled[parts[node]] / sums[parts[node]], parts[node]))
    return tasks


def _parts(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return of which part of the step a node is: "forward", "backward" or "optimizer".

    The loss is made by the forward, sums of gradients by the backward. Another node is of the last part that it reads.
    """
    forward = _makers([nodes[-1].args[0][0]])
    backward = _makers(node for node in nodes if is_collective(node) and BUCKET in node.meta)
    parts: dict[fx.Node, str] = {}
    for node in nodes:
        read = {parts[source] for source in node.all_input_nodes if source.op != "placeholder"}
        if is_wait(node) and BUCKET in node.meta or "optimizer" in read:
            parts[node] = "optimizer"
        elif node in forward or node in backward:
            parts[node] = "forward" if node in forward else "backward"
        else:
            parts[node] = min(read, default="optimizer")  # "backward" is less than "forward"
    return parts


def _makers(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return nodes, and all that they are made of."""
    found, todo = set[fx.Node](), list(nodes)
    while todo:
        if (node := todo.pop()) not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _copies(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return what copies in front of a collective, "fill", and behind one, "write".

    What makes whole parameters of a gather, and puts them in place, is "": the wait has the costs of that, as of one copy.
    """
    copies: dict[fx.Node, str] = {}
    for node in nodes:
        behind = {copies.get(source) for source in node.all_input_nodes if source.op != "placeholder"}
        if is_collective(node) or node.target is _OPS.orthogonalize_own.default:
            copies[node] = "fill"
        elif is_wait(node) or BUCKET in node.meta and "write" in behind:
            copies[node] = "" if MAKES_WHOLE in node.meta else "write"
        elif "" in behind and (MAKES_WHOLE in node.meta or node.target is _ATEN.copy_.default):
            copies[node] = ""
        elif node.target in _FLATTENS or not {BUCKET, MAKES_WHOLE, BUCKET_OF_ROWS}.isdisjoint(node.meta):
            copies[node] = "fill"
    return copies


def _cost(node: fx.Node) -> tuple[int, int, torch.dtype]:
    """Return what `op_cost` says of a node, and nothing of a view."""
    if not isinstance(node.target, OpOverload) or aliases(node) and not node.target._schema.is_mutable:
        return 0, 0, torch.float32
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    return op_cost(node.target, args, kwargs, value(node))


def _num_bytes(node: fx.Node) -> int:
    return sum(x.numel() * x.itemsize for x in tree_leaves(value(node)))


def _orthogonal_seconds(node: fx.Node, device: Device) -> float:
    """Return the seconds of the matrices that this rank, the first, makes orthogonal."""
    _, lengths, widths, *_, num_iterations, num_ranks, _ = node.args
    return sum(orthogonal_seconds(device, shape, num_iterations) for shape in zip(lengths[::num_ranks], widths[::num_ranks]))


def _name(node: fx.Node, part: str, names: Mapping[str, str], numbers: Counter[str]) -> str:
    """Return a name for a collective, one of those that came before it with a number: "gather 3", "gather 3 again"."""
    if first := names.get(node.name.removesuffix("_again")):
        return f"{first} again"
    if BUCKET in node.meta or MAKES_WHOLE in node.meta:
        what = "bucket" if BUCKET in node.meta else "gather"
    else:
        what = "exchange" if part == "optimizer" else "statistics"
    numbers[what] += 1
    return f"{what} {numbers[what] - 1}"
