"""A step takes over the tensors that the last one gathered, and sees everything that was changed in between."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from apexfx.optimizers import FusedAdam, FusedSGD
from tests.optimizers.optimizer_models import BF16, OPTIMIZERS, backward, build, same_parameters, train

ALL = pytest.mark.parametrize("name", OPTIMIZERS)


def replaced_state(model, optimizer):
    for state in optimizer.state.values():
        state.update({key: torch.zeros_like(value) for key, value in state.items()})


def added_group(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.5})
    optimizer.param_groups[-1]["params"][0].grad = torch.ones(3)


def loaded(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def state_data_reordered(model, optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            if value.dim() == 2:
                value.data = value.data.t().contiguous().t()


def replaced_parameter(model, optimizer):
    model[0].bias = torch.nn.Parameter(torch.ones_like(model[0].bias))
    optimizer.param_groups[0]["params"][1] = model[0].bias


CHANGES = {
    "nothing": lambda model, optimizer: None,
    "state": replaced_state,
    "one state": lambda model, optimizer: optimizer.state.pop(model[2].weight, None),
    "no state": lambda model, optimizer: optimizer.state.clear(),
    "frozen": lambda model, optimizer: model[0].weight.requires_grad_(False),
    "group": added_group,
    "loaded": loaded,
    "parameter": replaced_parameter,
    "fewer": lambda model, optimizer: optimizer.param_groups[0]["params"].pop(),
    "order": lambda model, optimizer: optimizer.param_groups[0]["params"].reverse(),
    "data": lambda model, optimizer: setattr(model[0].weight, "data", model[0].weight.data + 1),
    "data of the state": state_data_reordered,
    "momentum": lambda model, optimizer: optimizer.param_groups[0].update(momentum=0.5),
    "half": lambda model, optimizer: model.bfloat16(),
    "something else": lambda model, optimizer: optimizer.state.__setitem__("epoch", 3),
}


@ALL
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts(name, change):
    results = []
    for keeps in (True, False):
        model, optimizer = build(name, BF16 if name == "mixed_lamb" else torch.float32)
        for seed in range(6):
            if seed == 3:
                CHANGES[change](model, optimizer)
            if not keeps:
                optimizer._last_held = None
            train(model, optimizer, 1, start=seed)
        added = [p for group in optimizer.param_groups for p in group["params"]]
        results.append((model, added, [list(state.values()) for state in optimizer.state.values() if state != 3]))
    (kept, kept_params, kept_states), (anew, params, states) = results
    assert same_parameters(kept, anew)
    assert all(torch.equal(a, b) for a, b in zip(kept_params, params, strict=True))
    for a, b in zip(kept_states, states, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_tensors_of_the_last_step_are_taken_over(monkeypatch):
    model, optimizer = build("adamw")
    train(model, optimizer, 2)
    monkeypatch.setattr(optimizer, "_gather", None)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 2, start=2)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))


def test_gradients_and_loaded_state_are_not_kept_alive():
    model, optimizer = build("sgd")
    train(model, optimizer, 2)
    gradient = weakref.ref(model[0].weight.grad)
    state = weakref.ref(optimizer.state[model[0].weight]["momentum_buffer"])
    gc.disable()
    try:
        optimizer.zero_grad(set_to_none=True)
        assert gradient() is None
        optimizer.load_state_dict(optimizer.state_dict())
        assert state() is None
    finally:
        gc.enable()


@ALL
def test_nothing_is_kept_alive_between_steps(name):
    model, optimizer = build(name)
    train(model, optimizer, 3)
    optimizer.zero_grad()
    kept = [weakref.ref(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    gc.disable()
    try:
        for state in optimizer.state.values():
            state.update({key: v.clone() for key, v in state.items() if isinstance(v, torch.Tensor)})
        assert all(value() is None for value in kept)
        kept = [weakref.ref(parameter) for parameter in model.parameters()]
        optimizer.state.clear(), optimizer.param_groups.clear()
        del model
        assert all(parameter() is None for parameter in kept)
    finally:
        gc.enable()


def test_a_model_made_half_gets_masters():
    model = torch.nn.Linear(4, 4)
    optimizer = FusedAdam(model.parameters(), lr=0.01, master_weights=True)
    for step in range(4):
        if step == 2:
            model.bfloat16()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert all("master_param" in optimizer.state[parameter] for parameter in model.parameters())


def test_parameters_may_be_swapped_after_steps():
    model, optimizer = build("adamw")
    train(model, optimizer, 2)
    optimizer.zero_grad()
    torch.utils.swap_tensors(model[0].weight, torch.nn.Parameter(torch.ones(5, 7)))
    assert model[0].weight.eq(1).all()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_sparse_gradients_after_dense_ones_raise_before_any_group_is_updated(max_grad_norm):
    weights = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizer = FusedSGD([{"params": [weight]} for weight in weights], lr=0.1, max_grad_norm=max_grad_norm)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones(3, 2)
        optimizer.step()
    before = [weight.detach().clone() for weight in weights]
    weights[1].grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match="FusedSGD does not support sparse gradients"):
        optimizer.step()
    assert all(map(torch.equal, weights, before))
    assert [group["step"].item() for group in optimizer.param_groups] == [3, 3]


def test_state_that_moved_from_one_parameter_to_another_is_not_taken_for_the_first_ones():
    results = []
    for keeps in (True, False):
        weights = [torch.nn.Parameter(torch.full((3,), float(i))) for i in range(3)]
        optimizer = FusedSGD(weights, lr=0.1, momentum=0.9)
        for step in range(5):
            for weight in weights[:2]:
                weight.grad = torch.ones(3)
            moved, state = optimizer.state[weights[1]], optimizer.state[weights[2]]  # {} at first
            if step == 3:
                state.update({name: value + 1 for name, value in moved.items()})
                moved.clear()
            if not keeps:
                optimizer._last_held = None
            optimizer.step()
        results.append(weights)
    assert all(map(torch.equal, *results))


def test_steps_without_any_gradient_do_nothing():
    model, optimizer = build("adamw")
    backward(model, 0)
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))


@pytest.mark.parametrize("data", [torch.zeros(3), torch.zeros(5, 7, dtype=torch.float64)])
def test_data_of_the_state_that_does_not_fit_raises(data):
    model, optimizer = build("adamw")
    train(model, optimizer, 3)
    optimizer.state[model[0].weight]["exp_avg"].data = data
    with pytest.raises(RuntimeError, match=r"exp_avgs\[0\]"):
        train(model, optimizer, 1)
