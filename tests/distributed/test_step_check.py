"""What the summed records of all ranks say, in every dtype that a bucket may have."""

from __future__ import annotations

import pytest
import torch

from apexfx.distributed.step_check import StepRecord, StepStatus, num_flags

CPU = torch.device("cpu")


def status(*records, dtype=torch.float32):
    encoded = [record.encode(dtype, CPU) for record in records]
    assert all(len(numbers) == num_flags(len(records[0].used)) for numbers in encoded)
    return StepStatus.decode(sum(encoded))


def record(**fields):
    return StepRecord(**{"backward": 1, "forwards": 3, "model": 7, "used": (True, False), **fields})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_one_rank_of_very_many_differs(dtype):
    alike = [record()] * 3000  # a half type cannot count so far, nor has to
    said = status(*alike, record(), dtype=dtype)
    assert said == StepStatus(False, False, False, False, [True, False], [False, True])
    assert status(*alike, record(forwards=2), dtype=dtype).forwards_differ
    assert status(*alike, record(model=6), dtype=dtype).models_differ
    assert status(*alike, record(accumulated=True), dtype=dtype).accumulation_differs
    assert not status(*[record(accumulated=True)] * 2, dtype=dtype).accumulation_differs
    assert status(*alike, record(failure="a reason"), dtype=dtype).failed
    said = status(*alike, record(used=(True, True)), dtype=dtype)
    assert said.used_somewhere == [True, True] and said.unused_somewhere == [False, True]


def test_gradients_that_are_expected():
    def is_unexpected(*used, **fields):
        return status(*(record(used=u) for u in used)).is_unexpected(record(uneven=False, **fields))

    assert is_unexpected((True, False), (True, True)) and not is_unexpected((True, False), (True, False))
    assert not is_unexpected((True, False), (True, False), expected=[True, False])
    assert is_unexpected((True, False), (True, False), expected=[True, True])  # in the plan, and nobody has it
    assert is_unexpected((True, True), (True, True), expected=[True, False])  # not in the plan, and everybody has it
    assert not status(record(), record(used=(False, False))).is_unexpected(record(uneven=True))
