"""O1 eager and O1 compiled make the same casts: the ledgers compared op by op on models of every kind."""

from __future__ import annotations

import collections
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import amp
from apexfx.graph.op_names import canonical_name
from apexfx.graph.printing import short_dtype
from apexfx.testing import assert_close
from tests.small_models import Model
from tests.zoo import ZOO, Entry


def perceptron(m, x):
    x = m.slope(F.gelu(m.a(x)) + 1.0)
    return F.log_softmax(m.b(F.dropout(x, 0.1, training=m.training)).clamp(-3, 3), -1)


def checkpointed(m, x):
    return m.b(torch.utils.checkpoint.checkpoint(lambda z: F.gelu(m.a(z)), x, use_reentrant=False))


def numbers(*shape):
    return lambda n: {"x": torch.randn(n, *shape)}


OWN = {
    "perceptron": Entry(lambda: Model(perceptron, a=nn.Linear(16, 32), b=nn.Linear(32, 4), slope=nn.PReLU()), numbers(16), None),
    "on_the_host": Entry(lambda: Model(lambda m, x: m.b(m.a(x).cpu() * x.half().cpu()), a=nn.Linear(16, 16), b=nn.Linear(16, 16)),
                         numbers(16), None),
    "checkpointed": Entry(lambda: Model(checkpointed, a=nn.Linear(16, 16), b=nn.Linear(16, 16)), numbers(16), None),
}


def compiled_casts(model, inputs, half):
    transformed = apexfx.transform(model, opt_level="O1", dtype=half, inner="eager", skip=("cancel_casts",))
    torch.manual_seed(1)
    result = transformed(**inputs)
    # The last row of all, "output", is what the eager executor's forward does beyond the functions.
    rows = [(canonical_name(cast.op.removesuffix(".default").rpartition(".")[2]), cast.rule, cast.source_dtype, cast.target_dtype)
            for cast in transformed.report.casts() if cast.rule != "output"]
    return result, collections.Counter(rows)


def eager_casts(model, inputs, half):
    model = amp.initialize(model, opt_level="O1", verbosity=0, dtype=half)
    casts = []
    amp._amp_state.session.executor.on_cast = lambda op, rule, source, target, _: casts.append(
        (op, rule.kind, short_dtype(source), short_dtype(target)))
    torch.manual_seed(1)
    result = model(**inputs)
    return result, collections.Counter(casts)


@pytest.mark.parametrize("name", [*OWN, "lstm", *(
    pytest.param(name, marks=pytest.mark.long)
    for name in ("residual_cnn", "gru_loop", "vit", "unet", "bert", "gpt2", "llama"))])
def test_the_ledgers_agree(name):
    entry = {**OWN, **ZOO}[name]
    if entry.needs:
        pytest.importorskip(entry.needs)
    torch.manual_seed(0)
    model, inputs = entry.build(), entry.batch(2)
    expected, compiled = compiled_casts(copy.deepcopy(model), inputs, torch.bfloat16)
    actual, eager = eager_casts(model, inputs, torch.bfloat16)
    assert eager == compiled
    assert sum(eager.values()) > 0
    assert type(actual) is type(expected)
    actual, expected = (getattr(out, "logits", out) for out in (actual, expected))
    assert actual.dtype == expected.dtype == torch.float32
    # AOTAutograd takes a recurrent layer apart into other kernels; every other small model runs the same ones.
    assert_close(actual, expected, dtype=torch.bfloat16 if name == "lstm" or entry.needs else torch.float32)
