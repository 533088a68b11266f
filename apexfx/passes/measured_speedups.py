"""Measured: how much faster the apexfx norm is than what Inductor makes of torch's; data only.

Written by benchmarks/ops_norm.py --write; last run: add_layer_norm, add_rms_norm, add_written_rms_norm
(torch 2.13.0+cpu, 2 thread(s), wall time, 2 process(es)).
Entries that a run does not measure stay as an earlier one left them.
(op, device type, dtype of x) -> (geometric mean over the shapes, smallest) of the ratio
time(torch) / time(apexfx), forward and backward, shapes (4096, 768), (8192, 1024), (512, 4096);
batch_norm with add and ReLU: (16, 32, 24, 24), (32, 64, 56, 56), (32, 256, 14, 14), (32, 1024, 7, 7), channels_last.
A combination that is not here was not measured, or is below 1.05 on average or 0.9 on a shape,
and is left to Inductor. So is an input of fewer elements than LEAST_ELEMENTS, those of the smallest
shape above; of batch_norm, of a smaller image on which it still wins, (4, 16, 12, 12).
"""

from __future__ import annotations

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
    ("add_layer_norm", "cpu", "float32"): (1.34, 1.23),
    ("add_rms_norm", "cpu", "bfloat16"): (1.28, 1.14),
    ("add_rms_norm", "cpu", "float32"): (1.26, 1.16),
    ("add_written_rms_norm", "cpu", "bfloat16"): (1.29, 1.17),
    ("add_written_rms_norm", "cpu", "float32"): (1.38, 1.14),
    ("batch_norm", "cpu", "bfloat16"): (8.32, 7.49),
    ("batch_norm", "cpu", "float16"): (7.65, 6.72),
    ("batch_norm", "cpu", "float32"): (6.5, 5.81),
    ("layer_norm", "cpu", "bfloat16"): (1.24, 1.03),
    ("layer_norm", "cpu", "float32"): (1.27, 1.06),
    ("written_rms_norm", "cpu", "float32"): (1.19, 0.91),
}
