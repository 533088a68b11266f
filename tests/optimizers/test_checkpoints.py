"""State dicts: bitwise resumption, float32 state for half parameters, masters, torch.save, user hooks."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from apexfx.optimizers import FusedAdam
from tests.optimizers.optimizer_models import OPTIMIZERS, build, same_parameters, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_is_bitwise(name, dtype):
    model, optimizer = build(name, dtype)
    train(model, optimizer, 3)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed_model, resumed = build(name, dtype, seed=1)
    for m_first in (True, False):  # in either order
        if m_first:
            resumed_model.load_state_dict(saved["model"])
        else:
            resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, 3, start=3)
    train(resumed_model, resumed, 3, start=3)
    assert same_parameters(model, resumed_model)
    for a, b in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_masters_are_in_the_state_dict():
    model, optimizer = build("adam_capturable", torch.bfloat16)
    train(model, optimizer, 2)
    state = optimizer.state_dict()["state"][0]
    assert state["master_param"].dtype == torch.float32
    assert torch.equal(state["master_param"].bfloat16(), model[0].weight)
    assert not torch.equal(state["master_param"], model[0].weight.float())


def test_loading_does_not_alias_the_state_dict():
    model, optimizer = build("adamw")
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    frozen = copy.deepcopy(saved)
    other_model, other = build("adamw")
    other.load_state_dict(saved)
    train(other_model, other, 2)
    assert torch.equal(saved["state"][0]["exp_avg"], frozen["state"][0]["exp_avg"])
    assert float(saved["param_groups"][0]["step"]) == 2.0


def test_user_hooks_see_ordinary_state():
    model, optimizer = build("adamw", torch.bfloat16)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    other_model, other = build("adamw", torch.bfloat16)
    seen = []

    def pre(_, state_dict):
        seen.append(type(state_dict["state"][0]["exp_avg"]))
        state_dict["state"][0] = {**state_dict["state"][0], "exp_avg": torch.full((5, 7), 0.125)}

    other.register_load_state_dict_pre_hook(pre)
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.state[other_model[0].weight]["exp_avg"].dtype))
    other.load_state_dict(saved)
    assert seen == [torch.Tensor, torch.float32]
    assert torch.all(other.state[other_model[0].weight]["exp_avg"] == 0.125)


def odd_states(name):
    state = {"exp_avg": torch.zeros(5, 7), "exp_avg_sq": torch.zeros(5, 7)}
    return {
        "no dict": (torch.zeros(5, 7), "it is Tensor, expected a dict"),
        "half of it": ({"exp_avg": state["exp_avg"]}, "it has exp_avg and lacks exp_avg_sq"),
        "another optimizer's": ({"momentum_buffer": state["exp_avg"]}, "it has momentum_buffer and lacks exp_avg, exp_avg_sq"),
        "another list's": ({**state, "exp_avg_sq": torch.zeros(7)},
                           r"its exp_avg_sq is a tensor of \(7,\), expected .* \(5, 7\)"),
        "a number": ({**state, "exp_avg_sq": 1.0}, "its exp_avg_sq is float, expected a tensor"),
        "another list's master": ({**state, "master_param": torch.zeros(2)}, r"its master_param is a tensor of \(2,\)"),
    }[name]


@pytest.mark.parametrize("name", ["no dict", "half of it", "another optimizer's", "another list's", "a number",
                                  "another list's master"])
def test_state_that_does_not_fit_is_refused_and_changes_nothing(name):
    model, optimizer = build("adamw")
    train(model, optimizer, 2)
    saved, (odd, message) = copy.deepcopy(optimizer.state_dict()), odd_states(name)
    before = copy.deepcopy(saved)
    saved["state"][0] = odd
    with pytest.raises(ValueError, match=f"FusedAdam cannot load the state of parameter 0: {message}"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)
    assert not optimizer._optimizer_load_state_dict_pre_hooks and not optimizer._optimizer_load_state_dict_post_hooks


def test_state_of_no_parameter_and_parameters_without_state_load_as_in_torch():
    results = []
    for make in (lambda p: FusedAdam(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)):
        model, _ = build("adamw")
        optimizer = make(model.parameters())
        train(model, optimizer, 2)
        optimizer.state["epoch"] = 3
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][1]
        optimizer.load_state_dict(saved)
        assert optimizer.state["epoch"] == 3 and model[0].bias not in optimizer.state
        results.append(set(optimizer.state) - {"epoch"} == {p for p in model.parameters() if p is not model[0].bias})
        train(model, optimizer, 1)
    assert results == [True, True]


def test_masters_follow_float32_training():
    """bfloat16 training with masters stays close to float32 training; without masters small updates are lost."""
    results = {}
    for key, dtype, masters in (("wide", torch.float32, False),
                                ("masters", torch.bfloat16, True), ("plain", torch.bfloat16, False)):
        param = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
        cls, _ = OPTIMIZERS["adamw"]
        optimizer = cls([param], lr=1e-4, master_weights=masters)
        for _ in range(30):
            param.grad = torch.ones_like(param)
            optimizer.step()
        results[key] = param.detach().float()
    # 30 steps of 1e-4 move by 3e-3, below half of bfloat16's spacing under 1 (2^-8): the master moves, the plain one cannot
    assert torch.all(results["plain"] == 1.0)
    assert torch.equal(results["masters"], results["wide"].bfloat16().float())
    assert results["masters"][0] != 1.0
