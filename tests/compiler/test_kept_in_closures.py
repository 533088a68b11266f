"""Lists, dictionaries and sets of a closure that a method writes, of an object which the captured code itself makes."""

from __future__ import annotations

import collections

import torch
from torch import nn

from tests.forms import drawn
from tests.tables import table
from tests.ways import WAYS, check


def recorder():
    """Return classes whose instances record what they are given, and what they have recorded it in."""
    held = kept, table, seen, last = [], {}, set(), collections.deque()

    class Recorder:
        def __call__(self, h):
            kept.append(h.square().mean())

        def __enter__(self):
            self(torch.ones(()))

        def __exit__(self, *_):
            table["left"] = len(kept)

        def others(self, h):
            table.setdefault("sizes", []).append(h.square().mean())
            seen.add(len(last))
            last.append(h.square().mean())

        @staticmethod
        def static(h):
            kept.append(h.square().mean())

    class Probe(nn.Module):
        def forward(self, h):
            kept.append(h.square().mean())

    return Recorder, Probe, held


def in_context(Recorder, Probe, h):
    with Recorder():
        h.sum()


FORMS = {"a call": lambda Recorder, Probe, h: Recorder()(h), "a context": in_context,
         "a bound method": lambda Recorder, Probe, h: [*map(Recorder().others, [h, 2 * h])],
         "a static method": lambda Recorder, Probe, h: Recorder().static(h), "a module": lambda Recorder, Probe, h: Probe()(h)}


class Records(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(4, 4), FORMS[form]
        *self.classes, self.held = recorder()

    def forward(self, x):
        kept, h = self.held[0], self.layer(x)
        self.form(*self.classes, h.detach())
        return h.mean() * (1 + sum(kept))


def numbers(held):
    if isinstance(held, dict):
        return {key: numbers(value) for key, value in held.items()}
    return [numbers(each) for each in held] if isinstance(held, (list, tuple, set, collections.deque)) else float(held)


CASES = [*((form, way, "eager") for form in FORMS for way in WAYS), *(("a call", way, "inductor") for way in WAYS)]


@table(3, "form, way, inner", CASES)
def test_what_is_kept_in_a_closure_is_as_in_eager(form, way, inner):
    models = []
    check(way, lambda: models.append(Records(form)) or models[-1], lambda out, x: out, drawn(8, 4, count=3), "O0", inner=inner)
    of_eager, ours = (numbers(model.held) for model in models)
    torch.testing.assert_close(ours, of_eager, rtol=1e-4, atol=1e-4)
