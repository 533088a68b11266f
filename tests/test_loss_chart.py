"""The demo's picture of the loss: round ticks, a fitted range, everything inside the frame and named, on any page."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from apexfx.demo.loss_chart import _DARK, _LIGHT, loss_chart, ticks

SVG = "{http://www.w3.org/2000/svg}"
CURVES = [("O2, 2 ranks", [1.09, 0.637, 0.569, 0.538]), ("float32 <eager>", [1.087, 0.635, 0.562, 0.536])]


def drawn(*curves, title="loss of a training"):
    return ElementTree.fromstring(loss_chart(title, curves))


def numbers(root):
    return [t.text for t in root.iter(f"{SVG}text") if re.fullmatch(r"-?[\d.]+", t.text)]


@pytest.mark.parametrize("low, high, expected", [
    (0.517, 1.089, [0.4, 0.6, 0.8, 1.0, 1.2]), (0.0, 2.3, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]),
    (0.25, 0.25, [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4]),
    (0.0, 0.0, [-0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6]), (120.0, 480.0, [100.0, 200.0, 300.0, 400.0, 500.0]),
])  # fmt: skip
def test_ticks_are_round_and_fit_the_range(low, high, expected):
    assert ticks(low, high, 5) == pytest.approx(expected)


@pytest.mark.parametrize("num_epochs, expected", [
    (1, ["1"]), (2, ["1", "2"]), (8, [*"12345678"]), (30, ["5", "10", "15", "20", "25", "30"]),
    (100, ["20", "40", "60", "80", "100"]),
])  # fmt: skip
def test_epochs_are_whole(num_epochs, expected):
    root = drawn(("one", [0.5] * num_epochs))
    assert [n for n in numbers(root) if "." not in n] == expected


def test_curves_fill_the_plot_and_stay_inside_it():
    root = drawn(*CURVES)
    axis = [float(line.get("y1")) for line in root.iter(f"{SVG}line") if line.get("class") == "grid"]
    lines = [line for line in root.iter(f"{SVG}polyline") if len(line.get("points").split()) == 4]
    assert len(lines) == 2
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        heights = [y for _, y in points]
        assert heights == sorted(heights), "the loss falls, so the curve does"
        assert min(axis) <= min(heights) and max(heights) <= max(axis)
        assert max(heights) - min(heights) > 0.6 * (max(axis) - min(axis))
        assert points[0][0] < points[-1][0] <= 640
    assert numbers(root)[:5] == ["0.4", "0.6", "0.8", "1.0", "1.2"]


def test_everything_is_named():
    texts = [t.text for t in drawn(*CURVES, title="Loss & more").iter(f"{SVG}text")]
    assert {"Loss & more", "epoch", "training loss", "O2, 2 ranks", "float32 <eager>"} <= set(texts)
    assert drawn(*CURVES, title="Loss & more").find(f"{SVG}title").text == "Loss & more"


@pytest.mark.parametrize("losses", [[0.0], [math.nan], [0.3, math.inf, 0.2], [2.0]])
def test_a_loss_that_is_not_finite_or_alone_is_drawn_all_the_same(losses):
    text = loss_chart("odd", [("a", losses), ("b", [1.0] * len(losses))])
    assert "nan" not in text and "inf" not in text
    assert ElementTree.fromstring(text).findall(f"{SVG}circle") or len(losses) > 1


def luminance(colour):
    linear = [(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
              for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [_LIGHT, _DARK], ids=["light", "dark"])
def test_colours_are_legible(colours):  # WCAG 2.1: 4.5 for text, 3 for lines
    page = luminance(colours["page"])
    for name in ("ink", "line0", "line1", "line2"):
        light, dark = sorted((luminance(colours[name]), page), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= (4.5 if name == "ink" else 3), name


def test_a_dark_page_gets_colours_of_its_own():
    style = drawn(*CURVES).find(f"{SVG}style").text
    assert style.startswith("@media (prefers-color-scheme: dark)") and all(c in style for c in _DARK.values())
