"""What the package raises besides ValueError and TypeError."""

from __future__ import annotations

from torch import fx


class PassError(RuntimeError):
    """A broken contract: which pass, which node, what was expected."""

    def __init__(self, pass_name: str, message: str, node: fx.Node | None = None) -> None:
        where = f" at node {node.name!r} ({node.op} {node.target})" if node is not None else ""
        super().__init__(f"apexfx pass {pass_name!r}{where}: {message}")
        self.pass_name = pass_name
        self.node = node.name if node is not None else None


class NonFiniteError(RuntimeError):
    """Too many training steps in a row were skipped, since their gradients were not finite, or spikes."""


class RankMismatchError(RuntimeError):
    """Ranks are about to issue different collectives, or a rank never arrived.

    Attributes:
        late: whether they have issued them, one step before: on NCCL alone, where the host does not wait for the device.
    """

    late = False


class ReplicaMismatchError(RuntimeError):
    """Parameters or optimizer state differ between ranks that should train the same model.

    Attributes:
        ranks: those that differ from most, as the process group counts them; () where no majority agrees.
        parameters: the names of those that differ, or whose optimizer state does.
    """

    def __init__(self, message: str, ranks: tuple[int, ...], parameters: tuple[str, ...]) -> None:
        super().__init__(message)
        self.ranks, self.parameters = ranks, parameters

    def __reduce__(self) -> tuple[type, tuple[str, tuple[int, ...], tuple[str, ...]]]:
        return type(self), (str(self), self.ranks, self.parameters)


class NotKeptError(RuntimeError, AttributeError):
    """A step was not made to keep what is read of it: `hasattr` says that it has none."""


class RankFailureError(RuntimeError):
    """A rank died, stopped communicating, or failed in a backward; `late` is as of `RankMismatchError`."""

    late = False


class UnsynchronizedGradientError(RuntimeError):
    """A gradient was computed where nothing averages it across ranks."""
