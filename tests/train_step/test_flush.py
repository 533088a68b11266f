"""What a step tells of its last update, an accumulation that ends early, default dtypes, and float64."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.infra.pass_base import PassResult

import apexfx
from apexfx.optimizers import FusedNovoGrad
from tests.own_optimizers import RMSprop
from tests.small_models import branching, train_on
from tests.tables import table
from tests.train_step.test_step import ROUNDING, assert_same

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 8, generator=generator, dtype=dtype), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(count)]


PIECES = {"objective": branching(F.cross_entropy), "fallback": "transform"}


def make(optimizer=SGD, *, model=None, objective=None, lr=0.1, **options):
    model = model if model is not None else net()
    loss_fn = F.cross_entropy if objective is None else None
    return apexfx.train_step(model, loss_fn, optimizer(model.parameters(), lr=lr), objective=objective,
                             **{"opt_level": "O0", "inner": "eager", **options})


def eager(data, optimizer=SGD, *, accumulate=1, scale=1.0, max_grad_norm=None, dtype=torch.float32, lr=0.1):
    """Train in plain torch; an accumulation that data ends is averaged over the calls there are. Return model and norms."""
    model, norms = net(dtype), []
    optimizer = optimizer(model.parameters(), lr=lr)
    for start in range(0, len(data), accumulate):
        part = data[start:start + accumulate]
        optimizer.zero_grad()
        for inputs, targets in part:
            (F.cross_entropy(model(inputs), targets) / len(part) * scale).backward()
        for p in model.parameters():
            p.grad /= scale
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf if max_grad_norm is None else max_grad_norm))
        optimizer.step()
    return model, norms


# ---- accumulation ----------------------------------------------------------------------------------------------------------


@table(1, "options", [{}, PIECES, {"loss_scale": 1024.0}], ids=["graph", "pieces", "scale"])
def test_accumulation_trains_as_eager(options):
    step, data = make(accumulate=3, **options), batches(6)
    train_on(step, data)
    reference, _ = eager(data, accumulate=3, scale=options.get("loss_scale", 1.0))
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


@table(1, "options", [
    {}, PIECES, {"loss_scale": "dynamic", "max_grad_norm": 0.1}, {"optimizer": RMSprop, "max_grad_norm": 0.1, "keep_grads": True},
], ids=["graph", "pieces", "scale", "outside"])  # fmt: skip
def test_flush_applies_the_average_of_what_is_there(options):
    data = batches(8)
    step = make(accumulate=3, lr=0.01, **options)
    for place, batch in enumerate(data, 1):
        step(*batch)
        assert step.updated.dtype == torch.bool and bool(step.updated) == (place % 3 == 0)
    step.flush()
    assert step.updated
    reference, norms = eager(data, options.get("optimizer", SGD), accumulate=3, lr=0.01,
                             max_grad_norm=options.get("max_grad_norm"))
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    if "max_grad_norm" in options:
        assert_same(step.grad_norm, norms[-1], **ROUNDING)
    step.state_dict()  # nothing is left of the accumulation
    before = copy.deepcopy(step.model.state_dict())
    step.flush()
    assert not step.updated
    assert_same(step.model.state_dict(), before)


def test_calls_after_a_flush_begin_an_accumulation():
    data = batches(5)
    step = make(AdamW, accumulate=3)
    train_on(step, data[:2])
    step.flush()
    train_on(step, data[2:])
    reference = net()
    optimizer = AdamW(reference.parameters(), lr=0.1)
    for part in (data[:2], data[2:]):
        optimizer.zero_grad()
        for inputs, targets in part:
            (F.cross_entropy(reference(inputs), targets) / len(part)).backward()
        optimizer.step()
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


def test_a_flush_sees_that_a_parameter_was_frozen():
    step = make(accumulate=3)
    step(*batches(1)[0])
    step.model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="after 1 of 3 calls that accumulate"):
        step.flush()


@table(1, "optimizer, options", [(SGD, {}), (AdamW, {"loss_scale": "dynamic"}), (RMSprop, {})], ids=str)
def test_a_flush_of_calls_that_reach_nothing_trained_does_nothing(optimizer, options):
    def of_the_input(model, inputs, targets, uses_model=False):
        return F.cross_entropy(model(inputs), targets) if uses_model else inputs.square().mean()

    step = make(optimizer, objective=of_the_input, accumulate=3, **options)
    [(inputs, targets)], before = batches(1), copy.deepcopy(step.model.state_dict())
    leaf = inputs.clone().requires_grad_()
    step(leaf, targets)
    step.flush()
    assert not step.updated
    assert_same(step.state_dict()["model"], before)
    for _ in range(3):  # a whole accumulation
        step(inputs, targets, True)
    assert step.updated
    reference, _ = eager([(inputs, targets)] * 3, optimizer, accumulate=3, lr=0.1)
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


def test_a_flush_that_overflows_is_skipped():
    step, before = make(accumulate=3, loss_scale="dynamic"), net().state_dict()
    inputs, targets = batches(1)[0]
    step(inputs * math.inf, targets)
    step.flush()
    assert not step.updated and step.skipped == 1 and step.loss_scale == 2.0**15
    assert_same(step.model.state_dict(), before)


class Fails(apexfx.Pass):
    """A pass that fails while it is told to."""

    name, stage, fails = "fails", "step", False

    def call(self, gm):
        if self.fails:
            raise ValueError("as it was told")
        return PassResult(gm, False)


@pytest.mark.long
def test_an_update_that_does_not_compile_has_changed_nothing():
    fails, data = Fails(), batches(4)
    step = make(AdamW, accumulate=2, passes=[fails])
    step(*data[0])
    fails.fails = True
    with pytest.raises(ValueError, match="as it was told"):
        step(*data[1])
    fails.fails = False
    train_on(step, data[1:])
    assert_same(step.model.state_dict(), eager(data, AdamW, accumulate=2)[0].state_dict(), **ROUNDING)
    assert len(step.report.graphs) == 2


class WritesWeight(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_parameter_that_a_call_writes_is_refused_before_it_accumulates():
    step = make(model=nn.Sequential(WritesWeight(8, 3)), accumulate=2)
    with pytest.raises(ValueError, match="writes parameter '0.weight' in place"):
        step(*batches(1)[0])


@pytest.mark.long
def test_the_report_of_an_accumulating_step_says_what_its_graphs_are_for():
    step = make(accumulate=2)
    train_on(step, batches(2))
    assert str(step.report).count("graph 0: accumulates gradients, for calls of accumulate=") == 1
    assert "graph 1: update" in str(step.report)
    assert "no_sync" not in str(step.report)


# ---- what a step tells -----------------------------------------------------------------------------------------------------


@table(1, "options", [
    {"max_grad_norm": 0.1}, {"max_grad_norm": math.inf, "optimizer": RMSprop}, {"loss_scale": 64.0},
    {"max_grad_norm": 0.1, "loss_scale": "dynamic", **PIECES},
    pytest.param({"max_grad_norm": 0.1, "inner": "inductor"}, marks=pytest.mark.long),
], ids=["clip", "infinity", "scale", "pieces", "inductor"])  # fmt: skip
def test_grad_norm_is_that_of_the_unscaled_gradients_before_clipping(options):
    step, data = make(lr=0.01, **options), batches(3)
    assert step.grad_norm.isnan() and not step.updated
    seen = []
    for batch in data:
        step(*batch)
        seen.append(step.grad_norm.clone())
        assert step.updated and step.grad_norm.dtype == torch.float32 and not step.grad_norm.dim()
    reference, norms = eager(data, options.get("optimizer", SGD), max_grad_norm=options.get("max_grad_norm"), lr=0.01)
    assert_same(seen, norms, **ROUNDING)
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


def test_an_infinite_limit_changes_no_bit_and_adds_no_factor():
    step, data = make(max_grad_norm=math.inf, lr=0.125), batches(3)
    train_on(step, data)
    assert_same(step.model.state_dict(), eager(data, lr=0.125)[0].state_dict())
    assert "clip_coefficient" not in step.print_readable(print_output=False)


def test_a_norm_that_nothing_measures_is_an_error():
    step = make()
    step(*batches(1)[0])
    assert step.updated and not any(hasattr(step, name) for name in ("grad_norm", "mean_loss", "events", "ema_model"))
    with pytest.raises(RuntimeError, match=r"make it with max_grad_norm=float\('inf'\)"):
        _ = step.grad_norm


def test_a_skipped_step_has_updated_nothing():
    step = make(loss_scale="dynamic")
    inputs, targets = batches(1)[0]
    step(inputs * math.inf, targets)
    assert not step.updated and not step.grad_norm.isfinite()


# ---- dtypes ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[torch.float64, *(pytest.param(half, marks=pytest.mark.long) for half in (torch.bfloat16, torch.float16))],
                ids=str)
def default_dtype(request):
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [AdamW, FusedNovoGrad])
def test_any_default_dtype(default_dtype, optimizer):
    def train():
        step = make(optimizer, model=model, accumulate=2, max_grad_norm=0.1, loss_scale="dynamic")
        train_on(step, data)
        assert step.updated and step.grad_norm.dtype == torch.float32
        return step.state_dict()

    model, data = net(), batches(4)
    first = copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(train())
    model.load_state_dict(first)
    torch.set_default_dtype(default_dtype)
    assert_same(train(), expected)


def test_a_model_of_the_default_dtype_trains(default_dtype):
    model, data = net(default_dtype), batches(2, default_dtype)
    expected = eager(data, dtype=default_dtype)[0].state_dict()
    torch.set_default_dtype(default_dtype)
    step = make(model=model, loss_scale=1.0)
    train_on(step, data)
    # The loss of a half model is float32 here.
    tolerance = {} if default_dtype == torch.float64 else {"rtol": 0, "atol": 2 * torch.finfo(default_dtype).eps}
    assert_same(model.state_dict(), expected, **tolerance)


@table(1, "options", [
    {"max_grad_norm": 0.1}, {"loss_scale": 3.0}, {"max_grad_norm": 0.1, "loss_scale": 3.0, **PIECES},
    {"max_grad_norm": 0.1, "inner": "inductor"},
], ids=["clip", "scale", "pieces", "inductor"])  # fmt: skip
def test_float64_is_clipped_and_unscaled_in_float64(options):
    data = batches(5, torch.float64)
    step = make(model=net(torch.float64), **options)
    train_on(step, data)
    reference, norms = eager(data, scale=options.get("loss_scale", 1.0), max_grad_norm=options.get("max_grad_norm"),
                             dtype=torch.float64)
    assert_same(step.model.state_dict(), reference.state_dict(), rtol=1e-14, atol=1e-15)
    assert_same(step.grad_norm, norms[-1], rtol=1e-14, atol=0)
