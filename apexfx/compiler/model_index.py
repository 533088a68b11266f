"""The names under which a model has registered its tensors and modules, found by identity.

Where a program reached a tensor from (a list, a helper object, a local variable after a graph break) says nothing about which
parameter it is. That it *is* the tensor registered as "layer1.0.weight" does.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .._torch import compiled_module, registries, traced_module, traced_value, tree_leaves, with_closures_named

# What Dynamo writes between the names of attributes and keys.
_REGISTRIES = re.compile(r"\.(?:__dict__\['_(?:modules|parameters|buffers)'\]|_(?:modules|parameters|buffers))(?=\[)")
_ROOT = re.compile(r"^[LG](?:\['(?:kwargs|named_inputs)'\](?=\[))?\['(\w+)'\]")


class ModelIndex:
    """Names of tensors and modules, looked up by identity.

    Args:
        model: returns the model, or None where there is none to ask. `torch.compile()` shows a backend no model: there, each
            module that the inputs of a graph are reached from counts as one.

    Attributes:
        has_model: whether a model was given: then what is not registered in it is no parameter.
        arguments: what the model was called with, while a call is under way.
    """

    def __init__(self, model: Callable[[], nn.Module | None] | None = None) -> None:
        self.has_model = model is not None
        self.arguments: Any = ()
        self._ran: dict[int, weakref.ref[Tensor]] = {}  # by id, while the tensor is alive
        self._model = model
        self._roots: list[tuple[str, Callable[[], nn.Module | None]]] = []
        self._parameters: dict[int, list[str]] = {}
        self._buffers: dict[int, list[str]] = {}
        self._modules: dict[int, list[str]] = {}
        self._states: dict[int, str] = {}
        self._of_objective: dict[int, str] = {}

    def refresh(self, sources: Iterator[Any] | None = None) -> None:
        """Read the registries anew; to be called for each graph, since a model may have changed.

        Args:
            sources: of the graph's inputs, as Dynamo tracks them; looked at where no model was given.
        """
        self._parameters, self._buffers, self._modules = {}, {}, {}
        if self._model is None:
            self._add_root(compiled_module(), "")
            for source in sources or ():
                self._find_root(source)
        for prefix, root in self._live_roots():
            self._walk(root, prefix, set())

    def _live_roots(self) -> list[tuple[str, nn.Module]]:
        roots = [("", self._model)] if self._model is not None else self._roots
        return [(name, root) for name, ref in roots if (root := ref()) is not None]

    def _walk(self, module: nn.Module, path: str, above: set[int]) -> None:
        if id(module) in above:  # a module registered below itself
            return
        self._modules.setdefault(id(module), []).append(path)
        dot = f"{path}." if path else ""
        held = registries(module)
        for names, registry in ((self._parameters, held.parameters), (self._buffers, held.buffers)):
            for name, tensor in registry.items():
                if tensor is not None:
                    names.setdefault(id(tensor), []).append(dot + name)
        for name, child in held.modules.items():
            if child is not None:
                self._walk(child, dot + name, above | {id(module)})

    def mode(self) -> str:
        """Return "train" or "eval", the mode of the model, or "" where none is known."""
        modes = {"train" if root.training else "eval" for _, root in self._live_roots()}
        return modes.pop() if len(modes) == 1 else ""

    def parameter(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the names under which `tensor` is a registered parameter; a tied one has several."""
        if id(tensor) in self._of_objective:
            return (self._of_objective[id(tensor)],)
        return tuple(self._parameters.get(id(tensor), ()))

    def buffer(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the names under which `tensor` is a registered buffer."""
        return tuple(self._buffers.get(id(tensor), ()))

    def add_parameters(self, named: Mapping[str, Tensor]) -> None:
        """Name the parameters that a training step trains beside the model's, those of its objective.

        They have to outlive the index.
        """
        self._of_objective = {id(tensor): name for name, tensor in named.items()}

    def add_states(self, named: Mapping[str, Tensor]) -> None:
        """Name the tensors that a training step reads and writes beside the model's: the optimizer's state, the loss scale.

        They have to outlive the index.
        """
        self._states = {id(tensor): name for name, tensor in named.items()}

    def state(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the name that `add_states` gave to `tensor`."""
        return (self._states[id(tensor)],) if id(tensor) in self._states else ()

    def module(self, key: str, source: str) -> tuple[str, ...]:
        """Return the paths of a module on the stack that Dynamo keeps of a node.

        Args:
            key: of the stack: the module's `id`, and "@n" for its later calls.
            source: where it was reached from; its only name where it is not registered.
        """
        identity = key.partition("@")[0]
        paths = self._modules.get(int(identity)) if identity.isdigit() else None
        return tuple(paths) if paths else (_below_root(source),)

    def holds_module(self, key: str) -> bool:
        """Return whether a module on the stack that Dynamo keeps of a node, by its `key`, is registered.

        A module in a graph of `torch.export` has a key that is no id, and counts as registered.
        """
        identity = key.partition("@")[0]
        return not identity.isdigit() or int(identity) in self._modules

    def frame(self, *, guard: bool) -> tuple[str, ...]:
        """Return the paths of the module whose method Dynamo is compiling; with `guard`, for this module alone."""
        return tuple(self._modules.get(id(traced_module(guard=guard)), ("",)))

    def note_run(self, tensors: Iterable[Tensor]) -> None:
        """Note that a compiled graph runs with these parameters and buffers."""
        ran = self._ran
        for tensor in tensors:
            if id(tensor) not in ran:
                ran[id(tensor)] = weakref.ref(tensor, functools.partial(ran.pop, id(tensor)))

    def has_run(self, tensor: Tensor) -> bool:
        """Return whether a compiled graph has run with this parameter or buffer."""
        return id(tensor) in self._ran

    def is_argument(self, tensor: Tensor, source: Any) -> bool:
        """Return whether `tensor`, which Dynamo found at `source`, was given to the model in the call under way.

        So is what an object brings with it, a batch of a class of the user's, say; but no Parameter, and nothing that a module
        among the arguments holds.
        """
        arguments = tree_leaves(self.arguments)
        if any(tensor is leaf for leaf in arguments):
            return True
        holders = [traced_value(link) for link in _chain(source)[1:]]
        if isinstance(tensor, nn.Parameter) or any(isinstance(holder, nn.Module) for holder in holders):
            return False
        return any(holder is leaf for holder in holders for leaf in arguments)

    def _find_root(self, source: Any) -> None:
        """Take in the outermost module that an input was reached from."""
        for link in reversed(_chain(source)):
            if isinstance(module := traced_value(link), nn.Module):
                self._add_root(module, link.name)
                return

    def _add_root(self, module: nn.Module | None, source: str) -> None:
        """Take in a module, unless it lies in one that is known."""
        known = self._live_roots()
        if module is None or any(module is below for _, root in known for below in root.modules()):
            return
        inside = set(map(id, module.modules()))
        self._roots = [(name, weakref.ref(root)) for name, root in known if id(root) not in inside]
        taken = {name for name, _ in self._roots}
        name = base = text_name(source) if self._roots else ""
        number = 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        self._roots.append((name, weakref.ref(module)))


def _chain(source: Any) -> list[Any]:
    """Return `source`, what it was reached from, and so on, up to a local or global variable."""
    chain = [source]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    return chain


def role(source: Any) -> str:
    """Return a readable name for a constant of a graph: the variable, or the path below the outermost module; "" for our own."""
    chain = _chain(source)
    values = [traced_value(link) for link in chain]
    root = next((link for link, value in reversed([*zip(chain, values)]) if isinstance(value, nn.Module)), None)
    if root is not None:
        name = text_name(source.name).removeprefix(f"{text_name(root.name)}.")
    else:
        name = "" if type(values[-1]).__module__.startswith("apexfx.") else _ROOT.sub(r"\1", source.name)
    return name if re.fullmatch(r"[\w.\[\]']+", name) and "__" not in name else ""


def text_name(source: str) -> str:
    """Return a readable name for what Dynamo reached from `source`: "stages.0.weight" for L['stages'][0].weight."""
    text = _ROOT.sub(r"\1", with_closures_named(_REGISTRIES.sub("", source)))
    return re.sub(r"\['?([^'\]]*)'?\]", r".\1", text)


def _below_root(source: str) -> str:
    """Return a module's path from where it was reached, without the variable that the path starts from."""
    return text_name(source).partition(".")[2]
