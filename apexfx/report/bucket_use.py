"""One parameter's allreduce: which bucket carries it, between which nodes, and how much of it hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..buckets.bucket import Bucket
from ..buckets.plan import BucketPlan
from ..graph.printing import count_text, size_text


@dataclass(frozen=True)
class BucketUse:
    """The allreduce that carries the gradient of `parameter`. `print` it.

    Attributes:
        index: of the bucket in the plan.
        network, device: what predicts seconds, or None.
    """

    parameter: str
    index: int
    plan: BucketPlan
    network: Any = None
    device: Any = None

    @property
    def bucket(self) -> Bucket:
        return self.plan.buckets[self.index]

    @property
    def communication_s(self) -> float | None:
        """Predicted seconds of the allreduce, alone on the network; None without one."""
        return None if self.network is None else self.network.allreduce_seconds(self.bucket.total_bytes, self.plan.world_size)

    @property
    def window_s(self) -> float | None:
        """Predicted seconds of the matrix products between its start and its wait: what can hide it, other buckets aside."""
        flops = self.bucket.window_flops
        return None if self.device is None or flops is None else self.device.seconds(flops, 0, self.bucket.dtype)

    def __str__(self) -> str:
        bucket, others = self.bucket, len(self.bucket.slots) - 1
        flops = "an unknown number of" if bucket.window_flops is None else f"{bucket.window_flops / 1e6:.1f}"
        lines = [f"{self.parameter}: bucket {self.index} of 0 to {len(self.plan.buckets) - 1}, {size_text(bucket.total_bytes)} "
                 f"{bucket.dtypes()}, with {count_text(others, 'other gradient')}",
                 f"starts after {bucket.start_after or bucket.start}, waits before {bucket.wait_before or '-'}; in between: "
                 f"{flops} MFLOP of matrix products"]
        communication, window = self.communication_s, self.window_s
        if communication is None or window is None:
            lines.append("give network= and device= for microseconds")
        else:
            exposed = max(0.0, communication - window)
            lines.append(f"predicted on {self.plan.world_size} ranks: {1e6 * communication:.1f} us of communication, at most "
                         f"{1e6 * (communication - exposed):.1f} us of it hidden, {1e6 * exposed:.1f} us exposed")
        return "\n".join(lines)

    __repr__ = __str__
