"""Watches where gradients come from, so that none is left unaveraged without a word; flushes accumulated ones.

The allreduce itself is nodes in the backward graph. What a graph cannot see is a gradient computed outside of it: a
forward that bypassed the transformed model, a frame that Dynamo left to eager. Each parameter carries one hook that
knows whether a synchronizing backward is under way. Nor can it see that its collectives meet those of another step on
a rank that skipped a backward: each backward sends ahead how many forwards its rank has run.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ._torch import in_backward
from .agreement import Label
from .config import BucketConfig
from .end_of_backward import EndOfBackward


@dataclass(frozen=True)
class _Hook:
    """The one hook of a parameter, and whose it is: of the model that ran forward last, where several share it."""

    handle: Any
    owner: weakref.ref[GradientSync]


_hooks: Any = WeakTensorKeyDictionary()  # parameter -> _Hook, by identity: tensors compare elementwise


class UnsynchronizedGradientError(RuntimeError):
    """A gradient was computed where nothing averages it across ranks."""


class GradientSync:
    """The gradient side of one data-parallel model on this rank.

    Args:
        group: over which gradients are reduced.
        config: the bucket options.
        label: tells this model's keys in the store apart; None for a group without peers to compare with.

    Attributes:
        enabled: False inside `no_sync()`.
    """

    def __init__(self, group: dist.ProcessGroup, config: BucketConfig, label: str | Label | None = None) -> None:
        self.group = group
        self.config = config
        self.enabled = True
        self._label = label
        self._names: dict[str, weakref.ref[nn.Parameter]] = {}
        self._hooked: set[int] = set()  # parameters, by id as below: a tied one has several names
        self._pending: set[int] = set()  # those whose .grad holds local, not yet averaged micro-batches
        self._reduced: set[int] = set()  # those that the backward under way reduces in its graphs
        self._local: set[int] = set()  # those that the backward under way leaves local on purpose
        self._flush_due = False
        self._end = EndOfBackward()

    @functools.cached_property
    def _count(self) -> Any:
        if self._label is None:
            return None
        from .forward_count import ForwardCount  # which needs apexfx.parallel, which needs this

        return ForwardCount(self.group, str(self._label), self.config.timeout_s, self._names)

    def watch(self, name: str, parameter: nn.Parameter) -> None:
        """Hook `parameter`, unless it is hooked already or has no gradient; the name is the one errors use."""
        if (known := self._names.get(name)) is None or known() is not parameter:
            self._names[name] = weakref.ref(parameter)
            self._hooked.discard(id(parameter))  # the id may be that of a parameter that is gone
        if not parameter.requires_grad or id(parameter) in self._hooked:
            return
        if (old := _hooks.pop(parameter, None)) is not None:
            old.handle.remove()
            if (owner := old.owner()) is not None:
                owner._hooked.discard(id(parameter))  # its next forward takes the hook back
        me = weakref.ref(self)

        def on_accumulated(p: Tensor) -> None:
            if (sync := me()) is not None:
                sync._on_accumulated(name, id(p))

        _hooks[parameter] = _Hook(parameter.register_post_accumulate_grad_hook(on_accumulated), me)
        self._hooked.add(id(parameter))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the block; the first backward after it averages the sum.

        Every rank must enter it, or none: the flush and the allreduce nodes of a graph do not match each other, so
        `forward_count.py` compares which of them follows.
        """
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @property
    def in_graph(self) -> bool:
        """Whether the next forward uses the graph with allreduce nodes.

        After local micro-batches it does not: the graph would average this micro-batch alone, so the step that ends an
        accumulation runs local too, and `.grad` is reduced once as a whole.
        """
        return self.enabled and not self._pending

    def on_forward(self, parameters: Sequence[nn.Parameter], outputs: Any, *, reduces: bool) -> None:
        """Prepare for the backward of a graph that has just run forward.

        Args:
            parameters: those in the graph that have a gradient.
            outputs: what the graph returned; one of them leads to the graph's autograd node.
            reduces: whether the graph's backward holds the allreduce nodes.
        """
        node = _compiled_node(outputs)
        if node is None:
            return
        members = [id(p) for p in parameters]
        ends_accumulation = self.enabled and not reduces
        device = parameters[0].device if parameters else torch.device("cpu")

        def on_backward(_grads: Any) -> None:
            if self._end.was_dropped():
                self._forget_backward()
            self._end.queue(self._end_of_backward)
            # A forward from before no_sync() adds an average to what is local: averaged with it, that stays as it is.
            flush = ends_accumulation or (reduces and self.enabled and bool(self._pending))
            if self._count is not None and (reduces or flush):
                with self._local_unless_failed():
                    self._count.send(device, flushes=flush)
            (self._reduced if reduces else self._local).update(members)
            self._flush_due |= flush

        node.register_prehook(on_backward)

    def on_training_forward(self) -> None:
        """Count a forward of the whole model: a backward is to follow on every rank."""
        if self._count is not None and self.enabled and not in_backward():
            self._count.forwards += 1

    def _on_accumulated(self, name: str, parameter: int) -> None:
        if self._end.was_dropped():
            self._forget_backward()
        if parameter in self._reduced:
            return
        if not self.enabled or parameter in self._local:
            if self._count is not None and not self._pending:
                self._count.accumulate()
            self._pending.add(parameter)
            return
        raise UnsynchronizedGradientError(
            f"apexfx: the gradient of {name!r} was computed outside of the transformed model's graphs, so it would not be "
            f"averaged over the {dist.get_world_size(self.group)} ranks. Call the model that transform() returned (not the "
            "module it was made from, nor one of its methods that skips forward); see model.report for frames "
            "that were left to eager; or run the backward inside `with model.no_sync():` if it is meant to stay local."
        )

    def _end_of_backward(self) -> None:
        flush = self._flush_due
        try:
            if self._count is not None:
                with self._local_unless_failed():
                    self._count.compare()
        finally:
            self._forget_backward()
        if flush:
            self.flush()

    def _forget_backward(self) -> None:
        self._flush_due = False
        self._end.clear()
        self._reduced.clear()
        self._local.clear()
        if self._count is not None:
            self._count.forget()

    @contextlib.contextmanager
    def _local_unless_failed(self) -> Iterator[None]:
        """Give up accumulated gradients where the ranks do not agree about them."""
        try:
            yield
        except BaseException:
            self._forget_local()
            raise

    def _forget_local(self) -> None:
        self._pending.clear()
        if self._count is not None:
            self._count.forget_local()

    def flush(self) -> None:
        """Average the accumulated `.grad` of every watched parameter over the ranks, in the plan's buckets."""
        from .schedule.reduce import reduce_gradients

        live: dict[int, tuple[str, nn.Parameter]] = {}
        for name, ref in self._names.items():
            if (p := ref()) is not None and p.requires_grad:
                live.setdefault(id(p), (name, p))  # a tied parameter once, by its first name
        try:
            reduce_gradients(dict(live.values()), self.config, self.group)
        finally:
            self._forget_local()


def _compiled_node(outputs: Any) -> Any:
    """Return the autograd node of the compiled graph that made `outputs`, or None when nothing requires grad."""
    nodes = [o.grad_fn for o in (outputs if isinstance(outputs, (tuple, list)) else (outputs,)) if isinstance(o, Tensor)]
    for node in nodes:
        if node is not None and "CompiledFunction" in node.name():
            return node
    for node in nodes:  # an output that is a view of a graph's output is rebuilt outside of the graph
        while node is not None and "CompiledFunction" not in node.name():
            node = next((n for n, _ in node.next_functions if n is not None), None)
        if node is not None:
            return node
    return None
