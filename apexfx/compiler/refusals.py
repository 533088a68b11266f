"""What does not go together with a transformed or data-parallel model, refused with what to do instead.

Refused where it can be noticed first: when the model is given, when a graph is captured, or when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import (
    FakeTensor,
    active_ddp_module,
    fsdp_managed,
    functorch_is_active,
    global_module_hooks,
    has_backward_hooks,
    is_dtensor,
    is_fsdp_source,
    is_traceable_wrapper_subclass,
    traced_objects,
    under_fully_shard,
)
from ..graph.inputs import Placeholder

_WHOLE = ("apexfx works on whole parameters, and train_step() on a model under fully_shard() as well; give it the model before "
          "fully_shard(), FullyShardedDataParallel(), parallelize_module() or distribute_tensor() and leave those out (ddp=True "
          "averages gradients), or train without it")
COMPILES_ITSELF = ("a transformed model compiles itself and cannot be exported; export the module that it was made from, which "
                   "holds the same parameters")

HOOKS_CHANGED = ("apexfx: since a graph of the model was captured, which holds the hooks of that time, a hook on all modules "
                 "(torch.nn.modules.module.register_module_...) was registered or removed; call torch.compiler.reset(), and the "
                 "next call captures the model anew, or register it on the modules of the model")


def check_complete(model: nn.Module, *, may_be_sharded: bool = False) -> None:
    """Refuse a model with parameters that are elsewhere in part, or have no shape yet.

    Args:
        may_be_sharded: whether `fully_shard` may have been called on it: what is refused of that is up to the caller.
    """
    if may_be_sharded and under_fully_shard(model.modules()):
        return
    check_not_sharded(model, model.modules())
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if is_dtensor(tensor):
                raise ValueError(f"apexfx: {kind} {name!r} is a DTensor, of which this rank may hold a part. {_WHOLE}")
            if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
                raise ValueError(f"apexfx: {kind} {name!r} has no shape yet; run the lazy module once first")


def check_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Refuse a captured graph whose parameters belong to FSDP or are DTensors."""
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), example_inputs):
        if is_dtensor(example):
            raise ValueError(f"apexfx: {node.name} is a DTensor, of which this rank may hold a part. {_WHOLE}")
        if is_fsdp_source(node):
            raise ValueError(f"apexfx: {node.name} belongs to a module that FSDP shards. {_WHOLE}")


def check_python_objects() -> None:
    """Refuse a program that draws from a `random.Random` of its own, which Dynamo does once, and the graph holds that number."""
    for source in traced_objects("RandomVariable"):
        raise ValueError(f"apexfx: {_plain(source)} is a random.Random, and a number that the forward draws from it would be the "
                         "same in every call; draw by torch, or outside and give the number as a tensor")


def _plain(source: str) -> str:
    return re.sub(r"\b[LG]\['(\w+)'\]", r"\1", source)


def check_plain(placeholders: Sequence[Placeholder], example_inputs: Sequence[Any]) -> None:
    """Refuse a captured training step with an input of a subclass of torch.Tensor.

    Those that wrap tensors would be taken apart, and what the step updates beside them not put together again; of others no op
    knows what to do.
    """
    for p, example in zip(placeholders, example_inputs):
        if isinstance(example, Tensor) and type(example) not in (Tensor, FakeTensor) and not isinstance(example, nn.Parameter) \
                or is_traceable_wrapper_subclass(example):
            raise ValueError(f"apexfx: {p.name!r} is a {type(example).__name__}, a subclass of torch.Tensor, which a training "
                             "step as one graph does not take; give it as a plain tensor: x.as_subclass(torch.Tensor), or what "
                             "it wraps")


def check_call() -> None:
    """Refuse a call of a transformed model in what it does not run under: cheap enough for every call."""
    from .._torch_compilers import backend_around

    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        raise RuntimeError(f"apexfx: {COMPILES_ITSELF}")
    if functorch_is_active():
        raise RuntimeError("apexfx: torch.func's grad, vmap, jvp and their kind do not reach into compiled graphs; apply "
                           "them to the module that the transformed one was made from, which holds the same parameters")
    if is_apex(backend_around()):
        raise ValueError("apexfx: the model in torch.compile(backend='apex') is transformed already, so its options would not "
                         "reach it; compile the module that it was made from, or call the transformed model as it is")


def untraceable(model: nn.Module) -> list[str]:
    """Say, of what was done to the modules below a model, what keeps Dynamo from tracing them, and what to do instead."""
    everywhere = ["a hook is registered on all modules (torch.nn.modules.module.register_module_...), and Dynamo traces none "
                  "that runs in the backward"] if global_module_hooks() else []
    return everywhere + [f"submodule {name!r} has a backward hook, which Dynamo does not trace: register a hook on a tensor in "
                         "the forward, or this one on the transformed model itself" for name, module in model.named_modules()
                         if name and has_backward_hooks(module)]


def check_not_in_ddp() -> None:
    """Refuse to run a graph that averages gradients inside of torch's DistributedDataParallel."""
    if active_ddp_module() is not None:
        raise ValueError(
            "apexfx: the model is wrapped in torch.nn.parallel.DistributedDataParallel, which averages the gradients "
            "itself; with ddp=True they would be averaged twice. Leave out ddp, or do not wrap the model."
        )


def is_parallel_wrapper(module: nn.Module) -> bool:
    """Tell whether a module is a wrapper that averages gradients, or runs replicas: of torch's or of `apexfx.parallel`."""
    return isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) \
        or getattr(type(module), "averages_gradients", False)


def is_apex(backend: Any) -> bool:
    """Tell whether a backend, as `torch.compile` keeps it, is ours."""
    return getattr(backend, "compiler_name", None) == "apex"


def check_not_sharded(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Refuse a model of whose modules FSDP was put on or around one."""
    if (sharded := fsdp_managed(modules)) is not None:
        name = next(name for name, module in model.named_modules() if module is sharded)
        raise ValueError(f"apexfx: {f'submodule {name!r}' if name else 'the model'} is sharded by FSDP. {_WHOLE}")
