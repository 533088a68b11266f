"""The classes of modules of a transformed model during a call, and at no other time."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from apexfx.compiler.traceable import TraceableClasses
from apexfx.report.data import Report
from apexfx.testing import assert_close
from tests.transform_models import transformed


class Encoder(nn.Module):
    """A container whose forward sets an attribute, reads a flag and counts its calls: (N, T, 4) -> (N, T, 4)."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.alias, self.flag, self.calls, self.hidden = layer, layer, False, 0, None

    def forward(self, x):
        self.calls += 1
        y = self.layer(x)
        self.hidden = (y[1][0] if isinstance(y, tuple) else y).detach()
        y = y[0] if isinstance(y, tuple) else y
        return -y if self.flag else y


LAYERS = {"recurrent": lambda: nn.LSTM(4, 4), "cumulative": lambda: nn.BatchNorm1d(3, momentum=None)}


def model_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Encoder(LAYERS[kind]())))


@pytest.fixture(params=["recurrent", pytest.param("cumulative", marks=pytest.mark.long)])
def pair(request):
    """The source of a transformed model, the model, and an untouched copy of the source."""
    source = model_of(request.param)
    reference = copy.deepcopy(source)
    return source, transformed(source, verify="off"), reference


def compare(model, reference, x=None):
    x = torch.randn(5, 3, 4) if x is None else x
    assert_close(model(x), reference(x))
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.long
def test_an_attribute_that_the_forward_sets_is_set(pair):
    source, model, reference = pair
    before = list(map(id, source.modules()))
    for calls, training, graphs in ((1, True, 1), (2, True, 2), (3, True, 2), (4, False, 3), (5, True, 3)):
        for each in (model, reference):
            each.train(training)
        compare(model, reference)
        for each in (source, model):
            assert each[1][0].calls == calls
            assert_close(each[1][0].hidden, reference[1][0].hidden)
        assert len(model.report.graphs) == graphs  # the counter of calls costs one, other classes none
    assert list(map(id, source.modules())) == before and [*source.children()] == [*model.children()]
    assert not [name for module in source.modules() for name in vars(module) if "apexfx" in name]


@pytest.mark.long
def test_a_change_of_a_container_is_seen(pair):
    source, model, reference = pair
    compare(model, reference)
    for each, change in ((source, set_flag), (model, replace), (source, append), (model, delete)):
        change(each)
        change(reference)
        compare(model, reference)
        compare(model, reference)


def set_flag(model):
    model[1][0].flag = True


def replace(model):
    model[1][0].layer = nn.BatchNorm1d(3, momentum=None, affine=False)


def append(model):
    model[1].append(nn.Sequential(nn.Sigmoid(), nn.BatchNorm1d(3, momentum=None, affine=False)))


def delete(model):
    del model[1][0].alias


@pytest.mark.long
def test_a_module_that_is_added_to_a_model_without_any_is_traced_too():
    source = nn.Sequential(nn.Linear(4, 4))
    model, reference = transformed(source), copy.deepcopy(source)
    compare(model, reference)
    for each in (source, reference):
        torch.manual_seed(1)
        each.append(Encoder(nn.GRU(4, 4)))
    for _ in range(9):  # more than Dynamo compiles
        compare(model, reference)
        for each in (source, reference):
            torch.manual_seed(2)
            each[1].layer = nn.GRU(4, 4)
    assert len(model.report.graphs) == 3
    assert "apexfx.gru" in model.print_readable(graph=len(model.report.graphs) - 1, print_output=False)


def test_the_running_statistics_of_an_average_are_computed_anew():
    source, batches = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), [torch.randn(4, 3), torch.randn(4, 3)]
    averages = [torch.optim.swa_utils.AveragedModel(model) for model in (transformed(source), source)]
    for average in averages:
        torch.optim.swa_utils.update_bn(batches, average)  # sets momentum=None for as long as it runs
    compare(*averages, torch.randn(5, 3))
    assert averages[0].module[1].momentum == 0.1 and averages[0].module.report.graphs


@pytest.mark.long
def test_copies(pair):
    _, model, reference = pair
    compare(model, reference)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        expected = copy.deepcopy(reference)
        assert type(other[1][0].layer) is type(reference[1][0].layer) and other[1][0].alias is other[1][0].layer
        assert list(other.state_dict()) == list(reference.state_dict())
        other[1][0].flag = expected[1][0].flag = True
        compare(other, expected)
    assert not model[1][0].flag


class Replaces(Encoder):
    """Replaces its own layer while it runs, where Dynamo cannot look."""

    @torch._dynamo.disable
    def replace(self):
        self.layer = nn.BatchNorm1d(3, affine=False)

    def forward(self, x):
        y = super().forward(x)
        self.replace()
        return y


def test_a_module_that_the_forward_replaces_stays_replaced():
    source = nn.Sequential(Replaces(nn.BatchNorm1d(3, momentum=None)))
    model, first = transformed(source), source[0].layer
    model(torch.randn(5, 3, 4))
    assert source[0].layer.affine is False and source[0].alias is first and first.num_batches_tracked == 1


class Fails(Encoder):
    @torch._dynamo.disable
    def fail(self):
        raise KeyError("of the user's")

    def forward(self, x):
        super().forward(x)
        self.fail()


def test_a_forward_that_raises_leaves_the_users_modules():
    source = nn.Sequential(Fails(nn.LSTM(4, 4)))
    with pytest.raises(KeyError, match="of the user's"):
        transformed(source)(torch.randn(5, 3, 4))
    assert type(source[0].layer) is nn.LSTM and source[0].calls == 1


@pytest.mark.long
def test_a_model_transformed_twice_and_one_inside_of_another():
    source = model_of("recurrent")
    reference = copy.deepcopy(source)
    one, two = transformed(source), transformed(source)
    for model in (one, two, nn.Sequential(one), one):
        assert_close(model(x := torch.randn(5, 3, 4)), reference(x))
    assert type(source[1][0].layer) is nn.LSTM and source[1][0].calls == 4


def test_calls_that_overlap():
    """The first to begin changes the classes, the last to end takes that back."""
    model = model_of("recurrent")
    classes, encoder = TraceableClasses(None, Report({})), model[1][0]
    entered, leave = threading.Event(), threading.Event()

    def call():
        with classes.in_place(model):
            entered.set()
            leave.wait()

    thread = threading.Thread(target=call)
    with classes.in_place(model):
        thread.start()
        entered.wait()
    assert type(encoder.layer) is not nn.LSTM
    leave.set()
    thread.join()
    assert type(encoder.layer) is type(encoder.alias) is nn.LSTM


class Recursive(Encoder):
    """Calls the model that it is in again, where Dynamo cannot look, and changes the mode of its layer."""

    @torch._dynamo.disable
    def again(self, x):
        return self.model[0](x, once=False)

    def forward(self, x, once=True):
        self.layer.train(not once)
        y = super().forward(x)
        return self.again(y) if once else y


@pytest.mark.parametrize("kind", LAYERS)
def test_a_model_that_is_called_in_its_own_forward(kind):
    model = Recursive(LAYERS[kind]())
    reference, source = copy.deepcopy(model), model
    model = transformed(source)
    for each in (model, reference):
        each.__dict__["model"] = [each]
    compare(model, reference)
    assert source.layer.training and type(source.layer) is type(reference.layer)


class Unregistered(nn.Module):
    """Calls its layer by a list, beside the registry, and counts by a hook."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.layers = layer, [layer]
        layer.calls = 0
        layer.register_forward_hook(self.count)

    @staticmethod
    def count(layer, args, output):
        layer.calls += 1

    def forward(self, x):
        y = self.layers[0](x)
        return y[0] if isinstance(y, tuple) else y


@pytest.mark.long
def test_what_the_module_itself_sets_in_a_call_stays():
    source = nn.Sequential(Unregistered(nn.LSTM(4, 4)))
    model = transformed(source)
    for _ in range(2):
        model(torch.randn(5, 3, 4))
    assert source[0].layer.calls == 2


class Recomputed(nn.Module):
    """A checkpoint in a frame that Dynamo leaves to eager: it recomputes in the backward, after the call."""

    def __init__(self, layer):
        super().__init__()
        self.linear, self.layer = nn.Linear(4, 4), layer

    def tail(self, x):
        y = self.layer(x)
        return (y[0] if isinstance(y, tuple) else y).sin()

    @torch._dynamo.disable
    def hidden(self, x):
        return checkpoint(self.tail, x, use_reentrant=False)

    def forward(self, x):
        return self.hidden(self.linear(x))


def test_a_checkpoint_that_recomputes_after_the_call():
    for kind in LAYERS:
        source, x = Recomputed(LAYERS[kind]()), torch.randn(5, 3, 4)
        reference = copy.deepcopy(source)
        for model in (transformed(source), reference):
            model(x).sum().backward()
        for ours, theirs in zip([*source.parameters(), *source.buffers()], [*reference.parameters(), *reference.buffers()]):
            assert torch.equal(ours, theirs) and (not ours.requires_grad or torch.equal(ours.grad, theirs.grad))
