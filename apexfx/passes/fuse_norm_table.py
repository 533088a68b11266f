"""Measured: how much faster the apexfx norm is than what the inner compiler makes of torch's; data only.

Written by benchmarks/ops_norm.py --write; last run: batch_norm (torch 2.13.0+cpu, 1 thread(s), wall time).
Entries that a run does not measure stay as an earlier one left them.
(op, device type, inner compiler, dtype of x) -> (geometric mean over the shapes, smallest) of the ratio
time(torch) / time(apexfx), forward and backward, shapes (4096, 768), (8192, 1024), (512, 4096);
batch_norm with add and ReLU: (16, 32, 24, 24), (32, 64, 56, 56), (32, 256, 14, 14), (32, 1024, 7, 7), channels_last.
A combination that is not here was not measured, and is left to the inner compiler. So is an input of fewer
elements than LEAST_ELEMENTS, those of the smallest shape above; of batch_norm, of a smaller image on which
it still wins, (4, 16, 12, 12).
"""

from __future__ import annotations

MARGIN = 1.05  # the mean must reach this for the kernel to be worth a node that nothing fuses with
FLOOR = 0.9  # and the smallest this

LEAST_ELEMENTS: dict[str, int] = {
    "batch_norm": 9216,
    "layer_norm": 2097152,
    "rms_norm": 2097152,
    "written_rms_norm": 2097152,
}

RATIO: dict[tuple[str, str, str, str], tuple[float, float]] = {
    ("batch_norm", "cpu", "eager", "bfloat16"): (1.3, 1.22),
    ("batch_norm", "cpu", "eager", "float32"): (1.01, 0.93),
    ("batch_norm", "cpu", "inductor", "bfloat16"): (9.14, 7.52),
    ("batch_norm", "cpu", "inductor", "float32"): (6.55, 5.19),
    ("layer_norm", "cpu", "eager", "bfloat16"): (1.33, 1.07),
    ("layer_norm", "cpu", "eager", "float32"): (1.27, 0.81),
    ("layer_norm", "cpu", "inductor", "bfloat16"): (1.5, 1.14),
    ("layer_norm", "cpu", "inductor", "float32"): (1.44, 1.11),
    ("rms_norm", "cpu", "eager", "bfloat16"): (10.8, 5.15),
    ("rms_norm", "cpu", "eager", "float32"): (5.9, 2.9),
    ("rms_norm", "cpu", "inductor", "bfloat16"): (1.12, 1.01),
    ("rms_norm", "cpu", "inductor", "float32"): (1.42, 0.94),
    ("written_rms_norm", "cpu", "eager", "bfloat16"): (8.64, 4.52),
    ("written_rms_norm", "cpu", "eager", "float32"): (5.57, 2.84),
    ("written_rms_norm", "cpu", "inductor", "bfloat16"): (1.1, 0.94),
    ("written_rms_norm", "cpu", "inductor", "float32"): (1.4, 0.95),
}
