"""transform(): what is set on the source, or on the result, is there for both; their forwards are apart."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import apexfx
from tests.tables import table


class Scaled(nn.Module):
    """Reads a number, a flag of its class and its mode; a bound method and a hook of its own are among its attributes."""

    negative = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale, self.calls = nn.Linear(3, 4), 1.0, 0
        self.scaled = self.times_scale
        self.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def times_scale(self, x):
        return x * self.scale

    def forward(self, x):
        y = self.scaled(self.linear(x))
        y = y.exp() if self.training else y
        return -y if self.negative else y


def sets_a_number(model):
    model.scale = 3.0


def sets_a_flag(model):
    model.negative = True


def deletes_a_flag(model):
    model.negative = True
    del model.negative


def replaces_a_layer(model):
    model.linear = nn.Linear(3, 4)


def evaluates(model):
    model.eval()


FORMS = {form.__name__: form for form in (sets_a_number, sets_a_flag, deletes_a_flag, replaces_a_layer, evaluates)}
ENTRIES = {"transform": apexfx.transform,
           "backend": lambda model, **options: torch.compile(model, backend="apex", options=options),
           "copied": lambda model, **options: copy.deepcopy(apexfx.transform(model, **options)),
           "pickled": lambda model, **options: pickle.loads(pickle.dumps(apexfx.transform(model, **options)))}


def check(entry, form, onto, level, inner="eager"):
    source, x = Scaled(), torch.randn(5, 3)
    run = ENTRIES[entry](source, opt_level=level, inner=inner)
    run(x)
    changed = source if onto == "source" else run
    FORMS[form](changed)
    twin = Scaled()
    FORMS[form](twin)
    with torch.no_grad():
        for p, own in zip(twin.parameters(), changed.parameters()):
            p.copy_(own)
    expected, close = twin(x), {"rtol": 0.05, "atol": 0.02} if level == "O2" else {}
    torch.testing.assert_close(run(x), expected, **close)
    assert (run.training, run.scale, run.negative, run.calls) == (twin.training, twin.scale, twin.negative, 2)
    if entry in ("transform", "backend"):
        torch.testing.assert_close(source(x), expected)
        assert run.calls == source.calls == 3


@table(5, ("entry", "form", "onto", "level"), [
    (entry, form, onto, level) for level in ("O0", "O2") for form in FORMS for entry in ENTRIES for onto in ("source", "result")
    if onto == "result" or entry in ("transform", "backend")])
def test_what_is_set_on_one_is_there_for_both(entry, form, onto, level):
    check(entry, form, onto, level)


@pytest.mark.long
@pytest.mark.parametrize("form", ["sets_a_number", "evaluates"])
def test_what_is_set_on_the_source_reaches_code(form):
    check("transform", form, "source", "O0", inner="inductor")


def test_a_shallow_copy_is_set_apart():
    model = apexfx.transform(Scaled(), opt_level="O0", inner="eager")
    other = copy.copy(model)
    other.scale = 3.0
    assert model.scale == 1.0 and other.linear is model.linear


def test_a_source_that_holds_the_result_is_copied_with_it():
    source = Scaled()
    model = apexfx.transform(source, opt_level="O0", inner="eager")
    model.register_forward_hook(model.count)
    for copied in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        other = copied(model)
        other(torch.randn(5, 3))
        assert (other.calls, model.calls) == (2, 0)
        with pytest.raises(RuntimeError, match="copy or save the result in its place"):
            copied(source)


def test_copies_for_data_parallel_are_refused():
    model = nn.Sequential(apexfx.transform(Scaled(), opt_level="O0", inner="eager"))
    with pytest.raises(RuntimeError, match="nn.DataParallel runs copies of the model"):
        model[0]._replicate_for_data_parallel()  # as nn.parallel.replicate() calls it


def test_two_results_of_one_source_share_it_and_compile_apart():
    source, x = Scaled(), torch.randn(5, 3)
    runs = [apexfx.transform(source, opt_level=level, inner="eager") for level in ("O0", "O2")]
    runs[0].scale = 2.0
    for run in runs:
        run.eval()(x)
    assert not source.training and runs[1].scale == 2.0
    assert "bfloat16" not in str(runs[0].report.casts()) and runs[1].report.casts()


def test_the_forward_of_each_is_its_own():
    source, x = Scaled(), torch.randn(5, 3)
    run = apexfx.transform(source, opt_level="O0", inner="eager")
    before, graphs = source(x), run.forward
    run.forward = lambda x: 2 * graphs(x)
    source.compile(backend="eager", fullgraph=True)
    assert torch.equal(run(x), 2 * before) and torch.equal(source(x), before) and len(run.report.graphs) == 1
    del run.forward
    source.forward = lambda x: 3 * Scaled.forward(source, x)
    with pytest.raises(RuntimeError, match="the forward of the module that transform\\(\\) was given was set or deleted since"):
        run(x)
    assert torch.equal(apexfx.transform(source, opt_level="O0", inner="eager")(x), 3 * before)
