"""train_step() of a model under fully_shard on real gloo ranks, against FSDP2's own loop, and a step of the whole model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import apexfx
from apexfx.optimizers import FusedAdagrad, FusedAdam, FusedSGD
from tests.distributed.launch import run_ranks
from tests.distributed.sharded_models import MODELS, batches, plain, same_ends, sharded, train, whole, with_parts
from tests.tables import table

OPTIMIZERS = {
    # Powers of two: the bits do not depend on whether a processor rounds products.
    "sgd": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5, weight_decay=2.0**-6),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5),
    "fused adam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.01),
    "fused sgd": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "fused adagrad": lambda params: FusedAdagrad(params, lr=0.1),
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


@table(1, "name, kind", [(name, kind) for kind in ("sgd", "rmsprop") for name in MODELS] + [("float64", "adamw")])
def test_a_step_has_the_bits_of_fsdp2(name, kind):
    run_ranks(bits_of_fsdp2, 2, name, kind)


def accumulates(rank, world_size):
    """Calls that accumulate, and a flush, are FSDP2's own loop, which sums the gradients of each backward; two optimizers.

    Not to the bit: a norm is summed in another order, and what a flush multiplies by 1.5 is rounded.
    """
    theirs, ours = sharded("gpt"), sharded("gpt")
    optimizers = []
    for model in (theirs, ours):
        blocks, rest = [*model.blocks.parameters()], [p for name, p in model.named_parameters() if not name.startswith("blocks")]
        optimizers.append([OPTIMIZERS["sgd"](blocks), OPTIMIZERS["rmsprop"](rest)])
    step = make(ours, optimizers[1], accumulate=3, max_grad_norm=0.05)
    for place, (inputs, targets) in enumerate(batches(ours, 8, rank, world_size), 1):
        step(inputs, targets)
        (theirs.loss(theirs(inputs), targets) / 3).backward()
        if place == 8:
            step.flush()
            for p in theirs.parameters():
                p.grad.mul_(1.5)
        if place in (3, 6, 8):
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
            for each in optimizers[0]:
                each.step()
                each.zero_grad()
        assert bool(step.updated) is (place in (3, 6, 8))
    torch.testing.assert_close(whole(ours.state_dict()), whole(theirs.state_dict()), rtol=0, atol=1e-6)
    assert len(step.report.graphs) == 2


def skips(rank, world_size):
    """What is not finite in the rows of one rank is skipped by all, and named."""
    model = sharded("mlp")
    step = make(model, OPTIMIZERS["adamw"](model.parameters()), safeguard=True, loss_scale="dynamic")
    data = batches(model, 3, rank, world_size)
    step(*data[0])
    before, scale = whole(model.state_dict()), step.loss_scale
    with torch.no_grad():
        bad = data[1][0].clone()
        bad[0, 0] = float("inf") if rank == 0 else 1.0
    step(bad, data[1][1])
    torch.testing.assert_close(whole(model.state_dict()), before, rtol=0, atol=0)
    [event] = step.events
    assert (event.call, event.reason, step.skipped, step.loss_scale) == (2, "not finite", 1, scale / 2) and event.parameter
    step(*data[2])
    assert bool(step.updated) and not torch.equal(whole(model.state_dict())["head.weight"], before["head.weight"])


def means(rank, world_size):
    """A loss with a denominator of its own is that of the whole batch, however it is spread over ranks and calls, and flushed."""
    models = plain("float64"), sharded("float64"), plain("float64")

    def objective(model, inputs, targets):
        losses = torch.nn.functional.cross_entropy(model(inputs), targets, reduction="none", ignore_index=-1)
        return apexfx.Mean(losses.sum(), (targets >= 0).sum())

    steps = [apexfx.train_step(model, objective=objective, optimizer=OPTIMIZERS["sgd"](model.parameters()), opt_level="O0",
                               inner="eager", **options) for model, options in zip(models, (
                                   {}, {"accumulate": 3}, {"accumulate": 3, "ddp": True, "shard": "gradients"}))]
    data = batches(models[0], 5)
    for place, (_, targets) in enumerate(data):
        targets[:place * 2] = -1
    for calls in (data[:3], data[3:]):
        steps[0](*map(torch.cat, zip(*calls)))
        for batch in calls:
            for step in steps[1:]:
                step(*(x.chunk(world_size)[rank] for x in batch))
    for step in steps[1:]:
        step.flush()
        torch.testing.assert_close(step.mean_loss, steps[0].mean_loss)
        torch.testing.assert_close(whole(step.model.state_dict()), models[0].state_dict(), rtol=1e-12, atol=1e-12)


def ends(rank, world_size):
    """Averages, parts of one's own, gradients that are kept, synchronized batch norms: as in a step of the whole model."""
    for name, options in (("float64", with_parts()), ("cnn", {"sync_bn": True})):
        models = reference, ours = plain(name), sharded(name)
        steps = [make(model, OPTIMIZERS["sgd"](model.parameters()), **options, **more)
                 for model, more in zip(models, ({"ddp": True}, {}))]
        for number, batch in enumerate(batches(ours, 3, rank, world_size)):
            torch.testing.assert_close(*(step(*batch) for step in steps), rtol=1e-12, atol=1e-12)
            if number == 1 and name == "float64":
                state = copy.deepcopy(steps[1].state_dict())
                steps[1](*batch)
                steps[1].load_state_dict(state)
        if name == "cnn":
            torch.testing.assert_close(whole(ours.state_dict()), reference.state_dict(), rtol=0, atol=0)
            continue
        same_ends(*steps)
        with pytest.raises(TypeError, match="into another one that is sharded alike"):
            print(steps[1].ema_model)


def in_float32(output, targets):
    return torch.nn.functional.cross_entropy(output.float(), targets.flatten())


def policies(rank, world_size):
    """What is gathered, computed and summed in another dtype, or kept whole, has the bits of FSDP2's own loop."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name, calls, options in (
            ("mlp", 1, {"mp_policy": half}), ("mlp", 2, {"mp_policy": replace(half, reduce_dtype=torch.float32)}),
            ("gpt", 1, {"mp_policy": replace(half, reduce_dtype=torch.float32, cast_forward_inputs=False)}),
            ("mlp", 1, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), "reshard_after_forward": False}),
            ("no blocks", 1, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)})):
        theirs, ours = sharded(name, **options), sharded(name, **options)
        optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in (theirs, ours)]
        step = apexfx.train_step(ours, in_float32, optimizers[1], opt_level="O0", inner="eager", accumulate=calls)
        data = batches(ours, 2 * calls, rank, world_size)
        for place in (0, calls):
            for inputs, targets in data[place:place + calls]:
                loss = in_float32(theirs(inputs), targets)
                torch.testing.assert_close(step(inputs, targets), loss.detach(), rtol=0, atol=0)
                (loss / calls).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        torch.testing.assert_close(whole(ours.state_dict()), whole(theirs.state_dict()), rtol=0, atol=0)
    model = sharded("float64", mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
    assert make(model, OPTIMIZERS["sgd"](model.parameters())).loss_scale == 2.0**16


def near_ddp(rank, world_size, name, level, kind, inner):
    """Train by a step of the sharded model, and by one of the whole model that averages gradients."""
    losses, ends = [], []
    for model, options in ((sharded(name), {}), (plain(name), {"ddp": True})):
        if inner == "inductor" and level != "O0":  # or a kernel that is fused otherwise rounds to half elsewhere
            options = {**options, "inner_options": {"emulate_precision_casts": True}}
        step = make(model, OPTIMIZERS[kind](model.parameters()), opt_level=level, inner=inner, **options)
        losses.append([step(*batch).detach() for batch in batches(model, 5, rank, world_size)])
        ends.append(whole(model.state_dict()))
        assert "ddp" not in options or "all_reduce" in step.report.code(stage="step")
    torch.testing.assert_close(*losses, rtol=0, atol=0 if inner == "eager" else 1e-6)
    torch.testing.assert_close(*ends, rtol=0, atol=0 if inner == "eager" else 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name, level, kind, inner", [
    ("gpt", "O2", "sgd", "eager"), ("mlp", "O0", "adamw", "eager"), ("cnn", "O1", "sgd", "eager"),
    ("mlp", "O1", "adamw", "eager"), ("gpt", "O0", "adamw", "inductor"),
    *(("few rows", "O0", kind, "eager") for kind in ("fused adam", "fused sgd", "fused adagrad")),
    *((name, "O0", "sgd", "inductor") for name in ("cnn", "odd", "sequence")), ("mlp", "O2", "sgd", "inductor")])
def test_a_step_is_that_of_the_whole_model_with_ddp(name, level, kind, inner):
    run_ranks(near_ddp, 2, name, level, kind, inner)


def stage(rank, world_size, folder, number, by, last):
    """Train two batches, or the rest, by a step, by FSDP2's own loop, or by one of a whole model that shares the update, from the
    checkpoint before on, and save by DCP.
    """
    model = plain("float64") if by == "update" else sharded("float64")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = make(model, optimizer, **({"ddp": True, "shard": "optimizer"} if by == "update" else {}))

    def go(data):
        return train(model, optimizer, data) if by == "loop" else [step(*batch) for batch in data]

    data = batches(model, 6, rank, world_size)
    if number:
        if number == 1:  # other values, and a state
            go(data[:1])
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        checkpoint.load(states, checkpoint_id=f"{folder}/{number - 1}")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    go(data[2 * number:] if last else data[2 * number:2 * number + 2])
    if not last:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        checkpoint.save(states, checkpoint_id=f"{folder}/{number}")
    if number == 0:
        go(data[2:])
        end = whole(model.state_dict())
        if rank == 0:
            torch.save(end, f"{folder}/end.pt")
    return model


def last_stage(rank, world_size, folder, number, by, tolerance):
    model = stage(rank, world_size, folder, number, by, last=True)
    torch.testing.assert_close(whole(model.state_dict()), torch.load(f"{folder}/end.pt"), rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("stages", [
    ((2, "step"), (4, "step"), (1, "step")), ((2, "step"), (2, "step")), ((2, "loop"), (4, "step"), (2, "loop")),
    ((2, "update"), (4, "update"), (1, "update")), ((2, "update"), (2, "update")), ((2, "update"), (4, "loop"), (2, "update"))],
    ids=lambda stages: " ".join(f"{by} on {world_size}" for world_size, by in stages))
def test_a_checkpoint_of_dcp_resumes_on_any_number_of_ranks(stages, tmp_path):
    for number, (world_size, by) in enumerate(stages[:-1]):
        run_ranks(stage, world_size, str(tmp_path), number, by, False)
    world_size, by = stages[-1]
    tolerance = 0 if stages in (((2, "step"),) * 2, ((2, "update"),) * 2) else 1e-12
    run_ranks(last_stage, world_size, str(tmp_path), len(stages) - 1, by, tolerance)


def resumes_by_its_own_state(rank, world_size):
    """A state goes on in a step that has not run, as it is and whole; and in one of a whole model, which goes on to the bit."""
    options = {"ema": apexfx.EMA(0.5)}
    models = [sharded("mlp"), sharded("mlp"), sharded("mlp"), plain("mlp")]
    first, *others = [make(each, OPTIMIZERS["adamw"](each.parameters()), **options, **(
        {} if isinstance(each, FSDPModule) else {"ddp": True})) for each in models]
    data = batches(models[0], 4, rank, world_size)
    for batch in data[:2]:
        first(*batch)
    full = [first.state_dict(full=True)]
    dist.broadcast_object_list(full)
    state = first.state_dict()
    for step, given in zip(others, (state, *full, state)):
        step.load_state_dict(copy.deepcopy(given))
    for step in (first, *others):
        for batch in data[2:]:
            step(*batch)
        for name, own in (("model", step.model.state_dict()), ("averages", step.state_dict()["ema"]["averages"])):
            expected = first.model.state_dict() if name == "model" else first.state_dict()["ema"]["averages"]
            tolerance = 0 if step.model in models[:3] else 5e-6
            torch.testing.assert_close(whole(own), whole(expected), rtol=tolerance, atol=tolerance)


def changes(rank, world_size):
    """What changes between two calls is as FSDP2's own loop has it; a call that fails has changed nothing."""
    theirs, ours = sharded("mlp"), sharded("mlp")
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in (theirs, ours)]
    step, generator = make(ours, optimizers[1]), torch.Generator().manual_seed(rank)

    def same(rows):
        batch = torch.randn(rows, 7, generator=generator), torch.randint(0, 3, (rows,), generator=generator)
        train(theirs, optimizers[0], [batch])
        step(*batch)
        torch.testing.assert_close(whole(ours.state_dict()), whole(theirs.state_dict()), rtol=0, atol=0)

    step.capture(torch.randn(4, 7), torch.zeros(4, dtype=torch.long))
    for rows in (4, 3, 5, 4):
        same(rows)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 2.0**-5
    for trains in (False, True):
        for model in (theirs, ours):
            model.blocks[0].requires_grad_(trains)
        same(4)
    with pytest.raises(RuntimeError):
        step(torch.randn(4, 9), torch.zeros(4, dtype=torch.long))
    state = {name: x.clone() for name, x in theirs.state_dict().items()}
    for model in (theirs, ours):
        model.load_state_dict({name: x * 2 for name, x in state.items()})
    same(4)
    ours.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match="parameters that the model has no more"):
        step(torch.randn(4, 7), torch.zeros(4, dtype=torch.long))


@table(0, "case", [accumulates, changes, ends, means, policies, skips, resumes_by_its_own_state])
def test_parts_of_a_step(case):
    run_ranks(case, 2)
