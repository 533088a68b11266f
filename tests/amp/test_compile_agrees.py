"""`amp.initialize(compile=True)` leaves parameters, buffers and outputs in the dtypes that it leaves them in eager mode."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import apexfx
from apexfx import amp
from tests.tables import table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        out = self.norm(self.fc(x)) + self.shift
        return {"logits": out, "half": out.to(BF16), "indices": out.argmax(-1)}


def both(model=Model, **options):
    """Return the model in eager mode and compiled, with what each gives."""
    results = []
    for compiled in ({}, {"compile": True, "inner": "eager"}):
        torch.manual_seed(0)
        made = amp.initialize(model(), dtype=BF16, verbosity=0, **options, **compiled)
        results.append((made, made(torch.randn(3, 4))))
    return results


LEVELS = [{"opt_level": level} for level in ("O0", "O1", "O2", "O3")]
CASES = [{**level, **outputs} for level in LEVELS for outputs in ({}, {"cast_model_outputs": F16}, {"cast_model_outputs": BF16})]
CASES += [
    {"opt_level": "O1", "patch_torch_functions": False}, {"opt_level": "O2", "cast_model_type": False},
    {"opt_level": "O2", "master_weights": False}, {"opt_level": "O3", "master_weights": True},
    {"opt_level": "O3", "keep_batchnorm_fp32": True}, {"opt_level": "O2", "keep_batchnorm_fp32": False},
    {"opt_level": "O2", "cast_model_type": F16},
]  # fmt: skip


@table(4, "options", CASES, ids=lambda options: " ".join(map(str, options.values())))
def test_outputs_and_checkpoints(options):
    (eager_model, eager), (compiled_model, compiled) = both(**options)
    assert {name: value.dtype for name, value in compiled.items()} == {name: value.dtype for name, value in eager.items()}
    for name in ("logits", "half"):
        torch.testing.assert_close(compiled[name].float(), eager[name].float(), rtol=2e-2, atol=2e-2)
    for model in (eager_model, compiled_model):
        assert {value.dtype for value in model.state_dict().values()} == {F32, torch.int64}


@pytest.mark.parametrize("options", [{"opt_level": "O3"}, {"opt_level": "O3", "keep_batchnorm_fp32": True},
                                     {"opt_level": "O2", "master_weights": False}], ids=str)
def test_a_half_model_has_half_parameters_and_buffers(options):
    (eager, _), (compiled, _) = both(**options)
    expected = {name: tensor.dtype for name, tensor in (*eager.named_parameters(), *eager.named_buffers())}
    assert {name: tensor.dtype for name, tensor in (*compiled.named_parameters(), *compiled.named_buffers())} == expected
    assert expected["fc.weight"] == expected["shift"] == BF16


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_float64_is_cast_with_the_model(level):
    for model, _ in both(lambda: Model().double(), opt_level=level):
        assert model(torch.randn(3, 4, dtype=F64))["logits"].dtype == F32
        assert {tensor.dtype for tensor in model.parameters()} == {F32 if level == "O0" else BF16}


def test_transform_leaves_written_buffers_in_float32():
    model = apexfx.transform(Model(), opt_level="O3", dtype=BF16, inner="eager")
    model(torch.randn(3, 4))
    assert model.norm.weight.dtype == BF16 and model.norm.running_mean.dtype == model.shift.dtype == F32


def test_copies_give_the_outputs_asked_for():
    _, (model, out) = both(opt_level="O2", cast_model_outputs=F16)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(torch.randn(3, 4))["logits"].dtype == out["logits"].dtype == F16
