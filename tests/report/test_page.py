"""The page: what it holds, that its data is never markup, and, in a browser, what it shows."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.report.data import Report
from apexfx.report.html import page_data, report_page
from apexfx.report.node_numbers import kernels_of
from apexfx.report.profile import KernelTime, Profile
from tests.report.test_report import Casts, Plan, Softsign, make_report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # scripts import what lies beside them
from page import chromium

HOSTILE = ("<img src=x onerror=alert(1)>", "</script><script>alert(2)</script>", "<!--<script>", "\u2028\ud800 {{data}}")
FETCHES = re.compile(r"\bfetch\(|XMLHttp|WebSocket|\bimport\(|@import|url\((?!#)|innerHTML|outerHTML|document\.write|eval\(")


class _Page(HTMLParser):
    """Checks that every element is closed where it should be, and keeps the scripts, the style and the attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "input"):
            self.open.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, text):
        if self.open and self.open[-1] in ("script", "style"):
            self.texts.append(text)


def page_of(report, **measured):
    page = _Page(report_page(page_data(report.config, report.graphs, report.notes, **measured)))
    return page, next(json.loads(text) for text in page.texts if text.startswith('{"options"'))


def num_changed(edits):
    """Return (lines removed, lines added)."""
    return sum(end - start for start, end, _, _ in edits), sum(end - start for _, _, start, end in edits)


def test_the_page_is_one_well_formed_file(tmp_path):
    report = make_report(Softsign(), Casts(), Plan(), ddp=True, depth=3)
    report.note("an <angle> bracket")
    report.to_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page, data = page_of(report)
    assert not [row for row in page.attributes if row[1] in ("src", "href", "style") or row[1][:2] == "on"], "nothing is fetched"
    own = text.replace(page.texts[-8], "")  # dagre has a comment with its address
    assert not FETCHES.search(own) and "default-src 'none'" in text
    softsign, casts, _ = data["graphs"][0]["stages"][0]["passes"]
    assert num_changed(softsign["edits"]) == (3 + 2 + 1, 9 + 2 + 1), "tanh, the products that read one, the return"
    assert casts["edits"] == [] and softsign["places"] == [[3, "layers.{0..2}: tanh to softsign  (model.py:12)"]]
    assert "note: an <angle> bracket" in data["remarks"] and "<angle>" not in text
    assert data["graphs"][0]["plan"]["buckets"][0]["slots"] == [["weight", 64]]
    with pytest.raises(RuntimeError, match="no graph yet"):
        Report({"opt_level": "O1"}).to_html(tmp_path / "none.html")


def test_only_the_scripts_and_the_style_of_the_package_may_run():
    page, _ = page_of(make_report(Softsign()))
    policy = next(value for tag, name, value in page.attributes if name == "content" and "default-src" in value)
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    shipped = [text for text in page.texts if not text.startswith('{"options"')]
    assert allowed == {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in shipped}
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_data_and_never_markup(name):
    report = make_report(Softsign(), Casts())
    report.note(name)
    stage = report.graphs[0].forward
    stage.passes[0].matches[0] = type(stage.passes[0].matches[0])(name, name, name, name)
    stage.places.modules[name] = ["mm_default"]
    stage.passes[0].code += f"\n    # File: {name}:1 in {name}"
    text = report_page(page_data(report.config, report.graphs, report.notes))
    text.encode()
    page, data = page_of(report)
    assert len(page.texts) == 10, "a style, eight scripts and the data"
    assert f"note: {name}" in data["remarks"] and name in [path for path, _ in data["graphs"][0]["stages"][0]["modules"]]
    assert "<img" not in text and "alert(2)</script>" not in text


def test_casts_reach_the_page():
    _, data = page_of(make_report(Casts(), depth=2))
    rows = [[data["texts"][x] for x in row[1:10]] for row in data["casts"]]
    assert rows[0] == ["cast_0", "linear", "half", "tensor cores", "f32", "bf16", "layers.0.weight", "model.py:3", ""]
    assert [row[-1] for row in data["casts"]] == [1024] * 3


def test_texts_are_written_once_and_whole():
    report, name = make_report(Softsign(), Casts()), "4a2ad14e7181d5235b64cf37fcd715cb5ce5c8e7"
    entry = report.graphs[0].forward.passes[-1]
    entry.code = entry.code.replace("        return ", f"        group = '{name}'\n        return ")
    _, data = page_of(report)
    for label, numbers in data["graphs"][0]["stages"][0]["codes"]:
        text = report.code(after=None if label == entry.name else label)
        assert [data["texts"][number] for number in numbers] == [line for line in text.splitlines() if line.strip()]
    assert len(set(data["texts"])) == len(data["texts"]) and any(name in text for text in data["texts"])


def small_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return apexfx.train_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), dtype=torch.bfloat16, inner="eager")


BATCH = torch.randn(2, 4), torch.randn(2, 4)


def test_the_times_of_a_profile_come_with_the_page():
    step = small_step()
    profile = step.report.profile(step, *BATCH, num_steps=1, num_warmup=0)
    _, data = page_of(step.report, profile=profile)
    forward, whole = data["graphs"][0]["stages"]
    ours = sum(time.ms for time in profile.times if time.graph == 0)
    assert 0.9 * ours < sum(ms for _, ms, _, _ in whole["kernels"]) <= 1.001 * ours
    assert data["profile"]["slowest"] == data["profile"]["tables"][0][1][0][:2]
    [tanh] = [nodes for name, _, _, nodes in forward["kernels"] if name == "tanh"]
    assert [data["texts"][node] for node in tanh] == ["input_2"], "the captured graph, too"
    assert [what for what, _ in data["profile"]["tables"]] == ["module", "op", "pass", "line"] and data["comparison"] is None
    with pytest.raises(ValueError, match="profile= names no node"):
        page_of(make_report(Softsign()), profile=profile)


def test_a_kernel_of_a_forward_is_of_the_captured_graph_alone():
    """The graph that runs may give the name of one of its nodes to another."""
    report = make_report(Softsign())
    first, second = report.graphs[0].forward.ops[:2]
    time = KernelTime(kernel="k", kind="compute", ms=1.0, graph=0, stage="forward", nodes=(first.node,), captured=(second.node,))
    assert kernels_of(report.graphs, Profile("cpu", 1.0, (1.0,), (time,))) == {(0, "forward"): [(time, [second.node])]}


@pytest.mark.long
def test_the_errors_of_a_comparison_come_with_the_page():
    step = small_step()
    comparison = apexfx.compare(step, BATCH)
    _, data = page_of(step.capture(*BATCH), comparison=comparison)
    forward, whole = data["graphs"][0]["stages"]
    errors = {data["texts"][node]: error for node, error in whole["errors"]["error introduced"]}
    assert set(forward["errors"]) == {"error introduced", "share of the error"}
    assert any("tanh_backward" in node for node in errors) and all(error is not None for error in errors.values())
    [row] = [row for row in data["comparison"]["rows"] if "torch.tanh" in row["cells"]]
    assert row["at"] == [0, "forward", "input_2"] and data["comparison"]["verdict"] == comparison.summary
    with pytest.raises(ValueError, match="comparison= names ops that"):
        page_of(make_report(Softsign()), comparison=comparison)


def test_a_backward_belongs_to_the_module_of_its_forward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    step = apexfx.train_step(model, lambda y: y.square().mean(), torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0",
                             inner="eager")
    transformed = apexfx.transform(model, opt_level="O0", inner="eager").capture(torch.randn(2, 4))
    for report, stage in ((step.capture(torch.randn(2, 4)), "step"), (transformed, "backward")):
        places = report.stage(stage).places
        assert any("tanh_backward" in name for name in places.backward_of["1"]), (stage, places)
        assert set(places.backward_of) == {"0", "1", "2"} and places.flops


def browser():
    """Return Chromium without a window, or skip."""
    try:
        return chromium()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_a_browser_shows_searches_folds_and_draws(tmp_path):
    report = make_report(Softsign(), Casts(), Plan(), ddp=True, depth=12)
    for name in HOSTILE[:3]:  # a driver passes no half of a surrogate pair on
        report.note(name)
    stage = report.graphs[0].forward
    stage.places.modules = {f"layers.{i}": stage_nodes for i, stage_nodes in enumerate(
        [[f"mm_default{'_' * bool(i)}{i or ''}", f"abs_default{'_' * bool(i)}{i or ''}", f"add_tensor{'_' * bool(i)}{i or ''}",
          f"div_tensor{'_' * bool(i)}{i or ''}"] for i in range(12)])}
    stage.places.modules[HOSTILE[0]] = []
    slow = KernelTime(kernel=HOSTILE[0], kind="compute", ms=2.0, graph=0, stage="forward", modules=("layers.7",),
                      captured=("mm_default_7", "abs_default_7"), ops=("aten.mm",), passes=("",))
    report.to_html(tmp_path / "report.html", profile=Profile("cpu", 3.0, (3.0,), (slow,)))
    page = browser()
    try:
        def go(route):
            page.execute_script("location.hash = arguments[0]; window.scrollTo(0, 0)", route)
            page.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 60))")

        def find(selector):
            return page.find_elements("css selector", selector)

        page.get((tmp_path / "report.html").as_uri())
        assert page.title.startswith("apexfx: O2")
        assert not find("img") and HOSTILE[0] in find("main")[0].text
        assert [span.text for span in find("main .legend span")] == ["48 in f32"] and find("nav .legend")
        assert "of it in layers.7" in find(".cards")[0].text
        dtypes = ["bf16", "f16", "f64", "i64", "bool", "complex64"]
        page.execute_script("document.querySelector('nav .legend').append(...arguments[0].map(chip))", dtypes)
        page.execute_script("document.querySelectorAll('nav details').forEach(each => { each.open = true; })")
        assert find("nav")[0].get_property("scrollWidth") == find("nav")[0].get_property("clientWidth")
        side = find("nav")[0].rect
        assert all(each.rect["x"] + each.rect["width"] < side["x"] + side["width"] for each in find("nav .legend span"))
        assert HOSTILE[0] in find("nav")[0].get_attribute("textContent")
        go("#pass/0/forward/0")
        assert find(".line.removed") and find(".line.added") and len(find(".panes .lines")) == 2
        left, right = find(".panes .lines")
        page.execute_script("arguments[0].scrollTop = 40", left)
        page.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 60))")
        assert right.get_property("scrollTop") == left.get_property("scrollTop") == 40
        go("#code/0/forward/1")
        folded = find(".line.fold")
        before = len(find(".line"))
        folded[1].click()
        assert len(find(".line")) > before, "a layer unfolds"
        page.execute_script("document.querySelectorAll('.line.fold')[1].focus()")
        page.switch_to.active_element.send_keys("\n")
        assert len(find(".line")) == before and page.switch_to.active_element == find(".line.fold")[1], "and folds by key"
        page.execute_script("chosen.value = 'time'; chosen.dispatchEvent(new Event('change'))")
        page.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 60))")
        assert [cell.text for cell in find(".measured") if cell.text] == ["2.00 ms"], "of its layer"
        go("#module/0/forward/")
        assert len(find("#drawing .module")) == 12
        find("#search")[0].send_keys("mm_default_7")
        assert "mm_default_7" in find("#results a")[0].text
        find("#search")[0].send_keys("\n")
        page.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 60))")
        assert "mm_default_7" in find(".line.at")[0].text
        next(name for name in find(".line.at .name") if name.text == "mm_default_7").click()
        assert "layers.7" in find("aside")[0].text
        assert f"kernel {HOSTILE[0]}, which computes 1 other node" in find("aside")[0].text
        colours = {page.execute_script("return getComputedStyle(document.body).backgroundColor")}
        find("#theme")[0].click()
        colours.add(page.execute_script("return getComputedStyle(document.body).backgroundColor"))
        assert len(colours) == 2
        for route in ("#ops", "#casts", "#profile", "#buckets/0/weight", "#time/0/forward", "#pass/0/forward/all", "#overview"):
            go(route)
            assert "Nothing can be shown" not in find("main")[0].text
        assert not [row for row in page.get_log("browser") if row["level"] == "SEVERE"]
    finally:
        page.quit()
