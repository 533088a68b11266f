"""O1 eager and O1 compiled make the same casts: the ledgers compared op by op on a zoo of models."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import amp
from apexfx.amp.eager_ledger import EagerLedger
from apexfx.graph.op_names import canonical_name
from apexfx.testing import assert_close


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        y = self.norm2(self.conv(x))
        y += x
        return self.fc(F.adaptive_avg_pool2d(F.relu(y, inplace=True), 1).flatten(1))


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.slope = nn.Linear(16, 32), nn.Linear(32, 4), nn.PReLU()

    def forward(self, x):
        x = self.slope(F.gelu(self.a(x)) + 1.0)
        return F.log_softmax(self.b(F.dropout(x, 0.1, training=self.training)).clamp(-3, 3), -1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.embedding(tokens))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.out = nn.Embedding(50, 16), nn.GRU(16, 24, 2, batch_first=True), nn.Linear(24, 50)

    def forward(self, tokens):
        return self.out(self.rnn(self.embedding(tokens))[0])


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(16, 24), nn.Linear(24, 4)

    def forward(self, x):
        state = (x.new_zeros(x.shape[0], 24), x.new_zeros(x.shape[0], 24))
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state[0])


class OwnAttention(nn.Module):
    """A mask by masked_fill with a float32 limit, einsum, a softmax method, cat and where."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(16, 48), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = torch.einsum("bqd,bkd->bqk", q, k) * 0.25
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, torch.finfo(torch.float32).min).softmax(-1)
        mixed = torch.where(x > 0, self.out(weights @ v), x)
        return torch.cat([mixed, x], -1).mean(1)


class Chosen(nn.Module):
    """The user's own casts: a matmul whose operands were all made float32 by hand stays in float32."""

    def __init__(self):
        super().__init__()
        self.a, self.gate = nn.Linear(16, 16), nn.Linear(16, 4, bias=False)

    def forward(self, x):
        hidden = self.a(x)
        routing = F.linear(hidden.float(), self.gate.weight.float()).softmax(-1)
        return hidden * routing.sum(-1, keepdim=True)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(torch.utils.checkpoint.checkpoint(lambda z: F.gelu(self.a(z)), x, use_reentrant=False))


ZOO = {
    "residual": (Residual, lambda: torch.randn(2, 3, 8, 8)),
    "perceptron": (Perceptron, lambda: torch.randn(4, 16)),
    "tied": (Tied, lambda: torch.randint(0, 20, (2, 5))),
    "recurrent": (Recurrent, lambda: torch.randint(0, 50, (2, 5))),
    "cells": (Cells, lambda: torch.randn(2, 3, 16)),
    "own_attention": (OwnAttention, lambda: torch.randn(2, 5, 16)),
    "chosen": (Chosen, lambda: torch.randn(2, 16)),
    "checkpointed": (Checkpointed, lambda: torch.randn(2, 16)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), lambda: torch.randn(2, 5, 16)),
}


def compiled_casts(model, inputs, half):
    transformed = apexfx.transform(model, opt_level="O1", dtype=half, inner="eager", skip=("cancel_casts",))
    torch.manual_seed(1)
    result = transformed(*inputs)
    # The last row of all, "output", is what the eager executor's forward does beyond the functions.
    rows = [(canonical_name(cast.op.rpartition(".")[2]), cast.rule, cast.source_dtype, cast.target_dtype)
            for cast in transformed.report.casts() if cast.rule != "output"]
    return result, collections.Counter(rows)


def eager_casts(model, inputs, half):
    model = amp.initialize(model, opt_level="O1", verbosity=0, dtype=half)
    ledger = amp._amp_state.session.executor.ledger = EagerLedger()
    torch.manual_seed(1)
    result = model(*inputs)
    return result, collections.Counter((cast.op, cast.rule, cast.source_dtype, cast.target_dtype) for cast in ledger)


@pytest.mark.parametrize("name", ZOO)
def test_the_ledgers_agree(name):
    make, draw = ZOO[name]
    model, inputs = make(), (draw(),)
    expected, compiled = compiled_casts(copy.deepcopy(model), inputs, torch.bfloat16)
    actual, eager = eager_casts(model, inputs, torch.bfloat16)
    assert eager == compiled
    assert sum(eager.values()) > 0
    assert actual.dtype == expected.dtype == torch.float32
    # AOTAutograd takes a recurrent layer apart into other kernels; everything else runs the same ones.
    assert_close(actual, expected, dtype=torch.bfloat16 if name == "recurrent" else torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_the_ledgers_agree_on_transformers(name):
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64, "use_cache": False}
    model = {
        "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**small)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt2)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, use_cache=False)),
    }[name]().eval()
    tokens = (torch.randint(0, 100, (2, 16)),)
    expected, compiled = compiled_casts(copy.deepcopy(model), tokens, torch.bfloat16)
    actual, eager = eager_casts(model, tokens, torch.bfloat16)
    assert eager == compiled
    assert type(actual) is type(expected)
    assert_close(actual.logits, expected.logits, dtype=torch.bfloat16)
