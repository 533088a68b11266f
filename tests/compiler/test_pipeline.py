"""Contracts, checks and verification of the pipeline, on small passes that keep or break them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.passes.infra.pass_base import PassResult

from apexfx import Pass, PassError
from apexfx.compiler.capture import annotate
from apexfx.compiler.pipeline import Pipeline
from apexfx.graph import nodes as afx
from apexfx.graph.printing import format_graph, to_python
from apexfx.passes.base import validate


def captured(function, *inputs):
    """Return the Dynamo graph of `function` and its inputs, annotated."""
    found = []

    def backend(gm, example_inputs):
        annotate(gm, example_inputs)
        found.append((gm, [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in example_inputs]))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return found[0]


class ReluToGelu(Pass):
    """Wrong on purpose: claims to be bitwise."""

    name = "relu_to_gelu"

    def call(self, gm):
        nodes = [n for n in gm.graph.nodes if n.target in (torch.relu, torch.nn.functional.relu)]
        for node in nodes:
            self.record(node, "relu -> gelu")
            node.target = torch.nn.functional.gelu
        return PassResult(gm, bool(nodes))


class ScaleTwice(Pass):
    """Multiply by two as an addition: bitwise equal.

    Before:  x * 2
    After:   x + x
    """

    name = "scale_twice"

    def call(self, gm):
        nodes = [n for n in gm.graph.find_nodes(op="call_function", target=torch.mul) if n.args[1] == 2]
        for node in nodes:
            with gm.graph.inserting_before(node):
                new = afx.call(gm.graph, torch.add, (node.args[0], node.args[0]), like=node)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            self.record(new, "x * 2 -> x + x")
        return PassResult(gm, bool(nodes))

    def why_no_match(self, gm):
        return "there is no multiplication by two"


class MatchesNothing(Pass):
    name = "matches_nothing"

    def call(self, gm):
        return PassResult(gm, False)


def model(x):
    return torch.relu(torch.mul(x, 2)).sum()


def test_a_pass_is_reported_with_its_provenance():
    gm, inputs = captured(model, torch.randn(3))
    report = Pipeline([ScaleTwice()], verify="each").run("forward", gm, inputs=lambda: [x.clone() for x in inputs])
    [done] = report.passes
    assert (done.added, done.removed) == ({"torch.add": 1}, {"torch.mul": 1})
    assert done.matches[0].detail == "x * 2 -> x + x" and done.matches[0].source.startswith("test_pipeline.py:")
    assert "%0 = torch.add(%x, %x) -> f32[3]" in format_graph(gm)
    assert done.code.startswith("# forward graph after scale_twice (")


def test_twice_equals_once():
    gm, _ = captured(model, torch.randn(3))
    Pipeline([ScaleTwice()]).run("forward", gm)
    once = format_graph(gm)
    report = Pipeline([ScaleTwice()]).run("forward", gm)
    assert format_graph(gm) == once and not report.passes[0].matches


def test_zero_matches_raise_under_strict_and_are_recorded_otherwise(caplog):
    gm, _ = captured(lambda x: x + 1, torch.randn(3))
    report = Pipeline([ScaleTwice()]).run("forward", gm)
    assert report.passes[0].warning == "there is no multiplication by two"
    assert not [r for r in caplog.records if r.levelname == "WARNING"]  # another graph of the model may have one
    with pytest.raises(PassError, match="rewrote nothing"):
        Pipeline([ScaleTwice()], strict=True).run("forward", gm)


def test_verify_each_names_the_pass_and_the_node():
    gm, inputs = captured(model, torch.randn(3))
    with pytest.raises(PassError, match=r"'relu_to_gelu' at node 'relu.*' .*leaves its tier 'bitwise'"):
        Pipeline([ReluToGelu()], verify="each").run("forward", gm, inputs=lambda: [x.clone() for x in inputs])


def test_a_pass_that_crashes_is_named():
    class Crashes(ScaleTwice):
        name = "crashes"

        def call(self, gm):
            return {}["nothing"]

    gm, _ = captured(model, torch.randn(3))
    with pytest.raises(PassError, match="'crashes': failed: KeyError"):
        Pipeline([Crashes()]).run("forward", gm)


@pytest.mark.parametrize(("attribute", "edited", "line"), [("target", torch.sub, "torch.sub(x, 2)"),
                                                           ("args", 3, "torch.mul(x, 3)")])
def test_an_edit_that_a_pass_does_not_tell_of_is_printed(attribute, edited, line):
    class Silent(Pass):
        name = "silent"

        def call(self, gm):
            [node] = gm.graph.find_nodes(op="call_function", target=torch.mul)
            setattr(node, attribute, edited if attribute == "target" else (node.args[0], edited))
            return PassResult(gm, False)

    gm, _ = captured(model, torch.randn(3))
    report = Pipeline([MatchesNothing(), Silent()]).run("forward", gm)
    unchanged, silent = (done.code.partition("\n")[2] for done in report.passes)
    assert unchanged == report.captured.partition("\n")[2] and "torch.mul(x, 2)" in unchanged
    assert line in silent and silent == to_python(gm)


def test_a_node_without_value_is_refused():
    class Careless(Pass):
        name = "careless"

        def call(self, gm):
            relu = next(n for n in gm.graph.nodes if n.target is torch.relu)
            with gm.graph.inserting_after(relu):
                new = gm.graph.call_function(torch.neg, (relu,))
            relu.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
            return PassResult(gm, True)

    gm, _ = captured(model, torch.randn(3))
    with pytest.raises(PassError, match=r"'careless' at node 'neg.*no meta\['val'\]"):
        Pipeline([Careless()]).run("forward", gm)


def test_stale_values_are_found_by_verify_final():
    class Stale(Pass):
        name = "stale"
        numeric = "changes_dtype"

        def call(self, gm):
            x = gm.graph.find_nodes(op="placeholder")[0]
            first = x.next
            with gm.graph.inserting_before(first):
                cast = afx.call(gm.graph, torch.ops.aten._to_copy.default, (x,), {"dtype": torch.bfloat16}, like=x)
                both = afx.call(gm.graph, torch.ops.aten.add.Tensor, (cast, cast), like=x)
            both.meta["val"] = x.meta["val"]
            first.replace_input_with(x, both)
            return PassResult(gm, True)

    gm, _ = captured(model, torch.randn(3))
    with pytest.raises(PassError, match="call apexfx.graph.refake"):
        Pipeline([Stale()], verify="final").run("forward", gm)


def test_contracts_are_checked_before_anything_runs():
    class Needy(ScaleTwice):
        name = "needy"
        needs = ("casts",)

    class Provider(ScaleTwice):
        name = "casts"

    class OfBackward(Provider):
        stage = "backward"

    class NeedyOfBackward(Needy):
        stage = "backward"

    class Nowhere(ScaleTwice):
        stage = "sideways"

    class Vague(ScaleTwice):
        numeric = "roughly"

    with pytest.raises(ValueError, match=r"needs \['casts'\]"):
        validate([Needy(), Provider()])
    validate([Provider(), Needy()])
    with pytest.raises(ValueError, match=r"needs \['casts'\]"):  # the backward stage runs last, whatever the places
        validate([OfBackward(), Needy()])
    with pytest.raises(ValueError, match=r"needs \['casts'\]"):
        validate([Needy()], [OfBackward])
    validate([NeedyOfBackward(), Provider()])
    validate([NeedyOfBackward()], [OfBackward])
    with pytest.raises(ValueError, match="stage='sideways', expected one of forward, backward, step"):
        validate([Nowhere()])
    with pytest.raises(ValueError, match="numeric='roughly'"):
        validate([Vague()])
    with pytest.raises(TypeError, match="expected instances of apexfx.Pass"):
        validate([print])


def test_a_pass_without_call_is_refused_at_once():
    class Misnamed(Pass):
        name = "misnamed"

        def run(self, gm):
            return gm

    with pytest.raises(TypeError, match=r"'misnamed' has nothing to run; define call\(self, gm\) -> PassResult in Misnamed"):
        validate([Misnamed()])


def test_printed_code_runs():
    gm, inputs = captured(model, torch.randn(3))
    report = Pipeline([ScaleTwice()]).run("forward", gm)
    for text in (report.captured, report.passes[0].code):
        scope = {}
        exec(text, scope)
        assert torch.equal(scope["GraphModule"]()(*inputs)[0], model(*inputs))
