"""A user's own functions, the lists, and the old API (APEX_SPEC 1.9, 1.10)."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from apexfx.amp.legacy_wrapper import OptimWrapper
from apexfx.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from apexfx.amp.scale_loss import NoOpHandle
from apexfx.config import HALVES
from apexfx.testing import assert_close
from tests.amp.amp_cases import CountReads

B = torch.bfloat16


def ones(dtype=torch.float32):
    return torch.ones(2, 2, dtype=dtype)


@pytest.mark.parametrize(("decorator", "given", "expected"), [
    (amp.half_function, torch.float32, B), (amp.float_function, B, torch.float32), (amp.promote_function, B, torch.float32),
])  # fmt: skip
def test_decorators_cast_while_o1_is_active(decorator, given, expected):
    seen = []

    @decorator
    def function(x, *, other, nested):
        seen.append((x.dtype, other.dtype, nested[0].dtype))
        return x

    call = lambda: function(ones(given), other=ones(), nested=[ones(given)])  # noqa: E731
    call()
    assert seen.pop() == (given, torch.float32, given)
    amp.initialize(nn.Linear(2, 2), dtype=B, verbosity=0)
    call()
    assert seen.pop() == (expected,) * 3 if decorator is not amp.promote_function else seen
    with amp.disable_casts():
        call()
    assert seen.pop() == (given, torch.float32, given)
    _amp_state.handle._deactivate()
    call()
    assert seen.pop() == (given, torch.float32, given)


def test_register_needs_an_existing_function():
    with pytest.raises(ValueError, match="No function named nothing"):
        amp.register_half_function(torch, "nothing")


def test_registered_torch_functions_run_by_their_rule_inside_models_only():
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(torch, "tanh")
    amp.register_promote_function(torch, "relu")
    amp.initialize(nn.Linear(2, 2), dtype=B, verbosity=0)
    with _amp_state.session.executor:
        assert torch.sigmoid(ones(B)).dtype == ones(B).sigmoid().dtype == F.sigmoid(ones(B)).dtype == torch.float32
        assert torch.tanh(ones()).dtype == B
    assert torch.sigmoid(ones(B)).dtype == B


def test_the_registry_is_taken_by_the_next_initialize():
    amp.register_float_function(torch, "sigmoid")
    for expected in (torch.float32, B):
        amp.initialize(nn.Linear(2, 2), dtype=B, verbosity=0)
        with _amp_state.session.executor:
            assert torch.sigmoid(ones(B)).dtype == expected


def test_registered_python_functions_are_wrapped_until_deactivated():
    module = types.ModuleType("their_ops")
    module.pool = lambda x: x
    module.pool.__module__ = "their_ops"
    original = module.pool
    amp.register_half_function(module, "pool")
    amp.initialize(nn.Linear(2, 2), dtype=B, verbosity=0)
    assert module.pool(ones()).dtype == B
    amp.initialize(nn.Linear(2, 2), dtype=B, verbosity=0)
    assert module.pool is original  # not wrapped twice, as in Apex


def test_lists_speak_of_what_apex_lists_did():
    assert {"conv2d", "linear"} <= set(functional_overrides.FP16_FUNCS)
    assert {"softmax", "cross_entropy", "layer_norm", "gelu"} <= set(functional_overrides.FP32_FUNCS)
    assert "binary_cross_entropy" in [name for name, _ in functional_overrides.BANNED_FUNCS]
    assert {"mm", "matmul", "addmm", "conv1d"} <= set(torch_overrides.FP16_FUNCS)
    assert {"exp", "sum", "pow", "norm"} <= set(torch_overrides.FP32_FUNCS)
    assert {"cat", "stack"} <= set(torch_overrides.SEQUENCE_CASTS) and {"add", "atan2"} <= set(torch_overrides.CASTS)
    assert "__matmul__" in tensor_overrides.FP16_FUNCS and "__add__" in tensor_overrides.CASTS


def test_init_casts_in_this_thread_until_deactivated():
    handle = amp.init(dtype=B)
    assert handle.is_active() and not handle.verbose
    assert torch.mm(ones(), ones()).dtype == B and F.softmax(ones(B), -1).dtype == torch.float32
    with handle._disable_casts():
        assert not handle.is_active() and torch.mm(ones(), ones()).dtype == torch.float32
    with torch.device("cpu"):  # a mode entered later and left earlier
        assert torch.mm(ones(), ones()).dtype == B
    handle._deactivate()
    assert torch.mm(ones(), ones()).dtype == torch.float32 and not handle.is_active()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_handles_leave_nothing_replaced_whichever_ends_first(order):
    module = types.ModuleType("their_ops")
    module.pool = lambda x: x
    module.pool.__module__ = "their_ops"
    original = module.pool, nn.RNNBase.check_input
    handles = []
    for _ in range(2):
        amp.register_half_function(module, "pool")
        handles.append(amp.init(dtype=B))
    assert module.pool(ones()).dtype == B
    assert nn.LSTM(2, 2)(torch.ones(1, 1, 2, dtype=B))[0].dtype == B
    for place in order:
        handles[place]._deactivate()
    assert (module.pool, nn.RNNBase.check_input) == original


def test_init_inside_another_mode_leaves_the_stack_paired():
    with torch.device("cpu"):
        handle = amp.init(dtype=B)
    assert torch.mm(ones(), ones()).dtype == B
    handle._deactivate()
    assert torch.mm(ones(), ones()).dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"enable_caching": False}])
def test_init_keeps_no_casts(options):
    handle = amp.init(dtype=B, **options)
    layer = nn.Linear(2, 2)
    before = layer(ones())
    assert len(handle.cache) == 0 and not handle.has_cache
    layer.weight.data.zero_()
    assert not torch.equal(layer(ones()), before)
    handle.remove_cache(layer.weight)
    handle._clear_cache()
    handle._deactivate()


@pytest.mark.parametrize("given", HALVES)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_init_takes_half_inputs_of_a_recurrent_layer(kind, given):
    layer, x = kind(4, 3), torch.randn(5, 2, 4)
    expected = layer(x.to(B).float())[0]
    handle = amp.init(dtype=B)
    packed = nn.utils.rnn.pack_sequence([x[:, 0].to(given), x[:3, 1].to(given)])
    outputs = layer(x.to(given))[0], layer(input=x.to(given))[0], layer(packed)[0].data
    with pytest.raises(RuntimeError, match="input_size. Expected 4, got 3"):
        layer(x[..., :3].to(given))
    handle._deactivate()
    assert {y.dtype for y in outputs} == {B}
    assert_close(outputs[0].float(), expected, dtype=B, scale=4)
    outputs[0].sum().backward()
    assert layer.weight_ih_l0.grad.dtype == torch.float32
    with pytest.raises(ValueError, match="does not match weight dtype"):
        layer(x.to(given))


def test_allow_banned_is_accepted():
    handle = amp.init(dtype=B, allow_banned=True)
    assert F.binary_cross_entropy(ones(B) / 2, ones()).dtype == torch.float32
    handle._deactivate()


def test_init_disabled_returns_a_handle_that_does_nothing():
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle) and not handle.is_active()
    layer = nn.Linear(2, 2)
    wrapper = handle.wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    loss = layer(ones()).sum()
    with wrapper.scale_loss(loss) as scaled:
        assert scaled is loss
        scaled.backward()
    before = layer.weight.detach().clone()
    wrapper.step()
    assert not torch.equal(layer.weight, before)
    with handle.scale_loss(loss, None) as scaled:
        assert scaled is loss


def test_the_handle_points_to_the_new_api():
    with pytest.raises(RuntimeError, match="amp.initialize"):
        amp.init(dtype=B).scale_loss(torch.ones(()), None)


def wrapped(num_loss=2):
    handle = amp.init(dtype=B)
    torch.manual_seed(0)
    layer = nn.Linear(2, 2)
    return layer, handle.wrap_optimizer(torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9), num_loss)


def test_optim_wrapper_scales_each_loss_and_adds_their_gradients():
    layer, optimizer = wrapped()
    assert isinstance(optimizer, OptimWrapper) and len(optimizer._loss_scaler) == 2
    optimizer.zero_grad()
    for factor in (1.0, 2.0):
        with optimizer.scale_loss(layer(ones()).sum() * factor) as loss:
            loss.backward()
    assert torch.allclose(layer.bias.grad, torch.full((2,), 6.0))
    before = layer.bias.detach().clone()
    optimizer.step()
    assert torch.allclose(layer.bias, before - 3.0) and optimizer._loss_idx == 0


def test_optim_wrapper_skips_if_any_loss_overflowed(capsys):
    layer, optimizer = wrapped()
    before = layer.weight.detach().clone()
    with CountReads() as reads:
        for factor in (float("inf"), 1.0):
            with optimizer.scale_loss(layer(ones()).sum() * factor) as loss:
                loss.backward()
        optimizer.step()
    assert reads.count == 0
    assert torch.equal(layer.weight, before) and optimizer.state_dict()["state"] == {}
    assert [s.loss_scale() for s in optimizer._loss_scaler] == [2.0**15, 2.0**16]
    assert "Gradient overflow, skipping update" in capsys.readouterr().out


def test_optim_wrapper_refuses_closures_and_forwards_the_rest():
    _, optimizer = wrapped()
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)
    assert optimizer.defaults["lr"] == 0.5 and optimizer.param_groups[0]["lr"] == 0.5
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_refused_model_leaves_what_was_registered_to_the_next():
    class Model(nn.Linear):
        def forward(self, x):
            self.seen = torch.exp(x).dtype
            return x

    amp.register_half_function(torch, "exp")
    with pytest.raises(RuntimeError, match="do not call .half"):
        amp.initialize(Model(2, 2).half(), opt_level="O1", verbosity=0)
    model = amp.initialize(Model(2, 2), opt_level="O1", verbosity=0)
    model(ones())
    assert model.seen == B


def test_an_exception_in_an_old_scale_loss_leaves_the_gradients_of_earlier_losses():
    handle, weight = amp.init(), nn.Parameter(torch.ones(2))
    try:
        optimizer = handle.wrap_optimizer(torch.optim.SGD([weight], lr=0.1), num_loss=2)
        with optimizer.scale_loss(weight.sum()) as loss:
            loss.backward()
        with pytest.raises(KeyError), optimizer.scale_loss(weight.sum()) as loss:
            loss.backward()
            raise KeyError
        with optimizer.scale_loss(weight.sum()) as loss:
            loss.backward()
    finally:
        handle._deactivate()
    assert weight.grad.tolist() == [2.0, 2.0]
