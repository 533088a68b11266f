"""The demo's picture: training loss over epochs as SVG, for light and for dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 84, 56  # margins around the plot
_MAX_SERIES = 3  # that are told apart by colour and dash

# Colours as attributes serve viewers that know no style sheet; the sheet adds the dark page.
_LIGHT = {"page": "#ffffff", "ink": "#1f2328", "grid": "#d8dde3",
          "line0": "#1f6fb4", "line1": "#c2410c", "line2": "#2f7d3b"}
_DARK = {"page": "#14171a", "ink": "#e6e8ea", "grid": "#3a4047",
         "line0": "#6cb4ee", "line1": "#ff9d5c", "line2": "#7fcf8b"}
_DASHES = ("", ' stroke-dasharray="8 6"', ' stroke-dasharray="2 5"')


def loss_chart(title: str, curves: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return an SVG picture of loss over epochs.

    Args:
        title: what is shown.
        curves: (name, loss of each epoch) of at most three trainings; a loss that is not finite is left out.
    """
    assert 0 < len(curves) <= _MAX_SERIES
    drawn = [[(epoch, loss) for epoch, loss in enumerate(losses, 1) if math.isfinite(loss)] for _, losses in curves]
    shown = [loss for points in drawn for _, loss in points] or [0.0]
    num_epochs = max(len(losses) for _, losses in curves)
    losses = ticks(min(shown), max(shown), 5)
    epochs = [t for t in ticks(1, num_epochs, 8, whole=True) if 1 <= t <= num_epochs]
    bottom = _HEIGHT - _BOTTOM

    def x(epoch: float) -> float:
        share = (epoch - 1) / (num_epochs - 1) if num_epochs > 1 else 0.5
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * share

    def y(loss: float) -> float:
        return bottom - (bottom - _TOP) * (loss - losses[0]) / (losses[-1] - losses[0])

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
             f'height="{_HEIGHT}" role="img" font-family="system-ui, sans-serif" font-size="13">',
             f"<title>{escape(title)}</title>", f"<style>{_style()}</style>",
             f'<rect class="page" width="100%" height="100%" fill="{_LIGHT["page"]}"/>',
             _text(_LEFT, 28, title, size=16, weight="bold")]
    digits = max(0, -math.floor(math.log10(losses[1] - losses[0]) + 1e-9))
    for loss in losses:
        parts += [_rule(_LEFT, y(loss), _WIDTH - _RIGHT, y(loss), "grid"),
                  _text(_LEFT - 8, y(loss) + 4.5, f"{loss:.{digits}f}", anchor="end")]
    for epoch in epochs:
        parts += [_rule(x(epoch), bottom, x(epoch), bottom + 5, "ink"),
                  _text(x(epoch), bottom + 21, f"{epoch:.0f}", anchor="middle")]
    parts += [_rule(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "ink"),
              _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "epoch", anchor="middle"),
              _text(0, 0, "training loss", anchor="middle",
                    move=f"translate(18 {(_TOP + bottom) / 2:.0f}) rotate(-90)")]
    for number, ((name, _), points) in enumerate(zip(curves, drawn)):
        at = _LEFT + number * (_WIDTH - _LEFT - _RIGHT) / len(curves)
        parts += [_line([(at, 54), (at + 34, 54)], number), _text(at + 42, 58.5, name)]
        parts.append(_line([(x(epoch), y(loss)) for epoch, loss in points], number))
        if len(points) == 1:  # no line to see
            parts.append(f'<circle class="line{number}" cx="{x(points[0][0]):.1f}" cy="{y(points[0][1]):.1f}" r="5" '
                         f'fill="{_LIGHT[f"line{number}"]}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten, about `most` of them, from at most `low` to at least `high`.

    Args:
        whole: whole numbers only.
    """
    if high <= low:  # some room around what does not vary
        room = abs(low) / 2 or 0.5
        low, high = low - room, high + room
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def _style() -> str:
    rules = [f"rect.page{{fill:{_DARK['page']}}} text{{fill:{_DARK['ink']}}}",
             *(f"line.{name}{{stroke:{_DARK[name]}}}" for name in ("ink", "grid")),
             *(f"polyline.line{i}{{stroke:{_DARK[f'line{i}']}}} circle.line{i}{{fill:{_DARK[f'line{i}']}}}"
               for i in range(_MAX_SERIES))]
    return f"@media (prefers-color-scheme: dark){{{' '.join(rules)}}}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 13, weight: str = "normal",
          move: str = "") -> str:
    moved = f' transform="{move}"' if move else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="{_LIGHT["ink"]}"{moved}>{escape(text)}</text>')


def _rule(x1: float, y1: float, x2: float, y2: float, name: str) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_LIGHT[name]}"/>'


def _line(points: Sequence[tuple[float, float]], number: int) -> str:
    where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (f'<polyline class="line{number}" points="{where}" fill="none" stroke="{_LIGHT[f"line{number}"]}" '
            f'stroke-width="2.5" stroke-linecap="round" stroke-linejoin="round"{_DASHES[number]}/>')
