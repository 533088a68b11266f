"""`make gpu-check`: build, test, measure and sanitize on a machine with a CUDA device and no network, in nine minutes.

    python3 tests/gpu/check.py [--results DIR] [--only STEP ...] [--skip-build] [--fresh] [--dry-run]

Needs a python3 with torch and pytest, and nvcc. Whatever becomes of a step, the next one runs, but for the first ones: without
every library and every CUDA kernel the rest would say nothing. Whole training steps come next, and have all of the budget in
shares; each leaves what it does not need to those after it, and the tests of kernels run in what is left. What is past its time
is interrupted, so that pytest still prints what failed, and killed five seconds later with all of its children.

Results are JSON files: gpu_check.json says how every step ended, the others grow row by row. They are written into DIR, and
copied every few seconds to out/gpu_check/cuda and, once there is a device, to benchmarks/results. A later call that finds them in
one of the three goes on where this one stopped: a step that ended by itself stays as it is, unless a file that it reads has
changed, another device is there, or `--only` or `--fresh` ask for it; tables get the rows they lack. So on a machine that is
given back, copy DIR to benchmarks/results before the next call, and what is no JSON to out/gpu_check/cuda: a trace, and
inductor_cache.tar.xz, by which that call need not compile again what this one has.

`--dry-run` rehearses without a device: it runs the same commands in a copy of the sources, on the CUDA sources emulated on the
CPU; the benchmarks, on the CPU's own kernels and tiny models. Nothing of it is a measurement, and it copies nothing.

Exit status 1 where a step failed, wrote no row, or did not come to its end; in a dry run, also where one was skipped.
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
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEGIN = time.monotonic()  # torch is imported by the steps alone
ROOT = Path(__file__).resolve().parents[2]
COMMITTED, WORK = ROOT / "benchmarks/results", ROOT / "out/gpu_check"
RECORD, CACHE, TRACE = "gpu_check.json", "inductor_cache.tar.xz", "one_rank_trace.json.gz"
LEAST_S = 5.0  # with less time left no step is started
COPY_S = 3.0  # from one copy of the results to the next
GRACE_S = 5.0  # between an interrupt and the kill, and for the kill itself
RESERVE_S = 200.0  # which a required step leaves to the others
STAND_IN = "no device: the CUDA sources emulated on the CPU and, for the tables, the CPU's own kernels, in their place"
SANITIZER_REFUSALS = ("Device not supported", "Unable to find injection library", "not started")
KERNELS = ("csrc", "apexfx/ops", "apexfx/testing.py", "tests/gpu/conftest.py")
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
        reads: the files and folders that decide what it does, besides its command.
        required: whether nothing runs once it failed; runs in every call.
        writes: the JSON file that it extends row by row.
        model: whose rows of that file are its own; "" where all are.
        refusals: texts with which the machine, not the code, says no.
        folder: where it runs.
    """

    name: str
    command: tuple[str, ...]
    share_s: float
    reads: tuple[str, ...] = ()
    required: bool = False
    writes: str = ""
    model: str = ""
    refusals: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT

    def sources(self) -> str:
        """Return a hash of the command and of everything that it reads."""
        digest = hashlib.sha256(" ".join(Path(argument).name for argument in self.command[1:]).encode())  # wherever results lie
        for name in self.reads:
            path = ROOT / name
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}:
                    digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
        return digest.hexdigest()[:16]


def steps(results: Path, dry: bool = False) -> list[Step]:
    """List the steps in order of worth; the shares add up to the budget."""
    device, emulated = ("cpu", WORK / "dry_run/sources") if dry else ("cuda", ROOT)
    few = ("--every", "12") if dry else ()
    package = ("csrc", "apexfx", "benchmarks/harness.py", "benchmarks/kept_rows.py", "benchmarks/device_trace.py")

    def script(path: str, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, path, *arguments)

    def table(name: str, share_s: float, path: str, file: str, *arguments: str, reads: tuple[str, ...]) -> Step:
        command = script(f"benchmarks/{path}.py", "--device", device, *arguments, "--json", str(results / file))
        return Step(name, command, share_s, ("benchmarks/harness.py", f"benchmarks/{path}.py", *reads), writes=file)

    def whole(model: str, share_s: float) -> Step:
        tiny = ("--tiny", "--inner", "inductor" if model == "resnet50" else "eager") if dry else ()  # one of them by Inductor
        file = f"whole_steps_{device}.json"
        command = script("benchmarks/whole_steps.py", model, "--device", device, *tiny, "--json", str(results / file))
        return Step(model, command, share_s, (*package, "benchmarks/whole_steps.py"), writes=file, model=model,
                    environment={"TORCH_LOGS": "perf_hints"})  # which say why something is not recorded in a CUDA graph

    def tests(name: str, path: str, *reads: str) -> Step:
        options = ("-q", "-p", "no:cacheprovider", "--tb=short", "-rfs", "--maxfail=10", "-o", "faulthandler_timeout=30", *few)
        command = (sys.executable, "-m", "pytest", *options, f"tests/gpu/test_{path}.py")
        return Step(name, command, 0.0, (*KERNELS, f"tests/gpu/test_{path}.py", *reads), folder=emulated)

    libraries, torch = ("apexfx/_C_cpu.so", "apexfx/_C_cuda.so"), Path(importlib.util.find_spec("torch").origin).parent
    build = script("csrc/compile_ops.py", "all", "--arch", "native")
    rows: tuple[str, ...] = ("--seconds", "50")
    models: tuple[str, ...] = ("--rounds", "10", "--repeats", "5", "--models", "resnet50", "bert")
    one_rank: tuple[str, ...] = ("--trace", str(results / TRACE))
    if dry:
        libraries = libraries[:1]
        build = script("tests/cuda_emulation/emulate.py", "build", *libraries)
        rows = ("--seconds", "5", "--only", "ops_norm rms_norm float32 512")
        models = ("--rounds", "2", "--repeats", "1", "--models", "mlp")
        one_rank = (*one_rank, "--inner", "eager")
    return [
        Step("build", build, 60.0, ("csrc", "apexfx/ops"), required=True, folder=emulated),
        Step("load", script("tests/gpu/loaded.py", device), 20.0, required=True, folder=emulated),
        whole("gpt2", 150.0),
        whole("resnet50", 140.0),
        whole("bert", 90.0),
        table("one rank", 45.0, "one_rank", f"one_rank_{device}.json", *one_rank, reads=package),
        Step("amp host time", script("benchmarks/amp.py", "--device", device, *models, "--profile",
                                     str(results / f"amp_profile_{device}.json")), 25.0, (*package, "benchmarks/amp.py"),
             writes=f"amp_profile_{device}.json"),
        Step("audit", script("csrc/audit.py", *libraries, "--torch", str(torch)), 0.0, KERNELS, folder=emulated),
        tests("list ops", "list_ops", "tests/ops"),
        tests("norms", "norm_kernels"),
        tests("batch norms", "batch_norm_kernels", "tests/ops"),
        tests("optimizers", "optimizer_classes", "apexfx/optimizers", "tests/optimizers"),
        table("op table", 0.0, "ops", f"ops_{device}.json", "--missing", *rows,
              reads=(*KERNELS, "apexfx/optimizers", *(f"benchmarks/op{name}.py" for name in
                                                      ("_row", "s_norm", "s_batch_norm", "s_optimizers")))),
        table("composites", 0.0, "composites", f"composites_{device}.json", reads=package),
        tests("compiled steps", "compiled_steps", "apexfx"),
        table("end to end", 0.0, "amp", f"amp_{device}.json", "--optimizers", "fused", *models, reads=("csrc", "apexfx")),
        *sanitizers(device, emulated),
    ]  # fmt: skip


def sanitizers(device: str, folder: Path) -> Iterator[Step]:
    """Yield the steps that look for wrong accesses: compute-sanitizer, on the CPU its script alone."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for name, families in (("memcheck", ()), ("racecheck", ("norms", "batch_norms", "reductions"))):
        options = ("--tool", name, "--error-exitcode", "9", "--kernel-regex", "kns=apexfx", "--report-api-errors", "no")
        program = (sys.executable, "tests/gpu/sanitize.py", device, *families)
        yield Step(name, program if device == "cpu" else (tool, *options, *program), 0.0,
                   (*KERNELS, "tests/gpu", "tests/ops"), refusals=SANITIZER_REFUSALS,
                   environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, folder=folder)  # fmt: skip


def run(step: Step, limit_s: float, environment: dict[str, str], log: Path,
        meanwhile: Callable[[], None] = lambda: None) -> Record:
    """Run one step, with nothing of it left behind, and `meanwhile` every few seconds; return how it ended."""
    record: Record = {"step": step.name, "status": "running", "says": "", "seconds": 0.0, "command": list(step.command)}
    begin, late, code = time.monotonic(), False, 127
    path = os.pathsep.join(filter(None, [str(step.folder), environment.get("PYTHONPATH")]))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(step.command, cwd=step.folder, env=environment | step.environment | {"PYTHONPATH": path},
                                       stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                       start_new_session=True,
                                       preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # nohup ignores it
        except OSError as error:
            output.write(f"not started: {error}\n".encode())
        else:
            try:
                while not late and not ended_within(process, min(COPY_S, max(begin + limit_s - time.monotonic(), 0.0))):
                    late = time.monotonic() >= begin + limit_s
                    meanwhile()
                if late:
                    signal_group(process, signal.SIGINT)
            finally:
                signal_group(process, signal.SIGKILL)
            code = process.returncode
    text = log.read_text(errors="replace")
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing was printed")
    if late:
        end = "it could not be killed" if code is None else f"stopped after {limit_s:.0f} s"
        record |= {"status": "timeout", "says": f"{end}; the last line was: {last}"}
    elif code == 0:
        record |= {"status": "ok", "says": last}
    elif refusal := next((refusal for refusal in step.refusals if refusal in text), ""):
        record |= {"status": "skipped", "says": f"this machine refuses it: {refusal}"}
    else:
        record |= {"status": "failed", "says": f"{signal.Signals(-code).name}; the last line was: {last}" if code < 0 else last}
    return record | {"seconds": round(time.monotonic() - begin, 1), "output": text[-20_000:]}


def ended_within(process: subprocess.Popen, seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def signal_group(process: subprocess.Popen, number: signal.Signals) -> None:
    """Send a signal to a step and its children, and wait for the step, not for ever: a hung driver keeps even what is killed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    ended_within(process, GRACE_S)


def num_rows(table: Path, model: str = "") -> int:
    """Return how many rows a table has, or a model in it; 0 where it cannot be read."""
    try:
        content = json.loads(table.read_text())
        rows = content["rows"] if isinstance(content, dict) else content
        return sum(row["model"] == model for row in rows) if model else len(rows)
    except (OSError, ValueError, KeyError):
        return 0


class Results:
    """The record of a check and the tables beside it: in a folder, and copied to others."""

    def __init__(self, planned: list[Step], folder: Path, copies: list[Path], stands_in: str, fresh: bool):
        self.folder, self.copies = folder, [copy for copy in copies if copy != folder]
        self.tables = {step.writes for step in planned} - {""}
        self.files = {RECORD, TRACE, CACHE, *self.tables}
        self.sources = {step.name: step.sources() for step in planned}
        for path in (folder, *self.copies):
            path.mkdir(parents=True, exist_ok=True)
        self.record: Record = {"stands_in": stands_in, "machine": {}, "steps": []}
        for place in () if fresh else (folder, *self.copies):
            earlier = read_record(place / RECORD)
            if earlier.get("stands_in") == stands_in:
                self.record |= {"machine": earlier["machine"], "steps": earlier["steps"]}
                for name in self.files - {RECORD}:
                    if place != folder and (place / name).exists():
                        shutil.copy(place / name, folder / name)
                break
        by_name = {record["step"]: record for record in self.record["steps"]}
        for step in planned:
            if by_name.get(step.name, {}).get("sources") != self.sources[step.name]:
                self.forget(step)

    def ended(self, step: Step) -> bool:
        """Tell whether the step, as it is now, came to its end in this or an earlier call."""
        return any(record["step"] == step.name and record["status"] in ("ok", "failed", "skipped")
                   and record.get("sources") == self.sources[step.name] for record in self.record["steps"])  # fmt: skip

    def add(self, record: Record) -> None:
        """Put the record of a step in place of an earlier one, and write everything."""
        record |= {"sources": self.sources[record["step"]], "commit": commit()}
        others = [earlier for earlier in self.record["steps"] if earlier["step"] != record["step"]]
        self.record["steps"] = [*others, record]
        self.write()

    def write(self) -> None:
        write_whole(self.folder / RECORD, json.dumps(self.record, indent=1).encode())
        self.copy()

    def copy(self) -> None:
        """Copy what is there; what is no JSON is not committed."""
        for copy in self.copies:
            if copy != COMMITTED or self.record["machine"]:
                for name in self.files:
                    if (self.folder / name).exists() and (copy != COMMITTED or name.endswith(".json")):
                        write_whole(copy / name, (self.folder / name).read_bytes())

    def forget(self, step: Step) -> None:
        """Drop the rows of a step."""
        path = self.folder / step.writes
        if step.model and num_rows(path):
            content = json.loads(path.read_text())
            content["rows"] = [row for row in content["rows"] if row["model"] != step.model]
            write_whole(path, json.dumps(content, indent=1).encode())
        elif step.writes:
            path.unlink(missing_ok=True)

    def on(self, machine: Record) -> None:
        """Say which machine this is; what another one measured is left out from now on."""
        if self.record["machine"] not in ({}, machine):
            self.record["steps"] = [step for step in self.record["steps"] if step["step"] == "build"]
            for name in self.tables:
                (self.folder / name).unlink(missing_ok=True)
        self.record["machine"] = machine


def read_record(path: Path) -> Record:
    """Return an earlier record, empty where there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that whoever reads it, or kills this process, finds the old content or the new one."""
    fresh = path.with_name(f".{path.name}")
    fresh.write_bytes(content)
    fresh.replace(path)


def commit() -> str | None:
    """Return the commit that is checked out, None without git."""
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip() or None
    return None


def environment_of(device: str, cache: Path) -> dict[str, str]:
    """Return the variables of every step."""
    environment = {**os.environ, "APEXFX_TEST_DEVICE": device, "PYTHONUNBUFFERED": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    if importlib.util.find_spec("tabulate") is None:
        (WORK / "tabulate").mkdir(parents=True, exist_ok=True)
        (WORK / "tabulate/tabulate.py").write_text(_TABULATE)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WORK / "tabulate"), os.environ.get("PYTHONPATH")]))
    return environment


def unpack_cache(results: Results, cache: Path) -> None:
    """Have Inductor find what an earlier call has compiled, where its folder is gone."""
    if not cache.exists() and (results.folder / CACHE).exists():
        with tarfile.open(results.folder / CACHE) as archive:
            archive.extractall(cache, filter="data")


def pack_cache(results: Results, cache: Path) -> None:
    """Keep Inductor's cache as one file; each of its graphs has its Triton kernels beside those in a folder of their own."""
    if cache.exists():
        fresh = results.folder / f".{CACHE}"
        with tarfile.open(fresh, "w:xz", preset=3) as archive:
            for path in sorted(cache.iterdir()):
                if path.name != "triton":
                    archive.add(path, path.name)
        fresh.replace(results.folder / CACHE)
        results.copy()


def copy_sources(target: Path) -> None:
    """Copy what a build and the tests need, without libraries: a dry run builds its own there."""
    shutil.rmtree(target, ignore_errors=True)
    for name in ("apexfx", "csrc", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(ROOT / "pyproject.toml", target)


def check(planned: list[Step], again: bool, results: Results, budget_s: float, environment: dict[str, str]) -> None:
    """Run the steps that have not ended (with `again` all of them) within the budget."""

    def due(step: Step) -> bool:
        return again or step.required or not results.ended(step)

    stopped_by = ""
    for i, step in enumerate(planned):
        ended = results.ended(step)
        if not due(step):
            print(f"== {step.name}: ended in an earlier call", flush=True)
            continue
        left_s, later_s = BEGIN + budget_s - time.monotonic(), sum(other.share_s for other in planned[i + 1:] if due(other))
        limit_s = max(left_s - later_s, left_s * step.share_s / (step.share_s + later_s or 1.0))
        if step.required:
            limit_s = max(limit_s, left_s - RESERVE_S)
        if step.share_s:  # a small share of too little time is rather the least than none
            limit_s = max(limit_s, min(LEAST_S, left_s))
        why = f"{stopped_by} failed" if stopped_by else "no time left" if limit_s < LEAST_S else ""
        if why:
            if not ended:
                results.add({"step": step.name, "status": "not run", "says": f"not run: {why}", "seconds": 0.0})
                print(f"== {step.name}: not run: {why}", flush=True)
            continue
        if ended:
            results.forget(step)
        print(f"== {step.name}, at most {limit_s:.0f} s: {' '.join(step.command)}", flush=True)
        results.add({"step": step.name, "status": "running", "says": "cut short with the whole check", "seconds": 0.0})
        record = run(step, limit_s, environment, WORK / "running.log", results.copy)
        if step.writes and record["status"] == "ok" and not num_rows(results.folder / step.writes, step.model):
            record |= {"status": "failed", "says": f"it wrote no row into {step.writes}"}
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
    parser.add_argument("--dry-run", action="store_true", help="rehearse every step without a device")
    parser.add_argument("--budget-s", type=float, help="530; of a dry run 1200, for a machine that others use")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step at work is killed too
    dry = arguments.dry_run
    folder = (arguments.results or WORK / ("dry_run/results" if dry else "cuda")).resolve()
    every = planned = steps(folder, dry)
    names = [step.name for step in planned]
    if unknown := set(arguments.only or ()) - set(names):
        parser.error(f"--only {', '.join(sorted(unknown))}: the steps are {', '.join(names)}")
    if arguments.only:
        planned = [step for step in planned if step.name == "load" or step.name in arguments.only]
    elif arguments.skip_build:
        planned = [step for step in planned if step.name != "build"]
    if dry and planned[0].name == "build":
        copy_sources(planned[0].folder)
    results = Results(every, folder, [] if dry else [WORK / "cuda", COMMITTED], STAND_IN if dry else "", arguments.fresh)
    budget_s = arguments.budget_s or (1200.0 if dry else 530.0)
    cache = WORK / ("dry_run/inductor" if dry else "inductor")
    unpack_cache(results, cache)
    try:
        check(planned, bool(arguments.only), results, budget_s, environment_of("cpu" if dry else "cuda", cache))
    finally:
        pack_cache(results, cache)
    by_name = {record["step"]: record for record in read_record(folder / RECORD)["steps"]}
    ended = [by_name[step.name] for step in planned]
    machine = results.record["machine"].get("device", "an unknown machine")
    print(f"\ngpu-check on {machine}; {results.record['stands_in'] or 'nothing stands in for the device'}")
    for record in ended:
        print(f"{record['step']:20} {record['status']:8} {record['seconds']:6.1f} s  {record['says'][:150]}")
    print(f"{time.monotonic() - BEGIN:.0f} s")
    return 1 if any(record["status"] not in (("ok",) if dry else ("ok", "skipped")) for record in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
