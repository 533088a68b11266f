"""apexfx.Mean: a loss with a denominator of its own, against one batch that holds all calls of an accumulation."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.own_optimizers import RMSprop
from tests.small_models import train_on

IGNORED, WORDS = -100, 7


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, WORDS)).to(dtype)


def batch(seed, count):
    """Return 2 sequences of 5 words, of whose targets `count` are not padding."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, WORDS, (2, 2, 5), generator=generator).unbind()
    labels.view(-1)[torch.randperm(10, generator=generator)[count:]] = IGNORED
    return ids, labels


def total(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def objective(model, ids, labels):
    return apexfx.Mean(total(model, ids, labels), (labels != IGNORED).sum())


def branching(model, ids, labels):
    """The same, which no single graph can hold."""
    return objective(model, ids, labels) if float(labels.sum()) != 0.5 else None


def reference(model, batches, optimizer, max_grad_norm=None):
    """Update by the mean over all words of all batches; return it."""
    optimizer.zero_grad()
    mean = sum(total(model, *each).double() for each in batches) / sum((labels != IGNORED).sum() for _, labels in batches)
    mean.backward()
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return mean.detach()


def make(model, objective=objective, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return apexfx.train_step(model, objective=objective, optimizer=optimizer, **{"inner": "eager", "opt_level": "O0", **options})


UPDATES = {1: [[3], [10], [0], [1]], 2: [[9, 2], [0, 4], [4, 0], [0, 0]], 3: [[1, 10, 5], [0, 0, 6]],
           4: [[3, 0, 7, 10], [0, 1, 0, 0]]}
OPTIONS = {"alone": {}, "clipped": {"max_grad_norm": 0.05}, "safe": {"safeguard": True}, "averaged": {"ema": apexfx.EMA(0.9)},
           "outside": {"optimizer": RMSprop}, "in pieces": {"fallback": "transform"}}


@pytest.mark.long
@pytest.mark.parametrize("accumulate, options", itertools.product(UPDATES, OPTIONS))
def test_calls_with_other_counts_are_one_batch(accumulate, options):
    options = dict(OPTIONS[options])
    kind = options.pop("optimizer", lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9))
    for dtype, tolerance in ((torch.float64, 1e-12), *([] if options else [(torch.float32, 1e-6)])):
        expected, model = net(dtype), net(dtype)
        theirs = kind(expected.parameters())
        step = make(model, branching if "fallback" in options else objective, kind(model.parameters()), accumulate=accumulate,
                    **options)
        for number, counts in enumerate(UPDATES[accumulate]):
            batches = [batch(10 * number + place, count) for place, count in enumerate(counts)]
            losses = train_on(step, batches)
            own = [total(expected, *each) / count for each, count in zip(batches, counts) if count]
            torch.testing.assert_close([loss for loss in losses if not loss.isnan()], [x.detach() for x in own])
            if not any(counts):
                assert step.mean_loss.isnan() and not step.updated
                continue
            mean = reference(expected, batches, theirs, options.get("max_grad_norm"))
            torch.testing.assert_close(step.mean_loss, mean.double(), rtol=tolerance, atol=0)
            torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=tolerance, atol=tolerance)
        if "ema" not in options:
            torch.testing.assert_close(step.optimizer.state_dict(), theirs.state_dict(), rtol=tolerance, atol=tolerance)
        calls = "1 call" if accumulate == 1 else f"{accumulate} calls"
        assert f"apexfx: the loss is a mean over {calls} x 1 rank, by counts" in step.report.notes


@pytest.mark.long
def test_a_flush_weighs_by_counts():
    expected, model = net(), net()
    step = make(model, accumulate=3)
    batches = [batch(1, 8), batch(2, 1)]
    train_on(step, batches)
    step.flush()
    mean = reference(expected, batches, torch.optim.SGD(expected.parameters(), lr=0.5))
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.mean_loss, mean)
    for each in (batch(3, 4), batch(4, 0), batch(5, 2)):  # nothing is left of what was flushed
        step(*each)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.9)
    optimizer.load_state_dict(copy.deepcopy(make(net()).optimizer.state_dict()))
    assert not step.mean_loss.isnan()


@pytest.mark.long
def test_an_overflow_of_float16_is_skipped_and_the_next_update_is_right():
    expected, model = net(torch.float32), net(torch.float32)
    loud = 2.0**10
    step = make(model, lambda *args: loud * objective(*args), torch.optim.SGD(model.parameters(), lr=0.5 / loud), opt_level="O2",
                dtype=torch.float16, loss_scale="dynamic", accumulate=2)
    theirs, updates = torch.optim.SGD(expected.parameters(), lr=0.5), 0
    while updates < 2:
        batches = [batch(1, 10), batch(2, 1)]
        train_on(step, batches)
        if step.updated:
            reference(expected, batches, theirs)
            updates += 1
            torch.testing.assert_close([p.float() for p in model.parameters()], list(expected.parameters()), rtol=1e-2, atol=2e-3)
    assert step.skipped


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_add_up_each_with_its_own_count(dtype):
    """A loss a word, one an example, and a scalar."""
    def several(model, ids, labels):
        words = objective(model, ids, labels)
        rows = apexfx.Mean(model(ids).square().sum(), len(ids))
        return 0.5 * words - rows * -0.1 + apexfx.Mean(model[1].weight.square().mean(), 1), words.value.detach()

    expected, model = net(dtype), net(dtype)
    step, (ids, labels) = make(model, several), batch(1, 6)
    loss, words = step(ids, labels)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.9)
    mean = total(expected, ids, labels) / 6
    whole = 0.5 * mean + 0.1 * expected(ids).square().sum() / 2 + expected[1].weight.square().mean()
    whole.backward()
    theirs.step()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close([loss, words, step.mean_loss.to(dtype)], [whole.detach(), mean.detach(), whole.detach()])
    mean = objective(model, ids, labels)
    for start in (0, 0.0):
        assert torch.equal(sum([mean, mean, -mean], start).value, mean.value)


@pytest.mark.long
@pytest.mark.parametrize("counts", [(0, 6), (6, 0)])
def test_a_total_of_none_is_left_out_in_any_order(counts):
    expected, model = net(), net()
    step = make(model, lambda m, x, y, more: apexfx.Mean(total(m, x, y) + more, (y != IGNORED).sum()), accumulate=2)
    batches = [batch(place, count) for place, count in enumerate(counts)]
    for each, count in zip(batches, counts):
        step(*each, torch.tensor(0.0 if count else math.nan))
    mean = reference(expected, batches, torch.optim.SGD(expected.parameters(), lr=0.5))
    torch.testing.assert_close(step.mean_loss, mean)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)
    step = make(net(), lambda *args: objective(*args) + apexfx.Mean(total(*args) + 1, 0))
    step(*batch(1, 5))
    assert step.updated and step.mean_loss.isfinite()


@pytest.mark.long
def test_running_statistics_stay_where_nothing_is_counted(tmp_path):
    """And a safeguard has nothing to tell: it is no fault, and its norm is in no average."""
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm = net(torch.float32), nn.BatchNorm1d(5)

        def forward(self, ids):
            return self.norm(self.body(ids))

    model = Normed()
    step = make(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
                safeguard=apexfx.Safeguard(spike_factor=2.0, max_consecutive_skips=1, record_dir=tmp_path))
    step(*batch(1, 4))
    before, average = copy.deepcopy((model.state_dict(), step.optimizer.state_dict())), step.state_dict()["safeguard"]
    for _ in range(2):
        step(*batch(2, 0))
        assert not step.updated
    torch.testing.assert_close((model.state_dict(), step.optimizer.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(step.state_dict()["safeguard"]["safeguard"][1:3], average["safeguard"][1:3])
    assert step.skipped == 0 and not step.events and not list(tmp_path.iterdir())


@pytest.mark.parametrize("safeguard", [None, apexfx.Safeguard(spike_factor=2.0)], ids=["alone", "safeguard"])
def test_what_counts_nothing_says_nothing_of_the_loss_scale(safeguard):
    step = make(net(torch.float32), dtype=torch.float16, opt_level="O1", loss_scale="dynamic", safeguard=safeguard)
    for count, expected in ((4, 1), (0, 1), (4, 2)):
        step(*batch(1, count))
        assert step.state_dict()["scaler"]["growth_tracker"] == expected


@pytest.mark.long
def test_what_counts_nothing_does_not_end_skips_in_a_row():
    step = make(net(), lambda m, x, y, factor: apexfx.Mean(total(m, x, y) * factor, (y != IGNORED).sum()),
                safeguard=apexfx.Safeguard(max_consecutive_skips=2))
    for count, factor in ((4, math.nan), (0, 1.0)):
        step(*batch(1, count), torch.tensor(factor))
    with pytest.raises(apexfx.NonFiniteError, match="2 steps in a row"):
        step(*batch(1, 4), torch.tensor(math.nan))


@pytest.mark.long
def test_a_flush_of_calls_that_reach_nothing_trained_leaves_no_count():
    expected, model = net(), net()
    step = make(model, lambda m, x, y, leaf=None: apexfx.Mean(total(m, x, y) if leaf is None else leaf.sum(),
                                                              (y != IGNORED).sum()), accumulate=2)
    step(*batch(1, 4), torch.ones(3, requires_grad=True))
    step.flush()
    batches = [batch(2, 9), batch(3, 2)]
    train_on(step, batches)
    reference(expected, batches, torch.optim.SGD(expected.parameters(), lr=0.5))
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)


REFUSED = {
    "a total of several": (lambda m, x, y: apexfx.Mean(m(x), 3), TypeError, r"torch.float64 of shape \[2, 5, 7\]"),
    "a count of several": (lambda m, x, y: apexfx.Mean(total(m, x, y), y), TypeError, "a count that is torch.int64 of shape"),
    "a negative count": (lambda m, x, y: apexfx.Mean(total(m, x, y), -1), ValueError, "a count of -1, expected at least 0"),
    "no count": (lambda m, x, y: apexfx.Mean(total(m, x, y), None), TypeError, "a count that is None, expected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    function, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        make(net(), function, accumulate=2)(*batch(1, 4))


@pytest.mark.long
@pytest.mark.parametrize("first, accumulate, fallback", [(first, *options) for first in ("mean", "scalar")
                                                         for options in ((2, None), (3, None), (2, "transform"))])
def test_a_mean_and_a_scalar_are_not_accumulated_together(first, accumulate, fallback):
    """And what is refused has changed nothing: the calls that accumulate go on, graphs that have run before included."""
    def mixed(model, ids, labels):
        if fallback and float(labels.sum()) == 0.5:
            return None
        return usual(model, ids, labels) if len(ids) == 2 else other(model, ids, labels)

    usual, other = (objective, total) if first == "mean" else (total, objective)
    model, expected = net(), net()
    step, alone = (make(each, mixed, accumulate=accumulate, fallback=fallback) for each in (model, expected))
    short = [each[:1] for each in batch(7, 10)]
    for update in range(3):
        for call in range(accumulate):
            if call and update != 1:
                with pytest.raises(TypeError, match="some of the calls that accumulate"):
                    step(*short)
            assert step(*batch(update + call, 4)) == alone(*batch(update + call, 4))
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
        if update == 1:  # the other kind, which makes graphs of it
            for _ in range(accumulate):
                assert step(*short) == alone(*short)


def test_a_mean_is_no_tensor_and_says_what_to_do():
    weight = torch.ones((), requires_grad=True)
    mean = apexfx.Mean(3 * weight.detach(), torch.tensor(2)) + 0.5 * apexfx.Mean(torch.tensor(4.0), 1)
    assert repr(mean) == "Mean(total=tensor(3.), count=tensor(2)) + Mean(total=tensor(2.), count=1)"
    mean = apexfx.Mean(3 * weight, 2)
    for use in (lambda mean: mean.backward(), lambda mean: mean.item(), float):
        with pytest.raises(TypeError, match=r"a Mean is no tensor.*mean\.value\.backward\(\)"):
            use(mean)
        with pytest.raises(TypeError, match=r"a Mean is no tensor"):  # in a graph
            make(net(), lambda *batch, use=use: (objective(*batch), use(objective(*batch))))(*batch(1, 3))
    mean.value.backward()
    assert float(weight.grad) == 1.5


@pytest.mark.long
def test_code_of_inductor_weighs_as_well():
    expected, model = net(torch.float32), net(torch.float32)
    step = make(model, inner="inductor", accumulate=2)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.5, momentum=0.9)
    for counts in ((9, 2), (0, 4), (0, 0)):
        batches = [batch(place, count) for place, count in enumerate(counts)]
        train_on(step, batches)
        if any(counts):
            reference(expected, batches, theirs)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
