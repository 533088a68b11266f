"""train_step(): what is changed between two steps reaches the next one, and a call that fails changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import apexfx
from apexfx.optimizers import FusedAdam, FusedSGD
from tests.own_optimizers import RMSprop
from tests.small_models import branching
from tests.tables import table
from tests.train_step.test_step import ROUNDING, SGD, Adam, assert_same, batches, make, net

WIDTH = 4


class Heads(nn.Module):
    """Which head is used, and so which parameters have a gradient, is an argument."""

    def __init__(self, num_heads=2):
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Linear(1, 1)
        self.body, self.heads = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_heads))

    def forward(self, x, head=0):
        return self.heads[head](self.body(x).tanh())


def heads(optimizer=Adam, model=None, lr=0.01, **options):
    model = model if model is not None else Heads()
    loss_fn = F.mse_loss if "objective" not in options else None
    return apexfx.train_step(model, loss_fn, optimizer(model.parameters(), lr=lr), **{"opt_level": "O0", "inner": "eager",
                                                                                      **options})


def samples(count):
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(3, WIDTH, generator=generator), torch.randn(3, WIDTH, generator=generator)) for _ in range(count)]


class Eager:
    """The same in plain torch."""

    def __init__(self, model, optimizer=Adam, lr=0.01, accumulate=1):
        self.model, self.optimizer, self.accumulate = model, optimizer(model.parameters(), lr=lr), accumulate
        self.calls = 0

    def __call__(self, inputs, targets):
        if self.calls % self.accumulate == 0:
            self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs), targets)
        (loss / self.accumulate).backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            self.optimizer.step()


def assert_same_training(step, reference):
    assert_same(step.model.state_dict(), reference.model.state_dict(), **ROUNDING)
    assert_same(step.optimizer.state_dict()["param_groups"], reference.optimizer.state_dict()["param_groups"])


# ---- gradients that are None -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [RMSprop, SGD])
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_parameter_without_a_gradient_shifts_no_other(optimizer, inner):
    step, reference = heads(optimizer, keep_grads=True, inner=inner), Eager(Heads(), optimizer)
    for x, y in samples(2):
        step((x, 1), y)
        reference((x, 1), y)
    assert_same_training(step, reference)
    for p, q in zip(step.model.parameters(), reference.model.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            assert_same(p.grad, q.grad, **ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [Adam, *(pytest.param(each, marks=pytest.mark.long) for each in (RMSprop, FusedAdam))])
def test_accumulated_gradients_of_parameters_that_few_calls_use(optimizer):
    """AdamW would decay, and count, a parameter whose gradient is zero and not None."""
    step, reference = heads(optimizer, accumulate=2), Eager(Heads(), optimizer, accumulate=2)
    for (x, y), head in zip(samples(8), (0, 0, 1, 0, 0, 1, 1, 1)):
        step((x, head), y)
        reference((x, head), y)
    assert_same_training(step, reference)
    assert torch.equal(step.model.unused.weight, Heads().unused.weight)


@table(1, "options", [{"max_grad_norm": 1e9}, {"loss_scale": "dynamic"}, {"skip": ["update_early"]}], ids=str)
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_what_one_call_has_gathered_alone_is_applied_whatever_comes_first(options, inner):
    """Inductor drops the copy of a buffer that is emptied before its end."""
    step, reference = heads(accumulate=2, inner=inner, **options), Eager(Heads(), accumulate=2)
    for (x, y), head in zip(samples(4), (0, 1, 1, 0)):
        step((x, head), y)
        reference((x, head), y)
    assert_same_training(step, reference)


class ReadsCopy(torch.autograd.Function):
    """x * w, with a gradient of w that is a copy of a buffer."""

    @staticmethod
    def forward(ctx, w, held):
        ctx.save_for_backward(held)
        return (w * held).sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None


class WritesHeld(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(64))
        self.register_buffer("held", torch.ones(64))

    def forward(self, x):
        loss = ReadsCopy.apply(self.w, self.held.clone())
        self.held.add_(x)
        return loss


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_gradient_that_is_a_buffer_which_is_written_is_taken_as_it_was(inner):
    model, reference = WritesHeld(), WritesHeld()
    step = apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.1), objective=lambda m, x: m(x), opt_level="O0",
                             inner=inner, max_grad_norm=1e9)
    theirs = SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        step(torch.ones(64))
        theirs.zero_grad()
        reference(torch.ones(64)).backward()
        theirs.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


@table(1, ("optimizer", "inner"), [
    (RMSprop, "eager"), (SGD, "eager"), *(pytest.param(each, "inductor", marks=pytest.mark.long) for each in (SGD, RMSprop))])
def test_what_leaves_an_accumulation_is_no_buffer(optimizer, inner):
    step = heads(optimizer, accumulate=2, keep_grads=True, inner=inner)
    reference = Eager(Heads(), optimizer, accumulate=2)
    for (x, y), head in zip(samples(4), (1, 0, 1, 0)):  # head 1 has a gradient of the first call alone
        step((x, head), y)
        reference((x, head), y)
    for p, q in zip(step.model.parameters(), reference.model.parameters()):
        if q.grad is not None:
            assert_same(p.grad, q.grad, **ROUNDING)


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_each_parameter_has_a_gradient_of_its_own(inner):
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    step = apexfx.train_step(model, optimizer=SGD(model.parameters(), lr=0.1), objective=lambda m, x: ((m[0] + m[1]) * x).sum(),
                             opt_level="O0", inner=inner, keep_grads=True)
    step(torch.ones(2))
    model[0].grad.mul_(2)
    assert torch.equal(model[1].grad, torch.ones(2))


@table(1, "num_heads, scale", [(2, 8.0), (3, None)])
def test_heads_that_take_turns_are_corrected_by_their_own_counts(num_heads, scale):
    step, reference = heads(model=Heads(num_heads), loss_scale=scale), Eager(Heads(num_heads))
    for place, (x, y) in enumerate(samples(4 * num_heads)):
        step((x, place % num_heads), y)
        reference((x, place % num_heads), y)
    assert_same_training(step, reference)
    counts = [int(step.optimizer.state[head.weight]["step"]) for head in step.model.heads]
    assert counts == [4] * num_heads and int(step.optimizer.state[step.model.body.weight]["step"]) == 4 * num_heads
    graphs = len(step.report.graphs)
    for place, (x, y) in enumerate(samples(2 * num_heads)):
        step((x, place % num_heads), y)
    assert len(step.report.graphs) == graphs


# ---- the optimizer ---------------------------------------------------------------------------------------------------------


@table(1, "option", [{"maximize": True}, {"amsgrad": True}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.5}], ids=str)
def test_an_option_set_on_the_way_is_that_of_the_next_step(option):
    step, reference = heads(), Eager(Heads())
    for place, (x, y) in enumerate(samples(4)):
        for each in (step, reference):
            if place == 2:
                each.optimizer.param_groups[0].update(option)
                if "amsgrad" in option:
                    for held in each.optimizer.state.values():
                        held["max_exp_avg_sq"] = torch.zeros_like(held["exp_avg_sq"])
            each(x, y)
    assert_same_training(step, reference)


@pytest.mark.long
def test_an_option_of_a_loaded_state_is_that_of_the_next_step():
    step, reference = heads(), Eager(Heads())
    state = Adam(Heads().parameters(), lr=0.05, maximize=True).state_dict()
    for each in (step, reference):
        each(*samples(1)[0])
        each.optimizer.load_state_dict(copy.deepcopy(state))
        for batch in samples(2):
            each(*batch)
    assert_same_training(step, reference)
    assert "adam over 4 parameters" in str(step.report)


@table(1, "optimizer", [SGD, FusedSGD])
def test_momentum_that_comes_and_goes(optimizer):
    step, reference = heads(optimizer), Eager(Heads(), optimizer)
    for momentum, batch in zip((0.0, 0.9, 0.9, 0.0, 0.5), samples(5)):
        for each in (step, reference):
            each.optimizer.param_groups[0]["momentum"] = momentum
            each(*batch)
    assert_same_training(step, reference)


def clear(optimizer):
    optimizer.state.clear()


def clear_one(optimizer):
    optimizer.state[optimizer.param_groups[0]["params"][0]].clear()


def new_moments(optimizer):
    for held in optimizer.state.values():
        held["exp_avg"] = torch.ones_like(held["exp_avg"])


def new_groups(optimizer):
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = params[:3]
    optimizer.add_param_group({"params": params[3:], "lr": 0.1, "weight_decay": 0.2})


def new_dictionary(optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.1}


def moved_moments(optimizer):
    for held in optimizer.state.values():
        held["exp_avg"].data = torch.ones_like(held["exp_avg"])


def swapped_moments(optimizer):
    one, other = [p for p in optimizer.param_groups[0]["params"] if p.shape == (WIDTH, WIDTH)][:2]
    moments = optimizer.state[other]["exp_avg"], optimizer.state[one]["exp_avg"]
    optimizer.state[one]["exp_avg"], optimizer.state[other]["exp_avg"] = moments


def fewer_parameters(optimizer):
    # A leaf that the loss depends on has to be held or frozen, and torch saves the state of none that it does not hold.
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(2).requires_grad_(False), None)


def reordered_state(optimizer):
    one, other = [p for p in optimizer.param_groups[0]["params"] if p.shape == (WIDTH, WIDTH)][:2]
    state = list(optimizer.state.items())
    optimizer.state.clear()  # each state is at its place again, of another parameter
    optimizer.state.update({{one: other, other: one}.get(p, p): held for p, held in state})


def loaded_twice(optimizer):
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@table(4, "change", [clear, clear_one, new_moments, new_groups, new_dictionary, moved_moments, swapped_moments,
                     fewer_parameters, reordered_state, loaded_twice])
def test_a_change_of_the_optimizer_is_seen(change):
    step, reference = heads(), Eager(Heads())
    for place, batch in enumerate(samples(5)):
        for each in (step, reference):
            if place == 3:
                change(each.optimizer)
                change_lr = each.optimizer.param_groups[0]
                change_lr["lr"] *= 0.5
            each(*batch)
    assert_same_training(step, reference)


def test_state_that_equals_what_it_replaces_is_the_one_that_a_step_updates():
    model = nn.Linear(1, 1)  # of tensors of one element Python may ask whether they are equal
    step = heads(model=model)
    batch = torch.ones(1, 1), torch.zeros(1, 1)
    step(*batch)
    held = step.optimizer.state[model.weight]
    for name in ("step", "exp_avg", "exp_avg_sq"):
        before, held[name] = held[name].clone(), held[name].clone()
        step(*batch)
        assert not torch.equal(held[name], before), name


def test_a_parameter_that_another_group_takes_over():
    """All parameters together are in the order that they were in."""
    def in_groups(params, lr):
        params = list(params)
        return Adam([{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.5}], lr=lr)

    step, reference = heads(in_groups), Eager(Heads(), in_groups)
    for place, batch in enumerate(samples(4)):
        for each in (step, reference):
            if place == 2:
                first, last = each.optimizer.param_groups
                last["params"].insert(0, first["params"].pop())
            each(*batch)
    assert_same_training(step, reference)


@pytest.mark.parametrize("losses", [(F.mse_loss, F.l1_loss)])
def test_two_steps_on_one_optimizer_and_torchs_own_between(losses):
    model, reference = Heads(), Heads()
    optimizer, theirs = Adam(model.parameters(), lr=0.01), Adam(reference.parameters(), lr=0.01)
    steps = [apexfx.train_step(model, loss, optimizer, opt_level="O0", inner="eager") for loss in losses]
    for place, ((x, y), which, head) in enumerate(zip(samples(8), (0, 1, 0, 2, 1, 0, 2, 1), (0, 0, 1, 1, 0, 1, 0, 1))):
        theirs.zero_grad()
        (*losses, F.mse_loss)[which](reference(x, head), y).backward()
        theirs.step()
        if which < 2:
            steps[which]((x, head), y)
        else:
            optimizer.zero_grad()
            F.mse_loss(model(x, head), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)


def test_hooks_of_the_optimizer_run_from_when_they_are_registered():
    step, calls = heads(SGD), []
    batch = samples(1)[0]
    step(*batch)
    handle = step.optimizer.register_step_post_hook(lambda *_: calls.append("own"))
    step(*batch)
    handle.remove()
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    step(*batch)
    everywhere.remove()
    step(*batch)
    assert calls == ["own", "global"]


def test_a_step_that_was_replaced_on_the_instance_is_called():
    step, calls = heads(SGD), []
    step(*samples(1)[0])
    own = step.optimizer.step

    def replaced(closure=None):
        calls.append(1)
        return own(closure)

    step.optimizer.step = replaced
    step(*samples(1)[0])
    assert calls == [1]


def test_an_optimizer_with_a_step_of_its_own_kind():
    class Own(SGD):
        def step(self):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.sub_(p.grad if p.grad is not None else 0)

    class Scaled(FusedAdam):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)
            return super().step(closure)

    for optimizer in (Own, Scaled):
        step, reference = heads(optimizer), Eager(Heads(), optimizer)
        for batch in samples(3):
            step(*batch)
            reference(*batch)
        assert_same_training(step, reference)


def test_float64_is_not_trained_in_float32():
    step, reference = heads(SGD, model=Heads().double(), lr=0.1), Eager(Heads().double(), SGD, lr=0.1)
    for x, y in samples(5):
        loss = step(x.double(), y.double())
        reference(x.double(), y.double())
    assert loss.dtype == torch.float64
    assert_same(step.model.state_dict(), reference.model.state_dict())


def test_float32_beside_float64_and_masters_beside_no_state():
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH).double()})
    reference = copy.deepcopy(model)

    def objective(m, x):
        return m["b"](m["a"](x).double()).square().mean()

    step = apexfx.train_step(model, optimizer=Adam(model.parameters()), objective=objective, opt_level="O0", inner="eager")
    theirs = Adam(reference.parameters())
    for x, _ in samples(3):
        step(x)
        theirs.zero_grad()
        objective(reference, x).backward()
        theirs.step()
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)


def test_masters_without_momentum():
    def trained(train):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH).bfloat16()
        optimizer = FusedSGD(model.parameters(), lr=1e-2, master_weights=True)
        train(model, optimizer)
        return [optimizer.state[p]["master_param"] for p in model.parameters()], list(model.parameters())

    def by_step(model, optimizer):
        step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", inner="eager")
        for x, y in samples(4):
            step(x.bfloat16(), y.bfloat16())

    def by_hand(model, optimizer):
        for x, y in samples(4):
            optimizer.zero_grad()
            F.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
            optimizer.step()

    mine, theirs = trained(by_step), trained(by_hand)
    assert_same(mine, theirs, rtol=0, atol=2e-4)  # of bfloat16 gradients; the updates are a hundred times that
    assert all(torch.equal(master.bfloat16(), p) for master, p in zip(*mine))


def test_a_hyperparameter_that_is_a_tensor_is_read_as_a_number_whenever_it_changes():
    def numbers():
        return {"lr": 0.01, "betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}

    step, reference = make(Adam, numbers()), net()
    theirs = Adam(reference.parameters(), **numbers())
    for place, (inputs, targets) in enumerate(batches(4)):
        if place == 2:
            for each in (step.optimizer, theirs):
                each.param_groups[0]["betas"][0].fill_(0.5)
        step(inputs, targets)
        theirs.zero_grad()
        F.cross_entropy(reference(inputs), targets).backward()
        theirs.step()
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    assert "outside of the graph" not in str(step.report) and len(step.report.graphs) == 2


@pytest.mark.long
def test_a_learning_rate_that_is_a_tensor_keeps_its_place_and_its_name():
    lr = torch.tensor(0.01)
    step = make(Adam, {"lr": lr, "fused": True})
    reference = net()
    theirs = Adam(reference.parameters(), lr=torch.tensor(0.01), fused=True)
    for place, (inputs, targets) in enumerate(batches(4)):
        if place == 2:
            lr.fill_(0.1)
            step.optimizer.param_groups[0]["lr"] = lr
            theirs.param_groups[0]["lr"].fill_(0.1)
        step(inputs, targets)
        theirs.zero_grad()
        F.cross_entropy(reference(inputs), targets).backward()
        theirs.step()
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)
    step(*batches(1, size=7)[0])
    assert len(step.report.graphs) == 2 and all(" lr_0" in step.report.code(stage="step", graph=graph) for graph in (0, 1))


# ---- the model -------------------------------------------------------------------------------------------------------------


def norms(momentum=None):
    torch.manual_seed(0)
    norm = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=momentum))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))


def set_momentum(model):
    model[1][0].momentum = 0.5


def set_cumulative(model):
    model[2].momentum, model[1][0].momentum = None, None


def append(model):
    model[1].append(nn.BatchNorm1d(WIDTH, momentum=None, affine=False))


def replace(model):
    model[1][0] = nn.BatchNorm1d(WIDTH, momentum=0.3, affine=False)


def evaluate(model):
    model[1].eval()


def scale_inputs(model):
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def scale_outputs(model):
    model[2].register_forward_hook(lambda module, args, output: output * 2)


def tie(model):
    model[2].weight = model[0].weight


def freeze(model):
    model[0].requires_grad_(False)


def move(model):
    for p in model.parameters():
        p.data = p.data * 0.5


def set_memory(model):
    with torch.no_grad():
        model[0].weight.set_(torch.ones(WIDTH, WIDTH))


def new_statistics(model):
    model[1][0].running_mean = torch.ones(WIDTH)


def new_layer(model):
    torch.manual_seed(3)
    model[2] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)  # which no optimizer holds


def no_layer(model):
    del model[2]


def no_bias(model):
    model[2].bias = None


def own_forward(model):
    model[2].forward = lambda x: -x @ model[2].weight


@table(4, "change, momentum", [
    *((change, None) for change in (set_momentum, append, replace, evaluate, scale_inputs, tie)),
    *((change, 0.1) for change in (set_momentum, set_cumulative, evaluate, scale_outputs, freeze, move, set_memory,
                    new_statistics, new_layer, no_layer, no_bias, own_forward)),
])  # fmt: skip
def test_a_change_of_the_model_is_seen(change, momentum):
    step, reference = heads(SGD, norms(momentum)), Eager(norms(momentum), SGD)
    for place, batch in enumerate(samples(4)):
        for each in (step, reference):
            if place == 2:
                change(each.model)
            each(*batch)
    assert_same_training(step, reference)


@table(1, "options", [{}, {"objective": branching(F.mse_loss), "fallback": "transform"}], ids=["one graph", "in pieces"])
def test_layers_that_are_frozen_and_unfrozen(options):
    step, reference = heads(**options), Eager(Heads())
    for place, batch in enumerate(samples(5)):
        for each in (step, reference):
            each.model.heads[0].requires_grad_(place in (1, 4))
            each(*batch)
    assert_same_training(step, reference)


def test_the_model_holds_its_own_modules_after_a_step():
    model = norms()
    before = list(model.modules())
    step = heads(SGD, model, opt_level="O3", dtype="bfloat16", loss_scale=None)
    step(*samples(1)[0])
    assert list(map(id, model.modules())) == list(map(id, before)) and type(model[1][0]) is nn.BatchNorm1d
    assert not [name for module in model.modules() for name in vars(module) if "apexfx" in name]
    assert not any(module._forward_pre_hooks for module in model.modules())


@table(2, "register, what", [
    (lambda m: m[0].weight.register_hook(lambda g: g * 0), "a hook is registered on parameter '0.weight'"),
    (lambda m: m[2].bias.register_post_accumulate_grad_hook(lambda p: None), "a hook is registered on parameter '2.bias'"),
    (lambda m: m[0].register_full_backward_hook(lambda *_: None), "0 has a backward hook"),
])  # fmt: skip
def test_a_hook_that_would_not_run_is_refused_when_made_and_later(register, what):
    step, model = heads(SGD, norms()), norms()
    step(*samples(1)[0])
    before = copy.deepcopy(step.model.state_dict())
    register(model)
    with pytest.raises(ValueError, match=what):
        heads(SGD, model, opt_level="O3", dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    handle = register(step.model)
    with pytest.raises(ValueError, match=what):
        step(*samples(1)[0])
    assert_same(step.model.state_dict(), before)
    handle.remove()
    step(*samples(1)[0])


def test_a_parameter_that_the_forward_writes_is_refused():
    class Clipped(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = Clipped(WIDTH, WIDTH)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="writes parameter 'weight' in place"):
        heads(SGD, model)(*samples(1)[0])
    assert_same(model.state_dict(), before)


# ---- failures --------------------------------------------------------------------------------------------------------------


def no_gradient(m, x, y):
    with torch.no_grad():
        return F.mse_loss(m(x), y)


def other_parameters(m, x, y):
    return F.mse_loss(m.heads[0](x), y)


@pytest.mark.parametrize("objective, error, message", [
    (lambda m, x, y: (m(x).sum(), 1, 2), TypeError, "returned a tuple of 3; it has to return the loss"),
    (lambda m, x, y: {"loss": F.mse_loss(m(x), y)}, TypeError, "returned a dict; it has to return the loss"),
    (lambda m, x, y: [F.mse_loss(m(x), y)], TypeError, "has to return the loss"),
    (lambda m, x, y: (m(x) - y).square(), ValueError, r"the loss is not a scalar, its shape is \[3, 4\]; have"),
    (no_gradient, ValueError, "does not depend on any parameter"),
    (other_parameters, ValueError, "does not depend on any parameter|heads.0.weight.*in no optimizer of the step"),
])  # fmt: skip
def test_a_call_that_fails_leaves_all_as_it_was(objective, error, message):
    model = Heads()
    optimizer = Adam(model.body.parameters())
    step = apexfx.train_step(model, optimizer=optimizer, objective=objective, opt_level="O0", inner="eager",
                             loss_scale="dynamic", max_grad_norm=1.0)
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(error, match=message):
        step(*samples(1)[0])
    assert_same(step.state_dict(), before)
    assert not optimizer.state


@table(1, "optimizer", [SGD, RMSprop])
def test_a_step_that_failed_half_way_is_followed_by_none(optimizer, monkeypatch):
    step = heads(optimizer)
    batch = samples(1)[0]
    step(*batch)
    checkpoint = copy.deepcopy(step.state_dict())
    kept = copy.deepcopy(checkpoint)  # torch's optimizers go on with the tensors that they load

    def fails(*_):
        raise KeyboardInterrupt("stop")

    with monkeypatch.context() as patch:
        patch.setattr(step, "_note_applied", fails)  # the graph has run
        with pytest.raises(KeyboardInterrupt):
            step(*batch)
    for use in (lambda: step(*batch), step.state_dict):
        with pytest.raises(RuntimeError, match="failed after it had begun .*KeyboardInterrupt: stop.*load a checkpoint"):
            use()
    step.load_state_dict(checkpoint)
    step(*batch)
    again = heads(optimizer)
    again.load_state_dict(kept)
    again(*batch)
    assert_same(step.model.state_dict(), again.model.state_dict())


def test_a_state_of_another_model_changes_nothing():
    step, other = heads(), heads(model=Heads(3))
    step(*samples(1)[0])
    other(*samples(1)[0])
    before = copy.deepcopy(step.state_dict())
    mixed = {**before, "model": {**other.state_dict()["model"], "body.weight": torch.zeros(WIDTH, WIDTH)}}
    for state in (other.state_dict(), mixed, {**mixed, "model": before["model"], "optimizer": other.state_dict()["optimizer"]}):
        with pytest.raises((RuntimeError, ValueError)):
            step.load_state_dict(state)
        assert_same(step.state_dict(), before)


@pytest.mark.long
def test_a_checkpoint_is_loaded_in_the_middle_of_an_accumulation():
    step, reference = heads(accumulate=2), heads(accumulate=2)
    checkpoint = copy.deepcopy(step.state_dict())
    step((samples(1)[0][0], 1), samples(1)[0][1])
    step.load_state_dict(checkpoint)
    for batch in samples(2):
        step(*batch)
        reference(*batch)
    assert_same(step.state_dict(), reference.state_dict())


def test_a_parameter_is_not_frozen_in_the_middle_of_an_accumulation():
    step = heads(accumulate=2)
    step(*samples(1)[0])
    step.model.unused.requires_grad_(False)
    with pytest.raises(RuntimeError, match="after 1 of 2 calls that accumulate"):
        step(*samples(1)[0])
    step.model.unused.requires_grad_(True)
    step(*samples(1)[0])


def test_what_was_gathered_stays_when_the_optimizer_changes():
    step, reference = heads(accumulate=2), Eager(Heads(), accumulate=2)
    for place, batch in enumerate(samples(2)):
        for each in (step, reference):
            if place:
                each.optimizer.param_groups[0]["params"].reverse()
            each(*batch)
    assert_same_training(step, reference)


def test_float16_gradients_are_not_unscaled_in_float16():
    for options in ({"optimizer": RMSprop}, {"optimizer": Adam}, {"optimizer": FusedAdam, "keep_grads": True}):
        model = Heads()
        with pytest.raises(ValueError, match="float16, and so are their gradients"):
            heads(model=model, opt_level="O3", dtype="float16", **options)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        with pytest.raises(ValueError, match="float16, and so are their gradients"):
            heads(model=Heads().half(), **options)
    step = heads(FusedAdam, Heads().half())
    step(*(x.half() for x in samples(1)[0]))
    assert step.loss_scale == 2.0**16


# ---- several models and sizes ----------------------------------------------------------------------------------------------


def test_a_dynamic_batch_compiles_one_graph():
    step = make(SGD, {"lr": 0.1}, dynamic=True)
    reference = net()
    theirs = SGD(reference.parameters(), lr=0.1)
    for size in (3, 5, 8, 4):
        for inputs, targets in batches(1, size):
            step(inputs, targets)
            theirs.zero_grad()
            F.cross_entropy(reference(inputs), targets).backward()
            theirs.step()
    assert len(step.report.graphs) == 1
    assert_same(step.model.state_dict(), reference.state_dict(), **ROUNDING)


def test_the_sizes_of_another_step_are_not_taken_for_changes():
    for width in (8, 16):
        model = nn.Linear(WIDTH, width)
        step = apexfx.train_step(model, F.mse_loss, Adam(model.parameters()), opt_level="O0", inner="eager")
        step(torch.randn(6, WIDTH), torch.randn(6, width))
        assert "Sym(" not in step.report.code(stage="step", after="captured")


class CountsOnALayer(nn.Module):
    """Keeps a number on its recurrent layer, which it also holds unregistered."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.GRU(4, 3)
        self.same = [self.layer]

    def forward(self, x):
        y, _ = self.layer(x)
        self.same[0].calls = getattr(self.same[0], "calls", 0) + 1
        return y * self.same[0].calls


def test_attributes_that_are_set_on_a_layer_while_a_copy_stands_in_for_it():
    model, reference, x = CountsOnALayer(), CountsOnALayer(), torch.ones(5, 2, 4)
    step = apexfx.train_step(model, objective=lambda m, x: m(x).square().mean(), optimizer=SGD(model.parameters(), lr=0.1),
                             opt_level="O0", inner="eager")
    optimizer = SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = reference(x).square().mean()
        loss.backward()
        optimizer.step()
        assert_same(step(x), loss.detach(), **ROUNDING)
    assert model.layer.calls == 3
    assert_same(model.state_dict(), reference.state_dict(), **ROUNDING)
