"""What a process grows by for each model that is made and dropped, beside torch.compile on a fresh function each time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

from leaks import growth_alone


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_dropped_model_leaves_no_more_than_torch_compile_does():
    most = 1.1 * growth_alone("torch_compile", "eager", 200)
    for name in ("train_step", "accumulating", "in_pieces", "transform"):
        assert growth_alone(name, "eager", 200) <= (2 if name == "accumulating" else 1) * most  # which compiles two graphs
