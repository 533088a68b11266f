"""The CUDA kernels of lists and norms, run on the CPU by emulation: every case of the device tests agrees with float64."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None or sys.platform != "linux", reason="needs g++ and ucontext")
def test_cuda_kernels_agree_when_emulated(tmp_path):
    program = Path(__file__).with_name("emulate.py")
    command = [sys.executable, str(program), str(tmp_path), "--every", "5"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert done.returncode == 0 and "cases agree" in done.stdout, done.stdout[-4000:]
