"""Proves the code that Inductor makes of a graph: at the first call it is compared with the graph, op by op, on copies.

It runs before the call does anything: nothing has to be put back, no rank waits for another, and what does not hold never runs.
A graph whose code is wrong runs op by op from then on.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .._torch import boxed, cache_entry
from .._torch_compilers import plain_code
from ..config import HALVES
from ..graph.collectives import group_name, starts_collective
from ..graph.inputs import gradient_outputs
from ..graph.liveness import Liveness
from ..graph.marks import KIND, NAME, TRACED_UPDATE
from ..graph.mutation import storages, written, written_storages
from ..graph.nodes import value
from ..graph.printing import count_text, first_names
from ..host_memory import free_bytes, give_back_memory
from ..observe.beside_float64 import BesideFloat64, CallsOfCode, Handed, OpByOp
from ..observe.bundle import exact_copy
from ..observe.code_errors import Compared, Errors, is_near_ops, is_suspect, scales
from ..random_state import forked_random
from ..report.data import Report
from ..report.proof import Proof, TensorProof
from ..report.records import GraphReport
from . import cache
from .first_difference import first_difference
from .inner_compilers import copy_where_no_view_is
from .run_start import RunStart

_PROBES = 16  # runs on inputs that are a rounding away, for what may turn on one
_BEFORE = "its code was proved when it was made, and comes from the compile cache"
_IN_CPP = "its code was not compared with it, as it communicates from C++ (cpp_wrapper=True)"
_CUDA_GRAPHS = "its code was not compared with it, as CUDA graphs record it"
_REPORT = "Please report it, with the program; inner='eager' is as fast then, and compiles nothing"

_GRADIENT = 3  # times how far off the ops have a gradient: so far it is moved for what turns on that

Key = tuple[str, Any]  # "output", "change", "memory" (of an output) or "handed", and the place among them; of a node there, too


class Prover:
    """Proves what is compiled for one captured graph.

    Args:
        report: gets notes and warnings, and
        record: of the graph, what came out.
        insists: whether memory that may not do is no reason to leave it out (`verify="code"`).
        in_cpp: whether C++ calls the kernels, and collectives, which nothing answers on one rank there.
        start: tells the step where a run begins, which the first does behind its proof.
    """

    def __init__(self, report: Report, record: GraphReport, *, insists: bool, in_cpp: bool, start: RunStart) -> None:
        self._report, self._record, self._insists, self._in_cpp, self._start = report, record, insists, in_cpp, start

    def knows(self, compiled: Any, stage: str) -> bool:
        """Return whether a cache has the verdict on some code, and note that."""
        entry = cache_entry(compiled)
        verdict = cache.load_verdict(entry, compiled.source_code) if entry is not None else None
        if verdict is not None and (proof := Proof(stage, note=verdict)) not in self._record.proofs:
            self._record.proofs.append(proof)
        return verdict is not None

    def at_first_call(self, compiled: Any, gm: fx.GraphModule, stage: str) -> None:
        """Have the first call of some code prove it.

        Args:
            compiled: Inductor's; what it calls is exchanged.
            gm: the graph as all passes have left it; it is changed.
            stage: "step", "forward" or "backward".
        """
        self._start.awaits_proof = True
        compiled.current_callable = FirstCall(self, compiled, gm, stage)

    def prove(self, call: FirstCall, inputs: list[Any]) -> Callable[..., Any]:
        """Compare code with its graph, on copies of the inputs of its first call; return what is to run, from that call on."""
        if call.code is None:
            outcome = _Outcome(Proof(call.stage, note=_CUDA_GRAPHS))
        elif self._in_cpp and any(map(group_name, call.graph.graph.nodes)):
            outcome = _Outcome(Proof(call.stage, note=_IN_CPP))
        else:
            outcome = _Proving(call.graph, call.code, call.stage, call.gradients, inputs).run(insists=self._insists)
        self._keep(outcome, call)
        give_back_memory()
        self._start.tell_after_proof()
        return _op_by_op(call.graph, outcome.outputs) if outcome.proof.fault else call.recorded

    def _keep(self, outcome: _Outcome, call: FirstCall) -> None:
        proof = outcome.proof
        self._record.proofs.append(proof)
        if proof.fault:
            self._report.warn(f"apexfx: the code that Inductor made of graph {self._record.index} ({proof.stage}) is wrong: "
                              f"{proof.fault}. The graph runs op by op from here on, this call included, which is right and "
                              f"slower. {_REPORT}")
        elif proof.note:
            self._report.note(f"apexfx: graph {self._record.index} ({proof.stage}): {proof.note}")
        if call.entry is not None and not proof.fault and not outcome.is_of_this_process:
            cache.save_verdict(call.entry, call.source, proof.note or _BEFORE)


class FirstCall:
    """What stands in the place of compiled code until it is called: that proves it, and puts what runs from then on there."""

    def __init__(self, prover: Prover, compiled: Any, gm: fx.GraphModule, stage: str) -> None:
        self._prover, self._compiled, self.stage = prover, compiled, stage
        self.code, self.entry, self.source = plain_code(compiled), cache_entry(compiled), compiled.source_code
        self.recorded = compiled.current_callable
        self.graph, self.gradients = gm, gradient_outputs(gm)
        copy_where_no_view_is(gm)

    def __call__(self, args: list[Any]) -> Any:
        compiled = self._compiled
        compiled.current_callable = self._prover.prove(self, list(args))
        return compiled.current_callable(args)


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
    """What came of a comparison, what the code has returned in it, and whether another process might come to another end."""

    proof: Proof
    outputs: Sequence[Any] = ()
    is_of_this_process: bool = False


class _Value(NamedTuple):
    """A tensor by the ops, and in float64; its value before a write; and by the code, where that has handed it over."""

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
        self._order = {node: place for place, node in enumerate(gm.graph.nodes)}
        self._updated: set[int] = set()  # inputs that ops write which were handed the code's own gradients
        self._gradients_read: dict[fx.Node, float] = {}  # by traced updates, and their largest element
        self._names: dict[Key, tuple[str, str]] = {}  # of what is handed over: what it is, and its role

    def run(self, *, insists: bool) -> _Outcome:
        """Return what comes of the comparison, on copies of the inputs.

        Args:
            insists: whatever memory there is.

        Raises:
            What the code raises on such inputs.
        """
        begun = time.perf_counter()
        if lacking := "" if insists else self._lacking_memory():
            return _Outcome(Proof(self._stage, note=lacking), is_of_this_process=True)
        with torch.no_grad():
            try:
                BesideFloat64(self._gm)  # which refuses what communicates in a way that no rank can answer alone
                outputs, by_code = self._run_code()
            except (NotImplementedError, ValueError, torch.OutOfMemoryError) as error:
                return _unproved(self._stage, error)
            try:
                rows, fault = self._beside_ops(by_code), ""
                if rows is None:
                    rows, fault = self._beside_float64(by_code)
            except Exception as error:  # of any class: an op has no eager form, or none for this
                return _unproved(self._stage, error)
        return _Outcome(Proof(self._stage, rows, time.perf_counter() - begun, fault=fault), outputs)

    def _beside_ops(self, by_code: Mapping[Key, Tensor]) -> tuple[TensorProof, ...] | None:
        """Return the distances of the code from the ops; None where one of them is no proof."""
        compared = self._compared(by_code, widens=False)
        sized = list(zip(compared.values(), scales(list(compared.values()))))
        return tuple(_row(each, size, None) for each, size in sized) if all(starmap(is_near_ops, sized)) else None

    def _beside_float64(self, by_code: Mapping[Key, Tensor]) -> tuple[tuple[TensorProof, ...], str]:
        """Return the errors of the code, and what is to be said where it is wrong."""
        compared = self._compared(by_code)
        sizes = dict(zip(compared, scales(list(compared.values()))))
        wrong, noise = self._beyond_rounding(compared, sizes)
        rows = tuple(_row(each, sizes[key], Errors.of(noise[key]) if key in noise else each.of_ops, is_wrong=key in wrong)
                     for key, each in compared.items())
        return rows, self._described([(compared[key], sizes[key]) for key in wrong]) if wrong else ""

    def _run_code(self) -> tuple[Sequence[Any], dict[Key, Tensor]]:
        """Run the code; return its outputs, and what of it is compared."""
        copies = list(map(_copy, self._inputs))
        with forked_random(self._devices), (calls := CallsOfCode()):
            outputs = self._code(list(copies))
        self._handed = calls.handed
        found: dict[Key, Tensor] = {("output", place): x for place, x in enumerate(outputs) if isinstance(x, Tensor)}
        found |= {("change", place): copies[place] for place in self._kept}
        found |= {("memory", place): x for place, x in self._shared(outputs, copies).items()}
        return outputs, found

    def _shared(self, outputs: Sequence[Any], copies: Sequence[Any]) -> dict[int, Tensor]:
        """Return, for the outputs that are tensors, which inputs' memory each lies in. A backward may take that of its inputs."""
        addresses = {copies[place].untyped_storage().data_ptr(): place for place in self._kept if copies[place].numel()}
        return {place: torch.tensor([addresses.get(x.untyped_storage().data_ptr(), -1)]) for place, x in enumerate(outputs)
                if isinstance(x, Tensor) and x.layout == torch.strided and self._stage != "backward"}

    def _run_ops(self, inputs: Sequence[Any], observe: Callable[..., None] | None = None, *, communicates: bool = True,
                 widens: bool = True) -> dict[Key, _Value]:
        """Run the graph op by op on copies of inputs, with the random numbers that the code drew.

        Args:
            communicates: whether collectives get what the code handed over; else what the ops give for these inputs.
            widens: whether in float64, too.
        """
        copies = list(map(_copy, inputs))
        handed = self._handed if communicates else {op: x for op, x in self._handed.items() if not starts_collective(op)}
        beside = BesideFloat64(self._gm, handed, observe, widens=widens)
        with forked_random(self._devices):
            outputs = beside.run(*copies)
        found: dict[Key, _Value] = {("output", place): _Value(x, wide) for place, (x, wide) in enumerate(
            zip(outputs, beside.wide_outputs)) if isinstance(x, Tensor)}
        found |= {("change", place): _Value(copies[place], beside.wide_inputs[place], inputs[place]) for place in self._kept}
        found |= {("memory", place): _Value(x, x) for place, x in self._shared(outputs, copies).items()}
        updated = {node for op in {pair.node for pair in beside.pairs} for node in written(op)}
        self._updated |= {place for place, node in enumerate(self._nodes) if node in updated}
        for pair in beside.pairs:
            key = "handed", (self._order[pair.node], pair.place)
            found[key], self._names[key] = _Value(pair.ops, pair.wide, code=pair.code), _name_of_handed(pair)
        return found

    def _compared(self, by_code: Mapping[Key, Tensor], *, widens: bool = True) -> dict[Key, Compared]:
        compared, values = {}, self._run_ops(self._inputs, self._note_gradient, widens=widens)
        overflows = not math.isfinite(sum(self._gradients_read.values()))  # and the ops, unlike the code maybe, skip the update
        for key, each in values.items():
            if overflows and key[0] == "change":
                continue
            code = each.code if each.code is not None else by_code[key]
            if key[0] == "memory" and (torch.equal(code, each.ops) or int(code) < 0):  # memory of its own is as good
                continue
            if each.before is None or not (_same(code, each.before) and _same(each.ops, each.before)):
                is_plain = key[0] == "change" and key[1] in self._updated
                compared[key] = Compared(self._named(key), self._kind(key), code, *each[:3],
                                         narrowest=torch.float64 if is_plain else self._narrowest)
        return compared

    def _note_gradient(self, node: fx.Node, ops: Any, wide: Any) -> None:
        """Note how large a gradient is that a traced update reads."""
        if TRACED_UPDATE in node.meta and ops.numel():
            self._gradients_read[node] = float(ops.abs().max())

    def _kind(self, key: Key) -> str:
        """Return the kind of a tensor: its size is compared with sizes of its kind."""
        what, place = key
        if what == "handed":
            return self._names[key][1]
        if what == "change":
            meta = self._nodes[place].meta
            role = str(meta.get(NAME, "")).rpartition(".")[2] if meta.get(KIND) == "state" else ""
            return f"change, {meta.get(KIND)} {role}"
        return "gradient" if what == "output" and place in self._gradients else what

    def _named(self, key: Key) -> str:
        what, place = key
        if what == "memory":
            return f"output {place}, which lies in the memory of an input,"
        if what == "output":
            return f"gradient of {self._gradients[place]!r}" if place in self._gradients else f"output {place}"
        if what == "change":
            return f"change of {self._nodes[place].meta.get(NAME, self._nodes[place].name)!r}"
        return self._names[key][0]

    def _beyond_rounding(self, compared: Mapping[Key, Compared], sizes: Mapping[Key, Errors]) -> tuple[
            list[Key], dict[Key, Tensor]]:
        """Return the tensors that the code has wrong, and how far the ops move each suspect on inputs that are a rounding away.

        Elements are compared with those distances. So nothing counts that turns on a rounding: a mask where two values are equal,
        an element of a traced update by a gradient that is nearly 0, for which gradients are moved, too.
        """
        sizes_read = self._gradients_read.values()
        usual = statistics.median(sizes_read) or max(sizes_read) if sizes_read else 0.0
        suspects = [key for key, each in compared.items() if is_suspect(each, each.of_code, sizes[key])]
        noise, generator = {key: compared[key].distances(compared[key].ops) for key in suspects}, torch.Generator().manual_seed(0)
        eps = torch.finfo(self._narrowest).eps

        def moved(node: fx.Node, ops: Any, wide: Any) -> Tensor | None:
            if node not in self._gradients_read:
                return None
            most = _GRADIENT * float((ops.double() - wide).abs().max()) + 2 * eps * max(float(ops.abs().max()), usual)
            return ops + (most * _noise_like(ops, generator)).to(ops.dtype)

        for _ in range(_PROBES):
            if not suspects:
                break
            try:
                probe = self._run_ops([_moved(x, eps, generator) for x in self._inputs], moved, communicates=False)
            except Exception:  # of any class: what cannot be looked at again is excused by nothing
                break
            for key in suspects:
                if key in probe:
                    noise[key] = noise[key].maximum(compared[key].distances(probe[key].ops, probe[key].before))
            suspects = [key for key in suspects if is_suspect(compared[key], compared[key].beyond(noise[key]), sizes[key])]
        return suspects, noise

    def _described(self, wrong: Sequence[tuple[Compared, Errors]]) -> str:
        """Return what a warning says of tensors that the code has wrong, each given with its size."""
        worst, size = max(wrong, key=lambda pair: pair[0].of_code.norm / (pair[1].norm or 1.0))
        of_code, of_ops = (errors.norm / (size.norm or 1.0) for errors in (worst.of_code, worst.of_ops))
        others = f", and {count_text(len(wrong) - 1, 'other tensor')}" if wrong[1:] else ""
        text = (f"{worst.name} is {of_code:.1e} of its size away from float64, and the same ops one by one are {of_ops:.1e}"
                f"{others} ({first_names([each.name for each, _ in wrong])})")
        try:
            where = first_difference(self._code, list(map(_copy, self._inputs)),
                                     lambda observe: self._run_ops(self._inputs, observe), self._devices)
        except Exception as error:  # of any class: the warning is what counts
            where = f"its kernels could not be looked at one by one ({type(error).__name__})"
        return f"{text}; {where}" if where else text

    def _lacking_memory(self) -> str:
        """Return a note where copies of the inputs, and the graph in its own dtypes and in float64, would not fit."""
        free, inputs = free_bytes(next(iter(self._devices), None)), sum(x.nbytes for x in self._inputs if isinstance(x, Tensor))
        needed = 3 * inputs + (1 + 8 // self._narrowest.itemsize) * max(Liveness(self._gm).alive(), default=0)
        if free is None or needed <= free:
            return ""
        return (f"its code was not compared with it, which takes {needed} bytes where {free} are free; verify='code' does it all "
                "the same, verify='off' leaves it out without a word")


def _row(each: Compared, size: Errors, of_ops: Errors | None, *, is_wrong: bool = False) -> TensorProof:
    norm, largest = (size.norm or 1.0, size.largest or 1.0)
    return TensorProof(each.name, each.of_code.norm / norm, of_ops and of_ops.norm / norm, each.of_code.largest / largest,
                       of_ops and of_ops.largest / largest, is_wrong)


def _name_of_handed(pair: Handed) -> tuple[str, str]:
    """Return what a tensor is that the code hands to an op, "gradient of '0.weight'" where that updates by it, and its role."""
    node, place = pair.node, pair.place
    named = [*zip((argument.name for argument in node.target._schema.arguments), node.args), *node.kwargs.items()]
    for argument, given in named:
        leaves = given if isinstance(given, (list, tuple)) else [given]
        if place < len(leaves):
            params = node.args[0]
            if argument == "grads" and isinstance(params, (list, tuple)) and len(params) == len(leaves):
                return f"gradient of {params[place].meta.get(NAME, params[place].name)!r}", "gradient"
            return f"{argument} of {node.name}" + (f", {place}" if leaves[1:] else ""), f"handed, {argument}"
        place -= len(leaves)
    return f"an argument of {node.name}", "handed"


def _copy(x: Any) -> Any:
    return exact_copy(x) if isinstance(x, Tensor) else x


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, nan as one number."""
    if one.is_floating_point() or one.is_complex():
        return bool(((one == other) | one.isnan() & other.isnan()).all())
    return torch.equal(one, other)


def _moved(x: Any, eps: float, generator: torch.Generator) -> Any:
    """Return an input with its floating elements moved by a rounding, of its dtype or by `eps`, whichever is larger."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype.itemsize < 2:
        return x
    moved, most = _copy(x), 2 * max(eps, torch.finfo(x.dtype).eps)
    if any(size > 1 and not stride for size, stride in zip(moved.shape, moved.stride())):  # several elements in one place
        return moved
    return moved.copy_(x.double() * (1 + most * _noise_like(x, generator)))


def _noise_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return numbers between -1 and 1, in float64."""
    return torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device) * 2 - 1


def _unproved(stage: str, error: Exception) -> _Outcome:
    """Return what comes of a graph that cannot run op by op."""
    note = (f"its code was not compared with it, since it cannot run op by op ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]})")
    return _Outcome(Proof(stage, note=note), is_of_this_process=isinstance(error, torch.OutOfMemoryError))
