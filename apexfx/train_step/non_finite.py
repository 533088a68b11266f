"""Where a step that was skipped first computed what is not finite: its graph runs once more, or in eager its forward."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import OpOverload, TorchDispatchMode, tree_leaves
from ..compiler.inner_compilers import Traced
from ..observe.bundle import exact_copy
from ..observe.interpreter import Interpreter
from ..observe.non_finite import Finding, NonFinite, kinds_of
from .graphs import StepGraphs
from .last_call import LastCall
from .loss_scale import SCALE
from .objective import copy_objective

log = logging.getLogger(__name__)


def search(graphs: StepGraphs, call: LastCall, *, scale_factor: float) -> Finding | None:
    """Run the graph of a call once more, op by op, on copies of its inputs, and return where what is not finite begins.

    Every rank does so alone, with its own values in the place of what the others would send.

    Args:
        scale_factor: what the loss scale was then, divided by what it is now.

    Returns:
        None where all is finite.

    Raises:
        Exception: there is no such graph, or it cannot be run so.
    """
    traced, inputs = graph_of(graphs, call, scale_factor=scale_factor)
    observer = NonFinite(traced.gm.graph)
    with call.random_state(), torch.no_grad():
        Interpreter(traced.gm, [observer]).run(*inputs)
    return observer.first()


def graph_of(graphs: StepGraphs, call: LastCall, *, scale_factor: float) -> tuple[Traced, list[Any]]:
    """Return the graph of a call, and copies of its inputs as they were; arguments and errors as of `search`."""
    traced = graphs.trace(call.batch, call.named)
    inputs = [exact_copy(x) if isinstance(x, Tensor) else x for x in traced.inputs]
    for node, copied in zip(traced.gm.graph.find_nodes(op="placeholder"), inputs):
        if (node.meta.get("apexfx_kind"), node.meta.get("apexfx_name")) == ("state", SCALE):
            copied.mul_(scale_factor)
    return traced, inputs


def explain(graphs: StepGraphs, call: LastCall, model: nn.Module, objective: Callable[..., Any], *, scale_factor: float,
            gathers: bool) -> str:
    """Say in a sentence where a call that was skipped first computed something that is not finite.

    Args:
        graphs, call, scale_factor: as of `search`.
        model, objective: the step's.
        gathers: whether earlier calls have gathered gradients for this one.
    """
    if call.batch_has_changed():
        return "the batch was written since, and nobody looked for the op"
    try:
        finding = search(graphs, call, scale_factor=scale_factor)
    except Exception as error:  # whatever the model does in another run, memory included: training goes on
        log.debug("apexfx: the graph of a step that is not finite could not be run op by op", exc_info=error)
        return first_non_finite(model, objective, call.batch, call.named)
    if finding is not None:
        return str(finding)
    if gathers:
        return "the last batch is finite; it was that of a call before, which gathered its gradients"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "all is finite on this rank; it was the batch of another, which says more"
    return "all is finite op by op: it was a kernel that fuses several, or the model has changed since"


class _FirstNonFinite(TorchDispatchMode):
    """Keeps the name of the first op that makes a NaN or an infinity that is in none of its arguments.

    Minus infinity by itself is no sign of an overflow, since masks are made of it: an op that makes one is kept aside, until
    another makes a NaN or plus infinity of it. What `empty` returns is no result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.op = self.of_minus_infinity = ""

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.op and "empty" not in str(func) and (kinds := kinds_of(result)):
            read = kinds_of((args, kwargs))
            constants = {str(x) for x in tree_leaves((args, kwargs)) if isinstance(x, float) and math.isinf(x)}
            new = kinds.keys() - read.keys() - constants
            if new - {"-inf"}:
                self.op = self.of_minus_infinity if self.of_minus_infinity and "-inf" in read else str(func)
            elif new:
                self.of_minus_infinity = self.of_minus_infinity or str(func)
        return result


def _is_finite(values: Any, *, masks: bool = False) -> bool:
    """Return whether all tensors are finite; with `masks`, minus infinity is as good as a number."""
    floats = [x.detach() for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]
    return not any(bool((x.isnan() | (x == math.inf) if masks else ~x.isfinite()).any()) for x in floats)


def first_non_finite(model: nn.Module, objective: Callable[..., Any], batch: tuple[Any, ...],
                     named: Mapping[str, Any]) -> str:
    """Say in a sentence which op of the forward first gives something that is not finite, computing as eager does.

    It runs copies of model, objective (as of `copy_objective`) and batch, and leaves the state of the random number generators as
    it was. Where there are several ranks nothing is computed: a forward that communicates, as synchronized batch norm does, would
    wait for the others.
    """
    if not _is_finite((batch, named), masks=True):
        return "The batch itself is not finite"
    if names := [name for name, p in model.named_parameters() if not _is_finite(p)]:
        return f"Parameter {names[0]!r} is not finite"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "The batch and the parameters of this rank are finite; run the batch in one process to find the op"
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            memo: dict[int, Any] = {}  # of copies, since any of them may be written
            model, batch, named = copy.deepcopy((model, batch, named), memo)
            objective = copy_objective(objective, memo)
            with _FirstNonFinite() as mode:
                result = objective(model, *batch, **named)
        except Exception as error:  # whatever the model does: this is the text of a warning, and training goes on
            first_line = str(error).partition("\n")[0]
            return f"The forward cannot be run in eager to find the op ({type(error).__name__}: {first_line})"
    if mode.op:
        return f"In eager {mode.op} is the first op of the forward whose result is not finite"
    if not _is_finite(result):
        of = f", and {mode.of_minus_infinity} is the first op that gives one" if mode.of_minus_infinity else ""
        return f"In eager the loss is minus infinity{of}"
    return "The forward is finite in eager: what overflows is the half type, or the backward"
