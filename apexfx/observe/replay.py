"""Run a bundle again, and say what it computes: the same bits, or the first node that differs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from ..graph.nodes import op_name, source_line
from ..graph.printing import count_text
from . import bundle as bundles
from .digests import Digests
from .interpreter import Interpreter
from .non_finite import NonFinite

_NOT_GIVEN = ("None", "False", "{}", "[]", "()", "off")  # options as a bundle writes them
_MAY_DIFFER = ("python",)


def replay(path: str) -> tuple[str, bool]:
    """Run a bundle again, on this rank alone.

    Args:
        path: of the folder.

    Returns:
        What to print; whether the bits are the same, or need not be.

    Raises:
        ValueError: it is no bundle that can be replayed.
    """
    bundle = bundles.load(Path(path))
    lines = _about(bundle)
    try:
        module, graph = bundle.graph()
    except Exception as error:  # whatever is in the file
        if str(error).startswith("apexfx: "):
            raise
        raise ValueError(f"apexfx: the graph of {path} is damaged ({type(error).__name__}: {error})") from error
    nodes = list(graph.nodes)
    observers = digests, non_finite = Digests(), NonFinite(graph)
    try:
        with bundle.random_state(), torch.no_grad():
            Interpreter(module, observers, graph=graph, received=bundle.tensors["received"]).run(*bundle.inputs())
    except Exception as error:
        raise ValueError(f"apexfx: {path} cannot be run here: {str(error).strip()}") from error
    finding = non_finite.first()
    lines.append(f"not finite: {finding} (node {finding.node})" if finding is not None else "not finite: nothing")
    recorded = bundle.data["digests"]
    if missing := digests.digests.keys() - recorded.keys():
        raise ValueError(f"apexfx: {path} has no digest of {min(missing)!r}, so that nothing could differ there")
    compared = [node for node in nodes if node.name in digests.digests]
    different = [node for node in compared if recorded[node.name] != digests.digests[node.name]]
    changes = _changes(bundle)
    lines += [f"another machine than it was recorded on, so the bits may differ: {', '.join(changes)}"] if changes else []
    if different:
        first = different[0]
        lines.append(f"other bits in {len(different)} of {count_text(len(compared), 'node')}; the first is {first.name}: "
                     f"{op_name(first)}{_where(first)}")
        return "\n".join(lines), bool(changes)
    lines.append(f"the same bits in all of {count_text(len(compared), 'node')}")
    if bundle.data.get("reproduced") is False:
        lines.append("event not reproduced: the run that was recorded after the event gave another norm")
        return "\n".join(lines), False
    return "\n".join(lines), True


def _where(node: fx.Node) -> str:
    return f" at {source_line(node)}" if source_line(node) else ""


def _about(bundle: bundles.Bundle) -> list[str]:
    data = bundle.data
    recorded = ", ".join(f"{name} {value}" for name, value in data["machine"].items() if value is not None)
    options = data.get("options")
    if isinstance(options, dict):
        options = ", ".join(f"{name}={value}" for name, value in options.items() if value not in _NOT_GIVEN)
    rows = {"recorded event": data.get("event"), "options": options, "recorded on": recorded}
    return [f"{name}: {_one_line(str(value))}" for name, value in rows.items() if value]


def _one_line(text: str) -> str:
    """Return a text of a bundle as it can be printed: it may look like no line of ours, and not control the terminal."""
    return text if text.isprintable() else repr(text)


def _changes(bundle: bundles.Bundle) -> list[str]:
    device = torch.device(bundle.data["machine"]["device"])
    here = bundles.machine(device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu"))
    return [f"{name} {then} -> {here[name]}" for name, then in bundle.data["machine"].items()
            if name not in _MAY_DIFFER and here.get(name) != then]
