"""Compile the CUDA sources of the list ops and of the norms for the CPU, and run the device tests' cases on them.

    python tests/cuda_emulation/emulate.py FOLDER [--every N]

The sources are the real ones, compiled through `include/`; a launch `kernel<<<grid, threads, ...>>>(arguments)` becomes
a call, and the kernels are registered for the CPU (whose own library is not loaded). This says whether the kernels' index
arithmetic, tables, tails, barriers and formulas are right, where there is no device. It says nothing about races, memory
or speed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = ("multi_tensor", "optimizers", "bucket", "norm", "norm_float", "norm_half", "norm_bfloat16")
LAUNCHING_HEADERS = ("multi_tensor_loop", "norm_launch")


def split_arguments(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "(<[") - (character in ")>]")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()]


def translate(text: str) -> str:
    """Turn launches into calls, and CUDA registrations into CPU ones."""
    text = text.replace("(apexfx, CUDA, m)", "(apexfx, CPU, m)")
    launch = re.compile(r"([A-Za-z_]\w*(?:<[^;(){}]*?>)?)<<<")
    while match := launch.search(text):
        close = text.index(">>>(", match.end())
        grid, threads, *_ = split_arguments(text[match.end() : close])
        end, depth = close + 4, 1
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        call = f"{match[1]}({text[close + 4 : end - 1]})"
        text = f"{text[: match.start()]}emulation::launch({grid}, {threads}, [&] {{ {call}; }}){text[end:]}"
    return text


def build(folder: Path) -> Path:
    """Translate and compile into `folder`; return the library."""
    sys.path.insert(0, str(ROOT / "csrc"))
    import compile_ops

    source = folder / "csrc"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", source)
    shutil.copy(HERE / "common.cuh", source / "cuda/common.cuh")
    for header in LAUNCHING_HEADERS:
        (source / f"cuda/{header}.cuh").write_text(translate((source / f"cuda/{header}.cuh").read_text()))
    files = []
    for name in SOURCES:
        files.append(source / f"cuda/emulated_{name}.cpp")
        files[-1].write_text(translate((source / f"cuda/{name}.cu").read_text()))
    torch_root = compile_ops.torch_root()
    library = folder / "emulated.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-attributes",
             "-Wno-unknown-pragmas", f"-DTORCH_TARGET_VERSION={compile_ops.TARGET_VERSION}"]  # fmt: skip
    command = [compile_ops.find_cxx(), *flags, f"-I{HERE / 'include'}", "-isystem", str(torch_root / "include"),
               *map(str, files), "-o", str(library), f"-L{torch_root / 'lib'}", "-ltorch_cpu"]  # fmt: skip
    subprocess.run(command, check=True)
    return library


def check(library: Path, every: int) -> int:
    """Run every N-th case of optimizers and norms, and all of the others; return how many were run."""
    os.environ["APEXFX_EXT"] = "0"
    sys.path.insert(0, str(ROOT))
    import torch

    from apexfx import ops
    from tests.gpu import test_norm_kernels as norms
    from tests.ops import multi_tensor_cases as lists
    from tests.ops import optimizer_cases as cases
    from tests.ops import test_bucket

    assert not any(loaded.loaded for loaded in ops.LIBRARIES)
    torch.ops.load_library(str(library))
    assert torch._C._dispatch_has_kernel_for_dispatch_key("apexfx::adam_", "CPU")
    count = 0
    for op, dtypes, layout, variant, scalars in list(cases.grid())[::every]:
        cases.check(cases.make(op, dtypes, layout, variant, scalars, "cpu"))
        count += 1
    for op in cases.OPS:
        sizes = [(1 + i % 37,) for i in range(1500)]  # more than one launch holds
        cases.check(cases.make(op, (cases.F32, cases.F32, None), "contiguous", {}, {}, "cpu", sizes=sizes))
        count += 1
    for layout in cases.LAYOUTS:
        for dtypes in lists.DTYPES:
            lists.check_scale(dtypes, layout, "cpu")
            lists.check_axpby(dtypes, layout, "cpu")
            test_bucket.check_bitwise(*dtypes, layout, "cpu")
            lists.check_l2norm(dtypes[0], layout, "cpu")
            count += 4
    lists.check_flags(cases.F32, "cpu")
    sizes = [(rows % 100, columns) for rows, columns in norms.SIZES]  # the fibers of a row take their time
    for case in list(itertools.product((False, True), norms.DTYPES, sizes, (0, 1)))[::every]:
        norms.test_kernels_equal_references_and_themselves(*case, "cpu")
        count += 1
    return count + 1


def main() -> None:
    """Run from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    print(f"{check(build(arguments.folder.resolve()), arguments.every)} cases agree")


if __name__ == "__main__":
    main()
