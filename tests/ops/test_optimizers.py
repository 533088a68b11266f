"""Optimizer ops: values against float64, skip, clip, determinism, opcheck, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx._torch import has_kernel
from apexfx.testing import assert_close
from tests.ops.optimizer_cases import DTYPES, F32, LAYOUTS, OPS, SCALARS, check, make
from tests.tables import table

SMALL = [(), (3,), (2, 3)]


@table(1, "dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_values_match_float64_reference(op, dtypes):
    for layout in LAYOUTS:
        for variant in OPS[op][1]:
            for scalars in SCALARS:
                check(make(op, dtypes, layout, variant, scalars, "cpu"))


@pytest.mark.parametrize("op", OPS)
def test_reference_in_the_same_dtype_agrees(op):
    for dtypes in DTYPES:
        arguments = make(op, dtypes, "contiguous", {}, SCALARS[1], "cpu")
        expected = arguments.clone()
        expected.reference()
        arguments.call()
        for name, tensors in arguments.written().items():
            for actual, wanted in zip(tensors, expected.written()[name]):
                assert_close(actual, wanted, scale=4.0)


@pytest.mark.parametrize("implementation", ["call", "reference"])
@pytest.mark.parametrize("op", OPS)
def test_found_inf_skips_everything(op, implementation):
    for dtypes in DTYPES:
        arguments = make(op, dtypes, "mixed", {}, {"found_inf": 1.0}, "cpu")
        arguments.values["grads"][1].fill_(float("nan"))
        before = arguments.clone()
        getattr(arguments, implementation)()
        for name, tensors in arguments.written().items():
            for actual, old in zip(tensors, before.written()[name]):
                assert torch.equal(actual, old), name


@pytest.mark.parametrize("implementation", ["call", "reference"])
@table(1, "op", OPS)
def test_unscaling_changes_the_gradients_alone(op, implementation):
    inf = {"grad_scale": 3.0, "found_inf": 1.0}
    for dtypes, layout in itertools.product(DTYPES, ("contiguous", "mixed")):
        for variant, scalars in [*itertools.product(OPS[op][1], SCALARS), ({}, {"grad_scale": 3.0}), ({}, inf)]:
            arguments = make(op, dtypes, layout, variant, scalars, "cpu")
            expected = arguments.clone()
            getattr(expected, implementation)()
            getattr(arguments, implementation)("unscale")
            for name, tensors in arguments.written().items():
                assert all(torch.equal(a, b) for a, b in zip(tensors, expected.written()[name])), name
            inverse = 1.0 if scalars is inf else 1.0 / scalars.get("grad_scale", 1.0)
            for grad, old in zip(arguments.values["grads"], expected.values["grads"]):
                wide = torch.float64 if grad.dtype == torch.float64 else F32
                assert torch.equal(grad, (old.to(wide) * torch.tensor(inverse, dtype=wide)).to(grad.dtype))


@pytest.mark.parametrize("op", OPS)
def test_same_bits_for_every_run_and_number_of_threads(op):
    results = []
    for count in (1, 2, 2):
        torch.set_num_threads(count)
        arguments = make(op, (F32, F32, torch.bfloat16), "contiguous", {}, {}, "cpu")
        arguments.call()
        results.append(arguments.written())
    for other in results[1:]:
        for name, tensors in results[0].items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, other[name])), name


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    for scalars in SCALARS:
        arguments = make(op, (F32, torch.bfloat16, torch.bfloat16), "contiguous", {}, scalars, "cpu", sizes=SMALL)
        for overload in ("default", "unscale"):
            torch.library.opcheck(getattr(getattr(torch.ops.apexfx, op), overload), tuple(arguments.values.values()))


def test_an_empty_list_does_nothing():
    step = torch.zeros(())
    torch.ops.apexfx.adam_.default([], [], [], [], [], step, 1e-3, 0.9, 0.99, 1e-8, 0.0, True, True)
    assert step.item() == 0.0


def _set(name, value):
    def edit(values):
        values[name] = value(values[name]) if callable(value) else value

    return edit


BAD = [
    ("adam_", _set("eps", -1.0), "eps"),
    ("adam_", _set("lr", float("nan")), "lr"),
    ("adam_", _set("lr", "fast"), "lr"),
    ("adam_", _set("beta1", 1.0), "beta1"),
    ("adam_", _set("weight_decay", float("inf")), "weight_decay"),
    ("adam_", _set("grads", lambda x: x[:-1]), "grads"),
    ("adam_", _set("grads", lambda x: [g.reshape(-1)[:0] for g in x]), "grads"),
    ("adam_", _set("exp_avgs", lambda x: [m.half() for m in x]), "exp_avgs"),
    ("adam_", _set("exp_avg_sqs", lambda x: [m.double() for m in x]), "exp_avg_sqs"),
    ("adam_", _set("params", lambda x: [p.long() for p in x]), "params"),
    ("adam_", _set("model_params", lambda x: [torch.zeros(1)]), "model_params"),
    ("adam_", _set("step", torch.zeros(2)), "step"),
    ("adam_", _set("step", torch.zeros((), dtype=torch.int64)), "step"),
    ("adam_", _set("found_inf", torch.zeros(3)), "found_inf"),
    ("adam_", _set("grads", lambda x: [g.to_sparse() if g.dim() else g for g in x]), "grads"),
    ("sgd_", _set("momentum_buffers", []), "momentum_buffers"),
    ("sgd_", _set("dampening", float("nan")), "dampening"),
    ("novograd_", _set("norm_type", 1), "norm_type"),
    ("novograd_", _set("norms", lambda x: x[:-1]), "norms"),
    ("lamb_", _set("clip_coefficient", torch.zeros((), dtype=torch.float64)), "clip_coefficient"),
    ("adagrad_", _set("sums", lambda x: [s.long() for s in x]), "sums"),
]


@pytest.mark.parametrize("op,edit,name", BAD, ids=[f"{op}{i}" for i, (op, _, _) in enumerate(BAD)])
@pytest.mark.parametrize("implementation", ["call", "reference"])
def test_bad_arguments_raise_and_are_named(op, edit, name, implementation):
    arguments = make(op, (F32, F32, None), "contiguous", {}, {}, "cpu", sizes=SMALL)
    edit(arguments.values)
    with pytest.raises((RuntimeError, ValueError, TypeError), match=name):
        getattr(arguments, implementation)()


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "model_params"])
def test_a_tensor_whose_memory_was_given_back_raises(name):
    if not has_kernel("apexfx::adam_", "CPU"):
        pytest.skip("torch's own arithmetic, in the reference, reads such memory")
    arguments = make("adam_", (F32, F32, torch.bfloat16), "contiguous", {}, {}, "cpu", sizes=SMALL)
    arguments.values[name][1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"adam_: {name}\[1\] has no memory"):
        arguments.call()
    assert arguments.values["step"] == 4
