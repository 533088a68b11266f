"""train_step(shard="optimizer") on real gloo ranks, against ddp=True: the same numbers, and each rank its rows of the state."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint

import apexfx
from apexfx._torch import fake_process_group
from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedSGD
from apexfx.passes import update_early
from tests.distributed.collectives import communicated
from tests.distributed.launch import run_ranks
from tests.distributed.sharded_models import MODELS, Net, batches, perceptron, plain, same_ends, sharded, train, whole, with_parts
from tests.tables import table

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adam, amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, maximize=True, weight_decay=0.01),
    "sgd, maximize": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1, betas=(0.5, 0.6), decoupled_weight_decay=True),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5, weight_decay=0.01),
    "fused adam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.01, master_weights=True),
    "fused sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, wd_after_momentum=True),
    "fused adagrad": lambda params: FusedAdagrad(params, lr=0.1),
}


def make(model, optimizer, **options):
    return apexfx.train_step(model, model.loss, optimizer, **{"opt_level": "O0", "inner": "eager", "ddp": True, **options})


class Gathers(Net):
    """A loss of all ranks' outputs, as contrastive ones are."""

    @staticmethod
    def loss(output, targets):
        every = functional.all_gather_single(output, 0, dist.group.WORLD)
        return F.cross_entropy(output, targets) + every.square().mean()


class Scales(nn.Module):
    """Has parameters without a dimension, one of them tied, and one without an element."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.shift = nn.Linear(5, 5), nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor(0.1))
        self.again, self.none = self.scale, nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.layer(x * self.scale) + self.again * self.shift + self.none.sum()


OWN = {
    "gathers": lambda: Gathers(perceptron(), perceptron()),
    "scales": lambda: Net(Scales(), perceptron()),
    "scales, float64": lambda: Net(Scales()).double(),
    "half": lambda: Half(perceptron()).bfloat16(),
}


class Half(Net):
    @staticmethod
    def loss(output, targets):
        return F.cross_entropy(output.float(), targets)


def new(name):
    torch.manual_seed(0)
    return OWN[name]() if name in OWN else plain(name)


def like_ddp(rank, world_size, name, kind, options):
    """Train by both; all that there is comes out the same: the bits, where nothing is summed in another order."""
    options = dict(options)
    sharded = options.pop("shard", "optimizer")
    exact = world_size == 2 and not {"max_grad_norm", "safeguard", "inner"} & options.keys() and sharded == "optimizer"
    steps = []
    for shard in (None, sharded):
        model = new(name)
        optimizer = OPTIMIZERS[kind](p for p in model.parameters() if p.requires_grad)
        steps.append(make(model, optimizer, shard=shard, **options))
    tolerance = 0 if exact else 1e-2 if "opt_level" in options else {
        torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}[next(steps[0].model.parameters()).dtype]
    limits = {"rtol": tolerance, "atol": tolerance}
    for place, batch in enumerate(batches(steps[0].model, 5, rank, world_size)):
        for group in (group for step in steps for group in step.optimizer.param_groups):
            if "betas" in group and place > 1 and not kind.startswith("fused"):  # as a schedule
                group["betas"] = (0.8 - 0.1 * place, group["betas"][1])
        expected, loss = (step(*batch) for step in steps)
        torch.testing.assert_close(loss, expected, **limits)
    for step in steps:
        step.flush()
    assert [f"shard={sharded}" in repr(step) for step in steps] == [False, True]
    if options.get("ddp") and not {"loss_scale", "accumulate"} & options.keys():  # a gather has begun while the backward goes on
        code = steps[1].print_readable(print_output=False)
        assert code.index("all_gather_into_tensor.default(flatten_bucket") < code.rindex("aten.mm.default")
    theirs, ours = (step.model.state_dict() for step in steps)
    torch.testing.assert_close(ours, theirs, **limits)
    for p, own in zip(*(step.model.parameters() for step in steps)):
        held, of_ours = (step.optimizer.state.get(each, {}) for step, each in zip(steps, (p, own)))
        torch.testing.assert_close(whole(of_ours), held, **limits)
        for key, x in of_ours.items():
            if held[key].dim() and p.numel():
                assert x._local_tensor.shape[0] == max(0, min(-(-len(p) // world_size), len(p) - rank * -(-len(p) // world_size)))


ROWS = [(name, "adamw", {}) for name in MODELS] + [(name, kind, {}) for kind in OPTIMIZERS for name in ("few rows", "float64")
                                                   if not (kind.startswith("fused") and name == "float64")] + [
    ("half", "fused adam", {}), ("half", "adamw", {}), ("scales", "adamw", {}), ("odd", "adadelta", {}),
    ("scales", "sgd", {"accumulate": 2}),
    ("mlp", "sgd", {"loss_scale": 1024.0, "ddp": apexfx.BucketConfig(message_size=60)}),
    ("gpt", "sgd", {"max_grad_norm": 0.05}),
    ("cnn", "adamw", {"sync_bn": True, "opt_level": "O1"}),
    ("gpt", "adamw", {"opt_level": "O2"}),
    ("mlp", "adamw", {"accumulate": 2}),
    ("few rows", "sgd", {"accumulate": 2, "max_grad_norm": 0.05, "safeguard": True}),
    ("gathers", "adamw", {"ddp": apexfx.BucketConfig(message_size=60)}),
    ("scales, float64", "rmsprop", {"max_grad_norm": 0.05, "safeguard": True, "accumulate": 2}),
    ("scales, float64", "rmsprop", {"max_grad_norm": 0.05, "safeguard": True, "accumulate": 2, "shard": "gradients"}),
    ("gpt", "sgd", {"accumulate": 2, "shard": "gradients", "opt_level": "O2", "ddp": apexfx.BucketConfig(message_size=60)}),
    ("half", "adamw", {"accumulate": 3, "shard": "gradients"}),
    ("odd", "adamw", {"accumulate": 3, "shard": "gradients", "keep_grads": True}),
]


def many(rank, world_size, rows):
    for name, kind, options in rows:
        like_ddp(rank, world_size, name, kind, options)


@pytest.mark.long
@pytest.mark.parametrize("rows", [ROWS[-1:], pytest.param(ROWS, marks=pytest.mark.long)], ids=["one", "all"])
def test_a_sharded_update_has_the_bits_of_ddp(rows):
    run_ranks(many, 2, rows, timeout=900)


@table(0, "name, options", [
    ("mlp", {}), ("gpt", {"ddp": apexfx.BucketConfig(message_size=200)}), ("cnn", {"sync_bn": True}),
    ("checkpoints", {"accumulate": 2})], ids=str)
def test_under_inductor_a_sharded_update_is_that_of_ddp(name, options):
    run_ranks(many, 2, [(name, "adamw", {"inner": "inductor", **options})], timeout=900)


@pytest.mark.long
def test_on_four_ranks_a_sharded_update_is_that_of_ddp():
    run_ranks(many, 4, [row for row in ROWS if row[1] in ("sgd", "rmsprop")], timeout=900)


def near_one_process(rank, world_size, name, kind, options):
    reference, ours = new(name), new(name) if "shard" in options else sharded(name)
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in (reference, ours)]
    step = make(ours, optimizers[1], **{"ddp": "shard" in options, **options})
    losses = train(reference, optimizers[0], batches(reference, 5), options.get("max_grad_norm"))
    means = [step(*batch) / world_size for batch in batches(ours, 5, rank, world_size)]
    for mean in means:
        dist.all_reduce(mean)
    tolerance = 1e-12 if "float64" in name else 1e-6
    torch.testing.assert_close(means, losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(whole(ours.state_dict()), reference.state_dict(), rtol=tolerance, atol=tolerance)
    assert len(step.report.graphs) == 1 and step.skipped == 0


UPDATE = {"shard": "optimizer"}  # of a whole model; the others are under fully_shard


@table(1, "world_size, name, kind, options", [
    (2, "scales, float64", "adamw", {**UPDATE, "max_grad_norm": 0.05, "loss_scale": 1024.0}),
    (4, "float64", "adam, amsgrad", UPDATE), (4, "scales, float64", "rmsprop", {**UPDATE, "max_grad_norm": 0.05}),
    (4, "gpt", "sgd", {**UPDATE, "max_grad_norm": 0.2}), (2, "float64", "adamw", {"max_grad_norm": 0.05, "loss_scale": 1024.0}),
    (4, "float64", "adamw", {"max_grad_norm": torch.inf, "loss_scale": 1024.0}), (4, "few rows", "sgd", {"max_grad_norm": 0.1}),
    (2, "gpt", "sgd", {"max_grad_norm": 0.2}), (4, "mlp", "sgd", {})])
def test_a_step_is_that_of_one_process_with_the_whole_batch(world_size, name, kind, options):
    run_ranks(near_one_process, world_size, name, kind, options)


def ends(rank, world_size):
    """Averages, parts of one's own and gradients that are kept are those of ddp=True, and go to and from a step of it."""
    def made():
        models = [new("scales, float64") for _ in range(2)]
        return [make(model, OPTIMIZERS["rmsprop"](model.parameters()), shard=shard, **with_parts())
                for model, shard in zip(models, (None, "optimizer"))]

    steps, data = made(), batches(new("scales, float64"), 5, rank, world_size)
    for batch in data[:3]:
        torch.testing.assert_close(*(step(*batch) for step in steps), rtol=1e-12, atol=1e-12)
    same_ends(*steps)
    torch.testing.assert_close(*(step.ema_model.state_dict() for step in steps), rtol=1e-12, atol=1e-12)
    assert steps[1].slot("mean")["first.weight"]._local_tensor.shape == (3 - rank, 7)
    states = [copy.deepcopy(step.state_dict()) for step in steps]
    for batch in data[3:]:
        for step in steps:
            step(*batch)
    for given in zip(states, reversed(states)):
        going = made()
        for step, state in zip(going, given):
            step.load_state_dict(copy.deepcopy(state))
            for batch in data[3:]:
                step(*batch)
        same_ends(*going)
        same_ends(steps[0], going[1])


@pytest.mark.long
def test_the_parts_of_a_step_are_those_of_ddp():
    run_ranks(ends, 2)


@pytest.mark.parametrize("length", [4, 1, 0])
def test_a_sum_and_its_gather_travel_between_two_starts_whatever_the_batch_of_a_rank(length):
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(5)))
    with fake_process_group(2):
        step = apexfx.train_step(model, nn.MSELoss(reduction="sum"), torch.optim.AdamW(model.parameters()), opt_level="O0",
                                 inner="eager", ddp=apexfx.BucketConfig(message_size=512), shard="optimizer")
        step(torch.randn(length, 16), torch.randn(length, 16))
    words = {"reduce_scatter_tensor": "sum", "all_gather_into_tensor": "gather", "mm.default": "product"}
    lines = step.report.code(stage="step").partition("reduce_scatter_tensor")[2].splitlines()
    order = [said for line in lines for word, said in words.items() if f".{word}" in line]
    assert order == [*["product"] * 2, "gather", *["product"] * 2, "sum", "product", "gather", "product", "sum", "gather"]


def ordered_apart(rank, world_size):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    step = apexfx.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters()), opt_level="O0", inner="eager",
                             ddp=apexfx.BucketConfig(message_size=512, timeout_s=20), shard="optimizer")
    told = pytest.raises(apexfx.RankMismatchError, match="(?s)do not agree on the collectives.*reduce_scatter_tensor")
    with told, torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        step(torch.ones(2, 16), torch.ones(2, 16))
    if rank:
        update_early._amid = lambda start, following: following
    with told:
        step(torch.ones(2, 16), torch.ones(2, 16))


@pytest.mark.long
def test_ranks_that_would_communicate_in_another_order_or_dtype_are_told():
    run_ranks(ordered_apart, 2, timeout=60)


@table(0, "num_ranks", [2, 4, 8])
def test_state_is_a_share_and_no_more_bytes_travel_than_without(num_ranks):
    """In float32. At O2 a float32 gather stands beside a sum in half: half as many bytes again as an allreduce in half."""
    with fake_process_group(num_ranks):
        for level, more in (("O0", 1), ("O2", 1.5)):
            sent, held = [], []
            for shard in (None, "optimizer"):
                model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
                step = apexfx.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters()), opt_level=level, inner="eager",
                                         ddp=True, shard=shard)
                step(torch.randn(4, 16), torch.randn(4, 8))
                # Of a ring: each rank sends all parts but its own, once for a sum or a gather, twice for an allreduce.
                sent.append(sum(num_bytes * (2 if "reduce_" == kind[4:] else 1) for kind, num_bytes in
                                communicated(step.report.code(stage="step"), num_ranks) if kind != "wait"))
                numbers = sum(x.numel() * x.itemsize for p in step.optimizer.state.values() for x in p.values() if not x.dim())
                held.append(step.report.memory().alive["optimizer state"][-1] - numbers)
            assert sent[1] == more * sent[0] and (held[1] - 4) * num_ranks == held[0] - 4  # besides the learning rate


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
    torch.save(states[1], file := io.BytesIO())
    held = [None if rank else states[-1], file.getvalue()]
    dist.broadcast_object_list(held)
    with pytest.raises(ValueError, match="rows of rank 0 of 2, and here is rank 1 of 2") if rank else contextlib.nullcontext():
        new("optimizer").load_state_dict(torch.load(io.BytesIO(held[1])))
    assert rank == 0 or states[-1] == {}
    states[-1] = copy.deepcopy(held[0])
    assert all(type(x) is torch.Tensor for p in states[-1]["optimizer"]["state"].values() for x in p.values())
    going = [trained[None]]
    for shard in trained if every else ["optimizer"]:
        for state in copy.deepcopy(states if every else states[:1]):
            going.append(new(shard))
            going[-1].load_state_dict(state)
    going.append(new("optimizer"))
    state = going[-1].state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    going[-1].load_state_dict(state)
    expected = None
    for step in going:
        losses = [step(*batch).item() for batch in data[3:]]
        expected = losses if step is going[0] else expected
        assert losses == expected
        torch.testing.assert_close(step.model.state_dict(), going[0].model.state_dict(), rtol=0, atol=0)
    step.model(data[0][0]).sum().backward()
    with pytest.raises(RuntimeError, match="the state of its rows alone"):
        step.optimizer.step()
    with pytest.raises(apexfx.RankMismatchError, match="state_dict"):
        step(*data[0]) if rank else step.state_dict(full=True)


@pytest.mark.long
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_state_goes_to_and_from_ddp_whole_and_by_dcp(tmp_path, every):
    run_ranks(resumed, 2, str(tmp_path), every)


REFUSED = {
    "without ddp=True": {"ddp": False},
    "expected 'optimizer', 'gradients'": {"shard": "parameters"},
    "the part Part.. was given, and in a step": {"parts": [apexfx.Part()]},
    "FusedLAMB was given": {"optimizer": FusedLAMB},
    "SGD updates outside of the graph": {"optimizer": lambda params: torch.optim.SGD(params, momentum=0.9, dampening=0.1)},
    "O3 was given": {"opt_level": "O3"},
    "verify='each' was given": {"verify": "each"},
    "a parameter is complex": {"model": lambda: Net(nn.Linear(5, 5, dtype=torch.complex64))},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_there_is_refused(said):
    given = dict(REFUSED[said])
    model = given.pop("model", lambda: plain("mlp"))()
    optimizer = given.pop("optimizer", torch.optim.AdamW)(model.parameters())
    with fake_process_group(2), pytest.raises(ValueError, match=said):
        make(model, optimizer, **{"shard": "optimizer", **given})
