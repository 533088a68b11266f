"""The memory timeline: what is alive when, of which kind, and how it is shown."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx._torch import fake_process_group
from apexfx.report.html import page_data
from apexfx.report.memory import KINDS, MemoryTimeline
from tests.tables import table

WIDTH, LAYERS = 512, 6
LAYER = 4 * WIDTH * WIDTH  # bytes of a weight


def captured(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))
    before = [p.detach().clone() for p in model.parameters()]
    step = apexfx.train_step(model, F.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), opt_level="O0", inner="eager",
                             **options)
    report = step.capture(torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    assert all(map(torch.equal, before, model.parameters()))
    return step, report.memory()


def test_kinds_have_the_bytes_of_what_they_hold():
    _, timeline = captured(max_grad_norm=1.0)
    assert set(timeline.alive["parameters"]) == {LAYERS * LAYER}
    assert set(timeline.alive["optimizer state"]) == {2 * LAYERS * LAYER + 4 * (LAYERS + 1)}  # moments, counts, learning rate
    assert set(timeline.alive["inputs"]) == {2 * 4 * 4 * WIDTH}
    assert timeline.largest("gradients") == LAYERS * LAYER  # the norm needs all of them
    assert timeline.largest("activations") < LAYER
    assert timeline.peak == max(timeline.total) and len(timeline.total) == len(timeline.nodes)


@table(0, "world_size", [2, 4, 8])
def test_a_rank_holds_its_rows_of_a_sharded_model(world_size):
    """A part of each parameter and each moment; and whole, a group that is read and the next."""
    width, blocks = 250, 4
    with fake_process_group(world_size):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", inner="eager", max_grad_norm=1.0)
        step(torch.randn(2, width), torch.randn(2, width))
        memory = step.report.memory()
        rows = 4 * -(-width // world_size) * (width + 1)  # of a block
        moments = [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert memory.alive["parameters"][-1] == blocks * rows
        assert memory.largest("parameters") <= (blocks + 3 * world_size) * rows  # two are whole, one of them as it came, too
        assert set(memory.alive["optimizer state"]) == {2 * blocks * rows + 4 * (2 * blocks + 1)}  # counts, a learning rate
        assert sum(x.untyped_storage().nbytes() for x in moments) == 2 * blocks * rows
        assert memory.largest("gradients") == (blocks + world_size) * rows  # one is summed while the others are rows


@pytest.mark.long
def test_gradients_that_are_applied_early_are_not_alive_together():
    step, timeline = captured()
    assert timeline.largest("gradients") == 2 * LAYER
    _, late = captured(skip=["update_early"])
    assert late.largest("gradients") == LAYERS * LAYER
    assert step(torch.randn(4, WIDTH), torch.randn(4, WIDTH)).isfinite()  # the graph that was captured is the one that runs
    assert len(step.report.graphs) == 1


def test_it_is_shown():
    step, timeline = captured(max_grad_norm=1.0)
    lines = str(timeline).splitlines()
    assert lines[0].startswith("memory along the graph: at most ") and "gradients 6.00" in lines[0]
    assert all(f"{letter} {kind}" in lines[1] for kind, letter in KINDS.items())
    lines = lines[:lines.index("")]
    assert max(float(line.split()[0]) for line in lines[2:]) == pytest.approx(timeline.peak / 2**20, abs=0.01)
    assert max(line.count("G") for line in lines[2:]) > 10


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x):
        y = self.body(x)
        return (y[:, None] * y).sum()  # the peak


@pytest.mark.long
def test_the_peak_has_a_module_and_a_line():
    net = nn.Sequential(nn.Linear(4, 4), Squares())
    step = apexfx.train_step(net, lambda y: y, torch.optim.SGD(net.parameters(), lr=0.1), opt_level="O0", inner="eager")
    timeline = step.capture(torch.randn(64, 4)).memory()
    line = next(number for number, text in enumerate(open(__file__), 1) if text.endswith("# the peak\n"))
    assert timeline.peak_place == f"1, test_memory.py:{line}" and f" in {timeline.peak_place} (" in str(timeline)
    assert MemoryTimeline.from_json(asdict(timeline)) == timeline


def test_the_largest_tensors_at_the_peak_are_listed():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 64, bias=False)) for _ in range(2))
    model = nn.Sequential(*blocks)
    step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
    timeline = step.capture(torch.randn(512, 64), torch.randn(512, 64)).memory()
    assert "MiB, at gelu_backward in 1.1 (" in str(timeline)
    assert sum(tensor.bytes for tensor in timeline.tensors) == timeline.peak
    _, table = str(timeline).split("\n\n")
    assert_expected_inline("\n".join(line.rstrip() for line in table.splitlines()), """\
the largest tensors alive at gelu_backward:
  tensors    bytes each  tensor        kind         module         node
---------  ------------  ------------  -----------  -------------  -------------
        3     512.0 KiB  f32[512,256]  activations  {0, 1}.{0, 2}  mm, mm_{2, 5}
        1     512.0 KiB  f32[512,256]  activations  0.1            gelu
        1     512.0 KiB  f32[512,256]  activations  1.1            gelu_backward
        2     128.0 KiB  f32[512,64]   inputs       no module      batch[{0, 1}]
        1     128.0 KiB  f32[512,64]   activations  0.2            mm_1""")


def test_the_page_holds_the_areas():
    step, timeline = captured()
    memory = page_data(step.report.config, step.report.graphs, step.report.notes)["graphs"][0]["stages"][1]["memory"]
    assert len(memory["steps"]) == 5 and memory["peak"] == timeline.peak  # no buffers
    for kind, steps in memory["steps"].items():
        assert list(accumulate(steps)) == timeline.alive[kind]


def test_another_graph_has_none():
    model = apexfx.transform(nn.Linear(4, 4), inner="eager")
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="not that of a whole training step"):
        model.report.memory()
    assert str(MemoryTimeline([], {kind: [] for kind in KINDS})) == "the graph is empty"


@pytest.mark.long
def test_what_a_checkpoint_computes_again_lies_in_memory_of_its_own():
    class Blocks(nn.Module):
        def __init__(self, checkpoints):
            super().__init__()
            self.checkpoints = checkpoints
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            return x

    def activations(checkpoints):
        model = Blocks(checkpoints)
        step = apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
        return max(step.capture(torch.randn(512, 16), torch.randn(512, 16)).memory().alive["activations"])

    hidden = 512 * 64 * 4  # bytes: the results of a block's Linear and GELU
    assert activations(False) > 8 * hidden
    assert activations(True) < 5 * hidden  # those of one block, their gradient, and the inputs of the others
