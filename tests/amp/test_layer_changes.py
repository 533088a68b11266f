"""What users do to layers with a short way: changes, copies, replicas, tracing (see `apexfx/amp/layer_calls.py`)."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from apexfx import amp
from apexfx._torch import module_call
from apexfx.amp._amp_state import _amp_state
from apexfx.amp.layer_calls import LayerCall
from tests.amp.layer_cases import B, Model, check_same, encoder, initialised, outcome

Q = (2, 5, 8)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


class Summed(nn.Linear):
    def forward(self, x):
        return self.weight.sum() * x


def wrap_forward(model, find=lambda model: model.layer):
    layer = find(model)
    own = layer.forward
    layer.forward = lambda x: own(x) @ torch.ones(x.shape[-1], 8)


# What a user does to a layer after `initialize`; a product that a hook or forward makes is in half too.
CHANGES = {
    "hook": lambda m: m.layer.register_forward_hook(lambda layer, args, out: out @ torch.ones(8, 8)),
    "pre hook": lambda m: m.layer.register_forward_pre_hook(lambda layer, args: (args[0] @ torch.ones(8, 8),)),
    "backward hook": lambda m: m.layer.register_full_backward_hook(lambda layer, given, out: (given[0] * 2,)),
    "forward": wrap_forward,
    "class": lambda m: setattr(m.layer, "__class__", Summed),
    "weight": lambda m: setattr(m.layer, "weight", nn.Parameter(torch.ones(8, 8))),
    "no weight": lambda m: (delattr(m.layer, "weight"), setattr(m.layer, "weight", torch.ones(8, 8))),
    "shadow": lambda m: m.layer.__dict__.__setitem__("weight", torch.ones(8, 8)),
    "no bias": lambda m: setattr(m.layer, "bias", None),
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "weight norm": lambda m: parametrizations.weight_norm(m.layer),
    "old weight norm": lambda m: nn.utils.weight_norm(m.layer),
    "spectral norm": lambda m: parametrizations.spectral_norm(m.layer),
    "parametrization": lambda m: nn.utils.parametrize.register_parametrization(m.layer, "weight", Doubled()),
    "prune": lambda m: prune.l1_unstructured(m.layer, "weight", 0.5),
    "compile": lambda m: m.layer.compile(backend="eager"),
    "other layer": lambda m: setattr(m, "layer", nn.Sequential(m.layer, nn.Linear(8, 8))),
    "apply": lambda m: m.apply(lambda layer: layer.requires_grad_(False)),
}  # fmt: skip


SAME_OUTPUT = ("backward hook", "double", "half", "weight norm", "old weight norm", "compile", "apply")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changes_later_counts(change):
    def prepare(model):
        torch.manual_seed(2)
        CHANGES[change](model)

    model = Model(nn.Linear(8, 8))
    before = initialised(copy.deepcopy(model))
    x = torch.randn(4, 8, dtype=torch.float64 if change == "double" else torch.float32)
    check_same(model, [x], prepare=prepare)
    if change not in SAME_OUTPUT:
        assert not torch.equal(outcome(before, [x])[0], outcome(model, [x])[0])  # it did change something


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm])
def test_what_is_gone_raises_as_ever(kind, name):
    model = initialised(Model(kind(8, 8) if kind is nn.Linear else kind(8)))
    delattr(model.layer, name)
    with pytest.raises(AttributeError, match=name):
        model(torch.randn(4, 8))
    with pytest.raises((AttributeError, TypeError)):
        initialised(Model(kind(8, 8) if kind is nn.Linear else kind(8)))([1.0])


def test_a_hook_inside_an_encoder_runs_with_casts():
    seen = []

    def prepare(model):
        layer = model.layer.layers[1].linear2
        layer.register_forward_hook(lambda layer, args, out: seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))

    check_same(Model(encoder()), [torch.randn(Q)], prepare=prepare)
    assert seen == [B] * 4


def test_a_layer_without_a_short_way_inside_an_encoder_runs_with_casts():
    class Half(nn.Module):
        def forward(self, x):
            return x @ torch.eye(8)

    check_same(Model(encoder()), [torch.randn(Q)], prepare=lambda m: setattr(m.layer.layers[0], "dropout2", Half()))


def test_a_global_hook_is_called():
    seen = []
    model = initialised(Model(nn.Linear(8, 8)))
    note = lambda layer, args, out: seen.append((type(layer), out.dtype))  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        model(torch.randn(4, 8))
    finally:
        handle.remove()
    assert (nn.Linear, B) in seen


def test_a_forward_replaced_in_the_class_is_called(monkeypatch):
    model = initialised(Model(nn.Linear(8, 8)))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ torch.ones(8, 2))
    assert model(torch.randn(4, 8)).shape == (4, 2)


def test_an_own_forward_or_a_compiled_call_from_before_stays():
    model = Model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    wrap_forward(model, lambda m: m.layer[0])
    model.layer[1].compile(backend="eager")
    compiled = module_call(model.layer[1])
    initialised(model)(torch.randn(4, 8))
    assert module_call(model.layer[0]) is None and module_call(model.layer[1]) is compiled
    assert isinstance(module_call(model.layer[2]), LayerCall)


def test_other_modes_see_every_call():
    class Count(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func is F.linear
            return func(*args, **(kwargs or {}))

    outside, inside = Count(), Count()

    def use(layer, x):
        with inside:
            return layer(x)

    model = initialised(Model(nn.Linear(8, 8), use))
    with outside:
        assert model(torch.randn(4, 8)).dtype == torch.float64
    assert outside.count == inside.count == 1


def test_rules_of_the_users_hold():
    seen = []
    amp.register_float_function(F, "linear")
    for given in (B, torch.float32):
        initialised(Model(nn.Linear(8, 8), lambda layer, x: seen.append(layer(x).dtype)))(torch.randn(4, 8).to(given))
    assert seen == [torch.float32, B]
    amp.register_half_function(F, "relu")
    model = initialised(Model(encoder()))
    assert module_call(model.layer) is None and isinstance(module_call(model.layer.layers[0].linear1), LayerCall)


def test_disabled_casts_and_a_deactivated_handle_reach_the_layers():
    def use(layer, x):
        seen.append(layer(x).dtype)
        with amp.disable_casts():
            seen.append(layer(x).dtype)

    seen = []
    model = initialised(Model(nn.Linear(8, 8), use))
    model(torch.randn(4, 8))
    _amp_state.handle._deactivate()
    model(torch.randn(4, 8))
    assert seen == [B, torch.float32, torch.float32, torch.float32]


def test_a_layer_called_outside_the_model_is_not_cast():
    model = initialised(Model(encoder()))
    model(torch.randn(Q))
    assert model.layer.layers[0].linear1(torch.randn(4, 8)).dtype == torch.float32
    assert model.layer(torch.randn(Q)).dtype == torch.float32
    with pytest.raises(IndexError):
        model(torch.randn(3))  # an exception inside leaves the thread as it was
    assert model.layer.layers[0].linear1(torch.randn(4, 8)).dtype == torch.float32


def test_the_model_of_one_initialize_in_the_model_of_another():
    inner = initialised(Model(nn.Linear(8, 8)))
    outer = Model(nn.Sequential(inner, nn.Linear(8, 8)))
    outer.layer[1].double()
    x, y = torch.randn(4, 8), torch.randn(4, 8, dtype=torch.float64)
    expected = inner(x)
    amp.initialize(outer, dtype=torch.float16, verbosity=0)
    assert outer(x).dtype == torch.float64
    assert torch.equal(outer.layer[1](y), F.linear(y, outer.layer[1].weight, outer.layer[1].bias))
    assert torch.allclose(inner(x), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy], ids=["deep", "pickle", "copy"]
)
def test_copies_run_their_own_weights_by_the_short_way(copied, calls):
    model = initialised(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    x = torch.randn(4, 8)
    model(x)
    other = copied(model)
    with torch.no_grad():
        other[0].weight.mul_(2)
        other[0].bias.mul_(2)
    expected = F.relu(F.linear(x.to(B), other[0].weight.to(B), other[0].bias.to(B))).double()
    calls.clear()
    assert torch.equal(other(x), expected) and calls == []
    assert torch.equal(model(x), expected) == (copied is copy.copy)  # which shares the layers


def test_a_layer_copied_by_itself_runs_its_own_weights():
    model = initialised(nn.Sequential(nn.Linear(8, 8)))
    for copied in (copy.copy(model[0]), copy.deepcopy(model[0]), pickle.loads(pickle.dumps(model[0]))):
        assert module_call(copied) is None and type(copied) is nn.Linear
        copied._parameters = {"weight": nn.Parameter(torch.ones(2, 8)), "bias": None}
        assert copied(torch.ones(8)).tolist() == [8.0, 8.0]


def test_whole_models_are_saved_without_their_short_ways():
    model = initialised(nn.Sequential(nn.Linear(8, 8)))
    file = io.BytesIO()
    torch.save(model, file)
    assert b"layer_calls" not in file.getvalue()


def test_replicas_of_data_parallel_run_their_own_weights():
    model = initialised(nn.Sequential(nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    expected = model(x)
    # What nn.parallel.replicate does, which needs GPUs.
    replica, layer = model._replicate_for_data_parallel(), model[0]._replicate_for_data_parallel()
    replica._modules["0"] = layer
    layer.weight, layer.bias = model[0].weight.detach() * 2, model[0].bias.detach() * 2
    assert torch.equal(replica(x), expected * 2)
    assert torch.equal(model(x), expected) and isinstance(module_call(model[0]), LayerCall)


def test_layers_are_freed_with_their_model():
    model = initialised(nn.Sequential(nn.Linear(8, 8)))
    model(torch.randn(4, 8))
    layer = weakref.ref(model[0])
    gc.disable()
    try:
        _amp_state.session.executor.cache.clear()
        del model
        assert layer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("trace", [
    lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True),
    lambda layer, x: torch.export.export(layer, (x,)).module(),
    lambda layer, x: torch.jit.trace(layer, x),
    lambda layer, x: torch.jit.script(layer),
    lambda layer, x: torch.fx.symbolic_trace(layer),
    lambda layer, x: torch.fx.experimental.proxy_tensor.make_fx(layer)(x),
], ids=["compile", "export", "trace", "script", "symbolic_trace", "make_fx"])  # fmt: skip
def test_layers_are_traced_outside_the_model_as_before(trace):
    model = initialised(Model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8))))
    x = torch.randn(4, 8)
    model(x)
    expected = model.layer(x)
    assert expected.dtype == torch.float32
    assert torch.equal(trace(model.layer, x)(x), expected)


def test_initialize_once_more_gives_the_layers_to_the_new_executor():
    seen = []
    model = Model(nn.Linear(8, 8), lambda layer, x: seen.append(layer(x).dtype))
    for half in (B, torch.float16):
        amp.initialize(model, dtype=half, verbosity=0)
        model(torch.randn(4, 8))
        assert module_call(model.layer).executor is _amp_state.session.executor
    assert seen == [B, torch.float16]
