"""What a compiled library was built for, which csrc/compile_ops.py writes into it, and whether that is here.

A kernel built for another schema registers without complaint and fails, or worse, when it is called; one without code for
the device fails at its first call; an op that a library does not know runs its reference without a word. So all of it is
compared before a library is loaded, by reading the file.
"""

from __future__ import annotations

import ctypes
import re
from typing import NamedTuple

import torch

from .._torch import nvml_index, registered_overloads

_SIGNATURES = re.compile(rb"apexfx signatures:((?:\n[^\n\0]+)*)\n\0")
# Ops that are composed of others, or of torch's, and have no kernel of their own.
WITHOUT_KERNEL = frozenset({
    "apply_gradients", "bn_relu_backward", "flatten_bucket", "gather_shards", "gru", "gru_backward", "held_copy", "lstm",
    "lstm_backward", "orthogonalize", "orthogonalize_own", "orthogonalize_rows", "own_rows", "ranks_agreed", "rnn_relu",
    "rnn_relu_backward", "rnn_tanh", "rnn_tanh_backward", "scatter_gradients", "sync_batch_norm",
})
_CUDA = re.compile(rb"apexfx CUDA (\d+)\.(\d+):((?: (?:sm|compute)_\w+)+)\n\0")


def mismatch(library: bytes) -> str:
    """Return what keeps `library` from being used with the ops as they are registered, or "" where nothing does."""
    mark = _SIGNATURES.search(library)
    if mark is None:
        return "it does not say which ops it was built for"
    known = set(WITHOUT_KERNEL)
    for signature in mark[1].decode().split("\n")[1:]:
        name = signature.split("(")[0]
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.apexfx, packet, None), overload or "default", None)
        if op is None or _signature(op._schema) != signature:
            return f"it was built for another version of apexfx::{name}"
        known.add(name)
    for name in sorted(registered_overloads("apexfx")):
        if name.removeprefix("apexfx::") not in known:
            return f"it was built before there was an {name}"
    return ""


def _signature(schema: torch.FunctionSchema) -> str:
    """Return name(types) -> types, as `signatures` in csrc/compile_ops.py."""
    sides = (", ".join(str(value.type) for value in values) for values in (schema.arguments, schema.returns))
    name = f"{schema.name.removeprefix('apexfx::')}.{schema.overload_name}".removesuffix(".")
    return f"{name}({') -> ('.join(sides)})"


class Machine(NamedTuple):
    """The CUDA version that the driver supports, and the compute capability of every visible device."""

    driver: tuple[int, int]
    capabilities: tuple[tuple[int, int], ...]


def cuda_mismatch(library: bytes, torch_cuda: str, machine: Machine | None) -> str:
    """Return what keeps a CUDA `library` from running under this torch, on this machine's devices, or "".

    Args:
        machine: None where it cannot be asked; then only torch is compared.
    """
    mark = _CUDA.search(library)
    if mark is None:
        return "it does not say which CUDA it was built for"
    version, images = (int(mark[1]), int(mark[2])), mark[3].decode().split()
    built = f"it was built by CUDA {version[0]}.{version[1]}"
    if version[0] != int(torch_cuda.split(".")[0]):
        return f"{built}, and this torch is of CUDA {torch_cuda}"
    if machine is None or not machine.capabilities:
        return ""
    if machine.driver[0] < version[0]:
        return f"{built}, and the driver supports CUDA {machine.driver[0]}.{machine.driver[1]} at most"
    for capability in machine.capabilities:
        if not any(_runs(image, capability, machine.driver >= version) for image in images):
            number = f"{capability[0]}.{capability[1]}"
            return f"it has {', '.join(images)}, none of which a device of compute capability {number} runs"
    return ""


def _runs(image: str, capability: tuple[int, int], compiles: bool) -> bool:
    """Tell whether a device runs machine code (sm_) or, where the driver `compiles` it, intermediate code (compute_)."""
    kind, digits, specific = re.fullmatch(r"(sm|compute)_(\d+)([a-z]?)", image).groups()
    built_for = int(digits[:-1]), int(digits[-1])
    if specific == "a":
        return built_for == capability and (kind == "sm" or compiles)
    if kind == "sm":
        return built_for[0] == capability[0] and built_for[1] <= capability[1]
    return compiles and built_for <= capability


def machine() -> Machine | None:
    """Ask NVML, None without it. Torch would initialize CUDA for the answer, after which a process cannot fork."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        driver, major, minor, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(driver)):
            return None
        capabilities = []
        for device in range(torch.cuda.device_count()):
            if nvml.nvmlDeviceGetHandleByIndex_v2(nvml_index(device), ctypes.byref(handle)):
                return None
            if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
                return None
            capabilities.append((major.value, minor.value))
    except (OSError, AttributeError, RuntimeError):  # no NVML, an older one, or devices that it does not number (MIG)
        return None
    return Machine((driver.value // 1000, driver.value % 1000 // 10), tuple(capabilities))
