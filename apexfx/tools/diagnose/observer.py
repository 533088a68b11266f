"""Watches some steps op by op: what is read to the host, what is done for each parameter."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..._torch import TorchDispatchMode, WeakTensorKeyDictionary, in_backward, storage_address, tree_leaves
from . import places
from .constructors import replaced
from .places import Place

_READ = "_local_scalar_dense"
_DATA_SHAPED = frozenset(("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"))
_MEANS = frozenset(("nll_loss_forward", "nll_loss2d_forward"))  # where reduction, their fourth argument, is 1
_METHODS = ("cpu", "tolist", "numpy")  # which call no op where the tensor is on the CPU already
_NO_OPS = frozenset(("detach", "alias", "view", "_unsafe_view", "t", "transpose", "expand"))


@dataclass
class Uses:
    """How often, and how long, something happened at a line, over all watched steps."""

    count: int = 0
    ms: float = 0.0
    steps: set[int] = field(default_factory=set)

    def add(self, step: int, ms: float, count: int = 1) -> None:
        """Count one more."""
        self.count, self.ms = self.count + count, self.ms + ms
        self.steps.add(step)


@dataclass
class ParameterOps:
    """Ops that a line does on one parameter after the other.

    Attributes:
        tensors: address -> the parameter that it is, or whose gradient.
        of_gradients: whether it reads gradients, and no parameters.
        writes: whether it writes to the parameters.
    """

    uses: Uses = field(default_factory=Uses)
    tensors: dict[int, Tensor] = field(default_factory=dict)
    names: Counter[str] = field(default_factory=Counter)
    of_gradients: bool = False
    writes: bool = False


class Observer(TorchDispatchMode):
    """A dispatch mode that notes ops; it is on for the watched steps alone.

    Attributes:
        reads: line -> reads to the host of what depends on parameters.
        loops: line -> ops on one parameter after the other.
        means: line -> step -> of each loss that is a mean over targets, how many were differentiated in the step before it, and
            how many targets it has, as a tensor.
        num_steps: watched so far.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.reads: dict[Place, Uses] = defaultdict(Uses)
        self.loops: dict[Place, ParameterOps] = defaultdict(ParameterOps)
        self.means: dict[Place, dict[int, list[tuple[int, Tensor]]]] = defaultdict(lambda: defaultdict(list))
        self.num_steps = 0
        self.in_optimizer = False
        self._parameters = {storage_address(p.untyped_storage()): p for p in parameters}
        self._depends = WeakTensorKeyDictionary()  # tensor -> whether it was computed from parameters
        self._num_differentiated = 0
        self._in_method = False
        self._moved: object = None  # the last result of such a method

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have Dynamo compile as it does without this mode."""
        return True

    @contextlib.contextmanager
    def watching_methods(self) -> Iterator[None]:
        """See the calls of methods that call no op."""
        with contextlib.ExitStack() as stack:
            for name in _METHODS:
                stack.enter_context(replaced(Tensor, name, self._watched(getattr(Tensor, name))))
            yield

    def is_usual(self, uses: Uses) -> bool:
        """Return whether something happened in at least every second step, and not now and then, as logging should."""
        return 2 * len(uses.steps) >= self.num_steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        ms = 1e3 * (time.perf_counter() - start)
        self._note(func, args, kwargs or {}, result, ms)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, ms: float) -> None:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional"):
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        depends = any(map(self._is_dependent, tensors))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._depends[x] = depends
        if in_backward():
            self._num_differentiated += name.startswith("nll_loss")
        elif name in _MEANS and args[3] == 1 and args[0].requires_grad and (place := places.here()) is not None:
            self.means[place][self.num_steps].append((self._num_differentiated, result[1]))
        if self._reads_to_host(name, args, kwargs):
            self._note_read(tensors[0], ms)
        elif not in_backward():
            self._note_parameter_op(name, tensors, ms)

    def _is_dependent(self, tensor: Tensor) -> bool:
        if (known := self._depends.get(tensor)) is not None:
            return known
        of_compiled_code = tensor.dim() == 0 and tensor.is_floating_point()  # which this mode does not see into: a loss
        return tensor.requires_grad or of_compiled_code or self._address(tensor) in self._parameters

    def _address(self, tensor: Tensor) -> int:
        return storage_address(tensor.untyped_storage()) if tensor.layout == torch.strided else 0

    def _gradients(self) -> dict[int, int]:
        """Return {address of a gradient that there is now: address of its parameter}."""
        return {self._address(p.grad): address for address, p in self._parameters.items() if p.grad is not None}

    def _reads_to_host(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name == _READ:
            return True
        if name in _DATA_SHAPED:
            return args[0].is_cuda
        if name == "_to_copy":
            return args[0].is_cuda and str(kwargs.get("device")) == "cpu" and not kwargs.get("non_blocking")
        return False

    def _note_read(self, tensor: Tensor, ms: float) -> None:
        if self._in_method or not (tensor.is_cuda or self._is_dependent(tensor) and not self.in_optimizer):
            return
        if (place := places.here()) is not None and not places.is_below_torch("amp"):  # a GradScaler's, which has to
            self.reads[place].add(self.num_steps, ms)

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._in_method or tensor is self._moved:  # `.cpu().numpy()` is one read
                return method(tensor, *args, **kwargs)
            start, self._in_method = time.perf_counter(), True
            try:
                self._moved = method(tensor, *args, **kwargs)
            finally:
                self._in_method = False
            self._note_read(tensor, 1e3 * (time.perf_counter() - start))
            return self._moved

        return watched

    def _note_parameter_op(self, name: str, tensors: list[Tensor], ms: float) -> None:
        """Note an op outside of forward, backward and the optimizer whose operands have the shape of the parameter among them."""
        if self.in_optimizer or name in _NO_OPS or not tensors or len(tensors) > 3:
            return
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return
        addresses = [self._address(t) for t in tensors]
        updated = [a for a in addresses if a in self._parameters]
        gradients = {} if updated else self._gradients()
        read = [gradients[a] for a in addresses if a in gradients]
        if not updated and not read or any(t.dim() and t.shape != tensors[0].shape for t in tensors):
            return
        if (place := places.here()) is None or places.is_below_torch("optim", "nn/utils"):
            return
        ops = self.loops[place]
        ops.uses.add(self.num_steps, ms)
        ops.names[name] += 1
        ops.of_gradients |= bool(read)
        ops.writes |= name.endswith("_") and addresses[0] in self._parameters
        for address in updated or read[:1]:
            ops.tensors[address] = self._parameters[address]
