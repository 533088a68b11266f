"""Lists, dictionaries and sets of a closure that a method writes, of an object which the captured code itself makes."""

from __future__ import annotations

import collections

import torch
from torch import nn

from tests.tables import table
from tests.ways import WAYS, updates


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


def trained(way, form, inner):
    torch.compiler.reset()
    torch.manual_seed(0)
    model, batches = Records(form), [torch.randn(8, 4) for _ in range(3)]
    update = updates(way, model, lambda model, x: model(x), inner=inner)
    return [update(x) for x in batches], model.held


def numbers(held):
    if isinstance(held, dict):
        return {key: numbers(value) for key, value in held.items()}
    return [numbers(each) for each in held] if isinstance(held, (list, tuple, set, collections.deque)) else float(held)


CASES = [*((form, way, "eager") for form in FORMS for way in WAYS), *(("a call", way, "inductor") for way in WAYS)]


@table(3, "form, way, inner", CASES)
def test_what_is_kept_in_a_closure_is_as_in_eager(form, way, inner):
    ours, of_eager = numbers(trained(way, form, inner)), numbers(trained("eager", form, inner))
    torch.testing.assert_close(ours, of_eager, rtol=1e-4, atol=1e-4)
