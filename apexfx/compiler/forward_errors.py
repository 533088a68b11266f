"""What a forward cannot do in eager torch either, in the words and with the type of eager torch."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from .._torch import raised_by_op
from ..report.data import Report

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# Of what keeps changing, so that a function is compiled again and again.
LENGTHS = ("the length of sequences that the model loops over (pad to a few lengths; torch.nn.LSTM, GRU and RNN are one op for "
           "all)")
_TYPES = (ValueError, TypeError, IndexError, KeyError, NotImplementedError, AssertionError)


class DataDependentError(RuntimeError):
    """Raised where the inner compiler fails at a graph with a number or a size that is read from data."""


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


def as_in_eager(error: Exception) -> Exception:
    """Return what to raise in place of Dynamo's error about an op that fails: of the op's own type, with its text and its place.

    Args:
        error: a `TorchRuntimeError`.
    """
    original = raised_by_op(error)
    text = str(original).strip()
    places = [place for place in re.findall(r'File "(.+)", line (\d+), in ', str(error))
              if not place[0].startswith(_NOT_THE_USERS)]
    where = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
    kind = type(original) if type(original) in _TYPES else RuntimeError
    return kind(f"apexfx: the forward fails as it does in eager torch{where}: {text}")
