"""Layers that graphs show otherwise: few graphs for many lengths, the numbers of eager, and the user's modules as they were."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import apexfx
from apexfx.ops import recurrent
from apexfx.testing import assert_close
from tests.small_models import take_step

KINDS = {"lstm": (nn.LSTM, {}), "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True, "dropout": 0.3}),
         "rnn": (nn.RNN, {"nonlinearity": "relu", "bias": False})}


def long(value):
    return pytest.param(value, marks=pytest.mark.long)


class Tagger(nn.Module):
    """(N, T) tokens -> (N, 3)."""

    def __init__(self, cls=nn.LSTM, **options):
        super().__init__()
        self.embedding = nn.Embedding(20, 4)
        self.body = nn.ModuleList([cls(4, 6, batch_first=True, **options)])
        self.head = nn.Linear(6 * (1 + self.body[0].bidirectional), 3)

    def forward(self, tokens, hx=None):
        return self.head(self.body[0](self.embedding(tokens), hx)[0].mean(1))


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens):
        return self.inner(tokens) * 2


class Last(Tagger):
    """Packed (N, T, 4) -> (N, 3)."""

    def forward(self, packed):
        hidden = self.body[0](packed)[1]
        return self.head((hidden[0] if isinstance(hidden, tuple) else hidden)[-1])


class Loop(nn.Module):
    """A cell in a Python loop over time, (N, T, 4) -> (N, 3)."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 3)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 3)
        for place in range(x.shape[1]):
            h = self.cell(x[:, place], h)
        return h


class Reversed(nn.LSTM):
    """Has a forward of its own."""

    def forward(self, input, hx=None):
        return super().forward(input.flip(1), hx)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)  # powers of two: the bits do not depend on the processor


def batches(num_lengths):
    generator = torch.Generator().manual_seed(0)
    for place in range(num_lengths):
        n = (4, 4, 3, 5)[place % 4]
        yield torch.randint(20, (n, 3 + place), generator=generator), torch.randint(3, (n,), generator=generator)


def packed_batches(num_lengths):
    for tokens, labels in batches(num_lengths):
        yield pack_sequence([torch.randn(n, 4) for n in range(1, tokens.shape[1], 2)], enforce_sorted=False), \
            labels.new_zeros(tokens.shape[1] // 2)


def train_beside_eager(model, num_lengths, data=batches, **options):
    """Train two copies of a model, one by `train_step`; return the step and the parameters of both."""
    reference = copy.deepcopy(model)
    step, optimizer = apexfx.train_step(model, F.cross_entropy, sgd(model), **options), sgd(reference)
    for place, (tokens, labels) in enumerate(data(num_lengths)):
        torch.manual_seed(place)
        loss = step(tokens, labels)
        torch.manual_seed(place)
        expected = take_step(optimizer, F.cross_entropy(reference(tokens), labels))
        assert options["inner"] != "eager" or options["opt_level"] != "O0" or torch.equal(loss, expected)
    return step, [*zip(model.parameters(), reference.parameters())]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gru", long("lstm"), long("rnn")])
def test_a_step_over_many_lengths_has_the_bits_of_eager(kind):
    cls, options = KINDS[kind]
    model = Tagger(cls, **options)
    step, params = train_beside_eager(model, 6, opt_level="O0", inner="eager")
    assert len(step.report.graphs) <= 3  # the first sizes, another length, another batch size
    assert all(torch.equal(p, q) for p, q in params)
    assert type(model.body[0]) is cls and f"apexfx.{'rnn_relu' if kind == 'rnn' else kind}.default(" in step.print_readable(
        stage="forward", graph=1, print_output=False)


@pytest.mark.long
@pytest.mark.parametrize("cls", [nn.GRU, long(nn.LSTM)])
def test_a_step_is_given_packed_sequences(cls):
    step, params = train_beside_eager(Last(cls), 6, packed_batches, opt_level="O0", inner="eager")
    assert len(step.report.graphs) <= 3 and not step.report.notes
    assert all(torch.equal(p, q) for p, q in params)


@pytest.mark.long
def test_too_many_lengths_of_a_loop_run_in_pieces():
    def lengths(count):
        return [(torch.randn(2, n, 4), torch.tensor([0, 2])) for n in range(2, 2 + count)]

    options = {"opt_level": "O0", "inner": "eager"}
    with torch._dynamo.config.patch(recompile_limit=2):
        with pytest.raises(RuntimeError, match="compiled 2 times(?s:.)*the length of sequences(?s:.)*fallback='transform'"):
            train_beside_eager(Loop(), 3, lengths, **options)
        step, params = train_beside_eager(Loop(), 4, lengths, fallback="transform", **options)  # two graphs in pieces
    assert "the step was compiled 2 times" in step.report.notes[0]
    assert all(torch.equal(p, q) for p, q in params)


def test_a_step_at_o1_casts_the_layer():
    model = Tagger()
    step, params = train_beside_eager(model, 1, opt_level="O1", dtype=torch.bfloat16, inner="eager")
    assert "body.0.weight_hh_l0" in {row.tensor for row in step.report.casts() if row.op == "apexfx.lstm.default"}
    for p, q in params:
        assert_close(p, q, dtype=torch.bfloat16)


@pytest.mark.long
def test_a_step_under_inductor():
    _, params = train_beside_eager(Tagger(nn.GRU), 1, opt_level="O0", inner="inductor")
    for p, q in params:
        assert_close(p, q, dtype=torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_transformed_model_over_many_lengths(level):
    """The layer lies in a class with a forward of its own, inside of another."""
    model = Outer(Tagger(nn.GRU))
    reference, source = copy.deepcopy(model), model
    model = apexfx.transform(model, opt_level=level, inner="eager")
    for tokens, labels in batches(6):
        expected = F.cross_entropy(reference(tokens), labels)
        loss = F.cross_entropy(model(tokens), labels)
        expected.backward()
        loss.backward()
        assert_close(loss, expected, dtype=torch.float32 if level == "O0" else torch.bfloat16)
    for p, q in zip(model.parameters(), reference.parameters()):
        assert torch.equal(p.grad, q.grad) if level == "O0" else (p.grad - q.grad).norm() <= 0.05 * q.grad.norm() + 1e-3
    assert len(model.report.graphs) <= 3
    assert type(source.inner.body[0]) is type(model.inner.body[0]) is nn.GRU


@pytest.mark.parametrize("is_train_step", [True, False])
def test_a_backward_runs_what_the_forward_recorded(is_train_step, monkeypatch):
    recorded, record = [], recurrent.gru._record
    monkeypatch.setattr(recurrent.gru, "_record", lambda *arguments: recorded.append(record(*arguments)) or recorded[-1])
    model, ((tokens, labels),) = Tagger(nn.GRU), batches(1)
    if is_train_step:
        apexfx.train_step(model, F.cross_entropy, sgd(model), opt_level="O0", inner="eager")(tokens, labels)
    else:
        F.cross_entropy(apexfx.transform(model, opt_level="O0", inner="eager")(tokens), labels).backward()
    assert len(recorded) == 1 and not len(recurrent._RECORDED)


def test_a_layer_that_is_the_model():
    model = nn.GRU(4, 5)
    reference, transformed = copy.deepcopy(model), apexfx.transform(model, opt_level="O0", inner="eager")
    for length in range(3, 13):
        x = torch.randn(length, 2, 4)
        assert torch.equal(transformed(x)[0], reference(x)[0])
    assert len(transformed.report.graphs) == 2


@pytest.mark.long
def test_a_state_that_is_given_and_a_sequence_without_a_batch():
    model = Tagger(nn.GRU)
    transformed = apexfx.transform(model, opt_level="O0", inner="eager")
    for length in range(3, 8):
        tokens, hx = torch.randint(20, (2, length)), torch.randn(1, 2, 6, requires_grad=True)
        grads = [torch.autograd.grad(m(tokens, hx).sum(), hx)[0] for m in (transformed, model)]
        assert torch.equal(*grads)
    alone = nn.Sequential(nn.LSTM(4, 5))
    x = torch.randn(6, 4)
    assert torch.equal(apexfx.transform(alone, opt_level="O0", inner="eager")(x)[0], alone(x)[0])


@pytest.mark.long
def test_a_forward_of_the_users_own_is_left_alone():
    model = Tagger(Reversed)
    step, params = train_beside_eager(model, 1, opt_level="O0", inner="eager")
    assert "apexfx.lstm" not in step.print_readable(stage="forward", print_output=False)
    for p, q in params:
        assert_close(p, q, dtype=torch.float32)


@pytest.mark.long
def test_autocast_around_it_casts_as_in_eager():
    model = Tagger(nn.GRU)  # oneDNN has no LSTM in bfloat16 on some CPUs.
    transformed, tokens = apexfx.transform(model, opt_level="O0", inner="eager"), torch.randint(20, (2, 5))
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(transformed(tokens), model(tokens), dtype=torch.bfloat16)
    assert "apexfx.gru" not in transformed.print_readable(print_output=False)


class Translator(nn.Module):
    """(N, T, 8) -> the same, by an encoder and a decoder that are given a mask, and no word about what it is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        options = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**options), 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 1)

    def forward(self, x):
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        other = torch.zeros_like(causal).masked_fill(causal.T != 0, -1e9)
        return self.decoder(x, self.encoder(x, mask=causal), tgt_mask=other) + self.encoder(x, causal, is_causal=True)


@pytest.mark.long
@pytest.mark.parametrize("level", [long("O0"), "O1"])
def test_whether_a_mask_is_causal_is_not_looked_up_in_a_graph(level):
    x, reference = torch.randn(2, 3, 8), Translator()
    reference(x).pow(2).mean().backward()
    model = apexfx.transform(Translator(), opt_level=level, inner="eager", fullgraph=True)
    model(x).pow(2).mean().backward()
    for p, q in zip(model.parameters(), reference.parameters()):
        assert_close(p.grad, q.grad, dtype=torch.float32 if level == "O0" else torch.bfloat16)
    alone, mask = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0), 1), torch.zeros(2, 2)
    transformed = apexfx.transform(alone, opt_level="O0", inner="eager", fullgraph=True)
    assert_close(transformed(x, mask), alone(x, mask), dtype=torch.float32)
