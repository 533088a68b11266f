"""check_splits(): published faults of denominators are named, with their ratio, and clean recipes are silent."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.tables import table

WORDS, IGNORED = 7, -100


def words(seed=0):
    """Return 8 sequences of 5 words, which have from 1 to 5 targets each."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, WORDS, (2, 8, 5), generator=generator).unbind()
    for row, count in enumerate((1, 5, 2, 5, 4, 1, 1, 3)):
        labels[row, count:] = IGNORED
    return ids, labels


def images(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(0, WORDS, (8,), generator=generator)


def language():
    return nn.Sequential(nn.Embedding(WORDS, 6), nn.Linear(6, WORDS))


class Recurrent(nn.Module):
    """Time first inside, as nn.GRU has it: examples are no rows of what its layers compute."""

    def __init__(self):
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(WORDS, 6), nn.GRU(6, 6), nn.Linear(6, WORDS)

    def forward(self, ids):
        return self.head(self.cells(self.words(ids).transpose(0, 1))[0]).transpose(0, 1)


def classifier(*layers):
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.ReLU(), nn.Linear(8, WORDS))


def total(model, ids, labels):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def mean(model, ids, labels):
    return apexfx.Mean(total(model, ids, labels), (labels != IGNORED).sum())


def mean_of_means(model, ids, labels):
    return total(model, ids, labels) / (labels != IGNORED).sum()


def contrast(model, x, y):
    h = F.normalize(model(x), dim=1)
    return F.cross_entropy(h @ h.T, torch.arange(len(x)))


def normalized_advantages(model, x, y):
    out = model(x)
    advantages = (y - y.double().mean()) / y.double().std()
    return -(out.log_softmax(1)[:, 0] * advantages).mean()


def hinge_to_the_batch_mean(model, x, y):
    out = model(x)
    return (out - out.mean(0)).relu().square().mean()


def supervised(model, x, y):
    return F.cross_entropy(model(x), y)


class Drops(nn.Dropout):
    """Dropout by functions, as attention of Hugging Face has it."""

    def __init__(self):
        super().__init__()
        self.attention_dropout = 0.5

    def forward(self, x):
        return F.dropout(F.dropout(x, self.p), self.attention_dropout)


class Warmed(nn.Module):
    """A loss that counts its calls in a buffer, and has a parameter."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, model, x, y):
        self.calls += 1
        return F.cross_entropy(model(x) * self.temperature, y) * self.calls


COUNT = (words()[1] != IGNORED).sum()
SHORT = r"0.25 = 1 / \(ranks x calls\)"
FAULTS = {
    "a mean of means": (language, mean_of_means, words(), {}, "the parts have other denominators"),
    "a mean of means over time first": (Recurrent, mean_of_means, words(), {}, "No op mixes examples"),
    "a count of the whole batch": (language, lambda m, x, y, n: total(m, x, y) / n, (*words(), COUNT), {}, SHORT),
    "a sum": (classifier, lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), images(), {}, SHORT),
    "multiplied": (classifier, lambda m, x, y: supervised(m, x, y) * 8 / len(x), images(), {}, "4.00 = ranks x calls"),
    "batch norm": (lambda: classifier(nn.BatchNorm1d(8)), supervised, images(), {}, "batch_norm.* in supervised"),
    "contrastive": (classifier, contrast, images(), {}, r"aten.mm.default at .*test_check_splits.py:\d+, in contrast: .*h @ h.T"),
    "normalized advantages": (classifier, normalized_advantages, images(), {}, "in normalized_advantages: advantages = "),
    "a mean of the batch": (classifier, hinge_to_the_batch_mean, images(), {}, "in hinge_to_the_batch_mean"),
    "synchronized batch norm over calls": (lambda: classifier(nn.BatchNorm1d(8)), supervised, images(), {"sync_bn": True},
                                           "batch_norm.* in supervised(?s:.*)statistics of one call"),
    "contrastive, beside synchronized batch norm": (lambda: classifier(nn.BatchNorm1d(8)), contrast, images(), {"sync_bn": True},
                                                    "in contrast: .*h @ h.T"),
}
CLEAN = {
    "a mean by counts": (language, mean, words(), {}),
    "means by counts": (language, lambda m, x, y: mean(m, x, y) + 0.1 * apexfx.Mean(m(x).square().sum(), len(x)), words(), {}),
    "a mean and more": (language, lambda m, x, y: (mean(m, x, y), len(x)), words(), {}),
    "examples": (classifier, supervised, images(), {}),
    "layer norm": (lambda: classifier(nn.LayerNorm(8)), supervised, images(), {}),
    "dropout": (lambda: classifier(Drops()), supervised, images(), {}),
    "frozen batch norm": (lambda: classifier(nn.BatchNorm1d(8).eval()), supervised, images(), {}),
    "a penalty of parameters": (classifier, lambda m, x, y: supervised(m, x, y) + m[0].weight.square().sum(), images(), {}),
    "dropout of attention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
                             lambda m, x, y: m(x[:, None]).square().mean(), images(), {}),
    "dropout of an LSTM": (lambda: nn.LSTM(6, 4, 2, dropout=0.5), lambda m, x, y: m(x[None])[0].square().mean(), images(), {}),
    "a loss with a counter and a temperature": (classifier, Warmed(), images(), {}),
    "half precision": (classifier, supervised, images(), {"opt_level": "O2"}),
}


def make(build, objective, options):
    torch.manual_seed(0)
    model = build()
    params = [*model.parameters(), *(objective.parameters() if isinstance(objective, nn.Module) else ())]
    step = apexfx.train_step(model, objective=objective, optimizer=torch.optim.SGD(params, lr=0.1), inner="eager",
                             **{"opt_level": "O0", **options})
    return model, step


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(name):
    build, objective, batch, options, said = FAULTS[name]
    model, step = make(build, objective, options)
    before = [p.clone() for p in model.state_dict().values()]
    splits = apexfx.check_splits(step, *batch, ranks=(1, 2), accumulate=(1, 2))
    assert not splits.is_right and splits.rows[0].is_right and splits.rows[0].ratio == pytest.approx(1)
    assert re.search(said, str(splits)), str(splits)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values()))


@pytest.mark.parametrize("name", CLEAN)
def test_clean_recipes_are_silent(name):
    build, objective, batch, options = CLEAN[name]
    splits = apexfx.check_splits(make(build, objective, options)[1], *batch, ranks=(1, 2, 4), accumulate=(1, 2))
    assert splits.is_right, str(splits)
    assert len(splits.rows) == 6 and "another" not in str(splits)


SYNCED = {
    "a module": (lambda: classifier(nn.BatchNorm1d(8)), supervised),
    "a function": (classifier, lambda m, x, y: supervised(m, F.batch_norm(x, None, None, training=True), y)),
    "one that keeps no statistics": (lambda: classifier(nn.BatchNorm1d(8, affine=False, track_running_stats=False)), supervised),
}


@table(1, "name", SYNCED)
def test_synchronized_batch_norms_join_ranks_and_not_calls(name):
    """Of a split over calls, beside what the step really does."""
    def updates(model):
        return torch.cat([(p.detach() - q.detach()).flatten() for p, q in zip(model.parameters(), started.parameters())])

    build, objective = SYNCED[name]
    options, batch = {"sync_bn": True}, (images()[0].double(), images()[1])
    model, step = make(lambda: build().double(), objective, options | {"accumulate": 2})
    started = copy.deepcopy(model)
    splits = apexfx.check_splits(step, *batch, ranks=(1, 2, 4), accumulate=(1, 2))
    for part in zip(*(x.chunk(2) for x in batch)):
        step(*part)
    at_once, step = make(lambda: build().double(), objective, options)
    step(*batch)
    error = float((updates(model) - updates(at_once)).norm() / updates(at_once).norm())
    assert error > 1e-3
    assert [row.error for row in splits.rows] == [pytest.approx(e, rel=1e-6, abs=1e-12) for e in (0.0, error) * 3]
    assert [row.is_right for row in splits.rows] == [True, False] * 3


def test_a_batch_norm_in_eval_mode_that_keeps_no_statistics_joins_no_ranks():
    build = lambda: classifier(nn.BatchNorm1d(8, track_running_stats=False).eval())  # noqa: E731
    splits = apexfx.check_splits(make(build, supervised, {"sync_bn": True})[1], *images(), ranks=(1, 2), accumulate=(1,))
    assert [row.is_right for row in splits.rows] == [True, False]


def test_a_parameter_without_effect_is_not_the_worst():
    """A bias in front of a batch norm has a gradient of roundings."""
    build = lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, WORDS))  # noqa: E731
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    splits = apexfx.check_splits(make(build, supervised, {})[1], x, images()[1], accumulate=(1, 2))
    assert {row.worst for row in splits.rows if not row.is_right} <= {"0.weight", "1.bias"}


TEACHER = classifier()
REFUSED = {
    "a batch that does not split": (supervised, images(), 4, "8 examples, expected a multiple of 16"),
    "no tensor": (supervised, (), 2, "0 examples"),
    "random numbers": (lambda m, x, y: supervised(m, F.dropout(x), y), images(), 2, "draws random numbers"),
    "nothing is counted": (lambda m, x, y: apexfx.Mean(0 * supervised(m, x, y), 0), images(), 2, "the whole batch is nan"),
    "a module that is not copied": (lambda m, x, y: F.mse_loss(m(x), TEACHER(x)), images(), 2, "a tensor of its closure"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compared(name):
    objective, batch, most, text = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError)) as raised:
        apexfx.check_splits(make(classifier, objective, {})[1], *batch, accumulate=(1, most))
    assert text in "\n".join((str(raised.value), *getattr(raised.value, "__notes__", ())))


def test_modules_of_a_closure_are_refused():
    scale, model = nn.BatchNorm1d(WORDS), classifier()
    optimizer = torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.1)
    step = apexfx.train_step(model, objective=lambda m, x, y: F.cross_entropy(scale(m(x)), y), optimizer=optimizer,
                             modules=[scale], opt_level="O0", inner="eager")
    with pytest.raises(ValueError, match="modules= gives a step those of a closure"):
        apexfx.check_splits(step, *images(), accumulate=(1, 2))
    assert scale.num_batches_tracked == 0


def test_the_batch_stays_as_it_was():
    x, y = images()
    step = make(classifier, lambda m, x, y: supervised(m, x.mul_(2), y.fill_(1)), {})[1]
    assert apexfx.check_splits(step, x.double(), y, accumulate=(1, 2)).is_right
    assert torch.equal(y, images()[1])
