"""The names that printed graphs use: those of the user's program, where Dynamo and AOTAutograd have their own.

Only the text is changed; the nodes keep the names by which torch knows them.
"""

from __future__ import annotations

import keyword
import os
import re
from collections.abc import Sequence

from torch import fx

from .marks import KIND, NAME

_WORD = re.compile(r"(?<![.\w])[A-Za-z_]\w*")
_FILE = re.compile(r"(^\s*# File: )(.+?)(?=:\d+ in )")
_ALIAS = re.compile(r"\s*(\w+) = (\w+)")
_RELEASES = re.compile(r";  (?:[A-Za-z_]\w* = )+None$", re.MULTILINE)
_NO_TRACE = "# No stacktrace found for following nodes"  # of casts at the entry, and of modules of torch's own
_TAKEN = ("self", "torch", "device", "inf", "nan", "pytree", "fx_pytree", "NoneType")
# What AOTAutograd says of its graphs' inputs and outputs.
_DESCRIPTION = re.compile(r"  # (None|(?:\w+AOT(?:Input|Output)|SavedForBackwards\w*)\(.*\))$", re.MULTILINE)
_GRADIENT = re.compile(r"GradAOTOutput\(grad_of=PlainAOTInput\(idx=(\d+)\)\)")
_RESULT = re.compile(r"PlainAOTOutput\(idx=(\d+)\)")
_TANGENT = re.compile(r"TangentAOTInput\(output=PlainAOTOutput\(idx=(\d+)\)\)")


def identifier(name: str) -> str:
    """Return the user's `name`, "layer1.0.weight", as a Python name, "layer1_0_weight"."""
    replaced = re.sub(r"\W+", "_", name).strip("_") or "_"
    return f"_{replaced}" if replaced[0].isdigit() else replaced


def users_name(node: fx.Node) -> str:
    """Return what printed code calls `node`, unless that name is taken."""
    return identifier(node.meta[NAME]) if NAME in node.meta else node.name


def in_users_names(source: str, graph: fx.Graph, input_names: Sequence[str] = ()) -> str:
    """Return `source`, the code of `graph`, with the inputs called what the user calls them.

    Args:
        source: as `graph.python_code` makes it.
        graph: placeholders hold the user's names in `meta[NAME]`.
        input_names: of the graph that Dynamo captured, in order; an AOTAutograd graph refers to them by number.
    """
    renamed = _renamed(graph)
    lines = []
    for line in source.splitlines():
        alias = _ALIAS.fullmatch(line)
        if alias and renamed.get(alias[1], alias[1]) == renamed.get(alias[2]):
            continue  # `l_x_ = L_x_`
        if _NO_TRACE in line or (not line.strip() and lines and lines[-1].endswith("):")):
            continue
        if line.lstrip().startswith("#"):
            lines.append(_FILE.sub(lambda m: m[1] + _short(m[2]), line))
        else:
            lines.append(_WORD.sub(lambda m: renamed.get(m[0], m[0]), line))
    return _DESCRIPTION.sub(lambda m: _described(m[1], input_names), _RELEASES.sub("", "\n".join(lines)))


def _renamed(graph: fx.Graph) -> dict[str, str]:
    """Return {name in the code: the user's} for the placeholders; a name that another node has gets the kind behind it."""
    placeholders = graph.find_nodes(op="placeholder")
    taken = {*_TAKEN, *keyword.kwlist, *(node.name for node in graph.nodes if NAME not in node.meta)}
    renamed = {}
    for node in placeholders:
        if NAME not in node.meta:
            continue
        name = users_name(node)
        if name in taken:
            name += "_" + node.meta.get(KIND, "input")
        while name in taken:
            name += "_"
        taken.add(name)
        renamed[node.name] = renamed[str(node.target)] = name
    return renamed


def _short(path: str) -> str:
    """Return a file's path from the working directory or the installed package on."""
    return path.rpartition("/site-packages/")[2].removeprefix(f"{os.getcwd()}/")


def _described(text: str, input_names: Sequence[str]) -> str:
    if (match := _GRADIENT.fullmatch(text)) and int(match[1]) < len(input_names):
        return f"  # gradient of {input_names[int(match[1])]}"
    if match := _TANGENT.fullmatch(text):
        return f"  # gradient of output {match[1]}"
    if match := _RESULT.fullmatch(text):
        return f"  # output {match[1]}"
    if text.startswith("SavedForBackwards"):
        return "  # saved for backward"
    return "" if text == "None" or text.startswith("PlainAOTInput(") else f"  # {text}"
