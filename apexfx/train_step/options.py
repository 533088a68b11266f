"""The options of a training step, checked once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config import BucketConfig, TransformConfig, brief, is_number
from .parts.part import Part
from .parts.safeguard import Safeguard


@dataclass(frozen=True)
class StepOptions:
    """The options of `train_step` as it documents them; `config` holds those that `transform` has, too."""

    config: TransformConfig
    loss_scale: float | str | None = None
    max_grad_norm: float | None = None
    accumulate: int = 1
    slices: int | None = None
    seed: int = 0
    keep_grads: bool = False
    memory_budget: int | None = None
    fallback: str | None = None
    safeguard: Safeguard | None = None
    shard: str | None = None
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.slices is not None:
            self._check_slices()
        if self.safeguard is not None and not isinstance(self.safeguard, Safeguard):
            raise TypeError(f"apexfx: safeguard={brief(self.safeguard)} was given, expected True, an apexfx.Safeguard, False or "
                            "None")
        if self.shard not in (None, "optimizer", "gradients"):
            raise ValueError(f"apexfx: shard={self.shard!r} was given, expected 'optimizer', 'gradients' or None")
        if self.fallback not in (None, "transform"):
            raise ValueError(f"apexfx: fallback={self.fallback!r} was given, expected 'transform' or None")
        in_graph = [f"{name}=" for name in ("safeguard", "memory_budget") if getattr(self, name) is not None]
        in_graph += [str(part) for part in self.parts]
        in_graph += [f"passes=[{pass_.name}, ...]" for pass_ in self.config.passes if pass_.stage == "step"]
        if self.fallback is not None and in_graph:
            raise ValueError(f"apexfx: {in_graph[0]} is a part of the step's graph, and fallback='transform' is for a step "
                             "without one; leave one of them out")
        if self.fallback is not None and self.config.fullgraph:
            raise ValueError("apexfx: fullgraph=True asks for one graph, and fallback='transform' for several where one is not "
                             "possible; leave one of them out")

    @classmethod
    def from_arguments(cls, own: Mapping[str, Any], options: Mapping[str, Any], also: Iterable[str]) -> StepOptions:
        """Return the options of a call of `train_step`.

        Args:
            own: those that a step has of its own.
            options: those of `transform`.
            also: what it takes besides.

        Raises:
            ValueError, TypeError: one does not exist, does not fit, or contradicts another.
        """
        config = TransformConfig.from_options(options, also=[*also, *own])
        if config.methods:
            raise ValueError("apexfx: methods= belongs to apexfx.transform(); a training step holds what its objective calls, "
                             "any method of the model")
        if options.get("fullgraph") is False:
            raise ValueError("apexfx: fullgraph=False was given, and a training step is one graph or an error; leave it out, or "
                             "pass fallback='transform' to run in pieces what cannot be captured")
        if isinstance(own["safeguard"], bool):
            own = {**own, "safeguard": Safeguard() if own["safeguard"] else None}
        if own["slices"] is not None and own["accumulate"] != 1:
            raise ValueError(f"apexfx: accumulate={own['accumulate']!r} was given with slices=, by which a rank calls the step "
                             "slices / ranks times for an update; leave accumulate out")
        return cls(config, **own)

    def over(self, num_ranks: int) -> StepOptions:
        """Return the options where so many ranks share the slices of an update, an equal number of calls each.

        Raises:
            ValueError: they cannot.
        """
        if self.slices is None:
            return self
        if self.slices % num_ranks:
            raise ValueError(f"apexfx: slices={self.slices} was given on {num_ranks} ranks, expected a multiple of their number: "
                             "each rank computes as many slices of an update")
        return dataclasses.replace(self, accumulate=self.slices // num_ranks)

    def loss_scaling(self, dtypes: Collection[torch.dtype], half: torch.dtype) -> float | str | None:
        """Return `loss_scale`, by default "dynamic" where one of `dtypes`, or `half`, if the level casts to it, is float16."""
        in_float16 = torch.float16 in dtypes or self.config.level.casts and half == torch.float16
        return "dynamic" if self.loss_scale is None and in_float16 else self.loss_scale

    @property
    def accumulates(self) -> bool:
        """Whether gradients are kept from call to call, or from a call to the update that it ends in."""
        return self.accumulate > 1 or self.slices is not None

    @property
    def num_losses(self) -> int:
        """Over how many losses an update averages, but for an average over ranks."""
        return self.slices or self.accumulate

    def describe(self) -> dict[str, Any]:
        """Return the options for reports: all of `config`, and those of the step that are not the default."""
        own = {f.name: value for f in dataclasses.fields(self)
               if f.name != "config" and (value := getattr(self, f.name)) != f.default}
        if self.parts:
            own["parts"] = [str(each) for each in self.parts]
        return {**self.config.describe(), **{name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
                                             for name, value in own.items()}}

    def _check_numbers(self) -> None:
        scale, norm, accumulate, budget = self.loss_scale, self.max_grad_norm, self.accumulate, self.memory_budget
        if scale not in (None, "dynamic") and not (is_number(scale) and 2.0**-126 <= scale <= 2.0**126):
            raise ValueError(f"apexfx: loss_scale={scale!r} was given, expected 'dynamic', None, or a number from 2**-126 to "
                             "2**126, of which float32 holds the reciprocal, too")
        if norm is not None and not (is_number(norm) and norm > 0):
            raise ValueError(f"apexfx: max_grad_norm={norm!r} was given, expected a positive number or None")
        if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
            raise ValueError(f"apexfx: accumulate={accumulate!r} was given, expected a whole number of calls, 1 or more")
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
            raise ValueError(f"apexfx: memory_budget={budget!r} was given, expected a number of bytes or None")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed and self.slices is None:
            raise ValueError(f"apexfx: seed={self.seed!r} was given, expected a whole number, and slices=, whose random numbers "
                             "follow from it; elsewhere call torch.manual_seed()")

    def _check_slices(self) -> None:
        slices, buckets = self.slices, self.config.buckets
        if not isinstance(slices, int) or isinstance(slices, bool) or slices < 1 or slices & (slices - 1):
            raise ValueError(f"apexfx: slices={slices!r} was given, expected a power of two: the slices of an update are added "
                             "up in pairs")
        others = {"sync_bn=True, whose batch norms need all slices at once": self.config.sync_bn,
                  "shard='gradients', and slices add up whole gradients; shard='optimizer' is there": self.shard == "gradients",
                  "shard= and max_grad_norm= beside a part in front of the clipping, whose norm the ranks would add up in an "
                  "order of their own": self.shard is not None and self.max_grad_norm is not None
                  and any(part.place == "before_clip" for part in self.parts),
                  "fallback='transform', and slices are of a step that is one graph": self.fallback is not None,
                  "dynamic=True, whose code depends on the sizes that a rank has seen first": bool(self.config.dynamic),
                  "inner_options= of an autotuner, by which each rank takes the kernels that it measures": any(
                      "autotune" in name and value for name, value in self.config.inner_options.items()),
                  "a BucketConfig of other sums; message_size= and timeout_s= are taken, and halves add up in float32":
                  buckets is not None and dataclasses.replace(
                      buckets, message_size=None, timeout_s=None, allreduce_always_fp32=False) != BucketConfig()}
        if given := next((said for said, is_given in others.items() if is_given), ""):
            raise ValueError(f"apexfx: slices= was given with {given}; leave one of them out")


def check_what_is_trained(loss_fn: Callable[..., Any] | None, optimizer: Any, objective: Callable[..., Any] | None) -> None:
    """Refuse a loss or an optimizer that no step can be made of.

    Raises:
        TypeError: what was given.
    """
    if (loss_fn is None) == (objective is None):
        how_many = "neither was" if loss_fn is None else "both were"
        raise TypeError(f"apexfx: train_step() takes either loss_fn= or objective=, and {how_many} given")
    if isinstance(kind := loss_fn or objective, type):
        raise TypeError(f"apexfx: the class {kind.__name__} was given, expected what computes the loss; make one: "
                        f"{kind.__name__}()")
    several = isinstance(optimizer, (list, tuple)) and len(optimizer) > 0
    for each in optimizer if several else [optimizer]:
        _check_optimizer(each)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"apexfx: optimizer={brief(optimizer)} ({type(optimizer).__name__}) was given, expected a "
                        "torch.optim.Optimizer, or a list of several")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(f"apexfx: {type(optimizer).__name__} calls a closure to compute the loss several times a step, and "
                        "train_step() computes it once; train with apexfx.transform() and the optimizer's own step()")
