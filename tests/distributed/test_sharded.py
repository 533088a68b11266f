"""train_step() of a model under fully_shard on real gloo ranks, against FSDP2's own loop and one process with the whole batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

import apexfx
from tests.distributed.launch import run_ranks
from tests.distributed.sharded_models import MODELS, batches, plain, sharded, train, whole
from tests.tables import table

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
}


def make(model, optimizer, **options):
    return apexfx.train_step(model, model.loss, optimizer, **{"opt_level": "O0", "inner": "eager", **options})



def bits_of_fsdp2(rank, world_size, name, kind):
    """Train by both, evaluating in between, which leaves FSDP2's root whole; all that there is comes out the same."""
    theirs, ours = sharded(name), sharded(name)
    optimizers = [OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad) for model in (theirs, ours)]
    step = make(ours, optimizers[1])
    data = batches(ours, 5, rank, world_size)
    for batch in data:
        [expected] = train(theirs, optimizers[0], [batch])
        torch.testing.assert_close(step(*batch), expected, rtol=0, atol=0)
        for model in (theirs, ours):
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(batch[0]), theirs(batch[0]), rtol=0, atol=0)
        for model in (theirs, ours):
            model.train()
    torch.testing.assert_close(whole(ours.state_dict()), whole(theirs.state_dict()), rtol=0, atol=0)
    for (path, p), own in zip(theirs.named_parameters(), ours.parameters()):
        held, of_ours = optimizers[0].state.get(p, {}), optimizers[1].state[own] if p in optimizers[0].state else {}
        assert {key: type(x) for key, x in held.items()} == {key: type(x) for key, x in of_ours.items()}, path
        torch.testing.assert_close(whole(of_ours), whole(held), rtol=0, atol=0)


@table(4, "name, kind", [(name, kind) for kind in ("sgd", "rmsprop") for name in MODELS] + [("float64", "adamw")])
def test_a_step_has_the_bits_of_fsdp2(name, kind):
    run_ranks(bits_of_fsdp2, 2, name, kind)


def near_one_process(rank, world_size, name, kind, max_grad_norm):
    reference, ours = plain(name), sharded(name)
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in (reference, ours)]
    step = make(ours, optimizers[1], max_grad_norm=max_grad_norm, loss_scale=1024.0)
    losses = train(reference, optimizers[0], batches(reference, 5), max_grad_norm)
    means = [step(*batch) / world_size for batch in batches(ours, 5, rank, world_size)]
    for mean in means:
        dist.all_reduce(mean)
    tolerance = 1e-12 if name == "float64" else 1e-6
    torch.testing.assert_close(means, losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(whole(ours.state_dict()), reference.state_dict(), rtol=tolerance, atol=tolerance)
    assert len(step.report.graphs) == 1 and step.skipped == 0


@table(2, "world_size, name, kind, max_grad_norm", [
    (4, "float64", "adamw", 0.05), (4, "mlp", "sgd", None), (2, "gpt", "sgd", 0.2), (2, "float64", "adamw", float("inf")),
    (3, "few rows", "sgd", 0.1), (4, "gpt", "sgd", None)])
def test_a_step_is_that_of_one_process_with_the_whole_batch(world_size, name, kind, max_grad_norm):
    run_ranks(near_one_process, world_size, name, kind, max_grad_norm)
