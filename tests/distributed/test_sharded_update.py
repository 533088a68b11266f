"""train_step(shard="optimizer") on real gloo ranks, against ddp=True: the same numbers, and each rank its rows of the state."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed import checkpoint

import apexfx
from tests.distributed.launch import run_ranks
from tests.distributed.sharded_models import MODELS, Net, batches, perceptron, plain, whole
from tests.fake_group import fake_process_group

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def make(model, optimizer, **options):
    return apexfx.train_step(model, model.loss, optimizer, **{"opt_level": "O0", "inner": "eager", "ddp": True, **options})


class Gathers(Net):
    """A loss of all ranks' outputs, as contrastive ones are."""

    @staticmethod
    def loss(output, targets):
        every = functional.all_gather_single(output, 0, dist.group.WORLD)
        return F.cross_entropy(output, targets) + every.square().mean()


def new(name):
    if name != "gathers":
        return plain(name)
    torch.manual_seed(0)
    return Gathers(perceptron(), perceptron())


def like_ddp(rank, world_size, name, kind, options):
    """Train by both; all that there is comes out the same: the bits, where nothing is summed in another order."""
    exact = world_size == 2 and "max_grad_norm" not in options and "safeguard" not in options
    steps = []
    for shard in (None, "optimizer"):
        model = new(name)
        optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
        steps.append(make(model, optimizer, shard=shard, **options))
    limits = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    for batch in batches(steps[0].model, 5, rank, world_size):
        expected, loss = (step(*batch) for step in steps)
        torch.testing.assert_close(loss, expected, **limits)
    for step in steps:
        step.flush()
    assert ["shard=optimizer" in repr(step) for step in steps] == [False, True]
    if options.get("ddp") and "loss_scale" not in options:  # a gather has begun while the backward goes on
        code = steps[1].print_readable(print_output=False)
        assert code.index("all_gather_into_tensor.default(flatten_bucket") < code.rindex("aten.mm.default")
    theirs, ours = (step.model.state_dict() for step in steps)
    torch.testing.assert_close(ours, theirs, **limits)
    for p, own in zip(*(step.model.parameters() for step in steps)):
        held, of_ours = (step.optimizer.state.get(each, {}) for step, each in zip(steps, (p, own)))
        torch.testing.assert_close(whole(of_ours), held, **limits)
        for key, x in of_ours.items():
            if held[key].dim():
                assert x._local_tensor.shape[0] == max(0, min(-(-len(p) // world_size), len(p) - rank * -(-len(p) // world_size)))


ROWS = [(name, "adamw", {}) for name in MODELS if name != "float64"] + [
    ("mlp", "sgd", {"loss_scale": 1024.0, "ddp": apexfx.BucketConfig(message_size=60)}),
    ("gpt", "sgd", {"max_grad_norm": 0.05}),
    ("cnn", "adamw", {"sync_bn": True, "opt_level": "O1"}),
    ("gpt", "adamw", {"opt_level": "O2"}),
    ("mlp", "adamw", {"accumulate": 2}),
    ("few rows", "sgd", {"accumulate": 2, "max_grad_norm": 0.05, "safeguard": True}),
    ("gathers", "adamw", {"ddp": apexfx.BucketConfig(message_size=60)}),
]


def many(rank, world_size, rows):
    for name, kind, options in rows:
        like_ddp(rank, world_size, name, kind, options)


@pytest.mark.parametrize("rows", [ROWS[-2:], pytest.param(ROWS, marks=pytest.mark.long)], ids=["two", "all"])
def test_a_sharded_update_has_the_bits_of_ddp(rows):
    run_ranks(many, 2, rows, timeout=900)


@pytest.mark.long
def test_on_four_ranks_a_sharded_update_is_that_of_ddp():
    run_ranks(many, 4, [row for row in ROWS if row[1] == "sgd"], timeout=900)


def resumed(rank, world_size, folder, every):
    """Save after three steps, by DCP, whole, and whole of ddp; each goes on in a step of each kind, and all come out the same."""
    data = batches(plain("mlp"), 6, rank, world_size)

    def new(shard):
        model = plain("mlp")
        return make(model, OPTIMIZERS["adamw"](model.parameters()), shard=shard)

    trained = {shard: new(shard) for shard in (None, "optimizer")}
    for step in trained.values():
        for batch in data[:3]:
            step(*batch)
    checkpoint.save(trained["optimizer"].state_dict(), checkpoint_id=folder)
    states = [trained[None].state_dict(), trained["optimizer"].state_dict(), trained["optimizer"].state_dict(full=True)]
    held = [None if rank else states[-1]]
    dist.broadcast_object_list(held)
    assert rank == 0 or states[-1] == {}
    states[-1] = copy.deepcopy(held[0])
    assert all(type(x) is torch.Tensor for p in states[-1]["optimizer"]["state"].values() for x in p.values())
    going = [trained[None]]
    for shard in trained if every else ["optimizer"]:
        for state in copy.deepcopy(states if every else states[:1]):
            going.append(new(shard))
            going[-1].load_state_dict(state)
    going.append(new("optimizer"))
    going[-1](*data[0])  # which makes the state that is loaded into
    state = going[-1].state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    going[-1].load_state_dict(state)
    expected = None
    for step in going:
        losses = [step(*batch).item() for batch in data[3:]]
        expected = losses if step is going[0] else expected
        assert losses == expected
        torch.testing.assert_close(step.model.state_dict(), going[0].model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_state_goes_to_and_from_ddp_whole_and_by_dcp(tmp_path, every):
    run_ranks(resumed, 2, str(tmp_path), every)


REFUSED = {
    "without ddp=True": {"ddp": False},
    "expected 'optimizer'": {"shard": "parameters"},
    "parts= or ema= was given": {"ema": apexfx.EMA(decay=0.9)},
    "keep_grads= was given": {"keep_grads": True},
    "no op updates the parameters of RMSprop": {"optimizer": torch.optim.RMSprop},
    "O3 was given": {"opt_level": "O3"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_there_is_refused(said):
    model, given = plain("mlp"), dict(REFUSED[said])
    optimizer = given.pop("optimizer", torch.optim.AdamW)(model.parameters())
    with fake_process_group(2), pytest.raises(ValueError, match=said):
        make(model, optimizer, **{"shard": "optimizer", **given})
