"""What `initialize` accepts and returns (APEX_SPEC 1.3), and several calls of it."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import apexfx
from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from apexfx.fp16_utils import FP16_Optimizer
from apexfx.parallel import DistributedDataParallel
from apexfx.parallel.LARC import LARC
from tests.amp.amp_cases import ConvNet, batch, train


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def initialize(*args, **options):
    return amp.initialize(*args, verbosity=0, **{"dtype": torch.bfloat16, **options})


def test_returns_have_the_shape_of_the_arguments():
    a, b, c = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    assert initialize(a) is a
    assert initialize([b, c]) == [b, c]
    optimizer = sgd(a)
    assert initialize(a, optimizer) == (a, optimizer)
    assert initialize([a], [sgd(a), sgd(a)])[0] == [a]
    assert initialize(a, []) == (a, [])


def test_models_and_optimizers_are_changed_in_place_and_keep_their_class():
    model = ConvNet()
    optimizer = sgd(model)
    result, given = initialize(model, optimizer, opt_level="O2")
    assert result is model and given is optimizer
    assert isinstance(model, ConvNet) and type(model).__name__ == "ConvNet"
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"


@pytest.mark.parametrize("models", [(nn.Linear(2, 2),), "model", None])
def test_models_must_be_a_module_or_a_list(models):
    with pytest.raises(TypeError, match="models must be"):
        initialize(models)


@pytest.mark.parametrize("optimizers", [lambda o: (o,), lambda o: "sgd", lambda o: [o, 3]])
def test_optimizers_must_be_optimizers_or_a_list(optimizers):
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="optimizers must be"):
        initialize(model, optimizers(sgd(model)))


@pytest.mark.parametrize("listed", [False, True])
def test_an_fp16_optimizer_is_refused(listed):
    model = nn.Linear(2, 2).bfloat16()
    optimizer = FP16_Optimizer(sgd(model))
    with pytest.raises(RuntimeError, match="FP16_Optimizer"):
        initialize(nn.Linear(2, 2), [optimizer] if listed else optimizer)


def test_larc_is_an_optimizer():
    model = ConvNet()
    larc = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    assert initialize(model, larc, opt_level="O2")[1] is larc
    assert all(p.dtype == torch.float32 for p in amp.master_params(larc))
    train(model, larc, 2)


@pytest.mark.parametrize("wrapper", [nn.DataParallel, nn.parallel.DistributedDataParallel, DistributedDataParallel])
def test_parallel_wrappers_come_after(wrapper):
    wrapped = wrapper.__new__(wrapper)  # neither wants to be built without ranks
    nn.Module.__init__(wrapped)
    with pytest.raises(RuntimeError, match="instance of .*DataParallel.*AFTER"):
        initialize([nn.Linear(2, 2), wrapped])


def test_a_refused_model_leaves_the_others_as_they_are():
    model = ConvNet()
    with pytest.raises(RuntimeError, match="expected torch.float32"):
        initialize([model, nn.Linear(2, 2).half()], opt_level="O2")
    assert type(model) is ConvNet and {p.dtype for p in model.parameters()} == {torch.float32}


def test_compiled_and_scripted_models_are_refused():
    with pytest.raises(TypeError, match="compile=True"):
        initialize(torch.compile(nn.Linear(2, 2), backend="eager"))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_transformed_model_takes_no_casts_of_amp(level):
    model = apexfx.transform(nn.Linear(2, 2), inner="eager")
    for given, where in ((model, "Incoming model"), (nn.Sequential(model), "Submodule '0' of the incoming model")):
        with pytest.raises(RuntimeError, match=f"{where} was made by apexfx.transform"):
            initialize(given, opt_level=level)


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_a_transformed_model_has_the_loss_scale_that_the_refusal_recommends(level):
    model = apexfx.transform(nn.Linear(2, 2), opt_level=level, inner="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(RuntimeError) as refusal:
        initialize(model, optimizer)
    call = re.search(r"amp\.initialize\(.*\)", str(refusal.value)).group()
    names = {"amp": apexfx.amp, "model": model, "optimizer": optimizer}
    same_model, same_optimizer = eval(call, names)
    assert same_model is model and same_optimizer is optimizer
    for factor, steps, scale in ((1.0, True, 2.0**16), (float("inf"), False, 2.0**15), (1.0, True, 2.0**15)):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        with apexfx.amp.scale_loss(model(torch.ones(3, 2)).float().sum() * factor, optimizer) as loss:
            loss.backward()
        optimizer.step()
        assert torch.equal(before, model.weight) is not steps
        assert _amp_state.loss_scalers[0].loss_scale() == scale
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(3, 2)), model(torch.ones(3, 2))) and twin.weight.dtype == before.dtype


def test_a_half_model_is_refused_unless_allowed():
    with pytest.raises(RuntimeError, match="parameter weight of torch.float16, expected torch.float32"):
        initialize(nn.Linear(2, 2).half())
    buffered = nn.BatchNorm2d(2)
    buffered.running_mean = buffered.running_mean.half()
    with pytest.raises(RuntimeError, match="buffer running_mean"):
        initialize(buffered)
    _amp_state.allow_incoming_model_not_fp32 = True
    initialize(nn.Linear(2, 2).half(), opt_level="O3")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bfloat16_and_double_models_pass(dtype):
    model = nn.Linear(2, 2).to(dtype)
    initialize(model)
    assert model.weight.dtype == dtype


def test_models_come_first():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"got SGD; models come first: amp\.initialize\(model, optimizer\)"):
        initialize(sgd(model), model)


def test_an_optimizer_of_another_model_is_pointed_out():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"none of the 2 parameters of optimizers\[1\] \(SGD\) belongs to the models"):
        initialize(model, [sgd(model), sgd(other)], opt_level="O2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        initialize([model, other], sgd(other), opt_level="O1")


def test_an_optimizer_goes_through_once():
    model = nn.Linear(2, 2)
    _, optimizer = initialize(model, sgd(model))
    with pytest.raises(RuntimeError, match="only be passed through amp.initialize once"):
        initialize(model, optimizer)


def test_a_model_that_is_float16_by_amp_is_told_from_one_that_is_by_half():
    model = initialize(nn.Linear(2, 2), opt_level="O2", cast_model_type=torch.float16)
    with pytest.raises(RuntimeError, match="has been through amp.initialize before"):
        initialize(model, sgd(model), opt_level="O2")


@pytest.mark.parametrize("level, dtype", [("O2", torch.float32), ("O3", torch.bfloat16)])
def test_optimizer_state_made_before_follows_the_cast(level, dtype):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = optimizer.state[model.weight]["momentum_buffer"].clone()
    initialize(model, optimizer, opt_level=level)
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
    assert state.dtype == dtype and torch.equal(state, before.to(dtype))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_gradients_made_before_are_dropped_where_masters_come(level):
    model = ConvNet()
    model(batch()[0]).sum().backward()
    model, optimizer = initialize(model, sgd(model), opt_level=level)
    assert {p.grad is None for p in model.parameters()} == {level == "O2"}
    assert all(p.grad is None for p in amp.master_params(optimizer)) == (level == "O2")


@pytest.mark.parametrize("enabled", [False, None])
def test_disabled_returns_everything_unchanged(enabled):
    model = ConvNet()
    optimizer = sgd(model)
    assert initialize(model, enabled=enabled) is model
    assert initialize(model, optimizer, enabled=enabled) == (model, optimizer)
    assert type(model) is ConvNet and type(optimizer) is torch.optim.SGD and not _amp_state.opt_properties.enabled
    loss = model(batch()[0]).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_scale_limits_reach_the_scalers_and_the_state():
    initialize(nn.Linear(2, 2), min_loss_scale=2.0, max_loss_scale=64.0)
    assert _amp_state.loss_scalers[0].loss_scale() == 64.0
    assert (_amp_state.min_loss_scale, _amp_state.max_loss_scale) == (2.0, 64.0)


def test_a_second_call_replaces_the_state_but_not_what_is_in_use():
    first = ConvNet()
    first, first_optimizer = initialize(first, sgd(first), opt_level="O1", loss_scale=64.0)
    scaler = _amp_state.loss_scalers[0]
    second = ConvNet()
    second, second_optimizer = initialize(second, sgd(second), opt_level="O2", loss_scale=32.0)
    assert _amp_state.loss_scalers[0] is not scaler and _amp_state.opt_properties.opt_level == "O2"
    x, _ = batch()
    with amp.scale_loss(first(x).sum(), first_optimizer) as scaled:
        assert torch.equal(scaled, first(x).sum() * 64.0)
        scaled.backward()
    train(second, second_optimizer, 1)
    train(first, first_optimizer, 1)
    assert first.conv.weight.dtype == torch.float32 and second.conv.weight.dtype == torch.bfloat16


def test_a_model_may_be_initialised_again():
    model = ConvNet()
    for scale in (64.0, 32.0):
        model, optimizer = initialize(model, sgd(model), loss_scale=scale)
    assert [cls.__name__ for cls in type(model).__mro__].count("ConvNet") == 2  # its own class, and one subclass
    train(model, optimizer, 1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_compile_returns_models_that_train(level):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = initialize(model, optimizer, opt_level=level, compile=True, inner="eager", loss_scale=128.0)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert next(model.parameters()).dtype == (torch.bfloat16 if level == "O3" else torch.float32)
    assert all(p is q for p, q in zip(amp.master_params(optimizer), model.parameters()))
