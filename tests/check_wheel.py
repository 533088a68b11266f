"""What an installed wheel must do, in an environment of nothing but it and what it depends on.

    python -I tests/check_wheel.py      (`make wheel` runs it; -I: the sources in this repository are out of its sight)
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import torch

import apexfx
from apexfx.optimizers import FusedAdam


def main() -> None:
    """Train a model by the package's own passes, kernels and optimizer; say what was used."""
    assert Path(apexfx.__file__).is_relative_to(sys.prefix), f"{apexfx.__file__} is not the installed package"
    lines = metadata.distribution("apexfx").read_text("WHEEL").splitlines()
    tag = next(line.split()[1] for line in lines if line.startswith("Tag:"))
    assert tag.startswith("py3-none-manylinux"), tag
    cpu = next(library for library in apexfx.ops.LIBRARIES if library.device == "cpu")
    assert cpu.loaded, cpu.reason
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    model = apexfx.transform(model, opt_level="O2", inner="eager")
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    x, losses = torch.randn(32, 8), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x).float() - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    print(f"{tag}, torch {torch.__version__}: {Path(cpu.path).name} loaded, loss {losses[0]:.2f} -> {losses[-1]:.2f} in 20 steps")


if __name__ == "__main__":
    main()
