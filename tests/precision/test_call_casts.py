"""Arguments and results of a call are cast in every container; what writes into a copy raises, naming argument and dtype."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import register_pytree_node

import apexfx
from apexfx import amp
from apexfx.precision.call_casts import Cast, CastCall
from tests.small_models import Model
from tests.tables import table

HALF = torch.bfloat16


@dataclasses.dataclass
class Batch:
    x: object
    y: object = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: object


class Node:
    """A container that is registered as a pytree."""

    def __init__(self, x):
        self.x = x


register_pytree_node(Node, lambda node: ([node.x], None), lambda children, _: Node(*children))

Pair = collections.namedtuple("Pair", "x y")

CONTAINERS = {
    "dict": lambda x: {"x": x}, "ordered": lambda x: collections.OrderedDict(x=x),
    "default": lambda x: collections.defaultdict(list, x=x), "user": lambda x: collections.UserDict(x=x), "list": lambda x: [x],
    "tuple": lambda x: (x,), "named": lambda x: Pair(x, None), "deque": lambda x: collections.deque([x]), "set": lambda x: {x},
    "dataclass": Batch, "frozen": Frozen, "pytree": Node, "nested": lambda x: Batch({"a": [(x, None)]}),
    "beside": lambda x: ([], x, {}),
}


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, (type(None), str)):
        values = value.values() if hasattr(value, "values") else value if hasattr(value, "__iter__") else vars(value).values()
        for item in values:
            yield from tensors(item)


def run(forward, *args, **kwargs):
    call = CastCall(args, kwargs, Cast(HALF))
    result = forward(*call.args, **call.kwargs)
    call.check()
    return result


@pytest.mark.parametrize("made", CONTAINERS.values(), ids=CONTAINERS)
def test_every_container(made):
    x = torch.ones(2)
    given = made(x)
    seen = run(lambda given: given, given)
    assert type(seen) is type(given) and seen is not given
    assert [t.dtype for t in tensors(seen)] == [HALF] and [*tensors(given)] == [x] and x.dtype == torch.float32
    back = Cast(torch.float32)(seen)
    assert type(back) is type(given) and [t.dtype for t in tensors(back)] == [torch.float32]
    assert run(lambda given: given, seen) is seen  # nothing to cast: the same object
    for write in (lambda t: t.add_(1), lambda t: t.detach()[:1].zero_(), lambda t: torch.no_grad()(t.copy_)(x)):
        with pytest.raises(RuntimeError, match="writes into argument 'given', a tensor of torch.float32, .* Pass it in"):
            run(lambda given: write(next(tensors(given))), given=given)
        run(lambda given: write(next(tensors(given))), given=seen)  # it is the caller's own
    assert x.tolist() == [1, 1]


WRITES = {
    "setitem": lambda d: d.update(y=1), "replace": lambda d: d.update(x=1), "del": lambda d: d.pop("x"),
    "clear": lambda d: d.clear(), "append": lambda d: d["items"].append(1),
    "insert": lambda d: d["items"].insert(0, d["items"].pop()), "attribute": lambda d: setattr(d["batch"], "y", 3),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_into_a_container_of_copies_raises(write):
    x = torch.ones(2)

    def made():
        return {"x": x, "items": [x, None], "batch": Batch(x)}

    with pytest.raises(RuntimeError, match="writes into a .* in argument 0, with tensors to cast, .* Pass it in torch.bfloat16"):
        run(write, made())
    given = Cast(HALF)(made())
    run(write, given)
    with pytest.raises(AssertionError):
        assert str(given) == str(Cast(HALF)(made()))


def test_one_copy_serves_an_argument_that_is_given_twice():
    x = torch.ones(2)
    assert run(lambda a, b, c: a is b is c[0], x, x, c=[x])


def test_gradients_pass_the_casts():
    x = torch.ones(2, requires_grad=True)
    Cast(torch.float32)(run(lambda x: x["x"] * 3, {"x": x})).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_writes_in_inference_mode_raise():
    with torch.inference_mode():
        for x in (torch.ones(2), torch.inference_mode(False)(torch.ones)(2)):
            assert run(lambda x: x + 1, x).dtype == HALF
            with pytest.raises(RuntimeError, match="writes into argument 0"):
                run(lambda x: x.mul_(2), x)


@pytest.mark.parametrize("write, lost", [(lambda x: x[0].mul_(3), True), (lambda x: x.add_(1), True), (lambda x: x * 2, False)])
@table(1, "compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("made", [lambda x: x, lambda x: {"x": [x]}, lambda x: {"x": (x, None)}], ids=["tensor", "list", "tuple"])
def test_writes_of_a_traced_forward_raise(write, lost, compiler, made):
    def call(given):
        call = CastCall((given,), {}, Cast(HALF))
        result = write(next(iter(call.args[0].values()))[0] if isinstance(given, dict) else call.args[0]).sum()
        call.check()
        return result

    torch._dynamo.reset()
    traced, x = torch.compile(call, backend=compiler, fullgraph=True), torch.ones(2, 3)
    if not lost:
        assert traced(made(x)) == 12
    else:
        with pytest.raises(RuntimeError, match="the forward writes into argument 0, a tensor of torch.float32,"):
            traced(made(x))


def model_of(kind, write):
    """Return a call of a model that computes in half, and casts its inputs."""
    torch.manual_seed(0)
    model = Model(lambda m, x, memory: m.layer(x) + write(memory), layer=nn.Linear(4, 4))
    if kind.startswith("amp"):
        return amp.initialize(model, opt_level=kind[-2:], dtype=HALF, verbosity=0)
    if kind == "transform":
        return apexfx.transform(model, opt_level="O3", dtype=HALF, inner="eager")
    return apexfx.train_step(model, objective=lambda m, x, memory: F.mse_loss(m(x, memory).float(), x), opt_level="O3",
                             dtype=HALF, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), inner="eager")


@table(2, "kind", ["amp O2", "amp O3", "transform", "train_step"])
@pytest.mark.parametrize("write, made", [
    (lambda memory: memory.mul_(2), lambda x: x), (lambda memory: memory["a"][0].add_(1), lambda x: {"a": (x,)}),
    (lambda memory: memory[:1].copy_(memory[1:] + 1), lambda x: x),
], ids=["tensor", "dict", "view"])
def test_a_half_model_that_writes_into_a_float32_argument_is_refused(kind, write, made):
    x, call = torch.ones(2, 4), model_of(kind, write)
    with pytest.raises(RuntimeError, match="writes into argument 1, a tensor of torch.float32, .* Pass it in torch.bfloat16"):
        call(x, made(torch.ones(2, 4)))
    memory = torch.ones(2, 4, dtype=HALF)
    model_of(kind, write)(x, made(memory))
    assert memory[0].tolist() == [2] * 4


@pytest.mark.parametrize("kind", ["amp O2", "transform", "train_step"])
def test_containers_without_anything_to_cast_are_the_callers_own(kind):
    memory = {"ids": torch.arange(3)}
    model_of(kind, lambda memory: memory.setdefault("new", 1))(torch.ones(2, 4), memory)
    assert memory["new"] == 1
