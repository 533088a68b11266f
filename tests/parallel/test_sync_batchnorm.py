"""SyncBatchNorm on one process: every form against float64 batch norm; conversion."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import apexfx
from apexfx.parallel import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group
from apexfx.testing import assert_close

SHAPES = [(6, 5), (6, 5, 7), (4, 5, 3, 2), (2, 5, 3, 2, 2)]


def reference(module, x, z=None):
    """The forward of `module` by F.batch_norm in float64; running buffers are not touched."""
    double = lambda v: v.detach().double() if v is not None else None  # noqa: E731
    x = x.double()
    x, z = (x.movedim(-1, 1), z.double().movedim(-1, 1) if z is not None else None) if module.channel_last else (
        x, z.double() if z is not None else None)
    batch = module.training or module.running_mean is None
    y = F.batch_norm(x, None if batch else double(module.running_mean), None if batch else double(module.running_var),
                     double(module.weight), double(module.bias), batch, 0.0, module.eps)
    y = y if z is None else y + z
    y = y.relu() if module.fuse_relu else y
    return y.movedim(1, -1) if module.channel_last else y


def randomized(module):
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 0.5)
    return module


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channel_last", [False, True])
def test_every_shape_and_option_against_float64(training, channel_last):
    for shape in SHAPES:
        for affine, track, relu, residual in [(True, True, False, False), (True, True, True, True), (False, True, True, False),
                                              (True, False, False, True), (False, False, True, True)]:
            module = SyncBatchNorm(5, affine=affine, track_running_stats=track, channel_last=channel_last, fuse_relu=relu)
            randomized(module).train(training)
            x = torch.randn(shape) * 2 + 3
            x = x.movedim(1, -1).contiguous() if channel_last else x
            z = torch.randn_like(x) if residual else None
            assert_close(module(x, z), reference(module, x, z), dtype=torch.float32, scale=2)
            assert module(x, z).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_mixed_dtypes_give_the_input_dtype_in_training_and_eval(dtype):
    for layer_dtype in (torch.float32, dtype):
        for training in (True, False) if (dtype, layer_dtype) != (torch.float64, torch.float32) else (True,):
            module = randomized(SyncBatchNorm(5, dtype=layer_dtype)).train(training)
            x = torch.randn(8, 5, 3, dtype=dtype)
            y = module(x)
            assert y.dtype == dtype
            assert_close(y, reference(module, x), dtype=torch.float32 if dtype is torch.float64 else dtype, scale=2)
    with pytest.raises(RuntimeError, match="mixed dtype"):  # torch's batch norm says so
        SyncBatchNorm(5, dtype=torch.float16).eval()(torch.randn(8, 5))


def test_memory_format_and_parameters_survive():
    module = SyncBatchNorm(5)
    x = torch.randn(2, 5, 3, 4).to(memory_format=torch.channels_last)
    assert module(x).is_contiguous(memory_format=torch.channels_last)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    assert list(module.state_dict()) == list(nn.BatchNorm2d(5).state_dict())


def test_bad_input_says_what_was_given():
    with pytest.raises(ValueError, match=r"4 channels \(shape \(2, 4, 3\).*expected num_features=5"):
        SyncBatchNorm(5)(torch.randn(2, 4, 3))
    with pytest.raises(ValueError, match=r"shape \(5,\), expected \(N, C\)"):
        SyncBatchNorm(5)(torch.randn(5))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm(5)(torch.randn(1, 5))
    with pytest.raises(TypeError, match="process_group=3 was given"):
        SyncBatchNorm(5, process_group=3)


def test_transforms_with_its_residual():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = SyncBatchNorm(5, fuse_relu=True, momentum=None)

        def forward(self, x):
            return self.bn(x, x)

    net = Residual()
    twin = copy.deepcopy(net)
    x = torch.randn(6, 5, 3)
    transformed = apexfx.transform(net, opt_level="O0", inner="eager", fullgraph=True)
    assert torch.equal(transformed(x), twin(x)) and torch.equal(net.bn.running_var, twin.bn.running_var)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True),
                         nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4, momentum=None, eps=1e-3)))


def test_conversion_keeps_everything_but_the_class():
    net = model()
    net[1].eval()
    net[1].weight.requires_grad_(False)
    net[3][1].half()
    fired = []
    net[1].register_forward_hook(lambda *_: fired.append(1))
    modules, parameters = dict(net.named_modules()), dict(net.named_parameters())
    buffers, keys = dict(net.named_buffers()), list(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    assert convert_syncbn_model(net) is net
    assert type(net[1]) is type(net[3][1]) is SyncBatchNorm and type(net[2]) is nn.InstanceNorm2d
    assert all(dict(net.named_modules())[n] is m for n, m in modules.items())
    assert all(dict(net.named_parameters())[n] is p for n, p in parameters.items())
    assert all(dict(net.named_buffers())[n] is b for n, b in buffers.items()) and list(net.state_dict()) == keys
    assert not net[1].training and net[3][1].training and not net[1].weight.requires_grad
    assert net[3][1].weight.dtype == torch.float16 and net[3][1].momentum is None and net[3][1].eps == 1e-3
    net(torch.randn(2, 3, 6, 6)).float().sum().backward()
    before = net[3][1].bias.detach().clone()
    optimizer.step()
    assert fired == [1] and not torch.equal(before, net[3][1].bias)


def test_conversion_is_idempotent_and_takes_a_batch_norm_itself():
    plain = nn.BatchNorm1d(3)
    assert convert_syncbn_model(convert_syncbn_model(plain)) is plain and type(plain) is SyncBatchNorm
    torchs = nn.SyncBatchNorm(3)
    assert type(convert_syncbn_model(torchs)) is SyncBatchNorm and torchs.process_group is None


def test_a_method_that_would_be_dropped_is_refused_before_anything_changes():
    class BatchNormAct(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    class Frozen(nn.BatchNorm2d):
        def train(self, mode=True):
            return super().train(False)

    for own, method in ((BatchNormAct, "forward"), (Frozen, "train")):
        net = nn.Sequential(nn.BatchNorm2d(3), own(3))
        with pytest.raises(ValueError, match=f"'1' is a {own.__name__} with a {method} of its own"):
            convert_syncbn_model(net)
        assert type(net[0]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="without shape"):
        convert_syncbn_model(nn.Sequential(nn.LazyBatchNorm1d()))


def test_group_of_all_needs_no_process_group():
    assert create_syncbn_process_group(0) is None
