"""Recurrent layers as ops: the bits of torch's own, whatever becomes of what the forward has recorded."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from apexfx.ops import recurrent

CASES = {
    "lstm": (nn.LSTM, {}), "gru": (nn.GRU, {}), "rnn_tanh": (nn.RNN, {}), "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm deep": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "gru deep": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False}),
    "lstm projected": (nn.LSTM, {"proj_size": 3, "num_layers": 2}),
    "lstm dropout": (nn.LSTM, {"num_layers": 3, "dropout": 0.5, "batch_first": True, "bidirectional": True}),
    "gru dropout": (nn.GRU, {"num_layers": 3, "dropout": 0.5, "bias": False}),
    "lstm float64": (nn.LSTM, {"dtype": torch.float64}), "gru bfloat16": (nn.GRU, {"dtype": torch.bfloat16}),
}


def layer(name, *, packed=False):
    """Return torch's function, ours, the arguments of both, and those of which there are gradients."""
    torch.manual_seed(0)
    cls, options = CASES[name]
    module = cls(4, 5, **options)
    dtype, rows = module.weight_ih_l0.dtype, module.num_layers * (1 + module.bidirectional)
    x = torch.randn(6, 3, 4, dtype=dtype)
    data = pack_sequence([x[:n, 0] for n in (6, 4, 1)]) if packed else x
    num_sequences = 6 if module.batch_first and not packed else 3
    state = [torch.randn(rows, num_sequences, size, dtype=dtype, requires_grad=True) for size in (module.proj_size or 5, 5)]
    x = (data.data if packed else x).clone().requires_grad_()
    hx = tuple(state) if cls is nn.LSTM else state[0]
    options = (module._flat_weights, module.bias, module.num_layers, module.dropout, True, module.bidirectional)
    kind = module.mode.lower()
    arguments = (x, data.batch_sizes, hx, *options) if packed else (x, hx, *options, module.batch_first)
    leaves = [x, *(state if cls is nn.LSTM else state[:1]), *module.parameters()]
    return getattr(torch, kind), getattr(recurrent, kind), arguments, leaves


def differentiated(function, arguments, leaves):
    torch.manual_seed(1)
    results = function(*arguments)
    return [*results, *torch.autograd.grad(sum((r * r).sum() for r in results), leaves)]


def same(actual, expected):
    return len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_torch(name, packed):
    theirs, ours, arguments, leaves = layer(name, packed=packed)
    actual, expected = differentiated(ours, arguments, leaves), differentiated(theirs, arguments, leaves)
    assert same(actual, expected)
    assert actual[0].stride() == expected[0].stride()
    with torch.no_grad():  # oneDNN's products are other ones where nothing is differentiated.
        torch.manual_seed(1)
        expected = theirs(*arguments)
        torch.manual_seed(1)
        assert same(ours(*arguments), expected)


@pytest.mark.parametrize("place", [0, 1])
def test_an_output_alone_is_differentiated(place):
    theirs, ours, arguments, leaves = layer("lstm deep")
    actual, expected = (torch.autograd.grad(f(*arguments)[place].sum(), leaves) for f in (ours, theirs))
    assert same(actual, expected)


def test_frozen_parameters_and_inputs_get_no_gradient():
    theirs, ours, arguments, leaves = layer("gru")
    for leaf in (leaves[0], leaves[-1]):
        leaf.requires_grad_(False)
    some = [leaf for leaf in leaves if leaf.requires_grad]
    assert same(differentiated(ours, arguments, some), differentiated(theirs, arguments, some))


def test_a_second_backward_computes_the_layer_again():
    _, ours, arguments, leaves = layer("lstm deep")
    loss = sum((r * r).sum() for r in ours(*arguments))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert not len(recurrent._RECORDED)
    assert same(torch.autograd.grad(loss, leaves), first)


def test_what_was_recorded_is_freed_with_the_result():
    _, ours, arguments, _ = layer("gru")
    results = ours(*arguments)
    assert len(recurrent._RECORDED) == 1
    del results
    gc.collect()
    assert not len(recurrent._RECORDED)
    with torch.no_grad():
        ours(*arguments)
    assert not len(recurrent._RECORDED)


def test_gradients_share_no_memory():
    _, ours, arguments, leaves = layer("lstm")
    grads = torch.autograd.grad(ours(*arguments)[0].sum(), leaves[2:])
    assert len({g.data_ptr() for g in grads}) == len(grads)


def test_another_dtype_is_refused():
    _, ours, arguments, _ = layer("gru")
    with pytest.raises(TypeError, match=r"apexfx::gru: x is torch.float64, the state torch.float32"):
        ours(arguments[0].double(), *arguments[1:])


def test_a_state_of_other_sequences_than_are_packed_is_refused():
    _, ours, (x, batch_sizes, hx, *options), _ = layer("gru", packed=True)
    with pytest.raises(ValueError, match="the state is of 2 sequences, and 3 are packed"):
        ours(x, batch_sizes, hx[:, :2].contiguous(), *options)


@pytest.mark.parametrize("name", ["lstm deep", "gru"])
def test_opcheck(name):
    _, ours, (x, hx, params, has_biases, num_layers, _, train, *directions), _ = layer(name)
    hx = list(hx) if isinstance(hx, tuple) else [hx]
    needs = [True] * (1 + len(hx) + len(params))
    arguments = (x, None, hx, list(copy.copy(params)), has_biases, num_layers, train, *directions, needs)
    torch.library.opcheck(getattr(torch.ops.apexfx, ours.name).default, arguments,
                          test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_state_of_low_precision_is_taken_into_a_layer_of_float32(name):
    layer, x = {"lstm": nn.LSTM, "gru": nn.GRU}[name](3, 4), torch.randn(5, 2, 3)
    state = [torch.randn(1, 2, 4).bfloat16().requires_grad_() for _ in range(2 if name == "lstm" else 1)]
    wide = [each.detach().float().requires_grad_() for each in state]
    options = layer.all_weights[0], True, 1, 0.0, False, False, False
    ours = getattr(recurrent, name)(x, state if name == "lstm" else state[0], *options)
    theirs = getattr(torch, name)(x, wide if name == "lstm" else wide[0], *options)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for one, other in zip(torch.autograd.grad(ours[0].sum(), state), torch.autograd.grad(theirs[0].sum(), wide)):
        torch.testing.assert_close(one, other.bfloat16(), rtol=0, atol=0)
