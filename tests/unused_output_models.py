"""Models with several outputs, some of which their training leaves unused, and the training itself."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.small_models import take_step


class _Trunk(nn.Module):
    """What every model below has; `forward` says which heads there are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(2, 4))


class TwoHeads(_Trunk):
    def forward(self, x):
        h = self.trunk(x).relu()
        return self.a(h), self.b(h)


class Output(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Nested(_Trunk):
    def forward(self, x):
        h = self.trunk(x)
        return {"heads": [self.a(h), Output(self.b(h), self.c(h))], "size": 3}


class Auxiliary(_Trunk):
    def forward(self, x):
        h = self.trunk(x)
        return self.b(self.a(h)), h, h.detach(), self.scale * h


class Deep(_Trunk):
    def forward(self, x):
        h = self.a(self.trunk(x).tanh()).tanh()
        return self.b(h), self.c(h.detach())


class Checkpointed(_Trunk):
    def forward(self, x):
        h = checkpoint(self.trunk, x, use_reentrant=False)
        return tuple(checkpoint(lambda h: (self.a(h), self.b(h).tanh()), h, use_reentrant=False))


class TimesZero(_Trunk):
    """A gradient of zeros is one, where the path to it is used."""

    def forward(self, x):
        h = self.trunk(x)
        return self.a(h) + 0 * self.b(h) + self.scale.round(), self.c(h)


class Views(_Trunk):
    """Outputs that are views of one tensor, or of an input; one tensor twice."""

    def forward(self, x):
        h, y = self.trunk(x), self.a(x)
        z = self.b(x)
        return h[0], h[1:], y, y, z.view(-1), x.view(-1)


class Written(_Trunk):
    """Outputs written in place, through views too, and a buffer that carries what is in no output."""

    def forward(self, x):
        h = torch.zeros(2, 4)
        h[0] = self.a(x)[0]
        y = self.b(x)
        y[1].mul_(self.scale)
        self.seen.copy_(self.c(x).detach())
        return h, y, self.trunk(x)


class NoGrad(_Trunk):
    def forward(self, x):
        h = self.trunk(x)
        with torch.no_grad():
            quiet = self.b(h)
        return self.a(h), quiet, self.c(h)


class Frozen(_Trunk):
    def __init__(self):
        super().__init__()
        self.b.weight.requires_grad_(False)

    def forward(self, x):
        return self.a(x), self.b(x)


class Broken(_Trunk):
    """Several graphs: what the second does not use, the first learns of."""

    def forward(self, x):
        h, g = self.trunk(x), self.a(x)
        torch._dynamo.graph_break()
        y = self.b(h), self.c(g)
        torch._dynamo.graph_break()
        return y[0] * self.scale, y[1] + 1


class BrokenView(_Trunk):
    """... and writes."""

    def forward(self, x):
        h = self.trunk(x)
        view, g = h[0], self.a(x)
        torch._dynamo.graph_break()
        h.mul_(2)
        h[1] = self.c(x)[0]
        return self.b(h), view + 1, g


class Through(_Trunk):
    """A view of what the first graph computes is an output of the second, or is written by it."""

    def forward(self, x):
        h, g = self.trunk(x), self.a(x)
        row = g[0]
        torch._dynamo.graph_break()
        row.mul_(self.scale)
        return self.b(h), h.view(-1), self.c(x), row.sum(), g[1]


class Rows(_Trunk):
    """Views of what the first graph computes are all that the second has of it, and it writes one."""

    def forward(self, x):
        g = self.a(x)
        row, other = g[0], g[1]
        torch._dynamo.graph_break()
        row.mul_(self.scale)
        return self.b(x), self.c(x), row + 1, other + 1


class _NoGradientOfCode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, code):
        return x + code.detach()

    @staticmethod
    def backward(ctx, g):
        return g, None


class OwnFunction(_Trunk):
    def forward(self, x):
        h = self.trunk(x)
        return _NoGradientOfCode.apply(self.a(h), self.scale), (self.scale - h.detach()).square()


class Recurrent(_Trunk):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, 4, num_layers=2)

    def forward(self, x):
        y, h = self.cell(x)
        return self.a(y), self.b(h[1]), self.c(h[0])


def leaves(output):
    return [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]


# Each with the outputs, of those that have gradients, that the steps use.
MODELS = {
    TwoHeads: ((0,), (1,), (0, 1), (0,)),
    Nested: ((0,), (2,), (1, 2)),
    Auxiliary: ((1,), (0,), (2,), (0, 2)),
    Deep: ((0,), (1,), (0,)),
    Checkpointed: ((0,), (1,), (0, 1)),
    TimesZero: ((0,), (1,)),
    Views: ((0,), (1, 3), (2,), (4,)),
    Written: ((0,), (1,), (2,), (0, 1)),
    NoGrad: ((0,), (1,)),
    Frozen: ((0,), (1,), (0,)),
    Broken: ((0,), (1,), (0, 1), (0,)),
    BrokenView: ((0,), (1,), (2,), (1, 2)),
    Through: ((0,), (1,), (2,), (3,), (4,)),
    Rows: ((0,), (1,), (0, 2)),
    OwnFunction: ((0,), (1,), (0, 1)),
    Recurrent: ((0,), (1,), (2,), (1, 2)),
}


def objective(model, x, used):
    outputs = leaves(model(x))
    return sum((outputs[i] * (i + 1)).sum() for i in used)


def broken(model, x, used):
    torch._dynamo.graph_break()
    return objective(model, x, used)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def train(model, run, steps):
    """Return, after each step, what there is to compare: gradients, parameters, optimizer state, buffers."""
    optimizer, history = optimizer_of(model), []
    torch.manual_seed(1)
    for used in steps:
        run(model, optimizer, torch.randn(2, 4), used)
        state = [held if (held := optimizer.state[p]) and held["step"] else {} for p in model.parameters()]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        history.append(copy.deepcopy((gradients, list(model.parameters()), state, list(model.buffers()))))
    return history


def loop(model, optimizer, x, used):
    take_step(optimizer, objective(model, x, used))
