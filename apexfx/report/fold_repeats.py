"""Fold lines that differ only in their numbers: forty-eight equal layers print as one line with a count."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

# A dotted path such as "layer1.0.conv2", or the one that a line begins with: its parts may end in a number. Elsewhere
# only a number that stands alone counts: "bf16" and "conv2d" are names.
_PATH = r"(?<![\w.])(?:(?!torch\.|aten\.|apexfx\.)[A-Za-z_]\w*(?:\.\w+)+|^[A-Za-z_]\w*(?=:))"
_NUMBER = r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])"
_TOKEN = re.compile(f"({_PATH})|{_NUMBER}")
_PATH_NUMBER = re.compile(r"\d+(?!\w)")


def pieces(text: str) -> list[str]:
    """Split `text` at its numbers: even positions are words, odd ones numbers."""
    parts, end = [], 0
    for token in _TOKEN.finditer(text):
        spans = [token.span()]
        if token[1] is not None:
            spans = [(token.start() + m.start(), token.start() + m.end()) for m in _PATH_NUMBER.finditer(token[1])]
        for start, stop in spans:
            parts += [text[end:start], text[start:stop]]
            end = stop
    return [*parts, text[end:]]


def numbers(values: Iterable[int]) -> str:
    """Return "7", "{2, 5}" or "{0..47}" for a set of numbers; "{0..46, 24 of them}" where some between are missing."""
    distinct = sorted(set(values))
    if len(distinct) == 1:
        return str(distinct[0])
    whole = distinct[-1] - distinct[0] == len(distinct) - 1
    if len(distinct) <= 3 and (len(distinct) == 2 or not whole):
        return "{" + ", ".join(map(str, distinct)) + "}"
    return f"{{{distinct[0]}..{distinct[-1]}{'' if whole else f', {len(distinct)} of them'}}}"


def group(items: Iterable[Any], key: Callable[[Any], Hashable]) -> dict[Hashable, list[Any]]:
    """Return the items by their key, in the order in which the keys first occur."""
    grouped: dict[Hashable, list[Any]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def _merge(members: Sequence[Sequence[str]]) -> str:
    columns = zip(*members)
    return "".join(numbers(map(int, column)) if index % 2 else column[0] for index, column in enumerate(columns))


def fold(texts: Iterable[str]) -> list[tuple[int, str]]:
    """Return (how many, merged text) for each pattern among the texts, in order of first occurrence.

    >>> fold(["layers.0.norm", "layers.1.norm", "head", "layers.2.norm"])
    [(3, 'layers.{0..2}.norm'), (1, 'head')]
    """
    grouped = group(map(pieces, texts), lambda split: tuple(split[::2]))
    return [(len(members), _merge(members)) for members in grouped.values()]
