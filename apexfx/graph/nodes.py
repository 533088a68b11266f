"""The graph vocabulary that passes share: values, new nodes with provenance, refaking, nested bodies.

Every node carries `meta["val"]`, the fake value it produces. Dynamo calls the same thing `example_value`; capture
copies it over, and `set_value` keeps both, because AOTAutograd's cache refuses a `call_method` without the latter.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    enable_python_dispatcher,
    get_decompositions,
    make_fx,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from .marks import MODULE_PATHS, OF_STEP, OUTSIDE_OF_MODEL, RULE

# What a new node inherits from the node that caused it: where it comes from in the user's program.
PROVENANCE_KEYS = ("stack_trace", "nn_module_stack", MODULE_PATHS, OUTSIDE_OF_MODEL, OF_STEP,
                   "source_fn_stack", "seq_nr", "partitioner_tag", RULE)
# What a node has besides that takes the place of another in a backward: whose backward it is.
_BACKWARD_KEYS = ("fwd_nn_module_stack", "autograd_backward")

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)
_TORCH = f'"{os.path.dirname(torch.__file__)}{os.sep}'  # begins the name of a file of torch's, in a stack trace


def value(node: Any) -> Any:
    """Return the fake value of `node`, or `node` itself where it is a constant argument."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node


def set_value(node: fx.Node, val: Any) -> None:
    """Record `val` as what `node` produces."""
    node.meta["val"] = val
    node.meta["example_value"] = val


def size_hint(size: Any) -> int:
    """Return `size`, of a dynamic one what it was when the graph was captured; 0 of one that depends on data."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """Return the fake mode under which the values of `graph` were made, or None when it holds no fake tensor."""
    for node in graph.nodes:
        for leaf in tree_leaves(node.meta.get("val")):
            if isinstance(leaf, FakeTensor):
                return leaf.fake_mode
    return None


def graphs(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield `gm` and the bodies of its higher-order ops (activation checkpoints, ...), outermost first."""
    yield gm
    for node in gm.graph.find_nodes(op="get_attr"):
        body = _attribute(gm, str(node.target))
        if isinstance(body, fx.GraphModule):
            yield from graphs(body)


def _attribute(gm: fx.GraphModule, path: str) -> Any:
    owner: Any = gm
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def inherit(node: fx.Node, like: fx.Node) -> None:
    """Give `node` the provenance of `like`, the node that caused it."""
    for key in PROVENANCE_KEYS:
        if key in like.meta:
            node.meta.setdefault(key, like.meta[key])


def replace(node: fx.Node, target: Callable[..., Any], *, mode: FakeTensorMode | None = None) -> fx.Node:
    """Put a call of `target`, with the arguments of `node`, in its place."""
    with node.graph.inserting_before(node):
        new = call(node.graph, target, node.args, dict(node.kwargs), like=node, mode=mode)
    new.meta.update({key: node.meta[key] for key in _BACKWARD_KEYS if key in node.meta})
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


@contextlib.contextmanager
def _fake_evaluation(mode: FakeTensorMode | None) -> Iterator[None]:
    # A graph may switch gradient mode through a node; what it leaves behind must not leak out.
    grad_enabled = torch.is_grad_enabled()
    sizes = getattr(mode, "shape_env", None)
    # Of a size that depends on data a new symbol is made, which AOTAutograd would look for in what it traces next.
    ignoring = sizes.ignore_fresh_unbacked_symbols() if sizes is not None else contextlib.nullcontext()
    try:
        # As Dynamo evaluates: some ops are composed in C++ of what asks for plain sizes, in Python of what takes symbolic ones.
        with mode or contextlib.nullcontext(), ignoring, enable_python_dispatcher(), torch.no_grad():
            yield
    finally:
        torch.set_grad_enabled(grad_enabled)


def evaluate(node: fx.Node, mode: FakeTensorMode | None) -> Any:
    """Run the op of `node` on the fake values of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    with _fake_evaluation(mode):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)


def call(
    graph: fx.Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    like: fx.Node,
    mode: FakeTensorMode | None = None,
    name: str | None = None,
) -> fx.Node:
    """Insert a `call_function` node at the graph's insertion point, with its value and the provenance of `like`.

    `mode` saves looking for the graph's fake mode when many nodes are inserted; `name` is made unique in the graph.
    """
    node = graph.create_node("call_function", target, args, kwargs or {}, name=name)
    inherit(node, like)
    set_value(node, evaluate(node, mode or fake_mode(graph)))
    return node


def inline(graph: fx.Graph, function: Callable[..., Any], args: tuple[Any, ...], *, like: fx.Node,
           mode: FakeTensorMode | None = None, decompositions: Mapping[Any, Callable[..., Any]] = {}) -> Any:
    """Insert, at the graph's insertion point, the ops that `function` runs on `args`; return what it does, nodes for tensors.

    It may write tensors in place. What has no lowering in Inductor behind AOTAutograd is decomposed, to the same bits.

    Args:
        decompositions: of other ops.
    """
    leaves, tree = tree_flatten(args)
    sources = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]

    def of_tensors(*tensors: Any) -> Any:
        following = iter(tensors)
        return function(*tree_unflatten([next(following) if isinstance(leaf, fx.Node) else leaf for leaf in leaves], tree))

    with _fake_evaluation(mode or fake_mode(graph)):
        traced = make_fx(of_tensors, {**decompositions, **_bitwise_decompositions()})(*map(value, sources))
    if any(node.users for node in traced.graph.find_nodes(op="get_attr")):
        raise ValueError("apexfx: a part of the step makes a tensor of numbers of Python (torch.tensor), which would be a "
                         "constant that this graph does not hold; make it by torch.full(), or keep it in a slot")
    new = dict(zip(traced.graph.find_nodes(op="placeholder"), sources))
    for node in traced.graph.nodes:
        if node.op == "call_function" and (node.users or node.target is not operator.getitem):
            copied = graph.node_copy(node, new.__getitem__)
            _name_options(copied)
            inherit(copied, like)
            set_value(copied, node.meta.get("val"))
            new[node] = copied.args[0] if _returns_its_input(copied) else copied
    return tree_map(lambda leaf: new.get(leaf, leaf), traced.graph.output_node().args[0])


def _returns_its_input(node: fx.Node) -> bool:
    """Return whether an op writes its first argument and returns that: what is written keeps its name."""
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else ()
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


@functools.cache
def _bitwise_decompositions() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    return get_decompositions([aten._to_copy, aten.arange, aten.rsub, aten.stack])


def _name_options(node: fx.Node) -> None:
    """Pass the options of an op of ours that only writes by keyword, where tracing has made them positional.

    Of one that returns something Inductor takes them by position alone.
    """
    if isinstance(node.target, OpOverload) and node.target.namespace == "apexfx" and not node.target._schema.returns:
        arguments = node.target._schema.arguments
        options = [(place, a.name) for place, a in enumerate(arguments[:len(node.args)]) if a.has_default_value()]
        if options:
            node.kwargs = {**{name: node.args[place] for place, name in options if node.args[place] is not None}, **node.kwargs}
            node.args = node.args[:options[0][0]]


def signature(val: Any) -> Any:
    """Return what must agree for two values to be interchangeable: dtype, shape, device of every tensor in them."""
    return tuple(
        (leaf.dtype, tuple(map(str, leaf.shape)), leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf)
        for leaf in tree_leaves(val)
    )


def refake(gm: fx.GraphModule) -> None:
    """Bring the value of every node up to date; those of higher-order ops, and what is in their bodies, stay as they were."""
    mode = fake_mode(gm.graph)
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method") and not isinstance(node.target, HigherOrderOperator):
            set_value(node, evaluate(node, mode))


def refake_copies(gm: fx.GraphModule) -> None:
    """Give a node that shares its value with the one that it was copied from, as in a checkpoint, memory of its own."""
    mode, seen = fake_mode(gm.graph), set()
    for node in gm.graph.nodes:
        if not isinstance(val := value(node), (torch.Tensor, tuple, list)):
            continue
        if node.op == "call_function" and id(val) in seen and not isinstance(node.target, HigherOrderOperator):
            set_value(node, evaluate(node, mode))
        seen.add(id(val))


class Call(NamedTuple):
    """A call outside of a graph, of tensors in the place of nodes."""

    target: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    op: str = "call_function"


def argument(node: fx.Node | Call, name: str) -> Any:
    """Return the argument `name` of a call, however it was passed; else its default, or None where there is none.

    Nothing is known of the parameters of a method, nor of a function written in C that has several signatures.
    """
    if name in node.kwargs:
        return node.kwargs[name]
    parameters = _parameters(node.target) if callable(node.target) else {}
    place, default = parameters.get(name, (len(node.args), None))
    return node.args[place] if place < len(node.args) else default


def _parameters(target: Callable[..., Any]) -> dict[str, tuple[int, Any]]:
    """Return {name: (position, default)} of the parameters of `target`, kept of what is torch's: a program's may hold a model."""
    is_of_torch = (getattr(target, "__module__", None) or "").partition(".")[0] in ("torch", "_operator")
    return (_known_parameters if is_of_torch else _read_parameters)(target)


def _read_parameters(target: Callable[..., Any]) -> dict[str, tuple[int, Any]]:
    if (op := op_of(target)) is not None:
        return {a.name: (place, a.default_value) for place, a in enumerate(op._schema.arguments)}
    try:
        parameters = inspect.signature(target).parameters.values()
    except (ValueError, TypeError):
        return {}
    return {p.name: (place, None if p.default is p.empty else p.default) for place, p in enumerate(parameters)}


_known_parameters = functools.cache(_read_parameters)


def op_of(target: Callable[..., Any]) -> OpOverload | None:
    """Return the op that `target` is, or that a function of torch's written in C calls, where that has no two overloads."""
    return target if isinstance(target, OpOverload) else _only_op(target) if inspect.isbuiltin(target) else None


@functools.cache
def _only_op(builtin: Callable[..., Any]) -> OpOverload | None:
    packet = getattr(torch.ops.aten, builtin.__name__, None)
    names = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    overloads = [name for name in names if not name.endswith("out")]
    return getattr(packet, overloads[0]) if len(overloads) == 1 else None


def insert_after(node: fx.Node) -> Any:
    """Return the context that inserts after `node`, but never among the placeholders."""
    anchor = node
    while anchor.next.op == "placeholder":
        anchor = anchor.next
    return anchor.graph.inserting_after(anchor)


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the module in which `node` was traced, or "" at the root."""
    return module_paths(node)[0]


def module_paths(node: fx.Node) -> tuple[str, ...]:
    """Return every path of the module in which `node` was traced: in a captured graph several where it is registered twice."""
    stack = node.meta.get("nn_module_stack")
    return node.meta.get(MODULE_PATHS) or ((next(reversed(stack.values()))[0],) if stack else ("",))


def source_line(node: fx.Node) -> str:
    """Return "file.py:12" for the user's line that made `node`, or "" when unknown."""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    for line in reversed(trace):
        if line.lstrip().startswith("File ") and _TORCH not in line:
            path, _, rest = line.partition('"')[2].partition('", line ')
            return f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
    return ""


def stack_frames(trace: str) -> list[tuple[str, int, str]]:
    """Return (file, number of the line, function) of the frames that a text has, such as the stack trace of a node."""
    return [(file, int(number), function) for file, number, function in _FRAME.findall(trace)]


def op_name(node: fx.Node) -> str:
    """Return a short printable name of what `node` calls: "aten.mm.default", "F.relu", "operator.add", "view"."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, HigherOrderOperator):
        return f"hop.{target.name()}"
    name = getattr(target, "__name__", str(target))
    module = getattr(target, "__module__", None) or ""
    if module in ("operator", "_operator"):
        return f"operator.{name}"
    return f"F.{name}" if module == "torch.nn.functional" else f"torch.{name}"


def count_ops(gm: fx.GraphModule) -> Counter[str]:
    """Return how often each op occurs in `gm` and its nested bodies."""
    return Counter(
        op_name(node) for graph in graphs(gm) for node in graph.graph.nodes if node.op in ("call_function", "call_method")
    )


# Of a backward graph and a training step.
CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)


def before_upcast(node: fx.Node) -> fx.Node:
    """Return the node that `node` merely widens, or `node`."""
    while node.op == "call_function" and node.target in CASTS:
        narrow, wide = value(node.args[0]), value(node)
        both_float = narrow.dtype.is_floating_point and wide.dtype.is_floating_point
        if not both_float or narrow.dtype.itemsize >= wide.dtype.itemsize or narrow.device != wide.device:
            break
        node = node.args[0]
    return node
