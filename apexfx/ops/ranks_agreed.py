"""ranks_agreed: in front of the first collective of a graph, wait until all ranks are known to run the same.

The comparison is begun where a backward begins, and travels while its first gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ._define import define

waiting: dict[str, Callable[[], None]] = {}  # by the name of a process group: what ends a comparison that was begun, or raises


def end_comparison(ranks: str) -> None:
    """End the comparison over a group that was begun, if one was.

    Raises:
        RankMismatchError, RankFailureError: the ranks differ.
    """
    if (end := waiting.pop(ranks, None)) is not None:
        end()


@define("ranks_agreed(Tensor(a!) bucket, str ranks) -> ()", check=lambda bucket, ranks: None, fake=lambda bucket, ranks: None)
def ranks_agreed(bucket: Tensor, ranks: str) -> None:
    """End the comparison over the process group `ranks`; nothing that reads `bucket` behind this may be moved in front of it.

    Args:
        bucket: that leaves this rank next, of any dtype and shape; it is not written.
    """
    end_comparison(ranks)
