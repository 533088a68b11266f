"""The ways to train a model by this package, each compared with eager torch."""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

import torch
from torch import Tensor

import apexfx
from apexfx import amp

WAYS, LEVELS = ("transform", "backend", "step"), ("O0", "O1", "O2", "O3")


def run_of(way, model, **options):
    """Return what runs the model by one way; way "eager" is plain torch."""
    if way == "backend":
        return torch.compile(model, backend="apex", fullgraph=options.pop("fullgraph", False), options=options)
    return apexfx.transform(model, **options) if way == "transform" else model


def updates(way, model, objective, *, lr=0.1, **options):
    """Return a function of a batch that takes a step of SGD by one way, and returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"opt_level": "O0", "inner": "eager", **options}
    if options["opt_level"] != "O0":
        options.setdefault("dtype", torch.bfloat16)
    if way == "step":
        return apexfx.train_step(model, optimizer=optimizer, objective=objective, **options)
    run = run_of(way, model, **options) if way != "amp" else amp.initialize(
        model, optimizer, opt_level=options["opt_level"], dtype=options.get("dtype"), loss_scale=1.0, verbosity=0)[0]

    def update(*batch):
        loss = objective(run, *batch)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) if way == "amp" else contextlib.nullcontext(loss) as scaled:
            scaled.backward()
        optimizer.step()
        return loss.detach()

    return update


class Trained(NamedTuple):
    """What training leaves: losses, buffers, how far each parameter went, and the number that torch draws next."""

    losses: list[float]
    buffers: list[Tensor]
    moved: dict[str, Tensor]
    drawn: float


def trained(way, make, loss, batches, level="O0", **options):
    """Train by one way; way "eager" is plain torch."""
    torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    update = updates(way, model, lambda model, x: loss(model(x), x), opt_level=level, **options)
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    losses = [float(update(x)) for x in batches]
    moved = {name: p.detach().double() - start[name] for name, p in model.named_parameters()}
    return Trained(losses, [b.clone() for b in model.buffers()], moved, torch.rand(()).item())


def check(way, make, loss, batches, level, lr=0.1, **options):
    """Compare with eager; the parameters at O3, rounded after each step, where `lr` takes them far beyond that."""
    expected, got = (trained(each, make, loss, batches, *rest, lr=lr, **more)
                     for each, rest, more in (("eager", (), {}), (way, (level,), options)))
    assert got.drawn == expected.drawn
    torch.testing.assert_close(got[:2], expected[:2], **{"rtol": 1e-5, "atol": 1e-5} if level == "O0" else
                               {"rtol": 0.05, "atol": 0.02})
    usual = torch.cat([new.flatten() for new in expected.moved.values()]).square().mean().sqrt()
    far = {name: float((got.moved[name] - new).square().mean().sqrt() / max(new.square().mean().sqrt(), usual))
           for name, new in expected.moved.items()}
    assert all(error < (1e-4 if level == "O0" else 0.1) for error in far.values()) or level == "O3" and lr < 1, far
