"""The pages run: their programs are executed, and the output they show is what the programs print now."""

from __future__ import annotations

import json
import re

import pytest

import apexfx
from docs import pages


def normalised(text):
    """Return text without what differs from run to run: fractions, and the column widths that follow them."""
    return re.sub("  +", " ", re.sub("--+", "--", re.sub(r"\d+\.\d+", "#", text)))


LONG = [f"docs/{name}.md" for name in (
    "profile", "recompiles", "inspect", "recipes", "train_step", "guard", "float16", "compare", "large_models", "sharded",
    "derivatives", "checkpoints", "varying_sizes", "check_loop", "simulate", "architecture", "parallel", "parts")]


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.long] if page in LONG else []) for page in pages.PAGES])
def test_the_page_shows_what_its_programs_print(page):
    text = (pages.ROOT / page).read_text()
    assert normalised(pages.made(page)) == normalised(text), f"run: python docs/pages.py {page}"


@pytest.mark.parametrize("page", [*pages.PAGES, "examples/README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_what_the_page_links_to_is_there(page):
    text = (pages.ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (pages.ROOT / page).parent.joinpath(target).exists(), target


def test_the_messages_in_the_table_are_those_of_the_code():
    [table] = re.findall(r"<!-- messages -->\n((?:\|.*\n)+)", (pages.ROOT / "docs/parallel.md").read_text())
    code = "".join(path.read_text() for path in (pages.ROOT / "apexfx").rglob("*.py"))
    code = re.sub(r'"\n\s*f?"', "", code)  # a string that goes on in the next line
    messages = [text for row in table.splitlines()[2:] for text in re.findall('"(.*?)"', row.split(" | ")[1])]
    assert messages and [text for text in messages if text not in code] == []


def test_the_map_is_the_contract_that_lint_checks():
    [contract] = re.findall(r"^layers = \[\n(.*?)^\]", (pages.ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    [map_] = re.findall(r"## The map\n.*?```text\n(.*?)```", (pages.ROOT / "docs/architecture.md").read_text(), re.DOTALL)
    assert [re.split(r"  +", line)[0] for line in map_.splitlines()] == re.findall(r'"(.*?)"', contract)


def test_the_reference_has_every_name_that_is_promised():
    page = (pages.ROOT / "docs/reference.md").read_text()
    names = {name.split(".")[1] for shown in re.findall(r"<!-- :::(.*?)-->", page, re.DOTALL) for name in shown.split()}
    rows = {name for row in re.findall(r"^\| (\[.*?) \|", page, re.MULTILINE) for name in re.findall(r"\[`(\w+)`\]", row)}
    assert names - {"config", "tools"} == rows == {name for name in dir(apexfx) if name != "__version__"}


def test_the_site_has_every_page():
    site = (pages.ROOT / "mkdocs.yml").read_text()
    assert [path.name for path in (pages.ROOT / "docs").glob("*.md") if f" {path.name}\n" not in site] == []


def test_the_ratios_of_the_pages_are_those_on_record():
    def ratios(record):
        rows = json.loads((pages.ROOT / "benchmarks/results" / record).read_text())["rows"]
        return {row["model"]: f"{row['ratio']:.2f}" for row in rows if row["variant"] == "train_step"}

    small, large, ranks, in_cpp, ranks_in_cpp = (
        ratios(f"train_step{what}.json") for what in ("", "_large", "_2_ranks", "_cpp_wrapper", "_2_ranks_cpp_wrapper"))
    readme, page = ((pages.ROOT / name).read_text() for name in ("README.md", "docs/train_step.md"))
    halves = {model: ratio for model, ratio in large.items() if model.endswith((" O1", " O2"))}
    floats = [ratio for model, ratio in large.items() if model not in halves]
    assert f"{min(small.values())} to {max(small.values())} times as fast" in readme
    assert f"{min(floats)} to {max(floats)} times on ResNet-50" in readme
    assert f"{min(halves.values())} to {max(halves.values())} in bfloat16" in readme
    table = {cells[1].strip(): cells[2:] for line in page.splitlines() if len(cells := line.split("|")) > 2}
    for name, row in (("one process", [*small.values(), large["gpt2"]]), ("two gloo ranks", [*ranks.values()]),
                      ("one process, C++ wrapper", [*in_cpp.values()]), ("two gloo ranks, C++ wrapper", [*ranks_in_cpp.values()]),
                      *((name, [large[model], large[f"{model} O1"], large[f"{model} O2"]])
                        for name, model in (("ResNet-50", "resnet50"), ("BERT 6x512", "bert"), ("GPT-2 small", "gpt2")))):
        assert [cell.split()[0] for cell in table[name] if cell.strip()] == row


def test_the_memory_and_times_of_a_large_vocabulary_are_those_on_record():
    record = json.loads((pages.ROOT / "benchmarks/results/xentropy.json").read_text())
    page = (pages.ROOT / "docs/apex.md").read_text()
    for name in {row["loss"] for row in record["rows"]}:
        cells = [f"{row['ms'] / 1e3:.1f} s, {row['MiB']:.0f} MiB" for row in record["rows"] if row["loss"] == name]
        assert f"| `{name}` | {' | '.join(cells)} |" in page
