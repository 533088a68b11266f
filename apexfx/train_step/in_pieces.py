"""A training step that Dynamo cannot capture whole: the model as `transform()` runs it, and the rest of the step op by op.

The objective around the model and the end of the step are the same code that a whole graph is captured from, run as it is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_leaves, versions
from .._torch_compilers import not_traced
from ..buckets.eager_reduce import averaged_copies
from ..compiler.compiled_model import CompiledModel
from ..compiler.graph_compiler import GraphCompiler
from ..compiler.private_code import with_private_code
from ..compiler.refusals import COMPILES_ITSELF
from ..distributed.agreement import Communication, explained
from .accumulation import accumulate_gradients, add_accumulated
from .capture_errors import NotOneGraph, calls_backward, capture_errors, counts_apart, sparse_gradient, untrainable_loss
from .components import Components
from .function import apply_average, compute_gradients
from .leaves import check_leaves, leaves_of
from .mean import Mean, Weighted, weigh
from .step_graphs import StepGraphs
from .step_inputs import StepInputs


class StepInPieces(StepGraphs):
    """Runs the function of a step as one graph, until a call cannot be captured as one; in pieces from that call on.

    Gradients are averaged when the backward has ended, in the buckets of the options. So those of what a graph break left to
    eager, or of another part of the model than other ranks use, are averaged as well.
    """

    _pieces: _CompiledForward | None = None

    def run(self, batch: tuple[Any, ...], named: dict[str, Any], *, accumulates: bool) -> tuple[Any, ...]:
        if self._pieces is not None:
            return self._run_in_pieces(self._pieces, batch, named, accumulates=accumulates)
        try:
            return super().run(batch, named, accumulates=accumulates)
        except NotOneGraph as error:
            reason = error.reason
        if self._components.agreement is not None:
            self._components.agreement.ensure("way in which the training step runs",
                                              ["in pieces, since it cannot be captured as one graph"])
        pieces = _CompiledForward(self._components)
        outputs = self._run_in_pieces(pieces, batch, named, accumulates=accumulates)
        self._pieces = pieces  # not before: where the call fails in pieces as well, it was the call
        self._components.report.warn(
            "apexfx: the training step cannot be captured as one graph and runs in pieces, as fallback='transform' asks for: "
            f"{reason}. Forward and backward of the model are graphs; the loss, the average over the ranks and the update run op "
            "by op")
        if not pieces.was_called:
            self._components.report.warn("apexfx: the objective did not call the model itself, and what it calls of it ran in "
                                         "eager: no pass has rewritten it")
        return outputs

    def _run_in_pieces(self, pieces: _CompiledForward, batch: tuple[Any, ...], named: dict[str, Any], *,
                       accumulates: bool) -> tuple[Any, ...]:
        self._state.prepare()
        components = self._components
        agreement, group, buckets = components.agreement, components.groups.gradients, components.options.config.buckets
        with torch.no_grad(), capture_errors(components.report), components.step_model.traceable(casts_inputs=False) as model:
            inputs = self._state.inputs(model)
            loss, rest, grads, weighted = self._gradients(pieces, inputs, batch, named, ends=not accumulates)
            has_any = any(g is not None for g in grads) or any(inputs.accumulated)
            if accumulates:
                self._state.all_or_nothing.note_change()
                return loss, rest, *accumulate_gradients(inputs, grads, weighted)
            if inputs.calls > 1:
                grads = add_accumulated(inputs, grads, weighted)
            if agreement is not None:
                agreement.before_run(Communication("training step in pieces", ["the average of the gradients"],
                                                   numbers=self._state.numbers))
            if has_any:  # otherwise the step is refused
                self._state.all_or_nothing.note_communication()
            with explained(group, "the average of the gradients"):
                grads = averaged_copies(self._state.now.names, inputs.params, grads, buckets, group)
            if any(g is not None for g in grads):
                self._state.all_or_nothing.note_change()
            return loss, rest, *apply_average(inputs, grads, weighted)

    def _gradients(self, pieces: _CompiledForward, inputs: StepInputs, batch: tuple[Any, ...],
                   named: dict[str, Any], *, ends: bool) -> tuple[Tensor, Any, list[Tensor | None], Weighted | None]:
        """Run forward and backward; a failure changes nothing but what the forward has written."""
        before, grads_before = self._versions(), versions(p.grad for p in inputs.params)
        trained, of_batch = set(map(id, inputs.params)), {
            id(x) for x in tree_leaves((batch, named)) if not isinstance(x, nn.Parameter)}

        def differentiate(loss: Tensor, params: list[Tensor]) -> list[Tensor | None]:
            """Run the backward as a loop would: a reentrant checkpoint gives `torch.autograd.grad` no gradients of parameters."""
            if versions(p.grad for p in params) != grads_before:
                raise calls_backward()
            if not loss.requires_grad:
                raise untrainable_loss()
            others = [leaf for leaf in leaves_of(loss) if id(leaf) not in trained | of_batch]
            check_leaves([self._state.now.names.get(id(leaf), f"a leaf of shape {list(leaf.shape)}") for leaf in others])
            held = [p.grad for p in params]
            try:
                for p in params:
                    p.grad = None
                loss.backward()
                return [p.grad for p in params]
            finally:
                for p, gradient in zip(params, held):
                    p.grad = gradient

        def agreed(mean: Mean, *args: Any, ends: bool) -> Weighted:
            groups = self._components.groups
            if inputs.calls > 1 and groups.gradients is None and groups.batch_norm is not None and groups.batch_norm.size() > 1:
                raise counts_apart()
            if self._components.agreement is not None and inputs.group is not None:
                counts = f"counts of the loss after call {self._state.call_number}"
                self._components.agreement.ensure("training step in pieces", [counts])
            with explained(groups.gradients, "the counts of the loss"):
                return weigh(mean, *args, ends=ends)

        try:
            with pieces.in_place():
                loss, rest, grads, weighted = compute_gradients(inputs, batch, named, differentiate, ends=ends, weigh=agreed)
        finally:
            if self._versions() != before:
                self._state.all_or_nothing.note_change()
        self._state.mean.check(is_mean=weighted is not None)
        for p, gradient in zip(inputs.params, grads):
            if gradient is not None and gradient.layout != torch.strided:
                raise sparse_gradient(self._state.now.names[id(p)])
        return loss, rest, grads, weighted

    def _versions(self) -> list[Any]:
        return versions(t for each in (self._components.model, self._components.objective_modules)
                        for t in (*each.parameters(), *each.buffers()))


class _CompiledForward:
    """The forward of the model as `transform()` compiles it, in the model's place of it during a step alone."""

    def __init__(self, components: Components) -> None:
        self._model, self._classes = components.model, components.step_model.classes
        config, groups = components.options.config, copy.copy(components.groups)
        groups.gradients = None  # they are averaged after the backward
        self._config = dataclasses.replace(config, ddp=False, process_group=config.process_group if config.sync_bn else None)
        self._compiler = GraphCompiler(self._config, report=components.report, groups=groups, agreement=components.agreement,
                                       scales_loss=True)
        self._compiled: CompiledModel | None = None
        self._own_forward: Callable[..., Any] | None = None  # what a user has put in the place of the class's
        self.was_called = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have calls of the model run its graphs, in this context."""
        attributes = self._model.__dict__
        own = attributes.get("forward")
        if self._compiled is None or own is not self._own_forward:
            self._compiled = CompiledModel(self._model, own or with_private_code(type(self._model).forward), self._config,
                                           self._compiler, self._classes, of_inputs=own is not None, in_step=True)
            self._own_forward = own
        compiled = self._compiled

        @functools.wraps(own or type(self._model).forward)  # keeps the signature, which Hugging Face inspects
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.was_called = True
            return compiled.call(self._model, args, kwargs)

        attributes["forward"] = not_traced(forward, COMPILES_ITSELF)
        try:
            yield
        finally:
            if own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = own
