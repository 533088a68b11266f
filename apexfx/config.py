"""Every option, its default and its check, once. A bad value is refused here, before anything is touched."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from ._torch import resolve_process_group
from .ranks import has_group

INNER_COMPILERS = ("inductor", "eager", "cudagraphs")
VERIFY_LEVELS = ("auto", "off", "code", "final", "each")
LAYOUTS = ("reverse", "ddp")
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class OptLevel:
    """What one of O0-O3 means; Apex's table of properties, without the loss scale.

    Args:
        patch_ops: cast per op by the rule table (O1) rather than everything at once.
        cast_model: the parameters and floating inputs are half.
        keep_batchnorm_fp32: batch norm keeps float32 parameters and statistics.
        half_parameters: the module's own parameters are half (O3); otherwise they stay float32, as master weights.
    """

    summary: str
    patch_ops: bool
    cast_model: bool
    keep_batchnorm_fp32: bool
    half_parameters: bool

    @property
    def casts(self) -> bool:
        """Whether anything is computed in half."""
        return self.patch_ops or self.cast_model


OPT_LEVELS: dict[str, OptLevel] = {
    "O0": OptLevel("float32 throughout", False, False, True, False),
    "O1": OptLevel("casts per op by the rule table; float32 parameters", True, False, True, False),
    "O2": OptLevel("half but for batch norm, linalg, complex; float32 parameters are the masters", False, True, True, False),
    "O3": OptLevel("half everywhere, parameters included", False, True, False, True),
}


def default_half(devices: Iterable[torch.device]) -> torch.dtype:
    """Return the half type of a model on `devices` when none is asked for: float16 where one is CUDA, bfloat16 elsewhere."""
    return torch.float16 if any(device.type == "cuda" for device in devices) else torch.bfloat16


def num_ranks_to_come() -> int:
    """Return how many ranks the launcher of this process has started where there is no process group of them yet, else 1."""
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdigit() and not has_group() else 1


def _unknown(key: Any, cls: type[Any], elsewhere: Mapping[str, str], also: Iterable[str] = ()) -> str:
    """Say what is wrong with `key` as an option of the dataclass `cls`; "" where nothing is."""
    known = [*also, *(f.name for f in dataclasses.fields(cls))]
    if key in known:
        return ""
    near = difflib.get_close_matches(str(key), known, n=1)
    hint = elsewhere.get(key, f"; did you mean {near[0]!r}?" if near else ".")
    return f"unknown option {key!r}{hint} Known options: {', '.join(known)}"


def _names_unknown(cls: type[Any]) -> type[Any]:
    """Have a dataclass say which of its options is meant by another name."""
    init = cls.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **options: Any) -> None:
        for key in options:
            if said := _unknown(key, cls, _ELSEWHERE):
                raise TypeError(f"apexfx: {cls.__name__}() was given the {said}")
        init(self, *args, **options)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


@_names_unknown
@dataclass(frozen=True)
class BucketConfig:
    """How gradients are grouped and averaged across ranks.

    Args:
        message_size: close a bucket when its element count reaches this (Apex's meaning). None: Apex's 10,000,000, or less
            for a model that would not fill four such buckets: a quarter of its elements, at least 2**19, so that
            communication starts while there is still something to compute.
        layout: "reverse" fills buckets in reverse order of the parameters' first use; "ddp" reproduces the buckets of
            `torch.nn.parallel.DistributedDataParallel`, in the dtype of the parameters, so that gradients are bitwise its own.
        bucket_cap_mb: bucket size in MiB for `layout="ddp"`.
        delay_allreduce: one bucket a dtype, reduced at the end of backward.
        trigger_params: names of parameters; a bucket is closed when one of these gets its gradient, instead of by size.
        allreduce_always_fp32: reduce in float32 the gradients of float32 parameters that are computed in half, as torch's DDP
            does; else they are reduced in half, as Apex does at O2, with half of the bytes.
        gradient_average: divide by the number of ranks; False leaves the sum.
        gradient_predivide_factor: divide by this before the allreduce, and by world size / this after it.
        comm_dtype: reduce in this dtype, whatever the gradient's.
        plan: a `BucketPlan`, or the path of one saved as JSON, replayed instead of being computed. It decides what the
            options above would, so none of them may be given with it.
        timeout_s: seconds to wait for the other ranks before raising, where that is less than the process group's timeout.
    """

    message_size: int | None = None
    layout: str = "reverse"
    bucket_cap_mb: float = 25.0
    delay_allreduce: bool = False
    trigger_params: tuple[str, ...] = ()
    allreduce_always_fp32: bool = False
    gradient_average: bool = True
    gradient_predivide_factor: float = 1.0
    comm_dtype: torch.dtype | None = None
    plan: Any = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        _expect("message_size", self.message_size,
                self.message_size is None or isinstance(self.message_size, int) and self.message_size > 0,
                "a positive number of elements, or None")
        _one_of("layout", self.layout, LAYOUTS)
        for name in ("bucket_cap_mb", "gradient_predivide_factor", "timeout_s"):
            number = getattr(self, name)
            _expect(name, number, is_number(number) and number > 0 or number is None and name == "timeout_s", "a positive number")
        for name in ("delay_allreduce", "allreduce_always_fp32", "gradient_average"):
            _expect(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        _expect("trigger_params", self.trigger_params, isinstance(self.trigger_params, (list, tuple))
                and all(isinstance(p, str) for p in self.trigger_params), "a list or tuple of names of parameters")
        object.__setattr__(self, "trigger_params", tuple(self.trigger_params))
        if self.delay_allreduce and self.trigger_params:
            raise ValueError("apexfx: trigger_params starts buckets early and delay_allreduce starts them at the end; "
                             "give one of them")
        if self.comm_dtype is not None:
            _expect("comm_dtype", self.comm_dtype, isinstance(self.comm_dtype, torch.dtype)
                    and self.comm_dtype.is_floating_point, "a floating torch.dtype or None")
            if self.allreduce_always_fp32 and self.comm_dtype != torch.float32:
                raise ValueError(f"apexfx: allreduce_always_fp32=True contradicts comm_dtype={self.comm_dtype}")
        changed = [f.name for f in dataclasses.fields(self)
                 if f.name not in ("plan", "timeout_s") and getattr(self, f.name) != f.default]
        if self.plan is not None and changed:
            raise ValueError(f"apexfx: a plan is replayed as it is, and decides about {', '.join(changed)} too; leave "
                             f"{'it' if len(changed) == 1 else 'them'} out, or make a new plan with them by leaving out plan=")
        ordered = [name for name in ("message_size", "delay_allreduce", "trigger_params") if name in changed]
        if self.layout == "ddp" and ordered:
            raise ValueError(f"apexfx: layout='ddp' closes buckets where torch DDP does, at bucket_cap_mb; {ordered[0]} needs "
                             "layout='reverse'")
        if self.layout != "ddp" and "bucket_cap_mb" in changed:
            raise ValueError(f"apexfx: bucket_cap_mb={self.bucket_cap_mb} was given, which is the size of buckets for "
                             "layout='ddp'; give message_size, a number of elements, or that layout too")

    def describe(self) -> dict[str, Any]:
        """Return the options as JSON-able values, for reports and cache keys."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        row["comm_dtype"] = str(self.comm_dtype) if self.comm_dtype else None
        row["plan"] = str(self.plan) if self.plan is not None else None
        return row


# Options of Apex, torch, and other trainers, and how the same is said here.
_ELSEWHERE = {name: said for names, said in {
    ("num_allreduce_streams", "allreduce_communicators", "retain_allreduce_buffers", "prof", "gradient_average_split_factor",
     "find_unused_parameters", "static_graph", "broadcast_buffers", "gradient_as_bucket_view", "device_ids", "output_device",
     "shared_param"): ": an argument of DistributedDataParallel, which graphs do without; leave it out.",
    tuple(f.name for f in dataclasses.fields(BucketConfig)): ": an option of apexfx.BucketConfig; give ddp=BucketConfig(...).",
    ("amp", "use_amp", "autocast", "mixed_precision", "fp16", "bf16", "cast_model_type", "patch_torch_functions"):
        ": opt_level='O1' casts per op, 'O2' and 'O3' cast the model, and 'O0' casts nothing; dtype= names the half type.",
    ("criterion", "losses"): ": the loss function is loss_fn= of train_step().",
    ("master_weights",): ": at O1 and O2 the module keeps its float32 parameters, which are the master weights.",
    ("cast_model_outputs",): ": cast what the model returns.",
    ("clip_grad", "grad_clip", "clip_grad_norm", "max_norm", "gradient_clip_val"):
        ": max_grad_norm= of train_step() clips; a loop calls torch.nn.utils.clip_grad_norm_().",
    ("grad_accum", "grad_accumulation", "gradient_accumulation_steps", "accumulation_steps", "accumulate_grad_batches",
     "no_sync"): ": accumulate= of train_step() counts the calls of an update; a loop has no_sync() of the transformed model.",
    ("replica_check_interval", "record_dir", "spike_factor", "max_consecutive_skips"):
        ": an option of apexfx.Safeguard; give safeguard=apexfx.Safeguard(...) to train_step().",
    ("model_ema", "ema_decay", "use_ema"): ": ema=apexfx.EMA(decay) of train_step() averages the parameters.",
    ("scheduler", "lr_scheduler"): ": a schedule stays outside; call scheduler.step() behind an update (if step.updated:).",
    ("label_smoothing",): ": it is the loss function's; give nn.CrossEntropyLoss(label_smoothing=).",
    ("channels_last", "memory_format"): ": convert model and batches by .to(memory_format=torch.channels_last); graphs keep it.",
    ("mode",): ": give what it stands for as inner_options=; torch._inductor.list_mode_options(mode) has it.",
    ("cuda_graph", "cuda_graphs", "cudagraphs"): ": give inner='cudagraphs'.",
    ("backend",): ": the compiler of the graphs is inner=, as inner='inductor'; others are 'eager' and 'cudagraphs'.",
}.items() for name in names}
_LOSS_SCALING = ": the graphs hold no loss scaling; use torch.amp.GradScaler, or apexfx.amp.initialize(..., compile=True)."
_OF_TRANSFORM = {
    **_ELSEWHERE,
    **dict.fromkeys(("loss_fn", "optimizer", "objective", "max_grad_norm", "accumulate", "keep_grads", "memory_budget",
                     "fallback", "safeguard", "shard", "ema", "parts", "modules", "slices", "seed"),
                    ": an option of train_step()."),
    **dict.fromkeys(("loss_scale", "min_loss_scale", "max_loss_scale", "num_losses"), _LOSS_SCALING),
}
_OF_STEP = {
    **_ELSEWHERE,
    **dict.fromkeys(("min_loss_scale", "max_loss_scale"), ": loss_scale='dynamic' moves from 2**-24 to 2**24; a number stays."),
    "num_losses": ": a step has one loss_scale=; its objective= adds the losses.",
}
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in HALVES}


@dataclass(frozen=True)
class TransformConfig:
    """The options of `transform()` and of `torch.compile(backend="apex")`; see `transform` for their meaning."""

    opt_level: str = "O1"
    dtype: torch.dtype | str | None = None
    keep_batchnorm_fp32: bool | None = None
    precision: Mapping[str, Any] = field(default_factory=dict)
    sync_bn: bool = False
    ddp: bool | BucketConfig = False
    process_group: dist.ProcessGroup | None = None
    passes: tuple[Any, ...] = ()
    skip: tuple[str, ...] = ()
    inner: str = "inductor"
    inner_options: Mapping[str, Any] = field(default_factory=dict)
    fullgraph: bool = False
    dynamic: bool | None = None
    verify: str = "auto"
    check_indices: bool | None = None
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            object.__setattr__(self, "dtype", _DTYPE_NAMES.get(self.dtype, self.dtype))
        if self.inner_options is None:
            object.__setattr__(self, "inner_options", {})
        for name in ("precision", "inner_options"):
            if isinstance(value := getattr(self, name), dict):  # which its owner may change later
                object.__setattr__(self, name, dict(value))
        _one_of("opt_level", self.opt_level, OPT_LEVELS, hint="the letter O and a digit")
        _one_of("inner", self.inner, INNER_COMPILERS)
        _one_of("verify", self.verify, VERIFY_LEVELS)
        for name in ("sync_bn", "fullgraph"):
            _expect(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        for name in ("keep_batchnorm_fp32", "dynamic", "check_indices"):
            _expect(name, getattr(self, name), isinstance(getattr(self, name), (bool, type(None))), "True, False or None")
        _expect("ddp", self.ddp, isinstance(self.ddp, (bool, BucketConfig)), "True, False or a BucketConfig")
        if self.dtype is not None:
            _expect("dtype", self.dtype, self.dtype in HALVES, "torch.float16, torch.bfloat16, 'float16', 'bfloat16' or None")
        if self.process_group is not None:
            _expect("process_group", self.process_group, isinstance(self.process_group, dist.ProcessGroup),
                    "a torch.distributed.ProcessGroup or None")
        self._check_combinations()
        for name in ("passes", "skip", "methods"):
            value = getattr(self, name)
            _expect(name, value, isinstance(value, (list, tuple)), "a list or tuple")
            object.__setattr__(self, name, tuple(value))
        _expect("skip", self.skip, all(isinstance(s, str) for s in self.skip), "names of passes")
        _expect("methods", self.methods, all(isinstance(s, str) for s in self.methods), "names of methods")
        _expect("precision", self.precision, isinstance(self.precision, Mapping), "a mapping of names to dtypes")
        _check_inner_options(self.inner, self.inner_options)

    def _check_combinations(self) -> None:
        level = OPT_LEVELS[self.opt_level]
        if self.keep_batchnorm_fp32 is not None and not level.cast_model:
            raise ValueError(f"apexfx: keep_batchnorm_fp32={self.keep_batchnorm_fp32} needs opt_level O2 or O3; "
                             f"at {self.opt_level} batch norm keeps its parameters as they are")
        if self.dtype is not None and not level.casts and not self.precision:
            raise ValueError(f"apexfx: dtype={self.dtype} was given with opt_level={self.opt_level!r}, which casts nothing to "
                             "it; 'O1' casts op by op, 'O2' the model but for batch norms; or leave dtype out")
        if self.ddp and not has_group():
            raise ValueError("apexfx: ddp=True needs a process group; call torch.distributed.init_process_group() first "
                             "(under torchrun), or leave ddp out for a single process")
        if self.sync_bn and num_ranks_to_come() > 1:
            raise ValueError(f"apexfx: sync_bn=True was given before torch.distributed.init_process_group(), and WORLD_SIZE="
                             f"{num_ranks_to_come()} says that there are other ranks, whose statistics would be left out; call "
                             "that first, or leave sync_bn out")
        if self.process_group is not None and not (self.ddp or self.sync_bn):
            raise ValueError("apexfx: process_group is used by ddp and sync_bn, and neither was asked for")

    @property
    def level(self) -> OptLevel:
        """The row of the O0-O3 table, with `keep_batchnorm_fp32` overridden where asked."""
        level = OPT_LEVELS[self.opt_level]
        if self.keep_batchnorm_fp32 is not None:
            level = dataclasses.replace(level, keep_batchnorm_fp32=self.keep_batchnorm_fp32)
        return level

    @property
    def buckets(self) -> BucketConfig | None:
        """The bucket options, or None when gradients are not reduced."""
        if isinstance(self.ddp, BucketConfig):
            return self.ddp
        return BucketConfig(allreduce_always_fp32=self.level.patch_ops) if self.ddp else None  # at O1 as DDP under autocast

    def half_dtype(self, devices: Iterable[torch.device]) -> torch.dtype:
        """Return the half type of a model on `devices`: the one asked for, else the default."""
        return self.dtype or default_half(devices)

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None, also: Iterable[str] = ()) -> TransformConfig:
        """Build the config from the keys of `transform()` or `torch.compile(options=...)`.

        Args:
            also: what the caller, a training step, takes besides, for the error.

        Raises:
            ValueError: for an unknown key, with the nearest known one.
        """
        options = dict(options or {})
        for key in options:
            if message := _unknown(key, cls, _OF_STEP if also else _OF_TRANSFORM, also):
                raise ValueError(f"apexfx: {message}")
        return cls(**options)

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot be pickled; its name is looked up again where the model is loaded.
        group = self.process_group
        return {**self.__dict__, "process_group": group.group_name if group is not None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        name = state["process_group"]
        self.__dict__["process_group"] = resolve_process_group(name) if name is not None and has_group() else None

    def describe(self) -> dict[str, Any]:
        """Return the options as JSON-able values, for reports and cache keys."""
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        row["process_group"] = self.process_group.group_name if self.process_group is not None else None
        row["ddp"] = self.buckets.describe() if self.buckets is not None else None
        row["precision"] = {str(k): str(v) for k, v in sorted(self.precision.items())}
        row["inner_options"] = dict(sorted(self.inner_options.items()))
        row["passes"] = [getattr(p, "name", repr(p)) for p in self.passes]
        row["dtype"] = str(self.dtype) if self.dtype else None
        return row


# Options of Inductor's that are an option here, or that this package sets.
_SET_HERE = {
    "triton.cudagraphs": "give inner='cudagraphs'",
    "post_grad_custom_post_pass": "give passes=, which it is used for",
    "use_post_grad_passes": "give skip=, which leaves out one pass; those of backward and step run there",
    "trace.provenance_tracking_level": "leave it out: profiles need it as it is",
}

# Of what type a value has to be, by that of the option: no function, list or dictionary, which no report and no key could hold.
_TYPES = {bool: ((bool,), "True or False"), int: ((int,), "a whole number"), float: ((int, float), "a number"),
          str: ((str,), "a text")}
_ANY_TYPE = ((bool, int, float, str, NoneType), "a number, a text, True, False or None")


def _check_inner_options(inner: str, options: Any) -> None:
    _expect("inner_options", options, isinstance(options, Mapping), "a mapping of names to values, as {'cpp_wrapper': True}")
    if not options:
        return
    if inner == "eager":
        raise ValueError(f"apexfx: inner_options={options!r} was given with inner='eager', and they are Inductor's; leave one of "
                         "them out")
    if inner == "cudagraphs" and options.get("cpp_wrapper"):
        raise ValueError("apexfx: inner_options={'cpp_wrapper': True} was given with inner='cudagraphs', and Inductor records no "
                         "CUDA graphs of C++; leave one of them out")
    from ._torch_compilers import inductor_config

    known = inductor_config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(f"apexfx: inner_options has {name!r}, which is no option of Inductor's in torch {torch.__version__}"
                             + (f"; did you mean {near[0]!r}?" if near else "; torch._inductor.list_options() has all"))
        if name in _SET_HERE:
            raise ValueError(f"apexfx: inner_options has {name!r}: {_SET_HERE[name]}")
        types, expected = _TYPES.get(inductor_config.get_type(name), _ANY_TYPE)
        if type(value) not in types:
            raise TypeError(f"apexfx: inner_options[{name!r}]={value!r} ({type(value).__name__}) was given, expected {expected}")


def is_number(value: Any) -> bool:
    """Return whether an option is a number, and neither True nor False."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def brief(value: Any) -> str:
    """Return a value as Python writes it in a line; what takes several, as modules and tensors may, as `Sequential(...)`."""
    return f"{type(value).__name__}(...)" if "\n" in repr(value) else repr(value)


def _expect(name: str, value: Any, ok: bool, expected: str) -> None:
    if not ok:
        raise TypeError(f"apexfx: {name}={brief(value)} ({type(value).__name__}) was given, expected {expected}")


def _one_of(name: str, value: Any, choices: Any, *, hint: str = "") -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"apexfx: {name}={brief(value)} was given, expected one of {', '.join(map(repr, choices))}"
                         + (f" ({hint})" if hint else ""))
