"""Apex's multi_tensor_applier frame."""

from __future__ import annotations

import torch

from apexfx.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apexfx.multi_tensor_apply import multi_tensor_apply as amp_C
from apexfx.testing import assert_close


def test_frame():
    assert MultiTensorApply.available and multi_tensor_applier.chunk_size == 65536
    x = [torch.randn(5), torch.randn(2, 3).half()]
    flag = torch.zeros(1, dtype=torch.int32)
    out = [torch.empty_like(t, dtype=torch.float32) for t in x]
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [x, out], 0.5)
    assert all(torch.equal(o, t.float() * 0.5) for o, t in zip(out, x)) and flag.item() == 0
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [x, out, out], 1.0, 2.0, -1)
    assert all(torch.equal(o, t.float() * 2.0) for o, t in zip(out, x))
    norm, norms = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag, [x], True)
    assert norm.shape == (1,) and norms.shape == (2,)
    assert_close(norm[0], torch.cat([t.double().flatten() for t in x]).norm())
    norm, norms = multi_tensor_applier(amp_C.multi_tensor_unscale_l2norm, flag, [x], torch.tensor([0.5]))
    assert norms.numel() == 0
    assert_close(norm[0], torch.cat([t.double().flatten() for t in x]).norm() * 0.5)
    unscaled, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, flag, [x, out], 0.5, False)
    assert_close(unscaled[0], norm[0] * 2)
    unscaled, _ = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, flag, [[copies := out[0].clone()], [copies]], 0.5, False)
    assert_close(unscaled[0], out[0].norm())
    x[1][0, 0] = float("nan")
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [x, out], 0.5)
    assert flag.item() == 1
