"""A graph of ops as JSON-able data, and back: nothing in it is executed but registered ops of torch and of this package."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import OpOverload
from ..graph.marks import KIND, NAME
from ..graph.nodes import module_path, op_name, source_line

NAMESPACES = frozenset(("aten", "prims", "apexfx", "_c10d_functional", "mkldnn", "quantized"))
_FILES = frozenset(("aten::from_file", "aten::save"))  # reads and writes a file that it is given the name of
_CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_META = ("seq_nr", NAME, KIND, "custom")


def to_data(gm: fx.GraphModule) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a graph as data, and the tensors that it holds itself, by name.

    Raises:
        ValueError: it has something that is no registered op of torch or of this package, and no plain argument of one.
    """
    traces: dict[str, int] = {}
    constants: dict[str, Tensor] = {}
    nodes = []
    for node in gm.graph.nodes:
        row: dict[str, Any] = {"name": node.name, "op": node.op, "target": _target(node)}
        if node.op == "get_attr":
            held = getattr(gm, str(node.target), None)
            if not isinstance(held, Tensor):
                raise ValueError(f"apexfx: {node.name!r} is a {type(held).__name__}, the body of a higher-order op, which a "
                                 "bundle cannot hold")
            constants[str(node.target)] = held.detach()
        if node.op in ("call_function", "output"):
            row |= {"args": _encode(node.args, node), "kwargs": {name: _encode(x, node) for name, x in node.kwargs.items()}}
        row |= {key: node.meta[key] for key in _META if key in node.meta}
        if node.stack_trace:
            row["trace"] = traces.setdefault(node.stack_trace, len(traces))
        if module := module_path(node):
            row["module"] = module
        nodes.append(row)
    return {"nodes": nodes, "traces": list(traces)}, constants


def from_data(data: Mapping[str, Any], constants: Mapping[str, Tensor]) -> tuple[nn.Module, fx.Graph]:
    """Return the graph of `to_data`, and a module that holds its tensors.

    They are no `GraphModule`, which would make Python code of the names and texts in it and run that.

    Raises:
        ValueError: it names something that is no op of torch or of this package, or is no such data.
    """
    graph, nodes = fx.Graph(), {}
    for row in data["nodes"]:
        op, target = row["op"], row["target"]
        args, kwargs = (row["args"], row["kwargs"]) if op in ("call_function", "output") else ({"tuple": []}, {})
        args, kwargs = _decode(args, nodes), {name: _decode(x, nodes) for name, x in kwargs.items()}
        names = [row["name"], *kwargs, *([target] if op != "call_function" else [])]
        if op not in ("placeholder", "get_attr", "call_function", "output") \
                or op == "get_attr" and target not in constants or not all(str(name).isidentifier() for name in names) \
                or not isinstance(row.get("custom") or {}, dict):
            raise ValueError(f"apexfx: the bundle has a node {op!r} of {target!r}, which no graph of a step has")
        target = _resolve(target) if op == "call_function" else str(target)
        node = nodes[row["name"]] = graph.create_node(op, target, args, kwargs, name=row["name"])
        node.meta |= {key: row[key] for key in _META if key in row}
        if "trace" in row:
            node.meta["stack_trace"] = data["traces"][row["trace"]]
        if "module" in row:
            node.meta["nn_module_stack"] = {"": (row["module"], "")}
    module = nn.Module()
    for name, tensor in constants.items():
        module.register_buffer(name, tensor)
    return module, graph


def _target(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    if node.target is operator.getitem:
        return "getitem"
    if not isinstance(node.target, OpOverload) or not _is_allowed(name := node.target.name()):
        where = f" at {line}" if (line := source_line(node)) else ""
        raise ValueError(f"apexfx: this step cannot be recorded because of {op_name(node)}{where}: a bundle holds registered ops "
                         "of torch and of apexfx alone")
    return name if "." in name else f"{name}.default"


def _resolve(target: str) -> Any:
    if target == "getitem":
        return operator.getitem
    namespace, _, name = target.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if _is_allowed(target) and name.isidentifier() else None
    op = getattr(packet, overload, None) if overload.isidentifier() else None
    if not isinstance(op, OpOverload):
        raise ValueError(f"apexfx: the bundle calls {target!r}, which is no op of torch or of apexfx here; nothing has run")
    return op


def _is_allowed(name: str) -> bool:
    return name.partition("::")[0] in NAMESPACES and name.partition(".")[0] not in _FILES


def _encode(x: Any, node: fx.Node) -> Any:
    if isinstance(x, fx.Node):
        return {"node": x.name}
    if isinstance(x, float) and not math.isfinite(x):
        return {"float": str(x)}
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, tuple):
        return {"tuple": [_encode(each, node) for each in x]}
    if isinstance(x, list):
        return [_encode(each, node) for each in x]
    if isinstance(x, slice):
        return {"slice": [_encode(each, node) for each in (x.start, x.stop, x.step)]}
    if isinstance(x, complex):
        return {"complex": [str(x.real), str(x.imag)]}
    if isinstance(x, torch.device):
        return {"device": str(x)}
    for kind, cls in _CONSTANTS.items():
        if isinstance(x, cls):
            return {kind: str(x).removeprefix("torch.")}
    raise ValueError(f"apexfx: {node.name!r} is called with a {type(x).__name__}, which a bundle cannot hold")


def _decode(x: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(x, list):
        return [_decode(each, nodes) for each in x]
    if not isinstance(x, dict):
        return x
    (kind, held), = x.items()
    if kind == "node":
        return nodes[held]
    if kind in ("tuple", "slice"):
        return {"tuple": tuple, "slice": lambda three: slice(*three)}[kind]([_decode(each, nodes) for each in held])
    if kind == "float":
        return float(held)
    if kind == "complex":
        return complex(*map(float, held))
    if kind == "device":
        return torch.device(held)
    constant = getattr(torch, held, None) if kind in _CONSTANTS else None
    if constant is None or not isinstance(constant, _CONSTANTS[kind]):
        raise ValueError(f"apexfx: the bundle has an argument {x!r}, which is none that a graph has")
    return constant
