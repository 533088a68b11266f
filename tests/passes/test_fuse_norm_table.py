"""fuse_norm: the table of measured ratios and least sizes decides where it fires."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apexfx.passes.fuse_norm import FuseNorm
from apexfx.passes.measured_speedups import LEAST_ELEMENTS, RATIO
from apexfx.testing import assert_close
from tests.passes.norm_graphs import EVERYWHERE, draw, fused, llama, needs_kernel, rewrite


def test_table_decides():
    x = draw(3, 8)
    slow = dict.fromkeys(EVERYWHERE, (1.04, 1.04))
    uneven = dict.fromkeys(EVERYWHERE, (2.0, 0.5))
    for ratios in ({}, slow, uneven):
        assert fused(rewrite(nn.LayerNorm(8), x, ratios=ratios)[1]) == []
    assert fused(rewrite(nn.LayerNorm(8), x, inner="inductor")[1]) == []  # measured for eager only
    assert FuseNorm(inner="eager").options() != FuseNorm(inner="inductor").options()


@needs_kernel
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(("norm", "function"), [
    ("layer_norm", nn.LayerNorm(4096)),
    ("rms_norm", nn.RMSNorm(4096)),
    ("written_rms_norm", lambda x: llama(x, torch.ones(4096))),
])  # fmt: skip
def test_norms_smaller_than_any_that_was_measured_stay(norm, function, dynamic):
    for rows, fires in ((511, False), (512, True)):
        x = draw(rows, 4096)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        _, gm, y = rewrite(function, x, least_elements=LEAST_ELEMENTS)
        assert bool(fused(gm)) == fires
        assert not dynamic or isinstance(next(iter(gm.graph.output_node().args[0])).meta["val"].shape[0], torch.SymInt)
        assert_close(y, function(x))


def test_the_least_elements_are_those_of_the_op_and_part_of_the_key():
    x = draw(3, 8)
    assert fused(rewrite(nn.LayerNorm(8), x, least_elements={"layer_norm": 25})[1]) == []
    assert FuseNorm(inner="eager").options() != FuseNorm(inner="eager", least_elements={}).options()
    assert FuseNorm(inner="eager").options() == FuseNorm(inner="eager", least_elements=LEAST_ELEMENTS).options()


@needs_kernel
def test_another_ops_least_elements_do_not_count():
    _, gm, _ = rewrite(nn.LayerNorm(8), draw(3, 8), least_elements={"layer_norm": 24, "rms_norm": 25})
    assert fused(gm) == ["apexfx.layer_norm.default"]


def test_without_a_kernel_nothing_changes(monkeypatch):
    monkeypatch.setattr("apexfx.passes.fuse_norm.has_kernel", lambda op, key: False)
    assert fused(rewrite(nn.LayerNorm(8), draw(3, 8))[1]) == []


def test_the_table_is_well_formed():
    assert RATIO
    for (op, device, inner, dtype), (mean, smallest) in RATIO.items():
        assert op in ("batch_norm", "layer_norm", "rms_norm", "written_rms_norm") and device in ("cpu", "cuda")
        assert inner in ("eager", "inductor") and isinstance(getattr(torch, dtype), torch.dtype)
        assert 0 < smallest <= mean and LEAST_ELEMENTS[op] > 0
