"""Compile the ops: csrc/cpu/*.cpp into `_C_cpu.so`, csrc/cuda/*.cu into `_C_cuda.so`.

Only the LibTorch stable ABI (target 2.11) is used, so one library serves every torch from 2.11 to 2.15 and every
Python. `setup.py` calls this file; it can be run by itself too:

    python csrc/compile_ops.py                                            every .cpp, into apexfx/_C_cpu.so
    python csrc/compile_ops.py --only csrc/cpu/checksum.cpp --out out/a.so  one file, into a library of your own
    python csrc/compile_ops.py --headers torch-2.11 --out out/a.so        with the headers of another torch package
    python csrc/compile_ops.py all --arch native                          both libraries, the CUDA one for this device
    python csrc/compile_ops.py check-cuda                                 every .cu with nvcc, no device needed; --write: also
                                                                          csrc/cuda/kernels.json, with which it is compared
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET_VERSION = "0x020b000000000000ULL"  # torch 2.11: the oldest release a library built here must load into
ARCHITECTURES = ("80", "90", "100")  # A100, H100/H200, B200, where nvcc knows them; the newest also as PTX for what comes after

# Value-preserving: no errno, no traps, and no contraction, so that every x86-64 machine computes the same bits.
_CXX_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas",
              "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")  # fmt: skip
_NVCC_FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "--extended-lambda", "-DUSE_CUDA", "-DAPEXFX_CUDA",
               "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "-Xcudafe", "--display_error_number",
               "-diag-suppress", "20012", "-Xptxas", "-v,-warn-spills", "-lineinfo")  # fmt: skip


class BuildError(RuntimeError):
    """A compiler or linker failed; the message is one sentence, the tool's output goes before it."""


@dataclass(frozen=True)
class Unit:
    """One source file, its object, the command that makes it, and what the tool printed."""

    source: Path
    object: Path
    command: tuple[str, ...]
    log: list[str] = field(default_factory=list, compare=False)


def torch_root() -> Path:
    """Return the folder of the torch package that is importable now."""
    import torch

    return Path(torch.__file__).resolve().parent


def find_cxx() -> str | None:
    """Return the C++ compiler: `CXX` where that is set, else g++ or c++; None when there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    return shutil.which(named[0]) if named else shutil.which("g++") or shutil.which("c++")


def find_nvcc() -> str | None:
    """Return nvcc from `CUDA_HOME`, the path, or /usr/local/cuda; None when there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [f"{home}/bin/nvcc"] if home else []
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((c for c in candidates if c and os.access(c, os.X_OK)), None)


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """Return nvcc's (major, minor)."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"{nvcc} --version does not name a release")
    return int(match[1]), int(match[2])


def architectures(nvcc: str, choice: str | None = None) -> tuple[str, ...]:
    """Return what to compile for, as 90 (machine code) or 90+PTX (intermediate code too).

    Args:
        choice: "native", or a list (8.0;9.0a 10.0+PTX, or without the dots); None: that of TORCH_CUDA_ARCH_LIST.
    Raises:
        BuildError: where this nvcc cannot compile for one of the list, or for none of ARCHITECTURES.
    """
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = set(re.findall(r"compute_(\d+)", listed))
    choice = choice or os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not choice:
        usual = [a for a in ARCHITECTURES if a in known]
        if left_out := [a for a in ARCHITECTURES if a not in known]:
            print(f"apexfx: this nvcc knows no sm_{', sm_'.join(left_out)}, so those are left out", file=sys.stderr)
        if not usual:
            raise BuildError(f"{nvcc} knows none of sm_{', sm_'.join(ARCHITECTURES)}: name others in TORCH_CUDA_ARCH_LIST")
        return *usual[:-1], f"{usual[-1]}+PTX"
    if choice == "native":
        return (native_architecture(),)
    names = tuple(name.replace(".", "") for name in re.split(r"[;,\s]+", choice))
    for name in names:
        number = re.fullmatch(r"(\d{2,3})[af]?(\+PTX)?", name)
        if number is None:
            raise BuildError(f"the architectures are {choice!r}; expected numbers such as 8.0;9.0+PTX")
        if number[1] not in known:
            raise BuildError(f"{nvcc} cannot compile for sm_{number[1]}; it knows {', '.join(sorted(known, key=int))}")
    return names


def native_architecture() -> str:
    """Return the architecture of this machine's device."""
    import torch

    if not torch.cuda.is_available():
        raise BuildError(f"--arch native needs a CUDA device, and torch {torch.__version__} sees none")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def cuda_library_folders(nvcc: str) -> list[Path]:
    """Return the toolkit's library folders, whatever the packaging calls them."""
    home = Path(nvcc).resolve().parent.parent
    folders = [home / "lib64", home / "lib", home / "targets/x86_64-linux/lib"]
    folders.append(Path("/usr/local/cuda/lib64"))
    return [f for f in folders if f.is_dir()]


def plan(environment: dict[str, str]) -> tuple[list[str], list[str]]:
    """Decide what an install builds: (library names, one sentence for everything left out). Never raises ImportError."""
    if environment.get("APEXFX_EXT", "1") == "0":
        return [], ["APEXFX_EXT=0, so no op is compiled"]
    if sys.platform != "linux":
        return [], [f"the ops are compiled on Linux alone, so on {sys.platform} none is (pure-torch references are used)"]
    try:
        import torch
    except ImportError:
        return [], ["torch is not importable in the build environment, so no op is compiled (pure-torch references are used)"]
    choice = environment.get("APEXFX_CUDA", "auto")
    if choice not in {"auto", "0", "1"}:
        raise BuildError(f"APEXFX_CUDA is {choice!r}; expected auto, 0 or 1")
    if find_cxx() is None:
        return [], ["no C++ compiler was found, so no op is compiled (pure-torch references are used)"]
    reason = _why_no_cuda(choice, torch.version.cuda)
    if reason is None:
        return ["_C_cpu", "_C_cuda"], []
    return ["_C_cpu"], [reason] if reason else []


def _why_no_cuda(choice: str, torch_cuda: str | None) -> str | None:
    """Return None to build the CUDA library, else the sentence that says why not ("" where nobody asked for it)."""
    if choice == "0" or (choice == "auto" and torch_cuda is None):
        return ""
    nvcc = find_nvcc()
    if nvcc is None:
        return "nvcc was not found, so the CUDA ops are left out and CUDA tensors use the pure-torch references"
    major = nvcc_version(nvcc)[0]
    if choice == "auto" and major != int(str(torch_cuda).split(".")[0]):
        return f"nvcc is CUDA {major} but torch is CUDA {torch_cuda}, so the CUDA ops are left out"
    return None


def _includes(package: Path | None = None) -> list[str]:
    return [f"-I{ROOT / 'csrc'}", "-isystem", str((package or torch_root()) / "include")]


def cpu_units(build: Path, only: list[Path] | None = None, headers: Path | None = None) -> list[Unit]:
    """Return one unit for every csrc/cpu/*.cpp (or for `only`), with the headers of the importable torch or another."""
    cxx = find_cxx()
    if cxx is None:
        raise BuildError("no C++ compiler was found (install g++, or set CXX)")
    flags = [*_CXX_FLAGS, f"-DTORCH_TARGET_VERSION={TARGET_VERSION}", *shlex.split(os.environ.get("CXXFLAGS", ""))]
    sources = only or sorted((ROOT / "csrc/cpu").glob("*.cpp"))
    command = (cxx, *flags, *_includes(headers))
    return [_unit(build, source, command) for source in [*sources, write_built_for(build)]]


def cuda_units(build: Path, choice: str | None = None, only: list[Path] | None = None) -> list[Unit]:
    """Return one unit for every csrc/cuda/*.cu (or for `only`), with code for every one of `architectures`."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc was not found (put it on the path, or set CUDA_HOME)")
    images = [f"{kind}_{name.removesuffix('+PTX')}" for name in architectures(nvcc, choice)
              for kind in (("sm", "compute") if name.endswith("+PTX") else ("sm",))]  # fmt: skip
    codes = [f"-gencode=arch=compute_{image.split('_')[1]},code={image}" for image in images]
    flags = [*_NVCC_FLAGS, f"-DTORCH_TARGET_VERSION={TARGET_VERSION}", *codes]
    host = find_cxx()
    if host is not None:
        flags += ["-ccbin", host]
    sources = only or sorted((ROOT / "csrc/cuda").glob("*.cu"))
    command = (nvcc, *flags, *_includes())
    built_for = write_built_for(build, f"apexfx CUDA {'.'.join(map(str, nvcc_version(nvcc)))}: {' '.join(images)}")
    return [_unit(build, source, command) for source in [*sources, built_for]]


def signatures() -> list[str]:
    """Return name(types) -> types of every op with a kernel, read from the schemas in apexfx/ops/*.py without importing them."""
    import torch

    kernels = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp", ".cu"})
    lines = []
    for path in sorted((ROOT / "apexfx/ops").glob("*.py")):
        strings: dict[str, str] = {}
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
                strings[node.targets[0].id] = _text(node.value, strings)
        for call in (call for statement in tree.body for call in _defining_calls(statement)):
            schema = torch._C.parse_schema(_text(call.args[0], strings))
            name = f"{schema.name}.{schema.overload_name}".removesuffix(".")
            if f'impl("{name}"' not in kernels:
                continue
            sides = (", ".join(str(v.type) for v in values) for values in (schema.arguments, schema.returns))
            lines.append(f"{name}({') -> ('.join(sides)})")
    return sorted(lines)


def _defining_calls(statement: ast.stmt) -> list[ast.Call]:
    """Return the calls in a statement of a module that define an op: `LIBRARY.define(...)`, or a decorator `@define(...)`."""
    called = [*getattr(statement, "decorator_list", ()), getattr(statement, "value", None)]
    return [c for c in called if isinstance(c, ast.Call) and ast.unparse(c.func) in ("LIBRARY.define", "define")]


def _text(node: ast.expr, strings: dict[str, str]) -> str:
    """Return the value of a string, with the names of earlier ones in its braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, strings) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return strings[ast.unparse(node.value)]
    return str(ast.literal_eval(node))


def write_built_for(build: Path, *lines: str) -> Path:
    """Write the source of what apexfx/ops/_built_for.py looks for in a library: the ops' signatures, and `lines`."""
    texts = ["".join(f"{line}\n" for line in ["apexfx signatures:", *signatures()]), *(f"{line}\n" for line in lines)]
    source = build / "built_for.cpp"
    build.mkdir(parents=True, exist_ok=True)
    code = "".join(f"__attribute__((used)) static const char text_{i}[] = {json.dumps(t)};\n" for i, t in enumerate(texts))
    if not source.exists() or source.read_text() != code:
        source.write_text(code)
    return source


def _unit(build: Path, source: Path, prefix: tuple[str, ...]) -> Unit:
    target = build / f"{source.parent.name}_{source.stem}.o"
    source = source.resolve()
    name = str(source.relative_to(ROOT)) if source.is_relative_to(ROOT) else str(source)
    return Unit(source, target, (*prefix, "-c", name, "-o", str(target)))


def compile_units(units: list[Unit], jobs: int | None = None) -> None:
    """Compile what is older than its source, a header or its command; raise BuildError naming the first failure."""
    headers = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cuh"}]

    def run(unit: Unit) -> str | None:
        stamp, log = unit.object.with_suffix(".command"), unit.object.with_suffix(".log")
        text = shlex.join(unit.command)
        newest = max(p.stat().st_mtime for p in [unit.source, *headers])
        if all(path.exists() for path in (unit.object, stamp, log)) and stamp.read_text() == text:
            if unit.object.stat().st_mtime > newest:
                unit.log.append(log.read_text())
                return None
        unit.object.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(unit.command, cwd=ROOT, capture_output=True, text=True)
        unit.log.append(done.stdout + done.stderr)
        if done.returncode:
            return f"{done.stdout}{done.stderr}\n{Path(unit.command[0]).name} failed on {unit.command[-3]}"
        log.write_text(unit.log[-1])
        stamp.write_text(text)
        print(f"apexfx: compiled {unit.command[-3]}", file=sys.stderr, flush=True)
        return None

    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        failures = [message for message in pool.map(run, units) if message]
    if failures:
        raise BuildError("\n".join(failures))


def link(units: list[Unit], target: Path, *, cuda: bool) -> None:
    """Link the objects into `target`, replacing it atomically (a running process may have it mapped)."""
    cxx = find_cxx()
    if cxx is None:
        raise BuildError("no C++ compiler was found (install g++, or set CXX)")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    command = [cxx, "-shared", "-o", str(fresh), *(str(u.object) for u in units)]
    command += [f"-L{torch_root() / 'lib'}", "-Wl,--as-needed", "-ltorch_cpu"]
    with tempfile.TemporaryDirectory() as stub:
        if cuda:
            command += _cuda_link_flags(cxx, Path(stub))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        fresh.unlink(missing_ok=True)
        raise BuildError(f"{done.stdout}{done.stderr}\nlinking {target.name} failed")
    os.replace(fresh, target)


def _cuda_link_flags(cxx: str, stub: Path) -> list[str]:
    """Static cudart, and a NEEDED entry for libtorch_cuda.so.

    torch loads libtorch_cuda without RTLD_GLOBAL, so its symbols resolve only through a NEEDED entry; an empty
    library of that name gives the entry, also where torch is a CPU build.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("nvcc was not found (put it on the path, or set CUDA_HOME)")
    library = stub / "libtorch_cuda.so"
    subprocess.run([cxx, "-shared", "-xc", os.devnull, "-o", str(library), "-Wl,-soname,libtorch_cuda.so"], check=True)
    folders = [f"-L{folder}" for folder in cuda_library_folders(nvcc)]
    return ["-Wl,--no-as-needed", f"-L{stub}", "-ltorch_cuda", "-Wl,--as-needed", *folders,
            "-lcudart_static", "-lrt", "-ldl", "-lpthread"]  # fmt: skip


def build_lock(build: Path):
    """Return a lock of the build folder: two builds at once would write the same objects."""
    from filelock import FileLock  # torch depends on it, and without torch nothing is built

    build.mkdir(parents=True, exist_ok=True)
    return FileLock(build / ".lock")


def build_cpu(target: Path, build: Path, only: list[Path] | None = None, headers: Path | None = None) -> None:
    """Build the CPU library at `target`."""
    with build_lock(build):
        units = cpu_units(build, only, headers)
        compile_units(units)
        link(units, target, cuda=False)


def build_cuda(
    target: Path, build: Path, choice: str | None = None, only: list[Path] | None = None, keep: bool = False
) -> list[Unit]:
    """Build the CUDA library at `target`; return the units, whose logs hold ptxas' report. `keep`: also the machine code."""
    with build_lock(build):
        units = cuda_units(build, choice, only)
        if keep:
            units = [_kept(unit) if unit.source.suffix == ".cu" else unit for unit in units]
        compile_units(units)
        link(units, target, cuda=True)
    return units


def _kept(unit: Unit) -> Unit:
    """Return the unit with its intermediate files, among them a .cubin for each architecture, beside its object."""
    folder = unit.object.with_suffix(".keep")
    folder.mkdir(parents=True, exist_ok=True)
    nvcc, *arguments = unit.command
    return replace(unit, command=(nvcc, "--keep", "--keep-dir", str(folder), *arguments))


def main() -> int:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="cpu", choices=("cpu", "cuda", "all", "check-cuda"))
    parser.add_argument("--only", nargs="*", type=Path, help="these sources, not all")
    parser.add_argument("--out", type=Path, help="the library to write")
    parser.add_argument("--headers", type=Path, help="a torch package to take the headers of (CPU)")
    parser.add_argument("--arch", help="native: the device's; or as TORCH_CUDA_ARCH_LIST, which is used without it")
    parser.add_argument("--write", action="store_true", help="with check-cuda: make csrc/cuda/kernels.json anew")
    arguments = parser.parse_args()
    only = [path.resolve() for path in arguments.only] if arguments.only else None
    if arguments.what == "all" and (only or arguments.out):
        parser.error("--only and --out go with one library, not with all")
    build = ROOT / "build" / ("cpu" if arguments.what == "cpu" else "cuda")
    if arguments.out and (only or arguments.headers):
        build = arguments.out.resolve().parent / f"{arguments.out.stem}.build"  # never the shared objects
    try:
        if arguments.what == "cpu":
            build_cpu((arguments.out or ROOT / "apexfx/_C_cpu.so").resolve(), build, only, arguments.headers)
        elif arguments.what == "cuda":
            build_cuda((arguments.out or ROOT / "apexfx/_C_cuda.so").resolve(), build, arguments.arch, only)
        elif arguments.what == "all":
            build_all(arguments.arch)
        else:
            return check_cuda(build, (arguments.out or build / "_C_cuda.so").resolve(), arguments.arch, only, arguments.write)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def build_all(choice: str | None) -> None:
    """Build both libraries at once; one that fails leaves the other."""
    with ThreadPoolExecutor() as pool:
        builds = [pool.submit(build_cuda, ROOT / "apexfx/_C_cuda.so", ROOT / "build/cuda", choice),
                  pool.submit(build_cpu, ROOT / "apexfx/_C_cpu.so", ROOT / "build/cpu")]  # fmt: skip
    messages = []
    for build in builds:
        try:
            build.result()
        except BuildError as error:
            messages.append(str(error))
    if messages:
        raise BuildError("\n".join(messages))


def check_cuda(build: Path, target: Path, choice: str | None, only: list[Path] | None, write: bool) -> int:
    """Compile every .cu, link once, report warnings, compare the kernels with their table, audit the symbols; 0: clean."""
    units = build_cuda(target, build, choice or ",".join(ARCHITECTURES) + "+PTX", only, keep=True)
    problems = [line for unit in units for text in unit.log for line in text.splitlines() if _is_problem(line)]
    for line in problems:
        print(line)
    for path in build.glob("*.keep/*"):
        if path.suffix != ".cubin":
            path.unlink()
    sources = sum(unit.source.suffix == ".cu" for unit in units)
    codes = re.findall(r",code=(\w+)", " ".join(units[0].command))
    print(f"{sources} CUDA sources compiled for {', '.join(codes)}; {len(problems)} problems", flush=True)
    commands = (["csrc/kernels.py", str(build), *(["--write"] if write else [])], ["csrc/audit.py", str(target)])
    checks = [subprocess.run([sys.executable, *command], cwd=ROOT) for command in commands]
    return 1 if problems or any(check.returncode for check in checks) else 0


def _is_problem(line: str) -> bool:
    """Tell whether a line of nvcc's output is a warning; ptxas warns of register spills too (-warn-spills)."""
    return re.search(r"\bwarning\b", line, re.IGNORECASE) is not None


if __name__ == "__main__":
    sys.exit(main())
