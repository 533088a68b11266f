"""verify="each": a pass of any stage that is not of its tier is caught by transform(), the backend and a training step."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.infra.pass_base import PassResult
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx.compiler.pass_verification import check_tier
from apexfx.errors import PassError
from apexfx.graph import call
from tests.tables import table

aten = torch.ops.aten


def doubled(graph, node):
    return call(graph, aten.mul.Tensor, (node, 2.0), like=node)


def gradient_doubled(graph, node):  # of the same value
    twice, detached = doubled(graph, node), call(graph, aten.detach.default, (node,), like=node)
    return call(graph, aten.sub.Tensor, (twice, detached), like=node)


class Lies(apexfx.Pass):
    """Put something else in the place of the first ReLU, or its backward."""

    name = "lies"

    def __init__(self, stage, numeric, replace, *, modified=True):
        super().__init__()
        self.stage, self.numeric, self.replace, self.modified = stage, numeric, replace, modified

    def call(self, gm):
        targets = (F.relu, torch.relu, aten.relu.default, aten.threshold_backward.default)
        node = next(node for node in gm.graph.nodes if node.target in targets)
        users = list(node.users)
        with gm.graph.inserting_before(node.next):
            new = self.replace(gm.graph, node)
        for user in users:
            user.replace_input_with(node, new)
        self.record(node, "another value")
        return PassResult(gm, self.modified)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))


def plain_loss(output, target):
    return F.mse_loss(output, target)


def unseen_loss(output, target):
    print(end="")  # no graph holds it
    return F.mse_loss(output, target)


def step(loss_fn=plain_loss, accumulate=1, fallback=None, **options):
    model = net()
    return apexfx.train_step(model, loss_fn, torch.optim.Adam(model.parameters()), accumulate=accumulate, fallback=fallback,
                             **options)


WAYS = {
    "transform": lambda x, **options: apexfx.transform(net(), **options)(x).sum().backward(),
    "backend": lambda x, **options: torch.compile(net(), backend="apex", options=options)(x).sum().backward(),
    "step": lambda x, **options: step(**options)(x, x),
    "step that accumulates": lambda x, **options: step(accumulate=2, **options)(x, x),
    "step in pieces": lambda x, **options: step(unseen_loss, fallback="transform", **options)(x, x),
}
LIES = {
    "forward, bitwise": lambda: Lies("forward", "bitwise", doubled),
    "forward, without a word": lambda: Lies("forward", "bitwise", doubled, modified=False),
    "forward, reassociates": lambda: Lies("forward", "reassociates", doubled),
    "forward, of the gradient": lambda: Lies("forward", "reassociates", gradient_doubled),
    "backward, bitwise": lambda: Lies("backward", "bitwise", doubled),
    "backward, reassociates": lambda: Lies("backward", "reassociates", doubled),
    "step, bitwise": lambda: Lies("step", "bitwise", doubled),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@table(5, ("lie", "way"), [(lie, way) for lie in reversed(LIES) for way in WAYS
                            if not lie.startswith("step") or way in ("step", "step that accumulates")])
def test_a_pass_that_lies_is_caught(lie, way):
    level = "O2" if "of the gradient" in lie or "reassociates" in lie else "O0"
    with pytest.raises(Exception, match="apexfx pass 'lies'.* its tier"):
        WAYS[way](torch.randn(8, 4), opt_level=level, inner="eager", verify="each", passes=(LIES[lie](),))


@table(1, ("way", "level", "dtype"), [
    ("transform", "O2", None), ("step", "O0", None), ("step", "O1", torch.float16), ("step that accumulates", "O2", None),
    ("step in pieces", "O3", None)])
def test_passes_that_keep_their_word_are_not(way, level, dtype):
    WAYS[way](torch.randn(8, 4), opt_level=level, dtype=dtype, inner="eager", verify="each")


def test_a_batch_norm_in_a_checkpoint_is_compared():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return checkpoint(lambda t: self.bn(t) + t, self.linear(x), use_reentrant=False)

    model = apexfx.transform(Checkpointed(), opt_level="O1", dtype=torch.bfloat16, inner="eager", verify="each")
    model(torch.randn(5, 3)).sum().backward()
    assert model.bn.num_batches_tracked == 1


@pytest.mark.long
def test_it_changes_nothing_and_specializes_nothing():
    steps = [step(verify=verify, dynamic=True, inner="eager", opt_level="O0") for verify in ("off", "each")]
    for one in steps:
        for n in (8, 5, 7):
            one(torch.ones(n, 4), torch.zeros(n, 4))
    for a, b in zip(*(one.model.state_dict().values() for one in steps)):
        assert torch.equal(a, b)
    assert [len(one.report.graphs) for one in steps] == [1, 1]


def test_imaginary_parts_of_results_and_gradients_are_compared():
    def of_real_gradient(x):
        real = torch.complex(x.real, torch.zeros_like(x.real))
        return x.detach() + real - real.detach()

    x = torch.randn(4, dtype=torch.complex64).requires_grad_()
    before, *others = map(torch.fx.symbolic_trace, (
        lambda x: x * 1, lambda x: (x * 3) / 3, of_real_gradient, lambda x: torch.complex(x.real, x.imag * 1.1)))
    for after, is_wrong in zip(others, (False, True, True)):
        with pytest.raises(PassError, match="its tier") if is_wrong else contextlib.nullcontext():
            check_tier(before, after, lambda: [x.detach().clone().requires_grad_()], pass_name="p", numeric="reassociates")
