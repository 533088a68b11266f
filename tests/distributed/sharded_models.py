"""Small models under fully_shard, and FSDP2's own loop beside the training step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import apexfx


class Attention(nn.Module):
    """Pre-norm attention and MLP of a small GPT; its biases have as many rows as there are channels."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """Embedding tied to the head, both in the root's group."""

    def __init__(self, width=6, words=11):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(5, width) * 0.1)
        self.blocks = nn.ModuleList(Attention(width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x).flatten(0, 1)

    @staticmethod
    def batch(generator):
        return torch.randint(0, 11, (8, 5), generator=generator), torch.randint(0, 11, (8, 5), generator=generator)

    @staticmethod
    def loss(output, targets):
        return F.cross_entropy(output, targets.flatten())


class Net(nn.Module):
    """A model over 7 numbers that names its blocks `blocks`."""

    def __init__(self, *blocks, head=None):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(7, 5), nn.ModuleList(blocks), head or nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @staticmethod
    def batch(generator):
        return torch.randn(8, 7, generator=generator), torch.randint(0, 3, (8,), generator=generator)

    loss = staticmethod(F.cross_entropy)


class CNN(Net):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(2, 5, 3), nn.Sequential(nn.Flatten(), nn.Linear(5 * 4, 3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()) for _ in range(2))

    @staticmethod
    def batch(generator):
        return torch.randn(8, 2, 4, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)


class Odd(nn.Module):
    """Reads its weights transposed, cut and by `parameters()`; a scale of one row, and one that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 5) * 0.3), nn.Parameter(torch.randn(5, 3) * 0.3)
        self.scale, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4, 2))
        self.cut = nn.Parameter(torch.randn(2, 5, 3) * 0.3)

    def forward(self, x):
        x = x @ self.a.t() @ self.b.permute(1, 0) * self.scale + (x @ self.cut[1, :, :2]).sum() * 0.1
        return x + 0.01 * sum(p.square().sum() for name, p in self.named_parameters() if name != "unused")


class Frozen(nn.Module):
    """Frozen and trained parameters in one group; a frozen one is of another dtype, and read under no_grad first."""

    def __init__(self):
        super().__init__()
        self.layer, self.fixed, self.wide = nn.Linear(5, 5), nn.Linear(5, 5), nn.Parameter(torch.eye(5, dtype=torch.float64))
        self.fixed.requires_grad_(False)
        self.wide.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            features = (self.fixed(x).double() @ self.wide).float()
        return self.layer(features + x) + self.fixed(x)


class Checkpoints(Net):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Lists(Net):
    """Has groups of several modules, which are gathered and dropped together."""

    def groups(self):
        return [self.blocks[0], [self.first, self.blocks[1]], [self.blocks[2], self.head]]


class Sequence(nn.Module):
    """Layers that hold their weights in lists, and read them by other ways than attributes."""

    def __init__(self):
        super().__init__()
        self.lstm, self.attention = nn.LSTM(5, 5, batch_first=True), nn.MultiheadAttention(5, 1, batch_first=True)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))

    def forward(self, x):
        h, _ = self.lstm(x.unsqueeze(1))
        return self.scaled(self.attention(h, h, h)[0].squeeze(1))


class AllFrozen(nn.Linear):
    def __init__(self):
        super().__init__(5, 5)
        self.requires_grad_(False)


def perceptron():
    return nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 5))


MODELS = {
    "gpt": GPT,
    "cnn": CNN,
    "mlp": lambda: Net(perceptron(), perceptron()),
    "odd": lambda: Net(Odd()),
    "frozen": lambda: Net(Frozen(), AllFrozen()),
    "few rows": lambda: Net(nn.Linear(5, 1), nn.Linear(1, 2), nn.Linear(2, 5)),
    "no blocks": lambda: Net(),
    "checkpoints": lambda: Checkpoints(perceptron(), perceptron(), perceptron()),
    "lists": lambda: Lists(perceptron(), perceptron(), perceptron()),
    "sequence": lambda: Net(Sequence()),
    "float64": lambda: Net(perceptron()).double(),
}


def sharded(name, **options):
    """Return the model of this name, as people shard one."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for group in model.groups() if isinstance(model, Lists) else model.blocks:
        fully_shard(group, **options)
    return fully_shard(model, **options)


def batches(model, count, rank=0, world_size=1):
    """Return this rank's part of each batch; inputs are of the model's dtype."""
    generator = torch.Generator().manual_seed(1)
    whole = [model.batch(generator) for _ in range(count)]
    dtype = next(p.dtype for p in model.parameters())
    parts = [[x.chunk(world_size)[rank] for x in batch] for batch in whole]
    return [[x.to(dtype) if x.is_floating_point() else x for x in batch] for batch in parts]


def train(model, optimizer, data, max_grad_norm=None):
    """Train as a loop does; return the losses."""
    losses = []
    for inputs, targets in data:
        loss = model.loss(model(inputs), targets)
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def plain(name):
    """Return the same model, whole."""
    torch.manual_seed(0)
    return MODELS[name]()


def whole(tensors):
    """Return {name: value} of DTensors, or others, whole."""
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in tensors.items()}


class Scaled(apexfx.Part):
    """Divides each gradient by its norm, and keeps means of gradients, and the norms."""

    reads_norms, by_element = True, True

    def slots(self):
        return apexfx.Slot("mean", each="tensor"), apexfx.Slot("norms", each="number")

    def apply(self, end):
        end.slot("norms").copy_(end.norms)
        for mean, g in zip(end.slots("mean"), end.gradients()):
            mean.lerp_(g.float(), 0.5)
        end.set_gradients([g / (norm + 1).to(g.dtype) for g, norm in zip(end.gradients(), end.norms.unbind())])


def with_parts():
    """Return options: averages, a part of one's own, gradients that are kept, and a safeguard."""
    return {"ema": apexfx.EMA(0.9), "parts": [Scaled()], "max_grad_norm": 0.05, "keep_grads": True,
            "safeguard": apexfx.Safeguard(spike_factor=9.0)}


def same_ends(theirs, ours):
    """Compare two steps of these options, and the models, which are float64."""
    grads = [{name: p.grad for name, p in step.model.named_parameters()} for step in (theirs, ours)]
    averages = [step.state_dict()["ema"]["averages"] for step in (theirs, ours)]
    for expected, own in ((theirs.model.state_dict(), ours.model.state_dict()), grads, averages):
        torch.testing.assert_close(whole(own), whole(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(whole(ours.slot("mean")), theirs.slot("mean"))
    torch.testing.assert_close(ours.slot("norms"), theirs.slot("norms"))
