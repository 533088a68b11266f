"""What only an unused output depends on has no gradient: `.grad` stays None, and no optimizer moves it."""

import copy
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx


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
    OwnFunction: ((0,), (1,), (0, 1)),
    Recurrent: ((0,), (1,), (2,), (1, 2)),
}


def objective(model, x, used):
    outputs = leaves(model(x))
    return sum((outputs[i] * (i + 1)).sum() for i in used)


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
    optimizer.zero_grad()
    objective(model, x, used).backward()
    optimizer.step()


def _transform(model, inner):
    compiled = apexfx.transform(model, opt_level="O0", inner=inner)
    return lambda _, optimizer, x, used: loop(compiled, optimizer, x, used)


def _backend(model, inner):
    compiled = torch.compile(model, backend="apex", options={"opt_level": "O0", "inner": inner})
    return lambda _, optimizer, x, used: loop(compiled, optimizer, x, used)


def _pieces(model, inner):
    def broken(model, x, used):
        torch._dynamo.graph_break()
        return objective(model, x, used)

    return _step(model, inner, broken, fallback="transform")


def _step(model, inner, objective=objective, **options):
    steps = []

    def run(model, optimizer, x, used):
        if not steps:
            steps.append(apexfx.train_step(model, None, optimizer, objective=objective, opt_level="O0", inner=inner,
                                           keep_grads=True, **options))
        steps[0](x, used)

    return run


WAYS = {"transform": _transform, "backend": _backend, "pieces": _pieces, "step": _step}
ALWAYS = {"transform": (), "backend": (TwoHeads, Broken), "pieces": (TwoHeads, Nested, Broken), "step": (TwoHeads, Nested)}
WHOLE = [cls for cls in MODELS if cls not in (Broken, BrokenView, Frozen, Checkpointed, Written)]  # in one graph, by these outputs


def _cases():
    for way, always in ALWAYS.items():
        for cls in WHOLE if way == "step" else MODELS:
            yield pytest.param(way, cls, "eager", marks=[pytest.mark.long] if always and cls not in always else [])
    yield from [("transform", cls, "inductor") for cls in (TwoHeads, Broken)]


@pytest.mark.parametrize(("way", "cls", "inner"), [*_cases()], ids=lambda value: getattr(value, "__name__", value))
def test_parameters_train_as_in_eager(way, cls, inner):
    model = cls()
    expected = train(cls(), loop, MODELS[cls])
    history = train(model, WAYS[way](model, inner), MODELS[cls])
    for (got, *others), (want, *their_others) in zip(history, expected, strict=True):
        assert got.keys() == want.keys()
        torch.testing.assert_close((got, *others), (want, *their_others))


def test_backwards_through_one_output_after_the_other_add_up():
    model, other = TwoHeads(), TwoHeads()
    model = apexfx.transform(model, opt_level="O0", inner="eager")
    x = torch.randn(2, 4)
    for net in (model, other):
        a, b = net(x)
        a.sum().backward(retain_graph=True)
        assert net.b.weight.grad is None
        b.sum().backward(retain_graph=True)
        a.sum().backward()
    torch.testing.assert_close([p.grad for p in (model.trunk.weight, model.a.weight, model.b.weight)],
                               [p.grad for p in (other.trunk.weight, other.a.weight, other.b.weight)])


def test_autograd_grad_raises_or_returns_none():
    model = apexfx.transform(TwoHeads(), opt_level="O0", inner="eager")
    a, _ = model(torch.randn(2, 4))
    wanted = (model.trunk.weight, model.b.weight)
    assert [g is None for g in torch.autograd.grad(a.sum(), wanted, allow_unused=True, retain_graph=True)] == [False, True]
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(a.sum(), wanted)


def test_a_backward_that_raised_hides_nothing_of_the_next():
    model = apexfx.transform(TwoHeads(), opt_level="O0", inner="eager")
    a, b = model(torch.randn(2, 4))

    def fail(_):
        raise ValueError("once")

    handle = model.trunk.weight.register_hook(fail)
    with pytest.raises(ValueError, match="once"):
        a.sum().backward(retain_graph=True)
    handle.remove()
    model.zero_grad()
    (a.sum() + b.sum()).backward()
    assert all(p.grad is not None for p in (model.a.weight, model.b.weight, model.trunk.weight))


def test_an_input_that_requires_a_gradient_has_none():
    class Sides(TwoHeads):
        def forward(self, x, y):
            return self.a(x), self.b(y)

    model = apexfx.transform(Sides(), opt_level="O0", inner="eager")
    x, y = torch.randn(2, 2, 4).requires_grad_().unbind()
    x.retain_grad()
    y.retain_grad()
    model(x, y)[0].sum().backward()
    assert x.grad is not None and y.grad is None


def test_nothing_of_a_run_is_kept():
    model = apexfx.transform(TwoHeads(), opt_level="O0", inner="eager")
    a, b = model(torch.randn(2, 4))
    node = weakref.ref(a.grad_fn)
    a.sum().backward()
    del a, b
    assert node() is None
