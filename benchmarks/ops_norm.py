"""Measure the norms, forward and backward, against torch; fill the table of the passes that put them into graphs.

    python benchmarks/ops_norm.py                      eager, and compiled by Inductor; one row a shape and dtype
    python benchmarks/ops_norm.py --write              also write apexfx/passes/measured_speedups.py
    python benchmarks/ops_norm.py --device cuda --json out.json
    python benchmarks/ops_norm.py --write --runs a.json b.json c.json    the same, from the medians of earlier runs
    python benchmarks/ops_norm.py --inner inductor --op layer_norm,rms_norm --shapes 64x64,512x256

The passes leave alone what is smaller than the smallest shape of the table, since the kernels lose there (the last line
shows it); batch norm still wins on smaller images, so its limit is `SMALLEST_IMAGE`.

What is measured in eager mode is also among the rows of benchmarks/ops.py (`rows`).

"ratio" is torch / apexfx, above 1 where the op is faster. Each pair runs interleaved in one process; a time is the median.
Ratios differ from process to process, so the table is made of several (`--runs`). `--clock cpu` counts the process's CPU time
instead of wall time, for a machine that others use: give it `--threads 1`, since idle threads spin. In the Inductor rows the
norm stands as in a transformer, after a residual add, so that the decomposition may fuse what it can; batch norm stands
before an add and a ReLU, as in a ResNet, in both.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import harness
import torch
import torch.nn.functional as F
from op_row import Row
from torch import Tensor

from apexfx.ops.layer_norm import add_layer_norm, layer_norm
from apexfx.ops.rms_norm import add_rms_norm, rms_norm
from apexfx.ops.sync_batch_norm import sync_batch_norm

SHAPES = ((4096, 768), (8192, 1024), (512, 4096))
LARGE_SHAPES = ((16384, 4096), (65536, 1024), (8192, 16384))  # beyond the cache of a large GPU
IMAGES = ((16, 32, 24, 24), (32, 64, 56, 56), (32, 256, 14, 14), (32, 1024, 7, 7))  # of batch norm, channels_last
SMALLEST_IMAGE = (4, 16, 12, 12)  # ratio to Inductor, CPU: float32 1.19, bfloat16 1.21; of (4, 16, 8, 8) 1.01, 1.00
DTYPES = {"cpu": (torch.float32, torch.float16, torch.bfloat16), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
EPS = 1e-5
MARGIN = 1.05  # a kernel that wins by less than this on average is not worth a node that nothing fuses with
FLOOR = 0.9  # nor is one that loses more than this on a shape
TABLE = Path(__file__).resolve().parent.parent / "apexfx/passes/measured_speedups.py"


@dataclass(frozen=True)
class Measurement:
    """One measurement: seconds by the kernel and by torch, forward and backward."""

    op: str
    inner: str
    device: str
    dtype: str
    shape: tuple[int, ...]
    kernel_s: float
    torch_s: float

    @property
    def ratio(self) -> float:
        return self.torch_s / self.kernel_s


def written_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm as Llama and T5 write it."""
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normalized.to(x.dtype)


def batch_norm_block(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Batch norm as it ends a residual block."""
    return F.relu(F.batch_norm(x, None, None, weight, bias, True, 0.1, EPS) + residual)


def residual_block(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that norms x + residual and passes the sum on, as a transformer layer does."""

    def block(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, *parameters), total

    return block


# name -> (by the kernel, by torch), both of (x, *parameters), or of (x, residual, *parameters)
OPS: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
    "layer_norm": (
        lambda x, weight, bias: layer_norm(x, weight, bias, 1, EPS)[0],
        lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS),
    ),
    "rms_norm": (
        lambda x, weight: rms_norm(x, weight, 1, EPS)[0],
        lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
    ),
    "written_rms_norm": (lambda x, weight: rms_norm(x, weight, 1, EPS)[0], written_rms_norm),
    "add_layer_norm": (
        lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias, 1, EPS)[:2],
        residual_block(lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias, EPS)),
    ),
    "add_rms_norm": (
        lambda x, residual, weight: add_rms_norm(x, residual, weight, 1, EPS)[:2],
        residual_block(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS)),
    ),
    "add_written_rms_norm": (
        lambda x, residual, weight: add_rms_norm(x, residual, weight, 1, EPS)[:2], residual_block(written_rms_norm),
    ),
    "batch_norm": (
        lambda x, residual, weight, bias: sync_batch_norm(x, weight, bias, eps=EPS, residual=residual, relu=True),
        batch_norm_block,
    ),
}


def training_step(function: Callable[..., object], inputs: tuple[Tensor, ...]) -> Callable[[], None]:
    """Return a call that runs `function` and its backward with output gradients that the first call draws: it may compile."""
    grads: list[Tensor] = []

    def run() -> None:
        outputs = function(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads.extend(torch.randn_like(output) for output in outputs[len(grads):])
        torch.autograd.grad(outputs, inputs, grads)

    return run


def rows(device: str) -> Iterator[Row]:
    """Yield the rows of the norms and of those of a sum, forward and backward; each builds its tensors when it is reached."""
    for op in ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"):
        kernel, by_torch = OPS[op]
        adds = op.startswith("add_")
        others = {"torch": by_torch, "written out": written_rms_norm} if op == "rms_norm" else {"torch": by_torch}
        for dtype in DTYPES[device]:
            for rows, columns in LARGE_SHAPES if device == "cuda" else SHAPES:
                parameters = [torch.randn(columns, device=device, dtype=dtype).requires_grad_()
                              for _ in range(1 if "rms" in op else 2)]  # fmt: skip
                several = [torch.randn(rows, columns, device=device, dtype=dtype).requires_grad_()
                           for _ in range(3 if device == "cuda" else 1)]  # fmt: skip
                residual = [torch.randn_like(several[0]).requires_grad_()] if adds else []
                if adds and device == "cpu":
                    torch._dynamo.reset()
                    others["Inductor"] = torch.compile(by_torch, dynamic=False)
                steps = {name: harness.rotate([training_step(function, (x, *residual, *parameters)) for x in several])
                         for name, function in {"ours": kernel, **others}.items()}  # fmt: skip
                # x read and y written; then grad and x read, dx written. With a sum: x, residual, y, sum; grad, sum, its grad, dx
                yield Row(f"{op} {str(dtype).removeprefix('torch.')} {rows}x{columns}", steps.pop("ours"), steps,
                          (8 if adds else 5) * several[0].nbytes, 1.0)  # fmt: skip


def measure(
    op: str, inner: str, device: str, dtype: torch.dtype, shape: tuple[int, ...], seconds: float, clock: Callable[[], float]
) -> Measurement:
    """Time one op, shape and dtype both ways."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype).requires_grad_()

    parameters = [draw(shape[1]) for _ in range(1 if "rms" in op else 2)]
    functions: list[Callable[..., object]] = list(OPS[op])
    inputs = (draw(*shape), *parameters)
    if op == "batch_norm":
        images = [draw(*shape).detach().contiguous(memory_format=torch.channels_last).requires_grad_() for _ in range(2)]
        inputs = (*images, *(p.detach().float().requires_grad_() for p in parameters))
        functions = [torch.compile(f, fullgraph=True) for f in functions] if inner == "inductor" else functions
    elif inner == "inductor" or op.startswith("add_"):
        functions = functions if op.startswith("add_") else [residual_block(f) for f in functions]
        functions = [torch.compile(f, fullgraph=True) for f in functions] if inner == "inductor" else functions
        inputs = (draw(*shape), draw(*shape), *parameters)
    steps = {name: training_step(function, inputs) for name, function in zip(("kernel", "torch"), functions)}
    for step in [*steps.values()] * 3:
        step()
    times = harness.interleave(steps, rounds=9, seconds=seconds, device=device, clock=clock)
    kernel_s, torch_s = (statistics.median(taken) for taken in times.values())
    torch._dynamo.reset()
    return Measurement(op, inner, device, str(dtype).removeprefix("torch."), shape, kernel_s, torch_s)


def smallest_shape(op: str) -> tuple[int, ...]:
    """Return the shape below which the passes leave `op` to Inductor."""
    return SMALLEST_IMAGE if op == "batch_norm" else min(SHAPES, key=math.prod)


def measure_all(
    arguments: argparse.Namespace, shapes: list[tuple[int, ...]], clock: Callable[[], float]
) -> list[Measurement]:
    """Measure and print what the command line asks for; `shapes` in place of the table's where there are any.

    The file of `--json` is written after every row; what it holds already is left out with `--missing`.
    """
    rows = load([arguments.json]) if arguments.missing and arguments.json.exists() else []
    done = {(row.op, row.inner, row.device, row.dtype, row.shape) for row in rows}
    print(f"{'inner':9}{'op':18}{'dtype':10}{'shape':18}{'apexfx ms':>11}{'torch ms':>11}{'ratio':>7}")
    for inner in arguments.inner.split(","):
        for op in arguments.op.split(","):
            for dtype in DTYPES[arguments.device]:
                for shape in shapes or (IMAGES if op == "batch_norm" else SHAPES):
                    if (op, inner, arguments.device, str(dtype).removeprefix("torch."), shape) in done:
                        continue
                    row = measure(op, inner, arguments.device, dtype, shape, arguments.seconds, clock)
                    rows.append(row)
                    print(f"{inner:9}{op:18}{row.dtype:10}{shape!s:18}{1e3 * row.kernel_s:11.3f}"
                          f"{1e3 * row.torch_s:11.3f}{row.ratio:7.2f}", flush=True)  # fmt: skip
                    if arguments.json:
                        save(arguments.json, rows)
    return rows


def save(path: Path, rows: list[Measurement]) -> None:
    harness.write_whole(path, json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1))


def load(paths: list[Path]) -> list[Measurement]:
    saved = [row for path in paths for row in json.loads(path.read_text())]
    rows = [Measurement(**{field.name: row[field.name] for field in fields(Measurement)}) for row in saved]
    return [replace(row, shape=tuple(row.shape)) for row in rows]


def medians(runs: list[Path]) -> tuple[list[Measurement], int]:
    """Return, of all that the files hold, the measurement of the median ratio, and in how many files each is at least."""
    same: dict[tuple[object, ...], list[Measurement]] = {}
    for row in load(runs):
        same.setdefault((row.op, row.inner, row.device, row.dtype, row.shape), []).append(row)
    middle = [sorted(rows, key=lambda row: row.ratio)[len(rows) // 2] for rows in same.values()]
    return middle, min(map(len, same.values()))


def table_source(rows: list[Measurement], old: dict, clock: str, processes: int) -> str:
    """Return the source of the pass's table: the old entries, with those measured now in their place, where they are faster."""
    entries = dict(old)
    for key in sorted({(r.op, r.device, r.dtype) for r in rows if r.inner == "inductor"}):
        ratios = [r.ratio for r in rows if (r.op, r.device, r.dtype) == key and r.inner == "inductor"]
        entries[key] = (round(math.exp(statistics.fmean(map(math.log, ratios))), 2), round(min(ratios), 2))
    entries = {key: (mean, smallest) for key, (mean, smallest) in entries.items() if mean >= MARGIN and smallest >= FLOOR}
    lines = [f"    {key!r}: {value!r},".replace("'", '"') for key, value in sorted(entries.items())]
    return "\n".join([
        '"""Measured: how much faster the apexfx norm is than what Inductor makes of torch\'s; data only.',
        "",
        f"Written by benchmarks/ops_norm.py --write; last run: {', '.join(sorted({r.op for r in rows}))}",
        f"(torch {torch.__version__}, {torch.get_num_threads()} thread(s), {clock} time, {processes} process(es)).",
        "Entries that a run does not measure stay as an earlier one left them.",
        "(op, device type, dtype of x) -> (geometric mean over the shapes, smallest) of the ratio",
        f"time(torch) / time(apexfx), forward and backward, shapes {', '.join(map(str, SHAPES))};",
        f"batch_norm with add and ReLU: {', '.join(map(str, IMAGES))}, channels_last.",
        f"A combination that is not here was not measured, or is below {MARGIN} on average or {FLOOR} on a shape,",
        "and is left to Inductor. So is an input of fewer elements than LEAST_ELEMENTS, those of the smallest",
        f"shape above; of batch_norm, of a smaller image on which it still wins, {SMALLEST_IMAGE}.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "LEAST_ELEMENTS: dict[str, int] = {",
        *(f'    "{op}": {math.prod(smallest_shape(op))},' for op in sorted(OPS)),
        "}",
        "",
        "RATIO: dict[tuple[str, str, str], tuple[float, float]] = {",
        *lines,
        "}",
        "",
    ])


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", default="wall", choices=("wall", "cpu"))
    parser.add_argument("--inner", default="eager,inductor")
    parser.add_argument("--op", default=",".join(OPS))
    parser.add_argument("--shapes", help="in place of the table's, as 64x64,512x256")
    parser.add_argument("--seconds", type=float, default=1.0, help="a row")
    parser.add_argument("--json", type=Path, help="written after every row")
    parser.add_argument("--missing", action="store_true", help="only the rows that the file lacks")
    parser.add_argument("--write", action="store_true", help="update the pass's table")
    parser.add_argument("--runs", nargs="+", type=Path, help="files of --json: take their medians in place of measuring")
    arguments = parser.parse_args()
    if arguments.missing and not arguments.json:
        parser.error("--missing needs --json")
    if arguments.shapes and arguments.write:
        parser.error("--write measures the table's own shapes: leave --shapes out")
    given = [tuple(map(int, shape.split("x"))) for shape in (arguments.shapes or "").split(",") if shape]
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    rows, processes = medians(arguments.runs) if arguments.runs else (measure_all(arguments, given, clock), 1)
    if arguments.runs and arguments.json:
        save(arguments.json, rows)
    if arguments.write:
        old: dict = {}
        if TABLE.exists():
            from apexfx.passes.measured_speedups import RATIO

            old = RATIO
        TABLE.write_text(table_source(rows, old, arguments.clock, processes))


if __name__ == "__main__":
    main()
