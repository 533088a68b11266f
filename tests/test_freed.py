"""What a user drops is freed: models, optimizers, steps, reports and graphs, under every option, and over real ranks."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import apexfx
from tests.backward_graphs import TwoGraphs
from tests.distributed.launch import run_ranks
from tests.own_optimizers import RMSprop
from tests.small_models import branching
from tests.tables import table


def net(**batch_norm):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, **batch_norm), nn.ReLU(), nn.Linear(8, 2))


def batch():
    return torch.randn(6, 4), torch.randint(2, (6,))


def with_own_forward(model):
    forward = model.forward
    model.forward = lambda x: forward(x) * 2
    return model


def referring_to_itself(model):
    model[1].holder = [model]
    return model


def step_of(model, *, optimizer=torch.optim.AdamW, calls=1, on_model=False, capture=False, objective=None, **options):
    optimizer = optimizer(model.parameters(), lr=0.01)
    loss_fn = F.cross_entropy if objective is None else None
    step = apexfx.train_step(model, loss_fn, optimizer, objective=objective, inner=options.pop("inner", "eager"), **options)
    if on_model:
        model.step = step
    for _ in range(calls):
        (step.capture if capture else step)(*batch())
    return [model, optimizer, step, step.report]


def step_calling_in_graph(model):
    in_graph = torch.compiler.allow_in_graph(lambda x: x if model is not None else -x)
    return step_of(model, objective=lambda m, x, y: F.cross_entropy(in_graph(m(x)), y), opt_level="O1")


def failing_step(model):
    held = step_of(model)
    with pytest.raises(ValueError, match="not a scalar"):
        step_of(model, objective=lambda m, x, y: m(x))
    return held


def transform_of(model, *, copies=False, capture=False, **options):
    model = apexfx.transform(model, inner=options.pop("inner", "eager"), **options)
    x, targets = batch()
    for each in (model, copy.deepcopy(model)) if copies else (model,):
        if capture:
            each.capture(x)
        F.cross_entropy(each(x), targets).backward()
    return [model, *model.modules(), model.report]


def amp_of(model, opt_level):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = apexfx.amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    inputs, targets = batch()
    with apexfx.amp.scale_loss(F.cross_entropy(model(inputs), targets), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return [model, optimizer]


MAKES = {
    "step": lambda: step_of(net(), opt_level="O1", verify="each", max_grad_norm=1.0),
    "step at O2, float16, accumulating": lambda: step_of(net(), opt_level="O2", dtype=torch.float16, accumulate=2, calls=3),
    "step with another optimizer": lambda: step_of(net(), opt_level="O0", optimizer=RMSprop, keep_grads=True),
    "step with a batch norm of ours": lambda: step_of(referring_to_itself(net(momentum=None))),
    "step that calls a function in its graph": lambda: step_calling_in_graph(net()),
    "step in pieces": lambda: step_of(net(), objective=branching(F.cross_entropy), fallback="transform"),
    "step held by its model": lambda: step_of(net(), on_model=True, calls=2),
    "step that is captured only": lambda: step_of(net(), capture=True),
    "step that fails": lambda: failing_step(net()),
    "transform": lambda: transform_of(net(), verify="each", fullgraph=True),
    "transform, captured": lambda: transform_of(net(), capture=True),
    "transform, its own forward": lambda: transform_of(with_own_forward(net())),
    "transform, copied": lambda: transform_of(net(momentum=None), copies=True),
    "transform, a graph break": lambda: transform_of(nn.Sequential(TwoGraphs())),
    "amp at O1": lambda: amp_of(net(), "O1"),
    "amp at O2": lambda: amp_of(net(), "O2"),
}


def graph_modules():
    return {id(thing) for thing in gc.get_objects() if issubclass(type(thing), fx.GraphModule)}


def assert_freed(make):
    before = graph_modules()
    held = [weakref.ref(thing) for thing in make()]
    apexfx.transform(nn.Linear(1, 1))  # the report of what was made last is kept
    for _ in range(3):  # what Dynamo holds of a function goes once the function has gone
        gc.collect()
    assert not [type(thing).__name__ for reference in held if (thing := reference()) is not None]
    assert not graph_modules() - before


@pytest.mark.parametrize("name", [
    name if name == "step" else pytest.param(name, marks=pytest.mark.long) for name in MAKES])
def test_what_is_dropped_is_freed(name):
    assert_freed(MAKES[name])


def parallel_of(model, **options):
    wrapped = apexfx.parallel.DistributedDataParallel(model, **options)
    inputs, targets = batch()
    F.cross_entropy(wrapped(inputs), targets).backward()
    return [model, wrapped]


OVER_RANKS = {"step": lambda: step_of(net(), ddp=True, sync_bn=True, accumulate=2, calls=2),
              "parallel": lambda: parallel_of(apexfx.transform(net(), inner="eager"))}


def freed(rank, world_size, what):
    assert_freed(OVER_RANKS[what])


@table(0, "what", OVER_RANKS)
def test_what_is_dropped_over_ranks_is_freed(what):
    run_ranks(freed, 2, what)
