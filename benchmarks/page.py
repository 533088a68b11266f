"""Open the page of a BERT's training step in Chromium: how long it takes to load, to search, to draw, and how it scrolls.

    python benchmarks/page.py                        # BERT 6x512, with a profile; --keep report.html keeps the page
    python benchmarks/page.py --page report.html     # a page that is there

Columns: milliseconds, the median of `--rounds` loads of the page and the slowest. "load" is until the first frame is drawn; what
follows, from the press of a key or button until the next frame. Without selenium (pip: apexfx[browser]), Chromium and its driver
(Debian: chromium, chromium-driver) nothing can be measured, which is said.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness
from tabulate import tabulate

_FRAME = "requestAnimationFrame(() => setTimeout(() => done(performance.now() - begin)))"  # behind the next frame
_BEGIN = "const done = arguments[arguments.length - 1], begin = performance.now();"
_GO = "addEventListener('hashchange', () => {}, {{ once: true }}); location.hash = arguments[0];"
_TYPE = """const box = document.getElementById("search"); box.value = arguments[0]; box.dispatchEvent(new Event("input"));"""
_LOAD = """return Math.max(performance.getEntriesByType("navigation")[0].loadEventEnd,
    ...performance.getEntriesByType("paint").map(paint => paint.startTime));"""
_SCROLL = """const done = arguments[0], list = document.querySelector(".lines"), frames = [];
let last = performance.now();
const step = now => {
  frames.push(now - last);
  last = now;
  list.scrollTop += 400;
  if (frames.length < 60) requestAnimationFrame(step); else done(Math.max(...frames.slice(2)));
};
requestAnimationFrame(step);"""


def chromium(width: int = 1400, height: int = 900) -> Any:
    """Return a driver of a Chromium without a window.

    Raises:
        RuntimeError: there is none; the message says what is missing.
    """
    try:
        from selenium import webdriver
    except ImportError as error:
        raise RuntimeError("selenium is not installed") from error
    programs = [next((path for path in names if Path(path).exists()), None)
                for names in (("/usr/bin/chromium", "/usr/bin/google-chrome"), ("/usr/bin/chromedriver",))]  # fmt: skip
    if None in programs:
        raise RuntimeError("Chromium or its driver is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))


def write_page(path: Path, layers: int) -> None:
    """Write the page of a BERT's training step that was profiled."""
    import torch
    import train_step

    torch.manual_seed(0)
    model, options = train_step.encoder(layers, 512, 8, 128), {"dtype": torch.bfloat16, "inner": "eager"}
    step = train_step.whole(model, options, clip=True, calls=1)
    batch = torch.randn(2, 128, 512), torch.randint(0, 10, (2,))
    step(*batch)
    profile = step.report.profile(step, *batch, num_steps=1, num_warmup=0)
    step.report.to_html(path, profile=profile)


def measure(browser: Any, page: Path) -> dict[str, float]:
    """Open the page once and return what -> milliseconds."""

    def timed(action: str, *arguments: Any) -> float:
        return browser.execute_async_script(f"{_BEGIN} {action} {_FRAME}", *arguments)

    def go(route: str) -> float:
        return browser.execute_async_script(f"{_BEGIN} {_GO.format(_FRAME)}", route)

    browser.get("about:blank")
    browser.get(page.resolve().as_uri())
    times = {"load": browser.execute_script(_LOAD)}
    times["first search"] = timed(_TYPE, "linear")
    times["search"] = timed(_TYPE, "linear_3")
    stages = browser.execute_script("return data.graphs.map(g => [g.index, g.stages.map(s => s.stage).pop()])")
    graph, stage = stages[0]
    layer = browser.execute_script("return stageOf(arguments[0], arguments[1]).modules.map(([path]) => path)"
                                   ".find(path => /\\d$/.test(path)) ?? ''", graph, stage)  # fmt: skip
    times["model drawn"] = go(f"#module/{graph}/{stage}/")
    times["layer drawn"] = go(f"#module/{graph}/{stage}/{layer}")
    times["graph"] = go(f"#code/{graph}/{stage}/{browser.execute_script('return lastCode(data.graphs[0].stages.at(-1))')}")
    times["graph unfolded"] = timed("document.getElementById('fold-all').click();")
    times["slowest frame, scrolling it"] = browser.execute_async_script(_SCROLL)
    times["all passes, side by side"] = go(f"#pass/{graph}/{stage}/all")
    times["time and memory"] = go(f"#time/{graph}/{stage}")
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    if errors:
        raise RuntimeError(f"the page logs errors: {errors}")
    return times


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        browser = chromium()
    except RuntimeError as error:
        print(f"nothing is measured: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        page = options.page or options.keep or Path(folder) / "report.html"
        try:
            if options.page is None:
                write_page(page, options.layers)
            rounds = [measure(browser, page) for _ in range(options.rounds)]
        finally:
            version = browser.capabilities["browserVersion"]
            browser.quit()
        columns = {what: [each[what] for each in rounds] for what in rounds[0]}
        rows = {what: {"median_ms": statistics.median(column), "slowest_ms": max(column)} for what, column in columns.items()}
        print(f"a page of {page.stat().st_size / 1e6:.1f} MB in Chromium {version}")
        print(tabulate([(what, *row.values()) for what, row in rows.items()], headers=("", "ms", "slowest"), floatfmt=".0f"))
        if options.json is not None:
            record = {"bytes": page.stat().st_size, "chromium": version, "rows": rows}
            options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
