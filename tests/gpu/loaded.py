"""The first thing that check.py asks: is every library loaded, and has every op a kernel for the device that runs on it?

    python tests/gpu/loaded.py cuda|cpu

Without a kernel, tests would compare a reference with itself. Ends with a line of JSON about the machine, or with one sentence.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch

from apexfx import ops
from apexfx.ops.multi_tensor import multi_tensor_l2norm
from apexfx.tools import doctor


def compiled_ops() -> list[str]:
    """Return the ops of which csrc has kernels."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "csrc"))
    import compile_ops

    return [signature.split("(")[0] for signature in compile_ops.signatures()]


def complaint(device: str) -> str:
    """Return why what follows would say nothing about `device`, "" where it would."""
    for library in ops.LIBRARIES:
        if not library.loaded and (device == "cuda" or library.device == device):
            return (f"{Path(library.path).name} is not loaded ({library.reason}), so the tests would compare the references "
                    "with themselves")  # fmt: skip
    has = {row.op: getattr(row, device) for row in doctor.facts().ops}
    missing = [op for op in compiled_ops() if not has[op.partition(".")[0]]]
    if missing:
        return f"no {device.upper()} kernel of {', '.join(missing)}, so the tests would compare the references with themselves"
    return ""


def main() -> None:
    """Run from the command line; see the module's docstring."""
    [device] = sys.argv[1:]
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"no CUDA device: torch {torch.__version__} sees none")
    if sentence := complaint(device):
        sys.exit(sentence)
    norm = multi_tensor_l2norm([torch.ones(16, device=device)])[0]  # fails where the kernels are of another architecture
    assert norm.item() == 4.0
    print(doctor.report())
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    print(json.dumps({"device": name} | versions))


if __name__ == "__main__":
    main()
