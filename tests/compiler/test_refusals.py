"""What is done to a transformed model afterwards, and does not go together with it: one sentence each, in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.fx.passes.infra.pass_base import PassResult

import apexfx
from tests.tables import table
from tests.transform_models import Net, images, transformed

EXPORTS = {
    "export": lambda m, x: torch.export.export(m, (x,)),
    "strict export": lambda m, x: torch.export.export(m, (x,), strict=True),
    "trace": lambda m, x: torch.jit.trace(m, (x,)),
    "script": lambda m, x: torch.jit.script(m),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("ran", [False, True])
def test_a_transformed_model_is_not_exported(export, ran):
    source, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    model = transformed(source)
    if ran:
        model(x)
    for given in (model, nn.Sequential(model)):
        with pytest.raises(Exception, match="cannot be exported; export the module that it was made from"):
            EXPORTS[export](given, x)
    exported = torch.export.export(source, (x,)).module()
    assert torch.equal(exported(x), model(x))  # and the source is, with the parameters of the transformed model


@pytest.mark.long
@pytest.mark.parametrize("outer", [lambda m: m, lambda m: nn.Sequential(m, nn.ReLU())])
def test_an_outer_compile_goes_around_the_transformed_model(outer):
    model, x = transformed(Net(), opt_level="O1"), images()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled = torch.compile(outer(model), backend="eager")
        for _ in range(2):
            out = compiled(x)
            out.sum().backward()
    assert torch.equal(out, outer(model)(x)) and len(model.report.graphs) == 1 and model.report.casts()


@table(1, "outer", [lambda m: m, lambda m: nn.Sequential(m, nn.ReLU())])
@pytest.mark.parametrize("ran", [False, True])
def test_options_of_an_outer_compile_are_not_lost(outer, ran):
    model, x = transformed(Net()), images()
    if ran:
        model(x)
    with pytest.raises(ValueError, match="is transformed already, so its options would not reach it"):
        torch.compile(outer(model), backend="apex", options={"opt_level": "O2", "inner": "eager"})(x)


@pytest.mark.parametrize("apply", [
    lambda model, x: torch.vmap(model)(x),
    lambda model, x: torch.func.jvp(model, (x,), (x,)),
    lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
], ids=["vmap", "jvp", "grad"])  # fmt: skip
@pytest.mark.parametrize("ran", [False, True])
def test_torch_func_is_led_to_the_source(apply, ran):
    source, x = nn.Linear(3, 2), torch.randn(4, 3)
    model = transformed(source)
    if ran:
        model(x)
    with pytest.raises(RuntimeError, match="apply them to the module that the transformed one was made from"):
        apply(model, x)
    apply(source, x)


class Doubled(torch.autograd.Function):
    """Have twice the gradient of the identity."""

    generate_vmap_rule = True
    forward = staticmethod(lambda x: x.clone())
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, grad: 2 * grad)


@table(1, "around", [
    lambda f, x: torch.vmap(f)(x), lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    lambda f, x: torch.func.vjp(f, x)[1](x)[0],
])  # fmt: skip
def test_a_function_under_torch_func_is_refused_which_would_lose_its_backward(around):
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x) + around(lambda row: Doubled.apply(nn.functional.linear(row, self.weight)), x)

    source, x = Model(3, 3), torch.randn(4, 3)
    expected, lost = source(x), "a graph would lose the backward of Doubled"
    with pytest.raises(ValueError, match=lost):
        transformed(source, opt_level="O0")(x)
    if "vmap" in around.__code__.co_names:  # which differentiates nothing itself
        with torch.no_grad():
            assert torch.equal(transformed(source, opt_level="O0")(x), expected)
    step = apexfx.train_step(source, lambda out: out.sum(), torch.optim.SGD(source.parameters()), opt_level="O0", inner="eager")
    with pytest.raises(ValueError, match=lost):
        step(x)


def test_a_backward_hook_fires_on_the_model_and_is_named_on_a_module_in_it():
    source, x, grads = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3, requires_grad=True), []
    model = transformed(source)
    model.register_full_backward_hook(lambda module, grad_input, grad_output: grads.append(grad_output[0]))
    model(x).sum().backward()
    assert torch.equal(grads[0], torch.ones(4, 2))
    source[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="submodule '0' has a backward hook, which Dynamo does not trace: register a hook on"):
        transformed(source)(x)
    with pytest.raises(RuntimeError, match="submodule '0' has a backward hook"):  # put on after the first call
        model(x)


class Same(apexfx.Pass):
    """Change nothing."""

    name = "same"

    def call(self, gm):
        return PassResult(gm, False)


class Other(Same):
    """Change nothing either, under the same name."""


class BuiltIn(Same):
    name = "sync_batchnorm"


class OfStep(Same):
    stage = "step"


class OfCode(Same):
    name, stage = "of_code", "code"


class OfBackward(Same):
    name, stage = "of_backward", "backward"


def by_transform(**options):
    return transformed(Net(), **options)


def by_compile(**options):
    return torch.compile(Net(), backend="apex", options={"opt_level": "O0", "inner": "eager", **options})(images())


@pytest.mark.parametrize("make", [by_transform, by_compile])
@pytest.mark.parametrize(("passes", "skip", "message"), [
    ((Same(), Other()), (), "two passes are named 'same'"),
    ((Same(), Same()), ("same",), "two passes are named 'same'"),
    ((BuiltIn(),), (), "BuiltIn is named 'sync_batchnorm', as a built-in pass is"),
    ((BuiltIn(),), ("sync_batchnorm",), "skip= would leave out both; give it another name"),
    ((OfStep(),), (), "stage='step', which only the graph of apexfx.train_step\\(\\) has"),
    ((OfCode(),), (), "stage='code', and inner='eager' makes no code"),
    ((print,), (), "expected instances of apexfx.Pass"),
])
def test_passes_that_cannot_be_told_apart_or_never_run(make, passes, skip, message):
    with pytest.raises(Exception, match=message):
        make(passes=passes, skip=skip)


def test_a_pass_may_need_a_built_in_one():
    class AfterCasts(Same):
        name, needs = "after_casts", ("precision",)

    model = transformed(Net(), passes=(AfterCasts(),))
    model(images())
    assert model.report.graphs[0].forward.passes[-1].name == "after_casts"
    with pytest.raises(ValueError, match="'after_casts' needs \\['precision'\\], and no such pass runs earlier"):
        transformed(Net(), passes=(AfterCasts(),), skip=("precision",))


def test_a_backward_pass_may_wait_for_a_backward():
    model = transformed(Net(), passes=(Same(), OfBackward()))
    with torch.no_grad():
        model(images())
    model(images()).sum().backward()
    assert [p.name for p in model.report.graphs[-1].second.passes] == ["of_backward"]
