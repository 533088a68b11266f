"""transform(): the result is the model it was made from, in everything but how forward runs."""

from __future__ import annotations

import copy
import inspect
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.passes.infra.pass_base import PassResult

import apexfx
from apexfx._torch import tree_leaves
from apexfx.testing import assert_close
from tests.small_models import Temperature
from tests.tables import table
from tests.transform_models import Net, images, transformed
from tests.ways import run_of


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def pair():
    """A transformed model, and an untouched copy of its source."""
    model = Net()
    return transformed(model), copy.deepcopy(model)


def test_trains_bitwise_like_the_source(pair):
    model, reference = pair
    for _ in range(2):
        x = images()
        model(x, scale=2.0).square().mean().backward()
        reference(x, scale=2.0).square().mean().backward()
    for name, grad in gradients(reference).items():
        ours = gradients(model)[name]
        assert (grad is None) == (ours is None), name
        assert grad is None or torch.equal(grad, ours), name
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers()):
        assert torch.equal(ours, theirs), name


@table(1, "root", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_with_cumulative_average(track, root):
    source = nn.BatchNorm1d(3 if root else 4, momentum=None, track_running_stats=track)
    source = source if root else nn.Sequential(nn.Linear(3, 4), source)
    reference = copy.deepcopy(source)
    model = transformed(source, fullgraph=True)
    for place in range(3):
        x = torch.randn(6, 3)
        for each in (each for root in (model, reference) for each in root.modules() if isinstance(each, nn.BatchNorm1d)):
            each.track_running_stats = track and place != 1
        torch.testing.assert_close(model(x), reference(x))
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers()):
        torch.testing.assert_close(ours, theirs, msg=name)
    torch.testing.assert_close(model.eval()(x), reference.eval()(x))
    torch.testing.assert_close(copy.deepcopy(model.train())(x), reference.train()(x))


def test_evaluates_like_the_source(pair):
    model, reference = pair
    assert torch.equal(model.eval()(x := images()), reference.eval()(x))
    assert not model.training and not model.bn.training


@pytest.mark.long
def test_takes_other_batch_sizes_without_a_graph_each(pair):
    model, reference = pair
    for n in (4, 5, 6, 7):
        x = images(n)
        torch.testing.assert_close(model(x), reference(x))
    assert len(model.report.graphs) == 2  # one for the first size, one for any


def test_is_still_the_same_class_with_the_same_names(pair):
    model, reference = pair
    assert isinstance(model, Net)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in reference.named_modules()]
    assert inspect.signature(model.forward) == inspect.signature(reference.forward)


def test_optimizer_built_before_still_trains_it():
    source = Net()
    optimizer = torch.optim.SGD(source.parameters(), 0.1)
    model = transformed(source)
    before = source.conv.weight.detach().clone()
    model(images()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model.conv.weight, before) and model.conv.weight is source.conv.weight


def test_source_is_left_as_it_was():
    source = Net()
    kinds = {name: type(m) for name, m in source.named_modules()}
    model = transformed(source)
    model(images())
    assert {name: type(m) for name, m in source.named_modules()} == kinds
    assert type(source) is Net and "_apexfx" not in source.__dict__
    model.eval()
    assert source(images()).shape == (4, 10)


def test_hooks_on_the_model_fire(pair):
    model, _ = pair
    seen = []
    model.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    model(images())
    assert seen == [(4, 10)]


@pytest.mark.long
def test_hooks_on_submodules_fire_whenever_they_are_put_on():
    source = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3, momentum=None))  # the last is called by a copy
    model, x, seen = transformed(source), torch.randn(4, 3), []
    first = model(x)
    for module in source:
        handle = module.register_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    shift = source[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    assert_close(model(x), source(x), dtype=torch.float32)
    assert not torch.allclose(model(x), first) and len(seen) == 9
    shift.remove()
    handle.remove()
    assert_close(model(x), source(x), dtype=torch.float32)
    assert_close(model(x), first, dtype=torch.float32)
    assert len(seen) == 15
    model[1] = nn.Tanh()
    model(x)
    model[1].register_forward_hook(lambda m, args, out: seen.append(type(m).__name__))
    assert_close(model(x), source(x), dtype=torch.float32)
    assert seen[15:] == ["Linear", "Linear", "Tanh", "Linear", "Tanh"]


def test_a_hook_that_is_put_on_behind_a_first_call_that_failed_fires():
    source = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3))
    model = transformed(source)
    with pytest.raises(IndexError):
        model(torch.tensor([9]))
    source[1].register_forward_hook(lambda m, args, out: 100 * out)
    assert_close(model(torch.tensor([1])), source(torch.tensor([1])), dtype=torch.float32)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_graph_is_kept_for_another_backward_after_others_were_not(inner):
    source = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    model = transformed(source, inner=inner, verify="off")
    for n in (4, 5, 6):
        model(torch.randn(n, 3)).sum().backward()
    x = torch.randn(7, 3)
    loss = model(x).sum()
    first, second = (torch.autograd.grad(loss, source[0].weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    for function in (torch.autograd.functional.jacobian, torch.autograd.functional.vjp):
        v = (torch.ones(7, 2),) if function is torch.autograd.functional.vjp else ()
        for ours, theirs in zip(tree_leaves(function(model, x, *v)), tree_leaves(function(source, x, *v))):
            assert_close(ours, theirs, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="and its graphs have one backward"):
        torch.autograd.functional.hessian(lambda x: model(x).square().sum(), x)


PENALTIES = {
    "the whole": lambda model, x: model(x),
    "a view": lambda model, x: model(x).view(-1)[:2],
    "twice": lambda model, x: model(x) + model(2 * x),
    "behind a call without": lambda model, x: (model(x).sum().backward(), model(x))[1],
}


@table(2, "inner, of, backend", [("eager", of, backend) for of in PENALTIES for backend in (False, True)]
       + [pytest.param("inductor", "twice", False, marks=pytest.mark.long)])
def test_a_gradient_penalty_is_told_of_the_training_step(inner, of, backend):
    torch.compiler.reset()
    source, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(4, 3, requires_grad=True)
    options = {"opt_level": "O0", "inner": inner}
    model = torch.compile(source, backend="apex", options=options) if backend else transformed(source, **options)
    gradient, = torch.autograd.grad(PENALTIES[of](model, x).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, torch.autograd.grad(PENALTIES[of](source, x).sum(), x)[0])
    with pytest.raises(RuntimeError, match=r"apexfx: a derivative of .*\(create_graph=True.*train_step\(model, objective=f"):
        gradient.norm(dim=1).sub(1).square().mean().backward()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_one_value_per_channel_is_refused_as_in_eager(norm):
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm is nn.BatchNorm1d else norm(4))
    for options in ({}, {"sync_bn": True}):
        model = transformed(source, **options)
        with pytest.raises(ValueError, match="xpected more than 1 value per channel when training"):
            model(torch.randn(1, 3))
        assert model.eval()(torch.randn(1, 3)).shape == (1, 4)
        source.train()


def test_capture_leaves_buffers_and_random_state(pair):
    model, reference = pair
    model.dropout.p = 0.5
    x, state = images(), torch.get_rng_state()
    report = model.capture(x)
    assert report is model.report and report.graphs[0].second is not None
    for ours, theirs in zip(model.buffers(), reference.buffers()):
        assert torch.equal(ours, theirs)
    assert torch.equal(torch.get_rng_state(), state)


def test_capture_leaves_buffers_that_a_forward_replaces_and_warns_of_parameters_that_it_writes():
    class Replaces(nn.Linear):
        def __init__(self):
            super().__init__(3, 4)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("none", None)
            self.register_buffer("expanded", torch.ones(1).expand(3))

        def forward(self, x):
            self.mean = self.none = self.mean * 0.9 * self.expanded + x.detach().mean(0)
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(x) * random.uniform(0.5, 1) * float(np.random.rand())

    source = Replaces()
    mean, state, of_numpy = source.mean, random.getstate(), np.random.get_state()
    report = transformed(source).capture(torch.ones(2, 3))
    assert "capture() ran the forward, which writes weight" in str(report)
    assert source.mean is mean and not mean.any() and source.none is None
    assert random.getstate() == state and (np.random.get_state()[1] == of_numpy[1]).all()


def test_capture_verifies_backward_passes_too():
    class SwapFactors(apexfx.Pass):
        """Swap the factors of every product of a backward graph: a * b becomes b * a."""

        name, stage, numeric = "swap_factors", "backward", "bitwise"

        def call(self, gm):
            products = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
            for node in products:
                if all(isinstance(factor, torch.fx.Node) for factor in node.args):
                    node.args = node.args[::-1]
                    self.record(node, "factors swapped")
            return PassResult(gm, modified=bool(self.matches))

    class Sine(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin()

    model = transformed(Sine(4, 4), passes=(SwapFactors(),), verify="each", fullgraph=True)
    assert model.capture(torch.randn(2, 4)).matched("swap_factors")


def test_capture_that_fails_leaves_buffers():
    class Fails(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("as the user's code may")

    model = transformed(Fails())
    before = [b.clone() for b in model.buffers()]
    with pytest.raises(KeyError):
        model.capture(images())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before))


def test_inspection_before_capture_says_what_to_do(pair):
    model, _ = pair
    with pytest.raises(RuntimeError, match=r"call the model once, or model.capture\(\*inputs\)"):
        model.print_readable()


def test_a_model_keeps_its_own_report():
    class Reporter(nn.Linear):
        def report(self):
            return "mine"

    model = transformed(Reporter(2, 2))
    model(torch.randn(1, 2))
    assert model.report() == "mine" and len(apexfx.last_report().graphs) == 1


def test_a_forward_set_on_the_instance_is_the_one_transformed():
    source = nn.Linear(2, 2)
    source.forward = lambda x: F.linear(x, source.weight) * 3
    x = torch.randn(4, 2)
    assert torch.equal(transformed(source)(x), source(x))


def test_a_model_that_compiles_itself_is_transformed():
    source = nn.Linear(8, 8)
    source.compile(backend="eager")
    model = transformed(source, opt_level="O1")
    model(torch.randn(4, 8))
    assert model.report.casts()


def test_o3_halves_the_parameters_in_place():
    source = Net()
    weight = source.conv.weight
    model = transformed(source, opt_level="O3")
    assert model.conv.weight is weight and weight.dtype == torch.bfloat16
    model(images()).square().mean().backward()
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.long
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_half_inputs(opt_level, given):
    model, x = transformed(Net(), opt_level=opt_level), images().to(given)
    out = model(x)
    out.sum().backward()
    assert out.dtype == torch.float32 and model.conv.weight.grad.isfinite().all()
    with torch.no_grad():
        model.eval()
        assert torch.equal(model(x), model(x.float()))
    parameters = model.conv.weight.dtype
    said = f"apexfx: inputs of {given} are brought to the parameters' {parameters} before each call"
    assert (said in model.report.notes) == (given != parameters)


@table(1, "opt_level", ["O1", "O0", "O2"])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_the_report_of_a_float16_model_says_that_its_loss_is_to_be_scaled(opt_level, half):
    model = transformed(Net(), opt_level=opt_level, dtype=None if opt_level == "O0" else half)
    model(images())
    said = str(model.report)
    assert ("scale its loss" in said) == (half == torch.float16 and opt_level != "O0")


class Shares(nn.Module):
    """Returns one tensor twice, views of it, and what is the caller's or the model's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h, z = self.layer(x), self.layer(x)
        z.add_(1)
        z[1].mul_(2)
        with torch.no_grad():
            row = h[0]
        return {"h": h, "same": h, "chunk": h.chunk(2)[1], "flat": (flat := h.view(-1)), "again": flat.view(2, 4), "row": row,
                "detached": h.detach(), "z": z, "z1": z[1], "kept": z.contiguous(), "x": x, "x0": x[0], "w": self.layer.weight,
                "wt": self.layer.weight.t(), "alone": self.layer(x)[1:], "most": (most := self.layer(x).max(1)[0]),
                "most0": most[:1]}


@pytest.mark.parametrize(("opt_level", "inner"), [
    ("O1", "eager"), ("O2", "eager"), pytest.param("O2", "inductor", marks=pytest.mark.long)])
def test_outputs_that_share_memory_still_do(opt_level, inner):
    def shared(out):
        groups = {}
        for name, t in out.items():
            if name != "detached" or inner == "eager":  # Inductor would detach "h" with it: it is memory of its own there
                kind = name, t.dtype, t.requires_grad, t.shape, t.stride()
                groups.setdefault(t.untyped_storage().data_ptr(), []).append(kind)
        return list(groups.values())

    source, x = Shares(), torch.randn(2, 4)
    expected = copy.deepcopy(source)(x)
    out = transformed(source, opt_level=opt_level, inner=inner)(x)
    assert shared(out) == shared(expected) and out["h"] is out["same"] and out["x"] is x
    for name, t in out.items():
        torch.testing.assert_close(t, expected[name], rtol=0.05, atol=0.05)
    with torch.no_grad():
        out["flat"].zero_()
    assert out["h"].sum() == 0
    (out["again"].sum() + out["kept"].sum()).backward()
    assert source.layer.weight.grad is not None


def test_an_output_that_shares_nothing_is_cast_alone():
    class Row(Shares):
        def forward(self, x):
            return self.layer(x)[0]

    model = transformed(Row(), opt_level="O2")
    model(torch.randn(2, 4))
    [row] = [row for row in model.report.casts() if row.rule == "output"]
    assert row.bytes == 16


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_sparse_embeddings_train(opt_level):
    source = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2))
    expected = copy.deepcopy(source)
    model = transformed(source, opt_level=opt_level)
    for run in (model, expected):
        run(torch.tensor([1, 4, 4])).square().sum().backward()
    got, wanted = source[0].weight.grad, expected[0].weight.grad
    assert got.is_sparse and got.dtype == source[0].weight.dtype
    torch.testing.assert_close(got.to_dense().float(), wanted.to_dense(), rtol=0.1, atol=0.05)


def test_the_class_is_called_as_its_source():
    model = transformed(Net())
    assert type(model).__name__ == "Net" and repr(model).startswith("ApexfxNet(\n") and "ApexfxNet" in str(type(model))


def test_the_signature_shows_options_and_defaults():
    parameters = inspect.signature(apexfx.transform).parameters
    assert list(parameters)[:2] == ["model", "opt_level"] and parameters["opt_level"].default == "O1"
    assert all(p.kind == p.KEYWORD_ONLY for name, p in parameters.items() if name != "model")


# ---- leaves that are not the model's -----------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Reads a leaf that it has not registered."""

    def __init__(self, leaf):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kept = nn.Linear(4, 4), [leaf]

    def forward(self, x):
        return self.linear(x) * self.kept[0]


def gradients_of_leaves(compiled):
    """Return the gradients of a leaf that the model reads, of the loss, of what computed a batch, and of a batch.

    Args:
        compiled: (model, loss) -> a function of a batch and its targets that returns the loss.
    """
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(4, generator=generator).requires_grad_()
    model, loss = Scaled(leaf), Temperature()
    encoder, inputs = nn.Linear(4, 4), []
    call = compiled(model, loss)
    for place in range(3):
        x, t = torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)
        inputs.append(encoder(x) if place == 2 else x.requires_grad_(place == 1))
        call(inputs[-1], t).backward()
    return [leaf.grad, loss.log.grad, inputs[1].grad, *(p.grad for m in (encoder, model) for p in m.parameters())]


@pytest.mark.parametrize("way", ["transform", "backend", "backend, the loss too"])
def test_leaves_that_are_not_the_models_get_the_gradients_of_the_source(way):
    def compiled(model, loss):
        if way == "backend, the loss too":
            return run_of("backend", lambda x, t: loss(model(x), t), opt_level="O0", inner="eager")
        model = run_of(way, model, opt_level="O0", inner="eager")
        return lambda x, t: loss(model(x), t)

    expected = gradients_of_leaves(lambda model, loss: lambda x, t: loss(model(x), t))
    torch.testing.assert_close(gradients_of_leaves(compiled), expected, rtol=0, atol=0)
