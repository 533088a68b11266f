"""Other modules that hold a layer's short way, and layers changed before `initialize` or in their class."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections import OrderedDict

import pytest
import torch
from torch import nn

import apexfx
from apexfx._torch import module_call
from tests.amp.layer_cases import B, Model, check_same, encoder, initialised


def own_copy(layer, **parameters):
    copied = layer._replicate_for_data_parallel()  # which needs GPUs as a part of nn.DataParallel
    copied._parameters = parameters
    return copied


@pytest.mark.parametrize("threaded", [True, False])
def test_a_replica_of_a_part_runs_its_own_weights(threaded):
    def use(part, x):
        replica = part._replicate_for_data_parallel()
        replica._modules["0"] = own_copy(part[0], weight=part[0].weight * 0, bias=part[0].bias * 0 + 7)
        if not threaded:
            return replica(x)
        out = []
        thread = threading.Thread(target=lambda: out.append(replica(x)))
        thread.start(), thread.join()
        return out[0]

    assert initialised(Model(nn.Sequential(nn.Linear(8, 8)), use))(torch.randn(4, 8)).eq(7).all()


def test_a_replica_inside_an_encoder_runs_its_own_weights_with_casts():
    def zero(model):
        layer = model.layer.layers[0]
        layer.linear2 = own_copy(layer.linear2, weight=nn.Parameter(torch.zeros(8, 16)), bias=nn.Parameter(torch.ones(8)))

    check_same(Model(encoder()), [torch.randn(2, 5, 8)], prepare=zero)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_copied_dict_runs_its_own_weights(keeps):
    model = initialised(Model(nn.Linear(8, 8)))
    original, copied = model.layer, nn.Linear.__new__(nn.Linear)
    copied.__dict__ = original.__dict__.copy()
    copied._parameters = {"weight": nn.Parameter(torch.zeros(8, 8)), "bias": None}
    model.layer = copied
    if not keeps:
        del original
        gc.collect()
    assert model(torch.randn(4, 8)).eq(0).all()


def test_transform_of_an_initialised_layer_runs_the_transform():
    model = initialised(nn.Sequential(nn.Linear(8, 8)))
    made = apexfx.transform(model[0], opt_level="O1", dtype=B, inner="eager")
    assert module_call(made) is None and module_call(model[0]) is not None
    made(torch.randn(4, 8))
    assert "linear" in str(made.report) or "addmm" in str(made.report)


@pytest.mark.parametrize("hooks", ["_forward_hooks", "_forward_pre_hooks"])
def test_hooks_in_a_new_dict_are_called(hooks):
    seen = []
    model = initialised(Model(nn.Linear(8, 8)))
    setattr(model.layer, hooks, OrderedDict())
    register = model.layer.register_forward_hook if hooks == "_forward_hooks" else model.layer.register_forward_pre_hook
    register(lambda layer, *args: seen.append(layer))
    model(torch.randn(4, 8))
    assert seen == [model.layer]


def unregister(layer, name):
    raw = getattr(layer, name)
    delattr(layer, name)
    setattr(layer, name + "_raw", raw)
    setattr(layer, name, raw.detach() * 2)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("name", ["weight", "bias", "in_proj_weight"])
@pytest.mark.parametrize("kind", ["linear", "layer_norm", "group_norm", "attention"])
def test_weights_that_are_plain_attributes(kind, name, late):
    if (kind == "attention") != name.startswith("in_proj"):
        return
    make = {"linear": lambda: nn.Linear(8, 8), "layer_norm": lambda: nn.LayerNorm(8),
            "group_norm": lambda: nn.GroupNorm(2, 8), "attention": lambda: nn.MultiheadAttention(8, 2)}  # fmt: skip
    model = Model(make[kind](), (lambda layer, x: layer(x, x, x)) if kind == "attention" else lambda layer, x: layer(x))
    change = lambda model: unregister(model.layer, name)  # noqa: E731
    if not late:
        change(model)
    check_same(model, [torch.randn(4, 8)], prepare=change if late else lambda model: None)


def test_an_own_forward_counts_beside_a_deleted_attribute():
    model = initialised(Model(nn.Linear(8, 8)))
    del model.layer.in_features
    own = model.layer.forward
    model.layer.forward = lambda x: own(x) * 0
    assert model(torch.randn(4, 8)).eq(0).all()


METHODS = {
    "_conv_forward": (nn.Conv2d, lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "_ff_block": (nn.TransformerEncoderLayer, encoder, (2, 5, 8)),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_replaced_in_the_class_runs_with_casts(name, monkeypatch):
    kind, make, shape = METHODS[name]
    seen, own = [], getattr(kind, name)

    def noted(self, *args):
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return own(self, *args)

    model = initialised(Model(make()))
    monkeypatch.setattr(kind, name, noted)
    model(torch.randn(shape))
    assert set(seen) == {B}


def test_a_forward_replaced_before_the_import_is_called():
    script = """
import torch
own = torch.nn.Linear.forward
torch.nn.Linear.forward = lambda self, x: own(self, x) * 0
from apexfx import amp
model = amp.initialize(torch.nn.Sequential(torch.nn.Linear(8, 8)), dtype=torch.bfloat16, verbosity=0)
assert model(torch.ones(2, 8)).eq(0).all()
torch.nn.Linear.forward = lambda self, x: own(self, x) * 0 + 3
assert model(torch.ones(2, 8)).eq(3).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
