"""The warning where a float16 model trains and nothing scales its loss."""

from __future__ import annotations

import logging

import torch
from torch import nn

import apexfx
from apexfx import amp
from tests import fresh_process


def warnings(said, **options):
    """Return how often a model that trains two steps warns."""
    said.clear()
    model = apexfx.transform(nn.Linear(4, 4), inner="eager", **options)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    model.eval()(torch.ones(2, 4)).sum().backward()
    return len([text for text in said if "nothing was found that scales its loss" in text])


def numbers_of_warnings():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("apexfx").addHandler(handler)
    half = {"dtype": torch.float16, "opt_level": "O1"}
    numbers = {"O1": warnings(said, **half), "O2": warnings(said, **half | {"opt_level": "O2"}),
               "bfloat16": warnings(said, dtype=torch.bfloat16), "O0": warnings(said, opt_level="O0")}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    numbers["a scaler that is off"] = warnings(said, **half)
    scaler = torch.amp.GradScaler("cpu")
    numbers["a scaler"] = warnings(said, **half)
    del scaler
    numbers["the scaler is gone"] = warnings(said, **half)
    model = nn.Linear(4, 4)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    numbers["amp"] = warnings(said, **half)
    return numbers


def test_a_float16_model_whose_loss_nothing_scales_warns_once():
    numbers = fresh_process.call(numbers_of_warnings)  # what any test keeps alive may scale losses
    assert numbers == {"O1": 1, "O2": 1, "bfloat16": 0, "O0": 0, "a scaler that is off": 1, "a scaler": 0,
                       "the scaler is gone": 1, "amp": 0}
