"""Whether all ranks still train the same model: checksums of what the updates write, compared every so many updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import is_dtensor
from ..compiler.process_groups import Groups
from ..errors import ReplicaMismatchError
from ..host_copy import HostCopy
from ..ops.checksum import checksum
from ..report.data import Report
from .parts.safeguard import Safeguard

_MOST_NAMED = 5


class ReplicaCheck:
    """Compares parameters with their optimizer state and average over the ranks; the step that begins it waits for no device.

    Each rank adds a row, one `checksum` a parameter with its state, to a matrix, which one allreduce sums: all ranks then
    know which differ, and where. Buffers are left out: running statistics differ by design without `sync_bn`.

    Args:
        interval: every so many updates.
        group: the ranks.
    """

    def __init__(self, interval: int, group: dist.ProcessGroup) -> None:
        self._interval, self._group, self._num_updates = interval, group, 0
        self.forget()

    def forget(self) -> None:
        """Drop a comparison that has begun: a state was loaded, maybe on this rank alone, so updates are counted on."""
        self._under_way: tuple[list[str], dist.Work, Tensor, HostCopy | None] | None = None
        self._found: ReplicaMismatchError | None = None  # which stays until a state is loaded

    def note_update(self, names: dict[int, str], params: Sequence[Tensor], optimizers: Iterable[torch.optim.Optimizer],
                    others: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Begin a comparison where the update that was made is one to look at.

        Args:
            names: of the parameters, by id.
            params: those that were updated.
            optimizers: whose state belongs to them.
            others: tensors that are compared besides, by the name of the parameter that they belong to, or their own.
        """
        self._num_updates += 1
        if self._num_updates % self._interval:
            return
        held = [(names.get(id(p), f"{place}"), tensor) for place, p in enumerate(params) for tensor in _with_state(p, optimizers)]
        held = [(name, tensor) for name, tensor in [*held, *others] if not is_dtensor(tensor)]  # of which this rank has rows
        named = {name: row for row, name in enumerate(sorted({name for name, _ in held}))}
        device = params[0].device
        rows = torch.tensor([named[name] for name, _ in held]).to(device, non_blocking=True)
        sums = torch.zeros(self._group.size(), len(named), dtype=torch.int64, device=device)
        sums[self._group.rank()].index_add_(0, rows, checksum([tensor for _, tensor in held]))
        work, copy = self._group.allreduce([sums]), None
        if device.type == "cuda":
            work.wait()  # the stream, not the host
            copy = HostCopy(sums)
        self._under_way = list(named), work, sums, copy

    def finish(self) -> None:
        """Wait for the comparison that the update before began, if it did.

        Raises:
            ReplicaMismatchError: ranks differ; on every rank that calls this.
        """
        if self._found is not None:
            raise self._found.with_traceback(None)
        if self._under_way is None:
            return
        (names, work, sums, copy), self._under_way = self._under_way, None
        if copy is None:
            work.wait()
        columns = (copy.get() if copy is not None else sums).t().tolist()
        if differing := {name: column for name, column in zip(names, columns) if len(set(column)) > 1}:
            self._found = ReplicaMismatchError(_message(differing, len(names), self._num_updates), _alone(differing.values()),
                                               tuple(differing))
            raise self._found


def check_replicas(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare the parameters of a module over the ranks; every rank must call it.

    Raises:
        ReplicaMismatchError: they differ; on every rank.
    """
    check = ReplicaCheck(1, group)
    if params := list(module.parameters()):
        check.note_update({id(p): name for name, p in module.named_parameters()}, params, ())
    check.finish()


def replica_check(options: Safeguard | None, groups: Groups, report: Report) -> ReplicaCheck | None:
    """Return what compares the replicas where that was asked for and there are several."""
    interval = options.replica_check_interval if options is not None else None
    if interval is None:
        return None
    if groups.gradients is None or dist.get_world_size(groups.user) == 1 or dist.get_backend(groups.user) == "fake":
        report.note(f"apexfx: replica_check_interval={interval} compares nothing: gradients are averaged over no other rank")
        return None
    return ReplicaCheck(interval, groups.gradients)


def _with_state(param: Tensor, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return a parameter and the tensors of its state on its device: a count on the host is left out."""
    state = [value for each in optimizers if param in each.state for value in each.state[param].values()]
    return [param, *(value for value in state if isinstance(value, Tensor) and value.device == param.device)]


def _alone(columns: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that have other checksums than most ranks have; () where no majority agrees."""
    alone: set[int] = set()
    for column in columns:
        [(most, count)] = Counter(column).most_common(1)
        if 2 * count <= len(column):
            return ()
        alone.update(rank for rank, value in enumerate(column) if value != most)
    return tuple(sorted(alone))


def _message(differing: dict[str, Sequence[int]], num_params: int, update: int) -> str:
    alone, num_ranks = _alone(differing.values()), len(next(iter(differing.values())))
    who = (f"rank{'s'[:len(alone) > 1]} {', '.join(map(str, alone))} of {num_ranks} differ{'s'[:len(alone) == 1]} from the others"
           if alone else f"the {num_ranks} ranks differ, and no majority agrees,")
    names = f"{', '.join([*differing][:_MOST_NAMED])}{', ...' if len(differing) > _MOST_NAMED else ''}"
    return (f"apexfx: the replicas are no longer equal: after update {update} {who} in {len(differing)} of {num_params} "
            f"parameters or their optimizer state: {names}. A rank has changed them by itself, or its memory or processor is "
            "faulty; load a checkpoint on every rank")
