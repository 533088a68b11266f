"""Optimizer, multi_tensor and bucket ops on a device: the CPU tests' cases, plus streams, graphs, syncs, long lists."""

from __future__ import annotations

import itertools

import pytest
import torch

from apexfx.ops import multi_tensor
from apexfx.testing import assert_close
from tests.ops import multi_tensor_cases as lists
from tests.ops.optimizer_cases import BF16, COUNTS_STEPS, DTYPES, F16, F32, F64, LAYOUTS, OPS, SCALARS, check, make
from tests.ops.test_checksum import DTYPES as CHECKSUM_DTYPES
from tests.ops.test_checksum import check_checksum


# Beside the CPU's: dtypes for which no kernel is compiled, so that they are looked at while it runs.
@pytest.mark.parametrize("dtypes", [*DTYPES, (F64, F64, F64), (F16, BF16, F16)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_optimizer_values(op, dtypes, device):
    for layout, variant, scalars in itertools.product(LAYOUTS, OPS[op][1], SCALARS):
        check(make(op, dtypes, layout, variant, scalars, device))


@pytest.mark.parametrize("op", OPS)
def test_kernel_agrees_with_the_cpu(op, device):
    for dtypes in DTYPES:
        on_cpu, on_device = (make(op, dtypes, "contiguous", {}, SCALARS[1], d) for d in ("cpu", device))
        on_cpu.call()
        on_device.call()
        for name, tensors in on_device.written().items():
            for actual, wanted in zip(tensors, on_cpu.written()[name]):
                assert_close(actual.cpu(), wanted, scale=2.0)  # two roundings may differ: CUDA contracts a * b + c


@pytest.mark.parametrize("op", OPS)
def test_found_inf_skips_and_runs_are_bitwise(op, device):
    results = []
    for _ in range(2):
        arguments = make(op, (F32, F32, BF16), "misaligned", {}, {}, device)
        arguments.call()
        results.append(arguments.written())
    for name, tensors in results[0].items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, results[1][name])), name
    arguments = make(op, (F32, F16, F16), "contiguous", {}, {"found_inf": 1.0}, device)
    before = arguments.clone()
    arguments.call()
    for name, tensors in arguments.written().items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, before.written()[name])), name


@pytest.mark.parametrize("op", OPS)
def test_more_tensors_than_one_launch_holds(op, device):
    sizes = [(1 + i % 37,) for i in range(1500)]
    check(make(op, (F32, F32, None), "contiguous", {}, {}, device, sizes=sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_multi_tensor(layout, device):
    for dtypes in lists.DTYPES:
        lists.check_scale(dtypes, layout, device)
        lists.check_axpby(dtypes, layout, device)
    for dtype in (F32, F16, BF16, F64):
        lists.check_l2norm(dtype, layout, device)


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
def test_flags(dtype, device):
    lists.check_flags(dtype, device)


@pytest.mark.parametrize("dtype", CHECKSUM_DTYPES, ids=str)
def test_checksum(dtype, device):
    for layout in LAYOUTS:
        check_checksum(dtype, layout, device)


def _cuda_only(device):
    if device != "cuda":
        pytest.skip("about CUDA itself")


@pytest.mark.parametrize("op", OPS)
def test_no_host_sync_and_any_stream(op, device):
    _cuda_only(device)
    arguments = make(op, (F32, BF16, BF16), "contiguous", {}, SCALARS[1], device)
    expected = arguments.clone()
    expected.call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            arguments.call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    for name, tensors in arguments.written().items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected.written()[name])), name


@pytest.mark.parametrize("op", OPS)
def test_captures_in_a_cuda_graph(op, device):
    _cuda_only(device)
    arguments = make(op, (F32, F32, None), "contiguous", {}, SCALARS[1], device)
    expected = arguments.clone()
    for _ in range(3):
        expected.call()
    warm = arguments.clone()
    warm.call()  # loads the kernels outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arguments.call()
    for _ in range(3):
        graph.replay()
    for name, tensors in arguments.written().items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, expected.written()[name])), name
    if op in COUNTS_STEPS:
        assert arguments.values["step"].item() == 7.0


def test_mixed_devices_raise(device):
    _cuda_only(device)
    on_device, on_cpu = torch.ones(3, device=device), torch.ones(3)
    flag = torch.zeros((), device=device)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        multi_tensor.multi_tensor_scale([on_device, on_cpu], [on_device, on_cpu], flag)
    with pytest.raises((RuntimeError, ValueError), match="device"):
        multi_tensor.multi_tensor_scale([on_device], [on_device], torch.zeros(()))
