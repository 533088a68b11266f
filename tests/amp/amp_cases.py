"""Small models, data and steps shared by the tests of amp."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from apexfx import amp, optimizers
from apexfx.amp._amp_state import AmpState, _amp_state
from apexfx.parallel.LARC import LARC


class ConvNet(nn.Module):
    """Convolution, affine batch norm, linear: (N, 1, 8, 8) -> (N, 4)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 6 * 6, 4)

    def forward(self, x):
        return self.fc(F.relu(self.norm(self.conv(x))).flatten(1))


def batch(seed=0, size=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def train(model, optimizer, steps=1, *, first=0, scaled=True):
    """Train as an Apex script does; return the losses."""
    losses = []
    for step in range(first, first + steps):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) if scaled else contextlib.nullcontext(loss) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def fresh_state():
    """Bring `_amp_state` back to what it is before any `initialize`."""
    handle = getattr(_amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()
    _amp_state.__dict__.clear()
    AmpState.__init__(_amp_state)


class CountReads(TorchDispatchMode):
    """Counts what reads a value on the host: each is a wait for the device on a GPU."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default,
             torch.ops.aten.nonzero.default)

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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


def made(opt_level="O2", make=lambda p: torch.optim.SGD(p, lr=0.1), **options):
    """Return a seeded, initialised model and its optimizer, the one of a name in `OPTIMIZERS` or one that `make` makes."""
    torch.manual_seed(0)
    model, make = ConvNet(), OPTIMIZERS.get(make, make)
    return amp.initialize(model, make(model.parameters()), opt_level=opt_level, verbosity=0, **options)


def assert_same(actual, expected):
    """Compare nested states: tensors to the bit and in dtype, everything else by value."""
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


class Automaton:
    """Loss scaling in plain Python numbers, as Apex and GradScaler document it; but the scale never reaches 0."""

    def __init__(self, scale, window, low, high, growth=2.0, backoff=0.5):
        self.scale, self.window, self.low, self.high, self.growth, self.backoff = scale, window, low, high, growth, backoff
        self.good, self.skips, self.in_a_row = 0, 0, 0

    def step(self, overflow):
        if overflow:
            self.scale, self.good = max(self.low or 2.0**-126, self.scale * self.backoff), 0
            self.skips, self.in_a_row = self.skips + 1, self.in_a_row + 1
            return True
        self.good, self.in_a_row = self.good + 1, 0
        if self.good == self.window:
            self.scale, self.good = min(self.high, self.scale * self.growth), 0
        return False
