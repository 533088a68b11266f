"""orthogonalize_rows over real gloo ranks: the bits of orthogonalize over whole matrices; each is made orthogonal once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from apexfx.ops.orthogonalize import orthogonalize
from apexfx.ops.own_rows import own_rows
from tests.distributed.launch import run_ranks
from tests.tables import table

NUMBERS = 3.4445, -4.775, 2.0315, 1e-7, 5
SETS = {
    "one shape, odd number": [(6, 4)] * 5,
    "fewer than ranks": [(5, 3)],
    "several shapes": [(1, 6), (6, 1), (2, 5), (7, 3), (3, 7), (4, 4), (3, 7), (9, 2), (1, 1), (5, 8), (8, 5)],
}


def as_whole(rank, world_size):
    group = dist.group.WORLD.group_name
    for shapes in SETS.values():
        generator = torch.Generator().manual_seed(0)
        matrices = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]
        expected = orthogonalize(matrices, *NUMBERS)
        rows = [own_rows(m, world_size, group) for m in matrices]
        for whole in (False, True):
            found = torch.ops.apexfx.orthogonalize_rows(rows, [len(m) for m in matrices], *NUMBERS, world_size, group, whole)
            wanted = expected if whole else [own_rows(m, world_size, group) for m in expected]
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@table(1, "world_size", [2, 4, 3, 1])
def test_the_bits_of_whole_matrices(world_size):
    run_ranks(as_whole, world_size)
