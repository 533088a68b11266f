"""The table of docs/refused.md of what a step refuses: each row is refused in its words, and what stands beside it trains."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from tests.tables import table

PAGE = (Path(__file__).parents[2] / "docs/refused.md").read_text()
FLAG = True


def if_rows(model, h):
    rows = h[h[:, 0] > 0]
    if n := rows.shape[0]:
        return rows.sum() / n
    return h.sum() * 0


def if_rows_cured(model, h):
    mask = h[:, 0] > 0
    return torch.where(mask[:, None], h, 0).sum() / mask.sum().clamp(min=1)


def if_any(model, h):
    if (h > 1).any() and FLAG:
        return h.sum()
    return h.mean()


def if_any_cured(model, h):
    return torch.where((h > 1).any() & FLAG, h.sum(), h.mean())


def while_large(model, h):
    while h.abs().max() > 0.5:
        h = h / 2
    return h.sum()


def while_large_cured(model, h):
    for _ in range(8):
        h = torch.where(h.abs().max() > 0.5, h / 2, h)
    return h.sum()


def for_rows(model, h):
    out = 0.0
    for row in h:
        out = out + row.sum() if row[0] > 0 else out - row.mean()
    return out


def for_rows_cured(model, h):
    return torch.where(h[:, 0] > 0, h.sum(1), -h.mean(1)).sum()


def for_range(model, h):
    out = h.mean()
    for i in range(int((h[:, 0] > 0).sum())):
        out = out + i * h.sum()
    return out


def for_range_cured(model, h):
    n, out = (h[:, 0] > 0).sum(), h.mean()
    for i in range(len(h)):
        out = out + torch.where(i < n, i * h.sum(), 0)
    return out


def draws(model, h):
    return (h * torch.zeros(4).random_(2)).sum()


def draws_cured(model, h):
    return (h * torch.randint(2, (4,))).sum()


def chooses(model, h):
    return h.sum() * random.choice([2.0, 2.0])


def chooses_cured(model, h):
    return h.sum() * torch.tensor([2.0, 2.0])[torch.randint(2, ())]


def raises(model, h):
    if h.isnan().any():
        raise ValueError("not a number")
    return h.sum()


def raises_cured(model, h):
    return h.sum()


def lists(model, h):
    return h.sum() * sum(h.detach()[0].tolist())


def lists_cured(model, h):
    return h.sum() * h.detach()[0].sum()


def prints(model, h):
    print("sum", h.shape)
    return h.sum()


def prints_cured(model, h):
    return h.sum()


def adaptive(model, h):
    return model.softmax(h, torch.arange(6)).loss


def adaptive_cured(model, h):
    return F.nll_loss(model.softmax.log_prob(h), torch.arange(6))


def ctc(model, h):
    return F.ctc_loss(h.log_softmax(1)[:, None], torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))


def compares(model, h):
    number = int((h[:, 0] > -9).sum())
    return F.mse_loss(torch.zeros(number, 4).index_add(0, torch.arange(6), h.float()), torch.ones(6, 4))


def compares_cured(model, h):
    return F.mse_loss(torch.zeros(6, 4).index_add(0, torch.arange(6), h.float()), torch.ones(6, 4))


def masked_twice(model, h):
    number = torch.arange(6)
    return F.mse_loss(h[number > 2].float(), torch.ones(6, 4)[number > 2])


def masked_twice_cured(model, h):
    mask = torch.arange(6) > 2
    return F.mse_loss(h[mask].float(), torch.ones(6, 4)[mask])


# In the order of the table: what is refused, and what is written in its place (None: fallback="transform").
ROWS = [(if_rows, if_rows_cured), (if_any, if_any_cured), (while_large, while_large_cured), (for_rows, for_rows_cured),
        (for_range, for_range_cured), (compares, compares_cured), (masked_twice, masked_twice_cured),
        (raises, raises_cured), (lists, lists_cured), (draws, draws_cured), (chooses, chooses_cured), (prints, prints_cured),
        (adaptive, adaptive_cured), (ctc, None)]


class Net(nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.softmax, self.loss = nn.Linear(4, 4), nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]), loss

    def forward(self, x):
        return self.loss(self, self.layer(x))


def rows_of_page():
    [table] = re.findall(r"<!-- refusals -->\n\|.*\n\|.*\n((?:\|.*\n)+)", PAGE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]


def trained(loss, way, **options):
    torch.compiler.reset()
    model = Net(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = None if way == "eager" else apexfx.train_step(model, objective=lambda model, x: model(x), optimizer=optimizer,
                                                         opt_level="O0", inner="eager", **options)
    losses = []
    for number in range(3):
        torch.manual_seed(number)
        random.seed(number)
        x = torch.randn(6, 4)
        if step is not None:
            losses.append(float(step(x)))
            continue
        value = model(x)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@table(len(ROWS) // 3, "row", range(len(ROWS)), ids=lambda row: ROWS[row][0].__name__)
def test_a_row_is_refused_in_its_words_and_its_cure_trains_as_eager(row):
    refused, cured = ROWS[row]
    _, said, _ = rows_of_page()[row]
    with pytest.raises(apexfx.NotOneGraph) as failed:
        trained(refused, "step")
    text = str(failed.value)
    assert said.replace("\\|", "|") in text and f"in {refused.__name__}: " in text
    if cured is None:
        assert trained(refused, "step", fallback="transform") == pytest.approx(trained(refused, "eager"), rel=1e-5)
        return
    found = trained(cured, "step")
    assert found == pytest.approx(trained(cured, "eager"), rel=1e-5)
    if cured is not draws_cured:  # which draws other numbers
        assert found == pytest.approx(trained(refused, "eager"), rel=1e-5)


def test_the_table_has_a_row_of_each():
    assert len(rows_of_page()) == len(ROWS)
