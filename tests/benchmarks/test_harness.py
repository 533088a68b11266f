"""What the benchmarks say of their figures."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

import harness


@pytest.mark.parametrize("num_values, expected", [(30, (9, 14.5, 20)), (6, (0, 2.5, 5)), (3, (0, 1, 2))])
def test_an_interval_follows_from_the_order_alone(num_values, expected):
    assert harness.interval(list(range(num_values))[::-1]) == expected


def test_an_interval_holds_the_median_in_95_of_100_cases():
    rng, holds = random.Random(0), 0
    for _ in range(1000):
        low, _, high = harness.interval([rng.expovariate(1.0) for _ in range(30)])
        holds += low <= 0.6931 <= high
    assert 930 <= holds <= 985
