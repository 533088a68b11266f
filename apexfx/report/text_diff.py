"""Compare two texts line by line."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence

Opcode = tuple[str, int, int, int, int]

_SMALL = 40_000  # product of lengths up to which all lines of a stretch between anchors are compared


def opcodes(a: Sequence[str], b: Sequence[str]) -> list[Opcode]:
    """Return how to turn `a` into `b`, as `difflib.SequenceMatcher.get_opcodes` does.

    Lines that occur once are the anchors, and what repeats counts beside them: else graphs of thousands of nodes take minutes.
    """
    return _matcher(a, b).get_opcodes()


def unified(a: Sequence[str], b: Sequence[str], name_a: str, name_b: str, context: int = 3) -> list[str]:
    """Return a unified diff, without line ends; nothing where the texts are equal."""
    if list(a) == list(b):
        return []
    lines = [f"--- {name_a}", f"+++ {name_b}"]
    for group in _matcher(a, b).get_grouped_opcodes(context):
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        lines.append(f"@@ -{_span(a0, a1)} +{_span(b0, b1)} @@")
        for kind, i, i_end, j, j_end in group:
            if kind == "equal":
                lines += [f" {line}" for line in a[i:i_end]]
                continue
            lines += [f"-{line}" for line in a[i:i_end]] + [f"+{line}" for line in b[j:j_end]]
    return lines


def _span(start: int, end: int) -> str:
    return f"{start + 1 if end > start else start},{end - start}"


def _matcher(a: Sequence[str], b: Sequence[str]) -> difflib.SequenceMatcher[str]:
    occurs = Counter(b)
    matcher = difflib.SequenceMatcher(lambda line: occurs[line] > 1, a, b, autojunk=False)
    codes: list[Opcode] = []
    for kind, i, i_end, j, j_end in matcher.get_opcodes():
        inner = [(kind, 0, i_end - i, 0, j_end - j)]
        if kind == "replace" and (i_end - i) * (j_end - j) <= _SMALL:  # of what repeats, too
            inner = difflib.SequenceMatcher(None, a[i:i_end], b[j:j_end], autojunk=False).get_opcodes()
        for own, at, end, at_b, end_b in inner:
            if own == "equal" and codes and codes[-1][0] == "equal":
                _, at, _, at_b, _ = codes.pop()
                codes.append((own, at, i + end, at_b, j + end_b))
            else:
                codes.append((own, i + at, i + end, j + at_b, j + end_b))
    matcher.opcodes = codes
    return matcher
