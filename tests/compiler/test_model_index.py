"""Names found by identity: tensors and modules, however a program reaches them."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch import nn

import apexfx
from apexfx._torch import fake_process_group
from apexfx.compiler.model_index import ModelIndex, text_name
from tests.tables import table


class Holder:
    def __init__(self, layer):
        self.layer = layer


class Reached(nn.Module):
    """Four layers of one shape, each reached another way than it is registered."""

    def __init__(self, broken=False):
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(3, 3))
        self.add_module("again", self.a)  # a second name
        self.stages, self.holder, self.reference = [self.a], Holder(self.b), weakref.ref(self.c)
        self.partial = functools.partial(self.d)
        self.broken = broken

    def forward(self, x):
        x = self.holder.layer(self.stages[0](x))
        layer = self.reference()
        if self.broken:
            torch._dynamo.graph_break()
        return self.partial(layer(x))


@table(3, "name, broken", [(name, broken) for broken in (False, True) for name in ("a", "b", "c", "d", "again")])
def test_precision_reaches_the_module_of_that_name_and_no_other(name, broken):
    model = apexfx.transform(Reached(broken), opt_level="O1", inner="eager", precision={name: "float32"})
    model(torch.randn(2, 3))
    cast = {cast.tensor.partition(".")[0] for cast in model.report.casts() if cast.tensor.endswith("weight")}
    assert cast == set("abcd") - {"a" if name == "again" else name}
    assert not model.report.uncovered()


@pytest.mark.parametrize("broken", [False, True])
@table(1, "compile", [False, True])
def test_every_parameter_is_in_a_graph_under_its_registered_name(compile, broken, caplog):
    source = Reached(broken)
    if compile:
        torch.compile(source, backend="apex", options={"opt_level": "O0", "inner": "eager"})(torch.randn(2, 3))
        report = apexfx.last_report()
    else:
        model = apexfx.transform(source, opt_level="O0", inner="eager")
        model(torch.randn(2, 3))
        report = model.report
    names = [name for graph in report.graphs for name in graph.parameters]
    assert sorted(names) == sorted(name for name, _ in source.named_parameters())
    assert "no captured graph" not in caplog.text


def test_names_of_tied_and_nested_tensors():
    inner = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"x": nn.Sequential(inner), "y": inner})
    model.y.loop = nn.Module()
    model.y.loop._modules["up"] = model.y  # a module below itself
    index = ModelIndex(lambda: model)
    index.refresh()
    assert index.parameter(inner.weight) == ("x.0.weight", "y.weight")
    assert index.buffer(inner.running_mean) == ("x.0.running_mean", "y.running_mean")
    assert index.module(f"{id(inner)}@3", "L['self'].whatever") == ("x.0", "y")
    assert index.module("123", "L['self'].stages[0]") == ("stages.0",)
    assert index.parameter(torch.ones(3)) == ()


def test_a_tensor_that_is_gone_has_not_run():
    index, tensors = ModelIndex(), [torch.ones(1) for _ in range(100)]
    index.note_run(tensors)
    assert all(map(index.has_run, tensors))
    tensors.clear()
    later = [torch.ones(1) for _ in range(200)]  # at the addresses of those, some of them
    assert not any(map(index.has_run, later))


@pytest.mark.parametrize(("source", "name"), [
    ("L['self']._modules['layer1']._modules['0']._parameters['weight']", "self.layer1.0.weight"),
    ("L['stages'][0].__dict__['_parameters']['w']", "stages.0.w"),
    ("L['kwargs']['net'].head", "net.head"),
    ("G['f'].__closure__[1].cell_contents._parameters['bias']", "f.cell1.bias"),
])
def test_names_from_source_text(source, name):
    assert text_name(source) == name


def test_a_loose_parameter_is_an_input_and_one_of_no_model_keeps_its_name():
    loose = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]

    def scaled(x):
        return x * loose[0] + loose[1]

    torch.compile(scaled, backend="apex", options={"opt_level": "O0", "inner": "eager"})(torch.randn(2, 3))
    [graph] = apexfx.last_report().graphs
    assert len(set(graph.parameters)) == 2


class Norms(nn.Module):
    """Batch norms registered by name and called through a list, in a graph or in a frame left to eager."""

    def __init__(self, eager, momentum=0.1):
        super().__init__()
        self.a, self.b = nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3)
        self.norms, self.eager = [self.a, self.b], eager

    @torch._dynamo.disable
    def in_eager(self, x):
        return self.norms[0](x)

    def forward(self, x):
        return self.norms[1](self.in_eager(x) if self.eager else self.norms[0](x))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("eager", [False, True])
def test_batch_norms_called_through_a_list_are_synchronized(eager, momentum):
    with fake_process_group(2):
        model = apexfx.transform(Norms(eager, momentum), opt_level="O0", inner="eager", sync_bn=True)
        for _ in range(2):
            model(torch.randn(4, 3))
    sums = sum(graph.forward.lowered.count("_c10d_functional.all_reduce") for graph in model.report.graphs)
    assert sums == (1 if eager else 2)
    assert sum("batch norm 'a' was left to eager" in note for note in model.report.notes) == eager


def test_a_frame_of_its_own_is_its_module():
    """A graph break in a loop leaves a frame to eager; what it calls is captured apart."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x):
            return x @ self.weight

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Scale(), Scale()

        def forward(self, x):
            for scale in (self.a, self.b):
                x = scale(x)
                torch._dynamo.graph_break()
            return x

    model = apexfx.transform(nn.Sequential(Loop(), Scale()), inner="eager", precision={"0.b": "float32"})
    model(torch.randn(2, 3))
    assert {cast.tensor for cast in model.report.casts() if cast.tensor.endswith("weight")} == {"0.a.weight", "1.weight"}
    assert {cast.module for cast in model.report.casts()} >= {"0.a", "1"}
    [note] = model.report.notes
    assert note.startswith("apexfx: Dynamo broke the graph 1 time: Call to `torch._dynamo.graph_break()` at ")
    assert "test_model_index.py:" in note and ", in forward: torch._dynamo.graph_break(). What runs between" in note
