"""What has to stay in order: graphs of ATen ops, edited by hand."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import apexfx
from apexfx.graph import order
from apexfx.graph.nodes import call, set_value
from apexfx.ops import optimizers  # noqa: F401  registers the ops

aten = torch.ops.aten


def graph_of(function, *inputs):
    """Return the graph of a function, with its writes in place."""
    return make_fx(function, tracing_mode="fake")(*[torch.ones(3) for _ in range(function.__code__.co_argcount)])


def node_of(gm, target, place=0):
    return [node for node in gm.graph.nodes if node.target is target][place]


def move(node, *, before):
    before.prepend(node)


def reads_then_writes(w, x):
    y = w * x
    z = w.view(3) + x
    aten.copy_.default(w, x)
    return y, z


def early_write(gm):
    move(node_of(gm, aten.copy_.default), before=node_of(gm, aten.mul.Tensor))


def early_write_before_a_view(gm):
    move(node_of(gm, aten.copy_.default), before=node_of(gm, aten.view.default))


def lost_write(gm):
    gm.graph.erase_node(node_of(gm, aten.copy_.default))


def independent(gm):
    move(node_of(gm, aten.view.default), before=node_of(gm, aten.mul.Tensor))


def replaced_write(gm):
    write = node_of(gm, aten.copy_.default)
    with gm.graph.inserting_before(write):
        call(gm.graph, aten.lerp_.Scalar, (*write.args, 1.0), like=write)
    gm.graph.erase_node(write)


def cast_around_a_write(w, x):
    a = aten._to_copy.default(w, dtype=torch.bfloat16)
    y = a * 2
    aten.copy_.default(w, x)
    b = aten._to_copy.default(w, dtype=torch.bfloat16)
    return y, b * 3


def shared_cast(gm):
    first, second = (node_of(gm, aten._to_copy.default, place) for place in (0, 1))
    second.replace_all_uses_with(first)
    gm.graph.erase_node(second)


def cosines(w, x):
    y = w.cos()
    z = y * 2
    aten.copy_.default(w, x)
    return z, y * 3


def computed_again_behind_the_write(gm):
    last = node_of(gm, aten.mul.Tensor, 1)
    with gm.graph.inserting_before(last):
        again = call(gm.graph, aten.cos.default, (node_of(gm, aten.cos.default).args[0],), like=last)
    last.replace_input_with(node_of(gm, aten.cos.default), again)


def computed_again_in_front_of_it(gm):
    last = node_of(gm, aten.mul.Tensor, 1)
    with gm.graph.inserting_before(node_of(gm, aten.copy_.default)):
        again = call(gm.graph, aten.cos.default, (node_of(gm, aten.cos.default).args[0],), like=last)
    last.replace_input_with(node_of(gm, aten.cos.default), again)


def two_draws(x):
    return aten.bernoulli.p(x, 0.5), aten.rand_like.default(x)


def swapped_draws(gm):
    move(node_of(gm, aten.rand_like.default), before=node_of(gm, aten.bernoulli.p))


def two_writes(w, x, y):
    aten.copy_.default(w, x)
    aten.add_.Tensor(w, y)
    return x + y


def swapped_writes(gm):
    first, second = node_of(gm, aten.copy_.default), node_of(gm, aten.add_.Tensor)
    second.replace_input_with(first, first.args[0])
    move(second, before=first)


def returns_a_view(w, x):
    return w.view(3), w * x


def late_write(gm):
    w, x = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(gm.graph.output_node()):
        call(gm.graph, aten.add_.Tensor, (w, x), like=node_of(gm, aten.mul.Tensor))


def fills_a_result(w, x):
    y = w * x
    aten.add_.Tensor(y, 1)
    return y


def lost_write_to_a_result(gm):
    write = node_of(gm, aten.add_.Tensor)
    write.replace_all_uses_with(write.args[0])
    gm.graph.erase_node(write)


def kept_in_a_buffer(w, x, held):
    aten.copy_.default(held.view(3), w)
    aten.copy_.default(w, x)
    return held * 2


def kept_behind_the_write(gm):
    first, write = node_of(gm, aten.copy_.default), node_of(gm, aten.copy_.default, 1)
    with gm.graph.inserting_after(write):
        call(gm.graph, aten.copy_.default, first.args, like=first)
    gm.graph.erase_node(first)


def written_together(w, v, x):
    y = w * x
    aten._foreach_copy_.default([w, v], [x, y])
    return aten._foreach_add.Scalar([w, v], 1.0)


def read_in_front_of_the_write(gm):
    move(node_of(gm, aten._foreach_add.Scalar), before=node_of(gm, aten._foreach_copy_.default))


def written_apart(gm):
    write = node_of(gm, aten._foreach_copy_.default)
    for place in (1, 0):
        with gm.graph.inserting_before(write):
            call(gm.graph, aten.copy_.default, tuple(tensors[place] for tensors in write.args), like=write)
    gm.graph.erase_node(write)


CHANGED_PLACES = "the two have changed places"


@pytest.mark.parametrize("function, edit, problem", [
    (reads_then_writes, early_write, CHANGED_PLACES),
    (reads_then_writes, early_write_before_a_view, CHANGED_PLACES),
    (reads_then_writes, lost_write, "dropped a write to 'w_1'"),
    (cast_around_a_write, shared_cast, CHANGED_PLACES),
    (cosines, computed_again_behind_the_write, CHANGED_PLACES),
    (two_draws, swapped_draws, "draws random numbers as well"),
    (two_writes, swapped_writes, CHANGED_PLACES),
    (fills_a_result, lost_write_to_a_result, CHANGED_PLACES),
    (kept_in_a_buffer, kept_behind_the_write, CHANGED_PLACES),
    (written_together, read_in_front_of_the_write, CHANGED_PLACES),
], ids=lambda value: getattr(value, "__name__", None))
def test_what_changes_the_meaning_is_an_error(function, edit, problem):
    gm = graph_of(function)
    before = order.rows(gm.graph)
    order.check(before, before, "idle")
    edit(gm)
    gm.graph.lint()
    with pytest.raises(apexfx.PassError, match=problem):
        order.check(before, order.rows(gm.graph), "edit")


@pytest.mark.parametrize("function, edit", [
    (reads_then_writes, independent), (reads_then_writes, replaced_write), (cosines, computed_again_in_front_of_it),
    (returns_a_view, late_write), (written_together, written_apart),
], ids=lambda value: value.__name__)
def test_what_keeps_it_is_none(function, edit):
    gm = graph_of(function)
    before = order.rows(gm.graph)
    edit(gm)
    order.check(before, order.rows(gm.graph), "edit")


def test_collectives_keep_their_order():
    def two(x, y):
        return [torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(t, "sum", "0")) for t in (x, y)]

    gm = graph_of(two)
    before = order.rows(gm.graph)
    started = [node for node in gm.graph.nodes if "all_reduce" in str(node.target)]
    move(started[1], before=started[0])
    with pytest.raises(apexfx.PassError, match="in front of 'all_reduce', which communicates as well"):
        order.check(before, order.rows(gm.graph), "edit")


def test_an_update_reads_no_memory_that_it_writes():
    gm = graph_of(lambda w, g, lr: w * g * lr)
    w, g, lr = gm.graph.find_nodes(op="placeholder")
    before = order.rows(gm.graph)
    arguments = ([], 0.0, 0.0, 0.0, 0.0, False, False, False)
    with gm.graph.inserting_before(gm.graph.output_node()):
        view = gm.graph.call_function(aten.view.default, (w, [3]))
        set_value(view, w.meta["val"].view(3))
        update = gm.graph.call_function(torch.ops.apexfx.sgd_.default, ([w], [view], [], *arguments), {"lr_tensor": lr})
        set_value(update, None)
    with pytest.raises(apexfx.PassError, match="at node 'sgd__default'.*reads 'view_default', which is the memory"):
        order.check(before, order.rows(gm.graph), "edit")
