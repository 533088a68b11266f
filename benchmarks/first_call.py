"""Measure what the first update of a small GPT costs, in seconds of the processor, against torch.compile of the same loop.

    python benchmarks/first_call.py                                       # every row, three turns
    python benchmarks/first_call.py --rows accumulate=4+Muon --turns 5
    python benchmarks/first_call.py --variants unproved train_step        # what the proof of the code takes (docs/proof.md)
    python benchmarks/first_call.py --variants torch.compile regional whole train_step eager --rows AdamW --width 256 \
        --layers 6 12 24 48 --cold --turns 1 --json FILE --picture docs/first_call.svg                   # by depth

A row is a training loop of a GPT (4 layers of width 128, or as given) that clips gradients, with AdamW or with Muon for the
matrices of its layers and AdamW for the rest, that updates after each call or after four. "regional" compiles each layer by
torch.compile, "whole" is the step without `outline_layers`, and "eager" makes no code. Each variant runs it to the end of
the first update in a new process, with an empty compile cache ("cold") and once more ("warm"). Seconds are those of the
processor, user and system, of that process and all that it starts, imports left out: a machine that others share changes them
little. Variants take turns. Columns: medians; this / the first variant, torch.compile, in the same turn (below 1 is cheaper),
the median, lowest and highest; how many files, and KiB, the C++ compiler was given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

HEADS, TOKENS, VOCABULARY, BATCH = 4, 64, 256, 8
ROWS = {"AdamW": (1, False), "Muon": (1, True), "accumulate=4": (4, False), "accumulate=4+Muon": (4, True)}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in self.qkv(self.norm_1(x)).chunk(3, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizers(model: Gpt, muon: bool) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.blocks.parameters() if muon and p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is each for each in matrices)]
    return [*([torch.optim.Muon(matrices, lr=1e-3)] if matrices else []), torch.optim.AdamW(rest, lr=1e-3)]


def by_hand(model: Gpt, calls: int, muon: bool, options: dict[str, Any]) -> Callable[..., object]:
    return loop(torch.compile(model), optimizers(model, muon), calls, options)


def regional(model: Gpt, calls: int, muon: bool, options: dict[str, Any]) -> Callable[..., object]:
    for block in model.blocks:
        block.compile()
    return loop(model, optimizers(model, muon), calls, options)


def loop(model: Callable[..., Tensor], updates: Sequence[torch.optim.Optimizer], calls: int,
         options: dict[str, Any]) -> Callable[..., object]:
    count, parameters = itertools.count(1), [p for update in updates for group in update.param_groups for p in group["params"]]

    def step(tokens: Tensor, targets: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=options["opt_level"] != "O0"):
            loss = loss_of(model(tokens), targets)
        (loss / calls).backward()
        if next(count) % calls == 0:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer in updates:
                optimizer.step()
                optimizer.zero_grad()

    return step


def by_train_step(model: Gpt, calls: int, muon: bool, options: dict[str, Any]) -> Callable[..., object]:
    import apexfx

    return apexfx.train_step(model, loss_of, optimizers(model, muon), accumulate=calls, max_grad_norm=1.0, **options)


def unproved(model: Gpt, calls: int, muon: bool, options: dict[str, Any]) -> Callable[..., object]:
    return by_train_step(model, calls, muon, {**options, "verify": "off"})


def whole(model: Gpt, calls: int, muon: bool, options: dict[str, Any]) -> Callable[..., object]:
    return by_train_step(model, calls, muon, {**options, "skip": ("outline_layers",)})


def eager(model: Gpt, calls: int, muon: bool, options: dict[str, Any]) -> Callable[..., object]:
    return by_train_step(model, calls, muon, {**options, "inner": "eager"})


VARIANTS = {"torch.compile": by_hand, "regional": regional, "whole": whole, "train_step": by_train_step, "unproved": unproved,
            "eager": eager}
COLOURS = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#000000", "#56b4e9")  # told apart by the colour-blind, too


def used(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def first_update(variant: str, row: str, level: str, layers: int, width: int) -> None:
    """Print what this process has used before the first update."""
    import apexfx  # noqa: F401

    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls, muon = ROWS[row]
    batch = torch.randint(VOCABULARY, (BATCH, TOKENS)), torch.randint(VOCABULARY, (BATCH, TOKENS))
    print(used(resource.RUSAGE_SELF) + used(resource.RUSAGE_CHILDREN), flush=True)
    step = VARIANTS[variant](Gpt(layers, width), calls, muon, {"opt_level": level})
    for _ in range(calls):
        step(*batch)


def processor_seconds(child: Sequence[str], folder: str) -> float:
    """Return those of a first update in a new process, and of all that it starts, which have ended when it has."""
    before = used(resource.RUSAGE_CHILDREN)
    child = subprocess.run([sys.executable, __file__, "--child", *child], stdout=subprocess.PIPE, check=True,
                           text=True, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder})
    return used(resource.RUSAGE_CHILDREN) - before - float(child.stdout)


def measure(*child: str, cold_alone: bool) -> dict[str, float]:
    """Return the seconds with an empty cache and with what that has left in it, and what was compiled."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"cold": processor_seconds(child, folder)}
        sizes = [path.stat().st_size for path in Path(folder).rglob("*.main.cpp")]
        if not cold_alone:
            found["warm"] = processor_seconds(child, folder)
    return found | {"files": len(sizes), "KiB": sum(sizes) / 1024}


def summary(row: str, layers: int, variant: str, found: Sequence[dict[str, float]],
            peer: Sequence[dict[str, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {"row": row, "layers": layers, "variant": variant}
    for kind in found[0].keys() & {"cold", "warm"}:
        ratios = [own[kind] / other[kind] for own, other in zip(found, peer)]
        result |= {f"{kind} s": statistics.median(each[kind] for each in found), f"{kind} ratio": statistics.median(ratios),
                   f"{kind} low": min(ratios), f"{kind} high": max(ratios)}
    return result | {"files": found[0]["files"], "KiB": found[0]["KiB"]}


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG: seconds with an empty cache over the number of layers, a line for each variant."""
    width, height, left, top = 460, 260, 50, 40
    variants, most = list(dict.fromkeys(row["variant"] for row in rows)), max(row["cold s"] for row in rows)
    deepest = max(row["layers"] for row in rows)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 140}" height="{top + height + 40}" '
             'font-family="sans-serif" font-size="12">', '<rect width="100%" height="100%" fill="white"/>',
             f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#888"/>',
             f'<text x="{left}" y="{top - 14}">seconds of the processor to the end of the first update, by layers</text>',
             f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{most:.0f}</text>',
             f'<text x="{left - 6}" y="{top + height}" text-anchor="end">0</text>']
    for layers in dict.fromkeys(row["layers"] for row in rows):
        x = left + width * layers / deepest
        parts.append(f'<text x="{x:.0f}" y="{top + height + 18}" text-anchor="middle">{layers}</text>')
    for variant, colour in zip(variants, COLOURS):
        points = [(left + width * row["layers"] / deepest, top + height * (1 - row["cold s"] / most))
                  for row in rows if row["variant"] == variant]
        parts.append(f'<polyline points="{" ".join(f"{x:.0f},{y:.0f}" for x, y in points)}" fill="none" stroke="{colour}" '
                     'stroke-width="2"/>')
        parts.append(f'<text x="{points[-1][0] + 8:.0f}" y="{points[-1][1] + 4:.0f}" fill="{colour}">{variant}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["torch.compile", "train_step"],
                        help="their times are compared with those of the first")
    parser.add_argument("--level", choices=("O0", "O1", "O2"), default="O0")
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="with an empty cache alone")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="an SVG by depth")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return first_update(*given.child[:3], *map(int, given.child[3:]))
    rows = []
    for row, layers in itertools.product(given.rows, given.layers):
        taken: dict[str, list[dict[str, float]]] = {variant: [] for variant in given.variants}
        for turn in range(given.turns):
            for variant in given.variants[turn % len(taken):] + given.variants[:turn % len(taken)]:
                taken[variant].append(measure(variant, row, given.level, str(layers), str(given.width), cold_alone=given.cold))
                print(row, layers, variant, json.dumps(taken[variant][-1]), flush=True)
        rows += [summary(row, layers, variant, found, taken[given.variants[0]]) for variant, found in taken.items()]
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    if given.picture is not None:
        given.picture.write_text(picture(rows))
    harness.write_record(given.json, level=given.level, layers=given.layers, width=given.width, turns=given.turns, rows=rows)


if __name__ == "__main__":
    main()
