"""Compile the CUDA sources for the CPU, and run tests on them in the place of the CPU's own kernels.

    python tests/cuda_emulation/emulate.py FOLDER all [argument of pytest ...]
    python tests/cuda_emulation/emulate.py FOLDER multi_tensor,checksum [argument of pytest ...]
    python tests/cuda_emulation/emulate.py build apexfx/_C_cpu.so      in the place of the CPU's library; runs no test

The sources are the real ones, compiled through `include/`; a launch `kernel<<<grid, threads, ...>>>(arguments)` becomes
a call, and the kernels are registered for the CPU (whose own library is not loaded). This says whether the kernels' index
arithmetic, tables, tails, barriers and formulas are right, where there is no device; a misaligned access ends the
program. It says nothing about races, memory or speed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-attributes", "-Wno-unknown-pragmas",
         "-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error")  # fmt: skip


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
    text = re.sub(r"\(apexfx,\s*CUDA, m\)", "(apexfx, CPU, m)", text)
    text = re.sub(r"extern __shared__ uint4 (\w+)\[\];", r"uint4* const \1 = emulation::dynamic_shared.data();", text)
    launch = re.compile(r"([A-Za-z_]\w*(?:<[^;(){}]*?>)?)<<<")
    while match := launch.search(text):
        close = text.index(">>>(", match.end())
        grid, threads, shared_bytes, _ = split_arguments(text[match.end() : close])
        end, depth = close + 4, 1
        while depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        call = f"[&] {{ {match[1]}({text[close + 4 : end - 1]}); }}"
        text = f"{text[: match.start()]}emulation::launch({match[1]}, {grid}, {threads}, {shared_bytes}, {call}){text[end:]}"
    return text


def build(folder: Path, names: str) -> Path:
    """Translate and compile csrc/cuda/*.cu, or the named ones, into `folder`; return the library."""
    sys.path.insert(0, str(ROOT / "csrc"))
    import compile_ops

    sources = folder / "csrc"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(ROOT / "csrc", sources)
    compile_ops.write_built_for(sources / "cuda")
    for file in (sources / "cuda").iterdir():
        file.with_suffix(".cpp" if file.suffix == ".cu" else file.suffix).write_text(translate(file.read_text()))
    torch_root, cxx = compile_ops.torch_root(), compile_ops.find_cxx()
    includes = [f"-I{HERE / 'include'}", "-isystem", str(torch_root / "include")]

    def compiled(file: Path) -> str:
        target = str(file.with_suffix(".o"))
        version = f"-DTORCH_TARGET_VERSION={compile_ops.TARGET_VERSION}"
        subprocess.run([cxx, *FLAGS, version, *includes, "-c", str(file), "-o", target], check=True)
        return target

    library = folder / "emulated.so"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        stems = {*names.split(","), "built_for"}
        wanted = [f for f in (sources / "cuda").glob("*.cpp") if names == "all" or f.stem in stems]
        objects = list(pool.map(compiled, sorted(wanted, key=lambda file: -file.stat().st_size)))  # what takes longest first
    link = [cxx, "-shared", *objects, "-o", str(library), f"-L{torch_root / 'lib'}", "-ltorch_cpu"]
    subprocess.run(link, check=True)
    return library


def main() -> int:
    """Run from the command line; see the module's docstring."""
    folder, names, *arguments = sys.argv[1:]
    if folder == "build":
        shutil.copy(build(ROOT / "build/emulation", "all"), names)
        return 0
    library = build(Path(folder).resolve(), names)
    os.environ |= {"APEXFX_EXT": "0", "APEXFX_TEST_DEVICE": "cpu"}
    sys.path.insert(0, str(ROOT))
    import torch

    from apexfx import ops

    assert not any(loaded.loaded for loaded in ops.LIBRARIES)
    torch.ops.load_library(str(library))
    os.chdir(ROOT)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))


if __name__ == "__main__":
    sys.exit(main())
