"""A bundle: a folder that holds a graph, what it runs on and digests of what it computed, for another process to compare.

`bundle.json` has the graph, the event and the machine; `tensors.pt` the inputs, random states and what collectives gave;
`graph.py` the graph as Python, for people: nothing reads it. Where Inductor ran the step, it is the graph of the ops, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import tree_map
from ..graph import printing
from ..graph.collectives import is_collective
from .digests import Digests, digest
from .graph_data import from_data, to_data
from .interpreter import Interpreter

FORMAT = 4
_JSON, _TENSORS, _PYTHON = "bundle.json", "tensors.pt", "graph.py"


@dataclass(frozen=True)
class Bundle:
    """A recorded run of a graph.

    Attributes:
        data: of `bundle.json`.
        tensors: of `tensors.pt`: "inputs", "constants", "random", "random_of_device", "received".
    """

    data: dict[str, Any]
    tensors: dict[str, Any]

    def graph(self) -> tuple[nn.Module, fx.Graph]:
        """Return the graph, as of `from_data`."""
        return from_data(self.data["graph"], self.tensors["constants"])

    def inputs(self) -> list[Any]:
        """Return copies of what the graph runs on."""
        return [exact_copy(x) if isinstance(x, Tensor) else x for x in self.tensors["inputs"]]

    @contextlib.contextmanager
    def random_state(self) -> Iterator[None]:
        """Have random numbers be those of the recorded run, in this context."""
        of_device = self.tensors["random_of_device"]
        device = torch.device(self.data["machine"]["device"])
        with torch.random.fork_rng([device] if of_device is not None else []):
            torch.set_rng_state(self.tensors["random"])
            if of_device is not None:
                torch.cuda.set_rng_state(of_device, device)
            yield


class Received:
    """Observer: what collectives give."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def __call__(self, node: fx.Node, result: Any) -> None:
        if is_collective(node):
            self.results[node.name] = tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, result)


def exact_copy(tensor: Tensor) -> Tensor:
    """Return a copy of the same sizes and strides, of the memory between its first and last element alone."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor.detach().clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return memory.as_strided(tensor.shape, tensor.stride(), 0)


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the bits of a result depend on besides the graph and its inputs."""
    return {"torch": torch.__version__, "python": platform.python_version(), "processor": processor_name(),
            "capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads(), "device": str(device),
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None}


class Run:
    """A run of a graph on its inputs, which a bundle is written of.

    Args:
        gm, inputs: the graph, and what it runs on.
        random, random_of_device: the states of the generators before the run; None on the CPU.
        about: what else is to be kept, JSON-able.

    Raises:
        ValueError: the graph holds what a bundle cannot.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], *, random: Tensor, random_of_device: Tensor | None,
                 device: torch.device, about: Mapping[str, Any]) -> None:
        self._gm = gm
        graph, constants = to_data(gm)
        self._bundle = Bundle(
            {"format": FORMAT, "machine": machine(device), **about, "graph": graph},
            {"inputs": [exact_copy(x) if isinstance(x, Tensor) else x for x in inputs], "random": random,
             "random_of_device": random_of_device,
             "constants": {name: exact_copy(t) for name, t in constants.items()}, "received": {}})

    def compute(self, *, communicates: bool) -> None:
        """Run the graph on copies of its inputs.

        Args:
            communicates: whether it does so with all ranks, each of which has to call this; otherwise collectives give what they
                would if all held what this one holds.
        """
        digests, received = Digests(), Received()
        with self._bundle.random_state(), torch.no_grad():
            Interpreter(self._gm, [digests, received], communicates=communicates).run(*self._bundle.inputs())
        self._bundle.data["digests"], self._bundle.tensors["received"] = digests.digests, received.results

    def check_norm(self, norm: Tensor) -> None:
        """Have the event say, behind `compute`, where the run has not given the norm that the step had."""
        data = self._bundle.data
        if digest(norm) not in data["digests"].values():
            data["reproduced"] = False
            data["event"] += ("; this graph gives another norm, since calls before had accumulated gradients, other ranks took "
                              "part, or the model was changed since")

    @property
    def event(self) -> str | None:
        """What is said of the event."""
        return self._bundle.data["event"]

    def write(self, path: Path) -> None:
        """Write a bundle, behind `compute`; the folder is there whole, or not at all.

        Args:
            path: of a folder that is not there.

        Raises:
            OSError, RuntimeError: it cannot be written.
        """
        check_new(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.mkdir()
            torch.save(self._bundle.tensors, unfinished / _TENSORS)
            (unfinished / _PYTHON).write_text(printing.to_python(self._gm, header="the graph of a recorded step"))
            (unfinished / _JSON).write_text(json.dumps(self._bundle.data))
            os.replace(unfinished, path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            check_new(path)
            raise


def check_new(path: Path) -> None:
    """Refuse the path of a bundle where something is.

    Raises:
        FileExistsError: it says so.
    """
    if path.exists():
        raise FileExistsError(f"apexfx: {path} is there already; a bundle is a new folder, and each rank needs one of its own")


def error_text(error: Exception) -> str:
    """Return the kind of an error, and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def load(path: Path) -> Bundle:
    """Read a bundle. Nothing of it is executed.

    Raises:
        ValueError: it is no bundle, is damaged, or of another format, or holds what only pickle could read.
    """
    if not (path / _JSON).is_file():
        raise ValueError(f"apexfx: {path} is no bundle: it has no {_JSON}")
    try:
        data = json.loads((path / _JSON).read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"apexfx: {path / _JSON} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        version = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"apexfx: {path} is a bundle of format {version}, and this apexfx reads format {FORMAT}")
    try:
        tensors = torch.load(path / _TENSORS, map_location=None if torch.cuda.is_available() else "cpu", weights_only=True)
    except Exception as error:  # whatever is in the file
        first_line = str(error).partition("\n")[0]
        raise ValueError(f"apexfx: {path / _TENSORS} is damaged, or holds more than tensors, which is not loaded "
                         f"({type(error).__name__}: {first_line})") from error
    of_tensors = {"inputs": list, "constants": dict, "random": Tensor, "random_of_device": (Tensor, NoneType), "received": dict}
    of_data = {"machine": dict, "graph": dict, "digests": dict}
    parts = [(tensors, of_tensors), (data, of_data)]
    if not isinstance(tensors, dict) \
            or not all(isinstance(part.get(name, ...), kind) for part, kinds in parts for name, kind in kinds.items()):
        raise ValueError(f"apexfx: {path} lacks a part of a bundle")
    return Bundle(data, tensors)


def processor_name() -> str:
    """Return the name of the CPU's model."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()
