"""The loss-scale automaton against an independent model, its messages and its checkpoints (APEX_SPEC 1.7, 1.8)."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apexfx import amp
from apexfx.amp.scaler import LossScaler
from tests.amp.amp_cases import Automaton, CountReads


def follow(overflows, *, window, low, high):
    scaler = LossScaler("dynamic", scale_window=window, min_loss_scale=low, max_loss_scale=high)
    model = Automaton(min(high, 2.0**16), window, low, high)
    for overflow in overflows:
        skip = scaler.update_scale(torch.tensor(float(overflow)))
        assert bool(skip) == model.step(overflow)
        assert (scaler.loss_scale(), scaler._unskipped) == (model.scale, model.good)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), max_size=120), st.integers(1, 7), st.sampled_from([None, 0, 1.0, 128.0, 2.0**15]),
    st.sampled_from([2.0**24, 2.0**17, 2.0**16, 2.0**10]),
)  # fmt: skip
def test_automaton_equals_an_independent_model(overflows, window, low, high):
    follow(overflows, window=window, low=low if low is None or low <= high else high, high=high)


def test_a_scale_set_by_hand_beyond_a_limit_moves_as_in_apex():
    scaler, model = LossScaler("dynamic", scale_window=2, max_loss_scale=8.0, min_loss_scale=2.0), Automaton(8.0, 2, 2.0, 8.0)
    for scale, overflow in ((64.0, False), (64.0, True), (1.0, True), (1.0, False)):
        scaler._loss_scale = model.scale = scale
        scaler._unskipped = model.good = 0
        for _ in range(3):
            scaler.update_scale(torch.tensor(float(overflow)))
            model.step(overflow)
            assert scaler.loss_scale() == model.scale


def test_defaults_are_those_of_apex():
    defaults = {name: p.default for name, p in inspect.signature(LossScaler).parameters.items()}
    expected = {"init_scale": 2.0**16, "scale_factor": 2.0, "scale_window": 2000, "min_loss_scale": None,
                "max_loss_scale": 2.0**24}
    assert {name: defaults[name] for name in expected} == expected
    scaler = LossScaler("dynamic")
    for _ in range(2000):
        assert scaler.loss_scale() == 2.0**16
        scaler.update_scale(torch.tensor(0.0))
    assert (scaler.loss_scale(), scaler._unskipped) == (2.0**17, 0)


def test_without_a_floor_the_scale_still_never_becomes_zero():
    scaler = LossScaler("dynamic")
    for _ in range(200):
        scaler.update_scale(torch.tensor(1.0))
    assert scaler.loss_scale() == 2.0**-126  # Apex went on to 0 and a ZeroDivisionError
    grad = torch.tensor([0.0, 1.0])
    scaler.unscale([grad], [grad], flag := scaler.new_flag())
    assert grad.isfinite().all() and not flag


def test_static_scale_counts_but_never_skips_or_changes():
    scaler = LossScaler(128.0)
    assert scaler.update_scale(torch.tensor(1.0)) is None
    assert (scaler.loss_scale(), scaler._unskipped) == (128.0, 1)


def test_static_scale_ignores_limits():
    assert LossScaler(4.0, min_loss_scale=8.0, max_loss_scale=2.0).loss_scale() == 4.0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_every_non_finite_element_is_an_overflow(bad):
    scaler = LossScaler("dynamic")
    grads = [torch.ones(5), torch.tensor([1.0, bad], dtype=torch.float16)]
    scaler.unscale(grads, grads, flag := scaler.new_flag())
    assert flag == 1


def test_a_finite_gradient_whose_sum_overflows_is_none():
    grads = [torch.full((8,), 1e38)]  # Apex's Python path summed, and skipped here
    scaler = LossScaler("dynamic")
    scaler.unscale(grads, grads, flag := scaler.new_flag())
    assert flag == 0


def test_backward_again_after_the_scale_moved():
    scaler, x = LossScaler("dynamic"), torch.ones((), requires_grad=True)
    scaled = scaler.scaled(x * 2)
    scaled.backward(retain_graph=True)
    scaler.update_scale(torch.tensor(1.0))
    scaled.backward()
    assert x.grad == 2 * 2 * 2.0**16 and scaler.loss_scale() == 2.0**15


def test_an_iteration_reads_nothing_on_the_host():
    scaler = LossScaler("dynamic", min_loss_scale=1.0)
    with CountReads() as reads:
        for overflow in (0.0, 1.0, 0.0):
            grads = [torch.ones(3)]
            scaled = scaler.scaled(torch.ones((), dtype=torch.float16))
            scaler.unscale(grads, grads, flag := scaler.new_flag())
            scaler.update_scale(flag + overflow)
            scaler.report_overflows()
    assert reads.count == 0
    assert scaled.dtype == torch.float32
    with CountReads() as reads:
        flag.item()
    assert reads.count == 1  # the counter counts


def test_overflow_message_is_the_one_of_apex(capsys):
    scaler = LossScaler("dynamic", name="3")
    for overflow in (1.0, 0.0, 1.0):
        scaler.update_scale(torch.tensor(overflow))
    scaler.report_overflows()
    assert capsys.readouterr().out.splitlines() == [
        "Gradient overflow.  Skipping step, loss scaler 3 reducing loss scale to 32768.0",
        "Gradient overflow.  Skipping step, loss scaler 3 reducing loss scale to 16384.0",
    ]


def initialized(num_losses=1, **options):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, num_losses=num_losses, verbosity=0, **options)


def test_state_dict_has_apex_format():
    initialized(num_losses=2)
    state = amp.state_dict()
    assert list(state) == ["loss_scaler0", "loss_scaler1"]
    assert state["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    assert isinstance(state["loss_scaler0"]["loss_scale"], float) and isinstance(state["loss_scaler0"]["unskipped"], int)


def test_state_dict_adds_to_the_destination():
    initialized()
    destination = {"epoch": 3}
    assert amp.state_dict(destination) is destination and list(destination) == ["epoch", "loss_scaler0"]


def test_load_state_dict_applies_in_dict_order_and_ignores_the_number():
    initialized(num_losses=2)
    amp.load_state_dict({"loss_scaler7": {"loss_scale": 4.0, "unskipped": 1},
                         "loss_scaler0": {"loss_scale": 8.0, "unskipped": 2}})
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [4.0, 8.0]
    assert [s._unskipped for s in amp._amp_state.loss_scalers] == [1, 2]


def test_load_state_dict_warns_about_the_count_and_skips_the_rest(capsys):
    initialized(num_losses=1)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i} for i in range(2)})
    assert capsys.readouterr().out.splitlines() == [
        "Warning: state_dict contains 2 entries, while 1 loss_scalers are used",
        "Skipping loss_scaler[1], since num_losses was set to 1",
    ]
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1.0


def test_load_state_dict_raises_for_unexpected_keys_after_loading():
    initialized(num_losses=2)
    state = {"extra": 1, "loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}}
    with pytest.raises(RuntimeError, match='Unexpected key\\(s\\) in state_dict: "extra"'):
        amp.load_state_dict(state)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 4.0


def test_a_dynamic_state_changes_a_static_scaler():
    initialized(loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 5}})
    assert amp._amp_state.loss_scalers[0].loss_scale() == 512.0


def test_state_dict_needs_initialize():
    with pytest.raises(AttributeError, match="loss_scalers"):
        amp.state_dict()
    model = torch.nn.Linear(2, 2)
    amp.initialize(model, enabled=False)
    with pytest.raises(AttributeError, match="loss_scalers"):
        amp.load_state_dict({})
