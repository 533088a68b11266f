"""A step under inner="cudagraphs": Inductor records no CUDA graph of what writes memory that may move, and tells a log alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx._torch import boxed
from apexfx.compiler import inner_compilers
from tests.tables import table

F16 = {"opt_level": "O1", "dtype": torch.float16}
OPTIONS = {
    "plain": {"opt_level": "O0"},
    "loss scale, clipping": {**F16, "max_grad_norm": 1.0},
    "O2": {"opt_level": "O2", "dtype": torch.bfloat16},
    "safeguard": {**F16, "safeguard": True},
    "ema": {"opt_level": "O0", "ema": apexfx.EMA(decay=0.9)},
    "accumulate": {**F16, "accumulate": 2},
    "module of the objective": {"opt_level": "O0", "modules": True},
}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "FusedLAMB": lambda p: apexfx.optimizers.FusedLAMB(p, lr=1e-3, max_grad_norm=None),
}


@pytest.fixture
def graphs(monkeypatch):
    """Have graphs for Inductor run as they are; return the shapes of inputs of each whose addresses are not taken for fixed."""
    found = []

    def inner(gm, example_inputs, **options):
        found.append([tuple(x.shape) for place, x in enumerate(example_inputs) if place not in options["static_input_idxs"]])
        return boxed(lambda args: gm(*args))

    monkeypatch.setattr(inner_compilers, "compile_fx_inner", inner)
    monkeypatch.setattr(inner_compilers, "cache_entry", lambda compiled: None)
    monkeypatch.setitem(inner_compilers.INNER, "cudagraphs",  # without the question for a device
                        lambda *args: inner_compilers._cloning(inner_compilers._inductor(*args)))
    return found


@table(2, "name, optimizer", [(name, optimizer) for name in OPTIONS for optimizer in OPTIMIZERS])
def test_all_inputs_but_the_batch_have_fixed_addresses(name, optimizer, graphs):
    torch.manual_seed(0)
    model, head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 4)
    options, parameters = dict(OPTIONS[name]), [*model.parameters(), *head.parameters()]
    if options.pop("modules", False):
        step = apexfx.train_step(model, None, OPTIMIZERS[optimizer](parameters), inner="cudagraphs", modules=[head],
                                 objective=lambda model, x, y: F.cross_entropy(head(model(x)), y), **options)
    else:
        model = nn.Sequential(model, head)
        step = apexfx.train_step(model, F.cross_entropy, OPTIMIZERS[optimizer](parameters), inner="cudagraphs", **options)
    x, y = torch.randn(16, 8), torch.randint(4, (16,))
    losses = [step(x, y) for _ in range(8)]
    assert losses[-1] < losses[0] and len({loss.data_ptr() for loss in losses}) == 8
    assert graphs == [[(16, 8), (16,)], *([[]] if name == "accumulate" else [])]
