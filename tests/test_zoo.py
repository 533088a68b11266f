"""The zoo by transform() and train_step(): captures, trains three steps as eager float32 does, evaluates, at every opt level."""

from __future__ import annotations

import copy

import pytest
import torch

import apexfx
from apexfx.testing import tolerance
from tests.zoo import ZOO, train

LEVELS = ("O0", "O1", "O2", "O3")
BREAKS_GRAPHS = ("gpt2",)  # benchmarks/results/coverage.md says why
HALVES = (torch.bfloat16, torch.float16)
pytestmark = pytest.mark.long


def near(name, level, half, by):
    """Train a model by a function of entry and model, as near to eager float32 as its dtype is; return what that returns."""
    entry = ZOO[name]
    if entry.needs:
        pytest.importorskip(entry.needs)
    torch.manual_seed(0)
    source = entry.build()
    expected = train(entry, copy.deepcopy(source))
    found = by(entry, source)
    # Tens of ops in a row and a mean over the batch; the logits also carry three steps of SGD. The whole vector is
    # compared, because single logits may be nearly zero.
    rtol = 4 * tolerance(half if level != "O0" else torch.float32)["rtol"]
    assert found.losses == pytest.approx(expected.losses, rel=rtol)
    assert (found.logits - expected.logits).norm() <= rtol * expected.logits.norm()
    return found


def check(name, level, half, inner):
    def transformed(entry, source):
        nonlocal model
        model = apexfx.transform(source, opt_level=level, dtype=half if level != "O0" else None, inner=inner, verify="final")
        return train(entry, model, loss_scale=1024.0 if half == torch.float16 else None)

    model = None
    assert not near(name, level, half, transformed).grad_dtypes
    assert {p.dtype for p in model.parameters()} == ({half} if level == "O3" else {torch.float32})
    assert bool(model.report.casts()) == (level in ("O1", "O2")) or level == "O3"
    ops = model.report.ops()
    assert ops and all(op.rule and op.reason and op.dtype != "-" for op in ops)
    assert all(str(model.report.explain(where)) for where in {op.where for op in ops})
    assert (len(model.report.graphs) > 2) == (name in BREAKS_GRAPHS)


def check_step(name, level, half, inner, **options):
    """float16 has a loss scale from which three steps overflow nowhere."""
    options |= {"opt_level": level, "dtype": half if level != "O0" else None, "inner": inner}
    scale = 256.0 if half == torch.float16 else None
    assert near(name, level, half, lambda entry, source: train(entry, source, loss_scale=scale, **options)).num_graphs == 1


ROWS = [(level, half) for level in LEVELS for half in HALVES[:1 if level == "O0" else 2]]


@pytest.mark.parametrize(("level", "half"), ROWS, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_everything_trains_as_eager_does(name, level, half):
    check(name, level, half, "eager")


@pytest.mark.parametrize("level, half", ROWS[:5], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_every_step_trains_as_eager_does(name, level, half):
    check_step(name, level, half, "eager", verify="each")


@pytest.mark.parametrize(("name", "level"), [(name, LEVELS[place % len(LEVELS)]) for place, name in enumerate(ZOO)])
def test_everything_trains_under_inductor(name, level):  # at a level each: a graph of Inductor's takes a minute
    check(name, level, torch.bfloat16, "inductor")


@pytest.mark.parametrize(("name", "level"), [(name, LEVELS[place % 3]) for place, name in enumerate(ZOO)])
def test_every_step_trains_under_inductor(name, level):
    check_step(name, level, torch.bfloat16, "inductor")
