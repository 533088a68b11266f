"""A training step that Dynamo cannot capture whole: the model's graphs, and what the step does besides op by op.

The model's forward and backward run as the graphs that `transform()` would make of them. The objective around it and the end of
the step are the same code that a whole graph is captured from, run as it is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import not_traced, tensor_version, tree_leaves
from ..compiler.compiled_model import CompiledModel, with_private_code
from ..compiler.graph_compiler import GraphCompiler
from ..compiler.process_groups import Groups
from ..compiler.refusals import COMPILES_ITSELF
from ..config import TransformConfig
from ..distributed.agreement import Agreement
from ..report.data import Report
from .averages import averaged_copies
from .errors import calls_backward, sparse_gradient, untrainable_loss
from .function import StepInputs, add_gathered, apply_gradients, compute_gradients, gather
from .leaves import check_leaves, leaves_of
from .model import StepModel

log = logging.getLogger(__name__)


class StepInPieces:
    """Runs what `run_step` and `run_accumulate` describe, with the model's own forward compiled.

    Gradients are averaged when the backward has ended, in the buckets of the options. So those of what a graph break left to
    eager, or of another part of the model than other ranks use, are averaged as well.

    Args:
        model: the user's, with the stand-ins that are in it while it is called.
        config: the options.
        report: where the graphs' reports go.
        groups: the process groups.
        agreement: among the ranks; None on one rank.
        on_change: called before parameters, buffers or what was accumulated change, or once they have.
        on_communication: called before gradients are averaged.
    """

    def __init__(self, model: StepModel, config: TransformConfig, *, report: Report, groups: Groups, agreement: Agreement | None,
                 on_change: Callable[[], None], on_communication: Callable[[], None]) -> None:
        self._model, self._stand_ins, self._objective_modules = model.model, model.stand_ins, model.objective_modules
        self._report, self._on_change, self._on_communication = report, on_change, on_communication
        self._buckets, self._group, self._agreement = config.buckets, groups.gradients, agreement
        self._config = self._of_model(config)
        local = copy.copy(groups)
        local.gradients = None
        self._compiler = GraphCompiler(self._config, report=report, groups=local, agreement=agreement)
        self._compiled: CompiledModel | None = None
        self._own_forward: Callable[..., Any] | None = None  # what a user has put in the place of the class's
        self._was_called = False

    def run_last(self, inputs: StepInputs, batch: tuple[Any, ...], named_inputs: dict[str, Any]) -> tuple[Any, ...]:
        """Do as `run_step`."""
        running = contextlib.nullcontext() if self._agreement is None else self._agreement.running(
            "last", "training step in pieces", ["forward, backward and the average of the gradients"])
        with running:  # a rank that fails before it communicates tells those that wait for its gradients
            loss, rest, grads = self._gradients(inputs, batch, named_inputs)
            if inputs.calls > 1:
                grads = add_gathered(inputs, grads)
            if any(g is not None for g in grads):  # otherwise the step is refused
                self._on_communication()
            grads = averaged_copies(self._names(), inputs.params, grads, self._buckets, self._group)
        if any(g is not None for g in grads):
            self._on_change()
        for buffer in inputs.buffers:
            buffer.zero_()
        return loss, rest, *apply_gradients(inputs, grads)

    def run_earlier(self, inputs: StepInputs, batch: tuple[Any, ...], named_inputs: dict[str, Any]) -> tuple[Any, ...]:
        """Do as `run_accumulate`."""
        loss, rest, grads = self._gradients(inputs, batch, named_inputs)
        self._on_change()
        return loss, rest, gather(inputs.buffers, grads)

    def _of_model(self, config: TransformConfig) -> TransformConfig:
        """Return the options of the model alone."""
        left_out = [p.name for p in config.passes if p.stage == "step"]
        if left_out:
            self._report.note(f"apexfx: {', '.join(left_out)} did not run: passes of the stage step need the whole step")
        return dataclasses.replace(
            config, ddp=False, process_group=config.process_group if config.sync_bn else None,
            passes=[p for p in config.passes if p.name not in left_out], skip=[s for s in config.skip if s not in left_out])

    def _gradients(self, inputs: StepInputs, batch: tuple[Any, ...],
                   named_inputs: Mapping[str, Any]) -> tuple[Tensor, Any, list[Tensor | None]]:
        """Run forward and backward; a failure changes nothing but what the forward has written."""
        before = self._versions()
        differentiate = functools.partial(self._differentiate, grads_before=grad_versions(inputs.params),
                                          of_batch={id(x) for x in tree_leaves((batch, named_inputs))
                                                    if not isinstance(x, nn.Parameter)})
        try:
            with self._compiled_forward():
                loss, rest, grads = compute_gradients(inputs, batch, named_inputs, differentiate)
        finally:
            if self._versions() != before:
                self._on_change()
        sparse = next((p for p, g in zip(inputs.params, grads) if g is not None and g.layout != torch.strided), None)
        if sparse is not None:
            raise sparse_gradient(self._names()[id(sparse)])
        if not self._was_called:
            self._was_called = True
            message = ("apexfx: the objective did not call the model itself, and what it calls of it ran in eager: no pass has "
                       "rewritten it")
            self._report.note(message)
            log.warning(message)
        return loss, rest, grads

    def _differentiate(self, loss: Tensor, params: list[Tensor], grads_before: list[Any],
                       of_batch: Collection[int]) -> list[Tensor | None]:
        """Run the backward as a loop would: a reentrant checkpoint gives `torch.autograd.grad` no gradients of parameters."""
        if grad_versions(params) != grads_before:
            raise calls_backward()
        if not loss.requires_grad:
            raise untrainable_loss()
        others = [leaf for leaf in leaves_of(loss) if not any(leaf is p for p in params) and id(leaf) not in of_batch]
        check_leaves([self._names().get(id(leaf), f"a leaf of shape {list(leaf.shape)}") for leaf in others])
        held = [(p, p.grad) for p in params]
        for p, _ in held:
            p.grad = None
        try:
            loss.backward()
            return [p.grad for p in params]
        finally:
            for p, gradient in held:
                p.grad = gradient

    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in (*self._model.named_parameters(), *self._objective_modules.named_tensors()[0].items())}

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(t), tensor_version(t)) for each in (self._model, self._objective_modules)
                for t in (*each.parameters(), *each.buffers())]

    @contextlib.contextmanager
    def _compiled_forward(self) -> Iterator[None]:
        """Have calls of the model run its graphs, in a step alone: outside of it the model is as it was."""
        attributes = self._model.__dict__
        own = attributes.get("forward")
        if self._compiled is None or own is not self._own_forward:
            traced = own or with_private_code(type(self._model).forward)
            self._compiled = CompiledModel(self._model, traced, self._config, self._compiler, self._stand_ins,
                                           of_inputs=own is not None, in_step=True)
            self._own_forward = own
        compiled = self._compiled

        @functools.wraps(own or type(self._model).forward)  # keeps the signature, which Hugging Face inspects
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._was_called = True
            return compiled.call(self._model, args, kwargs)

        attributes["forward"] = not_traced(forward, COMPILES_ITSELF)
        try:
            yield
        finally:
            if own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = own


def grad_versions(params: Sequence[Tensor]) -> list[Any]:
    """Return what is in the `.grad` of parameters, to be compared."""
    return [p.grad if p.grad is None else (id(p.grad), tensor_version(p.grad)) for p in params]
