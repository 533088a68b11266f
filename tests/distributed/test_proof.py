"""The proof of compiled code over ranks: each rank proves alone, and one whose code is wrong trains as the others do."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apexfx
from apexfx.compiler import prover
from tests.compiler.test_prover import with_a_wrong_element
from tests.distributed.launch import run_ranks


def _optimizers(model, shard):
    """Return SGD, or Muon for matrices where what it holds is split."""
    by_muon = [p for p in model.parameters() if shard and p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is each for each in by_muon)]
    return [*([torch.optim.Muon(by_muon, 1e-2)] if by_muon else []), torch.optim.SGD(rest, 0.1, momentum=0.9)]


def _train(rank, world_size, options, is_wrong):
    torch._inductor.config.force_disable_caches = True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    if not options.get("sync_bn"):
        model[1] = nn.LayerNorm(8)
    whole, x, y = copy.deepcopy(model), torch.randn(4 * world_size, 6), torch.randn(4 * world_size, 3)
    own, of_whole = (_optimizers(each, options.get("shard")) for each in (model, whole))
    step = apexfx.train_step(model, nn.functional.mse_loss, own, opt_level="O0", ddp=True, **options)
    code = with_a_wrong_element if is_wrong and rank == 1 else prover.plain_code
    with mock.patch.object(prover, "plain_code", code):
        for _ in range(3):
            step(x[rank::world_size], y[rank::world_size])
            nn.functional.mse_loss(whole(x), y).backward()
            for each in of_whole:
                each.step()
                each.zero_grad()
    for (name, p), q in zip(model.named_parameters(), whole.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    proofs = [proof for graph in step.report.graphs for proof in graph.proofs]
    assert proofs and all(proof.rows for proof in proofs), [proof.note for proof in proofs]
    assert bool(proofs[0].fault) == (is_wrong and rank == 1), proofs[0].fault
    dist.barrier()


@pytest.mark.long
@pytest.mark.parametrize("options, is_wrong", [
    ({"sync_bn": True}, True),
    *(pytest.param(options, is_wrong, marks=pytest.mark.long) for options in (
        {}, {"shard": "optimizer"}, {"shard": "gradients"}, {"ema": apexfx.EMA(0.9), "safeguard": True}, {"max_grad_norm": 1e6})
      for is_wrong in (False, True) if not (is_wrong and "max_grad_norm" in options))], ids=str)
def test_ranks_prove_alone_and_train_together(options, is_wrong):
    run_ranks(_train, 2, options, is_wrong)
