"""Models around one layer of torch's, and their comparison with the general way."""

from __future__ import annotations

import copy

import torch
from torch import nn

from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from apexfx.amp.eager_ledger import EagerLedger

B = torch.bfloat16


class Model(nn.Module):
    """Calls `layer` as `use` says."""

    def __init__(self, layer, use=lambda layer, *inputs: layer(*inputs)):
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, *inputs):
        return self.use(self.layer, *inputs)


def tensors(value):
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return [] if value is None else [value]


def outcome(model, inputs):
    """Return what a forward and backward of `model` gives and changes."""
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = tensors(model(*inputs))
    loss = sum(x.double().square().sum() for x in out)
    if loss.requires_grad:
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return [*out, *(x.grad for x in inputs), *grads, *(b.clone() for b in model.buffers())]


def initialised(model, **options):
    return amp.initialize(model, dtype=B, verbosity=0, cast_model_outputs=torch.float64, **options)


def check_same(model, inputs, *, prepare=lambda model: None):
    """Compare with a copy of `model` whose every call takes the general way; `prepare` is done after `initialize`."""
    general = initialised(copy.deepcopy(model))
    _amp_state.session.executor.ledger = EagerLedger()
    short = initialised(model)
    prepare(general), prepare(short)
    for _ in range(2):
        for a, b in zip(outcome(short, inputs), outcome(general, inputs), strict=True):
            assert (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and torch.equal(a, b)))


def encoder(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)
