"""Torch's own layers under O1 take a short way around the function mode, and give what the general way gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.amp.layer_cases import B, Model, check_same, encoder, initialised

LAYERS = {
    "linear": (lambda: nn.Linear(8, 8), (4, 8)), "linear without bias": (lambda: nn.Linear(8, 8, bias=False), (4, 8)),
    "conv1d": (lambda: nn.Conv1d(8, 4, 3), (2, 8, 8)), "conv2d": (lambda: nn.Conv2d(3, 4, 3, bias=False), (2, 3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3), (2, 2, 4, 4, 4)), "layer_norm": (lambda: nn.LayerNorm(8), (4, 8)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), (4, 8)), "rms_norm": (lambda: nn.RMSNorm(8), (4, 8)),
    "batch_norm1d": (lambda: nn.BatchNorm1d(8), (4, 8)), "batch_norm2d": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "batch_norm3d averaged": (lambda: nn.BatchNorm3d(3, momentum=None), (4, 3, 2, 2, 2)), "relu": (lambda: nn.ReLU(), (4, 8)),
    "batch_norm1d 3-d": (lambda: nn.BatchNorm1d(8, momentum=0.3, eps=0.1), (4, 8, 3)),
    "batch_norm2d plain": (lambda: nn.BatchNorm2d(3, affine=False), (4, 3, 2, 2)),
    "batch_norm2d without statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 2, 2)),
    "batch_norm3d": (lambda: nn.BatchNorm3d(3), (4, 3, 2, 2, 2)),
    "gelu": (lambda: nn.GELU("tanh"), (4, 8)), "silu": (nn.SiLU, (4, 8)), "sigmoid": (nn.Sigmoid, (4, 8)),
    "tanh": (nn.Tanh, (4, 8)), "softmax": (lambda: nn.Softmax(-1), (4, 8)), "dropout": (lambda: nn.Dropout(0.5), (4, 8)),
    "padded conv": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 8, 8)),
}  # fmt: skip
ALWAYS_GENERAL = ("padded conv",)
Q, K = (2, 5, 8), (2, 3, 8)
ATTENTION = {
    "self": lambda m, q, k: m(q, q, q), "cross": lambda m, q, k: m(q, k, k, need_weights=False),
    "three": lambda m, q, k: m(q, k, k.clone()), "keywords": lambda m, q, k: m(query=q, key=k, value=k),
    "mask": lambda m, q, k: m(q, q, q, attn_mask=torch.ones(5, 5).triu(1).bool()),
    "self split": lambda m, q, k: m(q, k.repeat(1, 2, 1)[:, :5], q),
}  # fmt: skip


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, B, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_gives_what_the_general_way_gives_to_the_bit(name, dtype, train, calls):
    make, shape = LAYERS[name]
    layer = make().train(train)
    if dtype == torch.float64:
        layer.double()
    x = torch.randn(shape).to(dtype)
    check_same(Model(layer), [x])
    calls.clear()
    other_half = dtype == torch.float16 and name.startswith(("linear", "conv"))
    general = name in ALWAYS_GENERAL or dtype == torch.float64 or other_half
    short = initialised(Model(make().train(train)))
    if not general:
        short(x)
        assert calls == []


@pytest.mark.parametrize(("layer", "shape", "message"), [
    (nn.BatchNorm2d(3), (1, 3, 1, 1), "Expected more than 1 value per channel"), (nn.BatchNorm1d(3), (1, 3), "more than 1 value"),
    (nn.BatchNorm2d(3), (4, 3), "expected 4D input"), (nn.BatchNorm3d(3), (4, 3, 2, 2), "expected 5D input"),
    (nn.BatchNorm1d(3), (4, 3, 2, 2), "expected 2D or 3D input"),
])  # fmt: skip
def test_a_batch_norm_refuses_what_it_would_refuse(layer, shape, message):
    with pytest.raises(ValueError, match=message):
        initialised(Model(layer))(torch.randn(shape))
    assert layer.num_batches_tracked == ("more than" in message)  # torch counts a batch before it looks at it


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_gives_what_the_general_way_gives_to_the_bit(name, batch_first, train, calls):
    layer = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=batch_first).train(train)
    query, key = (torch.randn(shape) if batch_first else torch.randn(shape).transpose(0, 1) for shape in (Q, K))
    if name in ("mask", "self split") and not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
        layer.batch_first = True
    check_same(Model(layer, ATTENTION[name]), [query, key])
    calls.clear()
    initialised(Model(layer, ATTENTION[name]))(query, key)
    assert (F.multi_head_attention_forward not in calls) == (train and name in ("self", "cross"))


@pytest.mark.parametrize("options", [
    {}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}, {"kdim": 8, "vdim": 4},
])  # fmt: skip
def test_options_of_attention_give_what_the_general_way_gives(options):
    use = (lambda m, q: m(q, q, q[..., :4])) if "vdim" in options else (lambda m, q: m(q, q, q))
    check_same(Model(nn.MultiheadAttention(8, 2, **options), use), [torch.randn(Q)])


# Name: (the layer, how it is called, whether no call comes to the executor)
ENCODERS = {
    "plain": (encoder, lambda m, x: m(x), True),
    "norm first": (lambda: encoder(norm_first=True), lambda m, x: m(x), True),
    "eval": (lambda: encoder().eval(), lambda m, x: m(x), False),
    "gelu": (lambda: encoder(activation="gelu"), lambda m, x: m(x), False),
    "half": (encoder, lambda m, x: m(x.to(B)), False),  # a dtype that the user chose
    "mask": (encoder, lambda m, x: m(x, nn.Transformer.generate_square_subsequent_mask(5)), False),
    "causal": (encoder, lambda m, x: m(x, nn.Transformer.generate_square_subsequent_mask(5), is_causal=True), False),
    "padding": (encoder, lambda m, x: m(x, src_key_padding_mask=torch.zeros(2, 5).bool()), False),
    "decoder": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 2),
                lambda m, x: m(x, x[:, :3]), True),
    "transformer": (lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), lambda m, x: m(x, x[:, :3]), None),
}  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_give_what_the_general_way_gives_to_the_bit(name, calls):
    make, use, short = ENCODERS[name]
    layer = make()
    check_same(Model(layer, use), [torch.randn(Q)])
    calls.clear()
    initialised(Model(layer, use))(torch.randn(Q))
    assert short is None or ([c for c in calls if c is not Tensor.__getitem__] == []) == short
