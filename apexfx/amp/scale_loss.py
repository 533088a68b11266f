"""scale_loss, disable_casts, and the handles of the old API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._amp_state import _amp_state
from .executor import CastExecutor, PersistentMode
from .legacy_wrapper import OptimWrapper
from .optimizers import unwrap
from .session import Session


class scale_loss:  # Apex's name of a context manager
    """Scale `loss` for the backward pass in the body; afterwards unscale the gradients and move the scale.

    Gradients that were there before are kept apart, so repeated calls accumulate. Overflows skip the next step of each
    of `optimizers`. An exception in the body leaves gradients and scaler as they were.

    Args:
        loss: a tensor; what the body gets is `loss.float() * scale`.
        optimizers: one, or a list or tuple of them, prepared by `initialize`; wrappers such as LARC too.
        loss_id: which of the `num_losses` scalers.
        model: ignored, as in Apex.
        delay_unscale: leave the gradients scaled and unchecked, for accumulation; the next call without it unscales
            the sum.
        delay_overflow_check: unscale, but neither move the scale nor skip.

    Raises:
        RuntimeError: `initialize` was not called; two of `optimizers`, or a `scale_loss` around this one, share a parameter;
            `delay_unscale` after gradients that were unscaled.
        IndexError: no scaler has that `loss_id`.
    """

    def __init__(
        self,
        loss: Tensor,
        optimizers: Any,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> None:
        if "backward" in getattr(loss, "__dict__", ()):  # of a training step, whose loss says what to leave out
            loss.backward()
        if not hasattr(_amp_state, "opt_properties"):
            raise RuntimeError("Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.  "
                               "model, optimizer = amp.initialize(model, optimizer, opt_level=...) must be called before "
                               "`with amp.scale_loss`.")
        self._loss = loss
        self._given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
        self._loss_id = loss_id
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        self._session: Session | None = None

    def __enter__(self) -> Tensor:
        self._optimizers = [o if isinstance(o, torch.optim.Optimizer) else unwrap(o) for o in self._given]
        self._session = session = self._find_session()
        if session is None or not session.properties.enabled:
            return self._loss
        try:
            self._scaler = session.scalers[self._loss_id]
        except IndexError:
            raise IndexError(f"amp.scale_loss was given loss_id={self._loss_id}, and there are {len(session.scalers)} loss "
                             "scalers; pass num_losses=... to amp.initialize") from None
        self._plain = not self._scaler.dynamic and self._scaler.loss_scale() == 1.0 and not any(
            optimizer._amp_stash.master_weights for optimizer in self._optimizers
        )
        if self._plain:
            loss = self._loss if self._loss.dtype == torch.float32 else self._loss.float()
        else:
            loss = self._scaler.scaled(self._loss)  # where it is no loss, this raises before anything is set aside
        self._prepared = []
        for optimizer in self._optimizers:
            optimizer._amp_stash.adopt_all(optimizer)
        if not self._plain:
            self._check_unscaled_once()
            if self._delay_unscale:
                for optimizer in self._optimizers:
                    optimizer._amp_stash.check_unscaled()
        if not self._plain and not self._delay_unscale:
            for optimizer in self._optimizers:
                if not optimizer._amp_stash.params_have_scaled_gradients:
                    optimizer._amp_stash.prepare()
                    self._prepared.append(optimizer)
        for optimizer in self._optimizers if not self._plain else ():
            optimizer._amp_stash.in_scale_loss = True
        return loss

    def __exit__(self, kind: Any, exception: Any, traceback: Any) -> None:
        session = self._session
        if session is None or not session.properties.enabled:
            return
        for optimizer in self._optimizers if not self._plain else ():
            optimizer._amp_stash.in_scale_loss = False
        if kind is not None:
            for optimizer in self._prepared:
                optimizer._amp_stash.put_back()
        elif self._delay_unscale:
            if not self._plain:
                for optimizer in self._optimizers:
                    optimizer._amp_stash.params_have_scaled_gradients = True
        elif not self._plain:
            self._unscale()

    def _find_session(self) -> Session | None:
        for optimizer in self._optimizers:
            stash = getattr(optimizer, "_amp_stash", None)
            if stash is not None and stash.session is not None:
                return stash.session
        if not _amp_state.opt_properties.enabled:
            return None
        strangers = [type(o).__name__ for o in self._optimizers if not hasattr(o, "_amp_stash")]
        if strangers:
            raise RuntimeError(f"amp.scale_loss was given {', '.join(strangers)} that did not go through amp.initialize; "
                               "pass every optimizer to amp.initialize first")
        return _amp_state.session

    def _check_unscaled_once(self) -> None:
        stashes = [optimizer._amp_stash for optimizer in self._optimizers]
        parameters = [p for stash in stashes for p in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params)]
        if any(stash.in_scale_loss for stash in stashes) or len(stashes) > 1 and len(set(parameters)) < len(parameters):
            raise RuntimeError("amp.scale_loss would unscale a gradient twice: two of its optimizers hold the same parameter, or "
                               "it is inside of another scale_loss with the same optimizer. Leave that one first, and give "
                               "optimizers that share a parameter a scale_loss each")

    def _unscale(self) -> None:
        found_inf = self._scaler.new_flag()
        for optimizer in self._optimizers:
            optimizer._amp_stash.unscale(self._scaler, found_inf)
            optimizer._amp_stash.params_have_scaled_gradients = False
            optimizer._amp_stash.has_unscaled_gradients = True
        if self._delay_overflow_check:
            return
        skip = self._scaler.update_scale(found_inf)
        if skip is not None:
            for optimizer in self._optimizers:
                optimizer._amp_stash.skip_on(skip)


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Run the body without O1's casts, in this thread; may be nested, and does nothing at other levels."""
    handle = getattr(_amp_state, "handle", None)
    with handle._disable_casts() if handle is not None else contextlib.nullcontext():
        yield


class AmpHandle:
    """What `init` returns: casts in everything this thread runs, until `_deactivate()`.

    `initialize` keeps one too, as `_amp_state.handle`; there the casts are inside the models' forwards only.
    """

    def __init__(self, executor: CastExecutor, *, loss_scale: float | str = "dynamic", verbose: bool = False) -> None:
        self.executor = executor
        self._loss_scale = loss_scale
        self.verbose = verbose
        self._everywhere: PersistentMode | None = None
        self._undo: list[Any] = []

    def is_active(self) -> bool:
        """Return whether casts happen: not deactivated, and not inside `disable_casts()`."""
        return self.executor.enabled

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        self.executor.disable(1)
        try:
            yield
        finally:
            self.executor.disable(-1)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return an `OptimWrapper` with a dynamic scaler a loss."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> Any:
        """Raise: the optimizer's wrapper has it."""
        raise RuntimeError("The old Amp API is no longer supported.  Please move to the new API: "
                           "model, optimizer = amp.initialize(model, optimizer); with amp.scale_loss(loss, optimizer). "
                           "With amp.init(), use the scale_loss of handle.wrap_optimizer(optimizer)")

    def cast_everywhere(self) -> AmpHandle:
        """Turn the executor on for everything this thread runs."""
        self._everywhere = PersistentMode(self.executor)
        return self

    def _deactivate(self) -> None:
        """Stop casting, and give functions that `register_*` wrapped back."""
        self.executor.deactivated = True
        if self._everywhere is not None:
            self._everywhere.remove()
            self._everywhere = None
        self._restore_functions()

    def _restore_functions(self) -> None:
        while self._undo:
            module, name, original = self._undo.pop()
            setattr(module, name, original)

    # ---- Apex's names: here half copies of parameters end with the forward that made them ---------------------------

    has_cache = False

    def _clear_cache(self) -> None:
        self.executor.thread.casts.clear()

    def remove_cache(self, param: Tensor) -> None:
        """Forget the half copies of parameters in a forward that has written into `param`."""
        self._clear_cache()

    @property
    def cache(self) -> Any:
        return self.executor.thread.casts


class NoOpHandle:
    """What `init(enabled=False)` returns: everything runs as if amp were not there."""

    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        return False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return an `OptimWrapper` that scales nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        """Yield the loss as it is."""
        yield loss

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass

    def _restore_functions(self) -> None:
        pass
