"""What users do to the layers of an initialised model under O1: hooks, changes, replicas, other modes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from apexfx import amp
from apexfx.testing import assert_close

B = torch.bfloat16


class Model(nn.Module):
    """Calls `layer` as `use` says."""

    def __init__(self, layer, use=lambda layer, *inputs: layer(*inputs)):
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, *inputs):
        return self.use(self.layer, *inputs)


def initialised(model, **options):
    return amp.initialize(model, **{"dtype": B, "verbosity": 0, "cast_model_outputs": torch.float64, **options})


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)


def product():
    return torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.parametrize("find", [lambda m: m.layer.layers[1].linear2, lambda m: m.layer.layers[0].self_attn])
def test_hooks_run_with_casts(find):
    seen = []
    model = initialised(Model(encoder()))
    find(model).register_forward_pre_hook(lambda layer, args: seen.append(product().dtype))
    find(model).register_forward_hook(lambda layer, args, out: seen.append(product().dtype))
    model(torch.randn(2, 5, 8))
    assert seen == [B, B]


# What a user does to a layer after `initialize`.
CHANGES = {
    "weight": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(8, 8))),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "plain attribute": lambda layer: (delattr(layer, "weight"), setattr(layer, "weight", torch.ones(8, 8))),
    "weight norm": parametrizations.weight_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_user_changes_later_counts(change):
    seen = []
    model = initialised(Model(nn.Linear(8, 8), lambda layer, x: seen.append(layer(x)) or seen[-1]))
    CHANGES[change](model.layer.eval())
    x = torch.randn(4, 8)
    model(x)
    weight, bias = (None if p is None else p.to(B) for p in (model.layer.weight, model.layer.bias))
    assert seen[0].dtype == B
    assert_close(seen[0], F.linear(x.to(B), weight, bias))  # a parametrization computes with casts too


def test_other_modes_see_every_call():
    class Count(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func is F.linear
            return func(*args, **(kwargs or {}))

    outside, inside = Count(), Count()

    def use(layer, x):
        with inside:
            return layer(x)

    model = initialised(Model(nn.Linear(8, 8), use))
    with outside:
        assert model(torch.randn(4, 8)).dtype == torch.float64
    assert outside.count == inside.count == 1


def test_a_layer_called_outside_the_model_is_not_cast():
    model = initialised(Model(encoder()))
    model(torch.randn(2, 5, 8))
    assert model.layer.layers[0].linear1(torch.randn(4, 8)).dtype == torch.float32
    with pytest.raises(IndexError):
        model(torch.randn(3))  # an exception inside leaves the thread as it was
    assert model.layer.layers[0].linear1(torch.randn(4, 8)).dtype == torch.float32


def test_the_model_of_one_initialize_in_the_model_of_another():
    inner = initialised(Model(nn.Linear(8, 8)))
    outer = Model(nn.Sequential(inner, nn.Linear(8, 8)))
    outer.layer[1].double()
    x, y = torch.randn(4, 8), torch.randn(4, 8, dtype=torch.float64)
    expected = inner(x)
    initialised(outer, dtype=torch.float16, cast_model_outputs=None)
    assert outer(x).dtype == torch.float64
    assert torch.equal(outer.layer[1](y), F.linear(y, outer.layer[1].weight, outer.layer[1].bias))
    assert torch.allclose(inner(x), expected, rtol=0.05, atol=0.05)


def test_replicas_of_data_parallel_run_their_own_weights():
    model = initialised(nn.Sequential(nn.Linear(8, 8)))
    x = torch.randn(4, 8)
    expected = model(x)
    # What nn.parallel.replicate does, which needs GPUs.
    replica, layer = model._replicate_for_data_parallel(), model[0]._replicate_for_data_parallel()
    replica._modules["0"] = layer
    layer.weight, layer.bias = model[0].weight.detach() * 2, model[0].bias.detach() * 2
    assert torch.equal(replica(x), expected * 2)
    assert torch.equal(model(x), expected)


def test_a_recurrent_replica_takes_half_inputs():
    model = initialised(nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 3)))
    x = torch.randn(5, 2, 4)
    expected = model(x)[0]
    replica, layer = model._replicate_for_data_parallel(), model[1]._replicate_for_data_parallel()
    for name, weight in model[1].named_parameters():
        setattr(layer, name, weight.detach())  # as nn.parallel.replicate does: replicas have no parameters
    replica._modules["1"] = layer
    assert torch.equal(replica(x)[0], expected)


def test_initialize_once_more_gives_the_layers_to_the_new_executor():
    seen = []
    model = Model(nn.Linear(8, 8), lambda layer, x: seen.append(layer(x).dtype))
    for half in (B, torch.float16):
        initialised(model, dtype=half)(torch.randn(4, 8))
    assert seen == [B, torch.float16]
