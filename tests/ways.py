"""The ways to train a model by this package, each compared with eager torch."""

from __future__ import annotations

import random

import torch

import apexfx

WAYS, LEVELS = ("transform", "backend", "step"), ("O0", "O1", "O2", "O3")


def trained(way, make, loss, batches, level="O0", **options):
    """Return the losses and buffers that training by one way makes; way "eager" is plain torch."""
    torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"opt_level": level, "inner": "eager", **({} if level == "O0" else {"dtype": torch.bfloat16}), **options}
    if way == "step":
        step = apexfx.train_step(model, optimizer=optimizer, objective=lambda model, x: loss(model(x), x), **options)
        return [float(step(x)) for x in batches], [b.clone() for b in model.buffers()]
    run = {"eager": lambda: model, "transform": lambda: apexfx.transform(model, **options),
           "backend": lambda: torch.compile(model, backend="apex", options=options)}[way]()
    losses = []
    for x in batches:
        value = loss(run(x), x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses, [b.clone() for b in model.buffers()]


def check(way, make, loss, batches, level, **options):
    expected, got = trained("eager", make, loss, batches), trained(way, make, loss, batches, level, **options)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if level == "O0" else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(got, expected, **tolerance)
