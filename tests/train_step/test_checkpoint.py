"""A damaged checkpoint, entry by entry: what is whole is loaded, or all is refused in a sentence before anything has changed."""

from __future__ import annotations

import contextlib
import copy
import functools
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn, optim

import apexfx
from apexfx import optimizers as fused
from tests.small_models import take_step, train_on
from tests.tables import table

MISSING = object()


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))

    def forward(self, y, target):
        return F.mse_loss(y, target) * self.log.exp()


def adamw(params):
    return optim.AdamW(params, lr=0.01)


def make(make_optimizer=adamw, **options):
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), Loss()
    options = {"loss_scale": "dynamic", "safeguard": apexfx.Safeguard(spike_factor=50.0), "ema": apexfx.EMA(0.5), **options}
    return apexfx.train_step(model, loss, make_optimizer([*model.parameters(), *loss.parameters()]), opt_level="O0",
                             inner="eager", **options)


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, 4, generator=generator), torch.randn(5, 3, generator=generator)) for _ in range(count)]


def test_a_checkpoint_of_a_loop_with_a_scaler_goes_on():
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 3), torch.amp.GradScaler("cpu", init_scale=64.0)
    loop, x, y = copy.deepcopy(model), *batches(1)[0]
    of_loop, optimizer = adamw(loop.parameters()), adamw(model.parameters())

    def update():
        of_loop.zero_grad()
        scaler.scale(F.mse_loss(loop(x), y)).backward()
        scaler.step(of_loop)
        scaler.update()

    update()
    step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", loss_scale="dynamic", inner="eager")
    saved = copy.deepcopy({"model": loop.state_dict(), "optimizer": of_loop.state_dict(), "scaler": scaler.state_dict()})
    assert step.loss_scale == 2.0**16  # which is looked up once, before it is loaded
    step.load_state_dict({"scaler": {}, **saved, "num_ranks": 1})
    assert step.loss_scale == 64.0
    step(x, y)
    update()
    torch.testing.assert_close(model.state_dict(), loop.state_dict())


def damaged(state, path, damage):
    """Return a copy of a state with one entry of it changed, or None where the change makes no sense."""
    state = copy.deepcopy(state)
    holder = functools.reduce(lambda part, key: part[key], path[:-1], state)
    now = damage(holder[path[-1]])
    if now is MISSING:
        del holder[path[-1]]
    elif now is None and damage is not DAMAGES["None"]:
        return None
    else:
        holder[path[-1]] = now
    return state


def numbers(number):
    """Return what puts a number into a tensor, or in the place of one."""
    def change(own):
        if isinstance(own, torch.Tensor):
            return torch.full_like(own, number) if own.is_floating_point() or number in (0, -4) else own.float().fill_(number)
        return number if type(own) in (int, float) else None
    return change


DAMAGES = {
    "missing": lambda own: MISSING, "None": lambda own: None, "list": lambda own: [own, own], "text": lambda own: "text",
    "shape": lambda own: own.new_zeros((*own.shape, 2)) if isinstance(own, torch.Tensor) else None,
    "dtype": lambda own: torch.zeros_like(own, dtype=torch.complex64) if isinstance(own, torch.Tensor) else None,
    "nan": numbers(math.nan), "inf": numbers(math.inf), "0": numbers(0), "negative": numbers(-4),
    "extra": lambda own: {**own, "extra": 1} if isinstance(own, dict) else None,
}
ENTRIES = [
    ("model",), ("model", "0.weight"), ("model", "1.running_mean"), ("model", "1.num_batches_tracked"),
    ("optimizer",), ("optimizer", "state"), ("optimizer", "param_groups"), ("optimizer", "state", 0),
    *(("optimizer", "state", 0, name) for name in ("step", "exp_avg", "exp_avg_sq")),
    ("optimizer", "param_groups", 0), *(("optimizer", "param_groups", 0, name) for name in ("params", "lr", "betas", "eps",
                                                                                           "weight_decay", "amsgrad")),
    ("scaler",), *(("scaler", name) for name in ("loss_scale", "growth_tracker", "skips")),
    ("num_ranks",), ("kept",), ("objective",), ("objective", "loss_fn.log"),
    ("safeguard",), ("safeguard", "safeguard"), ("safeguard", "skipped_steps"),
    ("ema",), ("ema", "averages"), ("ema", "counts"), ("ema", "averages", "0.weight"), ("ema", "counts", "0.weight"),
]
# What is loaded nevertheless: all else is refused.
NUMBERS = ("nan", "inf", "0", "negative")
LOADED = {
    **dict.fromkeys((  # tensors of model and optimizer are loaded as torch loads them
        ("model", "0.weight"), ("model", "1.running_mean"), ("model", "1.num_batches_tracked"), ("objective", "loss_fn.log"),
        *(("optimizer", "state", 0, name) for name in ("exp_avg", "exp_avg_sq"))), (*NUMBERS, "dtype")),
    **{("ema", "averages", "0.weight"): NUMBERS},
    **{("optimizer", "state", 0): ("missing", "extra"), ("optimizer", "param_groups", 0, "amsgrad"): ("missing", "None")},
    **{("optimizer", "param_groups", 0, name): ("0",) for name in ("lr", "eps", "weight_decay")},
    **dict.fromkeys((("optimizer",), ("optimizer", "state"), ("optimizer", "param_groups", 0), ("scaler",)), ("extra",)),
    **dict.fromkeys((  # what is missing begins anew, as after a step without such a part
        ("scaler", "growth_tracker"), ("scaler", "skips"), ("safeguard", "safeguard"), ("safeguard", "skipped_steps")),
        ("missing", "0")),
    **dict.fromkeys((("optimizer", "state", 0, "step"), ("ema", "counts", "0.weight")), ("0",)),
    **dict.fromkeys((("safeguard",), ("ema",)), ("missing", "extra")),
    **dict.fromkeys((("scaler", "loss_scale"), ("kept",), ("objective",)), ("missing",)),
}


def rows():
    state = trained()
    for path in ENTRIES:
        for name, damage in DAMAGES.items():
            if damaged(state, path, damage) is not None:
                yield path, name


@functools.cache
def trained():
    step = make()
    train_on(step, batches(2))
    return copy.deepcopy(step.state_dict())


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_names_of_a_model_in_a_wrapper_are_led_to_those_of_the_model(prefix):
    step, state = make(), copy.deepcopy(trained())
    before = copy.deepcopy(step.state_dict())
    state["model"] = {f"{prefix}{name}": x for name, x in state["model"].items()}
    with pytest.raises(RuntimeError, match=r"^apexfx: the names in state\['model'\] (.|\n)*Unexpected key") as raised:
        step.load_state_dict(state)
    assert raised.value.__notes__ == ["  apexfx: nothing of the step has changed"] and same(step.state_dict(), before)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state["model"], prefix)
    step.load_state_dict(state)
    assert same(step.state_dict()["model"], trained()["model"])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("start", range(3))
def test_every_damage_of_every_entry(start):
    step, batch = make(), batches(1)[0]
    step(*batch)
    before, wrong = copy.deepcopy(step.state_dict()), []
    for path, name in list(rows())[start::3]:
        try:
            step.load_state_dict(damaged(trained(), path, DAMAGES[name]))
        except (ValueError, RuntimeError, TypeError) as error:
            says = len(str(error)) > 30
            if name in LOADED.get(path, ()) or not says or not same(step.state_dict(), before):
                wrong.append((path, name, repr(error)))
        else:
            step(*batch)
            step.load_state_dict(copy.deepcopy(before))
            if name not in LOADED.get(path, ()):
                wrong.append((path, name))
    assert not wrong


# ---- what torch.distributed.checkpoint finds no place for ------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": optim.SGD, "SGD momentum": functools.partial(optim.SGD, momentum=0.9),
    "SGD dampening": functools.partial(optim.SGD, momentum=0.9, dampening=0.1), "Adam": optim.Adam, "AdamW": optim.AdamW,
    "Adam amsgrad": functools.partial(optim.Adam, amsgrad=True), "RAdam": optim.RAdam, "Adamax": optim.Adamax,
    "RMSprop": optim.RMSprop, "RMSprop all": functools.partial(optim.RMSprop, momentum=0.9, centered=True),
    "Adagrad": optim.Adagrad, "Adadelta": optim.Adadelta, "Muon": optim.Muon, "FusedSGD": fused.FusedSGD,
    "FusedSGD momentum": functools.partial(fused.FusedSGD, momentum=0.9), "FusedAdam": fused.FusedAdam,
    "FusedLAMB": fused.FusedLAMB, "FusedNovoGrad": fused.FusedNovoGrad, "FusedAdagrad": fused.FusedAdagrad,
    "FusedMixedPrecisionLamb": fused.FusedMixedPrecisionLamb,
}
KEEPING = {"AdamW": {}, "SGD momentum": {}, "RMSprop": {}, "FusedAdam": {}, "SGD": {"ema": apexfx.EMA(0.5)}}


FROZEN = r"belong to parameter '0\.\w+', .* Call requires_grad_\(True\) on it before"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")
@pytest.mark.parametrize("name", list(KEEPING))
def test_what_is_kept_of_a_parameter_that_is_frozen_where_dcp_loads_is_not_lost(name, tmp_path):
    step, refused, loaded = [make(functools.partial(OPTIMIZERS[name], lr=0.01), **{"ema": None, **KEEPING[name]})
                             for _ in range(3)]
    first, second, third = batches(3)
    for batch, trains in ((first, True), (second, False)):
        step.model[0].requires_grad_(trains)
        step(*batch)
    dcp.save({"step": step.state_dict()}, checkpoint_id=tmp_path)
    refused.model[0].requires_grad_(False)
    before = copy.deepcopy(refused.state_dict()["model"])
    for each in (refused, loaded):
        dcp.load(states := {"step": copy.deepcopy(each.state_dict())}, checkpoint_id=tmp_path)
        each.model[0].requires_grad_(False)
        with contextlib.nullcontext() if each is loaded else pytest.raises(ValueError, match=FROZEN):
            each.load_state_dict(states["step"])
    assert same(refused.state_dict()["model"], before)
    for each in (step, loaded):
        each.model[0].requires_grad_(True)
        each(*third)
    one, other = loaded.state_dict(), step.state_dict()
    assert same(one["model"], other["model"]) and same(one["optimizer"]["state"], other["optimizer"]["state"])
    assert same(one.get("ema"), other.get("ema"))


@pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage")
def test_a_parameter_that_was_never_trained_needs_no_place(tmp_path):
    steps = [make() for _ in range(2)]
    for step in steps:
        step.model[0].requires_grad_(False)
    steps[0](*batches(1)[0])
    dcp.save({"step": steps[0].state_dict()}, checkpoint_id=tmp_path)
    dcp.load(states := {"step": steps[1].state_dict()}, checkpoint_id=tmp_path)
    steps[1].load_state_dict(states["step"])
    assert same(steps[1].state_dict(), steps[0].state_dict())


# ---- an optimizer's state of which a part is missing -----------------------------------------------------------------------

def matrix(name):
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False)  # Muon takes matrices alone
    return model, OPTIMIZERS[name](model.parameters(), lr=0.01)


def eager_step(model, optimizer, x, y):
    take_step(optimizer, F.mse_loss(model(x), y))


@functools.cache
def state_of(name):
    model, optimizer = matrix(name)
    eager_step(model, optimizer, *batches(1)[0])
    return copy.deepcopy(optimizer.state_dict())


def states():
    """Yield (name, state): that of each class, and those of which one entry is missing."""
    for name in OPTIMIZERS:
        state = state_of(name)
        yield name, state
        for entry in (entry for entry, value in state["state"].get(0, {}).items() if value is not None):
            if len(state["state"][0]) > 1:
                yield f"{name} without {entry}", damaged(state, ("state", 0, entry), lambda _: MISSING)


@table(1, "name", list(OPTIMIZERS))
def test_state_of_which_a_part_is_missing_trains_as_in_eager_or_is_refused(name):
    model, optimizer = matrix(name)
    step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", inner="eager")
    batch, first, wrong, trained = batches(2)[1], copy.deepcopy(model.state_dict()), [], 0
    for saved, state in states():
        reference, theirs = matrix(name)
        try:
            theirs.load_state_dict(copy.deepcopy(state))
            eager_step(reference, theirs, *batch)
        except (KeyError, ValueError, RuntimeError) as error:
            reference = None
            if name.startswith("Fused") and type(error) is not ValueError:
                wrong.append((saved, error))
        for through_step in (True, False):
            model.load_state_dict(first)
            try:
                if through_step:
                    step.load_state_dict({**step.state_dict(), "optimizer": copy.deepcopy(state)})
                else:
                    optimizer.load_state_dict(copy.deepcopy(state))
                step(*batch)
                trained += 1
                if reference is None or not torch.allclose(model.weight, reference.weight, rtol=1e-5, atol=1e-6):
                    wrong.append((saved, through_step))
            except (ValueError, KeyError) as error:
                if reference is not None or type(error) is not ValueError and through_step:
                    wrong.append((saved, through_step, error))
                optimizer.load_state_dict(copy.deepcopy(state_of(name)))
    assert not wrong and trained
