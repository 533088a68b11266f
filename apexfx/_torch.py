"""Every private name of torch that the package uses, but for those of its compilers: imports, and attributes of torch's objects.

All were run on torch 2.13 and 2.14 (docs/torch_versions.md), but for those that say otherwise. `tests/test_torch_names.py`
fails, naming the line, where another file reaches for one; `tests/check_torch_names.py` says what another torch lacks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed._functional_collectives  # registers autograd and fakes for _c10d_functional
from torch import _foreach_add_ as foreach_add_
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _foreach_mul_ as foreach_mul_
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
)
from torch._functorch.eager_transforms import _autograd_grad as functorch_grad
from torch._library.custom_ops import OPDEFS
from torch._logging import trace_structured
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.compiler._cache import CacheArtifact, CacheArtifactFactory, CacheArtifactManager
from torch.cuda import _get_nvml_device_index as nvml_index
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import _muon
from torch.optim.optimizer import _global_optimizer_post_hooks as global_step_post_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

# The stack of torch function modes of this thread: how many are on, take the topmost off, put one on.
function_mode_depth = torch._C._len_torch_function_stack
pop_function_mode = torch._C._pop_torch_function_stack
push_function_mode = torch._C._push_on_torch_function_stack
function_modes = torch.overrides._get_current_function_mode_stack  # bottom first


def overload_of(packet: OpOverloadPacket, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    """Return the overload of an op that a call by its packet, `torch.ops.ns.op(...)`, runs."""
    name, *others = packet.overloads()
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs) if others else name)


# A context that torch.profiler records by the name that it is made with.
ProfilerSpan = torch._C._profiler._RecordFunctionFast

# What a captured graph calls where the program switches gradients or inference mode on or off.
set_grad_enabled = torch._C._set_grad_enabled
enter_inference_mode = torch.autograd.grad_mode._enter_inference_mode
exit_inference_mode = torch.autograd.grad_mode._exit_inference_mode


def active_ddp_module() -> object | None:
    """Return the `DistributedDataParallel` whose forward is running, or None."""
    return DistributedDataParallel._active_ddp_module


def compiled_module() -> torch.nn.Module | None:
    """Return the outermost module that the `torch.compile` now compiling a graph has called, or None."""
    frame, outermost = sys._getframe(), None
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        names = frame.f_code.co_varnames
        first = frame.f_locals.get(names[0]) if names else None
        if isinstance(first, torch.nn.Module) and not isinstance(first, torch.fx.GraphModule):
            outermost = first
        frame = frame.f_back
    return outermost if frame is not None else None


def raised_by_op(error: BaseException) -> BaseException:
    """Return the error that an op raised on fake tensors, from the one that Dynamo has made around it."""
    while (type(error).__module__.startswith("torch._dynamo") or str(error).startswith("Dynamo failed to run")) \
            and (inner := error.__cause__ or error.__context__) is not None:  # the text is of a RuntimeError between (2.14)
        error = inner
    return error


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging an op that refuses fake tensors, with a traceback, besides raising."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def is_alone_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether torch itself has allocated the memory of a strided tensor, and no other tensor lies in it."""
    storage = tensor.untyped_storage()  # which counts itself as well
    return storage.resizable() and torch._C._storage_Use_Count(storage._cdata) == 2


def was_written(tensor: torch.Tensor) -> bool:
    """Return whether a tensor, or another one in its memory, was written in place; of inference mode's it is not known."""
    return not tensor.is_inference() and tensor._version > 0


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether functions are registered to run around the steps of this optimizer, or of all, and do not only observe."""
    own = vars(optimizer)  # a wrapper may have no hooks
    registered = (own.get("_optimizer_step_pre_hooks", {}), own.get("_optimizer_step_post_hooks", {}),
                  global_step_pre_hooks, global_step_post_hooks)
    return any([not getattr(hook, "only_observes", False) for hooks in registered for hook in hooks.values()])


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., object]] | None:
    """Return the functions that are registered to run before the steps of an optimizer; None of a wrapper that takes none."""
    hooks = vars(optimizer).get("_optimizer_step_pre_hooks")
    return None if hooks is None else list(hooks.values())


def has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of this instance was replaced, by another than a learning rate scheduler's counting one."""
    step = optimizer.__dict__.get("step")
    while step is not None and hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


def attributes_of_program(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a tensor, but for marks that Dynamo sets."""
    return {name: value for name, value in vars(tensor).items() if not name.startswith("_dynamo_")}


def as_parameter(tensor: torch.Tensor, attributes: Mapping[str, object]) -> torch.Tensor:
    """Give a tensor attributes, and have it be an instance of `torch.nn.Parameter`; return it."""
    tensor.__dict__.update(attributes, _is_param=True)
    return tensor


def plain_step(cls: type[torch.optim.Optimizer]) -> Callable[..., object]:
    """Return the `step` of a class, without what torch puts around it for hooks and the profiler."""
    return cls.step.__wrapped__ if getattr(cls.step, "hooked", False) else cls.step


CAPTURE_LOCK = threading.RLock()  # a process has one stance, and one function of a name: threads that change them take turns


@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Have `torch.compiler.is_compiling()` say no, as in an eager program, and what is compiled run as it is written."""
    with CAPTURE_LOCK:
        before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            torch.compiler._is_compiling_flag = before


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether functions are registered on a leaf to see its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


_num_own_hooks = 0


def register_own(register: Callable[[Callable[..., Any]], RemovableHandle], hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook that `num_hooks` does not count."""
    global _num_own_hooks
    before, handle = RemovableHandle.next_id, register(hook)
    _num_own_hooks += RemovableHandle.next_id - before
    return handle


def num_hooks() -> int:
    """Return how many hooks of any kind a program has registered: where that is as before, nothing has a new one."""
    return RemovableHandle.next_id - _num_own_hooks


@contextlib.contextmanager
def forward_hooks(module: torch.nn.Module, name: str, before: Callable[..., object],
                  after: Callable[..., object]) -> Iterator[None]:
    """Have `before(module, args, kwargs)` run last before the forward, and `after(module, args, result)` first behind it.

    A handle of torch's has another number each time, and a graph is compiled anew where the numbers differ.
    """
    module._forward_pre_hooks[name], module._forward_pre_hooks_with_kwargs[name] = before, True
    module._forward_hooks[name] = after
    module._forward_hooks.move_to_end(name, last=False)
    try:
        yield
    finally:
        del module._forward_pre_hooks[name], module._forward_pre_hooks_with_kwargs[name], module._forward_hooks[name]


def attributes_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps beside groups and state, without what torch and its schedulers put there."""
    return {name: {} if name.startswith("_optimizer_") else value for name, value in vars(optimizer).items()
            if name not in ("param_groups", "state", "step", "_opt_called")}


def muon_orthogonalizes_by(function: Callable[..., torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Have torch's Muon make matrices orthogonal by another function, of a gradient, coefficients, iterations and eps."""
    return patch.object(_muon, "_zeropower_via_newtonschulz", function)


def note_optimizer_ran(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning rate schedulers that the optimizer has done a step, outside of its `step()`."""
    optimizer._opt_called = True


def current_translator() -> Any:
    """Return what translates the frame that Dynamo is compiling; None where it compiles none, or is not imported."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    return getattr(module.tls, "current_tx", None) if module is not None else None


def traced_module(*, guard: bool = False) -> torch.nn.Module | None:
    """Return the module whose method is the frame that Dynamo is compiling, or None.

    Args:
        guard: have Dynamo compile the frame anew for another module of the same class.
    """
    translator = current_translator()
    names = translator.output.root_tx.f_code.co_varnames if translator is not None else ()
    first = translator.output.local_scope.get(names[0]) if names else None
    if not isinstance(first, torch.nn.Module):
        return None
    if guard:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.source import LocalSource

        install_guard(LocalSource(names[0], is_input=True).make_guard(GuardBuilder.ID_MATCH))
    return first


def traced_value(source: object) -> object | None:
    """Return what Dynamo, which is compiling a graph, found at `source`; None where that cannot be read."""
    try:
        return traced_expression(source.name)
    except NotImplementedError:  # a source without a text
        return None


def traced_expression(expression: str) -> object | None:
    """Return the value of a guard's Python in the frame that Dynamo is compiling; None where that cannot be read."""
    translator = current_translator()
    if translator is None:
        return None
    scope = {"L": translator.output.local_scope, "G": translator.output.global_scope}
    try:
        return eval(expression, scope, translator.output.local_scope)  # of which a guard's text has the names alone
    except Exception:  # of the user's objects, or a source that only guards can read
        return None


def with_closures_named(text: str) -> str:
    """Return a guard's Python with a closure's variables by their names: "f.ref" for f.__closure__[0].cell_contents."""
    def named(cell: re.Match[str]) -> str:
        function = re.search(r"[\w.\[\]']*$", text[:cell.start()])[0]
        names = traced_expression(f"{function}.__code__.co_freevars")
        return f".{names[int(cell[1])] if names else f'cell{cell[1]}'}"

    return re.sub(r"\.__closure__\[(\d+)\]\.cell_contents", named, text)


def guard_shared_objects() -> None:
    """Have Dynamo guard that a local and a global are one object, where it found one by both; 2.13 forgets to.

    `TABLE[self.kind]` would go on with the kind that was there first. Dynamo does not look at keys of dictionaries in each call,
    so that both are guarded to be the object that they are now.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import is_from_local_source

    output = current_translator().output
    for source in getattr(output.current_tracer, "traced_sources", ()):
        value = traced_value(source)
        first = output.side_effects[value].source if value in output.side_effects else None
        if first is not None and is_from_local_source(source) != is_from_local_source(first) and traced_value(first) is value:
            if isinstance(value, (torch.Tensor, torch.nn.Module)):
                install_guard(source.make_guard(functools.partial(GuardBuilder.DUPLICATE_INPUT, source_b=first)))
            else:
                install_guard(*(each.make_guard(GuardBuilder.ID_MATCH) for each in (source, first)))


def gradients_read() -> Iterator[tuple[torch.Tensor, str]]:
    """Yield each tensor whose `.grad` the frame that Dynamo is compiling reads, with "file.py:line".

    To reset it in `zero_grad()`, or to look whether a `backward()` adds to it, as Dynamo does itself, is no read.
    """
    translator = current_translator()
    for guard in translator.output.guards if translator is not None else ():
        name, frame = getattr(guard.originating_source, "name", ""), next(reversed(guard.user_stack or ()), None)
        if name.endswith(".grad") and frame is not None and frame.name != "zero_grad" and ".backward(" not in (frame.line or "") \
                and isinstance(tensor := traced_expression(name.removesuffix(".grad")), torch.Tensor):
            yield tensor, f"{Path(frame.filename).name}:{frame.lineno}"


def traced_constants() -> list[object]:
    """Return the sources of the numbers, flags and texts that the graph which Dynamo is compiling holds as constants."""
    translator = current_translator()
    guards = translator.output.guards if translator is not None else ()
    return [guard.originating_source for guard in guards if guard.create_fn_name() == "CONSTANT_MATCH"]


def traced_objects(kind: str) -> list[str]:
    """Return the sources of the objects that the frame which Dynamo is compiling holds as variables of class `kind`."""
    translator = current_translator()
    effects = translator.output.side_effects if translator is not None else None
    return [each.source.name for each in (effects.id_to_variable.values() if effects is not None else ())
            if type(each).__name__ == kind and each.source is not None]


def replaced_sources() -> set[str]:
    """Return where the attributes and items of dictionaries lie that the frame which Dynamo is compiling replaces.

    A module's buffers are items of its registry. All items of a list that is changed are among them.
    """
    translator = current_translator()
    effects = translator.output.side_effects if translator is not None else None
    if effects is None:
        return set()
    found = {f"{where}.{name}" for each, new in effects.store_attr_mutations.items() for where in _place_of(each) for name in new}
    for each in filter(effects.is_modified, effects.id_to_variable.values()):
        for where in _place_of(each):
            if type(each).__name__ == "ConstDictVariable":
                found |= {f"{where}[{key.vt.as_python_constant()!r}]" for key, new in each.items.items()
                          if key.vt.is_python_constant() and each.is_new_item(each.original_items.get(key.vt), new)}
            elif type(each).__name__ == "ListVariable":
                found |= {f"{where}[{place}]" for place in range(len(each.items))}
    return found


def _place_of(variable: Any) -> list[str]:
    """Return in a list where Dynamo has found something; [] for what it has made itself, or holds for a while."""
    try:
        return [variable.source.name] if variable.source is not None else []
    except NotImplementedError:
        return []


in_graphs: list[Callable[..., Any]] = []  # what `allow_in_graph` was given


def allow_in_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have Dynamo put calls of `function` into a graph, once `_torch_compilers` is imported, and look no further into it."""
    in_graphs.append(function)
    return function


def called_while_traced(function: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Have Dynamo call `function` where a call of it is traced, in this context, and take what it returns for a constant."""
    return patch.object(function, "_dynamo_marked_constant", True, create=True)


def backend_of(module: torch.nn.Module) -> object | None:
    """Return the backend of a module that `torch.compile` returned, with `compiler_name` and `kwargs`, or None."""
    return innermost_backend(module.dynamo_ctx.callback) if _is_compiled(module) else None


def source_of_compiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` was given, for one that it returned; any other as it is."""
    return module._orig_mod if _is_compiled(module) else module


def _is_compiled(module: torch.nn.Module) -> bool:
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")  # without which nothing is
    return eval_frame is not None and isinstance(module, eval_frame.OptimizedModule)


def is_dtensor(value: object) -> bool:
    """Return whether `value` is a tensor that ranks may hold parts of."""
    made_by = sys.modules.get("torch.distributed.tensor")  # without which there is none
    return made_by is not None and isinstance(value, made_by.DTensor)


def under_fully_shard(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether `fully_shard` (FSDP2) was called on one of `modules`."""
    made_by = sys.modules.get("torch.distributed.fsdp")  # without which none is
    return made_by is not None and any(isinstance(module, made_by.FSDPModule) for module in modules)


def local_rows(value: torch.Tensor) -> torch.Tensor:
    """Return the part of a DTensor that this rank has; any other tensor as it is."""
    return value._local_tensor if is_dtensor(value) else value


def sharded_like(value: object, p: torch.Tensor) -> object:
    """Return a tensor with the shape of this rank's part of a DTensor `p` as a DTensor like it; anything else as it is."""
    if not is_dtensor(p) or not isinstance(value, torch.Tensor) or is_dtensor(value) or value.shape != p._local_tensor.shape:
        return value
    return type(p).from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def distributed_like(value: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor, with the shape of a DTensor `p`, as a DTensor like it; any other tensor as it is."""
    if not is_dtensor(p) or is_dtensor(value) or value.shape != p.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)  # each rank has it


def statically_known_true(condition: object) -> bool:
    """Return whether a comparison of sizes is true for all sizes that a graph may run with."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)


def free_unbacked_symbols(value: object) -> Any:
    """Return the sizes that are read from data, and others depend on, of a tensor, a number or a list."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as free

    return free(value)


def fakes_are_run() -> bool:
    """Return whether tensors are fake: torch's DDPOptimizer runs each compiled part of a graph so, to compile the next."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def innermost_backend(backend: object | None) -> object | None:
    """Return the backend that `torch.compile` was given, from the one that Dynamo has made around it; None for None."""
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)  # or in torch's DistributedDataParallel, a DDPOptimizer's
           or getattr(getattr(backend, "__self__", None), "backend_compile_fn", None)) is not None:
        backend = inner
    return backend


def close_frames(error: BaseException) -> None:
    """Clear the frames of what torch raised while it traced a forward derivative.

    They hold generators. When the garbage collector closes those, they set this thread's dispatch keys for a transform that is
    over, and autograd is off from then on, in eager, too (2.13).
    """
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()):
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        gc.collect()


@contextlib.contextmanager
def recording_autograd() -> Iterator[None]:
    """Have autograd record what an op's own code calls, as outside of the op."""
    above = torch._C._dispatch_tls_local_exclude_set().remove(torch._C.DispatchKey.AutogradFunctionality)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), above), torch.enable_grad():
        yield


def saves_by_hooks() -> bool:
    """Return whether a context of hooks on saved tensors is open (saved_tensors_hooks, save_on_cpu)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def functorch_is_active() -> bool:
    """Return whether a functorch transform (vmap, grad, jvp) is running."""
    return torch._C._are_functorch_transforms_active()


def fsdp_managed(modules: Iterable[torch.nn.Module]) -> torch.nn.Module | None:
    """Return the first module on or around which FSDP1 or FSDP2 was put, itself no wrapper, or None."""
    return next((module for module in modules if "_is_fsdp_managed_module" in module.__dict__), None)


def dynamo_source(placeholder: torch.fx.Node) -> object | None:
    """Return where Dynamo found a graph's input, as an object with a `name` and perhaps a `base`, or None."""
    return getattr(placeholder, "_dynamo_source", None)


def ends_in_graph_break(gm: torch.fx.GraphModule) -> bool:
    """Return whether Dynamo captured more of the program behind this graph, as another one."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def is_fsdp_source(placeholder: torch.fx.Node) -> bool:
    """Return whether Dynamo read an input of its graph from a module that FSDP manages."""
    source = dynamo_source(placeholder)
    return source is not None and source.guard_source.is_fsdp_module()


def boxed(function: Callable[[list[object]], object]) -> Callable[[list[object]], object]:
    """Mark `function`, which takes one list of arguments and empties it, as AOTAutograd wants compiled graphs."""
    function._boxed_call = True
    return function


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often autograd was told of a write to the tensor's memory."""
    return tensor._version


def versions(tensors: Iterable[torch.Tensor | None]) -> list[tuple[int, int] | None]:
    """Return what differs once a tensor, while all of these live, was written or another is in its place."""
    return [None if tensor is None else (id(tensor), tensor._version) for tensor in tensors]


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return a number that is a storage's own while it lives, a fake one's too."""
    return storage._cdata


def is_tree_node(value: object) -> bool:
    """Return whether `value` is a container whose class is registered as a pytree."""
    return type(value) in SUPPORTED_NODES


def viewed(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that `tensor` is a view of, or None."""
    return tensor._base


class Registries(NamedTuple):
    """What a module holds itself, by name; None for what was registered as such."""

    parameters: dict[str, torch.nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    modules: dict[str, torch.nn.Module | None]


def registries(module: torch.nn.Module) -> Registries:
    """Return the dictionaries in which a module registers what it holds."""
    return Registries(module._parameters, module._buffers, module._modules)


def submodules(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dictionary in which a module registers others, as `registries` does, in a fraction of the time."""
    return module._modules


def below_functorch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside the wrappers that functorch transforms put around one, or `tensor`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def has_kernel(op: str, key: str) -> bool:
    """Return whether `op` ("namespace::name") has a kernel of its own for a dispatch key."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)


def keep_saved_tensors() -> None:
    """Have the backward of the graph that is being compiled write over no saved tensor, so that it may run again.

    Run on 2.13 alone; where it does nothing, torch says to set `torch._functorch.config.donated_buffer`.
    """
    context = torch._guards.TracingContext.try_get()
    donated = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if donated:
        donated.clear()


def in_backward() -> bool:
    """Return whether this thread is in a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_remapped_collective(node: torch.fx.Node) -> bool:
    """Return whether Dynamo put a functional collective, which is differentiated, in the place of one that is not (2.13)."""
    return "_c10d_functional" in str(node.target) and ", in _remapped_" in (node.meta.get("stack_trace") or "")


def device_of_group(group: torch.distributed.ProcessGroup) -> torch.device:
    """Return where a group had best sum small numbers: on the host if it can, or else on the current device of its kind."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    return torch.device(kinds.pop(), torch.accelerator.current_device_index())


def process_group_timeout(group: torch.distributed.ProcessGroup) -> timedelta:
    """Return how long a collective of a group may take unless it is told otherwise; torch's default if unknown."""
    backends = (group._get_backend(device) for device in group._device_types)
    return min((backend.options._timeout for backend in backends if getattr(backend, "options", None) is not None),
               default=torch.distributed.distributed_c10d.default_pg_timeout)


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Have autograd call `callback` at the end of the backward pass under way in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def torch_ddp(module: torch.nn.Module, ignored: set[int], **options: object) -> torch.nn.parallel.DistributedDataParallel:
    """Return torch's DistributedDataParallel of `module`, which leaves buffers, and parameters with ids in `ignored`, alone."""
    made = torch.nn.parallel.DistributedDataParallel
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in inspect.signature(made).parameters else "broadcast_buffers"
    names = [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in ignored]
    # It looks for "module name.parameter name", also where the module is the whole one.
    module._ddp_params_and_buffers_to_ignore = [*names, *(f".{name}" for name in names)]
    try:
        return made(module, **{buffers: False}, **options)
    finally:
        del module._ddp_params_and_buffers_to_ignore


def ddp_bucket_indices(module: torch.nn.parallel.DistributedDataParallel) -> list[list[int]]:
    """Return the parameters in each of a DDP module's rebuilt buckets; [] before there are any."""
    recorded = module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices") or ""
    return [[int(i) for i in bucket.split()] for bucket in recorded.split(",") if bucket]


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Tell whether a module has hooks that run before or after its backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def module_hooks(modules: Iterable[torch.nn.Module]) -> list[tuple[object, ...]]:
    """Return what tells whether the hooks of modules, around forward and backward, are the same as before."""
    return [(*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks, *module._backward_pre_hooks)
            for module in modules
            if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks]


def global_module_hooks() -> list[object]:
    """Return what tells whether the hooks that run around every module are the same as before; [] where there are none."""
    module = torch.nn.modules.module
    return [*module._global_forward_pre_hooks, *module._global_forward_hooks, *module._global_backward_pre_hooks,
            *module._global_backward_hooks] if module._has_any_global_hook() else []


def has_forward_pre_hook(module: torch.nn.Module, hook: Callable[..., object]) -> bool:
    """Tell whether `hook` was registered to run before the forward of `module`."""
    return hook in module._forward_pre_hooks.values()


def has_state_dict_hook(module: torch.nn.Module, hook: Callable[..., object]) -> bool:
    """Tell whether `hook` was registered to run after `module.state_dict()`."""
    return hook in module._state_dict_hooks.values()


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether `optimizer.step()` itself skips where its `found_inf` is not 0."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def registered_ops(namespace: str) -> list[str]:
    """Return the names ("namespace::name") of every op of a namespace, sorted."""
    return sorted({name.split(".")[0] for name in registered_overloads(namespace)})


def registered_overloads(namespace: str) -> list[str]:
    """Return the names ("namespace::name" or "namespace::name.overload") of every op of a namespace and its overloads."""
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")]


def custom_op_function(op: Callable[..., object]) -> Callable[..., Any] | None:
    """Return the Python function that `torch.library.custom_op` has made an op of, or None for any other op."""
    definition = OPDEFS.get(op.name().partition(".")[0]) if isinstance(op, OpOverload) else None
    return definition._init_fn if definition is not None else None


def is_without_derivative(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the result of an op that autograd has no formula for."""
    return tensor.grad_fn is not None and "NotImplemented" in tensor.grad_fn.name()


COMPILED_CALL = "_compiled_call_impl"  # what `module.compile()` sets
REPLICATE = "_replicate_for_data_parallel"  # the method by which `nn.DataParallel` makes copies of a module


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `module(...)` run `call`, as after `module.compile()`; None undoes it."""
    setattr(module, COMPILED_CALL, call)


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return what runs a module's hooks and forward, whether `module.compile()` was called or not."""
    return module._call_impl


class Compilation(NamedTuple):
    """What Dynamo compiled: a function, why again ("" for the first time), seconds."""

    start: float
    filename: str
    line: int
    function: str
    reason: str
    seconds: float


def update_loss_scale(
    scale: torch.Tensor, growth: torch.Tensor, found_inf: torch.Tensor, factor: float, backoff: float, interval: int
) -> None:
    """Back `scale` off, or count to `interval` in `growth` and grow it, on the device."""
    torch._amp_update_scale_(scale, growth, found_inf, factor, backoff, interval)


def replace_recomputed(replacement: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have every activation checkpoint recompute `replacement(function)` in backward, and not `function`.

    `replacement` is called as the forward of the checkpoint begins. torch itself carries autocast and the default device over;
    `context_fn` is for whoever calls the checkpoint, and `use_reentrant=True` has none.
    """
    forward, init = CheckpointFunction.forward, _CheckpointFrame.__init__

    @functools.wraps(forward)
    def replaced_forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:  # use_reentrant=True
        return forward(ctx, replacement(run_function), *args)

    @functools.wraps(init)
    def replaced_init(self: Any, recompute_fn: Callable[..., Any], *args: Any) -> None:
        init(self, replacement(recompute_fn), *args)

    CheckpointFunction.forward, _CheckpointFrame.__init__ = staticmethod(replaced_forward), replaced_init


# Options of Inductor: keep which kernel computes which nodes. It costs no measurable time.
TRACK_KERNELS = {"trace.provenance_tracking_level": 2}


def cache_entry(compiled: Any) -> str | None:
    """Return the key under which Inductor's cache has what `compile_fx_inner` returned; None where it has not."""
    return getattr(compiled, "_fx_graph_cache_key", None)


class ProfiledEvent(NamedTuple):
    """What torch.profiler has recorded: times in ns; `launched_by` is the `id` of what has launched an event on a device."""

    name: str
    start: int
    end: int
    thread: int
    on_device: bool
    id: int
    launched_by: int


def profiled_events(profiler: torch.profiler.profile) -> list[ProfiledEvent]:
    """Return what a profiler that has stopped has recorded, in the order in which it began."""
    events = profiler.profiler.kineto_results.events()
    cpu = torch.autograd.DeviceType.CPU
    return sorted((ProfiledEvent(e.name(), e.start_ns(), e.start_ns() + e.duration_ns(), e.start_thread_id(),
                                 e.device_type() != cpu, e.correlation_id(), e.linked_correlation_id()) for e in events),
                  key=lambda event: (event.start, -event.end))


def changed_inductor_settings() -> dict[str, str]:
    """Return what of Inductor's configuration is not the default, as texts."""
    config = sys.modules.get("torch._inductor.config")  # without which nothing was set
    return {} if config is None else {name: repr(value) for name, value in config.get_config_copy().items()
                                      if name in config._config and value != config._config[name].default}


@contextlib.contextmanager
def fake_process_group(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a group whose other ranks are not there: collectives leave their buffers alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # which registers the backend

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
