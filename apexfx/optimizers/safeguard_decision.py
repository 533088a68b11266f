"""Which steps change nothing: the decision of a safeguard, on the device, and its log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LOGGED = 64  # skipped steps that the log holds
NOT_FINITE, SPIKE = 1.0, 0.0
NO_PLACE = 2.0**31  # in the log, where no gradient is to be named


def new_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the state and the empty log of a safeguard, float64: see `SafeguardRow`.

    A row of the log is a skipped step: which one, counted from 1; `NOT_FINITE` or `SPIKE`; the norm; the place among the
    parameters of the first gradient that is not finite; the running average of the norm and the limit, read of a spike
    alone; the first and the last of the calls that accumulated its gradients. Skip number i, counted from 0, is in the row i
    modulo `LOGGED`.
    """
    return torch.zeros(4, dtype=torch.float64, device=device), torch.zeros(LOGGED, 8, dtype=torch.float64, device=device)


def judge(found_inf: Tensor, norm: Tensor, norms: Tensor, members: Sequence[int], skips: Tensor, state: Tensor, log: Tensor,
          window: int, spike_factor: float | None, calls: int) -> Tensor:
    """Return whether a step is to be skipped, 1 or 0, float32; note it in the log, or the norm in the running average.

    Args:
        found_inf: 1 where a gradient is not finite, float32, 0-d.
        norm: of all gradients, 0-d.
        norms: of each of them, not finite where it is not.
        members: its place among the parameters.
        skips: how many steps were skipped before, and how many in a row.
        state, log: as of `new_state`; both are written.
        window, spike_factor, calls: as of `SafeguardRow`.
    """
    judged, average, averaged, called = state[0], state[1], state[2], state[3]
    limit = average if spike_factor is None else average * spike_factor  # not read where there are no spikes
    norm, skip = norm.double(), found_inf
    if spike_factor is not None:
        skip = torch.maximum(found_inf, ((averaged >= window) & (norm > limit)).float())
    skipped = skip > 0
    places = torch.cat([torch.arange(first, last, device=norms.device) for first, last in _runs(members)])
    place = torch.where(norms.isfinite(), NO_PLACE, places.double()).amin()
    entry = torch.stack([judged + 1, (found_inf > 0).double(), norm, place, average, limit, called + 1, called + calls])
    here = torch.arange(LOGGED, device=log.device) == skips[0].remainder(LOGGED)
    log.copy_(torch.where((here & skipped).unsqueeze(1), entry, log))
    left_out, more = skipped | ~norm.isfinite(), torch.clamp_max(averaged + 1, window)  # finite ones may have an infinite norm
    state.copy_(torch.stack([judged + 1, torch.where(left_out, average, average + (norm - average) / more),
                        torch.where(left_out, averaged, more), called + calls]))
    return skip


def _runs(members: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and one behind the last of each run of consecutive numbers."""
    first = last = members[0]
    for member in members[1:]:
        if member != last + 1:
            yield first, last + 1
            first = member
        last = member
    yield first, last + 1
