"""Draw the losses of whole_steps.py: a panel for each model, a line for each variant.

    python benchmarks/loss_curves.py benchmarks/results/whole_steps_cuda.json docs/loss_curves_cuda.svg
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any

import harness

WIDTH, HEIGHT, LEFT, TOP = 360, 240, 50, 40  # of the area of a panel, and what is beside and above it
COLOURS = ("#0072b2", "#d55e00", "#56b4e9", "#e69f00", "#000000")  # told apart by the colour-blind, too (Okabe and Ito)


def picture(rows: list[dict[str, Any]]) -> str:
    """Return an SVG; what is not finite interrupts its line."""
    variants = list(dict.fromkeys(row["variant"] for row in rows if "losses" in row))
    models = list(dict.fromkeys(row["model"] for row in rows if "losses" in row))
    colours = {variant: COLOURS[i % len(COLOURS)] for i, variant in enumerate(variants)}
    parts = [_panel(LEFT + i * (WIDTH + LEFT), model, [row for row in rows if row["model"] == model and "losses" in row], colours)
             for i, model in enumerate(models)]
    below = TOP + HEIGHT + 45
    legend = "".join(f'<text x="{LEFT}" y="{below + 18 * i}" fill="{colours[variant]}">{escape(variant)}</text>\n'
                     for i, variant in enumerate(variants))
    size = f'width="{LEFT + len(models) * (WIDTH + LEFT)}" height="{below + 18 * len(variants)}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{"".join(parts)}{legend}</svg>\n')


def _panel(x: int, model: str, rows: list[dict[str, Any]], colours: dict[str, str]) -> str:
    finite = [loss for row in rows for loss in row["losses"] if math.isfinite(loss)] or [0.0]
    low, high, most = min(finite), max(finite), max(len(row["losses"]) for row in rows)

    def place(step: int, loss: float) -> str:
        return (f"{x + WIDTH * step / max(most - 1, 1):.1f},"
                f"{TOP + HEIGHT * (high - loss) / ((high - low) or 1.0):.1f}")

    lines = ""
    for row in rows:
        path, pen = "", "M"
        for step, loss in enumerate(row["losses"]):
            path, pen = (f"{path}{pen}{place(step, loss)} ", "L") if math.isfinite(loss) else (path, "M")
        lines += f'<path d="{path}" fill="none" stroke="{colours[row["variant"]]}" stroke-width="1.5"/>\n'
    return (f'<rect x="{x}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>\n'
            f'<text x="{x}" y="{TOP - 12}">{escape(model)}: loss of {most} steps</text>\n'
            f'<text x="{x - 4}" y="{TOP + 10}" text-anchor="end">{high:.2f}</text>\n'
            f'<text x="{x - 4}" y="{TOP + HEIGHT}" text-anchor="end">{low:.2f}</text>\n{lines}')


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    given.picture.write_text(picture(json.loads(given.record.read_text())["rows"]))


if __name__ == "__main__":
    main()
