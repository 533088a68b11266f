"""`make gpu-check`: build, test, measure and sanitize on a machine with a CUDA device and no network, in nine minutes.

    python3 tests/gpu/check.py [--results DIR] [--only STEP ...] [--skip-build] [--fresh] [--device cuda|cpu]

Needs a python3 with torch and pytest, and nvcc. Whatever becomes of a step, the next one runs, but for the first ones: without
every library and every CUDA kernel the rest would say nothing. Each has a share of the budget, and leaves what it does not need
to those after it; what is past its time is killed with all of its children.

Results are JSON files: gpu_check.json says how every step ended, the others grow row by row. They are written into DIR (default:
out/gpu_check/cuda), and copied to benchmarks/results behind every step on a device. A later call, of the same sources on the
same device, goes on where this one stopped: steps that ended by themselves stay as they are (`--only` repeats one, `--fresh`
all), and tables get the rows they lack.

`--device cpu` rehearses: the CPU kernels, and the CUDA sources emulated on the CPU, stand in, and the JSON says so; nothing is
copied. Exit status 1 where a step failed or did not come to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGIN = time.monotonic()  # torch is imported by the steps alone
ROOT = Path(__file__).resolve().parents[2]
COMMITTED, WORK = ROOT / "benchmarks/results", ROOT / "out/gpu_check"
RECORD = "gpu_check.json"
LEAST_S = 5.0  # with less time left no step is started
STAND_IN = "no device: the CPU kernels, and the CUDA sources emulated on the CPU, in place of the CUDA kernels"
SANITIZER_REFUSALS = ("Device not supported", "Unable to find injection library", "not started")
# apexfx prints its tables with tabulate, which a machine without a network may lack: enough of it for the tests.
_TABULATE = '''
def tabulate(rows, headers=(), **options):
    names = list(headers) if not isinstance(headers, str) else []
    return "\\n".join("  ".join(str(cell) for cell in row) for row in [names, *rows])
'''

Record = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        share_s: its share of the budget; 0 for what runs in the time that others leave.
        required: whether nothing runs once it failed; runs in every call.
        writes: the JSON file that it extends row by row.
        refusals: texts with which the machine, not the code, says no.
    """

    name: str
    command: tuple[str, ...]
    share_s: float
    required: bool = False
    writes: str = ""
    refusals: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def steps(device: str, folder: Path) -> list[Step]:
    """List the steps in order of worth; the shares add up to the budget."""

    def script(path: str, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, path, *arguments)

    def table(name: str, share_s: float, path: str, file: str, *arguments: str) -> Step:
        command = script(f"benchmarks/{path}.py", "--device", device, *arguments, "--json", str(folder / file))
        return Step(name, command, share_s, writes=file)

    def tests(name: str, share_s: float, path: str) -> Step:
        options = ("-q", "-p", "no:cacheprovider", "--tb=short", "-rfs", "--maxfail=10", "-o", "faulthandler_timeout=30")
        return Step(name, (sys.executable, "-m", "pytest", *options, f"tests/gpu/test_{path}.py"), share_s)

    build, audit = [Step("build cpu", script("csrc/compile_ops.py", "cpu"), 40.0, required=True)], []
    if device == "cuda":
        build.insert(0, Step("build cuda", script("csrc/compile_ops.py", "cuda", "--arch", "native"), 80.0, required=True))
        libraries, torch = ("apexfx/_C_cpu.so", "apexfx/_C_cuda.so"), Path(importlib.util.find_spec("torch").origin).parent
        audit.append(Step("audit", script("csrc/audit.py", *libraries, "--torch", str(torch)), 10.0))
    rows: tuple[str, ...] = ("--seconds", "50")
    models: tuple[str, ...] = ("resnet50", "bert")
    if device == "cpu":
        rows, models = ("--seconds", "5", "--only", "resnet50", "rms_norm"), ("mlp",)
    return [
        *build,
        Step("load", script("tests/gpu/loaded.py", device), 20.0, required=True),
        *audit,
        tests("list ops", 40.0, "list_ops"),
        tests("norms", 30.0, "norm_kernels"),
        tests("batch norms", 45.0, "batch_norm_kernels"),
        tests("optimizers", 25.0, "optimizer_classes"),
        table("op table", 100.0, "ops", f"ops_{device}.json", "--missing", *rows),
        tests("compiled steps", 50.0, "compiled_steps"),
        table("end to end", 40.0, "amp", f"amp_{device}.json", "--rounds", "10", "--repeats", "5", "--optimizers", "fused",
              "--models", *models),
        *sanitizers(device),
        *(table(f"{inner} norm table", 0.0, "ops_norm", f"norms_{inner}_{device}.json", "--missing", "--inner", inner,
                "--seconds", "0.2") for inner in ("eager", "inductor")),
    ]  # fmt: skip


def sanitizers(device: str) -> Iterator[Step]:
    """Yield the steps that look for wrong accesses: compute-sanitizer, or its script and the emulation on the CPU."""
    program = (sys.executable, "tests/gpu/sanitize.py", device)
    if device == "cpu":
        yield Step("sanitized script, without the tool", program, 25.0)
        emulation = ("tests/cuda_emulation/emulate.py", str(WORK / "emulation"), "--every", "40")
        yield Step("emulation", (sys.executable, *emulation), 115.0)
        return
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for name in ("memcheck", "racecheck"):
        options = ("--tool", name, "--error-exitcode", "9", "--kernel-regex", "kns=apexfx", "--report-api-errors", "no")
        yield Step(name, (tool, *options, *program), 25.0, refusals=SANITIZER_REFUSALS,
                   environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})  # fmt: skip


def run(step: Step, limit_s: float, environment: dict[str, str], log: Path) -> Record:
    """Run one step, with nothing of it left behind; return how it ended."""
    record: Record = {"step": step.name, "status": "running", "says": "", "seconds": 0.0, "command": list(step.command)}
    begin = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(step.command, cwd=ROOT, env=environment | step.environment, stdin=subprocess.DEVNULL,
                                       stdout=output, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        except OSError as error:
            output.write(f"not started: {error}\n".encode())
            code = 127
        else:
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = log.read_text(errors="replace")
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing was printed")
    if code is None:
        record |= {"status": "timeout", "says": f"killed after {limit_s:.0f} s; the last line was: {last}"}
    elif code == 0:
        record |= {"status": "ok", "says": last}
    elif refusal := next((refusal for refusal in step.refusals if refusal in text), ""):
        record |= {"status": "skipped", "says": f"this machine refuses it: {refusal}"}
    else:
        record |= {"status": "failed", "says": last}
    return record | {"seconds": round(time.monotonic() - begin, 1), "output": text[-20_000:]}


class Results:
    """The record of a check and the tables beside it, in a folder and, once a step found out the machine, its copy."""

    def __init__(self, device: str, folder: Path, copy: Path, fresh: bool):
        self.folder, self.copy = folder, copy
        self.tables = {step.writes for step in steps(device, folder)} - {""}
        folder.mkdir(parents=True, exist_ok=True)
        copy.mkdir(parents=True, exist_ok=True)
        self.record: Record = {"stands_in": STAND_IN if device == "cpu" else "", "sources": sources(), "commit": commit(),
                               "machine": {}, "steps": []}  # fmt: skip
        for earlier in (folder / RECORD, copy / RECORD):
            found = json.loads(earlier.read_text()) if earlier.exists() and not fresh else {}
            if all(found.get(key) == self.record[key] for key in ("stands_in", "sources")):
                self.record |= {"machine": found["machine"], "steps": found["steps"]}
                for table in self.tables:
                    if (copy / table).exists() and not (folder / table).exists():
                        shutil.copy(copy / table, folder / table)
                return
        self.forget_tables()

    def ended(self, step: Step) -> bool:
        """Tell whether the step came to its end in this or an earlier call."""
        return any(r["step"] == step.name and r["status"] in ("ok", "failed", "skipped") for r in self.record["steps"])

    def add(self, record: Record) -> None:
        """Put the record of a step in place of an earlier one, and write everything."""
        others = [earlier for earlier in self.record["steps"] if earlier["step"] != record["step"]]
        self.record["steps"] = [*others, record]
        self.write()

    def write(self) -> None:
        write_whole(self.folder / RECORD, json.dumps(self.record, indent=1).encode())
        if self.copy != self.folder and self.record["machine"]:
            for name in (RECORD, *self.tables):
                if (self.folder / name).exists():
                    write_whole(self.copy / name, (self.folder / name).read_bytes())

    def forget_tables(self) -> None:
        for table in self.tables:
            (self.folder / table).unlink(missing_ok=True)

    def on(self, machine: Record) -> None:
        """Say which machine this is; what another one measured is left out from now on."""
        if self.record["machine"] not in ({}, machine):
            self.record["steps"] = [step for step in self.record["steps"] if step["step"].startswith("build")]
            self.forget_tables()
        self.record["machine"] = machine


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that whoever reads it, or kills this process, finds the old content or the new one."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(content)
    fresh.replace(path)


def sources() -> str:
    """Return a hash of everything that is built, tested or measured."""
    digest = hashlib.sha256()
    for folder in ("apexfx", "benchmarks", "csrc", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}:
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str | None:
    """Return the commit that is checked out, None without git."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() or None
    return None


def environment_of(device: str) -> dict[str, str]:
    """Return the variables of every step."""
    paths = [str(ROOT)]
    if importlib.util.find_spec("tabulate") is None:
        WORK.mkdir(parents=True, exist_ok=True)
        (WORK / "tabulate.py").write_text(_TABULATE)
        paths.append(str(WORK))
    path = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "APEXFX_TEST_DEVICE": device, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}


def check(planned: list[Step], again: bool, results: Results, budget_s: float, environment: dict[str, str]) -> None:
    """Run the steps that have not ended (with `again` all of them) within the budget."""
    total_s = sum(step.share_s for step in planned if again or step.required or not results.ended(step))
    scale = min(1.0, budget_s / total_s) if total_s else 1.0
    spare_s, stopped_by = max(0.0, budget_s - total_s), ""
    for step in planned:
        ended = results.ended(step)
        if ended and not again and not step.required:
            print(f"== {step.name}: ended in an earlier call", flush=True)
            continue
        limit_s = min(scale * step.share_s + spare_s, BEGIN + budget_s - time.monotonic())
        why = f"{stopped_by} failed" if stopped_by else "no time left" if limit_s < LEAST_S else ""
        if why:
            if not ended:
                results.add({"step": step.name, "status": "not run", "says": f"not run: {why}", "seconds": 0.0})
                print(f"== {step.name}: not run: {why}", flush=True)
            continue
        if ended and step.writes:
            (results.folder / step.writes).unlink(missing_ok=True)
        print(f"== {step.name}, at most {limit_s:.0f} s: {' '.join(step.command)}", flush=True)
        results.add({"step": step.name, "status": "running", "says": "cut short with the whole check", "seconds": 0.0})
        record = run(step, limit_s, environment, results.folder / "running.log")
        spare_s = max(0.0, limit_s - record["seconds"])
        if step.name == "load" and record["status"] == "ok":
            lines = record["output"].splitlines()
            results.on(json.loads(next(line for line in reversed(lines) if line.startswith('{"device"'))))
        results.add(record)
        print("\n".join(record["output"].splitlines()[-25:]))
        print(f"== {step.name}: {record['status']} after {record['seconds']} s", flush=True)
        if step.required and record["status"] != "ok":
            stopped_by = step.name


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="the folder of the JSON files")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="load, and these steps, whether they ended or not")
    parser.add_argument("--skip-build", action="store_true", help="take the libraries that are there")
    parser.add_argument("--fresh", action="store_true", help="forget earlier calls")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--budget-s", type=float, default=530.0)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step at work is killed too
    folder = (given.results or WORK / given.device).resolve()
    copy = COMMITTED if given.device == "cuda" else folder
    planned = steps(given.device, folder)
    names = [step.name for step in planned]
    if unknown := set(given.only or ()) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}: the steps are {', '.join(names)}")
    if given.only:
        planned = [step for step in planned if step.name == "load" or step.name in given.only]
    elif given.skip_build:
        planned = [step for step in planned if not step.name.startswith("build")]
    results = Results(given.device, folder, copy, given.fresh)
    check(planned, bool(given.only), results, given.budget_s, environment_of(given.device))
    by_name = {record["step"]: record for record in results.record["steps"]}
    ended = [by_name[step.name] for step in planned if step.name in by_name]
    machine = results.record["machine"].get("device", "an unknown machine")
    print(f"\ngpu-check on {machine}; {results.record['stands_in'] or 'nothing stands in for the device'}")
    for record in ended:
        print(f"{record['step']:36} {record['status']:8} {record['seconds']:6.1f} s  {record['says'][:150]}")
    print(f"{time.monotonic() - BEGIN:.0f} s")
    return 1 if any(record["status"] not in ("ok", "skipped") for record in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
