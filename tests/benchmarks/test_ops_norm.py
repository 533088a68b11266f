"""The table of the norms that are worth a kernel, as the benchmark writes it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

from ops_norm import Measurement, table_source


def test_what_is_not_worth_a_kernel_is_left_out():
    ratios = {"layer_norm": (1.5, 1.2), "rms_norm": (1.04, 1.04), "add_rms_norm": (2.0, 0.5)}
    rows = [Measurement(op, "inductor", "cpu", "float32", shape, 1.0, ratio)
            for op, of_each in ratios.items() for shape, ratio in zip(((4096, 768), (512, 4096)), of_each)]
    written = {}
    exec(table_source(rows, {("rms_norm", "cpu", "float32"): (2.0, 2.0), ("batch_norm", "cpu", "float32"): (6.5, 5.8)},
                      "wall", 1), written)
    assert written["RATIO"] == {("batch_norm", "cpu", "float32"): (6.5, 5.8), ("layer_norm", "cpu", "float32"): (1.34, 1.2)}
