"""Labels and indices of a batch that are out of range: where eager refuses them a call does, before it runs, by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.tables import table
from tests.ways import updates

IDS = torch.tensor([[1, 4, 0], [2, 6, 3]])  # of seven rows


def logits(table):
    return table.weight.t()[:4]  # of seven classes


# What computes a loss of a table of seven rows and IDS, or numbers of their shape.
FORMS = {
    "embedding": lambda table, ids: table(ids),
    "embedding in sums": lambda table, ids: F.embedding_bag(ids, table.weight, mode="sum"),
    "views": lambda table, ids: table(ids.t().contiguous().view(-1).unsqueeze(0).to(torch.int64)),
    "cast and moved": lambda table, ids: table((ids.int() + 1).type(torch.LongTensor) - 1),
    "some of them": lambda table, ids: table(ids[:, :2]),
    "a chunk": lambda table, ids: table(ids.chunk(3, dim=1)[1]),
    "labels": lambda table, ids: F.cross_entropy(logits(table), ids.flatten()[:4]),
    "labels by name": lambda table, ids: F.cross_entropy(input=logits(table), target=ids.flatten()[:4], ignore_index=9),
    "padded labels": lambda table, ids: F.cross_entropy(logits(table), F.pad(ids, (0, 1), value=-100)[..., 1:].reshape(-1)[:4]),
    "likelihood": lambda table, ids: F.nll_loss(logits(table).log_softmax(1), ids.flatten()[:4], ignore_index=2),
    "margins": lambda table, ids: F.multi_margin_loss(logits(table), ids.flatten()[:4]),
    "gather": lambda table, ids: table.weight.gather(0, ids),
    "gather of classes": lambda table, ids: logits(table).log_softmax(-1).gather(-1, ids[:, :1]),
    "along": lambda table, ids: torch.take_along_dim(table.weight[:, :3], ids, dim=0),  # which counts round
    "rows": lambda table, ids: table.weight.index_select(0, ids.flatten()),
    "subscript": lambda table, ids: table.weight[ids],
    "subscripts": lambda table, ids: table.weight[ids[0], ids[0] * 0],
    "behind an ellipsis": lambda table, ids: table.weight.t()[..., ids[1], None],
    "behind a dimension of ATen": lambda table, ids: torch.ops.aten.index(table.weight.t(), [None, ids[1]]),
    "written rows": lambda table, ids: (table.weight * 1).index_copy(0, ids[0], table.weight[:3]),
    "added rows": lambda table, ids: (table.weight * 1).index_add(0, ids[0], table.weight[:3]),
    "filled rows": lambda table, ids: (table.weight * 1).index_fill(0, ids[0], 0.5),
    "scattered": lambda table, ids: torch.zeros(7, 4).scatter_add(0, ids, table.weight[:2, :3]),
    "one of several": lambda table, ids: F.one_hot(ids, 7).to(table.weight.dtype) @ table.weight,
}
WRONG = {"none": (), "too large": ((0, 1, 7),), "far too large": ((1, 0, 10**9),), "below zero": ((0, 1, -1),),
         "far below zero": ((0, 0, -8),), "ignored": ((0, 1, -100),), "in what is not used": ((1, 2, 7),)}


def with_numbers(numbers):
    ids = IDS.clone()
    for row, column, number in numbers:
        ids[row, column] = number
    return ids


def make(form, entry, **options):
    """Return (a table, what computes a loss of it, trains it where `entry` is a step), for one form."""
    torch.manual_seed(0)
    table = nn.Embedding(7, 4)
    if entry == "step":
        return table, apexfx.train_step(table, objective=lambda table, ids: FORMS[form](table, ids).square().mean(),
                                        optimizer=torch.optim.SGD(table.parameters(), 0.1), **options)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table

        def forward(self, ids):
            return FORMS[form](self.table, ids).square().mean()

    return table, apexfx.transform(Loss(), **options)


def refusal_of_eager(form, table, ids):
    try:
        FORMS[form](copy.deepcopy(table), ids)
    except (IndexError, RuntimeError) as error:
        return error
    return None


def check(form, entry, **options):
    table, run = make(form, entry, **options)
    for name, numbers in WRONG.items():
        ids, before = with_numbers(numbers), table.weight.detach().clone()
        refusal = refusal_of_eager(form, table, ids)
        if refusal is None:
            expected = FORMS[form](table, ids).square().mean()
            torch.testing.assert_close(run(ids), expected, rtol=2e-2, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
        else:
            with pytest.raises(IndexError, match=rf"apexfx: .*has {numbers[0][2]} at \[.*takes -?\d+ <= index < \d+"):
                run(ids)
            assert torch.equal(table.weight, before), name


@table(3, "form", FORMS)
@table(1, "level", ["O0", "O2"])
@pytest.mark.parametrize("entry", ["step", "transform"])
def test_what_eager_refuses_is_refused_by_name(form, entry, level):
    check(form, entry, opt_level=level, inner="eager")


@pytest.mark.long
@pytest.mark.parametrize("form", ["rows", "labels", "subscript", "added rows"])
def test_what_eager_refuses_is_refused_under_inductor(form):
    check(form, "step", opt_level="O0")


def test_a_first_call_that_is_refused_changes_nothing():
    table, step = make("labels", "step", opt_level="O0", inner="eager")
    before = table.weight.detach().clone()
    with pytest.raises(IndexError, match=r"ids \(batch\[0\]\), of size \[4\] as .* has 7 at \[1\].*cross_entropy at test_index"):
        step(with_numbers(WRONG["too large"]))
    assert torch.equal(table.weight, before)
    step(IDS)
    assert not torch.equal(table.weight, before)


def test_sizes_that_change_are_looked_at_too():
    table, step = make("views", "step", opt_level="O0", inner="eager")
    for width in (3, 5, 6):
        step(torch.zeros(2, width, dtype=torch.int64))
        with pytest.raises(IndexError, match=rf"has 7 at \[1, {width - 1}\]"):
            step(torch.cat([torch.zeros(2 * width - 1, dtype=torch.int64), torch.tensor([7])]).view(2, width))


CAST = {"to int64": (torch.uint8, lambda y: y.long(), 9), "from 1": (torch.uint8, lambda y: y.long() - 1, 0),
        "of floats": (torch.float32, lambda y: y.to(torch.int64), 9),
        "cut off": (torch.int64, lambda y: y.to(torch.uint8).long(), 259)}


@pytest.mark.parametrize("form", CAST)
def test_labels_that_are_cast_are_looked_at_as_the_op_gets_them(form):
    dtype, cast, number = CAST[form]
    model, x, labels = nn.Linear(3, 4), torch.randn(2, 3), torch.tensor([1, 2], dtype=dtype)
    run = updates("step", model, lambda model, x, y: F.cross_entropy(model(x), cast(y)), lr=0.0)
    labels[1] = number
    if form == "cut off":
        torch.testing.assert_close(run(x, labels), F.cross_entropy(model(x), torch.tensor([1, 3])).detach())
    else:
        with pytest.raises(IndexError, match=rf"y \(batch\[1\]\), of size \[2\] as .* has {int(cast(labels)[1])} at \[1\]"):
            run(x, labels)


def masked(ids, *, clones):
    ids = ids.clone() if clones else ids
    ids[ids == 7] = -100
    return ids


CHANGED_FIRST = {
    "in place": lambda table, ids: table(ids.clamp_(0, 6)), "computed": lambda table, ids: table(ids % 7),
    "a copy": lambda table, ids: F.cross_entropy(table.weight.t()[:3], masked(ids[0], clones=True)),
    "a view": lambda table, ids: F.cross_entropy(table.weight.t()[:3], masked(ids[0].view(3), clones=False)),
    "a copy of some": lambda table, ids: F.cross_entropy(table.weight.t()[:2], masked(ids.clone()[0], clones=False)[1:]),
}


@pytest.mark.parametrize("form", CHANGED_FIRST)
def test_what_is_written_or_computed_first_is_not_looked_at(form):
    table = nn.Embedding(7, 4)
    step = updates("step", table, lambda table, ids: CHANGED_FIRST[form](table, ids).mean(), lr=0.0)
    numbers = WRONG["too large"]
    torch.testing.assert_close(step(with_numbers(numbers)), CHANGED_FIRST[form](table, with_numbers(numbers)).mean().detach())


def test_an_option_leaves_it_out():
    _, step = make("subscript", "step", opt_level="O0", inner="eager", check_indices=False)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        step(with_numbers(WRONG["too large"]))
    with pytest.raises(TypeError, match="check_indices"):
        make("subscript", "step", check_indices="cpu")
