"""What a forward cannot do in eager torch either, in the words and with the type of eager torch."""

from __future__ import annotations

import linecache
import os
import re
import traceback
from pathlib import Path

import torch
from torch import fx

from .._torch import raised_by_op
from ..graph.marks import NAME
from ..graph.nodes import op_name, stack_frames
from ..report.data import Report

# What the names of files begin with that have no lines of the user's; torchvision has.
LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_CALLED = re.compile(r"failed to bind arguments(?:.|\n)*func='(\w+)'")


OF_A_PASS = "  raised by the pass"  # begins a note


def is_told(error: BaseException) -> bool:
    """Return whether an error is in words of this package, or of a pass, which may be the user's."""
    return type(error).__module__.startswith("apexfx.") or str(error).startswith("apexfx") or any(
        note.startswith(OF_A_PASS) for note in getattr(error, "__notes__", ()))


class InnerCompilerError(RuntimeError):
    """Raised where the inner compiler fails at a graph, in words of this package; the cause is what it raised."""

    of_compiler = True


class DataDependentError(InnerCompilerError):
    """Raised where that is because of a number or a size that is read from data."""


_NO_KERNEL = re.compile(r"\"(?:linalg_)?(\w+?)(?:_cpu|_cuda)?\" not implemented for '(?:BFloat16|Half)'")


def name_precision(error: Exception, report: Report) -> bool:
    """Note on an error of a graph that has run, of an op without a kernel of low precision, what option is for it.

    Args:
        report: of the graphs, the last of which has failed.

    Returns:
        Whether the error is one.
    """
    if (kernel := _NO_KERNEL.search(str(error))) is None or not report.graphs:
        return kernel is not None
    code, spelled = report.graphs[-1].forward.captured, rf"(?:torch\.(?:nn\.functional\.)?|\w\.)([\w.]*{kernel[1]}\w*)\("
    called = re.findall(spelled, code)
    name = called[0].replace(".", "_") if called else "the name of the op"
    error.add_note(f"  apexfx: the op has no kernel of low precision; precision={{{name!r}: 'float32'}} computes it in float32")
    return True


def as_in_eager(error: BaseException) -> Exception | None:
    """Return what a forward raises in eager torch for these inputs, too, noting the line; None where it is Dynamo that fails.

    Args:
        error: Dynamo's, about an op or a call that it ran on fake tensors.
    """
    from .._torch_compilers import with_numbers

    original, said = raised_by_op(error), str(error)
    if original is error or not isinstance(original, Exception) or type(original).__module__.startswith("torch."):
        return None
    if (text := with_numbers(str(original), error)) != str(original):
        original.args = (text,)
    function = _CALLED.search(said)
    raised = type(original)(f"{function[1]}(): {original}") if function is not None else original.with_traceback(None)
    return with_place(raised, said)


def of_data(error: Exception) -> DataDependentError | None:
    """Return what is said of a forward that branches on a number which it has read from data, as on how many rows a mask takes.

    None where that is not what Dynamo failed at.
    """
    said = str(error)
    if "data-dependent" not in said or not (frames := frames_of_user(said)):
        return None
    return DataDependentError("apexfx: a branch, or a shape, depends on a number that the forward has read from data, which is "
                              f"in the graph: {place(*frames[-1])}\n  Use a mask or torch.where in the place of the branch, or "
                              "put it into a function under @torch.compiler.disable, where the graph breaks")


def with_place(error: Exception, said: str) -> Exception:
    """Return an error, noting on it the last line of the user's among the frames that a text of Dynamo's has."""
    if frames := frames_of_user(said):
        error.add_note(f"  {place(*frames[-1])}")
    return error


def note_node(error: Exception, gm: fx.GraphModule) -> None:
    """Note on what the code of a graph has raised which op it is, of what, and the line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<eval_with_key>")]
    names = [re.split(r"\W", frame.line or "")[0] for frame in frames[:1]]
    node = next((node for node in gm.graph.nodes if node.name in names), None)
    if node is not None and not is_told(error):
        given = ", ".join(source.meta.get(NAME, source.name) for source in node.all_input_nodes)
        frames = frames_of_user(node.meta.get("stack_trace") or "")
        error.add_note(f"  apexfx: raised by {op_name(node)}({given})" + (f" {place(*frames[-1])}" if frames else ""))


def frames_of_user(said: str) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of the frames in a text that are neither torch's nor ours."""
    return [frame for frame in stack_frames(said) if not frame[0].startswith(LIBRARIES)]


def place(file: str, number: int, function: str) -> str:
    """Return a line of a program as a message has it."""
    return f"at {file}:{number}, in {function}: {linecache.getline(file, number).strip()[:120]}"


def place_of_user(default: str = "") -> str:
    """Return the line of the program that runs now, as a message has it, or `default`."""
    return place(*frames[-1]) if (frames := frames_of_user("".join(traceback.format_stack()))) else default
