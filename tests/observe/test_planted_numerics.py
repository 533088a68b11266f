"""`compare()` on the planted faults: the op and the line of each come first, and a clean model has nothing that stands out."""

from __future__ import annotations

import pytest
import torch

import apexfx
from tests.observe.planted_numerics import CASES
from tests.tables import table


@table(3, "case", CASES, ids=lambda case: case.name)
def test_a_planted_fault_is_named(case):
    if case.name == "clean_convolutions" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # What torch asks before it calls oneDNN for one; else it sums in bfloat16, with oneDNN switched on or off.
        pytest.skip("on this processor torch's gradient of a convolution's weight is summed in bfloat16, which does stand out")
    comparison = apexfx.compare(apexfx.transform(case.build(), inner="eager", **case.options), case.batch, loss_fn=case.loss)
    if not case.ops:
        assert not any(row.stands_out for row in comparison), comparison
        return
    first = comparison[0]
    names = {first.op.rpartition(".")[2], first.op.removesuffix(".default").replace(".", "::"), first.call.split(".")[-2]}
    assert names & case.ops and first.source.endswith(f":{case.line()}") and first.phase == case.direction, comparison
    assert (first.stands_out or first.is_source) and first.source in comparison.verdict, comparison
