"""Measure the host time of a training step, and of a transformed model's call, besides its graph.

    python benchmarks/host_time.py

A model of 300 parameters with AdamW state. Its graph runs once, and from then on computes nothing and returns what it returned
then, so that what is left is the host's. Candidates take turns of ten calls, on one thread and on the processor's time:

    dynamo         the function of the step on the same inputs, by torch.compile with such a graph: guards and nothing besides
    plain, ...     train_step() with these options
    compile        a model of two layers and its backward, by torch.compile with such a graph
    transform      the same by transform()

Columns: microseconds of a call, median; those above `dynamo`, or `compile`, in the same turn, the median and its 95 % interval.
The result is also written to results/host_time.json.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import apexfx
from apexfx._torch import boxed
from apexfx._torch_compilers import aot_autograd, dynamo_config
from apexfx.compiler import inner_compilers
from apexfx.train_step import step_graphs
from apexfx.train_step.function import compiled_separately, run_step

RESULTS = Path(__file__).parent / "results" / "host_time.json"
WIDTH, LAYERS = 4, 150
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0},
    "clipped, safeguard": {"max_grad_norm": 1.0, "safeguard": True},
}


def runs_once(graph: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs `graph` at its first call, and hands out the outputs of that from then on."""
    outputs: list[Any] = []

    def run(*args: Any) -> Any:
        if not outputs:
            outputs.append(graph(*args))
        return outputs[0]

    return run


@contextlib.contextmanager
def empty_graphs() -> Iterator[None]:
    """Have the graphs that are compiled in this context compute nothing but once."""
    eager = inner_compilers.INNER["eager"]
    inner_compilers.INNER["eager"] = lambda *args: runs_once(eager(*args))
    try:
        yield
    finally:
        inner_compilers.INNER["eager"] = eager


def make(options: dict[str, Any]) -> tuple[Any, Tensor, Tensor]:
    """Return a step that has run, and its batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = apexfx.train_step(model, F.mse_loss, optimizer, opt_level="O0", **{"inner": "eager", **options})
    x, y = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    with empty_graphs():
        for _ in range(3):
            step(x, y)
    return step, x, y


def dynamo() -> Callable[[], object]:
    """Return a call of the function that a step has Dynamo capture, on what that step calls it with."""
    step, x, y = make({})
    inputs = step._state.inputs(step.model)
    compiler = aot_autograd(fw_compiler=lambda gm, _: boxed(lambda args: gm(*args)), keep_inference_input_mutations=True)
    function = torch.compile(compiled_separately(run_step), fullgraph=True,
                             backend=lambda gm, examples: runs_once(compiler(gm, examples)))

    def call() -> None:
        with torch.no_grad():
            function(inputs, (x, y), {})

    with dynamo_config.patch(step_graphs._dynamo_settings()):
        call()
    return call


class TwoLayers(nn.Module):
    """Of a class of its own, so that its forward is what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def calls_of_models() -> dict[str, Callable[[], object]]:
    """Return a call with its backward of a model by torch.compile, and of one by transform(), whose graphs do what eager does."""
    x = torch.randn(2, WIDTH)
    compiler = aot_autograd(fw_compiler=lambda gm, _: boxed(lambda args: gm(*args)))
    models = {"compile": torch.compile(TwoLayers(), backend=compiler),
              "transform": apexfx.transform(TwoLayers(), opt_level="O0", inner="eager")}
    calls = {name: lambda model=model: model(x).sum().backward() for name, model in models.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    return calls


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    calls = {"dynamo": dynamo()}
    for name, options in VARIANTS.items():
        step, x, y = make(options)
        calls[name] = lambda step=step, x=x, y=y: step(x, y)
    calls.update(calls_of_models())
    candidates = {name: lambda call=call: [call() for _ in range(10)] for name, call in calls.items()}
    times = {name: [1e5 * taken for taken in seconds]
             for name, seconds in harness.interleave(candidates, rounds=rounds, clock=time.process_time).items()}
    rows = []
    for name, taken in times.items():
        base = times["compile" if name in ("compile", "transform") else "dynamo"]
        low, middle, high = harness.interval([own - alone for own, alone in zip(taken, base)])
        rows.append({"variant": name, "us": statistics.median(taken), "above": middle, "low": low, "high": high,
                     "ratio": harness.ratios(base, taken)[1]})
    print(tabulate([[r["variant"], f"{r['us']:.0f}", f"{r['above']:.0f}", f"{r['low']:.0f} to {r['high']:.0f}"] for r in rows],
                   headers=("variant", "us", "above", "95 %"), disable_numparse=True))
    harness.write_record(RESULTS, rows=rows)


if __name__ == "__main__":
    main()
