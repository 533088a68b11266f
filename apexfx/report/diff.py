"""Compare two texts line by line in near-linear time.

`difflib` alone takes minutes for graphs of thousands of nodes, whose lines repeat. Lines that occur once on either side
are anchors (patience diff, Bram Cohen 2010); difflib compares only the short stretches between them.
"""

from __future__ import annotations

import bisect
import difflib
from collections import Counter
from collections.abc import Iterator, Sequence

Opcode = tuple[str, int, int, int, int]

_SMALL = 40_000  # product of lengths up to which difflib compares a stretch without anchors


def opcodes(a: Sequence[str], b: Sequence[str]) -> list[Opcode]:
    """Return how to turn `a` into `b`, as `difflib.SequenceMatcher.get_opcodes` does."""
    codes: list[Opcode] = []
    at_a = at_b = 0
    for i, j, size in [*_blocks(a, b, 0, len(a), 0, len(b)), (len(a), len(b), 0)]:
        if (i, j) != (at_a, at_b):
            kind = "replace" if i > at_a and j > at_b else "delete" if i > at_a else "insert"
            codes.append((kind, at_a, i, at_b, j))
        if size and codes and codes[-1][0] == "equal":
            codes[-1] = ("equal", codes[-1][1], i + size, codes[-1][3], j + size)
        elif size:
            codes.append(("equal", i, i + size, j, j + size))
        at_a, at_b = i + size, j + size
    return codes


def grouped_opcodes(a: Sequence[str], b: Sequence[str], context: int = 3) -> list[list[Opcode]]:
    """Return the changes with `context` equal lines around them, near ones together; nothing for equal texts."""
    matcher = difflib.SequenceMatcher()
    matcher.opcodes = opcodes(a, b)
    groups = list(matcher.get_grouped_opcodes(context))
    return [] if list(a) == list(b) else groups


def unified(a: Sequence[str], b: Sequence[str], name_a: str, name_b: str, context: int = 3) -> list[str]:
    """Return a unified diff, without line ends; nothing where the texts are equal."""
    lines: list[str] = []
    for group in grouped_opcodes(a, b, context):
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        lines.append(f"@@ -{_span(a0, a1)} +{_span(b0, b1)} @@")
        for kind, i, i_end, j, j_end in group:
            if kind == "equal":
                lines += [f" {line}" for line in a[i:i_end]]
                continue
            lines += [f"-{line}" for line in a[i:i_end]] + [f"+{line}" for line in b[j:j_end]]
    return [f"--- {name_a}", f"+++ {name_b}", *lines] if lines else []


_COLOURS = {"+": "\x1b[32m", "-": "\x1b[31m", "@": "\x1b[36m"}


def coloured(line: str) -> str:
    """Return a line of a unified diff with the terminal's escapes for its colour."""
    if line.startswith(("+++ ", "--- ")):
        return f"\x1b[1m{line}\x1b[0m"
    start = _COLOURS.get(line[:1])
    return f"{start}{line}\x1b[0m" if start else line


def _span(start: int, end: int) -> str:
    return f"{start + 1 if end > start else start},{end - start}"


def _blocks(a: Sequence[str], b: Sequence[str], a0: int, a1: int, b0: int, b1: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start in a, start in b, length) of equal stretches of a[a0:a1] and b[b0:b1], in order."""
    start = 0
    while a0 + start < a1 and b0 + start < b1 and a[a0 + start] == b[b0 + start]:
        start += 1
    if start:
        yield a0, b0, start
    a0, b0, end = a0 + start, b0 + start, 0
    while a1 - end > a0 and b1 - end > b0 and a[a1 - end - 1] == b[b1 - end - 1]:
        end += 1
    a1, b1 = a1 - end, b1 - end
    if a0 < a1 and b0 < b1:
        anchors = _anchors(a, b, a0, a1, b0, b1)
        if anchors:
            for i, j in [*anchors, (a1, b1)]:
                yield from _blocks(a, b, a0, i, b0, j)
                if i < a1:
                    yield i, j, 1
                a0, b0 = i + 1, j + 1
        elif (a1 - a0) * (b1 - b0) <= _SMALL:
            matcher = difflib.SequenceMatcher(None, a[a0:a1], b[b0:b1], autojunk=False)
            for block in matcher.get_matching_blocks()[:-1]:
                yield a0 + block.a, b0 + block.b, block.size
    if end:
        yield a1, b1, end


def _anchors(a: Sequence[str], b: Sequence[str], a0: int, a1: int, b0: int, b1: int) -> list[tuple[int, int]]:
    """Return the longest increasing run of lines that occur once on each side."""
    count_a, count_b = Counter(a[a0:a1]), Counter(b[b0:b1])
    place_b = {b[j]: j for j in range(b0, b1)}
    pairs = [(i, place_b[a[i]]) for i in range(a0, a1) if count_a[a[i]] == 1 and count_b.get(a[i]) == 1]
    tails: list[int] = []  # of each length of run, the least end in b
    last: list[int] = []  # and the pair it ends with
    previous: list[int] = []
    for index, (_, j) in enumerate(pairs):
        length = bisect.bisect_left(tails, j)
        previous.append(last[length - 1] if length else -1)
        if length == len(tails):
            tails.append(j)
            last.append(index)
        else:
            tails[length], last[length] = j, index
    run, index = [], last[-1] if last else -1
    while index >= 0:
        run.append(pairs[index])
        index = previous[index]
    return run[::-1]
