"""transform(): the result is the model it was made from, in everything but how forward runs."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx


class Net(nn.Module):
    """Convolutions, batch norms, a keyword argument, a tied, a frozen and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.down.weight = self.up.weight
        self.head = nn.Linear(8, 10)
        self.head.bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x, *, scale=1.0):
        x = self.dropout(self.block(F.relu(self.bn(self.conv(x)))).mean((2, 3)))
        return self.head(self.down(self.up(x))) * scale


def images(n=4):
    return torch.randn(n, 3, 8, 8)


def transformed(model, **options):
    return apexfx.transform(model, **{"opt_level": "O0", "inner": "eager", "verify": "each", **options})


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


@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_with_cumulative_average(track):
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None, track_running_stats=track))
    reference = copy.deepcopy(source)
    model = transformed(source, fullgraph=True)
    for _ in range(3):
        x = torch.randn(6, 3)
        torch.testing.assert_close(model(x), reference(x))
    for (name, ours), theirs in zip(model.named_buffers(), reference.buffers()):
        torch.testing.assert_close(ours, theirs, msg=name)
    torch.testing.assert_close(model.eval()(x), reference.eval()(x))


def test_evaluates_like_the_source(pair):
    model, reference = pair
    assert torch.equal(model.eval()(x := images()), reference.eval()(x))
    assert not model.training and not model.bn.training


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


def test_deepcopy_is_independent(pair):
    model, _ = pair
    x = images()
    model(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.conv.weight.zero_()
    assert model.conv.weight.abs().sum() > 0
    assert isinstance(other, Net) and other.report is not model.report
    assert not torch.equal(other.eval()(x), model.eval()(x))


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickles(pair, how):
    model, _ = pair
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


def test_to_double_and_load_state_dict_reach_the_graphs(pair):
    model, reference = pair
    model(images())
    other = Net()
    model.load_state_dict(other.state_dict())
    x = images()
    assert torch.equal(model.eval()(x), other.eval()(x))
    model.double()
    assert model(x.double()).dtype == torch.float64


def test_hooks_on_the_model_fire(pair):
    model, _ = pair
    seen = []
    model.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    model(images())
    assert seen == [(4, 10)]


def test_capture_leaves_buffers_and_random_state(pair):
    model, reference = pair
    model.dropout.p = 0.5
    x, state = images(), torch.get_rng_state()
    report = model.capture(x)
    assert report is model.report and report.graphs[0].backward is not None
    for ours, theirs in zip(model.buffers(), reference.buffers()):
        assert torch.equal(ours, theirs)
    assert torch.equal(torch.get_rng_state(), state)


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


def test_a_transformed_model_inside_a_compiled_function(pair):
    model, reference = pair
    outer = torch.compile(lambda x: model(x) + 1, backend="eager")
    x = images()
    torch.testing.assert_close(outer(x), reference(x) + 1)
    assert len(model.report.graphs) == 1


@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        (lambda m: "model", TypeError, "expected a torch.nn.Module"),
        (transformed, ValueError, "transformed already"),
        (torch.compile, ValueError, "not the result of torch.compile"),
        (lambda m: nn.DataParallel(m), ValueError, "the model is wrapped in DataParallel"),
        (lambda m: nn.Sequential(nn.DataParallel(m)), ValueError, "submodule '0' is wrapped in DataParallel"),
        (lambda m: nn.Sequential(m, transformed(m)), ValueError, "submodule '1' is transformed already"),
        (lambda m: nn.LazyLinear(3), ValueError, "has no shape yet"),
    ],
)
def test_models_that_cannot_be_transformed(wrap, error, message):
    with pytest.raises(error, match=message):
        transformed(wrap(nn.Linear(2, 2)))


def test_nothing_to_rewrite_is_said(caplog):
    model = transformed(nn.ReLU(), opt_level="O1")
    model(torch.randn(3))
    assert "precision rewrote nothing" in caplog.text
    with pytest.raises(apexfx.PassError, match="precision.*rewrote nothing"):
        transformed(nn.ReLU(), opt_level="O1", fullgraph=True)(torch.randn(3))


def test_sync_bn_on_one_process_is_said():
    model = transformed(nn.BatchNorm1d(2), sync_bn=True)
    model(torch.randn(3, 2))
    assert "without a process group" in str(model.report)


def test_cuda_graphs_are_refused_off_cuda():
    with pytest.raises(ValueError, match="inner='cudagraphs' was given for a model that is not on CUDA"):
        transformed(nn.Linear(2, 2), inner="cudagraphs")(torch.randn(3, 2))


def test_a_dtype_the_device_cannot_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    from apexfx.transform import _can_compute

    assert not _can_compute(torch.device("cuda"), torch.bfloat16)
    assert _can_compute(torch.device("cuda"), torch.float16) and _can_compute(torch.device("cpu"), torch.bfloat16)


def test_a_failed_transform_leaves_the_model():
    source = Net()
    before = {name: (p.dtype, id(p)) for name, p in source.named_parameters()}
    with pytest.raises(ValueError, match="skip names 'precison', which is no pass; did you mean 'precision'"):
        apexfx.transform(source, opt_level="O3", skip=("precison",))
    with pytest.raises(ValueError, match="precision={'conv': 'flot32'} was given, expected torch.float32"):
        apexfx.transform(source, opt_level="O3", precision={"conv": "flot32"})
    assert {name: (p.dtype, id(p)) for name, p in source.named_parameters()} == before


def test_o3_halves_the_parameters_in_place():
    source = Net()
    weight = source.conv.weight
    model = transformed(source, opt_level="O3")
    assert model.conv.weight is weight and weight.dtype == torch.bfloat16
    model(images()).square().mean().backward()
    assert weight.grad.dtype == torch.bfloat16


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


def test_the_class_is_called_as_its_source():
    model = transformed(Net())
    assert type(model).__name__ == "Net" and repr(model).startswith("ApexfxNet(\n") and "ApexfxNet" in str(type(model))


def test_the_signature_shows_options_and_defaults():
    parameters = inspect.signature(apexfx.transform).parameters
    assert list(parameters)[:2] == ["model", "opt_level"] and parameters["opt_level"].default == "O1"
    assert all(p.kind == p.KEYWORD_ONLY for name, p in parameters.items() if name != "model")


def test_apex_s_packages_are_found_when_they_are_reached_for():
    code = "import sys, apexfx; assert 'apexfx.amp' not in sys.modules; apexfx.amp.initialize; apexfx.parallel.Reducer"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"amp", "parallel", "transform"} <= set(dir(apexfx))
    with pytest.raises(AttributeError, match="has no attribute 'apm'"):
        getattr(apexfx, "apm")  # noqa: B009  a name that no checker knows
