"""Proves the code that Inductor makes of a graph: at the first call it is compared with the graph, op by op, on copies.

It runs before the call does anything: nothing has to be put back, no rank waits for another, and what does not hold never runs.
A graph whose code is wrong runs op by op from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._torch import boxed, cache_entry
from .._torch_compilers import code_without_cuda_graphs
from ..config import HALVES
from ..graph.collectives import group_name
from ..graph.inputs import gradient_outputs
from ..graph.liveness import Liveness
from ..graph.mutation import storages, written_storages
from ..graph.nodes import NAME, value
from ..graph.printing import count_text, first_names
from ..host_memory import free_bytes
from ..observe.beside_float64 import BesideFloat64, CallsOfCode, Handed, OpByOp
from ..observe.bundle import exact_copy
from ..observe.code_errors import Compared, Errors, is_suspect, scales
from ..random_state import forked_random
from ..report.data import Report
from ..report.proof import Proof, TensorProof
from ..report.records import GraphReport
from . import cache
from .first_difference import first_difference
from .verification import snapshot

_PROBES = 4  # runs on inputs that are a rounding away, for what may turn on one
_COPIES = 3  # times the graph's peak: of the code or the ops, and of float64, which takes two
_BEFORE = "its code was proved when it was made, and comes from the compile cache"
_IN_CPP = "its code was not compared with it, as it communicates from C++ (cpp_wrapper=True)"
_REPORT = "Please report it, with the program; inner='eager' is as fast then, and compiles nothing"

Key = tuple[str, int]  # "output", "change" or "handed", and the place among them


class Prover:
    """Proves what is compiled for one captured graph.

    Args:
        report: gets notes and warnings, and
        record: of the graph, what came out.
        insists: whether memory that may not do is no reason to leave it out (`verify="code"`).
        in_cpp: whether C++ calls the kernels, and collectives, which nothing answers on one rank there.

    Attributes:
        starts: called once in front of the first run of code that was to be proved, when the proof is done.
        waiting: whether a first call is still to come.
    """

    def __init__(self, report: Report, record: GraphReport, *, insists: bool, in_cpp: bool) -> None:
        self._report, self._record, self._insists, self._in_cpp = report, record, insists, in_cpp
        self.starts: Callable[[], None] = lambda: None
        self.waiting = False

    def needs_proof(self, compiled: Any) -> bool:
        """Return whether no cache knows that some code was proved."""
        entry = cache_entry(compiled)
        return entry is None or not cache.is_proved(entry)

    def note_proved(self, stage: str) -> None:
        """Note that the code of a stage was proved before."""
        self._record.proofs.append(Proof(stage, note=_BEFORE))

    def at_first_call(self, compiled: Any, gm: fx.GraphModule, stage: str) -> None:
        """Have the first call of some code prove it.

        Args:
            compiled: Inductor's; what it calls is exchanged.
            gm: the graph as all passes have left it.
            stage: "step", "forward" or "backward".
        """
        self.waiting = True
        compiled.current_callable = FirstCall(self, compiled, gm, stage)

    def prove(self, call: FirstCall, inputs: list[Any]) -> Callable[..., Any]:
        """Compare code with its graph, on copies of the inputs of its first call; return what is to run, from that call on."""
        if self._in_cpp and any(map(group_name, call.graph.graph.nodes)):
            outcome = _Outcome(Proof(call.stage, note=_IN_CPP))
        else:
            outcome = _Proving(call.graph, call.code, call.stage, call.gradients, inputs).run(insists=self._insists)
        self._keep(outcome.proof, call.entry)
        self.waiting = False
        self.starts()
        return _op_by_op(call.graph, outcome.outputs) if outcome.proof.fault else call.recorded

    def _keep(self, proof: Proof, entry: str | None) -> None:
        self._record.proofs.append(proof)
        if proof.fault:
            self._report.warn(f"apexfx: the code that Inductor made of graph {self._record.index} ({proof.stage}) is wrong: "
                              f"{proof.fault}. The graph runs op by op from here on, this call included, which is right and "
                              f"slower. {_REPORT}")
        elif proof.note:
            self._report.note(f"apexfx: graph {self._record.index} ({proof.stage}): {proof.note}")
        elif entry is not None:
            cache.save_proved(entry)


class FirstCall:
    """What stands in the place of compiled code until it is called: that proves it, and puts what runs from then on there."""

    def __init__(self, prover: Prover, compiled: Any, gm: fx.GraphModule, stage: str) -> None:
        self._prover, self._compiled, self.stage = prover, compiled, stage
        self.code, self.entry = code_without_cuda_graphs(compiled), cache_entry(compiled)
        self.recorded = compiled.current_callable
        self.graph, self.gradients = as_ops(gm), gradient_outputs(gm)

    def __call__(self, args: list[Any]) -> Any:
        compiled = self._compiled
        compiled.current_callable = self._prover.prove(self, list(args))
        return compiled.current_callable(args)


def as_ops(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph, for running it op by op."""
    graph = snapshot(gm)
    for node in graph.graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default  # of what a kernel has laid out otherwise than its fake one
    graph.recompile()
    return graph


def _op_by_op(gm: fx.GraphModule, outputs: Sequence[Any]) -> Callable[..., Any]:
    """Return what runs a graph op by op over all ranks, and lays out what it returns as its code did, as a backward expects."""
    orders = [sorted(range(x.dim()), key=lambda dim, x=x: -x.stride(dim)) if isinstance(x, Tensor) and x.layout == torch.strided
              else None for x in outputs]

    def call(args: list[Any]) -> Any:
        taken = list(args)
        args.clear()
        with torch.no_grad():
            return [_laid_out(x, order) if order is not None and isinstance(x, Tensor) else x
                    for x, order in zip(OpByOp(gm).run(*taken), orders, strict=True)]

    return boxed(call)


def _laid_out(x: Tensor, order: Sequence[int]) -> Tensor:
    """Return a tensor whose dimensions lie in memory in an order, those that step farthest first."""
    strides = [x.stride(dim) for dim in order if x.size(dim) != 1]
    if strides == sorted(strides, reverse=True):
        return x
    back = sorted(range(x.dim()), key=lambda dim: order[dim])
    return x.permute(*order).contiguous().permute(*back)


class _Outcome(NamedTuple):
    """What came of a comparison, and what the code has returned in it."""

    proof: Proof
    outputs: Sequence[Any] = ()


class _Value(NamedTuple):
    """A tensor by the ops and in float64; what was there of one that is written; by the code, where that has handed it over."""

    ops: Tensor
    wide: Tensor
    before: Tensor | None = None
    code: Tensor | None = None


class _Proving:
    """One comparison of code with its graph.

    Args:
        gm: the graph.
        code: made of it.
        stage: "step", "forward" or "backward".
        gradients: places of outputs that are gradients -> whose.
        inputs: of the call, which stay as they are.
    """

    def __init__(self, gm: fx.GraphModule, code: Callable[..., Any], stage: str, gradients: Mapping[int, str],
                 inputs: Sequence[Any]) -> None:
        self._gm, self._code, self._stage, self._gradients, self._inputs = gm, code, stage, gradients, inputs
        self._nodes = gm.graph.find_nodes(op="placeholder")
        memory = written_storages(gm)
        # A backward's code may take over the memory of what it alone reads.
        self._kept = [place for place, (node, x) in enumerate(zip(self._nodes, inputs)) if isinstance(x, Tensor)
                      and (stage != "backward" or storages(value(node)) & memory)]
        dtypes = {leaf.dtype for node in gm.graph.nodes if isinstance(leaf := value(node), Tensor) and leaf.is_floating_point()}
        self._narrowest = next((each for each in (*HALVES[::-1], torch.float32) if each in dtypes), torch.float64)
        self._devices = {x.device for x in inputs if isinstance(x, Tensor) and x.is_cuda}
        self._handed: Mapping[Any, Sequence[list[Any]]] = {}
        self._names: dict[Key, str] = {}

    def run(self, *, insists: bool) -> _Outcome:
        """Return what comes of the comparison, on copies of the inputs.

        Args:
            insists: whatever memory there is.

        Raises:
            What the code raises on such inputs.
        """
        begun = time.perf_counter()
        if lacking := "" if insists else _lacking_memory(self._gm, self._devices):
            return _Outcome(Proof(self._stage, note=lacking))
        with torch.no_grad():
            try:
                outputs, by_code = self._run_code()
            except NotImplementedError as error:  # a collective that no rank can answer alone
                return _Outcome(Proof(self._stage, note=_unproved(error)))
            try:
                compared = self._compared(by_code)
                sizes = dict(zip(compared, scales(list(compared.values()), self._narrowest)))
                wrong = self._beyond_rounding(compared, sizes)
            except Exception as error:  # of any class: an op has no eager form, or none for this
                return _Outcome(Proof(self._stage, note=_unproved(error)))
            rows = tuple(_row(each, is_wrong=key in wrong) for key, each in compared.items())
            fault = self._described([compared[key] for key in wrong]) if wrong else ""
        return _Outcome(Proof(self._stage, rows, time.perf_counter() - begun, fault=fault), outputs)

    def _run_code(self) -> tuple[Sequence[Any], dict[Key, Tensor]]:
        """Run the code; return its outputs, and what of it is compared."""
        copies = list(map(_copy, self._inputs))
        with forked_random(self._devices), (calls := CallsOfCode()):
            outputs = self._code(list(copies))
        self._handed = calls.handed
        found: dict[Key, Tensor] = {("output", place): x for place, x in enumerate(outputs) if isinstance(x, Tensor)}
        found |= {("change", place): copies[place] for place in self._kept}
        return outputs, found

    def _run_ops(self, inputs: Sequence[Any], observe: Callable[..., None] | None = None) -> dict[Key, _Value]:
        """Run the graph op by op on copies of inputs, with the random numbers that the code drew."""
        copies = list(map(_copy, inputs))
        beside = BesideFloat64(self._gm, self._handed, observe)
        with forked_random(self._devices):
            outputs = beside.run(*copies)
        found: dict[Key, _Value] = {("output", place): _Value(x, wide) for place, (x, wide) in enumerate(
            zip(outputs, beside.wide_outputs)) if isinstance(x, Tensor)}
        found |= {("change", place): _Value(copies[place], beside.wide_inputs[place], inputs[place]) for place in self._kept}
        for place, pair in enumerate(beside.pairs):
            found["handed", place] = _Value(pair.ops, pair.wide, code=pair.code)
            self._names["handed", place] = _name_of_handed(pair)
        return found

    def _compared(self, by_code: Mapping[Key, Tensor]) -> dict[Key, Compared]:
        compared = {}
        for key, each in self._run_ops(self._inputs).items():
            code = each.code if each.code is not None else by_code[key]
            if each.before is None or not (_same(code, each.before) and _same(each.ops, each.before)):
                kind = "gradient" if key[0] == "output" and key[1] in self._gradients else key[0]
                compared[key] = Compared(self._named(key), kind, code, *each[:3])
        return compared

    def _named(self, key: Key) -> str:
        what, place = key
        if what == "output":
            return f"gradient of {self._gradients[place]!r}" if place in self._gradients else f"output {place}"
        if what == "change":
            return f"change of {self._nodes[place].meta.get(NAME, self._nodes[place].name)!r}"
        return self._names[key]

    def _beyond_rounding(self, compared: Mapping[Key, Compared], sizes: Mapping[Key, Errors]) -> list[Key]:
        """Return what the code has too far off, and the ops never, on inputs that are a rounding away either.

        That leaves out what turns on a rounding: an element of an update by a gradient that is 0 by its formula, a mask where two
        values are equal.
        """
        suspects = [key for key, each in compared.items() if is_suspect(each, each.of_ops, sizes[key], self._narrowest)]
        errors, generator = {key: compared[key].of_ops for key in suspects}, torch.Generator().manual_seed(0)
        for _ in range(_PROBES):
            if not suspects:
                break
            probe = self._run_ops([_moved(x, generator) for x in self._inputs])
            for key in suspects:
                errors[key] = errors[key].or_larger(compared[key].errors(probe[key].ops, probe[key].before))
            suspects = [key for key in suspects if is_suspect(compared[key], errors[key], sizes[key], self._narrowest)]
        return suspects

    def _described(self, wrong: Sequence[Compared]) -> str:
        """Return what a warning says of tensors that the code has wrong."""
        worst = max(wrong, key=lambda each: each.of_code.norm / (each.size.norm or 1.0))
        of_code, of_ops = (errors.norm / (worst.size.norm or 1.0) for errors in (worst.of_code, worst.of_ops))
        others = f", and {count_text(len(wrong) - 1, 'other tensor')}" if wrong[1:] else ""
        text = (f"{worst.name} is {of_code:.1e} of its size away from float64, and the same ops one by one are {of_ops:.1e}"
                f"{others} ({first_names([each.name for each in wrong])})")
        where = first_difference(self._code, list(map(_copy, self._inputs)), self._run_ops_for, self._devices)
        return f"{text}; {where}" if where else text

    def _run_ops_for(self, observe: Callable[..., None]) -> None:
        self._run_ops(self._inputs, observe)


def _row(each: Compared, *, is_wrong: bool) -> TensorProof:
    norm, largest = (size or 1.0 for size in each.size)
    return TensorProof(each.name, each.of_code.norm / norm, each.of_ops.norm / norm, each.of_code.largest / largest,
                       each.of_ops.largest / largest, is_wrong)


def _name_of_handed(pair: Handed) -> str:
    """Return what a tensor is that the code hands to an op: "gradient of '0.weight'" where that updates by it."""
    node, place = pair.node, pair.place
    named = [*zip((argument.name for argument in node.target._schema.arguments), node.args), *node.kwargs.items()]
    for argument, given in named:
        leaves = given if isinstance(given, (list, tuple)) else [given]
        if place < len(leaves):
            params = node.args[0]
            if argument == "grads" and isinstance(params, (list, tuple)) and len(params) == len(leaves):
                return f"gradient of {params[place].meta.get(NAME, params[place].name)!r}"
            return f"{argument} of {node.name}" + (f", {place}" if leaves[1:] else "")
        place -= len(leaves)
    return f"an argument of {node.name}"


def _copy(x: Any) -> Any:
    return exact_copy(x) if isinstance(x, Tensor) else x


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, nan as one number."""
    if one.is_floating_point() or one.is_complex():
        return bool(((one == other) | one.isnan() & other.isnan()).all())
    return torch.equal(one, other)


def _moved(x: Any, generator: torch.Generator) -> Any:
    """Return an input whose floating elements are a rounding away."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype.itemsize < 2:
        return x
    noise = torch.rand(x.shape, generator=generator).to(x.device, torch.float64) * 2 - 1
    moved = _copy(x)
    return moved.copy_(x.double() * (1 + 2 * torch.finfo(x.dtype).eps * noise)) if _owns_memory(moved) else moved


def _owns_memory(x: Tensor) -> bool:
    return all(stride or size <= 1 for size, stride in zip(x.shape, x.stride()))


def _unproved(error: Exception) -> str:
    return (f"its code was not compared with it, since it cannot run op by op ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]})")


def _lacking_memory(gm: fx.GraphModule, devices: Any) -> str:
    needed, free = _COPIES * max(Liveness(gm).alive(), default=0), free_bytes(next(iter(devices), None))
    if free is None or needed <= free:
        return ""
    return (f"its code was not compared with it, which takes {needed} bytes where {free} are free; verify='code' does it all the "
            "same, verify='off' leaves it out without a word")
