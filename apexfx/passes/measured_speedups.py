"""Measured: how much faster the apexfx norm is than what Inductor makes of torch's; data only.

Written by benchmarks/ops_norm.py --write; last run: add_layer_norm, add_rms_norm, add_written_rms_norm
(torch 2.13.0+cpu, 2 thread(s), wall time, 2 process(es)).
Entries that a run does not measure stay as an earlier one left them.
(op, device type, dtype of x) -> (geometric mean over the shapes, smallest) of the ratio
time(torch) / time(apexfx), forward and backward, shapes (4096, 768), (8192, 1024), (512, 4096);
batch_norm with add and ReLU: (16, 32, 24, 24), (32, 64, 56, 56), (32, 256, 14, 14), (32, 1024, 7, 7), channels_last.
A combination that is not here was not measured, and is left to Inductor. So is an input of fewer
elements than LEAST_ELEMENTS, those of the smallest shape above; of batch_norm, of a smaller image on which
it still wins, (4, 16, 12, 12).
"""

from __future__ import annotations

MARGIN = 1.05  # the mean must reach this for the kernel to be worth a node that nothing fuses with
FLOOR = 0.9  # and the smallest this

LEAST_ELEMENTS: dict[str, int] = {
    "add_layer_norm": 2097152,
    "add_rms_norm": 2097152,
    "add_written_rms_norm": 2097152,
    "batch_norm": 9216,
    "layer_norm": 2097152,
    "rms_norm": 2097152,
    "written_rms_norm": 2097152,
}

RATIO: dict[tuple[str, str, str], tuple[float, float]] = {
    ("add_layer_norm", "cpu", "bfloat16"): (1.5, 1.24),
    ("add_layer_norm", "cpu", "float16"): (1.04, 0.88),
    ("add_layer_norm", "cpu", "float32"): (1.34, 1.23),
    ("add_rms_norm", "cpu", "bfloat16"): (1.28, 1.14),
    ("add_rms_norm", "cpu", "float16"): (1.46, 0.75),
    ("add_rms_norm", "cpu", "float32"): (1.26, 1.16),
    ("add_written_rms_norm", "cpu", "bfloat16"): (1.29, 1.17),
    ("add_written_rms_norm", "cpu", "float16"): (0.89, 0.74),
    ("add_written_rms_norm", "cpu", "float32"): (1.38, 1.14),
    ("batch_norm", "cpu", "bfloat16"): (8.32, 7.49),
    ("batch_norm", "cpu", "float16"): (7.65, 6.72),
    ("batch_norm", "cpu", "float32"): (6.5, 5.81),
    ("layer_norm", "cpu", "bfloat16"): (1.24, 1.03),
    ("layer_norm", "cpu", "float16"): (1.06, 0.8),
    ("layer_norm", "cpu", "float32"): (1.27, 1.06),
    ("rms_norm", "cpu", "bfloat16"): (0.97, 0.89),
    ("rms_norm", "cpu", "float16"): (0.81, 0.62),
    ("rms_norm", "cpu", "float32"): (1.27, 0.88),
    ("written_rms_norm", "cpu", "bfloat16"): (0.98, 0.87),
    ("written_rms_norm", "cpu", "float16"): (0.81, 0.66),
    ("written_rms_norm", "cpu", "float32"): (1.19, 0.91),
}
