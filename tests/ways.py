"""The ways to train a model by this package, each compared with eager torch."""

from __future__ import annotations

import contextlib
import random

import torch

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


def trained(way, make, loss, batches, level="O0", **options):
    """Return the losses and buffers that training by one way makes."""
    torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    update = updates(way, model, lambda model, x: loss(model(x), x), opt_level=level, **options)
    return [float(update(x)) for x in batches], [b.clone() for b in model.buffers()]


def check(way, make, loss, batches, level, **options):
    expected, got = trained("eager", make, loss, batches), trained(way, make, loss, batches, level, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if level == "O0" else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(got, expected, **tolerance)


def moved(way, make, loss, shape, level="O0", **options):
    """Return {name: how far a parameter went in a step by one way}."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    update = updates(way, model, lambda model, x: loss(model(x).float()), opt_level=level, **options)
    start = {name: p.detach().double() for name, p in model.named_parameters()}
    update(x)
    return {name: p.detach().double() - start[name] for name, p in model.named_parameters()}
