"""What only an unused output depends on has no gradient: `.grad` stays None, and no optimizer moves it."""

import functools
import io
import weakref

import pytest
import torch

import apexfx
from tests.unused_output_models import (
    MODELS,
    Broken,
    BrokenView,
    Checkpointed,
    Frozen,
    Nested,
    Rows,
    Through,
    TwoHeads,
    Written,
    broken,
    loop,
    objective,
    train,
)
from tests.ways import run_of


def run_by(way, model, inner):
    """Return a function of the model, its optimizer, a batch and the outputs to use, which trains by one way."""
    if way in ("transform", "backend"):
        compiled = run_of(way, model, opt_level="O0", inner=inner)
        return lambda _, optimizer, x, used: loop(compiled, optimizer, x, used)
    options = {"objective": broken, "fallback": "transform"} if way == "pieces" else {"objective": objective}
    step_of = functools.cache(lambda optimizer: apexfx.train_step(model, None, optimizer, opt_level="O0", inner=inner,
                                                                  keep_grads=True, **options))
    return lambda _, optimizer, x, used: step_of(optimizer)(x, used)


ALWAYS = {"transform": (Nested, Written, Broken, BrokenView, Through, Rows), "backend": (Broken,), "pieces": (TwoHeads, Broken),
          "step": (TwoHeads,)}
# What a graph of a whole step takes in, and that trains in it.
WHOLE = [cls for cls in MODELS if cls not in (Broken, BrokenView, Through, Rows, Frozen, Checkpointed, Written)]


def _cases():
    for way, always in ALWAYS.items():
        for cls in WHOLE if way == "step" else MODELS:
            yield pytest.param(way, cls, "eager", marks=[pytest.mark.long] if cls not in always else [])
    yield from [pytest.param("transform", cls, "inductor", marks=pytest.mark.long) for cls in (TwoHeads, Broken)]


@pytest.mark.parametrize(("way", "cls", "inner"), [*_cases()], ids=lambda value: getattr(value, "__name__", value))
def test_parameters_train_as_in_eager(way, cls, inner):
    model = cls()
    expected = train(cls(), loop, MODELS[cls])
    history = train(model, run_by(way, model, inner), MODELS[cls])
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


class Features(TwoHeads):
    """Returns what one head is computed of; `put` is called with that at the end of the forward, behind a graph break."""

    put = None

    def forward(self, x):
        h = self.trunk(x).tanh()
        out = self.a(h)
        if self.put:
            torch._dynamo.graph_break()
            self.put[0](h)
        return out, h


HOOKS = [lambda h: h.register_hook(lambda gradient: 0.1 * gradient), lambda h: h.retain_grad()]


@pytest.mark.parametrize("put", HOOKS, ids=["hook", "retain_grad"])
@pytest.mark.parametrize("way", ["transform", "backend"])
def test_no_hook_is_put_on_what_the_backward_goes_past(way, put):
    def made():
        torch.compiler.reset()
        model, options = Features(), {"opt_level": "O0", "inner": "eager"}
        return run_of(way, model, **options)

    out, h = made()(torch.ones(2, 4))
    put(out)
    with pytest.raises(RuntimeError, match="one backward goes past it"):
        put(h)
    torch.save(h, file := io.BytesIO())
    put(torch.load(io.BytesIO(file.getvalue())))
    Features.put = (put,)
    try:
        with pytest.raises(RuntimeError, match="one backward goes past it"):
            made()(torch.ones(2, 4))
    finally:
        Features.put = None


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
