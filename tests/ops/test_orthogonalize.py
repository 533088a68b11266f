"""orthogonalize: the bits of torch's Muon, layouts, opcheck, bad input."""

from __future__ import annotations

import pytest
import torch
from torch.optim import _muon

from apexfx.ops.orthogonalize import orthogonalize
from tests.tables import table

SHAPES = (3, 5), (5, 3), (4, 4), (1, 6), (6, 1)
COEFFICIENTS = 3.4445, -4.775, 2.0315


def matrices(transposed):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=generator) for shape in SHAPES]
    return [m.t().contiguous().t() if transposed else m for m in made]


@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_of_torchs(transposed):
    given = [*matrices(transposed), torch.zeros(2, 3)]
    for m, found in zip(given, orthogonalize([m.bfloat16() for m in given], *COEFFICIENTS, 1e-7, 5)):
        assert torch.equal(found, _muon._zeropower_via_newtonschulz(m, COEFFICIENTS, 5, 1e-7)) and found.dtype == torch.bfloat16


@table(1, "transposed, num_iterations", [(False, 0), (False, 1), (False, 5), (True, 1), (True, 0), (True, 5)])
def test_opcheck(transposed, num_iterations):
    torch.library.opcheck(torch.ops.apexfx.orthogonalize.default, (matrices(transposed), *COEFFICIENTS, 1e-7, num_iterations))


def test_bad_input():
    for given, eps, words in (([], 1e-7, "empty"), ([torch.ones(3)], 1e-7, "expected a matrix"), (matrices(False), -1.0, "eps")):
        with pytest.raises(ValueError, match=words):
            orthogonalize(given, *COEFFICIENTS, eps, 5)
