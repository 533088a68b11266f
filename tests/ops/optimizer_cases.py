"""Cases of the optimizer ops: every op x dtypes x layouts x sizes, on any device, against the reference in float64."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from apexfx.ops import optimizers
from apexfx.testing import assert_close

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# (param, grad, model copy or None)
DTYPES = [
    (F32, F32, None), (F16, F16, None), (BF16, BF16, None), (F64, F64, None),
    (F32, F16, F16), (F32, BF16, BF16), (F32, F32, BF16), (BF16, F32, None),
]  # fmt: skip
CHUNK = 16 * 1024
LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "mixed", "misaligned")
SIZES = [(), (1,), (0,), (7,), (3, 5, 2, 2), (CHUNK + 3,), (4, 0, 3), (129, 9, 3, 3)]

# op -> (list names after params and grads that hold state, keyword variants)
OPS = {
    "adam_": (
        ("exp_avgs", "exp_avg_sqs"),
        [{}, {"decoupled": False}, {"bias_correction": False, "weight_decay": 0.0}],
        {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "decoupled": True,
         "bias_correction": True},
    ),
    "lamb_": (
        ("exp_avgs", "exp_avg_sqs"),
        [{}, {"decoupled": False, "grad_averaging": False}, {"weight_decay": 0.0}, {"weight_decay": 0.0, "use_nvlamb": True}],
        {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-4, "weight_decay": 0.1, "decoupled": True,
         "bias_correction": True, "grad_averaging": True, "use_nvlamb": False},
    ),
    "sgd_": (
        ("momentum_buffers",),
        [{}, {"nesterov": True, "dampening": 0.0}, {"first_run": True}, {"momentum": 0.0}, {"wd_after_momentum": True}],
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False,
         "wd_after_momentum": False, "first_run": False},
    ),
    "adagrad_": (
        ("sums",),
        [{}, {"decoupled": True}],
        {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "decoupled": False},
    ),
    "novograd_": (
        ("exp_avgs", "norms"),
        [{}, {"norm_type": 0}, {"reg_inside_moment": True, "grad_averaging": False}, {"bias_correction": False}],
        {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-4, "weight_decay": 0.1, "bias_correction": True,
         "grad_averaging": True, "reg_inside_moment": False, "norm_type": 2},
    ),
}  # fmt: skip
COUNTS_STEPS = ("adam_", "lamb_", "novograd_")
REFERENCES = {name: getattr(optimizers, f"_{name}reference") for name in OPS}


@dataclass
class Arguments:
    """The arguments of one call, by name, in schema order."""

    op: str
    values: dict[str, object]

    def call(self, overload: str = "default") -> None:
        """Run the registered op: a compiled kernel where there is one."""
        getattr(getattr(torch.ops.apexfx, self.op), overload)(*self.values.values())

    def reference(self, overload: str = "default") -> None:
        """Run the pure-torch reference."""
        reference = REFERENCES[self.op]
        (reference if overload == "default" else optimizers._unscaling(reference))(*self.values.values())

    def wide(self) -> Arguments:
        """Return a float64 copy; device scalars stay float32."""
        copy = {}
        for name, value in self.values.items():
            if name == "norms":
                copy[name] = [v.clone() for v in value]
            elif isinstance(value, list):
                copy[name] = [v.double().clone(memory_format=torch.contiguous_format) for v in value]
            else:
                copy[name] = value.clone() if isinstance(value, Tensor) else value
        return Arguments(self.op, copy)

    def clone(self) -> Arguments:
        """Return a copy with the same layouts."""
        copy = {}
        for name, value in self.values.items():
            if isinstance(value, list):
                copy[name] = [clone_layout(v) for v in value]
            else:
                copy[name] = value.clone() if isinstance(value, Tensor) else value
        return Arguments(self.op, copy)

    def written(self) -> dict[str, list[Tensor]]:
        """Return the lists an op may write, and the step."""
        lists = {k: v for k, v in self.values.items() if isinstance(v, list) and k != "grads"}
        return {**lists, **({"step": [self.values["step"]]} if "step" in self.values else {})}


def clone_layout(tensor: Tensor) -> Tensor:
    """Clone with the same strides and storage offset."""
    size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    storage = torch.zeros(tensor.storage_offset() + size, dtype=tensor.dtype, device=tensor.device)
    copy = storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copy.copy_(tensor)


def lay_out(values: Tensor, layout: str, position: int) -> Tensor:
    """Return `values` in `layout`; `mixed` lays out every list of a position differently."""
    if layout == "mixed":
        layout = ("contiguous", "transposed", "sliced", "channels_last", "misaligned")[position % 5]
    if layout == "channels_last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and values.dim() >= 2:
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced" and values.dim() >= 1:
        return torch.stack([values, values], -1)[..., 1]
    if layout == "misaligned":
        storage = torch.empty(values.numel() + 1, dtype=values.dtype, device=values.device)
        return storage[1:].view(values.shape).copy_(values)
    return values.contiguous()


def make(op: str, dtypes, layout: str, variant: dict, scalars: dict, device: str, sizes=SIZES, seed: int = 0) -> Arguments:
    """Build the arguments of one call with seeded data."""
    generator = torch.Generator().manual_seed(seed)
    param_dtype, grad_dtype, model_dtype = dtypes
    state_dtype = F64 if param_dtype == F64 else F32
    state_names, _, defaults = OPS[op]
    settings = {**defaults, **variant}

    def random(shape, dtype, position, positive=False):
        values = torch.randn(shape, generator=generator, dtype=F64)
        return lay_out((values.abs() if positive else values).to(dtype).to(device), layout, position)

    values: dict[str, object] = {"params": [random(s, param_dtype, 0) for s in sizes]}
    values["grads"] = [random(s, grad_dtype, 1) for s in sizes]
    for k, name in enumerate(state_names):
        if name == "norms":
            values[name] = [torch.tensor(-1.0 if i % 2 else 0.7, device=device) for i in range(len(sizes))]
        elif name == "momentum_buffers" and settings["momentum"] == 0.0:
            values[name] = []
        else:
            values[name] = [random(s, state_dtype, 2 + k, name in ("exp_avg_sqs", "sums")) for s in sizes]
    values["model_params"] = [random(s, model_dtype, 4) for s in sizes] if model_dtype else []
    if op in COUNTS_STEPS:
        values["step"] = torch.tensor(4.0, device=device)
    values |= settings
    for name in ("lr_tensor", "grad_scale", "found_inf", "clip_coefficient"):
        values[name] = torch.tensor(scalars[name], device=device) if name in scalars else None
    return Arguments(op, values)


def check(arguments: Arguments) -> None:
    """Run the op and compare with the float64 reference; the model copy is compared in its own dtype."""
    expected = arguments.wide()
    expected.reference()
    arguments.call()
    for name, tensors in arguments.written().items():
        for actual, wanted in zip(tensors, expected.written()[name], strict=True):
            assert_close(actual, wanted.to(actual.device), scale=4.0)  # a dozen roundings, and one sqrt


SCALARS = ({}, {"lr_tensor": 2e-2, "grad_scale": 512.0, "found_inf": 0.0, "clip_coefficient": 0.25})


def grid():
    """Yield (op, dtypes, layout, variant, scalars) for every case."""
    for op, (_, variants, _) in OPS.items():
        for dtypes, layout, variant, scalars in itertools.product(DTYPES, LAYOUTS, variants, SCALARS):
            yield op, dtypes, layout, variant, scalars
