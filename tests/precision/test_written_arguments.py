"""What a forward writes into its arguments arrives, and what it returns of them is theirs, where a call casts."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch.utils._pytree import register_pytree_node

from apexfx.graph.mutation import written
from apexfx.precision.written_arguments import Cast, CastCall, write_back

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


def run(forward, *args, outputs=None, **kwargs):
    call, result = CastCall(args, kwargs), None
    args, kwargs = call.enter(Cast(HALF))
    try:
        result = forward(*args, **kwargs)
    finally:
        result = call.leave(result, outputs)
    return result


@pytest.mark.parametrize("made", [
    lambda x: {"x": x}, lambda x: collections.OrderedDict(x=x), lambda x: collections.defaultdict(list, x=x),
    lambda x: collections.UserDict(x=x), lambda x: [x], lambda x: (x,), lambda x: Pair(x, None), lambda x: collections.deque([x]),
    lambda x: {x}, Batch, Frozen, Node, lambda x: Batch({"a": [(x, None)]}), lambda x: ([], x, {}),
])  # fmt: skip
def test_a_write_into_a_tensor_reaches_it_in_every_container(made):
    x = torch.tensor([1.0, 1 + 2**-20])
    container = made(x)

    def forward(container):
        [seen] = tensors(container)
        assert seen.dtype == HALF
        seen[0] = 3
        return container, seen

    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif not isinstance(value, (type(None), str)):
            values = value.values() if hasattr(value, "values") else value if hasattr(value, "__iter__") else vars(value).values()
            for item in values:
                yield from tensors(item)

    out, same = run(forward, container)
    assert out is container and same is x and [*tensors(container)] == [x]
    assert x.tolist() == [3.0, 1 + 2**-20]  # what was not written keeps every bit


def test_what_is_put_into_a_container_arrives():
    x, y = torch.ones(2), torch.ones(2).to(HALF)
    mapping, items, batch = collections.defaultdict(list, x=x, old=x), [x, y], Batch(x)

    def forward(mapping, items, *, batch):
        mapping["new"].append(mapping["x"])
        mapping["view"], mapping["half"] = mapping["x"][:1], mapping["x"] * 2
        del mapping["old"]
        items.insert(0, items.pop())
        items.append({"deep": (items[1], mapping["half"])})
        batch.y, batch.x = batch.x, None
        return mapping["half"], y

    half, same = run(forward, mapping, items, batch=batch, outputs=Cast(torch.float32))
    assert list(mapping) == ["x", "new", "view", "half"] and mapping["x"] is mapping["new"][0] is x
    assert mapping["view"].data_ptr() == x.data_ptr() and mapping["view"].dtype == torch.float32
    assert mapping["half"] is half is items[2]["deep"][1] and half.dtype == torch.float32
    assert items[0] is same is y and items[1] is items[2]["deep"][0] is x and y.dtype == HALF
    assert batch == Batch(None, x)


def test_a_forward_that_raises_leaves_the_arguments_as_they_are_by_then():
    x, items = torch.ones(2), []
    given = {"x": x, "items": items}

    def forward(given):
        given["x"].zero_()
        given["items"].append(given["x"])
        raise ValueError

    with pytest.raises(ValueError):
        run(forward, given)
    assert given["x"] is x is items[0] and x.tolist() == [0, 0]


@pytest.mark.parametrize("views", [
    lambda b: (b, b), lambda b: (b, b[1:]), lambda b: (b[:3], b[1:]), lambda b: (b[::2], b[1::2], b)])
def test_arguments_that_overlap_still_do(views):
    base, expected = torch.zeros(5), torch.zeros(5)

    def forward(*views):
        views[0].add_(1)
        views[1].mul_(3)
        return [view.sum() for view in views]

    sums = forward(*views(expected))
    assert [float(s) for s in run(forward, *views(base))] == [float(s) for s in sums] and torch.equal(base, expected)


def test_slices_of_a_large_tensor_are_copied_alone():
    data = torch.zeros(1000)
    x, y = run(lambda x, y: (x.untyped_storage().nbytes(), y.untyped_storage().nbytes()), data[:10], data[500:510])
    assert x == y == 20


def test_gradients_pass_what_was_written():
    def forward(cache, weight):
        cache[0] = weight * 3
        return cache.sum()

    results = []
    for call in (run, lambda f, *args: f(*args)):
        cache, weight = torch.zeros(2), torch.ones((), requires_grad=True)
        (call(forward, cache, weight) + 2 * cache[0]).backward()
        results.append((weight.grad, cache.detach()))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.mul_(2)
    with torch.no_grad():
        run(lambda x: x.mul_(2), leaf)
    assert leaf.tolist() == [2, 2]


def test_inference_mode():
    x, items = torch.ones(2), []
    with torch.inference_mode():
        for tensor in (x, torch.ones(2)):
            run(lambda x, items: items.append(x.mul_(2)), tensor, items)
            assert tensor.tolist() == [2, 2] and items.pop() is tensor


def test_a_change_of_shape_is_refused():
    with pytest.raises(RuntimeError, match="of shape"):
        run(lambda x: x.unsqueeze_(0).add_(1), torch.ones(2))


class Reversed(torch.autograd.Function):
    """Its output is its input, and the gradient changes its sign."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_gradients_of_users_functions_are_kept():
    w = torch.ones(2, dtype=HALF, requires_grad=True)
    h = w * 1
    one, other, flat = run(lambda: (h, Reversed.apply(h), h.view(-1)), outputs=Cast(torch.float32))
    (one.sum() + 3 * other.sum() + 7 * flat.sum()).backward()
    assert w.grad.tolist() == [5, 5]
    with torch.no_grad():
        other.zero_()
    assert one.tolist() == flat.tolist() == [0, 0]
    x = torch.ones(2, requires_grad=True)
    run(lambda x: Reversed.apply(x), x, outputs=Cast(torch.float32)).sum().backward()
    assert x.grad.tolist() == [-1, -1]


def test_arguments_that_overlap_with_histories_of_their_own():
    x = torch.ones(2, requires_grad=True) * 1
    y = x.detach().requires_grad_()
    assert run(lambda x, y: (x.mul_(2), y.sum())[1], x, y) == 4
    assert x.tolist() == y.tolist() == [2, 2]


def test_results_that_overlap_still_do():
    h = torch.ones(2, 2, dtype=HALF, requires_grad=True) * 1
    out = run(lambda: {"h": h, "same": h, "view": h.view(-1), "row": h[0], "other": h * 2, "free": h.detach()},
              outputs=Cast(torch.float32))
    assert {t.dtype for t in out.values()} == {torch.float32} and out["h"] is out["same"]
    out["row"].zero_()
    assert out["h"].sum() == out["view"].sum() == out["free"].sum() == 2 and out["other"].sum() == 8


def test_other_results_are_cast_in_every_container():
    half = torch.ones(2, dtype=HALF)
    out = run(lambda: [Batch(half), Frozen((half,)), Node(half), Pair(half, [None]), {half}], outputs=Cast(torch.float32))
    batch, frozen, node, pair, group = out
    assert batch.x is frozen.x[0] is node.x is pair.x is next(iter(group)) and batch.x.dtype == torch.float32
    assert type(batch) is Batch and type(frozen) is Frozen and type(node) is Node and type(pair) is Pair


def test_a_container_that_holds_itself():
    x, given = torch.ones(2), {}
    given.update(x=x, me=given)
    assert run(lambda g: g["me"]["x"].dtype, given) == HALF and given["x"] is x and given["me"] is given


@pytest.mark.parametrize("write", [lambda x: x[0].mul_(3), lambda x: x.add_(1), lambda x: x * 2], ids=["view", "whole", "none"])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_writes_of_a_traced_forward_arrive(write, compiler):
    def call(x):
        call = CastCall((x,), {})
        (copied,), _ = call.enter(Cast(HALF))
        return call.leave((write(copied), copied)[0].sum())

    mine, theirs = torch.full((2, 3), 1 / 3), torch.full((2, 3), 1 / 3)
    result = torch.compile(call, backend=compiler, fullgraph=True)(mine)
    assert torch.equal(result, call(theirs)) and torch.equal(mine, theirs)


def test_passes_know_what_a_traced_call_writes():
    graph = torch.fx.Graph()
    tensor, copied = graph.placeholder("tensor"), graph.placeholder("copied")
    assert written(graph.call_function(write_back, (tensor, copied))) == [tensor]
