"""`make gpu-check`: build in place, test, sanitize and measure on a machine with a CUDA device and no network.

    python3 tests/gpu/check.py [--device cuda|cpu] [--budget-s 530]

Needs a python3 with torch and pytest, and nvcc. Every step has a share of the budget (under nine minutes together) and
the next one runs whatever became of it; what they printed and how they ended goes to benchmarks/results/gpu-check.json.
Exit status 1 where a step failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
# apexfx prints its tables with tabulate, which a machine without a network may lack: enough of it for the tests.
_TABULATE = '''
def tabulate(rows, headers=(), **options):
    names = list(headers) if not isinstance(headers, str) else []
    return "\\n".join("  ".join(str(cell) for cell in row) for row in [names, *rows])
'''


def steps(device: str) -> list[tuple[str, list[str], float]]:
    """List (name, command, longest share of the budget in seconds)."""
    python = sys.executable
    build = [("build cpu", [python, "csrc/compile_ops.py", "cpu"], 120.0)]
    sanitize = []
    if device == "cuda":
        build.append(("build cuda", [python, "csrc/compile_ops.py", "cuda", "--arch", _architecture()], 240.0))
        build.append(("audit", [python, "csrc/audit.py", "apexfx/_C_cpu.so", "apexfx/_C_cuda.so", "--torch", _torch()], 30.0))
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        for name in ("memcheck", "racecheck"):
            command = [tool, "--tool", name, "--error-exitcode", "9", python, "tests/gpu/sanitize.py", device]
            sanitize.append((name, command, 100.0))
    else:
        sanitize.append(("sanitize script, without the tool", [python, "tests/gpu/sanitize.py", device], 100.0))
    doctor = ("doctor", [python, "-c", "from apexfx import doctor; print(doctor.report())"], 60.0)
    tests = ("tests", [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "tests/gpu"], 180.0)
    measure = ("benchmarks", [python, "benchmarks/ops.py", "--device", device, "--seconds", "60", "--json",
                              str(RESULTS / f"ops-{device}.json")], 150.0)  # fmt: skip
    norms = [python, "benchmarks/ops_norm.py", "--device", device, "--json", str(RESULTS / f"norm-{device}.json")]
    return [*build, doctor, tests, measure, *sanitize, ("norm benchmarks", norms, 90.0)]


def _architecture() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def _torch() -> str:
    return str(Path(importlib.util.find_spec("torch").origin).parent)


def run(name: str, command: list[str], limit_s: float, environment: dict[str, str]) -> dict[str, object]:
    """Run one step; return its record."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=limit_s)  # fmt: skip
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        status, output = "timeout", (expired.stdout or b"").decode(errors="replace")
    except OSError as error:
        status, output = "not started", str(error)
    seconds = round(time.monotonic() - begin, 1)
    print("\n".join(output.splitlines()[-25:]))
    print(f"== {name}: {'ok' if status == 0 else status} after {seconds} s", flush=True)
    return {"step": name, "command": command, "status": status, "seconds": seconds, "output": output[-20_000:]}


def main() -> int:
    """Run every step; write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget-s", type=float, default=530.0)
    arguments = parser.parse_args()
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check needs a CUDA device; `python tests/gpu/check.py --device cpu` runs what can run without one")
        return 1
    RESULTS.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "APEXFX_TEST_DEVICE": arguments.device}
    paths = [str(ROOT)]
    if importlib.util.find_spec("tabulate") is None:
        shim = ROOT / "out/gpu_check"
        shim.mkdir(parents=True, exist_ok=True)
        (shim / "tabulate.py").write_text(_TABULATE)
        paths.append(str(shim))
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    deadline = time.monotonic() + arguments.budget_s
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    record = {"device": name, "torch": torch.__version__, "python": platform.python_version(), "steps": []}
    for step, command, limit_s in steps(arguments.device):
        left = deadline - time.monotonic()
        if left < 5.0:
            record["steps"].append({"step": step, "command": command, "status": "no time left", "seconds": 0.0})
        else:
            record["steps"].append(run(step, command, min(limit_s, left), environment))
        (RESULTS / "gpu-check.json").write_text(json.dumps(record, indent=1))
    failed = [s["step"] for s in record["steps"] if s["status"] != 0]
    ending = f"; failed: {', '.join(failed)}" if failed else ""
    print(f"gpu-check on {name}: {len(record['steps']) - len(failed)} steps ok{ending}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
