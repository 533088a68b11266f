"""Programs of the world on two ranks, each with data of its own: as a loop in eager that averages each gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import apexfx
from tests.distributed.launch import on_ranks, run_ranks
from tests.world import generative, language, others, public, vision  # noqa: F401
from tests.world.script import PROGRAMS, STEPS, Run


def averaged(parameter):
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()


def train(name, entry, rank, **options):
    run = Run(name, entry, "O0", **options)
    batch = run.script.batch

    def own_batch(step, carried):
        torch.manual_seed(100 + 2 * step + rank)
        return batch(step, carried)

    run.script.batch = own_batch
    if entry == "eager":
        for update in run.script.updates:
            for group in update.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(averaged)
    return [float(loss) for number in range(STEPS) for loss in run.step(number)], run.moved()


@pytest.mark.long
@on_ranks(2)
def test_a_program_trains_on_ranks_as_a_loop_that_averages(rank, world_size):
    for name, entry in (("selective_state_space", "train_step"), ("trajectories", "transform")):
        losses, moved = train(name, entry, rank, ddp=True, inner="eager")
        expected, expected_moved = train(name, "eager", rank)
        assert losses == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(moved, expected_moved, rtol=1e-4, atol=1e-6)


def digests(name, places, **options):
    """Train a program by four slices an update, of which this rank computes those at `places`; return a digest of each update."""
    torch.manual_seed(0)
    script, found = PROGRAMS[name].build(), []
    [update] = script.updates
    step = apexfx.train_step(script.model, objective=update.in_a_step or update.objective, optimizer=update.optimizer,
                             max_grad_norm=update.clip, opt_level="O0", inner="eager", slices=4, **options)
    for number in range(STEPS):
        for place in places:
            torch.manual_seed(1000 * number + place)
            batch = script.batch(4 * number + place, None)
            step(**batch) if isinstance(batch, dict) else step(*batch)
        found.append(step.digest())
    return found


SLICED = ("attention_with_masks", "checkpointed_decoder", "diffusion", "graph_network",
          "lora_with_adapters", "masked_autoencoder", "mixture_of_experts_by_rows", "mixture_of_experts_by_weights",
          "point_clouds", "radiance_field", "rope_by_halves", "segmentation_by_u_net", "selective_state_space",
          "tags_of_a_sentence", "word_lstm")


@pytest.mark.long
def test_slices_have_the_bits_of_one_process():
    run_ranks(same_bits, 2, timeout=900)


def same_bits(rank, world_size):
    for name in SLICED:
        one = digests(name, range(4))
        for shard in (None, "optimizer"):
            many = digests(name, range(2 * rank, 2 * rank + 2), ddp=True, shard=shard)
            assert one == many and len(set(one)) == len(one), (name, shard)
