"""O1's casts in eager mode (APEX_SPEC 1.9): rules, weight cache, checkpoints, disable_casts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apexfx import amp
from apexfx.amp._amp_state import _amp_state
from apexfx.amp.executor import CastExecutor
from apexfx.config import HALVES
from tests.amp.amp_cases import ConvNet, batch

B = torch.bfloat16


@pytest.fixture(params=HALVES, ids=str)
def half(request):
    return request.param


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


ONE_BY_ONE = {
    "positions": lambda x, w: F.linear(x, w, w[0]),
    "keywords": lambda x, w: F.layer_norm(x, (4,), weight=w[0], bias=w[0]),
    "one given twice": lambda x, w: torch.addmm(x, w, w),
    "in a sequence": lambda x, w: torch.cat([x, w]),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w[0], w[0], True),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, w, w),
    "attention with a mask": lambda x, w: F.scaled_dot_product_attention(x, w, w, ones(4, 4) * torch.finfo(torch.float32).min),
    "a limit of float32": lambda x, w: F.hardtanh(x, -torch.finfo(torch.float32).max, 3.0),
    "a stored number": lambda x, w: x.masked_fill(w > 0, -1e9),
    "out": lambda x, w: torch.abs(x, out=torch.empty_like(x)),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_casts_at_known_places_are_those_of_arguments_one_by_one(name, half):
    x, w = ones(4, 4, dtype=half), nn.Parameter(torch.arange(16.0).view(4, 4))
    for first in (x, x.float()):
        results = []
        for on_cast in (None, lambda *cast: None):  # who asks for each cast has arguments gone through one by one
            executor = CastExecutor(half)
            executor.on_cast = on_cast
            with executor:
                results.append([ONE_BY_ONE[name](first, w) for _ in range(2)])  # decided, and decided before
        flat = [result for pair in results for result in pair]
        assert len({r.dtype for r in flat}) == 1 and all(torch.equal(r, flat[0]) for r in flat)


def test_a_sequence_of_arguments_is_told_from_the_arguments():
    x, w = ones(4, 4), nn.Parameter(ones(4, 4))
    with CastExecutor(B):
        results = [torch.einsum("ij,jk->ik", *operands) for operands in ((x, w), ([x, w],), (x, w))]
    assert [(r.dtype, float(r.sum())) for r in results] == [(B, 64.0)] * 3


def test_values_may_be_read_on_the_host():
    with CastExecutor(B):
        assert float(ones()) == int(ones()) == bool(ones()) == ones().item() == 1.0


def test_a_write_in_place_makes_no_new_tensor(half):
    with CastExecutor(half):
        x = alias = ones(4, dtype=half)
        x += ones(4)
    assert x is alias and x.dtype == half and torch.equal(x, ones(4, dtype=half) * 2)  # Apex rebound x to a new tensor


@torch.library.custom_op("tests_executor::bump", mutates_args=("x",))
def bump(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


WRITES = {
    "custom op": lambda x, w: bump(x, w),
    "packet": lambda x, w: torch.ops.tests_executor.bump(x, w),
    "overload": lambda x, w: torch.ops.tests_executor.bump.default(x, w),
    "instance_norm": lambda x, w: F.instance_norm(2 * w[None], x, x + 1, use_input_stats=True),
    "embedding_bag": lambda x, w: F.embedding_bag(ones(1, 2).long(), x.view(4, 1), max_norm=0.5),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_an_op_writes_is_no_copy(write, half):
    x, w = ones(4, dtype=half), ones(4, 4, dtype=half)
    with CastExecutor(half):
        F.embedding_bag(ones(1, 2).long(), x.view(4, 1), max_norm=None)  # what a call reads alone is cast
        WRITES[write](x, w if "norm" in write else w[0])
    assert not torch.equal(x, ones(4, dtype=half))


def test_a_branch_of_torch_cond_is_run():
    with CastExecutor(B):
        assert torch.equal(torch.cond(ones().bool(), lambda x: x + 1, lambda x: x - 1, (ones(4),)), ones(4) * 2)


def test_a_dtype_named_in_the_call_is_kept():
    with CastExecutor(B):
        for dtype in (B, torch.float64):  # what one call decides is not kept for the other
            assert torch.softmax(ones(4, dtype=B), -1, dtype).dtype == dtype
            assert torch.cumsum(ones(4, dtype=B), 0, dtype=dtype).dtype == dtype
            assert torch.sum(ones(4, 4, dtype=B), (0,), False, dtype=dtype).dtype == dtype
            assert torch.softmax(ones(4, dtype=B), -1).dtype == torch.cumsum(ones(4, dtype=B), 0).dtype == torch.float32


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells_use_cached_weights_repeatedly(kind):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = kind(4, 8)

        def forward(self, x):
            state = None
            for t in range(x.shape[0]):
                state = self.cell(x[t], state)
            return state[0] if isinstance(state, tuple) else state

    model = Loop()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype=B, verbosity=0)
    with amp.scale_loss(model(torch.randn(6, 3, 4)).sum(), optimizer) as loss:
        loss.backward()  # IndexError in Apex on torch 1.10 and later
    assert model.cell.weight_hh.grad.abs().max() > 0


def test_disable_casts_nests_and_survives_exceptions():
    amp.initialize(nn.Linear(4, 4), dtype=B, verbosity=0)
    with _amp_state.session.executor:
        with amp.disable_casts():
            with amp.disable_casts():
                assert torch.mm(ones(2, 2), ones(2, 2)).dtype == torch.float32
            assert torch.mm(ones(2, 2), ones(2, 2)).dtype == torch.float32
            assert not _amp_state.handle.is_active()
        assert torch.mm(ones(2, 2), ones(2, 2)).dtype == B
        with pytest.raises(KeyError), amp.disable_casts():
            raise KeyError
        assert torch.mm(ones(2, 2), ones(2, 2)).dtype == B


def test_a_model_in_a_model_hands_its_values_on_as_they_are():
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            self.seen = self.inner(x).dtype
            return self.inner(x)

    inner = ConvNet()
    outer = Outer(inner)
    amp.initialize([inner, outer], dtype=B, verbosity=0)
    assert outer(batch()[0]).dtype == torch.float32 and outer.seen == B


def test_disable_casts_holds_for_models_that_were_initialised_apart():
    class Model(nn.Linear):
        def forward(self, x):
            with amp.disable_casts():
                self.seen = super().forward(x).dtype
            return x

    models = [amp.initialize(Model(2, 2), opt_level="O1", verbosity=0) for _ in range(2)]
    for model in models:
        model(torch.ones(2, 2))
    assert [model.seen for model in models] == [torch.float32] * 2
