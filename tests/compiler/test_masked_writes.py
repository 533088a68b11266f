"""What is written, or added, where a mask is true: a value for all rows, as a mask token that trains, in one graph."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tables import table
from tests.ways import WAYS, check, updates


class Masked(nn.Module):
    """Embeds tokens, and has `write(model, h, mask)` write where they are above a number of the batch."""

    def __init__(self, write):
        super().__init__()
        self.write, self.embedding, self.head = write, nn.Embedding(10, 4), nn.Linear(4, 4)
        self.token, self.number = nn.Parameter(torch.randn(4)), nn.Parameter(torch.tensor(0.5))

    def forward(self, batch):
        tokens, above = batch
        h = self.head(self.embedding(tokens))
        out = self.write(self, h, tokens > above)
        return self.head(h if out is None else out)


def put(key, value=lambda model: model.token, *, to=lambda h: h):
    def write(model, h, mask):
        to(h)[key(mask)] = value(model).to(h.dtype)

    return write


def all_of_them(model, h, mask):
    h[mask] = model.token.to(h.dtype)
    h[mask, 2] = model.number.to(h.dtype)
    h.index_put_((mask.flip(0),), model.token.to(h.dtype), accumulate=True)


def checkpointed(model, h, mask):
    def write(h):
        h = h.clone()
        h[mask] = model.token.to(h.dtype)
        return h.tanh()

    return checkpoint(write, h, use_reentrant=False)


FORMS = {
    "a token": put(lambda mask: mask),
    "a token, and dots": put(lambda mask: (mask, ...)),
    "a number": put(lambda mask: mask, lambda model: model.number),
    "the mean": lambda model, h, mask: h.__setitem__(mask, h.mean()),
    "an element": put(lambda mask: (mask, 2), lambda model: model.number),
    "a part": put(lambda mask: (mask, slice(1, 3)), lambda model: model.token[:2]),
    "a column": put(lambda mask: (slice(None), mask[0])),
    "rows of one": put(lambda mask: (1, mask[1])),
    "by a mask of elements": put(lambda mask: mask[..., None].expand(2, 3, 4), lambda model: model.number),
    "by a mask and an index": put(lambda mask: (mask[:, 0], 1)),
    "through a view": put(lambda mask: mask.flatten(), to=lambda h: h.view(6, 4)),
    "index_put": lambda model, h, mask: h.index_put((mask,), model.token.to(h.dtype)),
    "index_put, accumulated": lambda model, h, mask: h.index_put_((mask,), model.token.to(h.dtype), accumulate=True),
    "several": all_of_them,
    "in a checkpoint": checkpointed,
}
CASES = [(form, way, level) for form in FORMS for way in WAYS for level in ("O0", "O1", "O2")]


def squares(out, batch):
    return out.float().square().mean()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randint(10, (2, 3), generator=generator), torch.tensor(above)) for above in (5, 9, -1, 4)]  # none, all of them


@table(3, "form, way, level", CASES)
def test_a_value_that_is_written_where_a_mask_is_true(form, way, level):
    check(way, lambda: Masked(FORMS[form]), squares, batches(), level)


@table(1, "form, way", [("several", "step"), *((form, way) for form in FORMS for way in ("step", "transform"))])
def test_inductor_writes_so_too(form, way):
    check(way, lambda: Masked(FORMS[form]), squares, batches(), "O0", inner="inductor")


def test_one_graph_is_for_any_number_of_rows():
    model = Masked(all_of_them)
    step = updates("step", model, lambda model, *batch: squares(model(batch), batch), verify="each")
    for batch in batches():
        step(*batch)
    assert len(step.report.graphs) == 1


def penalty(model, h, mask):
    h[mask] = model.token
    gradient, = torch.autograd.grad(h.square().sum(), model.token, create_graph=True)
    return h[mask] * gradient  # whose number of rows the gradient has counted first


def of_function(model, h, mask):
    def energy(token):
        return h.index_put((mask,), token).square().sum()

    return h * torch.func.grad(energy)(model.token)


@table(1, "write", [penalty, of_function])
def test_a_derivative_inside_of_the_loss_counts_rows_too(write):
    def loss(model, batch):
        return model(batch).square().sum()

    checked = [batch for batch in batches() if (batch[0] > batch[1]).any()]
    results = []
    for way in ("eager", "step"):
        torch.manual_seed(0)
        update = updates(way, Masked(write), loss, lr=1e-3)
        results.append([update(batch) for batch in checked])
    torch.testing.assert_close(*results)
