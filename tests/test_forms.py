"""Every form of tests/forms.py by every way and level that it names, beside eager torch; and compiled by Inductor."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config

from tests.amp.amp_cases import fresh_state
from tests.forms import FORMS, squares
from tests.tables import table
from tests.ways import check


@pytest.fixture(autouse=True)
def _fresh_amp():
    fresh_state()
    yield
    fresh_state()


# Random numbers are those of eager whatever `fallback_random` is, but for Inductor's own code, which it is for.
ROWS = [(name, way, level, fallback) for name, form in FORMS.items() for fallback in (False, True)[:1 + name.startswith("random")]
        for level in form.levels for way in form.ways]
COMPILED = [(name, "step" if place % 2 and "step" in form.ways else "transform")
            for place, (name, form) in enumerate(FORMS.items()) if form.inductor]


@table(12, ("name", "way", "level", "fallback"), ROWS)
def test_every_form_trains_as_in_eager(name, way, level, fallback):
    form = FORMS[name]
    with torch._inductor.config.patch(fallback_random=fallback):
        check(way, form.make, squares, form.batches, level, form.lr)


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), COMPILED)
def test_inductor_trains_as_eager(name, way):
    form = FORMS[name]
    with torch._inductor.config.patch(fallback_random=True):
        check(way, form.make, squares, form.batches, form.inductor, form.lr, inner="inductor")


@pytest.mark.parametrize("way", ["transform", "step"])
def test_a_write_into_memory_of_another_dtype_is_refused_at_o3(way):
    form = FORMS["cast: assignments"]
    with pytest.raises(RuntimeError, match="dtype"):
        check(way, form.make, squares, form.batches, "O3")
