"""A model under `fully_shard` (FSDP2) in a training step: the parameters of the graph are the rows that this rank has.

Storage, initialisation, evaluation and checkpoints are FSDP2's. For the time of a call its hooks are off, and in the place of
each parameter is one of the whole shape without memory, so that Dynamo captures the model as it was written; before anything
runs the rows take its place among the inputs, and the pass `gather_shards` gathers them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import _torch_fsdp as fsdp
from .._torch import local_rows, registries, under_fully_shard
from ..passes.gather_shards import ShardGroup
from .optimizer_list import OptimizerList
from .options import StepOptions
from .over_rows import check_over_rows


class _Accumulated:
    """The sum of a parameter's gradients of earlier calls: what is in its place during a call, and its rows as they are now."""

    def __init__(self, rows: Tensor, size: torch.Size) -> None:
        self.rows, self.placeholder = rows, without_memory(size, rows)


class _Parameter:
    """One sharded parameter.

    Args:
        record: torch's.
        computes_in: the dtype that it is gathered in; None for its own.

    Attributes:
        placeholder: what is in its place during a call: of the whole shape, and the dtype that it is gathered in, without memory.
        rows: those that this rank has, a leaf over FSDP2's own memory.
        accumulated: the sum of its gradients, where calls accumulate; graphs know it by its `placeholder`.
    """

    def __init__(self, record: Any, computes_in: torch.dtype | None) -> None:
        self._record, self._computes_in = record, computes_in
        self.places = [(registries(module).parameters, name) for module, name in fsdp.owners(record)]
        self.placeholder = nn.Parameter(without_memory(self.size, self.sharded, computes_in))
        self._local: Tensor | None = None
        self.accumulated: _Accumulated | None = None
        self.read()

    @property
    def sharded(self) -> nn.Parameter:
        """What the module and the optimizer have."""
        return fsdp.sharded_parameter(self._record)

    @property
    def size(self) -> torch.Size:
        return fsdp.whole_size(self._record)

    def read(self) -> None:
        """Follow what FSDP2, or a user, has changed: where the rows are, and whether they are trained."""
        p = self.sharded
        if (local := local_rows(p)) is not self._local:
            self._local, self.rows = local, local.detach()
            dtype = self._computes_in or p.dtype
            if (self.placeholder.dtype, self.placeholder.device) != (dtype, p.device):  # by model.double()
                self.placeholder = nn.Parameter(without_memory(self.size, p, dtype))
        if self.rows.requires_grad != p.requires_grad or self.placeholder.requires_grad != p.requires_grad:
            for tensor in (self.rows, self.placeholder):
                tensor.requires_grad_(p.requires_grad)

    def accumulate_in(self, rows: Tensor) -> Tensor:
        """Have gradients be added up in `rows`; return what is in the place of their sum during a call."""
        if self.accumulated is None or self.accumulated.rows.dtype != rows.dtype:
            self.accumulated = _Accumulated(rows, self.size)
        self.accumulated.rows = rows
        return self.accumulated.placeholder


def without_memory(size: torch.Size, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of a size, dtype and device, of which nothing can be read."""
    empty = torch.empty(size, dtype=dtype or like.dtype, device=like.device)
    empty.untyped_storage().resize_(0)
    return empty


class ShardedModel:
    """What `fully_shard` was told of a model, and the model without it for the time of a call.

    Args:
        model: under `fully_shard`.

    Attributes:
        group: the process group that it is sharded over.
        dtypes: in which it was told to compute.
        casts: whether it was told so, or in which dtype to return outputs.

    Raises:
        ValueError: it is sharded in a way that no step computes.
    """

    def __init__(self, model: nn.Module) -> None:
        check_root(model)
        self._plain = fsdp.PlainModules(model)
        self.reshard()
        groups = fsdp.fsdp_groups(model)
        for each in groups:
            _check_group(each)
        if len({each.process_group.group_name for each in groups}) > 1:
            raise ValueError("apexfx: the model is sharded over several process groups, and a training step is over one; give "
                             "every fully_shard() the same mesh")
        self.group: dist.ProcessGroup = groups[0].process_group
        self.dtypes = {each.policy.param_dtype for each in groups} - {None}
        self.casts = bool(self.dtypes) or any(each.policy.output_dtype for each in groups)
        self._groups = [(each, [_Parameter(record, each.policy.param_dtype) for record in each.params]) for each in groups]
        self._parameters = [p for _, members in self._groups for p in members]
        fsdp.reshard_after_forward(model, groups)

    def check(self, model: nn.Module, trained: Sequence[Tensor], optimizers: OptimizerList, options: StepOptions) -> None:
        """Refuse what is not there yet for a sharded model, and what would train each rank apart.

        Args:
            trained: the parameters that are.

        Raises:
            ValueError: it says what.
        """
        config = options.config
        if options.slices is not None:
            raise ValueError("apexfx: slices= was given with a model under fully_shard(), whose gradients the ranks add up in an "
                             "order of their own; leave one of them out")
        own = {id(p.sharded) for p in self._parameters}
        names = {id(p): name for name, p in model.named_parameters()}
        if apart := [p for p in trained if id(p) not in own]:
            raise ValueError(f"apexfx: parameter {names.get(id(apart[0]), 'of the objective')!r} is trained and not sharded "
                             "(ignored_params=, or outside of the model), and nothing averages its gradient over the ranks; "
                             "freeze it, or let fully_shard() have it")
        if config.ddp:
            raise ValueError("apexfx: ddp=True was given, and a step of a model under fully_shard() averages gradients anyway; "
                             "leave ddp out")
        safeguard = options.safeguard
        check_over_rows(options, optimizers, "a step of a model under fully_shard()", {
            "shard=": options.shard, "process_group=": config.process_group,
            "replica_check_interval=": safeguard is not None and safeguard.replica_check_interval is not None})
        if config.level.half_parameters:
            raise ValueError(f"apexfx: opt_level={config.opt_level!r} was given, which makes the parameters half, and those of a "
                             "model under fully_shard() stay as they are; give opt_level='O2'")
        if self.casts and (config.level.casts or config.precision):
            given = f"opt_level={config.opt_level!r}" if config.level.casts else "precision="
            raise ValueError(f"apexfx: {given} was given, and fully_shard() a MixedPrecisionPolicy that says in which dtypes to "
                             "compute, too; give opt_level='O0' and no precision=, or a policy of reduce_dtype alone")

    def reshard(self) -> None:
        """Drop whole parameters that are in the model, see `PlainModules.reshard`."""
        self._plain.reshard()

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Have the model as it was written, with its placeholder in the place of each parameter, until the end of the context."""
        for each, _ in self._groups:
            _check_settings(each)
        before = self._plain.enter()
        try:
            for p in self._parameters:
                p.read()
                for registry, name in p.places:
                    registry[name] = p.placeholder
            yield
        finally:
            for p in self._parameters:
                for registry, name in p.places:
                    registry[name] = p.sharded
            self._plain.leave(before)

    def placeholders(self, params: Sequence[Tensor], accumulated: Sequence[Tensor] = ()) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is in the place of parameters, and of the sums of their gradients, during a call."""
        own = self._of(params)
        return [p.placeholder for p in own], [p.accumulate_in(local_rows(held)) for p, held in zip(own, accumulated)]

    def rows(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows that this rank has of parameters."""
        return [p.rows for p in self._of(params)]

    def _of(self, params: Sequence[Tensor]) -> list[_Parameter]:
        by_id = {id(p.sharded): p for p in self._parameters}
        if not by_id.keys() >= set(map(id, params)):
            raise ValueError("apexfx: the optimizer holds parameters that the model has no more: others took their place, as by "
                             "load_state_dict(assign=True); make a new optimizer and a new step")
        return [by_id[id(p)] for p in params]

    def shards(self, example_inputs: Sequence[Any]) -> dict[int, _Parameter | _Accumulated]:
        """Return which inputs of a captured graph stand for what is sharded, by place."""
        sums = [p.accumulated for p in self._parameters if p.accumulated is not None]
        by_id = {id(each.placeholder): each for each in (*self._parameters, *sums)}
        return {place: by_id[id(x)] for place, x in enumerate(example_inputs) if id(x) in by_id}

    def sums(self, shards: dict[int, _Parameter | _Accumulated]) -> tuple[int, ...]:
        """Return which inputs of a graph accumulate gradients."""
        return tuple(place for place, each in shards.items() if isinstance(each, _Accumulated))

    def groups(self, shards: dict[int, _Parameter | _Accumulated]) -> list[ShardGroup]:
        """Return which inputs of a graph are gathered together."""
        found = []
        for each, members in self._groups:
            places = sorted(place for place, p in shards.items() if p in members)
            if places:
                found.append(ShardGroup(each.name, tuple(places), tuple(shards[place].size[0] for place in places),
                                        each.policy.reduce_dtype, bool(each.reshards)))
        return found


def check_root(model: nn.Module) -> None:
    """Refuse a model of which parts alone are under `fully_shard`."""
    if not under_fully_shard([model]):
        raise ValueError("apexfx: modules of the model are under fully_shard(), and the model itself is not, so that nothing "
                         "averages the gradients of the rest; call fully_shard(model), too, after those of its blocks")


def _check_group(group: fsdp.FsdpGroup) -> None:
    """Refuse what a step would do otherwise than FSDP2 was told to."""
    _refuse(group, [
        (group.process_group is None or group.mesh_dims != 1,
         "over a mesh of two dimensions (HSDP), or over none, and a training step is over one; give it a mesh of one dimension"),
        (group.offloads, "with CPUOffloadPolicy, and a training step runs where its parameters are; leave offload_policy out"),
        (not isinstance(group.reshards, bool),
         f"with reshard_after_forward={group.reshards}, and a training step keeps whole parameters or drops them: True or "
         "False")])
    _check_settings(group)
    for record in group.params:
        _check_parameter(record, f"a parameter of {_said(group)} (of shape {list(fsdp.whole_size(record))})")


def _check_settings(group: fsdp.FsdpGroup) -> None:
    """Refuse what a method of FSDP2's has set, perhaps since the last call, and a step does otherwise."""
    if (now := fsdp.settings(group)) == fsdp.Settings():
        return
    _refuse(group, [
        (not now.gathers_in_backward,
         "with set_unshard_in_backward(False), and a training step gathers what its backward reads; leave that call out"),
        (not now.reduces, "with set_requires_gradient_sync(False), and each call of a training step sums the gradients of all "
                          "ranks; set it to True"),
        (now.divisor is not None,
         "with set_gradient_divide_factor(), and a training step averages over the ranks; leave that out, and multiply the "
         "loss by the number of ranks / factor"),
        (now.reduces_unused, "with set_reduce_scatter_unused_params(True), and a training step leaves what its loss does not "
                             "depend on as it is; leave that call out"),
        (now.sums, "with set_force_sum_reduction_for_comms(True), and a training step has the group average; leave that out"),
        (now.replaced is not None,
         f"with {now.replaced} in the place of FSDP2's own communication, which no graph holds; leave it out")])


def _refuse(group: fsdp.FsdpGroup, reasons: Sequence[tuple[bool, str]]) -> None:
    for refused, text in reasons:
        if refused:
            raise ValueError(f"apexfx: {_said(group)} is under fully_shard() {text}")


def _said(group: fsdp.FsdpGroup) -> str:
    return f"module {group.name!r}" if group.name else "the model"


def _check_parameter(record: Any, what: str) -> None:
    p = fsdp.sharded_parameter(record)
    if fsdp.was_dtensor(record):
        raise ValueError(f"apexfx: {what} was a DTensor before fully_shard() (tensor parallel), and a training step is data "
                         "parallel alone; leave parallelize_module() out")
    if fsdp.sharded_dim(record):
        raise ValueError(f"apexfx: {what} is sharded along dimension {fsdp.sharded_dim(record)} (shard_placement_fn=), and a "
                         "training step gathers rows; leave that out")
    if type(local_rows(p)) is not Tensor:
        raise ValueError(f"apexfx: {what} holds a {type(local_rows(p)).__name__}, which a training step does not gather; "
                         "use plain tensors")
    if p.is_complex():
        raise ValueError(f"apexfx: {what} is complex, and a training step gathers and sums rows of real ones; hold two real "
                         "parameters, and make one of them in the forward (torch.complex)")
