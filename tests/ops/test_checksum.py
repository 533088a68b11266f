"""checksum: bits against the reference and plain integers, layouts, every single change seen, threads, opcheck, bad input."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx.ops.checksum import checksum
from tests.ops.optimizer_cases import BF16, CHUNK, F16, F32, F64, LAYOUTS, SIZES, lay_out

DTYPES = [F32, F16, BF16, F64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float8_e4m3fn,
          torch.complex64, torch.complex128]  # fmt: skip


def bits(dtype, size, seed=0):
    """Return a tensor of random bits: NaNs, infinities and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (*size, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return (values % 2 == 1).squeeze(-1) if dtype == torch.bool else values.view(dtype).squeeze(-1)


def check_checksum(dtype, layout, device):
    """A list of all sizes: the checksums of the reference, whatever the layout."""
    values = [bits(dtype, size, i) for i, size in enumerate(SIZES)]
    result = checksum([lay_out(v.to(device), layout, i) for i, v in enumerate(values)])
    assert result.dtype == torch.int64 and torch.equal(result.cpu(), checksum.reference(values))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_agree_with_the_reference(dtype, layout):
    check_checksum(dtype, layout, "cpu")


@pytest.mark.parametrize("function", [checksum, checksum.reference])
@pytest.mark.parametrize("dtype,format", [(F64, "Q"), (F32, "I"), (BF16, "H"), (torch.uint8, "B")])
def test_the_formula_in_plain_integers(dtype, format, function):
    value = bits(dtype, (CHUNK // 4 + 3,))
    words = memoryview(value.view(torch.uint8).numpy()).cast(format)
    expected = sum(y * (2 * y + 1) for y in (x ^ x >> 32 for x in words)) % 2**64
    assert function([value]).item() % 2**64 == expected


def flips(tensor):
    """Yield the tensor with each of its bits flipped in turn."""
    flat = tensor.view(torch.uint8).view(-1)
    for byte, bit in itertools.product(range(flat.numel()), range(1 if tensor.dtype == torch.bool else 8)):
        flat[byte] ^= 1 << bit
        yield tensor
        flat[byte] ^= 1 << bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_flipped_bit_is_seen(dtype):
    value = bits(dtype, (5, 3))
    before = checksum([value]).item()
    assert all(checksum([flipped]).item() != before for flipped in flips(value))


@pytest.mark.parametrize("dtype", [F16, F32, F64], ids=str)
def test_each_two_flipped_bits_are_seen(dtype):
    value = bits(dtype, (2,))
    before, plain = checksum([value]).item(), value.clone().view(torch.uint8)
    for once in flips(value):
        assert all(torch.equal(twice.view(torch.uint8), plain) or checksum([twice]).item() != before for twice in flips(once))


def test_opposite_flips_and_swaps():
    value = torch.tensor([1.0, -2.0, 3.0, 4.0])
    signs = torch.tensor([-1.0, 2.0, 3.0, 4.0])  # + 2**31 and - 2**31
    assert checksum([value])[0] != checksum([signs])[0]
    assert torch.equal(checksum([value]), checksum([value.flip(0)]))  # not seen, as the module says
    assert not torch.equal(checksum([value[:2], value[2:]]), checksum([value[2:], value[:2]]))
    assert checksum([torch.tensor([0.0])])[0] != checksum([torch.tensor([-0.0])])[0]


def test_the_same_for_every_number_of_threads():
    values = [bits(F32, (300_001,)), bits(BF16, (5,))]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(checksum(values))
    torch.set_num_threads(1)
    assert all(torch.equal(result, checksum.reference(values)) for result in results)


def test_parameters_expanded_and_conjugate_tensors():
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    expanded, conjugate = torch.randn(3, 1).expand(3, 4), torch.randn(3, dtype=torch.complex64).conj()
    result = checksum([parameter, expanded])
    assert not result.requires_grad and torch.equal(result, checksum([parameter.detach(), expanded.contiguous()]))
    assert torch.equal(checksum([conjugate]), checksum([conjugate.resolve_conj()]))


def test_opcheck():
    values = [torch.randn(3, 4, requires_grad=True), torch.randn(7).half(), torch.zeros(0), torch.arange(5)]
    torch.library.opcheck(torch.ops.apexfx.checksum.default, (values,))


@pytest.mark.parametrize("function", [checksum, checksum.reference])
@pytest.mark.parametrize("tensors,error,match", [
    ([], (ValueError, RuntimeError), "tensors is empty|no tensor arguments"),
    ([torch.ones(2), torch.ones(2, device="meta")], (ValueError, RuntimeError), r"tensors\[1\] is on"),
    ([torch.ones(2).to_sparse()], TypeError, "expected a dense tensor"),
])
def test_bad_arguments_raise_and_are_named(tensors, error, match, function):
    with pytest.raises(error, match=match):
        function(tensors)
