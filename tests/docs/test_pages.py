"""The pages run: their programs are executed, and the output they show is what the programs print now."""

from __future__ import annotations

import re

import pytest

from docs import pages


def normalised(text):
    """Return text without what differs from run to run: fractions, and the column widths that follow them."""
    return re.sub(r"[ -]+", " ", re.sub(r"\d+\.\d+", "#", text))


@pytest.mark.parametrize("page", pages.PAGES)
def test_the_page_shows_what_its_programs_print(page):
    text = (pages.ROOT / page).read_text()
    assert normalised(pages.made(page)) == normalised(text), f"run: python docs/pages.py {page}"


@pytest.mark.parametrize("page", [*pages.PAGES, "examples/README.md"])
def test_what_the_page_links_to_is_there(page):
    text = (pages.ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (pages.ROOT / page).parent.joinpath(target).exists(), target
