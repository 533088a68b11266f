"""Diffs are right for any two texts, and readable where lines repeat."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from apexfx.report.text_diff import opcodes, unified

LINES = st.lists(st.sampled_from(["a", "b", "c", "d", "e", ""]), max_size=30)


@settings(max_examples=300, deadline=None)
@given(LINES, LINES)
def test_opcodes_turn_one_text_into_the_other(a, b):
    made, at_a, at_b = [], 0, 0
    for kind, i, i_end, j, j_end in opcodes(a, b):
        assert (i, j) == (at_a, at_b)
        assert (kind == "equal") == (a[i:i_end] == b[j:j_end])
        made += b[j:j_end]
        at_a, at_b = i_end, j_end
    assert made == b and (at_a, at_b) == (len(a), len(b))
    assert (unified(a, b, "a", "b") == []) == (a == b)


def test_a_unified_diff_reads_as_usual():
    before = ["start", "x = f(a)", "# note", "y = g(x)", "z = h(y)", "return z"]
    after = ["start", "x = f(a)", "# note", "c = cast(x)", "y = g(c)", "z = h(y)", "return z"]
    assert unified(before, after, "before", "after", context=1) == [
        "--- before", "+++ after", "@@ -3,3 +3,4 @@", " # note", "-y = g(x)", "+c = cast(x)", "+y = g(c)", " z = h(y)"]
    assert unified(before, before, "before", "after") == []
    assert unified([], ["x"], "a", "b") == ["--- a", "+++ b", "@@ -0,0 +1,1 @@", "+x"]


def test_repeated_lines_do_not_make_it_wrong():
    before, after = [], []
    for i in range(300):
        note = f"# File: model.py:{i % 40}"
        before += [note, f"linear_{i} = linear(x_{i})", note, f"relu_{i} = relu(linear_{i})"]
        after += [note, f"cast_{i} = cast(x_{i})", f"linear_{i} = linear(cast_{i})", note, f"relu_{i} = relu(linear_{i})"]
    lines = unified(before, after, "before", "after", context=0)
    assert sum(line.startswith("+") for line in lines) == 2 * 300 + 1
    assert sum(line.startswith("-") for line in lines) == 300 + 1
