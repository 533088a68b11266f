"""torch's optimizer conventions, for every fused optimizer: closures, groups, hooks, copies, schedulers, zero_grad."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD
from tests.optimizers.optimizer_models import OPTIMIZERS, backward, build, same_parameters, train

ALL = pytest.mark.parametrize("name", OPTIMIZERS)


@ALL
def test_loss_goes_down(name):
    model, optimizer = build(name)
    losses = []
    x = torch.randn(32, 7)

    def closure():
        optimizer.zero_grad()
        loss = model(x).sub(1.0).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        losses.append(optimizer.step(closure).item())
    assert losses[-1] < losses[0]


@ALL
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_train(name, dtype):
    model, optimizer = build(name, dtype)
    before = copy.deepcopy(model)
    train(model, optimizer, 3)
    assert not same_parameters(model, before)
    for param, state in optimizer.state.items():
        assert param.dtype == dtype
        for key, value in state.items():
            wide = dtype == torch.float64 and not (name == "novograd" and key == "exp_avg_sq")
            assert value.dtype == (torch.float64 if wide else torch.float32)


@ALL
def test_parameters_without_gradients_are_left_alone(name):
    model, optimizer = build(name)
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    train(model, optimizer, 2)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight not in optimizer.state
    model[0].weight.requires_grad_(True)
    train(model, optimizer, 1, start=2)
    assert not torch.equal(model[0].weight, before)


@ALL
def test_groups_have_their_own_settings(name):
    model, optimizer = build(name)
    reference, other = build(name)
    cls, keywords = OPTIMIZERS[name]
    split = cls([{"params": list(reference[0].parameters())}, {"params": list(reference[2].parameters())}], **keywords)
    train(model, optimizer, 3)
    train(reference, split, 3)
    assert same_parameters(model, reference)
    frozen = reference[2].weight.clone()
    lr = split.param_groups[1]["lr"]
    split.param_groups[1]["lr"] = lr * 0
    train(reference, split, 1, start=3)
    assert torch.equal(reference[2].weight, frozen)


@ALL
def test_a_group_added_later_counts_its_own_steps(name):
    model, optimizer = build(name)
    train(model, optimizer, 2)
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(3)
    train_grads = [p.grad for p in model.parameters()]
    assert all(g is not None for g in train_grads)
    optimizer.step()
    assert [float(g["step"]) for g in optimizer.param_groups] == [3.0, 1.0]


@ALL
def test_hooks_run(name):
    model, optimizer = build(name)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(model, optimizer, 1)
    assert seen == ["pre", "post"]


@ALL
def test_deepcopy_and_pickle_continue_bitwise(name):
    model, optimizer = build(name)
    train(model, optimizer, 2)
    copied_model, copied = copy.deepcopy((model, optimizer))
    pickled_model, pickled = pickle.loads(pickle.dumps((model, optimizer)))
    for m, o in ((model, optimizer), (copied_model, copied), (pickled_model, pickled)):
        train(m, o, 2, start=2)
    assert same_parameters(model, copied_model)
    assert same_parameters(model, pickled_model)


@ALL
def test_learning_rate_schedulers(name):
    model, optimizer = build(name)
    first = float(optimizer.param_groups[0]["lr"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    train(model, optimizer, 1)
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(first / 2)
    before = copy.deepcopy(model)
    train(model, optimizer, 1, start=1)
    assert not same_parameters(model, before)


def test_zero_grad_follows_the_constructor_and_the_call():
    for set_grad_none in (True, False):
        model, optimizer = build("adamw", set_grad_none=set_grad_none)
        backward(model, 0)
        optimizer.zero_grad()
        assert (model[0].weight.grad is None) == set_grad_none
        backward(model, 0)
        optimizer.zero_grad(set_to_none=not set_grad_none)
        assert (model[0].weight.grad is None) == (not set_grad_none)
    assert FusedSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).set_grad_none is False


@pytest.mark.parametrize("make,error", [
    (lambda p: FusedAdam(p, lr=-1.0), ValueError),
    (lambda p: FusedAdam(p, lr=float("nan")), ValueError),
    (lambda p: FusedAdam(p, eps=-1e-8), ValueError),
    (lambda p: FusedAdam(p, betas=(1.0, 0.9)), ValueError),
    (lambda p: FusedAdam(p, weight_decay=-1), ValueError),
    (lambda p: FusedAdam(p, amsgrad=True), RuntimeError),
    (lambda p: FusedLAMB(p, amsgrad=True), RuntimeError),
    (lambda p: FusedNovoGrad(p, norm_type=1), RuntimeError),
    (lambda p: FusedSGD(p, lr=0.1, nesterov=True), ValueError),
    (lambda p: FusedAdam(p).step(grads=[1]), RuntimeError),
])
def test_bad_settings_raise(make, error):
    with pytest.raises(error):
        make([torch.nn.Parameter(torch.ones(2))])


NO_NUMBERS = (-1.0, float("nan"), float("inf"), -float("inf"), "0.1", None, [0.1], torch.ones(2))
NO_BETAS = (0.9, None, "0.9", (0.9,), (0.9, 0.9, 0.9), (0.9, 1.0), (float("nan"), 0.9), ("0.9", 0.9), (0.9, None), (-0.1, 0.9))


@pytest.mark.parametrize("cls", [FusedAdam, FusedAdagrad, FusedLAMB, FusedMixedPrecisionLamb, FusedNovoGrad, FusedSGD])
def test_options_that_are_no_numbers_raise_in_the_constructor_a_group_and_a_state(cls):
    param = torch.nn.Parameter(torch.ones(2))
    good = cls([param])
    for name in ("lr", "eps", "weight_decay", "momentum", "betas"):
        for given in NO_BETAS if name == "betas" else NO_NUMBERS if name in good.defaults else ():
            if name not in good.defaults:
                continue
            state = good.state_dict()
            state["param_groups"][0][name] = given
            for use in (lambda name=name, given=given: cls([param], **{name: given}),
                        lambda name=name, given=given: cls([{"params": [param], name: given}]),
                        lambda name=name, given=given: good.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))],
                                                                             name: given}),
                        lambda state=state: good.load_state_dict(state)):
                with pytest.raises((ValueError, TypeError), match=rf"{cls.__name__}: {name}"):
                    use()
    for given in (-1.0, float("nan"), "1", [1.0]):
        with pytest.raises((ValueError, TypeError), match="max_grad_norm"):
            cls([param], max_grad_norm=given)
    for count in (-1.0, float("nan"), float("inf")):
        state = good.state_dict()
        state["param_groups"][0]["step"] = torch.tensor(count)
        with pytest.raises(ValueError, match="step"):
            good.load_state_dict(state)
    assert len(good.param_groups) == 1 and good.param_groups[0]["lr"] == good.defaults["lr"]


@ALL
def test_a_step_never_asks_for_a_host_value(name, monkeypatch):
    model, optimizer = build(name, torch.bfloat16, **({} if "mixed" in name else {"max_grad_norm": 1.0}))
    optimizer.grad_scale = torch.tensor(4.0)
    train(model, optimizer, 1)

    def refuse(*_):
        raise AssertionError("the step asked for a value on the host")

    for method in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    optimizer.step()


@pytest.fixture
def capture(monkeypatch):
    """Pretend that a CUDA graph captures the current stream, from the call on."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    capturing = False

    def begin():
        nonlocal capturing
        capturing = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    return begin


@ALL
def test_a_capture_wants_a_learning_rate_that_it_does_not_freeze(name, capture):
    model, optimizer = build(name)
    train(model, optimizer, 1)
    before = copy.deepcopy(model)
    capture()
    if optimizer.capturable:
        optimizer.param_groups[0]["lr"] = 1e-3
        with pytest.raises(RuntimeError, match=r"learning rate 0\.001.*group\['lr'\]\.fill_"):
            train(model, optimizer, 1)
    else:
        with pytest.raises(RuntimeError, match="freeze the learning rate.*capturable=True"):
            train(model, optimizer, 1)
    assert same_parameters(model, before)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("adam_capturable", "mixed_lamb")])
@pytest.mark.parametrize("masters", [False, True])
def test_a_capture_wants_state_that_is_there(name, masters, capture):
    dtype = torch.bfloat16 if masters else torch.float32
    model, optimizer = build(name, dtype, capturable=True, master_weights=masters)
    model[0].weight.requires_grad_(False)
    train(model, optimizer, 1)
    model[0].weight.requires_grad_(True)
    known = {param: dict(state) for param, state in optimizer.state.items()}
    capture()
    if name == "sgd_plain" and not masters:  # has no state
        train(model, optimizer, 1)
        return
    with pytest.raises(RuntimeError, match=r"state of a parameter of shape \(5, 7\).*take one step.*before the capture"):
        train(model, optimizer, 1)
    assert {param: dict(state) for param, state in optimizer.state.items() if state} == known
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = None
    train(model, optimizer, 1)


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
