"""The zoo under transform(): captures, trains three steps as eager float32 does, evaluates, at every opt level."""

from __future__ import annotations

import copy

import pytest
import torch

import apexfx
from apexfx.testing import tolerance
from tests.zoo import ZOO, train

LEVELS = ("O0", "O1", "O2", "O3")
BREAKS_GRAPHS = ("gpt2",)  # docs/coverage.md says why


def check(name, level, half, inner, **options):
    entry = ZOO[name]
    if entry.needs:
        pytest.importorskip(entry.needs)
    torch.manual_seed(0)
    source = entry.build()
    expected = train(entry, copy.deepcopy(source))
    dtype = half if level != "O0" else None
    model = apexfx.transform(source, opt_level=level, dtype=dtype, inner=inner, verify="final", **options)
    found = train(entry, model, loss_scale=1024.0 if half == torch.float16 and level != "O0" else 1.0)

    # Tens of ops in a row and a mean over the batch; the logits also carry three steps of SGD. The whole vector is
    # compared, because single logits may be nearly zero.
    rtol = 4 * tolerance(half if level != "O0" else torch.float32)["rtol"]
    assert found.losses == pytest.approx(expected.losses, rel=rtol)
    assert (found.logits - expected.logits).norm() <= rtol * expected.logits.norm()
    assert not found.grad_dtypes
    parameters = {p.dtype for p in model.parameters()}
    assert parameters == ({half} if level == "O3" else {torch.float32})
    casts = model.report.casts()
    assert bool(casts) == (level in ("O1", "O2")) or level == "O3"
    ops = model.report.ops()
    assert ops and all(op.rule and op.reason and op.dtype != "-" for op in ops)
    assert all(str(model.report.explain(where)) for where in {op.where for op in ops})
    assert (len(model.report.graphs) > 2) == (name in BREAKS_GRAPHS)


@pytest.mark.long
def test_trains_as_eager_does_in_low_precision_alone():  # the programs of tests/world have the other levels
    check("residual_cnn", "O3", torch.bfloat16, "eager", fullgraph=True)


@pytest.mark.long
@pytest.mark.parametrize(("level", "half"), [
    (level, half) for level in LEVELS for half in (torch.bfloat16, torch.float16)[:1 if level == "O0" else 2]], ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_everything_trains_as_eager_does(name, level, half):
    check(name, level, half, "eager")


@pytest.mark.long
@pytest.mark.parametrize(("name", "level"), [(name, LEVELS[place % len(LEVELS)]) for place, name in enumerate(ZOO)])
def test_everything_trains_under_inductor(name, level):  # at a level each: a graph of Inductor's takes a minute
    check(name, level, torch.bfloat16, "inductor")
