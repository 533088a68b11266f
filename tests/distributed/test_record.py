"""Bundles of steps over ranks: each has what the others sent, and one process alone computes the same bits."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import apexfx
from apexfx.observe import bundle
from apexfx.observe.digests import digest
from apexfx.observe.replay import replay
from tests import fresh_process
from tests.distributed.launch import run_ranks
from tests.train_step.test_record import INFINITE, ONE, X, Y, make
from tests.zoo import ZOO


def batch(rank, factor=ONE):
    return X.roll(rank, 0) * (rank + 1), Y, factor


def train(rank, world_size, folder):
    """A spike, so that the loss is a number; then one rank's batch is not finite. Dropout is on."""
    step = make(ddp=True, sync_bn=True, opt_level="O1", dtype=torch.bfloat16,
                safeguard=apexfx.Safeguard(record_dir=folder, spike_factor=10.0, window=1))
    step(*batch(rank))
    loss = step(*batch(rank, 100 * ONE))
    torch.save((loss, step.grad_norm.clone()), f"{folder}/{rank}.pt")
    step(*batch(rank))
    step(*batch(rank, INFINITE if rank == 1 else ONE))
    step.record(Path(folder, f"asked-{rank}"))
    step(*batch(rank))
    assert step.updated and step.skipped == 2


@pytest.mark.long
def test_a_rank_is_replayed_alone(tmp_path):
    run_ranks(train, 2, str(tmp_path))
    for rank in (0, 1):
        for path in (tmp_path / f"call-2-rank-{rank}", tmp_path / f"call-4-rank-{rank}", tmp_path / f"asked-{rank}"):
            text, same = replay(str(path))
            assert same and "\nthe same bits in all of" in text, text
        digests = bundle.load(tmp_path / f"call-2-rank-{rank}").data["digests"]
        assert {digest(x) for x in torch.load(tmp_path / f"{rank}.pt")} <= set(digests.values())
    of_first = [bundle.load(tmp_path / f"call-4-rank-{rank}").tensors["received"] for rank in (0, 1)]
    torch.testing.assert_close(*of_first, rtol=0, atol=0, equal_nan=True)
    assert any(not t.isfinite().all() for t in of_first[0].values())


def without_one(rank, world_size, folder):
    """Rank 1 cannot take part: its batch was written, then it has enough bundles. Nobody waits for it."""
    step = make(ddp=True, safeguard=apexfx.Safeguard(record_dir=folder, max_records=2))
    step(*batch(rank))
    x, y, factor = batch(rank, INFINITE)
    step(x, y, factor)
    if rank == 1:
        x.zero_()
        for number in (7, 8):
            Path(folder, f"call-{number}-rank-1").mkdir()
    step(*batch(rank, INFINITE))
    step(*batch(rank))
    assert step.updated


@pytest.mark.long
def test_ranks_that_cannot_record_do_not_stop_the_others(tmp_path):
    run_ranks(without_one, 2, str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("*-rank-0")) == ["call-2-rank-0", "call-3-rank-0"]
    assert sorted(path.name for path in tmp_path.glob("*-rank-1")) == ["call-7-rank-1", "call-8-rank-1"]
    for number in (2, 3):
        assert replay(str(tmp_path / f"call-{number}-rank-0"))[1]


def into_one_folder(rank, world_size, path):
    step, refused = make(ddp=True, safeguard=True), [None] * world_size
    step(*batch(rank))
    try:
        step.record(path)
    except FileExistsError as error:
        refused[rank] = str(error)
    dist.all_gather_object(refused, refused[rank])
    told, = filter(None, refused)
    assert "each rank needs one of its own" in told


@pytest.mark.long
def test_ranks_that_record_into_one_folder_are_told(tmp_path):
    run_ranks(into_one_folder, 2, str(tmp_path / "bundle"))
    assert replay(str(tmp_path / "bundle"))[1]


# ---- every model -------------------------------------------------------------------------------------------------------------


def objective(model, batch, labels, factor, entry):
    """Dropout in front of the model, in it and behind it."""
    batch = {name: F.dropout(x, 0.1) if x.is_floating_point() else x for name, x in batch.items()}
    out = model(**batch)
    if labels is None:
        return out.loss * factor
    return F.cross_entropy(F.dropout(getattr(out, "logits", out), 0.1).flatten(0, -2), labels.flatten()) * factor


def record_zoo(rank, world_size, folder, name, level):
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.build().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    step = apexfx.train_step(model, objective=functools.partial(objective, entry=entry), inner="eager", ddp=True, opt_level=level,
                             optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), sync_bn=name != "residual_cnn",
                             dtype=torch.bfloat16 if level != "O0" else None,
                             safeguard=apexfx.Safeguard(spike_factor=10.0, window=1))
    torch.manual_seed(rank + 1)
    batch, labels = entry.batch(4), entry.labels(4) if entry.labels else None
    step(batch, labels, ONE)
    loss = step(batch, labels, 1000 * ONE)
    assert step.events[-1].reason == "spike", name
    step.record(Path(folder, f"{name}-{rank}"))
    torch.save((loss, step.grad_norm), f"{folder}/{name}-{rank}.pt")


def check_zoo(folder, name):
    for path in (Path(folder, f"{name}-{rank}") for rank in (0, 1)):
        text, same = replay(str(path))
        assert same and "\nthe same bits in all of" in text, (path, text)
        digests = bundle.load(path).data["digests"]
        assert {digest(x) for x in torch.load(f"{path}.pt")} <= set(digests.values()), path


@pytest.mark.long
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("name", ZOO)
def test_a_new_process_replays_every_model(name, level, tmp_path):
    if ZOO[name].needs:
        pytest.importorskip(ZOO[name].needs)
    run_ranks(record_zoo, 2, str(tmp_path), name, level, timeout=500)
    fresh_process.call(check_zoo, str(tmp_path), name)
