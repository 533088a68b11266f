"""train_step(slices=) on real gloo ranks: the bits of one process, and what would not have them."""

from __future__ import annotations

import contextlib
import hashlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import apexfx
from apexfx._torch import is_dtensor, tree_leaves
from apexfx.observe.replay import replay
from apexfx.train_step import step_graphs
from apexfx.train_step.parts import norm
from apexfx.train_step.slices import BuffersOfSlices, Slices
from tests.distributed.launch import on_ranks, run_ranks
from tests.tables import table
from tests.train_step.sliced_programs import PROGRAMS, batch, make, train, train_adversaries


def digests(name, rank, world_size, updates=range(3), **options):
    """Return those of a program behind each update by one process, and by all ranks."""
    with_group = {"ddp": True, **options}
    return train(make(name, **options), name, updates), train(make(name, **with_group), name, updates, rank, world_size)


@table(1, "world_size, names", [(2, ["convolution", "heads"]), (2, ["safe", "mean", "muon"]), (4, [*PROGRAMS])])
def test_any_number_of_ranks_has_the_bits_of_one_process(world_size, names):
    run_ranks(same_bits, world_size, names)


def same_bits(rank, world_size, names, **options):
    for name in names:
        one, many = digests(name, rank, world_size, **options)
        assert one == many and len(set(one)) == len(one), (name, one, many)


@pytest.mark.long
@pytest.mark.parametrize("world_size, names", [(2, ["convolution", "mean", "muon"]), (4, [*PROGRAMS])])
def test_so_has_an_update_that_ranks_share(world_size, names):
    run_ranks(same_bits_shared, world_size, names)


def same_bits_shared(rank, world_size, names, **options):
    for name in names:
        level = {"opt_level": "O2"} if name == "muon" else {}  # with shard= there is no O3
        one = train(make(name, **level, **options), name, range(3))
        step = make(name, ddp=True, shard="optimizer", **level, **options)
        many = train(step, name, range(3), rank, world_size)
        assert one == many and len(set(one)) == len(one), (name, one, many)
        of_rows = [held for held in tree_leaves(step.state_dict()) if is_dtensor(held)]
        assert sum(held.to_local().numel() for held in of_rows) < sum(held.numel() for held in of_rows)
        updates = [step.report.code(stage="step", graph=graph.index) for graph in step.report.graphs if graph.mode == "update"]
        assert all("all_gather" in code and "all_reduce" not in code for code in updates) and updates  # norms are of wholes


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_eight_ranks_have_them_for_fifty_updates(name):
    run_ranks(same_bits_for_long, 8, name, timeout=900)


def same_bits_for_long(rank, world_size, name):
    many = train(make(name, slices=8, ddp=True), name, range(50), rank, world_size, slices=8)
    if rank == 0:
        one = train(make(name, slices=8), name, range(50), slices=8)
        assert one == many and len(set(one)) == len(one), (one, many)


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformer", "convolution", "mean"])
def test_so_has_compiled_code(name):
    run_ranks(same_bits_compiled, 2, name)


def same_bits_compiled(rank, world_size, name):
    same_bits(rank, world_size, [name], inner="inductor")
    same_bits_shared(rank, world_size, [name], inner="inductor")


@pytest.mark.long
@on_ranks(2)
def test_every_byte_is_the_same_and_random_numbers_of_the_user_stay(rank, world_size):
    """A digest does not tell the same numbers at other places of a tensor."""
    one, many = make("transformer"), make("transformer", ddp=True)
    torch.manual_seed(7 + rank)
    before = torch.get_rng_state()
    train(one, "transformer", range(2))
    train(many, "transformer", range(2), rank, world_size)
    assert torch.equal(before, torch.get_rng_state())
    hashes = [hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in step.model.parameters())).hexdigest()
              for step in (one, many)]
    everywhere = [None] * world_size
    dist.all_gather_object(everywhere, hashes)
    assert len({each for row in everywhere for each in row}) == 1


@pytest.mark.long
@on_ranks(2)
def test_networks_that_train_each_other_have_them(rank, world_size):
    one, many = train_adversaries(2), train_adversaries(2, rank, world_size, ddp=True)
    assert one == many and len(set(one)) == 4


@pytest.mark.long
def test_a_rank_whose_slice_is_not_finite_says_so_and_records_it(tmp_path):
    run_ranks(records, 2, str(tmp_path))
    text, same = replay(str(tmp_path / "call-2-rank-1"))
    assert same and "\nnot finite: input 'batch[0]' is not finite (inf)" in text


def records(rank, world_size, folder):
    step = make("safe", ddp=True, safeguard=apexfx.Safeguard(record_dir=folder))
    train(step, "safe", range(2), rank, world_size)  # slice 2 of the second update is not finite
    where = step.events[-1].where
    assert where.endswith(", in slice 2, on rank 1" if rank else "it was that of rank 1"), where
    step(*batch("safe", 2, 0))  # which writes the bundle


@pytest.mark.long
@pytest.mark.parametrize("name, shard", [("convolution", None), ("mean", None), ("convolution", "optimizer")])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(name, shard, tmp_path):
    run_ranks(goes_on, 2, name, shard, str(tmp_path))


def goes_on(rank, world_size, name, shard, folder):
    one = train(make(name), name, range(4))
    first = make(name, ddp=True, shard=shard)
    train(first, name, range(2), rank, world_size)
    if (state := first.state_dict(full=True)) and rank == 0:
        torch.save(state, f"{folder}/state")
    dist.barrier()
    alone = make(name)  # 2 -> 1
    alone.load_state_dict(torch.load(f"{folder}/state"))
    assert train(alone, name, [2]) == one[2:3]
    again = make(name, ddp=True, shard=shard)  # 1 -> 2
    again.load_state_dict(alone.state_dict())
    assert train(again, name, [3], rank, world_size) == one[3:]


@pytest.mark.long
@on_ranks(2)
def test_ranks_that_would_have_other_bits_are_told(rank, world_size):
    torch.set_num_threads(1 + rank)
    with pytest.raises(apexfx.RankMismatchError, match="threads: rank 0 has 1, rank 1 has 2"):
        make("heads", ddp=True)
    torch.set_num_threads(1)
    step = make("heads", ddp=True)
    if rank:
        step._components.slices.num_updates = 3  # as where it alone has loaded a checkpoint
    with pytest.raises(apexfx.RankMismatchError, match="updates: rank 0 has 0, rank 1 has 3"):
        train(step, "heads", [0], rank, world_size)


def sequential(self, own, *, ends):
    """Add up one slice behind the other."""
    for each, before in zip(own, self._waiting.pop()[1] if self._waiting else []):
        each.add_(before)
    if not ends:
        self._waiting.append((0, [each.clone() for each in own]))


@contextlib.contextmanager
def by_rank(self, call):
    """Draw what a rank draws for itself."""
    with torch.random.fork_rng():
        torch.manual_seed(1000 * self.first + 10 * self.num_updates + call)
        yield


def running(self):
    """Have a slice begin with what the slice before it has left."""
    left = [buffers[name].clone() for buffers, name, *_ in self._kept]
    result = taken(self)
    for (_, _, buffer, _), value in zip(self._kept, left):
        buffer.copy_(value)
    return result


def by_rows(grads, inverse, **options):
    """Measure what each rank would have of the gradients, and add that up."""
    parts = [measured([g.tensor_split(dist.get_world_size())[rank] for g in grads], inverse, **options)[0] for rank in range(2)]
    return torch.stack(parts).square().sum().sqrt(), *measured(grads, inverse, **options)[1:]


def in_their_order(tensors, group):
    """Have the process group add up."""
    for each in tensors:
        dist.all_reduce(each)


taken, measured = BuffersOfSlices.taken, norm.measured
NOTHING = "nothing"
FAULTS = {  # program, number of ranks, what is patched, of the step of all ranks alone or of both
    NOTHING: ("safe", 2, (norm, "measured", measured), "both"),
    "sequential sums": ("safe", 2, (Slices, "add", sequential), "both"),
    "a seed by rank": ("safe", 2, (Slices, "random_numbers", by_rank), "both"),
    "running statistics": ("safe", 2, (BuffersOfSlices, "taken", running), "both"),
    "a norm by rows": ("safe", 2, (norm, "measured", by_rows), "ranks"),
    "another order over ranks": ("heads", 4, (step_graphs, "sum_over_ranks", in_their_order), "ranks"),
}


@pytest.mark.long
@on_ranks(2, 4)
def test_planted_faults_have_other_bits(rank, world_size):
    torch.compiler.config.force_disable_caches = True  # which would have what was traced without the fault
    for fault, (name, num_ranks, patch, where) in FAULTS.items():
        if num_ranks != world_size:
            continue
        with mock.patch.object(*patch) if where == "both" else contextlib.nullcontext():
            one = train(make(name, max_grad_norm=0.1), name, range(8))
        with mock.patch.object(*patch):
            many = train(make(name, max_grad_norm=0.1, ddp=True), name, range(8), rank, world_size)
        assert (one == many) == (fault == NOTHING), fault
