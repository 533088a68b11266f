"""benchmarks/results/ops.md: made of what a device measured, and owing what none did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them

import roofline


def test_the_page_is_that_of_the_committed_record():
    record = json.loads(roofline.FILE.read_text()) if roofline.FILE.exists() else None
    assert roofline.PAGE.read_text() == roofline.page(record), "run: python benchmarks/roofline.py"


def test_measured_rows_have_figures_and_the_others_are_owed():
    row = {"name": "sgd gpt2", "gigabytes_per_s": 2812.4, "share_of_copy": 0.937, "ratio": 1.08, "best_other": "torch fused",
           "seconds": {"ours": 0.000885, "torch fused": 0.000956}}
    page = roofline.page({"machine": "H100", "torch": "2.11", "copy_gigabytes_per_s": 3001.0, "rows": [row]})
    [line] = [line for line in page.splitlines() if "| sgd gpt2" in line]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "sgd_", "sgd gpt2", "2812", "94%", "0.885", "torch fused", "0.956", "1.08"]  # fmt: skip
    assert page.count("| owed") == 5 * (len(roofline.ROWS) - 1)
    assert "H100, torch 2.11; the copy: 3001 GB/s" in page
