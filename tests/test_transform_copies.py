"""transform(): copies and pickles of the result, and the state they are made of."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import types

import pytest
import torch
from torch import nn

import apexfx
from tests.tables import table
from tests.transform_models import Net, images, transformed


@pytest.mark.long
def test_deepcopy_is_independent():
    model = transformed(Net())
    x = images()
    model(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.conv.weight.zero_()
    assert model.conv.weight.abs().sum() > 0
    assert isinstance(other, Net) and other.report is not model.report
    assert not torch.equal(other.eval()(x), model.eval()(x))


@table(1, "how", ["pickle", "torch.save"])
def test_pickles(how):
    model = transformed(Net())
    x = images()
    expected = model.eval()(x)
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), expected) and len(loaded.report.graphs) == 1


class Locked(nn.Linear):
    """Holds what cannot be copied, and says so the way Python asks for."""

    def __init__(self):
        super().__init__(2, 2)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {k: v for k, v in super().__getstate__().items() if k != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()


def test_a_class_with_its_own_state_is_copied_its_own_way():
    model = transformed(Locked())
    x = torch.randn(3, 2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x)) and other.lock is not model.lock


class Counting(nn.Linear):
    """Counts its calls, in a hook that is a method of its own."""

    calls = 0

    def count(self, *_):
        self.calls += 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_hook_that_is_a_method_of_the_model_is_one_of_the_copy(copied):
    model = transformed(Counting(2, 2))
    model.register_forward_hook(model.count)
    other = copied(model)
    other(torch.randn(3, 2))
    assert (model.calls, other.calls) == (0, 1)


@pytest.mark.long
def test_to_double_and_load_state_dict_reach_the_graphs():
    model = transformed(Net())
    model(images())
    other = Net()
    model.load_state_dict(other.state_dict())
    x = images()
    assert torch.equal(model.eval()(x), other.eval()(x))
    model.double()
    assert model(x.double()).dtype == torch.float64


def test_copies_keep_a_forward_set_on_the_instance():
    source = nn.Linear(3, 3)
    source.forward = types.MethodType(lambda self, x: 100 * nn.functional.linear(x, self.weight), source)
    x = torch.ones(2, 3)
    model = apexfx.transform(source, opt_level="O0", inner="eager")
    other = copy.deepcopy(model)
    assert torch.equal(other(x), model(x)) and torch.allclose(model(x), 100 * (x @ source.weight.T))
    with torch.no_grad():
        other.weight.zero_()
    assert not other(x).any() and model(x).any()
