"""Training follows float32: levels x scales x batch norm x models, optimizers, losses x optimizers x accumulation."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from apexfx import amp, optimizers
from apexfx.parallel.LARC import LARC
from tests.amp.amp_cases import ConvNet, batch, fresh_state

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3),
    "fused_adam": lambda p: optimizers.FusedAdam(p, lr=2e-3),
    "fused_sgd": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "fused_lamb": lambda p: optimizers.FusedLAMB(p, lr=2e-3),
    "larc": lambda p: LARC(torch.optim.SGD(p, lr=0.05, momentum=0.9)),
}
STEPS = 6
DRIFT = 0.06  # six steps from one start: half runs drift from float32 by their roundings, 2^-8 for bfloat16, times the steps


def models(count, make=ConvNet):
    torch.manual_seed(0)
    return [make() for _ in range(count)]


def losses_of(nets, step, count):
    x, y = batch(step)
    return [sum(F.cross_entropy(net(x), y) for net in nets) * (0.5 + i) for i in range(count)]


def reference(plain, nets, num_losses, micro, *, delay=False):
    """Train without amp, a backward pass a loss; masters gather after each one, or with `delay` after the last."""
    history = []
    for step in range(STEPS):
        for optimizer in plain:
            optimizer.zero_grad()
        for part in range(micro):
            losses = losses_of(nets, step * micro + part, num_losses)
            for loss in losses:
                (loss / micro).backward(retain_graph=True)
                for optimizer in plain:
                    if isinstance(optimizer, WithMasters) and not (delay and part < micro - 1):
                        optimizer.gather()
        for optimizer in plain:
            optimizer.step()
        history.append(sum(losses).detach())
    return torch.stack(history)


class HalfNet(ConvNet):
    """O2 and O3 by hand: half inputs and parameters, float32 outputs; batch norm's parameters float32 with `keep`."""

    def __init__(self, keep):
        super().__init__()
        for module in (self.conv, self.fc) if keep else (self.conv, self.norm, self.fc):
            module.bfloat16()

    def forward(self, x):
        return super().forward(x.bfloat16()).float()


class WithMasters:
    """O2 by hand: an optimizer of float32 masters, which gather the gradients of half parameters."""

    def __init__(self, make, parameters):
        self.pairs = [(p, p.detach().float().requires_grad_() if p.dtype == torch.bfloat16 else p) for p in parameters]
        self.optimizer = make([master for _, master in self.pairs])
        self.pairs = [(p, master) for p, master in self.pairs if p is not master]

    def zero_grad(self):
        self.optimizer.zero_grad()

    def gather(self):
        for parameter, master in self.pairs:
            grad, parameter.grad = parameter.grad.float(), None
            master.grad = grad if master.grad is None else master.grad + grad

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for parameter, master in self.pairs:
            parameter.copy_(master)


def mixed(make, nets, num_losses, micro, *, delay, level, **options):
    count = len(nets)
    own = [make(net.parameters()) for net in nets]
    given = (nets, own) if count > 1 else (nets[0], own[0])
    amp.initialize(*given, opt_level=level, num_losses=num_losses, verbosity=0, **options)
    history = []
    for step in range(STEPS):
        for optimizer in own:
            optimizer.zero_grad()
        for part in range(micro):
            losses = losses_of(nets, step * micro + part, num_losses)
            for i, loss in enumerate(losses):
                last = i == num_losses - 1
                with amp.scale_loss(loss / micro, own, loss_id=i, delay_unscale=delay and part < micro - 1) as scaled:
                    scaled.backward(retain_graph=not last)
        for optimizer in own:
            optimizer.step()
        history.append(sum(losses).detach())
    return torch.stack(history)


def amp_options(scale, keep):
    options = {} if scale is None else {"loss_scale": scale}
    return options if keep is None else {**options, "keep_batchnorm_fp32": keep}


def check(name, level, scale, keep, count, num_losses, micro, delay, dtype=torch.bfloat16):
    make = OPTIMIZERS[name]
    plain = models(count)
    expected = reference([make(net.parameters()) for net in plain], plain, num_losses, micro)
    options = {**amp_options(scale, keep), "dtype": dtype}
    actual = mixed(make, models(count), num_losses, micro, delay=delay, level=level, **options)
    drift = ((actual - expected).abs() / expected.abs()).max().item()
    assert drift < DRIFT * torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps, drift


def check_by_hand(name, level, scale, keep, count, num_losses, micro, delay):
    make = OPTIMIZERS[name]
    keeps = level == "O2" if keep is None else keep
    by_hand = models(count, ConvNet if level == "O0" else lambda: HalfNet(keeps))
    masters = functools.partial(WithMasters, make) if level == "O2" else make
    expected = reference([masters(net.parameters()) for net in by_hand], by_hand, num_losses, micro, delay=delay)
    nets = models(count)
    actual = mixed(make, nets, num_losses, micro, delay=delay, level=level, **amp_options(scale, keep))
    assert torch.equal(actual, expected)
    for net, plain_net in zip(nets, by_hand):
        for parameter, plain_parameter in zip(net.parameters(), plain_net.parameters()):
            assert torch.equal(parameter, plain_parameter)


CASES = [
    (name, level, scale, keep, count, num_losses, micro, delay)
    for name, level, scale, keep, count, num_losses, (micro, delay) in itertools.product(
        OPTIMIZERS, ("O0", "O1", "O2", "O3"), (None, "128.0", "dynamic"), (None, True, False), (1, 2), (1, 2),
        ((1, False), (2, False), (2, True))
    )
    if keep is None or level in ("O2", "O3")
    # Several losses that share a scaler must not be scaled apart while their sum waits to be unscaled.
    if not (delay and num_losses > 1)
]


def each(cases):
    """Parametrize a test by lists of cases: every 61st in `make test`, and all, a hundred at a time, in `make test-long`."""
    rows = [pytest.param(cases[i:i + 100], marks=pytest.mark.long, id=str(i)) for i in range(0, len(cases), 100)]
    return pytest.mark.parametrize("cases", [pytest.param(cases[::61], id="some"), *rows])


def each_alone(cases):
    for case in cases:
        fresh_state()
        torch.manual_seed(0)
        yield case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each([case for case in CASES if case[1] == "O1"])
def test_training_at_o1_follows_float32(cases, dtype):
    for case in each_alone(cases):
        check(*case, dtype=dtype)


# Scales are powers of two: scaling and unscaling cost no bit, and what amp does can be done by hand, to the bit.
@pytest.mark.long
@each([case for case in CASES if case[1] != "O1"])
def test_training_is_what_is_done_by_hand(cases):
    for case in each_alone(cases):
        check_by_hand(*case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_scale_settles_and_the_model_learns(level, dtype):
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale="dynamic", verbosity=0)
    # In float16 a scale of 2^24 overflows the gradients, so that it has to back off.
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**24
    x, y = batch(0, 64)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    scale = amp._amp_state.loss_scalers[0].loss_scale()
    assert losses[-1] < 0.5 * losses[0] and (scale < 2.0**24) == (dtype == torch.float16)
