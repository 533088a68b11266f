"""Building and loading: whatever is missing, the package installs, says so in one sentence, and works."""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import ensurepip
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from apexfx import ops
from apexfx._torch import registered_overloads
from apexfx.ops import _built_for
from apexfx.ops._built_for import Machine, cuda_mismatch, mismatch
from apexfx.tools import doctor

ROOT = Path(__file__).resolve().parent.parent
BUNDLED = [*Path(ensurepip.__file__).parent.glob("_bundled/setuptools-*.whl")]  # 65.5 in Python 3.11
SMOKE = """
import torch
from apexfx import ops
from apexfx.optimizers import FusedAdam
param = torch.nn.Parameter(torch.ones(3))
param.grad = torch.ones(3)
FusedAdam([param], lr=0.5).step()
assert torch.allclose(param, torch.full((3,), 0.5)), param
print(*[library.loaded for library in ops.LIBRARIES], ops.LIBRARIES[0].reason)
"""


def csrc_module(name):
    """Import a file of csrc, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"csrc/{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compile_ops = csrc_module("compile_ops")
kernels = csrc_module("kernels")

needs_library = pytest.mark.skipif(not (ROOT / "apexfx/_C_cpu.so").exists(), reason="the CPU library is not built")


def run(command, cwd=ROOT, **environment):
    """Run a command with a changed environment; return (status, output)."""
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    return done.returncode, done.stdout


@needs_library
def test_the_library_is_loaded_and_every_family_has_a_cpu_kernel():
    cpu = next(library for library in ops.LIBRARIES if library.device == "cpu")
    assert cpu.loaded, cpu.reason
    rows = {row.op: row for row in doctor.facts().ops}
    for op in ("adam_", "lamb_", "sgd_", "adagrad_", "novograd_", "multi_tensor_scale", "multi_tensor_axpby",
               "multi_tensor_l2norm", "checksum"):  # fmt: skip
        assert rows[op].reference and rows[op].cpu, op


@pytest.mark.long
@needs_library
@pytest.mark.parametrize("change,reason", [
    (lambda library: None, "not built"),
    pytest.param(lambda library: b"not a library", "file too short", marks=pytest.mark.long),
    pytest.param(lambda library: library.replace(b"\nadam_(List", b"\nadam_(Lisp"),
                 "another version of apexfx::adam_; rebuild it with `make lib`", marks=pytest.mark.long),
], ids=["absent", "no library", "another schema"])
def test_without_a_usable_library_the_references_run(tmp_path, change, reason):
    shutil.copytree(ROOT / "apexfx", tmp_path / "apexfx", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    library = change((ROOT / "apexfx/_C_cpu.so").read_bytes())
    if library is not None:
        (tmp_path / "apexfx/_C_cpu.so").write_bytes(library)
    status, output = run([sys.executable, "-c", SMOKE], cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert status == 0 and reason in output, output
    assert output.splitlines()[-1].startswith("False False")


def test_the_signatures_in_a_library_are_those_of_the_registered_ops():
    text = "\n".join(["apexfx signatures:", *compile_ops.signatures()]).encode() + b"\n\0"
    assert mismatch(text) == ""
    assert "apexfx::checksum" in mismatch(text.replace(b"checksum(List[Tensor]", b"checksum(Tensor", 1))
    assert "does not say which ops" in mismatch(text.replace(b"signatures:", b"", 1))
    adam = next(line for line in compile_ops.signatures() if line.startswith("adam_.unscale("))
    assert mismatch(text.replace(f"{adam}\n".encode(), b"", 1)) == "it was built before there was an apexfx::adam_.unscale"
    with_kernel = {line.partition("(")[0] for line in compile_ops.signatures()}
    assert {f"apexfx::{name}" for name in with_kernel | _built_for.WITHOUT_KERNEL} == set(registered_overloads("apexfx"))
    assert not with_kernel & _built_for.WITHOUT_KERNEL
    assert len(compile_ops.signatures()) >= 22


BUILT_FOR = b"apexfx CUDA 12.8: sm_80 sm_90 compute_90\n\0"


@pytest.mark.parametrize("mark,torch_cuda,driver,capabilities,reason", [
    (BUILT_FOR, "12.9", (12, 4), [(8, 0), (9, 0)], ""),
    (BUILT_FOR, "12.9", (13, 0), [(8, 9), (8, 6)], ""),  # the code of 8.0 runs on what has the same major number
    (BUILT_FOR, "12.9", (12, 8), [(12, 0)], ""),  # the driver compiles the intermediate code
    (BUILT_FOR, "12.9", (12, 4), [(12, 0)],
     "it has sm_80, sm_90, compute_90, none of which a device of compute capability 12.0 runs"),
    (BUILT_FOR, "12.9", (13, 0), [(9, 0), (7, 5)], "none of which a device of compute capability 7.5 runs"),
    (BUILT_FOR, "12.9", (11, 4), [(8, 0)], "it was built by CUDA 12.8, and the driver supports CUDA 11.4 at most"),
    (BUILT_FOR, "12.9", None, [], ""),
    (BUILT_FOR, "12.9", (11, 4), [], ""),  # nothing to run on
    (BUILT_FOR, "13.0", (13, 0), [(8, 0)], "it was built by CUDA 12.8, and this torch is of CUDA 13.0"),
    (BUILT_FOR.replace(b"sm_90", b"sm_90a").replace(b" compute_90", b""), "12.9", (13, 0), [(9, 0)], ""),
    (BUILT_FOR.replace(b"compute_90", b"compute_90a"), "12.9", (13, 0), [(10, 0)], "none of which"),
    (b"", "12.9", (13, 0), [(8, 0)], "it does not say which CUDA it was built for"),
])  # fmt: skip
def test_a_cuda_library_is_loaded_where_it_can_run(mark, torch_cuda, driver, capabilities, reason):
    there = Machine(driver, tuple(capabilities)) if driver else None
    sentence = cuda_mismatch(b"ELF" + mark, torch_cuda, there)
    assert reason in sentence and bool(reason) == bool(sentence)


@needs_library
def test_a_cuda_library_that_cannot_run_is_left_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "apexfx").mkdir()
    library = (ROOT / "apexfx/_C_cpu.so").read_bytes() + b"apexfx CUDA 13.0: sm_90\n\0"
    (tmp_path / "apexfx/_C_cuda.so").write_bytes(library)
    monkeypatch.setattr(ops, "__file__", str(tmp_path / "apexfx/ops/__init__.py"))
    monkeypatch.setattr(ops, "machine", lambda: Machine((13, 0), ((8, 0),)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda = ops._load("cuda")
    assert not cuda.loaded and "a device of compute capability 8.0" in cuda.reason and "--arch native" in cuda.reason
    assert f"_C_cuda.so is not loaded, the pure-torch references are used: {cuda.reason}" in caplog.text


class Nvml:
    """NVML with two devices, of which CUDA_VISIBLE_DEVICES may hide one."""

    def __init__(self, library):
        assert library == "libnvidia-ml.so.1"

    def __getattr__(self, name):
        raise AttributeError(name)

    def nvmlInit_v2(self):
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = 12080
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 1 + index
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor):
        major._obj.value, minor._obj.value = {1: (7, 5), 2: (9, 0)}[handle.value]
        return 0


def test_the_devices_are_those_that_are_visible(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", Nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _built_for.machine() == Machine((12, 8), ((7, 5), (9, 0)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert _built_for.machine() == Machine((12, 8), ((9, 0),))
    monkeypatch.delattr(Nvml, "nvmlDeviceGetCudaComputeCapability")
    assert _built_for.machine() is None


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """An nvcc of CUDA 12.4, which says what it can compile for."""
    program = tmp_path / "nvcc"
    program.write_text("#!/bin/sh\nprintf 'compute_80\\ncompute_86\\ncompute_90\\n'\n")
    program.chmod(0o755)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return str(program)


@pytest.mark.parametrize("choice,variable,expected", [
    (None, "", ("80", "90+PTX")),
    (None, "8.0;8.6+PTX 9.0a", ("80", "86+PTX", "90a")),
    ("90", "8.0", ("90",)),
    (None, "Hopper", "the architectures are 'Hopper'; expected numbers such as"),
    (None, "8.0;10.0", "cannot compile for sm_100; it knows 80, 86, 90"),
])  # fmt: skip
def test_what_the_cuda_library_is_compiled_for(choice, variable, expected, nvcc, monkeypatch, capfd):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", variable)
    if isinstance(expected, str):
        with pytest.raises(compile_ops.BuildError, match=expected):
            compile_ops.architectures(nvcc, choice)
        return
    assert compile_ops.architectures(nvcc, choice) == expected
    assert ("knows no sm_100, so" in capfd.readouterr().err) == (choice is None and not variable)


def test_a_compiler_that_knows_none_of_them_is_an_error(nvcc, monkeypatch):
    monkeypatch.setattr(compile_ops, "ARCHITECTURES", ("100", "120"))
    with pytest.raises(compile_ops.BuildError, match="knows none of sm_100, sm_120: name others in TORCH_CUDA_ARCH_LIST"):
        compile_ops.architectures(nvcc)


@pytest.mark.skipif(compile_ops.find_nvcc() is None, reason="needs nvcc")
def test_a_library_says_what_it_was_compiled_for(tmp_path):
    units = compile_ops.cuda_units(tmp_path, "8.0;9.0+PTX", [ROOT / "csrc/cuda/checksum.cu"])
    assert re.search(r"apexfx CUDA \d+\.\d+: sm_80 sm_90 compute_90", (tmp_path / "built_for.cpp").read_text())
    assert re.findall(r",code=(\w+)", " ".join(units[0].command)) == ["sm_80", "sm_90", "compute_90"]


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_elsewhere_than_on_linux_the_package_is_pure_python(platform, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    assert compile_ops.plan({}) == ([], [f"the ops are compiled on Linux alone, so on {platform} none is "
                                         "(pure-torch references are used)"])  # fmt: skip


def test_an_install_without_torch_needs_no_module_of_unix():
    code = ("import runpy, sys; sys.modules |= dict.fromkeys(['fcntl', 'resource', 'torch', 'filelock']); "
            "sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')")  # fmt: skip
    status, output = run([sys.executable, "-c", code])
    assert status == 0 and "so no op is compiled" in output, output


@pytest.mark.long
def test_the_package_imports_no_module_of_unix():
    of_unix = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
    for path in (ROOT / "apexfx").rglob("*.py"):
        statements = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in statements if isinstance(node, ast.ImportFrom) and not node.level}
        assert not names & of_unix, path


@pytest.mark.long
def test_apexfx_ext_0_loads_nothing():
    status, output = run([sys.executable, "-c", SMOKE], APEXFX_EXT="0")
    assert status == 0 and "False False APEXFX_EXT=0" in output, output


def test_doctor_says_what_is_there():
    report = doctor.report()
    assert re.search(r"\), (1 thread|\d+ threads)\n", report)
    for text in (torch.__version__, "adam_", "Compiled libraries", *doctor.ENVIRONMENT):
        assert text in report
    assert report.splitlines()[-1] == doctor.verdict(doctor.facts())


@pytest.mark.parametrize("changes, expected", [
    ({}, "In short: all works, on the CPU by compiled ops; torch sees no CUDA device, so that nothing is computed on one."),
    ({"cpu": "not built"}, "In short: all works; on the CPU the slower references in torch run (not built): run `make lib` in"),
    ({"cpu": "not built", "cxx": None}, "(not built): install a C++ compiler, then run `make lib` in a clone, or `pip install"),
    ({"cpu": "not built", "cxx": None}, 'inner="inductor" compiles nothing for the CPU without a C++ compiler'),
    ({"cpu": "left out", "environment": {"APEXFX_EXT": "0"}}, "run (left out): unset APEXFX_EXT; torch sees no CUDA device"),
    ({"cuda_devices": ("H100",), "cuda": "not built"}, "on the CPU by compiled ops; on CUDA the slower references in torch run"),
    ({"cuda_devices": ("H100",), "cuda": ""}, "In short: all works, on the CPU and CUDA by compiled ops."),
])  # fmt: skip
def test_doctor_ends_with_what_works_and_what_to_do(changes, expected):
    reasons = {"cpu": "", "cuda": "this torch has no CUDA", **changes}
    libraries = tuple(ops.Library(device, "", not reasons[device], reasons[device]) for device in ("cpu", "cuda"))
    rest = {name: value for name, value in changes.items() if name not in ("cpu", "cuda")}
    known = {"libraries": libraries, "cxx": "g++", "nvcc": None, "cuda_devices": (), "environment": {"APEXFX_EXT": None}, **rest}
    assert expected in doctor.verdict(dataclasses.replace(doctor.facts(), **known))


def source_tree(tmp_path):
    """Copy what a build needs, without the package's modules."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "csrc", tree / "csrc", ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "apexfx").mkdir()
    (tree / "apexfx/__init__.py").touch()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def test_an_index_shows_the_readme_without_links_that_lead_nowhere(tmp_path):
    tree = source_tree(tmp_path)
    status, output = run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tree, APEXFX_EXT="0")
    assert status == 0, output
    description = (tree / "apexfx.egg-info/PKG-INFO").read_text()
    assert "docs/train_step.md has schedules" in description and "[train_step]" not in description
    assert re.findall(r"\]\((?!https?:)", description) == []


@pytest.mark.skipif(not BUNDLED, reason="Python from 3.12 on brings no setuptools")
def test_the_setuptools_that_python_brings_is_told_what_to_do(tmp_path):
    old = tmp_path / "old"
    shutil.unpack_archive(BUNDLED[0], old, "zip")
    status, output = run([sys.executable, "setup.py", "-q", "egg_info"], cwd=source_tree(tmp_path), PYTHONPATH=str(old))
    assert status != 0 and "was found, expected 77.0.3 or newer; run `pip install -U setuptools`" in output, output


@pytest.mark.long
@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_build_that_cannot_compile_says_so_and_fails_only_where_it_is_strict(tmp_path, strict):
    tree = source_tree(tmp_path)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "built", "--build-temp", "temp"]
    status, output = run(command, cwd=tree, CXX="false", APEXFX_STRICT=strict)
    assert (status != 0) == (strict == "1"), output
    assert "_C_cpu could not be built, so the pure-torch references are used" in output
    assert not list(tree.rglob("*.so"))


def test_what_nothing_can_be_compiled_without(monkeypatch):
    assert compile_ops.plan({"APEXFX_EXT": "0"}) == ([], ["APEXFX_EXT=0, so no op is compiled"])
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert "no C++ compiler was found" in compile_ops.plan({})[1][0]
    monkeypatch.setitem(sys.modules, "torch", None)
    names, [sentence] = compile_ops.plan({})
    assert not names and "torch is not importable" in sentence


@pytest.mark.parametrize("choice,torch_cuda,nvcc,version,names,sentence", [
    ("auto", None, "nvcc", (13, 0), ["_C_cpu"], ""),
    ("auto", "13.0", "nvcc", (13, 0), ["_C_cpu", "_C_cuda"], ""),
    ("auto", "13.0", None, None, ["_C_cpu"], "nvcc was not found"),
    ("auto", "12.8", "nvcc", (13, 0), ["_C_cpu"], "nvcc is CUDA 13 but torch is CUDA 12.8"),
    ("0", "13.0", "nvcc", (13, 0), ["_C_cpu"], ""),
    ("1", None, "nvcc", (13, 0), ["_C_cpu", "_C_cuda"], ""),
    ("1", None, None, None, ["_C_cpu"], "nvcc was not found"),
])
def test_when_the_cuda_library_is_built(monkeypatch, choice, torch_cuda, nvcc, version, names, sentence):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(compile_ops, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(compile_ops, "nvcc_version", lambda _: version)
    planned, sentences = compile_ops.plan({"APEXFX_CUDA": choice})
    assert planned == names
    assert (sentence in sentences[0]) if sentence else not sentences


def test_a_wrong_choice_is_an_error(monkeypatch):
    with pytest.raises(compile_ops.BuildError, match="APEXFX_CUDA"):
        compile_ops.plan({"APEXFX_CUDA": "yes"})


@needs_library
def test_only_stable_symbols_and_this_torch_exports_them():
    torch_folder = Path(torch.__file__).parent
    status, output = run([sys.executable, "csrc/audit.py", "apexfx/_C_cpu.so", "--torch", str(torch_folder)])
    assert status == 0 and "0 others, 0 foreign libraries" in output, output


def test_the_audit_notices_a_forbidden_symbol(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text('extern "C" int PyLong_Check(); namespace at { void foo(); } int f() { at::foo(); return PyLong_Check(); }')
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    status, output = run([sys.executable, "csrc/audit.py", str(library)])
    assert status == 1 and "PyLong_Check" in output and "_ZN2at3fooEv" in output


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_messages_of_a_library_with_a_libstdcxx_of_its_own(tmp_path):
    """Some toolchains have libstdc++ as an archive alone; a stream's locale is then not the one of torch."""
    compiler, library = tmp_path / "g++", tmp_path / "norm.so"
    units = [f"csrc/cpu/{name}.cpp" for name in ("norm", "norm_rows", "convert")]
    compiler.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    compiler.chmod(0o755)
    status, output = run([sys.executable, "csrc/compile_ops.py", "--only", *units, "--out", str(library)], CXX=str(compiler))
    assert status == 0, output
    program = ("import sys, torch\nimport apexfx.ops\ntorch.ops.load_library(sys.argv[1])\n"
               "torch.ops.apexfx.layer_norm.default(torch.ones(3), None, None, 5, 0.5)")  # fmt: skip
    status, output = run([sys.executable, "-c", program, str(library)], APEXFX_EXT="0")
    assert "RuntimeError: apexfx::layer_norm: num_dims=5, but x has 1 dims" in output, (status, output)


@needs_library
@pytest.mark.skipif(shutil.which("objdump") is None or "x86_64" not in sysconfig.get_platform(), reason="reads x86-64 code")
def test_hot_loops_are_vectorized_for_three_machines():
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", str(ROOT / "apexfx/_C_cpu.so")],
                          capture_output=True, text=True, check=True).stdout  # fmt: skip
    functions = {block.split(">:")[0].split("<")[-1]: block for block in text.split("\n\n") if ">:" in block}
    for loop, instruction in {"adam_loop": "sqrtps", "sgd_loop": "mulps", "direction_loop": "divps", "narrow_bfloat16": "psrld",
                              "widen_float16": "mulps", "square_sum_loop": "mulpd", "max_bits_loop": "max"}.items():  # fmt: skip
        for machine in ("default", "arch_x86_64_v3|avx2", "arch_x86_64_v4|avx512f"):
            bodies = [b for name, b in functions.items() if re.search(rf"{loop}.*\.({machine})$", name)]
            assert bodies, f"{loop} has no {machine} version"
            # SSE2 compares and blends unsigned integers, and has no fused multiply-add.
            if (loop, machine) not in {("max_bits_loop", "default"), ("sgd_loop", "default")}:
                assert any(instruction in b for b in bodies), f"{loop}.{machine} is not vectorized"


COPY = """
struct alignas(32) Eight { float values[8]; };
template <typename A, typename T> __global__ void copy(const T* p, T* q) { T x = p[threadIdx.x]; __stwb(q + threadIdx.x, x); }
template __global__ void copy<float>(const float4*, float4*);
template __global__ void copy<double>(const float4*, float4*);
template __global__ void copy<float>(const short*, short*);
__global__ void copy_eight(const Eight* p, Eight* q) { q[threadIdx.x] = p[threadIdx.x]; }
template <bool kWaits> __global__ void fetch(const float4* p, float* q) {  // copies twice
  __shared__ float4 s[64];
  unsigned at = __cvta_generic_to_shared(s + threadIdx.x);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(p + threadIdx.x));
  if (kWaits) asm volatile("cp.async.wait_all;");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + 512), "l"(p + threadIdx.x + 32));
  asm volatile("cp.async.wait_all;");
  __syncthreads();
  q[threadIdx.x] = s[31 - threadIdx.x].x + s[63 - threadIdx.x].x;
}
template __global__ void fetch<false>(const float4*, float*);
template __global__ void fetch<true>(const float4*, float*);
template <bool kWaits> __global__ void add(const float4* p, const float4* q, float4* r) {  // loads three times; waits for two
  float4 x = p[threadIdx.x], y = q[threadIdx.x];
  if (kWaits) p += __float_as_int(x.x + y.x);
  float4 z = p[threadIdx.x + 32];
  r[threadIdx.x] = {x.x + y.x + z.x, x.y + y.y + z.y, x.z + y.z + z.z, x.w + y.w + z.w};
}
template __global__ void add<false>(const float4*, const float4*, float4*);
template __global__ void add<true>(const float4*, const float4*, float4*);
"""


@pytest.mark.skipif(compile_ops.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", [90, 100])
def test_wide_accesses_are_counted_in_the_machine_code(architecture, tmp_path):
    (tmp_path / "a.cu").write_text(COPY)
    log, folder = tmp_path / "cuda_a.log", tmp_path / "cuda_a.keep"
    folder.mkdir()
    command = [compile_ops.find_nvcc(), "-cubin", f"-arch=sm_{architecture}", "-Xptxas", "-v", "a.cu", "-o"]
    done = subprocess.run([*command, str(folder / f"a.sm_{architecture}.cubin")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    log.write_text(done.stderr)
    table = kernels.measured(tmp_path)
    share = {name: row[str(architecture)][2:] for name, row in table.items()}  # of the hot ones
    assert share == {"a copy<float, float4>": [0, 100, 16], "a copy_eight": [0, 100, 32], "a fetch<false>": [1024, 66, 32],
                     "a fetch<true>": [1024, 66, 16], "a add<false>": [0, 100, 48], "a add<true>": [0, 100, 32]}


def test_a_kernel_that_got_worse_is_named():
    table = {name: {"90": [40, 0, 16, 60, 64]} for name in ("a f", "a g", "b h")}
    assert kernels.regressions(table, table) == []
    # as many groups of eight registers; b not compiled
    same = {"a f": {"90": [33, 0, 0, 58, 64]}, "a g": {"90": [40, 0, 16, 61, 80]}}
    assert kernels.regressions(same, table) == []
    assert kernels.regressions({"a f": {"90": [41, 8, 17, 57, 32]}, "a i": {}}, table) == [
        "a f on sm_90: 41 registers, 40 in the table",
        "a f on sm_90: 8 spilled bytes, 0 in the table",
        "a f on sm_90: 17 bytes of shared memory, 16 in the table",
        "a f on sm_90: 57 % 128-bit accesses, 60 in the table",
        "a f on sm_90: 32 bytes in flight, 64 in the table",
        "a g: no longer there, or no longer of 128-bit accesses",
        "a i: not in the table",
    ]


@pytest.mark.long
@pytest.mark.parametrize("isolated", [True, False])
def test_pip_install(tmp_path, isolated):
    """A wheel from an isolated build is pure Python; one built beside torch carries the library. Both work."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "*.egg-info"))
    flags = [] if isolated else ["--no-build-isolation"]
    status, output = run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "site", *flags, "."], cwd=tree)
    assert status == 0, output
    assert (tree / "site/apexfx/_C_cpu.so").exists() == (not isolated)
    wheel = next((tree / "site").glob("apexfx-*.dist-info")) / "WHEEL"
    assert f"Tag: py3-none-{'any' if isolated else 'linux'}" in wheel.read_text()
    status, output = run([sys.executable, "-c", SMOKE], cwd=tmp_path, PYTHONPATH=str(tree / "site"))
    assert status == 0 and output.splitlines()[-1].startswith(f"{not isolated} False"), output
