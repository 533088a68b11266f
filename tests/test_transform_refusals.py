"""transform(): what it refuses, and what it says where nothing was to be done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import apexfx
from apexfx import amp
from tests.transform_models import Net, images, transformed


@pytest.mark.parametrize(
    ("wrap", "error", "message"),
    [
        (lambda m: "model", TypeError, "expected a torch.nn.Module"),
        (transformed, ValueError, "transformed already"),
        (torch.compile, ValueError, "not the result of torch.compile"),
        (lambda m: nn.DataParallel(m), ValueError, "the model is wrapped in DataParallel"),
        (lambda m: nn.Sequential(nn.DataParallel(m)), ValueError, "submodule '0' is wrapped in DataParallel"),
        (lambda m: nn.Sequential(m, transformed(m)), ValueError, "submodule '1' is transformed already"),
        (lambda m: nn.LazyLinear(3), ValueError, "has no shape yet"),
    ],
)
def test_models_that_cannot_be_transformed(wrap, error, message):
    with pytest.raises(error, match=message):
        transformed(wrap(nn.Linear(2, 2)))


def test_nothing_to_rewrite_is_said(caplog):
    model = transformed(nn.ReLU(), opt_level="O1")
    model(torch.randn(3))
    assert "precision rewrote nothing" in caplog.text
    with pytest.raises(apexfx.PassError, match="precision.*rewrote nothing"):
        transformed(nn.ReLU(), opt_level="O1", fullgraph=True)(torch.randn(3))


def test_sync_bn_on_one_process_is_said():
    model = transformed(nn.BatchNorm1d(2), sync_bn=True)
    model(torch.randn(3, 2))
    assert "without a process group" in str(model.report)


def test_cuda_graphs_are_refused_off_cuda():
    with pytest.raises(ValueError, match="inner='cudagraphs' was given for a model that is not on CUDA"):
        transformed(nn.Linear(2, 2), inner="cudagraphs")(torch.randn(3, 2))


def test_a_dtype_the_device_cannot_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    from apexfx.transform import _can_compute

    assert not _can_compute(torch.device("cuda"), torch.bfloat16)
    assert _can_compute(torch.device("cuda"), torch.float16) and _can_compute(torch.device("cpu"), torch.bfloat16)


def test_a_failed_transform_leaves_the_model():
    source = Net()
    before = {name: (p.dtype, id(p)) for name, p in source.named_parameters()}
    with pytest.raises(ValueError, match="skip names 'precison', which is no pass; did you mean 'precision'"):
        apexfx.transform(source, opt_level="O3", skip=("precison",))
    with pytest.raises(ValueError, match="precision={'conv': 'flot32'} was given, expected torch.float32"):
        apexfx.transform(source, opt_level="O3", precision={"conv": "flot32"})
    assert {name: (p.dtype, id(p)) for name, p in source.named_parameters()} == before


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("inside", [False, True])
def test_casts_of_amp_and_of_transform_are_not_stacked(opt_level, inside):
    def initialised(level):
        model = amp.initialize(Net(), opt_level=level, verbosity=0)
        return nn.Sequential(model) if inside else model

    where = "submodule '0'" if inside else "the model"
    with pytest.raises(ValueError, match=f"{where} was given to amp.initialize, which casts each of its calls in eager"):
        transformed(initialised("O1"), opt_level=opt_level)
    for level in ("O2", "O3"):
        model = initialised(level)
        if opt_level != "O0":
            with pytest.raises(ValueError, match=f"has cast it to torch.bfloat16; opt_level='{opt_level}' would cast on top"):
                transformed(model, opt_level=opt_level)
            continue
        model = transformed(model)
        assert model(images()).dtype == torch.float32
        assert any(f"{where} was given to amp.initialize: its casts to" in note for note in model.report.notes)


def test_amp_without_casts_goes_with_any_level():
    model = transformed(amp.initialize(Net(), opt_level="O0", verbosity=0), opt_level="O2")
    model(images()).sum().backward()
    assert model.report.casts() and not any("amp" in note for note in model.report.notes)
