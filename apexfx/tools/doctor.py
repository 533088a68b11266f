"""The facts `python -m apexfx doctor` prints: torch, libraries, which ops have kernels, nvcc, environment variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tabulate import tabulate

from .. import __version__, host_memory, ops
from .._torch import has_kernel, registered_ops
from ..graph.printing import count_text

# Every environment variable the package or its build reads, and what it does.
ENVIRONMENT = {
    "APEXFX_EXT": "0: build no compiled op, and load none",
    "APEXFX_CUDA": "build the CUDA ops: auto (default), 0 never, 1 always",
    "APEXFX_STRICT": "1: a library that cannot be built is an error",
    "APEXFX_PROGRESS": "0: no line on stderr where a first call takes longer than five seconds",
    "TORCH_CUDA_ARCH_LIST": "what the CUDA ops are compiled for, as 8.0;9.0+PTX",
    "CXX": "the C++ compiler of the build",
    "CXXFLAGS": "more flags for it",
    "CUDA_HOME": "where the build looks for nvcc first",
    "WORLD_SIZE": "torchrun's: how many ranks there are, where no process group is up yet",
    "RANK": "torchrun's: diagnose prints on rank 0",
    **dict.fromkeys(host_memory.SETTINGS, "malloc's: train_step() leaves malloc as it is where one is set"),
}


@dataclass(frozen=True)
class OpRow:
    """Which implementations one op has; without a kernel, the reference runs."""

    op: str
    reference: bool
    cpu: bool
    cuda: bool


@dataclass(frozen=True)
class Facts:
    """What this machine and this install can do."""

    apexfx: str
    python: str
    torch: str
    torch_cuda: str | None
    cuda_devices: tuple[str, ...]
    threads: int
    libraries: tuple[ops.Library, ...]
    ops: tuple[OpRow, ...]
    cxx: str | None
    nvcc: str | None
    environment: dict[str, str | None]


def facts() -> Facts:
    """Collect the facts; nothing is built, downloaded or run on a device."""
    devices = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Facts(
        apexfx=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        cuda_devices=devices,
        threads=torch.get_num_threads(),
        libraries=ops.LIBRARIES,
        ops=tuple(_row(name) for name in registered_ops("apexfx")),
        cxx=shutil.which(os.environ.get("CXX", "g++").split()[0]),
        nvcc=_nvcc(),
        environment={name: os.environ.get(name) for name in ENVIRONMENT},
    )


def _row(name: str) -> OpRow:
    composite = any(has_kernel(name, key) for key in ("CompositeExplicitAutograd", "CompositeImplicitAutograd"))
    return OpRow(name.removeprefix("apexfx::"), composite, has_kernel(name, "CPU"), has_kernel(name, "CUDA"))


def _nvcc() -> str | None:
    """Return nvcc's path and release, or None."""
    home = os.environ.get("CUDA_HOME")
    path = shutil.which("nvcc", path=f"{home}/bin" if home else None) or shutil.which("nvcc")
    path = path or shutil.which("/usr/local/cuda/bin/nvcc")
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    release = re.search(r"release ([\d.]+)", done.stdout)
    return f"{path} ({release[1]})" if release else path


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"not installed; pip install {package}"


def verdict(known: Facts) -> str:
    """Return one line: what works, what falls back, what to do."""
    libraries = {library.device: library for library in known.libraries}
    devices = {"cpu": "the CPU", **({"cuda": "CUDA"} if known.cuda_devices else {})}
    loaded = [name for device, name in devices.items() if libraries[device].loaded]
    texts = [f"all works, on {' and '.join(loaded)} by compiled ops" if loaded else "all works"]
    for device, name in devices.items():
        if not (library := libraries[device]).loaded:
            texts.append(f"on {name} the slower references in torch run ({library.reason}): {_remedy(known, device)}")
    if known.cxx is None:
        texts.append('inner="inductor" compiles nothing for the CPU without a C++ compiler: install g++, or pass inner="eager"')
    if not known.cuda_devices:
        texts.append("torch sees no CUDA device, so that nothing is computed on one")
    return f"In short: {'; '.join(texts)}."


def _remedy(known: Facts, device: str) -> str:
    if known.environment["APEXFX_EXT"] == "0":
        return "unset APEXFX_EXT"
    missing = ("nvcc", known.nvcc) if device == "cuda" else ("a C++ compiler", known.cxx)
    install = f"install {missing[0]}, then " if missing[1] is None else ""
    return f"{install}run `make lib` in a clone, or `pip install --no-build-isolation .` again (docs/build.md)"


def report(of_demo: Iterable[str] = ()) -> str:
    """Return the facts as text, and `verdict`.

    Args:
        of_demo: the packages that the demo needs.
    """
    known = facts()
    lines = [
        f"apexfx {known.apexfx}, Python {known.python}, torch {known.torch} "
        f"({f'CUDA {known.torch_cuda}' if known.torch_cuda else 'no CUDA'}), {count_text(known.threads, 'thread')}",
        f"CUDA devices: {', '.join(known.cuda_devices) or 'none'}",
        f"C++ compiler: {known.cxx or 'not found'}",
        f"nvcc: {known.nvcc or 'not found'}",
        "",
        "Compiled libraries",
    ]
    for library in known.libraries:
        lines.append(f"  {library.device}: {'loaded' if library.loaded else 'not loaded'}: "
                     f"{library.path if library.loaded else library.reason}")  # fmt: skip
    lines += ["", "Packages that the demo needs", *(f"  {package}: {_version(package)}" for package in of_demo)]
    table = [[row.op, *("yes" if x else "-" for x in (row.reference, row.cpu, row.cuda))] for row in known.ops]
    lines += ["", tabulate(table, headers=["op", "reference", "cpu", "cuda"]), "", "Environment variables"]
    values = [[name, value if value is not None else "(not set)", ENVIRONMENT[name]] for name, value in known.environment.items()]
    lines += [tabulate(values, headers=["name", "value", "meaning"]), "", verdict(known)]
    return "\n".join(lines)
