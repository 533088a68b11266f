"""What is done to a model before it runs as graphs: refusals, and on several ranks a comparison and a broadcast."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import backend_of
from ..buckets.plan import check_options
from ..config import TransformConfig
from ..distributed.agreement import Agreement
from ..distributed.broadcast import broadcast_from_first
from ..precision.half_model import cast_model
from .process_groups import Groups
from .refusals import check_complete
from .transformed import check_not_averaged, get_compiled


def check_model(model: nn.Module, config: TransformConfig, function: str, *, give: str, inner: str,
                may_be_sharded: bool = False) -> None:
    """Refuse what cannot be transformed as a whole, by these options.

    Args:
        function: whose options they are.
        give: what to do with the module in place of a transformed one.
        inner: what to do in place of wrapping it for data parallelism.
        may_be_sharded: whether `fully_shard` may have been called on it.

    Raises:
        TypeError, ValueError: what was given, and what to do.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"apexfx: {function}() was given {type(model).__name__}, expected a torch.nn.Module")
    if backend_of(model) is not None:
        raise ValueError(f"apexfx: {function}() compiles by itself; give it the module, not the result of torch.compile()")
    for name, module in model.named_modules():
        if get_compiled(module) is not None:
            where = f"submodule {name!r}" if name else "the model"
            raise ValueError(f"apexfx: {where} is transformed already; {give} it was made from, with all options")
    check_not_averaged(model, inner)
    check_complete(model, may_be_sharded=may_be_sharded)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    half = config.half_dtype(p.device for p in model.parameters())
    if config.level.casts and not _can_compute(device, half):
        raise ValueError(f"apexfx: {device} cannot compute in dtype={half}, which {config.opt_level} uses; give "
                         "dtype=torch.float16, or opt_level='O0'")


def set_up(model: nn.Module, config: TransformConfig, groups: Groups, agreement: Agreement | None, *,
           parameters: Mapping[str, Tensor] | None = None, buffers: Mapping[str, Tensor] | None = None,
           broadcast_buffers: bool = True) -> None:
    """Compare a model over the ranks, copy it from rank 0, and cast it as the level asks; every rank has to call this at once.

    Args:
        groups, agreement: its process groups; what compares, None on one rank.
        parameters, buffers: of others that are trained with the model, by names that are none of its own.
        broadcast_buffers: whether buffers are copied from rank 0.

    Raises:
        RankMismatchError: ranks hold different models.
    """
    parameters = {**dict(model.named_parameters()), **(parameters or {})}
    buffers = {**dict(model.named_buffers()), **(buffers or {})}
    if config.buckets is not None and groups.gradients is not None:
        tied = dict(model.named_parameters(remove_duplicate=False))
        check_options(config.buckets, {**tied, **parameters}, dist.get_world_size(groups.gradients))
    if agreement is not None:  # before the first collective, which would hang on a rank that differs
        agreement.ensure_model([*parameters.items(), *buffers.items()])
    groups.separate_batch_norm()
    if groups.gradients is not None:
        broadcast_from_first([*parameters.values(), *(buffers.values() if broadcast_buffers else ())], groups.gradients)
    if config.level.half_parameters:
        cast_model(model, config.half_dtype(p.device for p in model.parameters()), only=(torch.float32,), buffers=False,
                   keep_batchnorm=config.level.keep_batchnorm_fp32)


def _can_compute(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype != torch.bfloat16 or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
