"""check_loop(): loops that are the step are told so, and of planted differences each is named with where it parts first."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.small_models import Temperature, train_on
from tests.tables import table

IGNORED = -100


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


def images(count=3):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(count)]


def words(count=4):
    """Return images of which 2, 4, 6 ... have a label."""
    return [(x, torch.where(torch.arange(8) < 2 * (i + 1), y, IGNORED)) for i, (x, y) in enumerate(images(count))]


def total(model, x, y):
    return F.cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")


def mean(model, x, y):
    return apexfx.Mean(total(model, x, y), (y != IGNORED).sum())


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


def two(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], lr=0.01)]


def plain(model, optimizer, batch, schedule=None, *, clip=0.0, loss=lambda model, x, y: F.cross_entropy(model(x), y)):
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    for each in several:
        each.zero_grad()
    loss(model, *batch).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    for each in several:
        each.step()
    if schedule is not None:
        schedule.step()


def clip_by_hand(params, max_norm):
    grads = [p.grad for p in params]
    norm = sum(g.square().sum() for g in grads).sqrt()
    for g in grads:
        g.mul_((max_norm / norm).clamp(max=1))


def accumulating(model, optimizer, calls, *, divisor=None, clip=0.0, clip_norm=nn.utils.clip_grad_norm_):
    optimizer.zero_grad()
    for x, y in calls:
        (F.cross_entropy(model(x), y) / (divisor or len(calls))).backward()
    if clip:
        clip_norm(model.parameters(), clip)
    optimizer.step()


def by_counts(model, optimizer, calls, *, clip=0.0):
    optimizer.zero_grad()
    count = sum((y != IGNORED).sum() for _, y in calls)
    for x, y in calls:
        (total(model, x, y) / count).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def mean_of_means(model, optimizer, calls):
    optimizer.zero_grad()
    for x, y in calls:
        (F.cross_entropy(model(x), y, ignore_index=IGNORED) / len(calls)).backward()
    optimizer.step()


def one_backward(model, optimizer, calls):
    optimizer.zero_grad()
    sum(F.cross_entropy(model(x), y) for x, y in calls).div(len(calls)).backward()
    optimizer.step()


def scaled(model, optimizer, batch, *, scaler=None, unscale="before"):
    scaler = scaler or torch.amp.GradScaler("cpu")
    x, y = batch
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if unscale == "before":
        scaler.unscale_(optimizer)
    if unscale != "in step()":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def gradients_by_hand(model, optimizer, batch):
    x, y = batch
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, g in zip(model.parameters(), grads):
        p.grad = g
    optimizer.step()


def step_at_o1(model, optimizer, batch):
    with torch.autocast("cpu", torch.bfloat16):
        plain(model, optimizer, batch)


def cast_by_hand(model, optimizer, batch):
    plain(model, optimizer, (batch[0].to(model[0].weight.dtype), batch[1]))


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: call / 4)  # from 0


def by_keyword(model, optimizer, batch):
    plain(model, optimizer, batch.values())


CLIPPED = functools.partial(plain, clip=0.1)
RIGHT = {  # optimizer, update, options of the step, of check_loop
    "plain": (sgd, plain, {}, {}),
    "AdamW": (adamw, plain, {}, {}),
    "clipping": (adamw, CLIPPED, {"max_grad_norm": 0.1}, {}),
    "nothing to clip": (sgd, functools.partial(plain, clip=1e6), {"max_grad_norm": 1e6}, {}),
    "a schedule": (sgd, plain, {}, {"schedule": one_cycle}),
    "a warm-up from 0": (sgd, plain, {}, {"schedule": warm_up}),
    "accumulation": (sgd, functools.partial(accumulating, clip=0.1), {"accumulate": 2, "max_grad_norm": 0.1},
                     {"batches": images(4)}),
    "one backward of several calls": (sgd, one_backward, {"accumulate": 2}, {"batches": images(4)}),
    "a mean by counts": (sgd, by_counts, {"accumulate": 2, "objective": mean}, {"batches": words()}),
    "several optimizers": (two, plain, {}, {}),
    "several optimizers, clipped": (two, CLIPPED, {"max_grad_norm": 0.1}, {}),
    "a loss scale": (sgd, scaled, {"max_grad_norm": 0.1}, {}),
    "a loss scale that step() takes out": (sgd, functools.partial(scaled, unscale="in step()"), {}, {}),
    "a loss scale of a fused optimizer": (functools.partial(adamw, fused=True), functools.partial(scaled, unscale="in step()"),
                                          {}, {}),
    "gradients by hand": (sgd, gradients_by_hand, {}, {}),
    "autocast": (sgd, step_at_o1, {"opt_level": "O1"}, {}),
    "O2 and a safeguard": (sgd, plain, {"opt_level": "O2", "safeguard": True, "ema": apexfx.EMA(decay=0.9)}, {}),
    "O3": (sgd, cast_by_hand, {"opt_level": "O3", "keep_batchnorm_fp32": True}, {}),
    "in pieces": (sgd, plain, {"fallback": "transform"}, {}),
    "by keyword": (sgd, by_keyword, {"objective": lambda model, x, y: F.cross_entropy(model(x), y)},
                   {"batches": [{"x": x, "y": y} for x, y in images()]}),
    "an optimizer of its own": (adamw, plain, {}, {"optimizer": adamw}),
}


def make(optimizer, options):
    model = build()
    objective = {"objective": options["objective"]} if "objective" in options else {"loss_fn": F.cross_entropy}
    options = {"inner": "eager", "opt_level": "O0", **options, **objective}
    return apexfx.train_step(model, optimizer=optimizer(model), **options)


def check(make_optimizer, update, options, asked):
    step = make(make_optimizer, options)
    asked = {"batches": images(), **asked}
    if "schedule" in asked:
        asked["schedule"] = asked["schedule"](step.optimizer)
    if "optimizer" in asked:
        asked["optimizer"] = asked["optimizer"](step.model)
    before, random_state = copy.deepcopy((step.model.state_dict(), step.state_dict())), torch.get_rng_state()
    found = apexfx.check_loop(step, update, asked.pop("batches"), **asked)
    assert torch.equal(random_state, torch.get_rng_state())
    torch.testing.assert_close((step.model.state_dict(), step.state_dict()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in step.model.parameters())
    return found


OF_FLOAT16 = r"float32 \(O0\), the loop's autocast was of float16; opt_level='O1', dtype=torch.float16 is that loop"
ROUNDS = {"nothing to clip": r"in float64\.\nNothing was clipped", "a loss scale": OF_FLOAT16,
          "a loss scale that step() takes out": OF_FLOAT16, "a loss scale of a fused optimizer": OF_FLOAT16,
          "O3": r"computes in bfloat16 and float32 \(O3\), the loop's autocast was off, with parameters of bfloat16, float32; ",
          "O2 and a safeguard": r"rounding: the step computes in bfloat16 \(O2\), the loop's autocast was off; opt_level='O0'"}


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.filterwarnings("error:.*optimizer.step")
def test_the_loop_that_a_step_replaces(name):
    found = check(*RIGHT[name])
    assert found.is_right and not found.part, str(found)
    assert all(row.is_right and row.as_they_are is not None for row in found.rows)
    assert re.search(ROUNDS.get(name, r"The step is the loop: \d updates? in float64\.$"), str(found)), str(found)
    assert "another" not in str(found)


@table(2, "update, options, said", [
    (plain, {}, r"float32 \(O0\), the loop's .* off, with parameters of bfloat16; opt_level='O0', skip=\('precision',\) is"),
    (plain, {"opt_level": "O1"}, r"bfloat16 and float32 \(O1\), the loop's autocast was off, with parameters of bfloat16; "),
    (plain, {"skip": ("precision",)}, r"in float64\.$"),
    (step_at_o1, {"opt_level": "O1"}, r"in float64\.$"),
    (step_at_o1, {"skip": ("precision",)}, r"in the dtypes of its parameters \(O0\), the loop's .*; opt_level='O1', dtype=")])
def test_a_step_that_casts_half_parameters_is_told_from_a_loop_that_does_not(update, options, said):
    model = nn.Sequential(nn.Linear(6, 4)).bfloat16()
    step = apexfx.train_step(model, F.cross_entropy, sgd(model), **{"opt_level": "O0", "inner": "eager", **options})
    found = apexfx.check_loop(step, update, [(x.bfloat16(), y) for x, y in images()])
    assert found.is_right and re.search(said, str(found)), str(found)


@pytest.mark.long
@pytest.mark.parametrize("update, options, said", [
    (plain, {"max_grad_norm": 99.0}, r"Nothing was clipped.*longest gradient has 1\.262 of max_grad_norm=99"),
    (functools.partial(plain, clip=99.0), {}, "The loop clips, and the step does not")], ids=["step", "loop"])
def test_what_no_gradient_was_long_enough_for_is_said(update, options, said):
    found = check(sgd, update, options, {})
    assert found.is_right and re.search(said, str(found)), str(found)


def never_zeroed(model, optimizer, batch):
    x, y = batch
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def counted(model, optimizer, batch):
    plain(model, optimizer, batch)
    model[1].num_batches_tracked += 1


def in_eval_mode(model, optimizer, batch):
    model[3].eval()
    plain(model, optimizer, batch)


def decayed_by_hand(model, optimizer, batch):
    plain(model, optimizer, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - 1e-3)


def lr_by_hand(model, optimizer, batch):
    plain(model, optimizer, batch)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def frozen(model, optimizer, batch):
    optimizer.zero_grad()
    x, y = batch
    F.cross_entropy(model[4](model[:4](x).detach()), y).backward()
    optimizer.step()


def twice(model, optimizer, batch):
    plain(model, optimizer, batch)
    optimizer.step()


def without_the_second(model, optimizer, batch):
    optimizer[1].zero_grad()
    plain(model, optimizer[0], batch)


def two_forwards(model, optimizer, batch):
    model[:2](batch[0])
    plain(model, optimizer, batch)


def smoothed(model, x, y):
    return F.cross_entropy(model(x), y, label_smoothing=0.1)


def by_value(model, optimizer, batch):
    optimizer.zero_grad()
    x, y = batch
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()


DIFFERENT = {  # what is above, where they part, in which update, what is said
    "a mean of means": (sgd, mean_of_means, {"accumulate": 2, "objective": mean}, {"batches": words()}, "gradient", 1,
                        r"in mean_of_means: \(F.*backward\(\)\n.*the loop averages the means of the calls"),
    "means where the loop divides by counts": (
        sgd, by_counts, {"accumulate": 2, "objective": lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=IGNORED)},
        {"batches": words()}, "forward", 1, r"in by_counts: .*\nThe losses are .* in the step, which averages over 2 calls"),
    "the gradient of another loss, over calls": (
        sgd, accumulating, {"accumulate": 2, "objective": smoothed}, {"batches": images(2)}, "forward", 1,
        r"are 1\.6\d+, 1\.4\d+ in the loop \(times 2, as it divides\) and 1\.6\d+, 1\.4\d+ in the step, which aver"),
    "a clip before the unscale": (sgd, functools.partial(scaled, unscale="after"), {"max_grad_norm": 0.1}, {}, "clipping", 1,
                                  r"in scaled: nn.utils.clip_grad_norm_.*\n.*65536 times as long when .*: unscale first"),
    "no zero_grad": (sgd, never_zeroed, {}, {}, "gradient", 2, r"in never_zeroed: .*\nThe gradients of the update before were"),
    "another weight decay": (adamw, plain, {}, {"optimizer": functools.partial(adamw, weight_decay=0.1)}, "update", 1,
                             r"in plain: each.step\(\)\n.*weight_decay is 0.1 in the loop and 0.01 in the step \(0.weight\)"),
    "another optimizer": (adamw, plain, {}, {"optimizer": lambda m: torch.optim.Adam(m.parameters(), lr=0.01)}, "update", 1,
                          "class is Adam in the loop and AdamW in the step"),
    "decay by hand": (sgd, decayed_by_hand, {}, {}, "update", 1, "writes parameters outside of optimizer.step"),
    "part of the model in evaluation mode": (sgd, in_eval_mode, {}, {}, "forward", 1,
                                             "The losses are .* The loop runs 3 in evaluation mode"),
    "another clip norm": (adamw, CLIPPED, {"max_grad_norm": 0.2}, {}, "clipping", 1,
                          r"in plain: nn.utils.clip_grad_norm_.*\n.*of 0.1 at optimizer.step\(\), the step's 1.162 and 0.2"),
    "another clip norm, of a mean by counts": (
        sgd, functools.partial(by_counts, clip=0.1), {"accumulate": 2, "objective": mean, "max_grad_norm": 0.2},
        {"batches": words()}, "clipping", 1, r"in by_counts: nn.utils.clip_grad_norm_.*\n.*of 0.1 at optimizer.step\(\), the "),
    "another clip norm, after the unscale": (sgd, scaled, {"max_grad_norm": 0.2}, {}, "clipping", 1,
                                             r"in scaled: nn.utils.clip_grad_norm_.*\n.*of 0.1 at .* and 0.2\.$"),
    "a scaled loop that clips nothing": (functools.partial(adamw, fused=True), functools.partial(scaled, unscale="in step()"),
                                         {"max_grad_norm": 0.2}, {}, "clipping", 1,
                                         r"in scaled: scaler.step\(optimizer\)\n.* and 0.2\.$"),
    "nothing clipped by the step": (adamw, CLIPPED, {}, {}, "clipping", 1, "The loop clips, and the step does.* and of 0.1 at"),
    "nothing clipped by the loop": (adamw, plain, {"max_grad_norm": 0.1}, {}, "clipping", 1,
                                    r"each.step\(\)\nThe loop does not clip; the step has max_grad_norm=0.1"),
    "a clip by value": (sgd, by_value, {}, {}, "clipping", 1, "in by_value: nn.utils.clip_grad_value_"),
    "no unscale": (sgd, functools.partial(plain, loss=lambda m, x, y: 65536 * F.cross_entropy(m(x), y)), {}, {},
                   "gradient", 1, "The loop's gradient is 65536 times that of the step"),
    "the gradient of another loss": (sgd, functools.partial(plain, loss=smoothed), {}, {}, "forward", 1,
                                     r"in plain: .*backward\(\)\nThe losses are 1\.\d+ in the loop and 1\.\d+ in the step\."),
    "a detached part": (sgd, frozen, {}, {}, "gradient", 1, "The losses are the same and their gradients are not"),
    "twice the loss": (sgd, functools.partial(plain, loss=lambda m, x, y: 2 * F.cross_entropy(m(x), y)), {}, {}, "forward", 1,
                       "The losses are"),
    "a sum over calls": (sgd, functools.partial(accumulating, divisor=1), {"accumulate": 2}, {"batches": images(4)},
                         "gradient", 1, "The loop's gradient is 2 times that of the step, which averages over 2 calls"),
    "a division left in the objective": (
        sgd, functools.partial(accumulating, clip=0.1),
        {"accumulate": 2, "max_grad_norm": 0.1, "objective": lambda m, x, y: F.cross_entropy(m(x), y) / 2},
        {"batches": images(4)},
        "gradient", 1, r"is 2 times that of the step, .* \(accumulate=2 divides the loss already\)"),
    "a schedule in the loop alone": (sgd, lr_by_hand, {}, {}, "update", 2, r"lr is 0.05 in the loop and 0.1 in the step"),
    "a schedule of the step alone": (sgd, lambda m, o, b, schedule: plain(m, o, b), {}, {"schedule": one_cycle}, "update", 2,
                                     "lr is 0.0"),
    "two updates": (sgd, twice, {}, {}, "update", 1, r"optimizer.step\(\)\nis called 2 times, where the step updates once"),
    "a step() of two": (two, without_the_second, {}, {}, "update", 1, r"each.step\(\)\nAdamW.step\(\) is not called"),
    "a count that the loop counts up": (sgd, counted, {}, {}, "forward", 1,
                                        r"1\.num_batches_tracked(?s:.*)or the loop writes it"),
    "another forward": (sgd, two_forwards, {}, {}, "forward", 1, "what the forward writes is not: it runs more often"),
    "a head that the loop leaves out": (sgd, plain, {}, {"optimizer": lambda m: sgd(m[:4])}, "update", 1,
                                        "4.weight is in no group of the loop's optimizer"),
}


@table(2, "name", DIFFERENT)
def test_planted_differences(name):
    *case, part, number, said = DIFFERENT[name]
    found = check(*case)
    assert (found.part, found.update) == (part, number), str(found)
    assert re.search(said, str(found)), str(found)
    assert not found.is_right and "another update" in str(found) and "test_check_loop.py:" in found.reason


@pytest.mark.parametrize("clip_norm", [nn.utils.clip_grad_norm_, clip_by_hand])
def test_a_factor_that_clipping_hides_is_told(clip_norm):
    options = {"accumulate": 2, "max_grad_norm": 0.1, "objective": lambda m, x, y: 100 * F.cross_entropy(m(x), y)}
    found = check(sgd, functools.partial(accumulating, divisor=0.01, clip=0.1, clip_norm=clip_norm), options,
                  {"batches": images(4)})
    assert found.part == "gradient" and all(row.is_right for row in found.rows)
    assert re.search(r"backward\(\)\n.* is 2 times that of the step, .*\. Both are clipped, which hides that", found.reason)


GLOBAL = build()
GLOBAL_STEP = apexfx.train_step(GLOBAL, F.cross_entropy, sgd(GLOBAL), opt_level="O0", inner="eager")
SCHEDULE = torch.optim.lr_scheduler.ExponentialLR(GLOBAL_STEP.optimizer, 0.5)


def of_the_globals_gradients(model, optimizer, batch):
    plain(model, optimizer, batch)
    F.cross_entropy(GLOBAL(torch.ones(batch[0].shape)), batch[1]).backward()


def of_the_globals_schedule(model, optimizer, batch):
    plain(model, optimizer, batch, SCHEDULE)


def with_amp(model, optimizer, batch):
    with apexfx.amp.scale_loss(F.cross_entropy(model(batch[0]), batch[1]), optimizer) as loss:
        loss.backward()


REFUSED = {
    "a function that takes targets apart": (
        lambda model, optimizer, x, y: None, images(),
        r"called: update\(Sequential, SGD, \(float64\[8, 6\], int64\[8\]\)\), which are model, opt"),
    "an update of Apex": (with_amp, images(), r"write update\(\) without the lines of amp"),
    "another order": (images(), plain, r"called with TrainStep, list, function, expected check_loop\(step, update, batches\)"),
    "no batch": (plain, [], "batches has 0, expected a multiple of accumulate=1"),
    "no update": (lambda model, optimizer, batch: None, images(), r"called no step\(\) of the optimizer that it is given"),
    "the step's own model": (of_the_globals_gradients, images(), "wrote '0.weight' of the step's own model, or its gradient"),
    "the step's own schedule": (of_the_globals_schedule, images(),
                                r"changed lr of the step's own optimizer .* schedule=schedule"),
    "a float32 weight": (functools.partial(plain, loss=lambda m, x, y: F.cross_entropy(m(x), y, torch.ones(4))), images(),
                         "the weights of a loss"),
}


@table(4, "name", REFUSED)
def test_what_cannot_be_compared(name):
    update, batches, text = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError, TypeError)) as raised:
        apexfx.check_loop(GLOBAL_STEP, update, batches)
    for p in GLOBAL.parameters():
        p.grad = None
    assert re.search(text, "\n".join((str(raised.value), *getattr(raised.value, "__notes__", ()))))
    assert GLOBAL_STEP.optimizer.param_groups[0]["lr"] == 0.1


def test_nothing_moves():
    step = make(functools.partial(sgd, lr=0.0), {})
    with pytest.raises(ValueError, match="the loop moved no parameter"):
        apexfx.check_loop(step, plain, images())


def test_complex_parameters_are_refused():
    model = nn.Linear(2, 2, dtype=torch.complex64)
    step = apexfx.train_step(model, objective=lambda m, x: m(x).abs().sum(), optimizer=sgd(model), opt_level="O0", inner="eager")
    with pytest.raises(ValueError, match="the model has complex parameters"):
        apexfx.check_loop(step, plain, images())


def test_parameters_of_a_loss_are_refused():
    model, temperature = nn.Linear(6, 4), Temperature()
    optimizer = torch.optim.SGD([*model.parameters(), *temperature.parameters()], lr=0.1)
    step = apexfx.train_step(model, temperature, optimizer, opt_level="O0", inner="eager")
    with pytest.raises(ValueError, match="parameters that the model does not hold, as of a loss"):
        apexfx.check_loop(step, plain, images())


@pytest.mark.long
def test_goes_on_from_the_state_of_a_run():
    """Of an optimizer with moments, after steps: counts and moments are copied, and cast."""
    step = make(adamw, {"max_grad_norm": 0.1})
    train_on(step, images())
    assert apexfx.check_loop(step, CLIPPED, iter(images())).is_right


CASTS = {"float": lambda x: x.float().log_softmax(-1), "dtype": lambda x: x.log_softmax(-1, dtype=torch.float32),
         "to": lambda x: x.to(torch.bfloat16).log_softmax(-1)}


@pytest.mark.long
@pytest.mark.parametrize("cast", CASTS)
def test_casts_of_the_program_are_no_difference(cast):
    """Adam makes updates of gradients that are rounding alone, and the two divide in another order."""
    def total(model, x, t):
        return -(CASTS[cast](model(x)) * F.one_hot(t, 4).float()).sum()

    def update(model, optimizer, batches):
        optimizer.zero_grad()
        for x, t in batches:
            (total(model, x, t) / sum(len(t) for _, t in batches)).backward()
        optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 4))
    step = apexfx.train_step(model, objective=lambda model, x, t: apexfx.Mean(total(model, x, t), len(t)), accumulate=2,
                             optimizer=torch.optim.AdamW(model.parameters()), opt_level="O0", inner="eager")
    calls = [(torch.randn(5 + n, 6), torch.randint(4, (5 + n,))) for n in range(6)]
    check = apexfx.check_loop(step, update, calls)
    assert check.is_right and all(max(row.gradient, row.update) < 1e-12 for row in check.rows)
