"""The package's own names: what is shown, what is found, and what importing it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import apexfx


def test_importing_the_package_imports_no_compiler():
    """They take longer than torch itself, and not every program compiles."""
    code = ("import sys, torch; before = set(sys.modules); import apexfx\n"
            "print({'.'.join(name.split('.')[:2]) for name in set(sys.modules) - before if not name.startswith('apexfx')})")
    names = eval(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert not {name for name in names if name.startswith(("torch._dynamo", "torch._inductor", "torch._export", "sympy"))}


@pytest.mark.long
def test_what_is_reached_for_is_imported():
    """Apex's packages as attributes, and what is not shown by its full name."""
    code = ("import sys, apexfx; assert 'apexfx.amp' not in sys.modules; apexfx.amp.initialize; apexfx.parallel.Reducer\n"
            "import apexfx.config, apexfx.passes.precision as p; from apexfx import backend, config; config.BucketConfig; p\n"
            "assert all(getattr(apexfx, name) is not None for name in dir(apexfx))")
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'apm'"):
        getattr(apexfx, "apm")  # noqa: B009  a name that no checker knows


def test_only_what_is_promised_is_shown():
    assert [name for name in dir(apexfx) if not name.startswith("__")] == [
        "BucketConfig", "BucketPlan", "EMA", "LoopCheck", "Match", "Mean", "NonFiniteError", "NotOneGraph",
        "Part", "Pass", "PassError",
        "RankFailureError", "RankMismatchError", "ReplicaMismatchError", "Report",
        "Safeguard", "Slot", "Splits", "TrainStep", "UnsynchronizedGradientError", "amp", "buckets", "check_loop", "check_splits",
        "compare", "compat",
        "fp16_utils", "graph", "last_report", "multi_tensor_apply", "normalization", "ops", "optimizers", "parallel",
        "train_step", "transform",
    ]  # fmt: skip
    assert "__version__" in dir(apexfx)
