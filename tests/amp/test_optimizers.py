"""Masters, gradients and the methods of an initialised optimizer (APEX_SPEC 1.4, 1.5)."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx import amp, optimizers
from apexfx.testing import assert_close
from tests.amp.amp_cases import ConvNet, batch, made, train


def backward(model, optimizer, step=0, **options):
    x, y = batch(step)
    with amp.scale_loss(F.cross_entropy(model(x), y), optimizer, **options) as loss:
        loss.backward()


def test_groups_hold_masters_float32_and_frozen_parameters_in_order():
    torch.manual_seed(0)
    model = ConvNet()
    model.fc.bias.requires_grad_(False)
    expected = [p.detach().clone() for p in model.parameters()]
    names = [n for n, _ in model.named_parameters()]
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    found = list(amp.master_params(optimizer))
    for name, master, value in zip(names, found, expected):
        parameter = model.get_parameter(name)
        if name.startswith("norm") or name == "fc.bias":
            assert master is parameter  # float32 ones and frozen ones stay
        else:
            assert master is not parameter and master.is_leaf and master.requires_grad
            assert torch.equal(master, value.bfloat16().float())
    assert model.fc.bias.dtype == torch.bfloat16


def test_stash_has_the_names_of_apex():
    model, optimizer = made()
    stash = optimizer._amp_stash
    assert stash.lazy_init_called and not stash.already_patched and not stash.params_have_scaled_gradients
    assert stash.fp16_groups[0] == stash.all_fp16_params and stash.fp32_from_fp16_groups[0] == stash.all_fp32_from_fp16_params
    assert stash.fp32_from_fp32_groups[0] == stash.all_fp32_from_fp32_params == [model.norm.weight, model.norm.bias]
    for name in ("_master_params_to_model_params", "_lazy_init_maybe_master_weights", "_prepare_amp_backward",
                 "_post_amp_backward", "_amp_lazy_init"):
        assert callable(getattr(optimizer, name))


def test_the_methods_downstream_code_calls_do_an_iteration():
    model, optimizer = made(loss_scale=8.0)
    x, y = batch()
    optimizer._amp_lazy_init()
    optimizer._prepare_amp_backward()
    (F.cross_entropy(model(x), y) * 8.0).backward()
    optimizer._post_amp_backward(amp._amp_state.loss_scalers[0])
    master, half = optimizer.param_groups[0]["params"][0], model.conv.weight
    assert torch.equal(master.grad, half.grad.float() / 8.0)


def test_step_before_anything_else_works():
    model, optimizer = made()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()  # AttributeError in Apex: masters were made at the first scale_loss
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("set_to_none", [None, True, False])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_zero_grad_takes_set_to_none(level, set_to_none):
    model, optimizer = made(level)
    backward(model, optimizer)
    optimizer.zero_grad() if set_to_none is None else optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none in (None, True) else parameter.grad.abs().max() == 0
    if level == "O2":
        assert optimizer.param_groups[0]["params"][0].grad is None


def test_add_param_group_makes_masters_in_the_given_dict():
    model, optimizer = made()
    new = nn.Linear(4, 4).bfloat16()
    group = {"params": list(new.parameters()), "lr": 0.5}
    optimizer.add_param_group(group)
    assert all(p.dtype == torch.float32 and p is not q for p, q in zip(group["params"], new.parameters()))
    assert optimizer._amp_stash.fp16_groups[1] == list(new.parameters())
    x, y = batch()
    before = new.weight.detach().clone()
    with amp.scale_loss(F.cross_entropy(new(model(x).bfloat16()).float(), y), optimizer) as loss:
        loss.backward()
    optimizer.step()
    assert not torch.equal(new.weight, before)
    with pytest.raises(TypeError, match="sets"):
        optimizer.add_param_group({"params": {new.weight}})


def test_add_param_group_without_masters():
    model, optimizer = made("O1")
    new = nn.Linear(4, 4)
    optimizer.add_param_group({"params": new.weight})
    assert optimizer.param_groups[1]["params"] == [new.weight]
    x, y = batch()
    with amp.scale_loss(F.cross_entropy(new(model(x)), y), optimizer) as loss:
        loss.backward()
    scaled = torch.autograd.grad(F.cross_entropy(new(model(x)), y), new.weight)[0]
    assert torch.allclose(new.weight.grad, scaled, rtol=1e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_complex_parameters_are_refused(level):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight, nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1)
    with pytest.raises(TypeError, match="must be floating tensors. Received torch.complex64"):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.parametrize("first", ["scheduler", "initialize"])
def test_schedulers_work_and_do_not_warn(first):
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if first == "scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    if first == "initialize":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = model.conv.weight.detach().clone()
        for step in range(2):
            backward(model, optimizer, step)
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.025 and not torch.equal(model.conv.weight, before)


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
                                  lambda p: optimizers.FusedSGD(p, lr=0.1)])
@pytest.mark.parametrize("level, scale, works", [
    ("O1", 8.0, True), ("O0", 1.0, True), ("O1", "dynamic", False), ("O2", 8.0, False), ("O2", "dynamic", False)])
def test_closures_where_no_step_is_skipped(make, level, scale, works):
    model, optimizer = made(level, make, loss_scale=scale)
    model.eval()

    def closure():
        optimizer.zero_grad()
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return loss

    if not works:
        for options in ({}, {"closure": closure}):
            with pytest.raises(RuntimeError, match="given a closure, .* call the closure, then step"):
                optimizer.step(*(() if options else (closure,)), **options)
        return
    first = optimizer.step(closure)
    for _ in range(3):
        last = optimizer.step(closure)
    assert last < first


def test_sparse_gradients_are_unscaled():
    embedding = nn.Embedding(10, 4, sparse=True)
    model, optimizer = amp.initialize(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1), loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss(model(torch.tensor([1, 1, 3])).sum(), optimizer) as loss:
            loss.backward()
    dense = embedding.weight.grad.to_dense()
    assert torch.equal(dense[1], torch.full((4,), 4.0)) and torch.equal(dense[3], torch.full((4,), 2.0))


def test_double_parameters_train_at_o1():
    model = nn.Linear(4, 4).double()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=8.0, verbosity=0)
    out = model(torch.ones(2, 4, dtype=torch.float64))
    assert out.dtype == torch.float64
    with amp.scale_loss(out.sum(), optimizer) as loss:
        loss.backward()
    assert torch.equal(model.bias.grad, torch.full((4,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("opt_level, make, warns", [
    ("O3", lambda p: torch.optim.SGD(p, lr=0.1, fused=True), True),
    ("O3", lambda p: torch.optim.SGD(p, lr=0.1, fused=False), False),
    ("O3", lambda p: torch.optim.Adam(p, lr=0.1, fused=True), False),
    ("O3", lambda p: optimizers.FusedSGD(p, lr=0.1), False),
    ("O2", lambda p: torch.optim.SGD(p, lr=0.1, fused=True), False),
    ("O1", lambda p: torch.optim.SGD(p, lr=0.1, fused=True), False),
])
def test_fused_sgd_of_half_parameters_on_the_cpu_is_warned_of(opt_level, make, warns):
    model = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        amp.initialize(model, make(model.parameters()), opt_level=opt_level, verbosity=0)
    messages = [str(w.message) for w in caught if "fused=False or take apexfx.optimizers.FusedSGD" in str(w.message)]
    assert len(messages) == warns


# ---- model and masters follow each other: copies, loading, edits, checkpoints ----------------------------------------------


@pytest.mark.parametrize("make", [lambda p: torch.optim.Adam(p, lr=0.01), lambda p: optimizers.FusedAdam(p, lr=0.01)])
def test_model_and_optimizer_copied_together_train_alike(make):
    model, optimizer = made(make=make)
    train(model, optimizer, 2)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    expected = train(model, optimizer, 2, first=2)
    assert torch.equal(train(model_copy, optimizer_copy, 2, first=2), expected)
    assert optimizer_copy._amp_stash.all_fp16_params[0] is model_copy.conv.weight
    model_loaded, optimizer_loaded = pickle.loads(pickle.dumps((model, optimizer)))
    expected = train(model, optimizer, 1, first=4)
    assert torch.equal(train(model_loaded, optimizer_loaded, 1, first=4), expected)


def test_loading_a_model_after_initialize_reaches_the_masters():
    model, optimizer = made()
    train(model, optimizer, 1)
    source = ConvNet()
    model.load_state_dict(source.state_dict())
    master = optimizer.param_groups[0]["params"][0]
    assert torch.equal(master, source.conv.weight)  # with all of its precision
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.conv.weight, source.conv.weight.bfloat16())


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_edits_of_the_model_reach_the_masters(steps, through_data):
    model, optimizer = made()
    if steps:
        train(model, optimizer, steps)
    master = optimizer.param_groups[0]["params"][0]
    with torch.no_grad():
        (model.conv.weight.data if through_data else model.conv.weight).clamp_(-0.1, 0.1)
    kept = model.conv.weight.abs() < 0.1
    precise = master[kept].clone()
    assert torch.equal(model.state_dict()["conv.weight"][kept], precise)
    optimizer.zero_grad()
    optimizer.step()
    assert master.abs().max() <= torch.tensor(0.1).bfloat16() and torch.equal(master[kept], precise)


def unfreeze(model, optimizer):
    model.fc.weight.requires_grad_(True)


def append(model, optimizer):
    optimizer.param_groups[0]["params"].append(model.fc.weight)


def replace(model, optimizer):
    model.fc.weight = torch.nn.Parameter(model.fc.weight.detach().clone())
    optimizer.param_groups[0]["params"][-1] = model.fc.weight


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("change", [unfreeze, append, replace])
def test_what_the_optimizer_trains_from_some_step_on_is_unscaled(change, level):
    """A parameter that was frozen, or not in a group, when `initialize` looked."""
    models = []
    for scaled in (False, True):
        torch.manual_seed(0)
        model = ConvNet()
        parameters = [p for p in model.parameters() if change is not append or p is not model.fc.weight]
        parameters.sort(key=lambda p: p is model.fc.weight)
        model.fc.weight.requires_grad_(change is not unfreeze)
        optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        if scaled:
            model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        for step in range(4):
            if step == 2:
                change(model, optimizer)
            train(model, optimizer, first=step, scaled=scaled)
        models.append(model.state_dict())
    for a, b in zip(models[0].values(), models[1].values(), strict=True):
        assert_close(b, a, dtype=torch.float32 if level == "O0" else torch.bfloat16, scale=1 if level == "O0" else 8)


def test_optimizers_in_turn_on_the_same_half_parameters_see_each_others_steps():
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4, bias=False), torch.randn(8, 4)
    reference = copy.deepcopy(model)
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    amp.initialize(model, both, opt_level="O2", verbosity=0)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for optimizer in both * 3:
        optimizer.zero_grad()
        other.zero_grad()
        with amp.scale_loss(model(x).square().mean(), optimizer) as loss:
            loss.backward()
        reference(x).square().mean().backward()
        optimizer.step()
        other.step()
    assert torch.allclose(model.weight.float(), reference.weight, rtol=0.01, atol=0.005)


def test_a_loaded_model_saves_what_was_edited_since():
    model, optimizer = amp.initialize(
        model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4)).sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    loaded = pickle.loads(pickle.dumps(model))
    for _ in range(4):
        with torch.no_grad():
            loaded.bias.add_(1.0)
        assert torch.equal(loaded.state_dict()["bias"], loaded.bias.float())


def test_a_half_parameter_cannot_be_added_twice():
    model, optimizer = amp.initialize(
        model := nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [model.weight]})
    assert len(optimizer.param_groups) == 1 and len(optimizer._amp_stash.all_fp16_params) == 2
