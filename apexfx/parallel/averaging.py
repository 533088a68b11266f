"""How the gradients of an eager module are averaged: by torch's DistributedDataParallel, or in flat buffers after the backward.

Torch's starts a bucket while backward goes on. It has to be told beforehand which parameters have gradients, so the first
backward of new parameters goes another way, as in Apex: at its end, what any rank has a gradient for is averaged in flat buffers.
So is every backward with `delay_allreduce`, triggers or `find_unused_parameters`, and one that torch's does not see: the second
of one forward, or one of a module that was called without its wrapper.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.hooks import unserializable_hook

from .._torch import torch_ddp
from ..buckets.ddp_layout import DEFAULT_CAP_MB
from ..buckets.divisors import divisors
from ..buckets.eager_reduce import reduce_gradients
from ..buckets.flat_buffer import scaled
from ..compiler.refusals import check_complete
from ..config import HALVES, BucketConfig
from ..distributed.backward_callback import BackwardCallback
from ..distributed.no_sync import SET_ASIDE, Synchronizer, local_gradients
from ..errors import UnsynchronizedGradientError
from ..graph.printing import first_names


@dataclass
class AveragingOptions:
    """How gradients are averaged, beyond the plan.

    Attributes:
        retain_buffers: gradients become views of the reduced buffers.
        find_unused, static: as torch's `find_unused_parameters` and `static_graph`.
    """

    retain_buffers: bool = False
    find_unused: bool = False
    static: bool = False


class EagerAveraging(Synchronizer):
    """Averages the gradients of one module on this rank.

    Args:
        module: runs forward here, and may get other parameters meanwhile.
        group: the ranks.
        config: the bucket options.
        options: further ones.

    Attributes:
        buffers: with `retain_buffers`, those of the last backward, by bucket.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, config: BucketConfig, options: AveragingOptions) -> None:
        self.module, self.group, self.config, self.options = module, group, config, options
        self.buffers: dict[int, Tensor] = {}
        # Torch's takes what only an earlier, local backward has used for unused by all.
        self._never_by_torch = (config.delay_allreduce or bool(config.trigger_params)
                                or options.find_unused and config.layout != "ddp")
        self._key: tuple[Any, ...] | None = None
        self._active: dict[int, tuple[str, nn.Parameter]] = {}
        self._hooks: list[Any] = []
        self._ddp: TorchDDP | None = None
        self._used: list[str] | None = None  # which some rank has a gradient for, once a backward has told
        self._expected = self._by_torch = False  # the backward of the last forward, which is yet to come; and by torch's
        self._pending = False  # local gradients are there
        self._holds_frozen = False  # of which some are of frozen parameters
        self._came: set[int] = set()  # whose gradients have come in the backward under way
        self._callback = BackwardCallback()
        self._use_parameters()

    def forward(self, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run the module, and prepare for its backward."""
        takes_gradients = self._use_parameters()
        if self._callback.was_dropped():
            self._end_backward(failed=True)
        if not takes_gradients:
            return self.module(*inputs, **kwargs)
        if not self.enabled:
            with self._ddp.no_sync() if self._ddp is not None else contextlib.nullcontext():
                return (self._ddp or self.module)(*inputs, **kwargs)
        self._expected, self._by_torch = True, self._torch_can()
        return (self._ddp if self._by_torch else self.module)(*inputs, **kwargs)

    def _use_parameters(self) -> bool:
        """Look at the parameters that take gradients now, if there are any; where they are others than before, begin anew."""
        key = tuple([(id(p), p.dtype, p.device) for p in self.module.parameters() if p.requires_grad])
        if key == self._key or not key and self._key is not None:  # a network frozen while another is trained stays as it is
            return bool(key)
        check_complete(self.module)
        for handle in self._hooks:
            handle.remove()
        self._key, self._ddp, self._used = key, None, None
        # Without elements there is nothing to average. What is frozen behind a local gradient is averaged once more.
        held = self._active if self._pending else ()
        self._active = {id(p): (name, p) for name, p in self.module.named_parameters()
                        if (p.requires_grad or id(p) in held) and p.numel()}
        me = weakref.ref(self)

        def accumulated(p: Tensor) -> None:
            if (averaging := me()) is not None:
                averaging._on_accumulated(p)

        @unserializable_hook  # torch.save() of the module is silent about it
        def comes(_: Tensor) -> None:
            if (averaging := me()) is not None:
                averaging._refuse_to_sum_twice()

        parameters = [p for _, p in self._active.values() if p.requires_grad]
        self._holds_frozen = len(parameters) < len(self._active)
        self._hooks = [p.register_post_accumulate_grad_hook(accumulated) for p in parameters]
        self._hooks += [] if self.config.gradient_average else [p.register_hook(comes) for p in parameters]
        return bool(self._active)

    def _torch_can(self) -> bool:
        """Whether torch's DistributedDataParallel averages the backward to come; it is made here."""
        options = self.options
        knows = options.static or self.config.layout == "ddp"
        if self._never_by_torch or self._holds_frozen or not (knows or self._used):
            return False
        if self._ddp is None:
            unused = set() if knows else {id(p) for name, p in self._active.values() if name not in self._used}
            empty = {id(p) for p in self.module.parameters() if not p.numel()}
            self._ddp = torch_ddp(self.module, unused | empty, process_group=self.group, init_sync=False,
                                  bucket_cap_mb=self._cap_mb(), static_graph=options.static,
                                  find_unused_parameters=options.find_unused,
                                  gradient_as_bucket_view=options.retain_buffers)
            if not self._is_plain():
                given = self.config, self.group, self.buffers if options.retain_buffers else None
                self._ddp.register_comm_hook(None, lambda _, bucket: _reduce_bucket(*given, bucket))  # it checks annotations
        return True

    def _cap_mb(self) -> float | None:
        if self.config.message_size is not None:
            return self.config.message_size * max(p.element_size() for _, p in self._active.values()) / 2**20
        return None if self.config.bucket_cap_mb == DEFAULT_CAP_MB else self.config.bucket_cap_mb

    def _is_plain(self) -> bool:
        """Whether the reduction of torch's DDP (divide first, sum in the gradients' dtype) is what the options ask for."""
        config = self.config
        return (config.gradient_average and config.gradient_predivide_factor == 1.0 and config.comm_dtype is None
                and not config.allreduce_always_fp32 and not self.options.retain_buffers)

    # ---- in backward ---------------------------------------------------------------------------------------------------

    def _refuse_to_sum_twice(self) -> None:
        """Raise where a backward begins with a `.grad` that is not local: a sum over the ranks, which it would sum once more."""
        if self._callback.was_dropped():
            self._end_backward(failed=True)
        if self._pending or self._came:  # it has begun
            return
        grads = {name: p.grad for name, p in self._active.values() if p.grad is not None}
        if grads and bool(torch.stack([grad.any() for grad in grads.values()]).any()):
            self._ddp = None  # it waits for the rest of this backward
            raise UnsynchronizedGradientError(
                f"apexfx: the gradient of {first_names([*map(repr, grads)])} is there when a backward begins, a sum over the "
                "ranks, and without gradient_average it would be summed once more. Call zero_grad() before each backward, keep "
                "what is to be one sum local by no_sync(), or leave gradient_average=True.")

    def _on_accumulated(self, p: Tensor) -> None:
        """Note that the gradient of `p` is in `p.grad`."""
        if not self.enabled:
            self._pending = True
            local_gradients.setdefault(p, False)
            return
        if self._callback.was_dropped():
            self._end_backward(failed=True)
        self._came.add(id(p))
        self._callback.queue(self._end_backward)

    def _end_backward(self, failed: bool = False) -> None:
        self._callback.clear()
        expected, by_torch, self._expected, self._by_torch = self._expected, self._by_torch, False, False
        came, self._came = self._came, set()
        if failed:
            self._ddp = None  # it waits for the rest of that backward
            return
        self._check_set_aside()
        if not by_torch:
            self._average(expected)
        elif not (self.options.find_unused or self.options.static):
            self._check_complete(came)

    def _check_complete(self, came: set[int]) -> None:
        expected = {name for name, _ in self._active.values()} if self._used is None else set(self._used)
        names = {self._active[key][0] for key in came if key in self._active}
        for odd, text in ((expected - names, "had one before and none now"), (names - expected, "had none before and one now")):
            if odd:
                self._ddp = self._used = None
                raise UnsynchronizedGradientError(
                    f"apexfx: not every parameter has a gradient in every backward: {first_names(sorted(odd))} {text}, so the "
                    "gradients of this backward are not averaged. Pass find_unused_parameters=True, or delay_allreduce=True.")

    @torch.no_grad()
    def _average(self, expected: bool) -> None:
        """Average `.grad` as a whole."""
        if not expected and not self._is_idempotent():
            raise UnsynchronizedGradientError(
                "apexfx: this backward did not come through the last forward of DistributedDataParallel (it is the second of one "
                "forward, or the module in it was called), and without gradient_average, or with comm_dtype, what was reduced "
                "before cannot be reduced again. Call the wrapper before each backward.")
        kept: list[Tensor] | None = [] if self.options.retain_buffers else None
        named = dict(self._active.values())
        plan = reduce_gradients(named, self.config, self.group, keep=kept)
        if kept is not None:
            self.buffers.clear()
            self.buffers.update(enumerate(kept))
        if self.options.find_unused:
            self._ddp = None  # which has noted what was used
        if not self._never_by_torch and self._ddp is None:
            self._used = list(plan.parameters) if plan is not None else None
        if self._holds_frozen:
            self._key = None  # the next forward begins anew, without them

    def _is_idempotent(self) -> bool:
        return self._never_by_torch or self.config.gradient_average and self.config.comm_dtype is None

    def _check_set_aside(self) -> None:
        """Raise where `amp.scale_loss` has set aside what accumulated inside of no_sync()."""
        pending, self._pending = self._pending, False
        if pending and (names := [name for name, p in self._active.values() if local_gradients.pop(p, False)]):
            self._ddp = None
            raise UnsynchronizedGradientError(f"apexfx: {SET_ASIDE.format(', '.join(map(repr, names[:3])))}")


def _reduce_bucket(config: BucketConfig, group: dist.ProcessGroup, buffers: dict[int, Tensor] | None,
                   bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduce where torch's own sum is not what was asked for; `buffers` are those that are retained."""
    flat = bucket.buffer()
    always_fp32 = config.allreduce_always_fp32 and flat.dtype in HALVES
    dtype = torch.float32 if always_fp32 else config.comm_dtype or flat.dtype
    predivide, postdivide = divisors(config, group.size())
    wide = scaled(flat, predivide, dtype)
    if buffers is not None:
        if not bucket.index():
            buffers.clear()
        buffers[bucket.index()] = flat

    def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        averages = scaled(*future.value(), postdivide, flat.dtype)
        return flat if averages is flat else flat.copy_(averages)

    return dist.all_reduce(wide, group=group, async_op=True).get_future().then(finish)
