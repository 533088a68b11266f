"""Programs over tokens: attention, recurrence, fine-tuning."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.world.script import Script, Update, program

WORDS, WIDTH, HEADS, LENGTH = 29, 16, 2, 12


class Attention(nn.Module):
    """Causal attention by hand: scores are filled in place, softmax in float32; `rotate` turns queries and keys."""

    def __init__(self, rotate=None):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotate = rotate

    def forward(self, x, padding=None):
        n, length, _ = x.shape
        q, k, v = (part.view(n, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=-1))
        if self.rotate is not None:
            q, k = self.rotate(q), self.rotate(k)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
        if padding is not None:
            scores.masked_fill_(padding[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = scores.float().softmax(dim=-1).type_as(v)
        return self.out((weights @ v).transpose(1, 2).reshape(n, length, WIDTH))


class Decoder(nn.Module):
    """A language model of one block, whose head is its embedding."""

    def __init__(self, rotate=None, positions=True, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH) if positions else None
        self.attentions = nn.ModuleList(Attention(rotate) for _ in range(1))
        self.mlps = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
                                  for _ in range(1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def block(self, attention, mlp, x, padding):
        x = x + attention(x, padding)
        return x + mlp(x)

    def forward(self, tokens, padding=None):
        x = self.embed(tokens)
        if self.position is not None:
            x = x + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for attention, mlp in zip(self.attentions, self.mlps):
            if self.recompute:
                x = checkpoint(self.block, attention, mlp, x, padding, use_reentrant=False)
            else:
                x = self.block(attention, mlp, x, padding)
        return self.head(self.norm(x))


def next_word(model, tokens, padding=None):
    logits = model(tokens[:, :-1], None if padding is None else padding[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def text(step=0, length=LENGTH, n=4):
    return torch.randint(1, WORDS, (n, length))


def language_model(model, batch=lambda step, carried: (text(),), objective=next_word):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
                                  lr=0.01, eps=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return Script(model, [Update(objective, optimizer, clip=1.0)], batch, after=lambda *_: schedule.step())


@program()
def attention_with_masks():
    def batch(step, carried):
        tokens = text()
        padding = torch.arange(LENGTH) >= torch.randint(6, LENGTH, (4, 1))
        return tokens, padding

    return language_model(Decoder(), batch)


@program()
def checkpointed_decoder():
    return language_model(Decoder(recompute=True))


def angles(length, size):
    frequencies = 1.0 / (10000 ** (torch.arange(0, size, 2).float() / size))
    return torch.outer(torch.arange(length).float() * 40, frequencies)


@program()
def rope_by_complex_numbers():
    def rotate(x):
        turn = torch.polar(torch.ones(x.shape[-2], x.shape[-1] // 2), angles(x.shape[-2], x.shape[-1]))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)

    return language_model(Decoder(rotate, positions=False))


@program()
def rope_by_halves():
    def rotate(x):
        turn = angles(x.shape[-2], x.shape[-1])
        turn = torch.cat([turn, turn], dim=-1)
        first, second = x.chunk(2, dim=-1)
        return x * turn.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * turn.sin().to(x.dtype)

    return language_model(Decoder(rotate, positions=False))


@program()
def rope_in_place():
    def rotate(x):
        turn = torch.einsum("i,j->ij", torch.arange(x.shape[-2]).float() * 40, angles(2, x.shape[-1])[1] / 40)
        out = torch.empty_like(x)
        out[..., ::2] = x[..., ::2] * turn.cos() - x[..., 1::2] * turn.sin()
        out[..., 1::2] = x[..., ::2] * turn.sin() + x[..., 1::2] * turn.cos()
        return out

    return language_model(Decoder(rotate, positions=False))


class Translator(nn.Module):
    """A GRU reads the source, another one attends to it; `pack` leaves the padding out."""

    def __init__(self, pack):
        super().__init__()
        self.pack = pack
        self.source, self.target = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.encoder, self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, source, target):
        padding = source == 0
        x = self.source(source)
        if self.pack:
            packed = nn.utils.rnn.pack_padded_sequence(x, (~padding).sum(1).cpu(), batch_first=True, enforce_sorted=False)
            states, last = self.encoder(packed)
            states = nn.utils.rnn.pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])[0]
        else:
            states, last = self.encoder(x)
        queries, _ = self.decoder(self.target(target), last)
        scores = torch.bmm(queries, states.transpose(1, 2))
        scores = scores.masked_fill(padding[:, None, :], -1e4)
        return self.head(torch.cat([queries, F.softmax(scores, -1) @ states], -1))


def translation(pack):
    model = Translator(pack)

    def batch(step, carried):
        source, target = text(), text()
        source[torch.arange(LENGTH) >= torch.tensor([[LENGTH], [9], [7], [10]])] = 0
        target[:2, 8:] = 0
        return source, target

    def objective(model, source, target):
        logits = model(source, target[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), target[:, 1:], ignore_index=0, label_smoothing=0.1)

    return Script(model, [Update(objective, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3), clip=1.0)], batch)


@program()
def translation_with_padding():
    return translation(pack=False)


@program(train_step="pack_padded_sequence.*fallback='transform'")
def translation_with_packing():
    return translation(pack=True)


class WordLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, hidden):
        out, hidden = self.lstm(self.embed(tokens), hidden)
        return self.head(out), hidden


@program()
def word_lstm():
    """The hidden state goes on from one batch to the next, detached."""
    model = WordLSTM()

    def batch(step, hidden):
        tokens = text(length=4, n=LENGTH)
        if hidden is None:
            hidden = (torch.zeros(2, 4, WIDTH), torch.zeros(2, 4, WIDTH))
        return tokens[:-1], tokens[1:], tuple(h.detach() for h in hidden)

    def objective(model, tokens, targets, hidden):
        logits, hidden = model(tokens, hidden)
        return F.cross_entropy(logits.view(-1, WORDS), targets.reshape(-1)), hidden

    return Script(model, [Update(objective, torch.optim.SGD(model.parameters(), lr=1.0), clip=0.25)], batch)


@program()
def truncated_backpropagation():
    """A cell in a loop over time; its state is detached every third word, and the loss is that of all words."""
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.cell, self.head = nn.Embedding(WORDS, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

        def forward(self, tokens):
            h, losses = tokens.new_zeros(len(tokens), WIDTH, dtype=torch.float32), []
            for t in range(tokens.shape[1] - 1):
                if t % 3 == 0:
                    h = h.detach()
                h = self.cell(self.embed(tokens[:, t]), h)
                losses.append(F.cross_entropy(self.head(h), tokens[:, t + 1]))
            return torch.stack(losses).mean()

    model = Cells()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-3)
    return Script(model, [Update(lambda model, tokens: model(tokens), optimizer)], lambda step, carried: (text(length=7),))


@program()
def curriculum():
    """Longer sequences and smaller batches from step to step."""
    return language_model(Decoder(), lambda step, carried: (text(length=4 + 2 * step, n=6 - step),))


class LoRA(nn.Module):
    """A frozen linear layer and low-rank additions by name."""

    def __init__(self, base):
        super().__init__()
        self.base, self.active = base.requires_grad_(False), "first"
        self.down = nn.ModuleDict({name: nn.Linear(base.in_features, 2, bias=False) for name in ("first", "second")})
        self.up = nn.ModuleDict({name: nn.Linear(2, base.out_features, bias=False) for name in ("first", "second")})

    def forward(self, x):
        return self.base(x) + self.up[self.active](self.down[self.active](x)) * 2.0


@program()
def lora_with_adapters():
    """Two adapters over one frozen model, trained in turns."""
    model = Decoder().requires_grad_(False)
    for attention in model.attentions:
        attention.qkv = LoRA(attention.qkv)

    def switch(model, step):
        for module in model.modules():
            if isinstance(module, LoRA):
                module.active = "second" if step % 2 == 0 else "first"

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, eps=1e-3)
    return Script(model, [Update(next_word, optimizer)], lambda step, carried: (text(),), after=switch)


class Mixture(nn.Module):
    """Two of four experts for each token: by weights of all (`dense`), or by the rows that each one gets."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense
        self.embed, self.gate, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, WORDS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH)) for _ in range(4))

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        probabilities = self.gate(x).float().softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        share = F.one_hot(chosen, 4).float().sum(1).mean(0)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.dense:
                out = out + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
            else:
                rows, place = torch.where(chosen == i)
                out.index_add_(0, rows, (expert(x[rows]) * weights[rows, place, None]).to(out.dtype))
        return self.head(x + out), 4 * (share * probabilities.mean(0)).sum()


def mixture(dense):
    model = Mixture(dense)

    def objective(model, tokens):
        logits, balance = model(tokens)
        return F.cross_entropy(logits, tokens.roll(-1, 1).flatten()) + 0.01 * balance

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    return Script(model, [Update(objective, optimizer)], lambda step, carried: (text(),))


@program()
def mixture_of_experts_by_weights():
    return mixture(dense=True)


@program()
def mixture_of_experts_by_rows():
    return mixture(dense=False)


@program(train_step="_ctc_loss.*fallback='transform'")
def speech_by_ctc():
    """Convolutions over a spectrogram, a bidirectional LSTM, and a loss of unequal lengths."""
    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(8, WIDTH, 3, stride=2, padding=1), nn.BatchNorm1d(WIDTH)
            self.lstm, self.head = nn.LSTM(WIDTH, 8, bidirectional=True, batch_first=True), nn.Linear(16, WORDS)

        def forward(self, x):
            x = F.hardtanh(self.norm(self.conv(x)), 0, 20, inplace=True)
            return self.head(self.lstm(x.transpose(1, 2))[0])

    model = Recognizer()

    def objective(model, sound, words, frames, lengths):
        log_probabilities = model(sound).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probabilities.float(), words, frames, lengths, zero_infinity=True)

    def batch(step, carried):
        return torch.randn(4, 8, 40), text(length=6), torch.tensor([20, 18, 16, 20]), torch.tensor([6, 5, 3, 6])

    return Script(model, [Update(objective, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True))], batch)


@program(train_step="is sparse.*sparse=False")
def bag_of_words_with_sparse_gradients():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, 3)

        def forward(self, words, offsets):
            return self.head(self.bag(words, offsets))

    model = Bag()
    return Script(model, [Update(lambda model, words, offsets, labels: F.cross_entropy(model(words, offsets), labels),
                                 torch.optim.SGD(model.parameters(), lr=0.5))],
                  lambda step, carried: (text(n=1)[0], torch.tensor([0, 3, 4, 9]), torch.randint(3, (4,))))
