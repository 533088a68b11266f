"""The table of models with a numeric fault says what eager torch does, whatever finds it later."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests import non_finite_models
from tests.non_finite_models import FINITE, NON_FINITE, FiniteModel, NonFiniteModel

FILE = non_finite_models.__file__


class Event(NamedTuple):
    op: str
    phase: str
    line: int | None


class Watch(TorchDispatchMode):
    """Keeps the first op that computes what is not finite: at all (`any`), and from what is (`first`).

    A NaN from inputs without one is new as well: infinity minus infinity. An infinite number in the call itself is meant.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.node_line = "forward", None
        self.first: Event | None = None
        self.any: Event | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [_kind(leaf) for leaf in tree_leaves((args, kwargs))]
        result = func(*args, **kwargs)
        name = str(func.overloadpacket)
        worst = 0 if "empty" in name else max((_kind(leaf) for leaf in tree_leaves(result)), default=0)   # whatever memory held
        event = Event(name, self.phase, self._line()) if worst else None
        self.any = self.any or event
        if worst > max(inputs, default=0):
            self.first = self.first or event
        return result

    def follow(self, loss: Tensor) -> None:
        """Have the line in the forward at hand of every node that the backward of the loss runs."""
        self.phase, queue, seen = "backward", [loss.grad_fn], set()
        while queue:
            node = queue.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            lines = re.findall(rf'File "{re.escape(FILE)}", line (\d+)', "".join(node.metadata.get("traceback_", ())))
            node.register_prehook(lambda grads, line=int(lines[-1]) if lines else None: setattr(self, "node_line", line))
            queue.extend(node for node, _ in node.next_functions)

    def _line(self) -> int | None:
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != FILE:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else self.node_line


def _kind(leaf: Any) -> int:
    """Return 0 of what is finite, 1 of what is infinite, 2 of what holds a NaN."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return 2 if leaf.isnan().any() else int(leaf.isinf().any())
    return int(isinstance(leaf, float) and math.isinf(leaf))


def run(model: nn.Module, case: NonFiniteModel | FiniteModel, batch: tuple[Any, ...]) -> tuple[Watch, Tensor, dict[str, Tensor]]:
    """Compute loss and gradients as the level of the case does, and leave the gradients in `.grad`, unscaled."""
    inputs, *targets = batch
    dtype, level = case.options.get("dtype"), case.options["opt_level"]
    scale = case.options.get("loss_scale", 1.0)
    computed = model
    if level == "O2":
        computed = copy.deepcopy(model).apply(lambda module: None if isinstance(module, nn.BatchNorm2d) else _cast(module, dtype))
        inputs = tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs)
    watch = Watch()
    with torch.autograd.set_detect_anomaly(True, check_nan=False), watch:
        with torch.autocast("cpu", dtype) if level == "O1" else nullcontext():
            output = computed(*inputs) if isinstance(inputs, tuple) else computed(inputs)
        loss = case.loss(output.float(), *targets)
        scaled = loss * scale
        watch.follow(scaled)
        gradients = torch.autograd.grad(scaled, list(computed.parameters()))
    for p, gradient in zip(model.parameters(), gradients):
        p.grad = gradient.float() / scale
    return watch, loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    for p in module.parameters(recurse=False):
        p.data = p.data.to(dtype)
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point():
            setattr(module, name, buffer.to(dtype))


def build(case: NonFiniteModel | FiniteModel) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


def of_what_is_not_finite(gradients: Mapping[str, Tensor]) -> set[str]:
    return {name for name, gradient in gradients.items() if not gradient.isfinite().all()}


@pytest.mark.parametrize("case", NON_FINITE, ids=lambda case: case.name)
def test_the_fault_is_where_the_table_says(case):
    model = build(case)
    optimizer = case.optimizer(model.parameters())
    for _ in range(2 if case.good else 0):
        _, loss, gradients = run(model, case, case.good)
        assert loss.isfinite() and not of_what_is_not_finite(gradients)
        optimizer.step()
    watch, _, gradients = run(model, case, case.bad)
    event = watch.any if case.source else watch.first
    assert event.op in getattr(case, event.phase) and event.line in case.lines(), event
    assert of_what_is_not_finite(gradients) == case.not_finite


@pytest.mark.parametrize("case", NON_FINITE, ids=lambda case: case.name)
def test_the_source_is_what_goes_in(case):
    state = {name: value for name, value in build(case).named_parameters() if not value.isfinite().all()}
    batch = [leaf for leaf in tree_leaves(case.bad) if not leaf.isfinite().all()]
    assert [*state, *("batch" for _ in batch)] == ([case.source] if case.source else [])


def test_rows_fit_together():
    assert len(NON_FINITE) == len({case.name for case in NON_FINITE}) == 20 and len(FINITE) == 5
    for case in NON_FINITE:
        assert case.lines() and bool(case.forward) != bool(case.backward)
        for good, bad in zip(tree_leaves(case.good or case.bad), tree_leaves(case.bad)):
            assert (good.shape, good.dtype) == (bad.shape, bad.dtype)


@pytest.mark.parametrize("case", FINITE, ids=lambda case: case.name)
def test_what_looks_alarming_is_finite(case):
    model = build(case)
    optimizer = case.optimizer(model.parameters())
    for _ in range(3):
        watch, loss, gradients = run(model, case, case.batch)
        assert loss.isfinite() and not of_what_is_not_finite(gradients)
        alarming = {"infinite": watch.any is not None,
                    "large": not sum(g.pow(2).sum() for g in gradients.values()).isfinite(),
                    "zero": not any(g.any() for g in gradients.values())}
        assert alarming[case.alarming]
        optimizer.step()
