"""The CUDA kernels, run on the CPU by emulation: they pass the tests of the CPU's kernels and those of a device."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ and ucontext")

CASES = ("checksum", "multi_tensor", "optimizers", "norms", "batch_norm", "local_batch_norm")


def run(folder, sources, *arguments):
    """Run pytest on emulated kernels; return how many tests passed, where none failed."""
    program = Path(__file__).with_name("emulate.py")
    command = [sys.executable, str(program), str(folder), sources, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed, done.stdout[-4000:]
    print(done.stdout.splitlines()[-1])
    return int(passed[1])


@pytest.mark.long
def test_the_multi_tensor_kernels_pass_the_tests_of_the_cpu(tmp_path):
    assert run(tmp_path, "multi_tensor", "tests/ops/test_multi_tensor.py") >= 110


@pytest.mark.long
def test_every_kernel_passes_the_tests_of_the_cpu(tmp_path):
    assert run(tmp_path, "all", *[f"tests/ops/test_{name}.py" for name in CASES], "-m", "long or not long") > 1100


@pytest.mark.long
def test_every_kernel_passes_the_tests_of_a_device(tmp_path):
    assert run(tmp_path, "all", "tests/gpu", "--ignore=tests/gpu/test_check.py") > 100  # which rehearses by itself
