"""Warm compile caches never hand out another configuration's gradients: a stale hit would be silent."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import apexfx
from tests.distributed.launch import run_ranks

USER_PASS = '''
import torch
from torch.fx.passes.infra.pass_base import PassResult
from apexfx import Pass, graph


class ScaleGradients(Pass):
    """Multiply every output of the backward graph by a constant."""

    name = "scale_gradients"
    stage = "backward"
    numeric = "changes_dtype"

    def call(self, gm):
        output = gm.graph.output_node()
        results = list(output.args[0])
        with gm.graph.inserting_before(output):
            for i, node in enumerate(results):
                if node is not None:
                    results[i] = graph.call(gm.graph, torch.ops.aten.mul.Tensor, (node, FACTOR), like=node)
                    self.record(node, "scaled")
        output.args = (tuple(results),)
        return PassResult(gm, True)
'''


def user_passes(folder, factor):
    """Write the pass with this factor, as an edit of its source file, and import it."""
    if factor is None:
        return ()
    path = folder / "user_pass.py"
    path.write_text(USER_PASS.replace("FACTOR", repr(factor)))
    spec = importlib.util.spec_from_file_location("user_pass", path)
    module = sys.modules["user_pass"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return (module.ScaleGradients(),)


def _train(rank, world_size, folder, opt_level, factor, hit):
    own = Path(folder, str(rank))  # which rank would compile a shared entry first is chance
    own.mkdir(exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own)
    source = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))  # products alone need no C++ compiler
    reference = copy.deepcopy(source)
    model = apexfx.transform(source, opt_level=opt_level, ddp=apexfx.BucketConfig(message_size=64),
                             passes=user_passes(own, factor))
    x = torch.randn(6, 8) * (rank + 1)
    model(x).square().mean().backward()
    reference(x).square().mean().backward()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if opt_level == "O0" else {"rtol": 5e-2, "atol": 5e-2}
    for p, q in zip(model.parameters(), reference.parameters()):
        dist.all_reduce(q.grad.div_(world_size).mul_(factor or 1.0))
        torch.testing.assert_close(p.grad, q.grad, **tolerance)
    counters = torch._dynamo.utils.counters["aot_autograd"]
    assert bool(counters["autograd_cache_hit"]) == hit, dict(counters)
    # What the passes did is known on a hit, too.
    assert len(model.report.buckets().buckets) == 2
    assert model.report.graphs[0].second.from_cache == hit


# (ranks, opt level, factor in the user's pass, whether a cache entry of an earlier row may be used)
ROWS = [
    (2, "O0", None, False),
    (2, "O0", None, True),
    (3, "O0", None, False),
    (2, "O2", None, False),
    (2, "O0", 3.0, False),
    (2, "O0", 5.0, False),
    (2, "O0", 5.0, True),
    (3, "O0", None, True),
]


def _run(rows, tmp_path):
    for world_size, opt_level, factor, hit in rows:
        run_ranks(_train, world_size, str(tmp_path), opt_level, factor, hit, timeout=240)


@pytest.mark.long
def test_every_change_misses(tmp_path):
    _run(ROWS, tmp_path)


def _compile_at_once(rank, world_size, folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    step = apexfx.train_step(model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), ddp=True)
    dist.barrier()
    step(torch.ones(6, 8))
    counters = torch._dynamo.utils.counters["inductor"]
    misses = torch.tensor([counters["fxgraph_cache_miss"], counters["fxgraph_cache_hit"]])
    dist.all_reduce(misses)
    assert misses.tolist() == [1, world_size - 1]


@pytest.mark.long
def test_one_rank_compiles_what_the_others_find(tmp_path):
    run_ranks(_compile_at_once, 3, str(tmp_path))


def _loses_report(rank, world_size, folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = own = str(Path(folder, str(rank)))
    for from_cache in (False, rank == 0):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
        step = apexfx.train_step(model, lambda y: y.square().mean(), torch.optim.AdamW(model.parameters()), ddp=True,
                                 shard="optimizer")
        step(torch.ones(6, 8))
        assert step.report.graphs[0].second.from_cache == from_cache
        for report in Path(own, "apexfx").glob("*.json") if rank else ():
            report.unlink()


@pytest.mark.long
def test_a_rank_whose_cache_has_code_without_a_report_compiles_anew(tmp_path):
    run_ranks(_loses_report, 2, str(tmp_path))
