"""multi_tensor ops: values against float64, flags, in-place use, determinism, opcheck, bad input."""

from __future__ import annotations

import pytest
import torch

from apexfx.ops import multi_tensor
from tests.ops.multi_tensor_cases import DTYPES, check_axpby, check_flags, check_l2norm, check_scale, random_list
from tests.ops.optimizer_cases import BF16, F16, F32, F64, LAYOUTS

OPS = torch.ops.apexfx


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_scale_and_axpby(dtypes, layout):
    check_scale(dtypes, layout, "cpu")
    check_axpby(dtypes, layout, "cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
def test_l2norm(dtype, layout):
    check_l2norm(dtype, layout, "cpu")


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
def test_flags(dtype):
    check_flags(dtype, "cpu")


def test_scale_in_place_bumps_versions():
    tensors = random_list(F32, "contiguous", "cpu")
    expected = [t * 2 for t in tensors]
    versions = [t._version for t in tensors]
    multi_tensor.multi_tensor_scale(tensors, tensors, torch.zeros(()), 2.0)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected))
    assert all(t._version > v for t, v in zip(tensors, versions))


def test_large_finite_values_do_not_raise_the_flag():
    norm, _, flag = multi_tensor.multi_tensor_l2norm([torch.full((4,), 1e30)])
    assert flag.item() == 0.0
    torch.testing.assert_close(norm.item(), 2e30)


def test_norm_is_the_same_for_every_number_of_threads():
    tensors = [torch.randn(300_001), torch.randn(5)]
    torch.set_num_threads(1)
    one = multi_tensor.multi_tensor_l2norm(tensors)[0]
    torch.set_num_threads(2)
    two = multi_tensor.multi_tensor_l2norm(tensors)[0]
    assert torch.equal(one, two)


def test_opcheck():
    x, y = [torch.randn(3, 4), torch.randn(())], [torch.randn(3, 4).half(), torch.randn(())]
    out, flag = [torch.empty(3, 4), torch.empty(())], torch.zeros(())
    torch.library.opcheck(OPS.multi_tensor_scale.default, (x, out, flag, 2.0, torch.tensor(3.0)))
    torch.library.opcheck(OPS.multi_tensor_axpby.default, (x, y, out, flag, 2.0, 3.0))
    for per_tensor in (False, True):
        torch.library.opcheck(OPS.multi_tensor_l2norm.default, (x, torch.tensor(0.5), per_tensor))


GOOD = torch.ones(2)
FLAG = torch.zeros(())


@pytest.mark.parametrize("implementation", ["op", "reference"])
@pytest.mark.parametrize("op,arguments,name", [
    ("scale", ([GOOD], [], FLAG), "outputs"),
    ("scale", ([GOOD], [torch.ones(3)], FLAG), "outputs"),
    ("scale", ([GOOD.long()], [GOOD], FLAG), "inputs"),
    ("scale", ([GOOD], [GOOD.clone()], torch.zeros(2)), "found_inf"),
    ("scale", ([GOOD], [GOOD.double()], FLAG), "outputs"),
    ("axpby", ([GOOD], [GOOD], [GOOD.clone()], FLAG, 1.0, 1.0, 2), "arg_to_check"),
    ("axpby", ([GOOD], [GOOD, GOOD], [GOOD.clone()], FLAG, 1.0, 1.0), "y"),
    ("l2norm", ([GOOD.bool()],), "tensors"),
    ("l2norm", ([GOOD], torch.ones(2)), "inv_scale"),
])
def test_bad_arguments_raise_and_are_named(op, arguments, name, implementation):
    function = (
        getattr(OPS, f"multi_tensor_{op}").default
        if implementation == "op"
        else getattr(multi_tensor, f"_{op}_reference")
    )
    with pytest.raises((RuntimeError, ValueError, TypeError), match=name):
        function(*arguments)
