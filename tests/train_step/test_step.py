"""train_step(): against the same loop in eager torch, checkpoints of either in the other, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import logging
import math
import random
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import run_and_get_code

import apexfx
from apexfx._torch import has_kernel
from apexfx._torch_compilers import dynamo_config
from apexfx.ops.apply_gradients import Plan, registered
from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from apexfx.train_step.parts import loss_scale
from apexfx.train_step.parts.apply_update import ApplyUpdate
from apexfx.train_step.parts.loss_scale import MIN_SCALE, LossScale
from apexfx.train_step.parts.norm import Norm
from apexfx.train_step.step_graphs import StepGraphs
from tests.amp.amp_cases import Automaton
from tests.own_optimizers import RMSprop
from tests.small_models import take_step, train_on
from tests.tables import table

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16),
                         nn.Tanh(), nn.Linear(16, 3))


def batches(count, size=6):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 2, 6, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
            for _ in range(count)]


def make(optimizer=AdamW, numbers=None, *, model=None, **options):
    """Return a step on a new model, at O0 and eager where the options do not say otherwise."""
    model = model if model is not None else net()
    options = {"opt_level": "O0", "inner": "eager", **options}
    numbers = {"lr": 0.01} if numbers is None else numbers
    return apexfx.train_step(model, F.cross_entropy, optimizer(model.parameters(), **numbers), **options)


def eager(optimizer, numbers, data, *, max_grad_norm=None):
    """Train in plain torch."""
    model = net()
    optimizer = optimizer(model.parameters(), **numbers)
    for inputs, targets in data:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
    return model, optimizer


def assert_same(one, other, **tolerance):
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(one, other, **tolerance)


ROUNDING = {"rtol": 1e-5, "atol": 1e-6}  # our ops round an update once where torch rounds each of its pieces


@table(2, "optimizer, numbers", [
    (SGD, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (Adam, {"lr": 0.01, "weight_decay": 0.01}), (AdamW, {"lr": 0.01}), (AdamW, {"lr": torch.tensor(0.01), "fused": True}),
], ids=str)  # fmt: skip
def test_a_step_is_that_of_eager_torch(optimizer, numbers):
    data = batches(20)
    step = make(optimizer, numbers)
    losses = train_on(step, data)
    reference, theirs = eager(optimizer, numbers, data)
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert losses[0].dtype == torch.float32 and not losses[0].requires_grad
    mine = step.optimizer.state_dict()
    assert mine["param_groups"] == theirs.state_dict()["param_groups"]
    assert_same(mine["state"], theirs.state_dict()["state"], **ROUNDING)
    assert all(p.grad is None for p in step.model.parameters()) and len(step.report.graphs) == 1


def test_sizes_and_numbers_of_the_data_are_captured():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(8, 3)

        def forward(self, x):
            y = self.body(x) * float(x.sum())
            return y + y[y > 0].mean()

    generator = torch.Generator().manual_seed(1)
    model, reference = Masked(), Masked()
    step, theirs = make(SGD, {"lr": 0.01}, model=model), SGD(reference.parameters(), lr=0.01)
    for _ in range(3):
        inputs, targets = torch.randn(6, 8, generator=generator), torch.randint(0, 3, (6,), generator=generator)
        step(inputs, targets)
        take_step(theirs, F.cross_entropy(reference(inputs), targets))
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)
    assert len(step.report.graphs) == 1


@pytest.mark.skipif(not has_kernel("apexfx::sgd_", "CPU") or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
                    reason="torch multiplies and adds in one rounding where the processor can, as the compiled op does")
@table(2, "numbers", [{}, {"weight_decay": 0.01}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.01},
                      {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}], ids=str)
def test_sgd_gives_the_bits_of_eager_torch(numbers):
    data = batches(20)
    step = make(SGD, {"lr": 0.1, **numbers})
    train_on(step, data)
    reference, theirs = eager(SGD, {"lr": 0.1, **numbers}, data)
    assert_same(step.model.state_dict(), reference.state_dict())
    assert_same(step.optimizer.state_dict()["state"], theirs.state_dict()["state"])


@table(2, "optimizer, numbers", [
    (FusedAdam, {}), (FusedAdam, {"adam_w_mode": False, "max_grad_norm": 0.1}), (FusedSGD, {"lr": 0.1, "momentum": 0.9}),
    (FusedSGD, {"lr": 0.1}), (FusedLAMB, {}), (FusedAdagrad, {}), (FusedNovoGrad, {}),
], ids=str)  # fmt: skip
def test_a_fused_optimizer_gives_its_own_bits(optimizer, numbers):
    data = batches(5)
    step = make(optimizer, numbers)
    train_on(step, data)
    reference, theirs = eager(optimizer, numbers, data)
    assert_same(step.model.state_dict(), reference.state_dict())
    assert_same(step.optimizer.state_dict()["state"], theirs.state_dict()["state"])


def test_an_optimizer_without_an_op_runs_outside_of_the_graph():
    data = batches(4)
    step = make(RMSprop, max_grad_norm=0.1)
    train_on(step, data)
    reference, _ = eager(RMSprop, {"lr": 0.01}, data, max_grad_norm=0.1)
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert "RMSprop updates outside of the graph" in str(step.report)


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.05, "loss_scale": 1024.0},
                                     pytest.param({"max_grad_norm": 0.05, "accumulate": 2}, marks=pytest.mark.long)], ids=str)
def test_inductor_gives_what_eager_gives(options):
    steps = make(**options), make(inner="inductor", **options)
    for batch in batches(4):
        for step in steps:
            step(*batch)
    assert_same(steps[1].model.state_dict(), steps[0].model.state_dict(), **ROUNDING)


@pytest.mark.long
def test_a_cpp_wrapper_gives_the_same_bits():
    data, steps = batches(2), (make(inner="inductor"), make(inner="inductor", inner_options={"cpp_wrapper": True}))
    with torch._inductor.config.patch(force_disable_caches=True):
        codes = [run_and_get_code(step, *data[0])[1] for step in steps]
    assert ["inductor_entry = " in "".join(code) for code in codes] == [False, True]
    losses = [step(*data[1]) for step in steps]
    assert_same(*losses)
    assert_same(*(step.model.state_dict() for step in steps))


@pytest.mark.long
def test_options_reach_inductor():
    net = nn.Linear(2, 2)
    step = apexfx.train_step(net, F.mse_loss, SGD(net.parameters(), lr=0.1), opt_level="O0",
                             inner_options={"size_asserts": False})
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        _, [code] = run_and_get_code(step, torch.ones(1, 2), torch.ones(1, 2))
    assert "assert_size_stride(" not in code and "call(" in code


@pytest.mark.long
def test_sizes_and_numbers_that_change_are_inputs_of_a_step_in_cpp():
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    theirs = copy.deepcopy(model)
    step = apexfx.train_step(model, objective=lambda model, x, factor: (model(x) * factor).square().sum(), opt_level="O0",
                             optimizer=SGD(model.parameters(), lr=0.01), dynamic=True, inner_options={"cpp_wrapper": True})
    optimizer = SGD(theirs.parameters(), lr=0.01)
    for size, factor in ((6, 0.5), (7, 0.25)):
        x = torch.randn(size, 8)
        step(x, factor)
        take_step(optimizer, (theirs(x) * factor).square().sum())
    assert_same(model.state_dict(), theirs.state_dict(), **ROUNDING)


@pytest.mark.parametrize(("of_step", "of_torch"), [(True, False), (None, True)])
def test_no_profile_of_kernels_that_are_called_from_cpp(of_step, of_torch):
    step = make(inner="inductor", inner_options={"cpp_wrapper": True} if of_step else {})
    with torch._inductor.config.patch(cpp_wrapper=of_torch), pytest.raises(ValueError, match="profile a step without it"):
        step.report.profile(step, *batches(1)[0])


def test_gradients_are_kept_averaged_unscaled_and_clipped():
    step = make(SGD, {"lr": 0.0}, keep_grads=True, max_grad_norm=0.05, loss_scale=4096.0)
    reference = copy.deepcopy(step.model)
    [(inputs, targets)] = batches(1)
    step(inputs, targets)
    F.cross_entropy(reference(inputs), targets).backward()
    nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    for p, q in zip(step.model.parameters(), reference.parameters()):
        assert_same(p.grad, q.grad, **ROUNDING)


def test_a_scheduler_changes_the_learning_rate_and_compiles_nothing(recwarn):
    data, step = batches(4) * 3, make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(step.optimizer, 0.9)
    reference = net()
    optimizer = AdamW(reference.parameters(), lr=0.01)
    theirs = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for inputs, targets in data:
        step(inputs, targets)
        scheduler.step()
        take_step(optimizer, F.cross_entropy(reference(inputs), targets))
        theirs.step()
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert len(step.report.graphs) == 1 and not any("lr_scheduler" in str(w.message) for w in recwarn)


# ---- loss scale ------------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_clips_by_itself():
    class Clips(RMSprop):
        max_grad_norm = 0.1

        def step(self, closure=None):
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.max_grad_norm)
            return super().step(closure)

    step, data = make(Clips), batches(2)
    train_on(step, data)
    assert_same(step.model.state_dict(), eager(Clips, {"lr": 0.01}, data)[0].state_dict())


@table(1, "optimizer", [AdamW, FusedAdam, RMSprop])
def test_the_scale_is_that_of_a_grad_scaler(optimizer):
    step = make(optimizer, loss_scale="dynamic", model=net().eval())
    reference = net().eval()
    theirs = optimizer(reference.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for place, (inputs, targets) in enumerate(batches(8)):
        if place in (1, 2, 5):
            inputs[0, 0, 0, 0] = float("inf")
        step(inputs, targets)
        theirs.zero_grad()
        scaler.scale(F.cross_entropy(reference(inputs), targets)).backward()
        scaler.step(theirs)
        scaler.update()
        assert step.loss_scale == scaler.get_scale()
    assert step.skipped == 3
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


@pytest.mark.parametrize("num_seeds, length", [(100, 12), pytest.param(10_000, 24, marks=pytest.mark.long)])
def test_the_scale_is_that_of_an_automaton(num_seeds, length, monkeypatch):
    for seed in range(num_seeds):
        draw = random.Random(seed)
        for name, drawn in (("MAX_SCALE", 2.0 ** draw.randint(8, 20)), ("GROWTH_FACTOR", draw.choice((2.0, 4.0))),
                            ("BACKOFF_FACTOR", draw.choice((0.5, 0.25))), ("GROWTH_INTERVAL", draw.randint(1, 5))):
            monkeypatch.setattr(loss_scale, name, drawn)
        update = ApplyUpdate("sgd_", 0, 2, (), "lr", None, (0.0, 0.0, 0.0, False, False, False))
        names = ("lr", "loss_scale", "growth_tracker", "skips")
        plan = registered(Plan((LossScale(), Norm(skips=True), update), tuple((name, None) for name in names)))
        automaton = Automaton(2.0 ** draw.randint(0, 8), loss_scale.GROWTH_INTERVAL, MIN_SCALE, loss_scale.MAX_SCALE,
                              loss_scale.GROWTH_FACTOR, loss_scale.BACKOFF_FACTOR)
        params, updates = [torch.zeros(3), torch.zeros(2, 2)], 0
        scalars = [torch.tensor(1.0), torch.tensor(automaton.scale), torch.tensor(0, dtype=torch.int32), torch.zeros(2)]
        for _ in range(length):
            grads = [torch.full_like(p, -automaton.scale) for p in params]  # an update adds one to each element
            finite = draw.random() < 0.6
            if not finite:
                flat = draw.choice(grads).view(-1)
                flat[draw.randrange(len(flat))] = draw.choice((math.inf, -math.inf, math.nan))
            automaton.step(not finite)
            updates += finite
            torch.ops.apexfx.apply_gradients(params, grads, scalars, plan.text)
            assert [scalars[1].item(), scalars[2].item(), *scalars[3].tolist()] == \
                [automaton.scale, automaton.good, automaton.skips, automaton.in_a_row], f"seed {seed}"
            assert all((p == updates).all() for p in params), f"seed {seed}"


@pytest.mark.long
def test_a_scale_that_backs_off_for_long_can_still_be_divided_by():
    step, [(inputs, targets)] = make(loss_scale="dynamic", model=net().eval()), batches(1)
    for factor in [math.nan] * 50 + [1.0]:
        step(inputs * factor, targets)
    assert step.skipped == 50 and step.loss_scale == MIN_SCALE
    assert step.updated and all(p.isfinite().all() for p in step.model.parameters())


def test_float16_has_a_dynamic_scale_and_bfloat16_none():
    step = make(opt_level="O2", dtype="float16")
    for batch in batches(6):
        loss = step(*batch)
    assert step.loss_scale == 2.0**16 and step.skipped == 0 and loss.isfinite()
    assert make(opt_level="O2", dtype="bfloat16").loss_scale == 1.0


@pytest.mark.long
def test_skips_in_a_row_are_said(caplog):
    step = make(model=net().eval(), loss_scale="dynamic")
    [(inputs, targets)] = batches(1)
    inputs[0, 0, 0, 0] = float("nan")
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            step(inputs, targets)
    assert len([r for r in caplog.records if "steps in a row were skipped" in r.message]) == 1
    assert "input 'batch[0]' is not finite (nan)" in caplog.text


# ---- precision -------------------------------------------------------------------------------------------------------------


def test_the_model_is_half_and_the_loss_is_not():
    class Methods(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 4)

        def encode(self, x):
            return self.body(x).tanh()

        def forward(self, x):
            return self.head(self.encode(x))

    model = Methods()

    def objective(m, x):
        y = m(x)
        return (y - x).square().mean() + m.encode(x).square().mean(), {"output": y}

    step = apexfx.train_step(model, optimizer=AdamW(model.parameters()), objective=objective, opt_level="O2", inner="eager")
    loss, rest = step(torch.randn(5, 4))
    assert loss.dtype == torch.float32 and not rest["output"].requires_grad
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    text = step.report.code(stage="step")
    products = [line for line in text.splitlines() if "aten.addmm" in line or "aten.mm" in line]
    assert products and all('"bf16[' in line for line in products)
    assert all('"f32[' in line for line in text.splitlines() if "aten.mean" in line or "aten.sub" in line)


def test_what_a_container_of_a_traceable_batch_norm_computes_is_half():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.weight = nn.BatchNorm1d(4, momentum=None), nn.Parameter(torch.eye(4))

        def forward(self, x):
            return self.norm(x) @ self.weight

    model = nn.Sequential(nn.Linear(72, 4), Block())
    step = apexfx.train_step(model, lambda y, t: F.cross_entropy(y, t), AdamW(model.parameters()), opt_level="O2",
                             dtype="bfloat16", inner="eager")
    inputs, targets = batches(1)[0]
    step(inputs.flatten(1), targets)
    products = [line for line in step.report.code(stage="step").splitlines() if "aten.mm" in line or "aten.addmm" in line]
    assert len(products) == 5 and all('"bf16[' in line for line in products)


def test_half_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 16), nn.Tanh(), nn.Linear(16, 3))
    step = make(FusedAdam, {"lr": 0.01, "master_weights": True}, model=model, opt_level="O3", dtype="bfloat16")
    reference = copy.deepcopy(model)
    theirs = FusedAdam(reference.parameters(), lr=0.01, master_weights=True)
    start = [p.detach().float() for p in model.parameters()]
    for inputs, targets in batches(4):
        step(inputs, targets)
        take_step(theirs, F.cross_entropy(reference(inputs.bfloat16()).float(), targets))
    for p, q, first in zip(model.parameters(), reference.parameters(), start):
        master, wanted = step.optimizer.state[p]["master_param"], theirs.state[q]["master_param"]
        assert p.dtype == torch.bfloat16 and master.dtype == torch.float32 and torch.equal(p, master.bfloat16())
        assert (master - wanted).norm() < 0.2 * (wanted - first).norm()  # of what was learned, as bfloat16 gradients differ


@pytest.mark.parametrize("branches", [False, True], ids=["one graph", "in pieces"])
def test_what_a_half_model_appends_to_a_list_is_seen(branches):
    class Appends(nn.Linear):
        def forward(self, x, items):
            y = super().forward(x)
            if branches and y.sum() > 1e9:
                y = -y
            items.append(y)
            return y

    def objective(model, x):
        items = []
        return (model(x, items), items[0].float().square().mean())[1]

    torch.manual_seed(0)
    model = Appends(4, 4)
    reference = copy.deepcopy(model)
    step = apexfx.train_step(model, objective=objective, optimizer=SGD(model.parameters(), lr=0.1), opt_level="O3",
                             dtype="bfloat16", inner="eager", fallback="transform" if branches else None)
    assert_same(step(torch.ones(8, 4)), objective(reference, torch.ones(8, 4)).detach(), rtol=0.02, atol=0.02)
    if not branches:
        for stage in ("forward", "step"):
            assert "check_unwritten" not in step.print_readable(stage=stage, print_output=False)


# ---- checkpoints -----------------------------------------------------------------------------------------------------------


def test_a_step_resumes_bitwise_from_its_own_checkpoint(tmp_path):
    data = batches(6)
    step = make(loss_scale="dynamic")
    train_on(step, data[:3])
    torch.save(step.state_dict(), tmp_path / "checkpoint.pt")
    resumed = make(loss_scale="dynamic")
    resumed.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    for batch in data[3:]:
        step(*batch)
        resumed(*batch)
    assert_same(resumed.state_dict(), step.state_dict())


@pytest.mark.long
def test_a_checkpoint_in_the_middle_of_an_accumulation_is_refused():
    step = make(accumulate=2)
    [batch] = batches(1)
    step(*batch)
    with pytest.raises(RuntimeError, match="after 1 of 2 calls that accumulate"):
        step.state_dict()
    step(*batch)
    step.state_dict()


def test_what_is_no_state_of_this_step_is_refused():
    step = make(loss_scale="dynamic")
    with pytest.raises(ValueError, match=r"what state_dict\(\) of a step returns\. Load what a loop has saved into the model"):
        step.load_state_dict({"model": {}})
    state = step.state_dict()
    with pytest.raises(ValueError, match=r"returns\. Load what .* Given was .*; 'model' missing$"):
        step.load_state_dict({name: held for name, held in state.items() if name != "model"})
    with pytest.raises(ValueError, match=r"Give it what is in 'step'\. Given was 'schedule', 'step'; .* missing"):
        step.load_state_dict({"step": state, "schedule": {}})
    with pytest.raises(ValueError, match=r"Given was {}, which is what state_dict\(full=True\) returns on all ranks but"):
        step.load_state_dict({})
    of_loop = {"model": state["model"], "optimizer": state["optimizer"], "epoch": 3}
    with pytest.raises(ValueError, match=r'shares; or give it {"scaler": {}, \*\*saved, "num_ranks": 1}\. Given was'):
        step.load_state_dict(of_loop)
    with pytest.raises(ValueError, match="with epoch as 3, .* without an epoch and the like"):
        step.load_state_dict({"scaler": {}, **of_loop, "num_ranks": 1})
    of_model = step.model.state_dict()
    for prefix, cure in (("", "Load what a loop has saved"), ("module.", "Load .*; the names in state are .* under DDP")):
        with pytest.raises(ValueError, match=rf"returns\. {cure} .* Given was '{prefix}0.weight', .* and 5 more; 'model', "):
            step.load_state_dict({prefix + name: held for name, held in of_model.items()})
    with pytest.raises(ValueError, match=r"shares; the names in state\['net'\] are .*\(state\['net'\], 'module.'\)\. Given"):
        step.load_state_dict({"net": {f"module.{name}": held for name, held in of_model.items()}, "optimizer": {}, "epoch": 1})
    wrapper = nn.ModuleDict({"module": net()})
    of_wrapper = apexfx.train_step(wrapper, objective=lambda model, *_: 0.0, optimizer=SGD(wrapper.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"which the step shares\. Given was"):  # its own names
        of_wrapper.load_state_dict({"net": wrapper.state_dict(), "epoch": 1})
    with pytest.raises(ValueError, match="scaler, of a loss scale: 'loss_scale' has the shape "):
        step.load_state_dict({**make().state_dict(), "scaler": {"loss_scale": torch.ones(3)}})
    before = copy.deepcopy(step.state_dict())
    groups = [{"params": [torch.zeros(1)]}, {"params": [torch.zeros(1)]}]
    other = {**step.state_dict(), "optimizer": SGD(groups, lr=0.1).state_dict()}
    with pytest.raises(ValueError, match=r"has 2 parameter groups, of \[1, 1\] parameters, and AdamW .* has 1, of \[7\]"):
        step.load_state_dict(other)
    assert_same(step.state_dict(), before)


@table(2, "saved, loads, scale", [
    ({"loss_scale": "dynamic"}, {}, 1.0), ({}, {"loss_scale": "dynamic"}, 2.0**16),
    ({"loss_scale": "dynamic"}, {"loss_scale": 128.0}, 128.0), ({"loss_scale": 128.0}, {"loss_scale": "dynamic"}, 128.0),
    ({"loss_scale": 128.0}, {"loss_scale": 4.0}, 4.0),
    (torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100), {"loss_scale": "dynamic"}, 64.0),
    (torch.amp.GradScaler("cpu", init_scale=64.0), {}, 1.0),
], ids=["dynamic to none", "none to dynamic", "dynamic to static", "static to dynamic", "static to static",
        "scaler to dynamic", "scaler to none"])
def test_the_state_of_another_loss_scale_is_loaded_as_far_as_it_fits(saved, loads, scale, caplog):
    state = make(**saved if isinstance(saved, dict) else {}).state_dict()
    if not isinstance(saved, dict):
        saved.scale(torch.ones(()))
        state["scaler"] = saved.state_dict()
    step, (x, y) = make(**loads), batches(1)[0]
    if "loss_scale" in loads:  # what the state lacks begins anew
        step(x * math.nan, y)
    step.load_state_dict(state)
    assert step.loss_scale == scale and step.skipped == 0
    assert ("had {'growth_interval': 100}" in caplog.text) == (not isinstance(saved, dict) and scale == 64.0)
    step(x, y)


@table(1, "saved, loads, lacks", [(SGD, AdamW, "betas|step"), (AdamW, SGD, "momentum")])
def test_the_state_of_another_optimizer_is_refused(saved, loads, lacks):
    state, step = make(saved), make(loads)
    state(*batches(1)[0])
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(ValueError, match=f"has no '({lacks})', which {loads.__name__} keeps"):
        step.load_state_dict(state.state_dict())
    assert_same(step.state_dict(), before)


# ---- errors ----------------------------------------------------------------------------------------------------------------


def breaks(y, t):
    torch._dynamo.graph_break()
    return F.cross_entropy(y, t)


def test_a_loss_that_cannot_train_is_refused_and_nothing_has_changed():
    model = net()
    optimizer = AdamW(model.parameters())
    step = apexfx.train_step(model, breaks, optimizer, opt_level="O0", inner="eager", loss_scale="dynamic")
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.loss_scale))
    with pytest.raises(RuntimeError, match="cannot be captured as one graph: .*graph_break"):
        step(*batches(1)[0])
    assert_same((model.state_dict(), optimizer.state_dict(), step.loss_scale), before)
    assert not optimizer.state
    step.objective.loss_fn = F.cross_entropy  # what is compared does change where a step is done
    step(*batches(1)[0])
    assert optimizer.state and not torch.equal(model[6].weight, before[0]["6.weight"])


@pytest.mark.long
def test_a_loss_scale_is_float32_whatever_number_is_given():
    torch.set_default_dtype(torch.float64)
    try:
        step = make(loss_scale=128)
        assert [tensor.dtype for tensor in step.state_dict()["scaler"].values()] == [torch.float32] * 2
    finally:
        torch.set_default_dtype(torch.float32)
    whole, reference = make(loss_scale=128), make(loss_scale=128.0)
    for batch in batches(2):
        whole(*batch)
        reference(*batch)
    assert whole.loss_scale == 128.0
    assert_same(whole.model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("options, message", [
    ({"loss_scale": "static"}, "loss_scale='static' was given"), ({"loss_scale": 1e-40}, "holds the reciprocal"),
    ({"loss_scale": 1e39}, "holds the reciprocal"), ({"max_grad_norm": -1}, "max_grad_norm=-1 was given"),
    ({"accumulate": 0}, "accumulate=0 was given"), ({"skip": ["unscale_clip_update"]}, "would train nothing"),
    ({"skip": ["bucket_allreduce"]}, "would train on its own gradients"),
    ({"opt_levle": "O1"}, "did you mean 'opt_level'"), ({"max_grad_nrom": 1.0}, "did you mean 'max_grad_norm'"),
    ({"objective": F.cross_entropy}, "loss_fn= or objective="),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**options)


def test_two_clips_are_refused():
    with pytest.raises(ValueError, match="clips to max_grad_norm=1.0 itself"):
        make(FusedLAMB, {}, max_grad_norm=0.5)


# ---- the graph -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_graph_is_printed_and_named():
    safeguard = apexfx.Safeguard(spike_factor=8.0)
    step = make(max_grad_norm=1.0, loss_scale="dynamic", safeguard=safeguard, ema=apexfx.EMA())
    step(*batches(1)[0])
    captured = step.print_readable(after="captured", print_output=False)
    final = step.print_readable(print_output=False)
    assert "apexfx.apply_gradients" in captured and "apexfx.apply_gradients" not in final
    for name in ("loss_scale", "growth_tracker", "_4_weight_exp_avg_sq", "adam_", "multi_tensor_l2norm", "_amp_update_scale_"):
        assert name in final, name
    assert "unscale_clip_update" in str(step.report) and "+" in step.report.diff("unscale_clip_update")
    for forbidden in ("_local_scalar_dense", "aten.nonzero", "aten.item"):
        assert forbidden not in final


def test_a_step_says_in_a_line_what_it_is():
    step = make(safeguard=True, ema=apexfx.EMA(0.5), max_grad_norm=1.0, accumulate=2)
    options = "O0, safeguard, inner=eager, max_grad_norm=1.0, accumulate=2, EMA(decay=0.5)"
    assert str(step.report).startswith(f"apexfx report ({options}): no graph yet")
    assert repr(step) == f"TrainStep(Sequential, AdamW, {options}, 1 rank): no graph"
    step(*batches(1)[0])
    assert repr(step).endswith(": 1 graph")


def test_options_of_a_step_cannot_be_set():
    step = make(max_grad_norm=1.0)
    for name in ("max_grad_norm", "accumulate", "opt_level", "ema"):
        with pytest.raises(AttributeError, match=rf"step\.{name} = 3 was set, .*make a new step"):
            setattr(step, name, 3)
    for name, other in (("model", net()), ("optimizer", SGD(step.model.parameters(), lr=0.1)), ("objective", len)):
        setattr(step, name, before := getattr(step, name))
        with pytest.raises(AttributeError, match=rf"step\.{name} was set to another, .*make a new step"):
            setattr(step, name, other)
        assert getattr(step, name) is before
    with pytest.raises(AttributeError, match=r"another, Sequential\(\.\.\.\), and"):
        step.model = net()


def test_what_a_loop_calls_of_others_is_led_to_them():
    step = make()
    for name, said in {"eval": "call step.model.eval", "parameters": "call step.model.parameters", "no_sync": "accumulate=n",
                       **dict.fromkeys(("zero_grad", "backward", "step"), "leave it out")}.items():
        with pytest.raises(AttributeError, match=rf"a training step has no {name}\(\); .*{said}"):
            getattr(step, name)
        assert not hasattr(step, name)
    with pytest.raises(AttributeError, match="^'TrainStep' object has no attribute 'optimiser'$"):
        step.optimiser  # noqa: B018
    with pytest.raises(TypeError, match="can be neither copied nor pickled"):
        copy.deepcopy(step)


@pytest.mark.long
def test_a_model_in_eval_mode_is_said_once_behind_each_evaluation(caplog):
    model = net().insert(5, nn.Dropout())
    model[1].eval()  # a frozen batch norm is meant
    step = make(model=model)
    step(*batches(1)[0])
    assert "eval mode" not in caplog.text
    model.eval()
    train_on(step, batches(2))
    assert caplog.text.count("model in eval mode") == 1 and "eval mode" in str(step.report)
    model.train()
    step(*batches(1)[0])
    model.eval()
    step(*batches(1)[0])
    assert caplog.text.count("model in eval mode") == 2


class Forgets(apexfx.Pass):
    """Leave out the optimizer's op: the outputs of the graph are the same."""

    name, stage = "forgets", "step"

    def call(self, gm):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.apexfx.adam_.default):
            gm.graph.erase_node(node)
        return torch.fx.passes.infra.pass_base.PassResult(gm, True)


@pytest.mark.long
def test_what_a_pass_does_to_parameters_is_seen():
    step = make(verify="each", max_grad_norm=1.0, loss_scale=256.0)
    step(*batches(1)[0])
    step = make(passes=[Forgets()])
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(apexfx.PassError, match="'forgets': dropped a write to '"):
        step(*batches(1)[0])
    assert_same(step.state_dict(), before)


def test_a_pass_of_the_users_in_the_stage_step():
    class Counts(apexfx.Pass):
        """Count the optimizer's ops."""

        name, stage = "counts", "step"

        def call(self, gm):
            for node in gm.graph.find_nodes(op="call_function", target=torch.ops.apexfx.adam_.default):
                self.record(node, "an update")
            return torch.fx.passes.infra.pass_base.PassResult(gm, False)

    step = make(passes=[Counts()])
    step(*batches(1)[0])
    assert [match.detail for match in step.report.matched("counts")] == ["an update"]
    with pytest.raises(ValueError, match="only the graph of apexfx.train_step\\(\\)"):
        apexfx.transform(net(), passes=[Counts()])


@dataclasses.dataclass
class Batch:
    x: torch.Tensor


@table(2, "of", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}, lambda x: {"x": [x]}, Batch],
          ids=["tensor", "tuple", "list", "dictionary", "nested", "dataclass"])
def test_batches_of_new_objects_compile_nothing_at_half_inputs(of):
    class Reads(nn.Linear):
        def forward(self, x):
            while not isinstance(x, torch.Tensor):
                x = x.x if isinstance(x, Batch) else x["x"] if isinstance(x, dict) else x[0]
            return super().forward(x)

    model = Reads(4, 3)
    step = apexfx.train_step(model, objective=lambda m, x, y: F.cross_entropy(m(x), y), optimizer=SGD(model.parameters(), lr=0.1),
                             opt_level="O3", dtype="bfloat16", inner="eager")
    for _ in range(3):
        step(of(torch.randn(5, 4)), torch.randint(0, 3, (5,)))
    assert len(step.report.graphs) == 1


def test_accumulated_gradients_of_half_parameters_leave_the_graph():
    model, x = nn.Linear(4, 3), torch.randn(2, 5, 4)
    expected = copy.deepcopy(model)
    step = apexfx.train_step(model, objective=lambda m, x: m(x).square().sum(), optimizer=SGD(model.parameters(), lr=0.1),
                             opt_level="O3", dtype="bfloat16", inner="eager", accumulate=2, keep_grads=True)
    for each in x:
        step(each)
        (expected(each).square().sum() / 2).backward()
    assert_same([p.grad.float() for p in model.parameters()], [p.grad for p in expected.parameters()], rtol=0.03, atol=0.3)


def test_a_capture_inside_of_another_leaves_its_settings(monkeypatch):
    """What applies the gradients is compiled in the middle of the call that is."""
    before, compiling, left = dynamo_config.get_config_copy(), StepGraphs._compiling, []

    @contextlib.contextmanager
    def observed(graphs):
        with compiling(graphs):
            try:
                yield
            finally:
                left.append((dynamo_config.trace_autograd_ops, warnings.warn in dynamo_config.ignore_logging_functions))

    monkeypatch.setattr(StepGraphs, "_compiling", observed)
    make(accumulate=2).capture(*batches(1)[0])
    assert left == [(True, True)] * 2 and dynamo_config.get_config_copy() == before


@pytest.mark.long
def test_the_first_batch_is_not_kept():
    step, [(x, y)] = make(SGD), batches(1)
    step(x, y)
    kept = weakref.ref(x)
    del x
    gc.collect()
    assert kept() is None
