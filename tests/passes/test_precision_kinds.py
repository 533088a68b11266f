"""Programs in which a cast is easily put wrong, as tables of their kinds: every form, at every level, through every entry."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx import amp
from apexfx.testing import assert_close
from tests.small_models import Model
from tests.tables import table

LEVELS = ("O0", "O1", "O2", "O3")
ENTRIES = ("transform", "backend", "train_step", "amp")
ROWS = 3


def _set(h):
    h[:, 0] = 0.5
    return h


def _through_a_view(h):
    h.view(-1).mul_(2)
    return h


# In-place writes, and casts that change nothing where `h` is float32: `h` and its cast are one tensor there.
WRITES = {
    "relu_": lambda h: h.relu_(), "nn.ReLU": nn.ReLU(inplace=True), "add_": lambda h: h.add_(1), "setitem": _set,
    "masked_fill_": lambda h: h.masked_fill_(h > 0, 0.25), "view": _through_a_view, "copy_": lambda h: h.copy_(h * 2),
    "dropout": lambda h: F.dropout(h, 0.0, inplace=True),
}  # fmt: skip
CASTS = {
    "float": lambda h, x: h.float(), "to(dtype)": lambda h, x: h.to(torch.float32), "to(x.dtype)": lambda h, x: h.to(x.dtype),
    "to(x)": lambda h, x: h.to(x), "type_as": lambda h, x: h.type_as(x), "type": lambda h, x: h.type(torch.float32),
    "double": lambda h, x: h.double(), "half": lambda h, x: h.to(torch.bfloat16),
}  # fmt: skip


# Each write with two of the casts, and each cast with two of the writes.
PAIRS = [(write, [*CASTS.values()][(place + shift) % len(CASTS)])
         for shift in (0, 3) for place, write in enumerate(WRITES.values())]


def writes_before_casts(m, x):
    parts = [cast(write(m.a(x)), x).softmax(-1).to(x.dtype).sum(0) for write, cast in PAIRS]
    return m.b(torch.stack(parts))


def writes_after_casts(m, x):
    parts = [write(cast(m.a(x), x)).float().sum(0) for write, cast in PAIRS]
    return m.b(torch.stack(parts))


def _einsum(equation):
    return lambda t, f: torch.einsum(equation, t, f)


# Products that sum over nothing: positions above 256 are not to be told apart in bfloat16.
PRODUCTS = {
    "outer": torch.outer, "ger": torch.ger, "method": lambda t, f: t.outer(f), "i,j->ij": _einsum("i,j->ij"),
    "i, j -> i j": _einsum("i, j -> i j"), "i,j": _einsum("i,j"), "mul": lambda t, f: t[:, None] * f,
    "bi,j->bij": lambda t, f: torch.einsum("bi,j->bij", t[None], f)[0],
}  # fmt: skip


def products_that_sum_over_nothing(m, x):
    positions, frequencies = torch.arange(2048, 2048 + len(x)).float(), 1 / 10 ** torch.arange(4.0)
    return m.b(torch.stack([product(positions, frequencies).cos() for product in PRODUCTS.values()])) + m.a(x)


def _written(target, write, source):
    target = target.clone()
    write(target, source)
    return target


def _put(target, index, source):
    target[index] = source


INDEX = torch.tensor([2, 0])
ROWS_OF_INDEX, TWO = INDEX[:, None].expand(2, 4), (torch.tensor([0, 1]), torch.tensor([1, 3]))
# Writes of `h`, perhaps half, into memory that is float32 or half itself.
ASSIGNMENTS = {
    "index": lambda t, h: _put(t, INDEX, h[:2]), "two indices": lambda t, h: _put(t, TWO, h[0, :2]),
    "all": lambda t, h: _put(t, ..., h),
    "slice": lambda t, h: _put(t, slice(2), h[:2]), "index_put_": lambda t, h: t.index_put_((INDEX,), h[:2]),
    "accumulate": lambda t, h: t.index_put_((INDEX,), h[:2], accumulate=True),
    "index_add_": lambda t, h: t.index_add_(0, INDEX, h[:2]), "index_copy_": lambda t, h: t.index_copy_(0, INDEX, h[:2]),
    "copy_": lambda t, h: t.copy_(h), "scatter_": lambda t, h: t.scatter_(0, ROWS_OF_INDEX, h[:2]),
    "scatter_add_": lambda t, h: t.scatter_add_(0, ROWS_OF_INDEX, h[:2]),
    "scatter_reduce_": lambda t, h: t.scatter_reduce_(0, ROWS_OF_INDEX, h[:2], "sum"),
    "masked_scatter_": lambda t, h: t.masked_scatter_(torch.ones(3, 4, dtype=torch.bool), h),
}  # fmt: skip


def assignments(m, x):
    h, memory = m.a(x), torch.ones(ROWS, 4)
    parts = [_written(target, write, source).to(x.dtype)
             for write in ASSIGNMENTS.values() for target, source in ((memory, h), (h, memory))]
    return m.b(torch.stack(parts))


func = torch.func
# Transforms of what is computed in half outside of them: a cast inside of one would belong to its level.
TRANSFORMS = {
    "grad": lambda f, h: func.grad(lambda t: f(t).sum())(h), "jacrev": lambda f, h: func.jacrev(f)(h[0]).sum(0),
    "grad_and_value": lambda f, h: sum(func.grad_and_value(lambda t: f(t).sum())(h)),
    "has_aux": lambda f, h: sum(func.grad(lambda t: (f(t).sum(), t), has_aux=True)(h)),
    "vjp": lambda f, h: func.vjp(f, h)[1](h)[0], "jvp": lambda f, h: func.jvp(f, (h,), (h,))[1],
    "grad of grad": lambda f, h: func.grad(lambda t: func.grad(lambda u: f(u).sum())(t).square().sum())(h),
    "vmap": lambda f, h: func.vmap(f)(h), "vmap of grad": lambda f, h: func.vmap(func.grad(lambda t: f(t).sum()))(h),
}  # fmt: skip


def transforms(m, x):
    h = m.a(x)
    parts = [transform(lambda t: m.a(t).tanh(), h).float().reshape(-1, 4).sum(0) for transform in TRANSFORMS.values()]
    return m.b(torch.stack(parts))


def a_loss_of_its_own(m, x):
    return m.b(m.a(x)).sum()


FORWARDS = [writes_before_casts, writes_after_casts, products_that_sum_over_nothing, assignments, transforms, a_loss_of_its_own]


def outcome(entry, level, model, x):
    """Return loss and gradients of one backward or step."""
    if entry == "train_step":
        step = apexfx.train_step(model, objective=lambda m, x: m(x).float().square().mean(), inner="eager", opt_level=level,
                                 optimizer=torch.optim.SGD(model.parameters(), lr=0.1), keep_grads=True)
        return step(x), [p.grad for p in model.parameters()]
    options = {"opt_level": level, "inner": "eager"}
    if entry == "transform":
        model = apexfx.transform(model, **options)
    elif entry == "backend":
        model = torch.compile(model, backend="apex", options=options)
    elif entry == "amp":
        model = amp.initialize(model, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


# A step has the whole of a program in its graph, transform() and the backend its forward alone; O1 casts what the others do.
@table(3, ("forward", "entry", "level"), [
    pytest.param(forward, entry, level, marks=() if (entry, level) in (("train_step", "O1"), ("amp", "O1")) else pytest.mark.long,
                 id=f"{forward.__name__}-{entry}-{level}")
    for forward in FORWARDS for entry in ENTRIES for level in LEVELS
    if entry != "amp" or level in ("O0", "O1")])  # or the model is half, and its own casts no longer fit together
def test_every_form_at_every_level(forward, entry, level):
    torch.manual_seed(0)
    model, x = Model(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), torch.randn(ROWS, 4)
    loss, gradients = outcome("eager", None, copy.deepcopy(model), x)
    if forward is assignments and level == "O3" and entry != "backend":  # the same
        with pytest.raises(RuntimeError, match="dtype"):
            outcome(entry, level, model, x)
        return
    of_level = outcome(entry, level, model, x)
    dtype = torch.float32 if level == "O0" else torch.bfloat16
    assert_close(of_level[0], loss, dtype=dtype, scale=4)
    for gradient, expected in zip(of_level[1], gradients):
        assert_close(gradient.float(), expected, dtype=dtype, scale=8)


# Ops of which the CPU has no kernel of low precision, by the names that precision= takes.
WITHOUT_KERNEL = {"cdist": lambda net, x: torch.cdist(net.a(x), net.a(x)), "pdist": lambda net, x: F.pdist(net.a(x))}


@pytest.mark.parametrize("entry", ["transform", "train_step"])
@pytest.mark.parametrize("name", WITHOUT_KERNEL)
def test_an_op_without_a_kernel_is_named_with_the_option_that_is_for_it(name, entry):
    def loss(**options):
        model, options = Model(WITHOUT_KERNEL[name], a=nn.Linear(4, 4)), {"opt_level": "O2", "inner": "eager", **options}
        if entry == "transform":
            return apexfx.transform(model, **options)(torch.randn(ROWS, 4)).float().sum()
        return apexfx.train_step(model, lambda out: out.float().sum(), torch.optim.SGD(model.parameters(), lr=0.1),
                                 **options)(torch.randn(ROWS, 4))

    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'") as raised:
        loss()
    op, option = raised.value.__notes__
    assert f"raised by aten._{name}_forward" in op and f"precision={{{name!r}: 'float32'}} computes it" in option
    assert loss(precision={name: "float32"}).isfinite()
