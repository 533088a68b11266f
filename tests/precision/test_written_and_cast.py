"""A value written in place and then given to a cast that changes nothing in float32: every form, in one graph a level."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.small_models import Model


def set_column(h):
    h[:, 0] = 0.5
    return h


def of_a_view(h):
    h.view(-1).mul_(2)
    return h


WRITES = {
    "relu_": lambda h: h.relu_(), "F.relu": lambda h: F.relu(h, inplace=True), "nn.ReLU": nn.ReLU(inplace=True),
    "add_": lambda h: h.add_(1), "masked_fill_": lambda h: h.masked_fill_(h > 0, 0.25), "setitem": set_column,
    "of a view": of_a_view, "copy_": lambda h: h.copy_(h * 2),
}  # fmt: skip
CASTS = {
    "float": lambda h, x: h.float(), "to(x.dtype)": lambda h, x: h.to(x.dtype), "to(float32)": lambda h, x: h.to(torch.float32),
    "type_as": lambda h, x: h.type_as(x), "to(x)": lambda h, x: h.to(x), "type": lambda h, x: h.type(torch.float32),
    "double": lambda h, x: h.double(), "bfloat16": lambda h, x: h.bfloat16(),
}  # fmt: skip
FORMS = {f"{w} {c}": (write, cast) for w, write in WRITES.items() for c, cast in CASTS.items()}


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("how", ["transform", "backend"])
def test_written_in_place_and_cast(how, level):
    torch.manual_seed(0)
    model = Model(lambda m, x: [cast(write(m.a(x)), x).softmax(-1).float() for write, cast in FORMS.values()], a=nn.Linear(4, 4))
    reference, x = copy.deepcopy(model), torch.randn(3, 4)
    compiled = apexfx.transform(model, opt_level=level, inner="eager") if how == "transform" else torch.compile(
        model, backend="apex", options={"opt_level": level, "inner": "eager"})
    tolerance = 1e-5 if level == "O0" else 0.05
    outputs = compiled(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=level != "O0"):
        expected = reference(x)
    for name, actual, wanted in zip(FORMS, outputs, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    for results in (outputs, expected):
        sum(result.square().sum() for result in results).backward()
    scale = max(1.0, float(reference.a.weight.grad.abs().max()))
    torch.testing.assert_close(model.a.weight.grad / scale, reference.a.weight.grad / scale, atol=tolerance, rtol=0)
