"""What a user of a loop does out of habit, or mistypes, is told in the words of this package."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.train_step import _tell_of_default
from tests.small_models import take_step
from tests.tables import table

X, Y = torch.randn(8, 6), torch.randint(4, (8,))


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def make(optimizer=torch.optim.SGD, model=None, **options):
    model = build() if model is None else model
    return apexfx.train_step(model, F.cross_entropy, optimizer(model.parameters(), lr=0.1),
                             **{"inner": "eager", "opt_level": "O0", **options})


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"fallback": "transform"}], ids=str)
def test_backward_of_the_loss(options):
    step = make(**options)
    loss = step(X, Y)
    for each in (loss, copy.deepcopy(loss)):
        with pytest.raises(RuntimeError, match=r"loss that a training step returned.* leave out zero_grad\(\), backward\(\)"):
            each.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="loss that a training step returned"), apexfx.amp.scale_loss(each, step.optimizer):
            pass
    torch.save({"loss": loss}, saved := io.BytesIO())
    saved.seek(0)
    assert torch.equal(torch.load(saved, weights_only=True)["loss"], loss)
    step(X, Y)


class ReadsGradients(nn.Linear):
    """Scales by the gradient of the step before, or resets what there is, as an inner loop does."""

    does = ""

    def forward(self, x):
        if self.does == "resets":
            self.zero_grad()
        return super().forward(x) * (1.0 if self.does != "reads" or self.bias.grad is None else 1.0 + self.bias.grad.norm())


@pytest.mark.parametrize("in_loss, left, level", [(False, True, "O0"), (True, False, "O2")])
def test_a_gradient_that_is_read(in_loss, left, level):
    model = ReadsGradients(6, 4)
    if left:  # by a backward of before
        F.cross_entropy(model(X), Y).backward()
    model.does = "" if in_loss else "reads"

    def objective(m, x, y):
        return F.cross_entropy(m(x), y) + (0 if not in_loss or m.bias.grad is None else m.bias.grad.sum())

    options = {"opt_level": level, "inner": "eager", "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(ValueError, match=r"test_common_mistakes.py:\d+ reads the .grad of parameter 'bias'.* keep_grads=True"):
        apexfx.train_step(model, objective=objective, **options)(X, Y)


def test_with_keep_grads_it_is_that_of_the_step_before():
    models = [ReadsGradients(6, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model in models:
        model.does = "reads"
    step = apexfx.train_step(models[0], F.cross_entropy, optimizers[0], opt_level="O0", inner="eager", keep_grads=True)
    for _ in range(3):
        step(X, Y)
        take_step(optimizers[1], F.cross_entropy(models[1](X), Y))
    torch.testing.assert_close(*(model.state_dict() for model in models))


def test_gradients_that_are_reset_in_a_forward_are_not_read():
    model = ReadsGradients(6, 4)
    model.does = "resets"
    step = make(model=model)
    assert float(step(X, Y)) > float(step(X, Y))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, apexfx.optimizers.FusedAdam])
def test_a_step_of_the_optimizer_beside_it(optimizer, caplog):
    step = make(optimizer)
    before = [p.clone() for p in step.model.parameters()]
    step(X, Y)
    assert "updates outside" not in str(step.report)
    updated = [p.clone() for p in step.model.parameters()]
    assert not any(map(torch.equal, before, updated)) and "optimizer.step()" not in caplog.text
    for _ in range(2):
        nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
        step.optimizer.step()
    assert all(map(torch.equal, step.model.parameters(), updated))
    assert caplog.text.count("no parameter has a gradient, so it did nothing: a training step has updated") == 1
    again = make(lambda params, lr: step.optimizer, step.model)  # another step of the same optimizer
    step.optimizer.step()
    again(X, Y)
    assert caplog.text.count("no parameter has a gradient") == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.NAdam])  # in the graph, and of its own step()
def test_gradients_that_are_kept_are_not_applied_again(optimizer):
    step = make(optimizer, keep_grads=True)
    for _ in range(2):
        step(X, Y)
        before = copy.deepcopy(step.model.state_dict())
        with pytest.raises(RuntimeError, match="keep_grads=True has left in .grad, .* leave out optimizer.step()"):
            step.optimizer.step()
        torch.testing.assert_close(step.model.state_dict(), before, rtol=0, atol=0)

    def closure():
        step.optimizer.zero_grad()
        loss = F.cross_entropy(step.model(X), Y)
        loss.backward()
        return loss

    step.optimizer.step(closure)
    assert not torch.equal(step.model.state_dict()["0.weight"], before["0.weight"])


def test_gradients_beside_the_step_are_not_added_and_that_is_said(caplog):
    step, other = make(), make()
    for each, leaves in ((step, True), (other, False)):
        for _ in range(2):
            each.optimizer.zero_grad()
            if leaves:
                each.model(X).square().mean().backward()
            each(X, Y)
    torch.testing.assert_close(step.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
    assert caplog.text.count(".grad of 0.weight, 0.bias, 2.weight, 2.bias is there when the step is called, and is not") == 1
    other.optimizer.zero_grad(set_to_none=False)
    other(X, Y)
    assert caplog.text.count("is there when the step is called") == 1


@pytest.mark.long
def test_a_schedule_that_goes_on_at_each_call_that_accumulates(caplog):
    for by_update in (True, False):
        step = make(accumulate=2)
        schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, gamma=0.5)
        for _ in range(6):
            step(X, Y)
            if not by_update or step.updated:
                schedule.step()
        assert caplog.text.count("the learning rate has changed between calls that accumulate") == (0 if by_update else 1)


def test_a_group_that_is_added_between_calls_is_no_schedule(caplog):
    model = build()
    model[2].requires_grad_(False)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model[0].parameters(), lr=0.1), opt_level="O0",
                             inner="eager", accumulate=2)
    step(X, Y)
    model[2].requires_grad_(True)
    step.optimizer.add_param_group({"params": list(model[2].parameters())})
    step(X, Y)
    assert "learning rate has changed" not in caplog.text


def test_low_precision_that_nobody_asked_for_is_said(caplog):
    _tell_of_default.cache_clear()
    said = "opt_level= was not given, and O1 computes matrix products in bfloat16"
    asked = ({"opt_level": "O1"}, {"dtype": torch.bfloat16}, {"skip": ["precision"]})
    for options, count in (*((each, 0) for each in asked), ({}, 1), ({}, 1)):  # once in a process
        model = build()
        apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), inner="eager", **options)
        assert caplog.text.count(said) == count


def test_a_loop_of_its_own_beside_it_is_no_mistake(caplog):
    step, model = make(), build()
    step(X, Y)
    F.cross_entropy(step.model(X), Y).backward()
    step.optimizer.step()
    hooked = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked.register_step_post_hook(lambda *_: None)
    outside = make(lambda params, lr: hooked, model)  # whose own step() is called
    outside(X, Y)
    assert "updates outside" in str(outside.report) and "no parameter has a gradient" not in caplog.text


@pytest.mark.parametrize("name, said", [
    ("loss", "did you mean 'loss_fn'"), ("criterion", "the loss function is loss_fn="), ("lossfn", "did you mean 'loss_fn'"),
    ("objectiv", "did you mean 'objective'"), ("num_losses", "a step has one loss_scale="), ("max_loss_scale", "2..24"),
    ("gradient_accumulation_steps", "accumulate= of train_step"), ("mode", "list_mode_options"),
    ("static_graph", "which graphs do without"), ("clip_grad", "max_grad_norm= of train_step"), ("ema_decay", "ema=apexfx.EMA"),
])  # fmt: skip
def test_an_option_by_another_name(name, said):
    model = build()
    with pytest.raises(ValueError, match=f"unknown option '{name}'[:;] .*{said}.* Known options: "):
        apexfx.train_step(model, optimizer=torch.optim.SGD(model.parameters()), **{name: F.cross_entropy})


@pytest.mark.parametrize("name, value", [
    ("ema", torch.optim.swa_utils.AveragedModel(build())), ("modules", build()), ("parts", build()), ("parts", [build()]),
    ("safeguard", build()), ("optimizer", nn.Parameter(X)), ("optimizer", [build()]),
], ids=lambda value: value if isinstance(value, str) else "")
def test_an_option_that_is_a_module_or_a_tensor_is_told_by_its_type(name, value):
    model = build()
    options = {"optimizer": torch.optim.SGD(model.parameters(), 0.1), name: value}
    with pytest.raises(TypeError, match=rf"{name}=.*(AveragedModel|Sequential|Parameter)\(\.\.\.\)"):
        apexfx.train_step(model, F.cross_entropy, **options)


@table(3, "optimizer, name", [(optimizer, name) for optimizer, names in {
    torch.optim.SGD: ("lr", "momentum", "weight_decay"), torch.optim.AdamW: ("lr", "eps", "weight_decay"),
    torch.optim.RMSprop: ("lr", "alpha"), torch.optim.Muon: ("lr", "weight_decay"),
}.items() for name in names])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_text_for_a_number(optimizer, name, calls):
    step = make(optimizer, nn.Linear(6, 4, bias=False))
    for _ in range(calls):
        step(X, Y)
    before = step.model.weight.clone()
    step.optimizer.param_groups[0][name] = "1e-1"
    with pytest.raises(TypeError, match=rf"{name} of the optimizer is '1e-1' \(str\), expected a number: float\('1e-1'\)"):
        step(X, Y)
    assert torch.equal(step.model.weight, before)
    step.optimizer.param_groups[0][name] = 0.1
    step(X, Y)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_model_that_is_converted(calls):
    step = make()
    for _ in range(calls):
        step(X, Y)
    step.model.double()
    with pytest.raises(RuntimeError, match=r"parameters were converted \(model.double\(\)\); call model.float\(\), or give "
                                           "inputs in torch.float64") as raised:
        step(X, Y)
    assert "numpy" not in str(raised.value)
    assert step(X.double(), Y).dtype == torch.float64


def test_the_mean_of_a_loss_that_is_none():
    step = make()
    assert step.mean_loss.isnan() and step.mean_loss.dtype == torch.float64
    step(X, Y)
    with pytest.raises(RuntimeError, match=r"apexfx.Mean\(total, count\), and this step's is a scalar"):
        step.mean_loss  # noqa: B018


@pytest.mark.long
@pytest.mark.parametrize("call", [lambda s: s(torch.randn(6, 7), Y[:6]), lambda s: s(X[:7], Y[:6])], ids=["features", "targets"])
def test_sizes_that_change_have_no_names(call):
    step = make()
    step(X[:4], Y[:4])
    step(X[:5], Y[:5])
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call(step)
    assert "called: step(float32[" in raised.value.__notes__[-1]
    assert not re.search(r"\bs\d", str(raised.value)) and re.search(r"\b7\b", str(raised.value))


@pytest.mark.parametrize(("output", "key"), [(lambda y: (y, y), 0), (lambda y: {"logits": y}, "logits")])
def test_a_loss_of_what_is_no_tensor_leads_to_an_objective(output, key):
    class Several(nn.Linear):
        def forward(self, x):
            return output(super().forward(x))

    model, options = Several(4, 3), {"opt_level": "O0", "inner": "eager"}
    optimizer, x, y = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(TypeError) as raised:
        apexfx.train_step(model, F.cross_entropy, optimizer, **options)(x, y)
    assert "loss_fn(model(x)[0], y), or of model(x)['logits']" in "\n".join(raised.value.__notes__)
    expected = F.cross_entropy(model(x)[key], y)
    step = apexfx.train_step(model, objective=lambda model, x, y: F.cross_entropy(model(x)[key], y), optimizer=optimizer,
                             **options)
    torch.testing.assert_close(step(x, y), expected.detach())


@pytest.mark.long
def test_masks_with_a_dimension_of_channels_are_told_to_lose_it():
    model = nn.Conv2d(3, 5, 1)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    x, masks = torch.randn(2, 3, 4, 4), torch.randint(5, (2, 1, 4, 4))
    with pytest.raises(RuntimeError) as raised:
        step(x, masks)
    assert "call .squeeze(1) on those of shape [N, 1] or [N, 1, H, W]" in "\n".join(raised.value.__notes__)
    expected = F.cross_entropy(model(x), masks.squeeze(1))
    torch.testing.assert_close(step(x, masks.squeeze(1)), expected.detach())


def test_images_of_whole_numbers_are_led_to_floats():
    torch.manual_seed(0)
    model, images = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()), torch.randint(256, (4, 1, 2, 2), dtype=torch.uint8)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), opt_level="O0", inner="eager")
    labels = torch.arange(4) % 3
    with pytest.raises(RuntimeError, match="Input type") as raised:
        step(images, labels)
    assert "give it x.float() / 255" in raised.value.__notes__[-1]
    expected = F.cross_entropy(model(images.float() / 255), labels)
    torch.testing.assert_close(step(images.float() / 255, labels), expected.detach())


@table(1, "made", ["before the step", "behind a call"])
def test_a_layer_that_was_replaced_is_led_to_a_new_optimizer(made):
    torch.manual_seed(0)
    model, options = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), {"opt_level": "O0", "inner": "eager"}
    optimizer, x, y = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 4), torch.arange(6) % 3
    if made == "behind a call":
        step = apexfx.train_step(model, F.cross_entropy, optimizer, **options)
        step(x, y)
    model[1] = nn.Linear(5, 3)
    said = "took the place of another one: make the optimizer, and the step, anew" if made == "behind a call" else \
        "before a layer was replaced, it holds others: make it anew"
    with pytest.raises(ValueError, match=said):
        (step if made == "behind a call" else apexfx.train_step(model, F.cross_entropy, optimizer, **options))(x, y)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    expected = copy.deepcopy(model)
    F.cross_entropy(expected(x), y).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    step(x, y)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


@pytest.mark.long
def test_a_loss_of_several_elements_is_led_to_a_mean_by_its_mask():
    torch.manual_seed(0)
    model, x, y, mask = nn.Linear(4, 3), torch.randn(6, 4), torch.arange(6) % 3, torch.tensor([1.0, 0, 1, 1, 0, 1])

    def step_of(reduced):
        def objective(model, x, y, mask):
            loss = F.cross_entropy(model(x), y, reduction="none")
            return apexfx.Mean((loss * mask).sum(), mask.sum()) if reduced else loss

        return apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                                 opt_level="O0", inner="eager")

    with pytest.raises(ValueError, match=r"apexfx.Mean\(\(loss \* mask\).sum\(\), mask.sum\(\)\) by a mask"):
        step_of(reduced=False)(x, y, mask)
    expected = F.cross_entropy(model(x), y, reduction="none")[mask > 0].mean()
    torch.testing.assert_close(step_of(reduced=True)(x, y, mask), expected.detach())
