"""Muon over ranks: the bits of ddp=True with shard="optimizer" and under fully_shard, each matrix made orthogonal once."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import apexfx
from apexfx._torch import fake_process_group
from apexfx.ops import orthogonalize, orthogonalize_rows
from tests.distributed.launch import run_ranks
from tests.distributed.sharded_models import batches, plain, whole
from tests.tables import table

KINDS = "ddp", "optimizer", "fully_shard"


class Shapes(nn.Module):
    """A loss of whole gradients: sums over any number of ranks are exact, in any order. Tall, wide, few rows, an odd number."""

    def __init__(self):
        super().__init__()
        shapes = (5, 3), (3, 5), (1, 4), (4, 1), (2, 7), (5, 3), (5, 3), (6, 6), (7,), (3,)
        self.params = nn.ParameterList(torch.randint(-3, 4, shape).float() for shape in shapes)

    def forward(self, x):
        return torch.stack([(x[:, place:place + p.numel()] * p.flatten()).sum(1) for place, p in enumerate(self.params)]).sum(0)

    @staticmethod
    def loss(output, targets):
        return (output * targets).mean()

    @staticmethod
    def batch(generator):
        return torch.randint(-2, 3, (16, 48), generator=generator).float(), torch.randint(1, 3, (16,), generator=generator)


def new(name, kind="ddp"):
    torch.manual_seed(0)
    model = Shapes() if name == "shapes" else plain(name)
    if kind == "fully_shard":
        for block in getattr(model, "blocks", ()):
            fully_shard(block)
        fully_shard(model)
    return model


def optimizers_of(model, **options):
    """Muon for matrices, in two groups, AdamW for the rest."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices, rest = ([p for p in params if (p.ndim == 2) is wanted] for wanted in (True, False))
    groups = [{"params": matrices[:3]}, {"params": matrices[3:], "nesterov": False, "ns_steps": 3}]
    return [torch.optim.Muon([group for group in groups if group["params"]],
                             **{"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", **options}), torch.optim.AdamW(rest, lr=0.01)]


def make(model, kind, optimizers=None, **options):
    sharding = {} if kind == "fully_shard" else {"ddp": True} if kind == "ddp" else {"ddp": True, "shard": kind}
    if isinstance(ddp := options.pop("buckets", None), apexfx.BucketConfig) and sharding:
        sharding = sharding | {"ddp": ddp}
    return apexfx.train_step(model, model.loss, optimizers or optimizers_of(model),
                             **{"opt_level": "O0", "inner": "eager", **sharding, **options})


def same(steps, **limits):
    """Compare models and momentum; every rank has rows of that."""
    first, *others = steps
    expected = whole(first.model.state_dict())
    for step in others:
        torch.testing.assert_close(whole(step.model.state_dict()), expected, **limits)
        for place in range(2):
            for p, own in zip(*(sum((group["params"] for group in each.optimizer[place].param_groups), [])
                                for each in (first, step))):
                held, of_ours = (whole(each.optimizer[place].state.get(q, {})) for each, q in ((first, p), (step, own)))
                torch.testing.assert_close(of_ours, held, **limits)
                if place == 0 and held:
                    local = step.optimizer[0].state[own]["momentum_buffer"].to_local()
                    height = -(-len(p) // dist.get_world_size())
                    assert len(local) == max(0, min(height, len(p) - dist.get_rank() * height))


def like_ddp(rank, world_size, name, options):
    """Train by all three: the bits, where nothing is summed in another order."""
    reorders = world_size > 2 or options.keys() & {"max_grad_norm", "safeguard", "accumulate"}
    # A rounding of a gradient may be one of its direction, which is bfloat16.
    limits = {"rtol": 1e-5, "atol": 1e-3} if reorders and name != "shapes" else {"rtol": 0, "atol": 0}
    kinds = [*KINDS, "gradients"] if "accumulate" in options else KINDS
    steps = [make(new(name, kind), kind, **options) for kind in kinds]
    schedulers = [torch.optim.lr_scheduler.StepLR(step.optimizer[0], 2, gamma=0.5) for step in steps]
    for place, batch in enumerate(batches(new(name), 5, rank, world_size)):
        losses = [step(*batch) for step in steps]
        for scheduler, step in zip(schedulers, steps):
            scheduler.step()
            if place > 2 and name == "shapes":  # which is an input of the graph from then on
                step.optimizer[0].param_groups[1]["weight_decay"] = 0.125
        torch.testing.assert_close(losses, losses[:1] * len(steps), **({} if options.get("inner") else limits))
    for step in steps:
        step.flush()
    same(steps, **limits)


ROWS = [("shapes", {}), ("mlp", {"ema": apexfx.EMA(decay=0.5)})] + [
    (name, {}) for name in ("gpt", "odd", "frozen", "few rows", "sequence", "float64")] + [
    ("shapes", {"accumulate": 2}),
    ("mlp", {"accumulate": 2, "loss_scale": 1024.0}),
    ("mlp", {"max_grad_norm": 0.05}),
    ("shapes", {"inner": "inductor"}),
    ("mlp", {"safeguard": True}),
    ("gpt", {"opt_level": "O2"}),
    ("few rows", {"buckets": apexfx.BucketConfig(message_size=10)}),
]


def many(rank, world_size, rows):
    for name, options in rows:
        like_ddp(rank, world_size, name, options)


@pytest.mark.long
@pytest.mark.parametrize("world_size, rows", [(2, ROWS[:1]), (2, ROWS),
                                              (4, [row for row in ROWS if row[0] in ("shapes", "mlp")])])
def test_muon_over_ranks_has_the_bits_of_ddp(world_size, rows):
    run_ranks(many, world_size, rows, timeout=900)


def faults(rank, world_size):
    """What DeepSpeed did without a word: no matrix was made orthogonal; one that several ranks have was, by parts; once a call.

    Each is made so by one rank, once an update, whole; all ranks have the same parameters.
    """
    seen = []
    for module in (orthogonalize, orthogonalize_rows):
        def counted(matrix, *numbers, own=module.orthogonal):
            if type(matrix) is torch.Tensor:
                seen.append(tuple(matrix.shape))
            return own(matrix, *numbers)

        module.orthogonal = counted
    for kind in ("optimizer", "fully_shard"):
        model = new("shapes", kind)
        step = make(model, kind, accumulate=4)
        data = batches(new("shapes"), 8, rank, world_size)
        step(*data[0])  # compiles
        seen.clear()
        for calls, batch in enumerate(data[1:], 2):
            step(*batch)
            every = [None] * world_size
            dist.all_gather_object(every, list(seen))
            shapes = [tuple(p.shape) for p in new("shapes").parameters() if p.ndim == 2]
            assert sorted(sum(every, [])) == sorted(shapes * (calls // 4)), (kind, calls)
            assert max(map(len, every)) - min(map(len, every)) <= calls // 4 * 2
        after, one = whole(model.state_dict()), whole(model.state_dict())
        for p in one.values():
            dist.broadcast(p, 0)
        torch.testing.assert_close(after, one, rtol=0, atol=0)


@table(0, "world_size", [2, 3])
def test_each_matrix_is_made_orthogonal_once_and_whole(world_size):
    run_ranks(faults, world_size)


def of(step):
    return [whole(step.model.state_dict()), *map(whole, step.optimizer[0].state.values())]


def skips(rank, world_size):
    """A step whose gradients are not finite on one rank changes nothing on any, momentum neither."""
    for kind in KINDS[1:]:
        step = make(model := new("mlp", kind), kind, loss_scale="dynamic")
        (inputs, targets), following = batches(new("mlp"), 2, rank, world_size)
        step(inputs, targets)
        before = copy.deepcopy(of(step))
        step(inputs.index_fill(0, torch.tensor([0]), float("inf") if rank == 0 else 1.0), targets)
        torch.testing.assert_close(of(step), before, rtol=0, atol=0)
        step(*following)
        assert step.skipped == 1 and not torch.equal(whole(model.state_dict())["head.weight"], before[0]["head.weight"])


@pytest.mark.long
def test_a_step_that_is_skipped_changes_nothing():
    run_ranks(skips, 2)


def saved(rank, world_size, folder):
    """Three steps of each kind, saved by DCP, and, under fully_shard, as torch saves; the whole state of one."""
    for kind in KINDS:
        step = make(model := new("shapes", kind), kind)
        for batch in batches(new("shapes"), 5, rank, world_size)[:3]:
            step(*batch)
        checkpoint.save(step.state_dict(), checkpoint_id=f"{folder}/{kind}")
        if kind == "fully_shard":
            states = dict(zip(("model", "optimizer"), get_state_dict(model, step.optimizer)))
            checkpoint.save(states, checkpoint_id=f"{folder}/torch")
        if kind == "optimizer" and (state := step.state_dict(full=True)):
            torch.save(state, f"{folder}/full.pt")


def resumed(rank, world_size, folder):
    """Each goes on in each other, on any number of ranks, to the bits of one that was never saved."""
    reference = apexfx.train_step(model := new("shapes"), model.loss, optimizers_of(model), opt_level="O0", inner="eager")
    expected = [reference(*batch) for batch in batches(new("shapes"), 5)][3:]
    for kind in KINDS:
        for source in (*KINDS, "torch", "full") if kind == "optimizer" else KINDS:
            step = make(model := new("shapes", kind), kind)
            data = batches(new("shapes"), 5, rank, world_size)
            step(*data[0])  # which makes the state that is loaded into
            if source == "full":
                state = torch.load(f"{folder}/full.pt")
            elif source == "torch":
                state = None
                states = dict(zip(("model", "optimizer"), get_state_dict(model, step.optimizer)))
                checkpoint.load(states, checkpoint_id=f"{folder}/torch")
                set_state_dict(model, step.optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            else:
                checkpoint.load(state := step.state_dict(), checkpoint_id=f"{folder}/{source}")
            if state is not None:
                step.load_state_dict(state)
            for batch, loss in zip(data[3:], expected):
                dist.all_reduce(mean := step(*batch) / world_size)
                torch.testing.assert_close(mean, loss)
            torch.testing.assert_close(whole(model.state_dict()), reference.model.state_dict(), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [4, 2, 1])
def test_state_goes_to_and_from_ddp_and_other_numbers_of_ranks(world_size, tmp_path):
    run_ranks(saved, 2, str(tmp_path))
    run_ranks(resumed, world_size, str(tmp_path))


def sent(step):
    """Return how many bytes a rank of two sends in a step, by what its graph gets of each collective."""
    code = step.print_readable(print_output=False)
    found = re.findall(r'"(f32|bf16)\[(\d+)\]" = torch\.ops\._c10d_functional\.(all_\w+|reduce_scatter_tensor)\.default', code)
    ways = {"all_reduce_": 1.0, "reduce_scatter_tensor": 1.0, "all_gather_into_tensor": 0.5, "all_to_all_single": 0.5}
    return sum((4 if dtype == "f32" else 2) * int(numel) * ways[name] for dtype, numel, name in found)


@pytest.mark.long
def test_fewer_bytes_are_sent_than_with_ddp():
    with fake_process_group(2):
        both = []
        for kind in KINDS[:2]:
            model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
            model.loss = torch.nn.functional.mse_loss
            step = make(model, kind, torch.optim.Muon(model.parameters()))
            step(torch.ones(2, 8), torch.ones(2, 8))
            both.append(sent(step))
        assert both == [4 * 6 * 64, 3.5 * 6 * 64]


class Own(torch.optim.Muon):
    pass


@pytest.mark.long
def test_what_muon_over_ranks_does_not_do_is_refused():
    with fake_process_group(2):
        with pytest.raises(ValueError, match="Own was given"):
            make(model := new("mlp"), "optimizer", [Own([p for p in model.parameters() if p.ndim == 2]), optimizers_of(model)[1]])
        step = make(model := new("mlp"), "optimizer")
        batch = batches(model, 1)[0]
        step(*batch)
        step.optimizer[0].param_groups[0]["eps"] = 1e-6
        with pytest.raises(ValueError, match="an op that takes constants alone.*use another optimizer"):
            step(*batch)
