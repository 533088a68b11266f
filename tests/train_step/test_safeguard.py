"""safeguard=: steps that are skipped leave nothing behind, and are told of; against an automaton written down here."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.optimizers import FusedAdam
from apexfx.train_step.parts.safeguard import COLUMNS, Judge, _event, judge
from tests.own_optimizers import RMSprop
from tests.tables import table

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
GOOD, NAN_INPUT, INFINITE, SPIKE = "good", "nan input", "infinite loss", "spike"


class Net(nn.Module):
    """Writes running statistics, a buffer in place, and one that it replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        self.seen += x.detach().sum(0)
        hidden = self.body(x)
        self.average = 0.9 * self.average + hidden.detach().float().mean(0)
        return self.head(hidden)


def objective(model, x, y, factor):
    return F.cross_entropy(model(x), y) * factor


def batch(kind, generator):
    x, y = torch.randn(5, 6, generator=generator), torch.randint(0, 3, (5,), generator=generator)
    if kind == NAN_INPUT:
        x[2, 3] = math.nan
    return x, y, torch.tensor({INFINITE: math.inf, SPIKE: 1e3}.get(kind, 1.0))


def make(optimizer=AdamW, *, safeguard=True, **options):
    model = Net()
    options = {"opt_level": "O0", "inner": "eager", **options}
    return apexfx.train_step(model, objective=objective, optimizer=optimizer(model.parameters(), lr=0.01), safeguard=safeguard,
                             **options)


def everything(step):
    """Return what a step may leave behind, but for the loss scale."""
    model = step.model
    optimizers = step.optimizer if isinstance(step.optimizer, list) else [step.optimizer]
    states = [each.state_dict()["state"] for each in optimizers]
    return copy.deepcopy((model.state_dict(), states))


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class Automaton:
    """Decides from kinds and norms alone which steps are skipped."""

    def __init__(self, window, spike_factor, calls=1):
        self.window, self.spike_factor, self.calls = window, spike_factor, calls
        self.norms, self.average, self.skips = 0, 0.0, []

    def judge(self, call, kind, norm):
        """Return whether the step is skipped."""
        finite = kind not in (NAN_INPUT, INFINITE) and math.isfinite(norm)
        spike = finite and self.spike_factor is not None and self.norms >= self.window and norm > self.spike_factor * self.average
        if not finite or spike:
            allowed = (self.average, self.spike_factor * self.average) if spike else (None, None)
            batches = ((call - 1) * self.calls + 1, call * self.calls)
            self.skips.append((call, "spike" if spike else "not finite", batches, *allowed))
            return True
        self.norms = min(self.norms + 1, self.window)
        self.average += (norm - self.average) / self.norms
        return False


STYLES = {
    "one graph": {}, "clipped": {"max_grad_norm": 0.5}, "float16": {"opt_level": "O2", "dtype": torch.float16},
    "bfloat16": {"opt_level": "O1", "dtype": torch.bfloat16}, "half parameters": {"opt_level": "O3", "dtype": torch.bfloat16},
    "fused": {"optimizer": FusedAdam}, "composed": {"optimizer": torch.optim.RAdam}, "outside": {"optimizer": RMSprop},
    "kept gradients": {"keep_grads": True}, "accumulating": {"accumulate": 3},
}


def run(step, kinds, automaton, seed=0):
    """Train, and compare each step with what the automaton says of it."""
    generator, calls = torch.Generator().manual_seed(seed), step._components.options.accumulate
    for number, kind in enumerate(kinds, 1):
        before, bad = everything(step), number % calls
        for place in range(calls):
            step(*batch(kind if place == bad else GOOD, generator))
        norm = float(step.grad_norm)
        assert kind in (NAN_INPUT, INFINITE) or math.isfinite(norm) or step.loss_scale != 1.0  # a scaled loss may overflow
        skipped = automaton.judge(number, kind, norm)
        assert bool(step.updated) is not skipped
        after = everything(step)
        if skipped:
            assert_equal(after, before)
        else:
            assert not torch.equal(after[0]["head.weight"], before[0]["head.weight"])
            assert all(t.isfinite().all() for t in after[0].values())
    assert list(map(told, step.events)) == automaton.skips[-64:]


def told(event):
    return event.call, event.reason, event.batches, event.average, event.limit


def kinds_of(rng, count):
    return [GOOD] * 4 + rng.choices([GOOD, NAN_INPUT, INFINITE, SPIKE], weights=[5, 1, 1, 1], k=count)


@table(2, "style", STYLES)
def test_a_skipped_step_leaves_nothing_behind(style):
    options = dict(STYLES[style])
    step = make(safeguard=apexfx.Safeguard(spike_factor=8.0, window=4), **options)
    run(step, kinds_of(random.Random(style), 24), Automaton(4, 8.0, options.get("accumulate", 1)))
    assert step.skipped == len(step.events) > 0


@pytest.mark.long
def test_under_inductor():
    step = make(safeguard=apexfx.Safeguard(spike_factor=8.0, window=4), inner="inductor")
    run(step, [GOOD] * 5 + [NAN_INPUT, SPIKE, GOOD, INFINITE, GOOD], Automaton(4, 8.0))


@pytest.mark.long
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(4))
def test_many_random_sequences(style, seed):
    rng = random.Random(seed)
    window, factor = rng.choice([1, 3, 6]), rng.choice([None, 4.0, 20.0])
    step = make(safeguard=apexfx.Safeguard(spike_factor=factor, window=window), **STYLES[style])
    run(step, kinds_of(rng, 200), Automaton(window, factor, STYLES[style].get("accumulate", 1)), seed)


@pytest.mark.long
def test_without_a_bad_step_it_is_the_same_training():
    plain, safe = make(safeguard=None), make(safeguard=apexfx.Safeguard(spike_factor=8.0, window=4))
    for step in (plain, safe):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            step(*batch(GOOD, generator))
    assert_equal(everything(safe), everything(plain))
    assert safe.events == [] and safe.skipped == 0 and "skip_writes" not in str(plain.report)
    with pytest.raises(RuntimeError, match="safeguard=True"):
        plain.events  # noqa: B018


@pytest.mark.long
def test_a_spike_leaves_the_loss_scale_alone_and_an_overflow_does_not():
    step = make(safeguard=apexfx.Safeguard(spike_factor=8.0, window=2), loss_scale="dynamic")
    generator = torch.Generator().manual_seed(0)
    for kind in (GOOD, GOOD, GOOD):
        step(*batch(kind, generator))
    before, tracker = step.loss_scale, step.state_dict()["scaler"]["growth_tracker"]
    step(*batch(SPIKE, generator))
    assert step.events[-1].reason == "spike" and step.loss_scale == before
    assert torch.equal(step.state_dict()["scaler"]["growth_tracker"], tracker)
    step(*batch(INFINITE, generator))
    assert step.events[-1].reason == "not finite" and step.loss_scale == before / 2


@pytest.mark.long
def test_an_event_names_the_parameter():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * math.inf

    def only_the_head_is_finite(model, x, y, factor):
        hidden = model.body(x)
        return F.cross_entropy(model.head(Own.apply(hidden)), y)

    model = Net()
    for p in model.body[0].parameters():
        p.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    step = apexfx.train_step(model, objective=only_the_head_is_finite, optimizer=SGD(trained, lr=0.1), opt_level="O0",
                             inner="eager", safeguard=True)
    step(*batch(INFINITE, torch.Generator().manual_seed(0)))
    event, = step.events
    assert (event.call, event.reason, event.parameter) == (1, "not finite", "body.1.weight")
    assert "call 1: not finite" in str(event) and "body.1.weight" in str(event)


def test_an_event_says_why_no_op_was_searched():
    model = nn.Linear(3, 2)
    step = apexfx.train_step(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             safeguard=True)
    for factor in (math.inf, 1.0):
        step(torch.ones(4, 3) * factor, torch.zeros(4, dtype=torch.int64))
    assert step.events[-1].where == "op not searched: read events right after the call, or give record_dir="
    assert str(step.events[-1]).endswith(f": {step.events[-1].where}")
    step(torch.ones(4, 3) * math.inf, torch.zeros(4, dtype=torch.int64))
    assert "batch[0]" in step.events[-1].where and step.events[0].where.startswith("op not searched")


@pytest.mark.long
@pytest.mark.parametrize("frozen", [False, True])
def test_an_event_names_the_parameter_as_the_call_had_them(frozen):
    """A call that leaves parameters out, or trains others, puts all that come behind them into another order."""
    model = nn.ModuleDict({name: nn.Linear(4, 3) for name in ("shared", "one", "other")})

    def of_a_branch(model, x, name, factor):
        return (model["shared"](x) + model[name](x)).mean() + (model[name].bias * factor).sum()

    step = apexfx.train_step(model, objective=of_a_branch, optimizer=AdamW(model.parameters()), opt_level="O0", inner="eager",
                             safeguard=True)
    x = torch.randn(2, 4)
    step(x, "other", torch.tensor(math.inf))
    if frozen:
        model["shared"].requires_grad_(False)
        step(x, "other", torch.tensor(1.0))
    assert step.events[-1].parameter == "other.bias"


@pytest.mark.long
def test_too_many_in_a_row_raise():
    step = make(safeguard=apexfx.Safeguard(max_consecutive_skips=3))
    generator = torch.Generator().manual_seed(0)
    for kind in (NAN_INPUT, NAN_INPUT, GOOD, INFINITE, INFINITE):
        step(*batch(kind, generator))
    before = everything(step)
    with pytest.raises(apexfx.NonFiniteError, match="3 steps in a row skipped.*call 6: not finite"):
        step(*batch(NAN_INPUT, generator))
    assert_equal(everything(step), before)
    step(*batch(GOOD, generator))  # and it goes on where the user goes on
    assert bool(step.updated)


@pytest.mark.long
@pytest.mark.parametrize("loss_scale", [None, 1.0])  # both count skips
def test_the_first_skip_is_logged_and_the_tenth(loss_scale, caplog):
    step, generator = make(loss_scale=loss_scale), torch.Generator().manual_seed(0)

    def logged(*kinds):
        caplog.clear()
        for kind in kinds:
            step(*batch(kind, generator))
        return re.findall(r"has skipped (\d+ steps?), .* step\.events", caplog.text)

    assert logged(GOOD, GOOD) == []
    assert logged(NAN_INPUT) == ["1 step"]
    assert logged(*[NAN_INPUT] * 8) == []
    assert logged(INFINITE, NAN_INPUT) == ["10 steps"]
    step.load_state_dict(copy.deepcopy(step.state_dict()))
    assert step.skipped == 11 and logged(GOOD) == [] and logged(NAN_INPUT) == ["1 step"]


@pytest.mark.long
def test_flush_of_a_bad_batch_takes_everything_back():
    step = make(accumulate=3, safeguard=apexfx.Safeguard(max_consecutive_skips=1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        step(*batch(GOOD, generator))
    before = everything(step)
    step(*batch(NAN_INPUT, generator))
    step(*batch(GOOD, generator))
    with pytest.raises(apexfx.NonFiniteError, match=r"1 step in a row skipped.*call 2 \(batches 4 to 5\): not finite"):
        step.flush()
    assert not bool(step.updated) and step.events[-1].call == 2
    assert step.events[-1].where == "flush() applied what calls had accumulated, op not searched"
    assert_equal(everything(step), before)
    with pytest.raises(apexfx.NonFiniteError, match=r"call 3 \(batches 6 to 8\): not finite"):
        for kind in (GOOD, NAN_INPUT, GOOD):
            step(*batch(kind, generator))


@pytest.mark.long
def test_it_goes_on_from_a_checkpoint_and_loads_one_without():
    step, other = (make(safeguard=apexfx.Safeguard(spike_factor=8.0, window=4)) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for kind in (GOOD, GOOD, NAN_INPUT, GOOD, GOOD):
        step(*batch(kind, generator))
    other.load_state_dict(copy.deepcopy(step.state_dict()))
    data = [batch(kind, generator) for kind in (SPIKE, GOOD)]
    for each in (step, other):
        torch.manual_seed(3)
        for one in data:
            each(*one)
    assert_equal(everything(other), everything(step))
    assert [(e.call, e.reason, e.batches) for e in other.events] == [(3, "not finite", (3, 3)), (6, "spike", (6, 6))]
    other.load_state_dict(copy.deepcopy(make(safeguard=None).state_dict()))
    assert other.events == [] and other.skipped == 0


@pytest.mark.long
@pytest.mark.parametrize("change", [lambda t: t[:-1] if t.dim() > 1 else t[None], lambda t: F.pad(t, (0, 1))])
def test_a_state_of_another_shape_is_refused_before_anything_is_loaded(change):
    step, other = make(safeguard=True), make(safeguard=True)
    other(*batch(GOOD, torch.Generator().manual_seed(0)))
    state, before = copy.deepcopy(other.state_dict()), everything(step)
    for name, own in state["safeguard"].items():
        wrong = {**state, "safeguard": {**state["safeguard"], name: change(own)}}
        with pytest.raises(ValueError, match=rf"'{name}' has the shape .*, expected a tensor of shape \{list(own.shape)}"):
            step.load_state_dict(wrong)
        assert_equal(everything(step), before)
    step.load_state_dict(state)


@pytest.mark.long
def test_calls_that_reach_nothing_trained_are_counted_among_the_batches():
    model, x = nn.Linear(3, 2), torch.ones(2, 3)
    step = apexfx.train_step(model, objective=lambda m, x, own: (m(x) if own else x).square().mean(), safeguard=True,
                             optimizer=SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager", accumulate=2)
    step(x.clone().requires_grad_(), False)
    step.flush()
    for factor in (1.0, math.inf):
        step(x * factor, True)
    assert step.events[-1].batches == (2, 3)


@pytest.mark.long
@pytest.mark.parametrize("saved, loads", [("dynamic", None), (None, "dynamic")])
def test_events_go_along_to_a_step_of_another_loss_scale(saved, loads):
    before, step = (make(safeguard=True, loss_scale=scale) for scale in (saved, loads))
    one = batch(NAN_INPUT, torch.Generator().manual_seed(0))
    for each, times in ((before, 2), (step, 1)):
        for _ in range(times):
            each(*one)
    step.load_state_dict(copy.deepcopy(before.state_dict()))
    step(*one)
    assert step.skipped == 3 and [event.call for event in step.events] == [1, 2, 3]


@pytest.mark.long
def test_skips_from_before_there_was_a_safeguard_are_no_events():
    generator = torch.Generator().manual_seed(0)
    before, step = (make(safeguard=guarded, loss_scale="dynamic") for guarded in (None, True))
    before(*batch(NAN_INPUT, generator))
    step.load_state_dict(copy.deepcopy(before.state_dict()))
    assert step.skipped == 1 and step.events == []
    step(*batch(NAN_INPUT, generator))
    assert step.skipped == 2 and [e.reason for e in step.events] == ["not finite"]


@table(1, "accumulate", [1, 2])
def test_a_buffer_that_a_module_or_the_loss_replaces_is_put_back(accumulate):
    class Tracked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("expanded", torch.ones(1).expand(3))

        def forward(self, y):
            self.mean = self.mean * 0.9 * self.expanded + y.detach().mean(0)
            return y

    class Loss(Tracked):
        def forward(self, y, t):
            return F.cross_entropy(super().forward(y), t)

    model, loss_fn = nn.Sequential(nn.Linear(6, 3), Tracked()), Loss()
    step = apexfx.train_step(model, loss_fn, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager", safeguard=True,
                             accumulate=accumulate)
    generator = torch.Generator().manual_seed(0)
    step.capture(*batch(GOOD, generator)[:2])
    for place, kind in enumerate((NAN_INPUT, GOOD, GOOD, NAN_INPUT, GOOD, NAN_INPUT)):
        if place in (3, 5):
            model[1] = copy.deepcopy(model[1])  # another in its place
        before = model[1].mean.clone(), loss_fn.mean.clone()
        for _ in range(accumulate):
            step(*batch(kind, generator)[:2])
        if kind == NAN_INPUT:
            assert_equal((model[1].mean, loss_fn.mean), before)
    assert step.skipped == 3 and loss_fn.mean.any()


def test_a_buffer_that_was_none_is_none_again():
    class Filled(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("mean", None)

        def forward(self, x):
            self.mean = x.mean() if self.mean is None else 0.5 * self.mean + x.mean()
            return super().forward(x)

    model = Filled()
    step = apexfx.train_step(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             safeguard=True)
    x, y = torch.ones(5, 6), torch.arange(5) % 3
    means = []
    for factor in (math.nan, 1.0, math.nan, 1.0):
        step(x * factor, y)
        means.append(None if model.mean is None else float(model.mean))
    assert means == [None, 1.0, 1.0, 1.5]


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_buffer_that_a_forward_drops_is_there_again(accumulate):
    class Drops(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("first", torch.ones(6))

        def forward(self, x):
            first, self.first = self.first, None
            return super().forward(x if first is None else x + first)

    model = Drops()
    step = apexfx.train_step(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             safeguard=True, accumulate=accumulate)
    x, y = torch.ones(5, 6), torch.arange(5) % 3
    there = []
    for factor in (math.nan, math.nan, 1.0, math.nan):
        for _ in range(accumulate):
            step(x * factor, y)
        there.append(model.first is not None)
    assert there == [True, True, False, False]


@table(1, "accumulate", [1, 2])
def test_a_buffer_of_two_modules_stays_one(accumulate):
    class Shares(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.a, self.b = nn.Module(), nn.Module()
            for each in (self.a, self.b):
                each.register_buffer("mean", torch.zeros(1) if each is self.a else self.a.mean)

        def forward(self, x):
            self.a.mean = self.b.mean = self.a.mean + x.mean()
            return super().forward(x)

    model = Shares()
    step = apexfx.train_step(model, F.cross_entropy, SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager",
                             safeguard=True, accumulate=accumulate)
    x, y = torch.ones(5, 6), torch.arange(5) % 3
    for factor in (1.0, math.nan, 1.0):
        for _ in range(accumulate):
            step(x * factor, y)
        assert model.a.mean is model.b.mean
    assert model.a.mean == 2 * accumulate


@pytest.mark.parametrize("options, error, message", [
    ({"safeguard": 3}, TypeError, "safeguard=3"),
    ({"safeguard": True, "skip": ["skip_writes"]}, ValueError, "leave safeguard= out"),
    ({"safeguard": True, "fallback": "transform"}, ValueError, "safeguard= is a part of the step's graph"),
    ({"safeguard": None, "ema": apexfx.EMA(), "fallback": "transform"}, ValueError, r"EMA\(\) is a part of the step's graph"),
], ids=str)  # fmt: skip
def test_what_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize("options", [{"spike_factor": 0.5}, {"spike_factor": True}, {"spike_factor": math.inf}, {"window": 0},
                                     {"max_consecutive_skips": 1.5}], ids=str)
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        apexfx.Safeguard(**options)


@pytest.mark.long
def test_what_a_call_kept_that_did_not_run_is_forgotten():
    generator = torch.Generator().manual_seed(0)
    step = make()
    step(*batch(GOOD, generator))
    for ends_early in (step.capture, step):
        x, *rest = batch(GOOD, generator)
        with contextlib.suppress(RuntimeError):  # a wrong call
            ends_early(x if ends_early is not step else x[:, :5], *rest)
        step.model.average = torch.full((8,), 3.0)  # the user's
        before = everything(step)
        step(*batch(NAN_INPUT, generator))
        assert not bool(step.updated)
        assert_equal(everything(step), before)


def test_the_first_run_of_a_graph_that_was_captured_before_is_taken_back():
    generator, step = torch.Generator().manual_seed(0), make(SGD)
    step.capture(*batch(GOOD, generator))
    before = everything(step)
    step(*batch(NAN_INPUT, generator))
    assert not bool(step.updated)
    assert_equal(everything(step), before)


def test_an_infinite_norm_of_finite_gradients_does_not_end_the_average():
    found_inf, skips = torch.zeros(()), torch.zeros(2)
    state, log = (slot.make(skips) for slot in Judge(2).slots())
    for norm, skipped in ((1.0, 0), (math.inf, 0), (2.0, 0), (1.5, 0), (math.inf, 1), (1e3, 1), (1.4, 0)):
        skip = judge(found_inf, torch.tensor(norm), torch.ones(1), [0], skips, state, log, 2, 10.0, 1)
        assert skip.item() == skipped
        skips += skip
    assert state.isfinite().all() and [row[:3] for row in log[:3].tolist()] == [[5, 0, math.inf], [6, 0, 1e3], [0, 0, 0]]


@pytest.mark.long
def test_ten_thousand_sequences_are_judged_as_by_the_automaton():
    rng = random.Random(0)
    for _ in range(10_000):
        window, factor = rng.choice([1, 2, 5]), rng.choice([None, 2.0, 8.0])
        automaton, skips = Automaton(window, factor, 3), torch.zeros(2)
        state, log = (slot.make(skips) for slot in Judge(2).slots())
        for call in range(1, 13):
            kind = rng.choice([GOOD, GOOD, SPIKE, NAN_INPUT])
            norm = torch.tensor(rng.expovariate(1.0) * {GOOD: 1.0, SPIKE: 100.0, NAN_INPUT: math.nan}[kind])
            skip = judge(norm.isnan().float(), norm, norm.reshape(1), [0], skips, state, log, window, factor, 3)
            assert bool(skip) is automaton.judge(call, kind, norm.item())
            skips += skip
        assert state.tolist() == [12, automaton.average, automaton.norms, 36]
        assert [told(_event(dict(zip(COLUMNS, row)), str)) for row in log[:int(skips[0])].tolist()] == automaton.skips


def test_the_report_says_what_it_costs():
    assert "each step waits for the device" in str(make(RMSprop).report)
    assert "waits for the device" not in str(make(RMSprop, safeguard=None).report)
