"""torch's own switches work for the passes: TORCH_LOGS shows them, TORCH_TRACE keeps a graph for each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1))
compiled = torch.compile(model, backend="apex", options={"opt_level": "O1", "inner": "eager"})
compiled(torch.randn(2, 4)).sum().backward()
"""


@pytest.mark.long
def test_torch_logs_and_torch_trace(tmp_path):
    environment = {**os.environ, "TORCH_LOGS": "+apexfx", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "precision: 4 matches, 6 -> 10 nodes" in done.stderr
    assert "# forward graph after precision (" in done.stderr, "the graph, at debug level"
    traces = "".join(path.read_text() for path in tmp_path.iterdir())
    assert '"name": "apexfx_forward_precision"' in traces
    assert '"name": "apexfx_forward_cancel_casts"' in traces
