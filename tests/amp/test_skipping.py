"""A skipped step leaves everything as it was, to the bit, for any optimizer and without a read on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.amp.amp_cases import ConvNet, CountReads, batch, fresh_state, train
from apexfx import amp, optimizers
from apexfx.amp import host_mirror
from apexfx.parallel.LARC import LARC
from apexfx.testing import assert_close

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "host_counter": lambda p: HostCounter(p, lr=0.05),
    "fused_sgd": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "fused_adam": lambda p: optimizers.FusedAdam(p, lr=0.01),
    "fused_lamb": lambda p: optimizers.FusedLAMB(p, lr=0.01),
    "fused_novograd": lambda p: optimizers.FusedNovoGrad(p, lr=0.01),
    "larc": lambda p: LARC(torch.optim.SGD(p, lr=0.05, momentum=0.9)),
}


class HostCounter(torch.optim.Optimizer):
    """Counts its steps in Python numbers, in the state and in the group, and keeps a list."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["steps"] = state.get("steps", 0) + 1
                    state.setdefault("history", []).append(float(group["lr"]))
                    p.add_(p.grad, alpha=-group["lr"] / state["steps"])


@pytest.fixture(params=["host", "device"])
def flag(request, monkeypatch):
    """Whether the flag is at hand, as on the CPU, or known to the device only, as on a GPU."""
    if request.param == "device":
        monkeypatch.setattr(host_mirror, "HOST_DEVICES", frozenset())


def everything(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.detach().clone() for p in amp.master_params(optimizer)]))


def assert_same(actual, expected):
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected):
            assert_same(a, e)
    else:
        assert actual == expected


def made(name, opt_level, **options):
    torch.manual_seed(0)
    model = ConvNet()
    return amp.initialize(model, OPTIMIZERS[name](model.parameters()), opt_level=opt_level, verbosity=0, **options)


def overflow(model, optimizer):
    x, _ = batch()
    optimizer.zero_grad()
    model.eval()  # batch norm's statistics are no part of a step
    with amp.scale_loss(model(x).sum(), optimizer) as loss:
        (loss * float("inf")).backward()
    model.train()
    return optimizer.step()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_changes_nothing(name, opt_level, flag):
    model, optimizer = made(name, opt_level)
    before = everything(model, optimizer)
    assert overflow(model, optimizer) is None  # the very first step: no state was there
    assert_same(everything(model, optimizer), before)
    train(model, optimizer, 3)
    before = everything(model, optimizer)
    overflow(model, optimizer)
    overflow(model, optimizer)
    assert_same(everything(model, optimizer), before)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**13
    train(model, optimizer, 1)
    with pytest.raises(AssertionError):
        assert_same(everything(model, optimizer)[2], before[2])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_after_skips_equals_training_without(name, flag):
    model, optimizer = made(name, "O2")
    losses = train(model, optimizer, 3)
    expected = everything(model, optimizer)
    fresh_state()
    model, optimizer = made(name, "O2")
    overflow(model, optimizer)
    assert torch.equal(train(model, optimizer, 1), losses[:1])
    overflow(model, optimizer)
    train(model, optimizer, 2, first=1)
    assert_same(everything(model, optimizer), expected)


# torch's own loops over tensors may read `step` on the host, with or without amp: no more than alone is asked of them.
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam_fused", "adam_foreach", "fused_sgd", "fused_adam", "fused_lamb",
                                  "fused_novograd", "larc"])
def test_no_read_on_the_host_in_a_step(name, opt_level, flag):
    model, optimizer = made(name, opt_level, loss_scale="dynamic")
    own = CountReads()
    plain = ConvNet()
    bare = OPTIMIZERS[name](plain.parameters())
    with own:
        train(plain, bare, 3, scaled=False)
    with CountReads() as reads:
        train(model, optimizer, 2)
        overflow(model, optimizer)
    assert reads.count <= own.count
    if not name.startswith("adam_foreach"):
        assert reads.count == 0


class Ops(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name, kernel", [("momentum", "_fused_sgd_"), ("adam", "_fused_adam_")])
def test_a_fused_kernel_takes_the_place_of_copies_after_loading_too(name, kernel, opt_level, flag):
    model, optimizer = made(name, opt_level, loss_scale="dynamic")
    train(model, optimizer, 1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x, y = batch()
    with amp.scale_loss(torch.nn.functional.cross_entropy(model(x), y), optimizer) as loss:
        loss.backward()
    with Ops() as ops:
        optimizer.step()
    assert kernel in ops.names and "where" not in ops.names


def in_order(memory_format, name, **options):
    """Train one convolution whose momentum was saved in `memory_format`; return its weight."""
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3, bias=False)
    x = torch.randn(2, 3, 8, 8)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(x).square().sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = {k: v.to(memory_format=memory_format) if v.dim() else v for k, v in saved["state"][0].items()}
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **options)
    optimizer.load_state_dict(saved)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).square().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
    return model.weight.detach().clone()


# torch's fused kernels go through memory, so that a buffer of other strides than its parameter's would be read out of order.
@pytest.mark.parametrize("name", ["momentum", "adam", "fused_adam"])
def test_state_in_another_memory_format_keeps_its_order(name):
    expected = in_order(torch.contiguous_format, name, opt_level="O0", loss_scale="dynamic")
    fresh_state()
    assert_close(in_order(torch.channels_last, name, opt_level="O0", loss_scale="dynamic"), expected)


def reordered(tensor):
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def state_reordered(model, optimizer):
    for state in optimizer.state.values():
        state.update({key: reordered(value) for key, value in state.items()})


def gradient_reordered(model, optimizer):
    model.weight.grad = reordered(model.weight.grad)


def state_half(model, optimizer):
    model.weight.grad = None
    model.weight.data = model.weight.data.bfloat16()
    model.weight.grad = torch.ones_like(model.weight)


@pytest.mark.parametrize("name, kernel, change", [
    ("momentum", "_fused_sgd_", state_reordered), ("adam", "_fused_adam_", state_reordered),
    ("momentum", "_fused_sgd_", gradient_reordered), ("adam", "_fused_adam_", gradient_reordered),
    ("momentum", "_fused_sgd_", state_half), ("momentum", "_fused_sgd_", None), ("adam", "_fused_adam_", None),
])  # fmt: skip
def test_a_kernel_is_no_longer_lent_to_what_it_would_read_wrongly(name, kernel, change):
    model = torch.nn.Conv2d(3, 4, 3, bias=False)
    model, optimizer = amp.initialize(model, OPTIMIZERS[name](model.parameters()), verbosity=0)
    for i in range(4):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(2, 3, 8, 8)).square().sum(), optimizer) as loss:
            loss.backward()
        if i == 3 and change is not None:
            change(model, optimizer)
        with Ops() as ops:
            optimizer.step()
        assert (kernel in ops.names) == (i < 3 or change is None)


@pytest.mark.parametrize("name", ["momentum", "adam", "fused_adam"])
def test_a_step_that_raises_keeps_nothing(name, flag):
    model, optimizer = made(name, "O1")
    train(model, optimizer, 1)
    before = everything(model, optimizer)

    def fail(*args):
        raise KeyError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        overflow(model, optimizer)
    hook.remove()
    assert_same(everything(model, optimizer), before)
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("name", ["adam_fused", "fused_adam"])
def test_a_grad_scaler_keeps_its_own_flag(name):
    model, optimizer = made(name, "O0")
    before = everything(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model.eval()(batch()[0]).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if factor != 1.0:
            assert scaler.get_scale() == 2.0
            assert_same(everything(model, optimizer)[2], before[2])
    assert not torch.equal(everything(model, optimizer)[2][0], before[2][0])


def test_overflow_is_printed_at_the_step(flag, capsys):
    model, optimizer = made("sgd", "O1")
    amp._amp_state.verbosity = 1
    x, _ = batch()
    with amp.scale_loss(model(x).sum(), optimizer) as loss:
        (loss * float("nan")).backward()
    assert capsys.readouterr().out == ""
    optimizer.step()
    assert "Skipping step, loss scaler 0 reducing loss scale to 32768.0" in capsys.readouterr().out


def test_a_clear_flag_on_the_host_copies_nothing():
    model, optimizer = made("rmsprop", "O1")
    train(model, optimizer, 1)
    x, y = batch()
    with amp.scale_loss(torch.nn.functional.cross_entropy(model(x), y), optimizer) as loss:
        loss.backward()
    with Ops() as ops:
        optimizer.step()
    assert not {"where", "clone"} & ops.names


def test_overflow_without_a_step_skips_the_next_one():
    model, optimizer = made("sgd", "O1")
    before = everything(model, optimizer)
    x, _ = batch()
    with amp.scale_loss(model.eval()(x).sum(), optimizer) as loss:
        (loss * float("nan")).backward()
    optimizer.zero_grad()
    with amp.scale_loss(model(x).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert_same(everything(model, optimizer), before)


def test_static_scale_steps_even_on_infinities():
    model, optimizer = made("sgd", "O1", loss_scale=128.0)
    overflow(model, optimizer)
    assert not all(p.isfinite().all() for p in model.parameters())
