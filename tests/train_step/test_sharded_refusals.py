"""What train_step() refuses of a model under fully_shard(), in a sentence: in one process, the other ranks being fake."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import apexfx
from apexfx._torch import fake_process_group
from apexfx.optimizers import FusedLAMB
from tests.own_optimizers import RMSprop

ONE, TWO = (4,), (2, 2)


class Net(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.block, self.head = nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.block(x).relu())


def mesh(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "model")[:len(sizes)])


def shard(model=None, block=None, **options):
    """Return a model under fully_shard; `block` are options of its block alone."""
    model = model or Net()
    options = {"mesh": mesh(4), **options}
    fully_shard(model.block, **{**options, **(block or {})})
    return fully_shard(model, **options)


def changed(function, *args, **options):
    model = shard(**options)
    getattr(model, function)(*args)
    return model


def tensor_parallel():
    both = mesh(2, 2)
    model = Net()
    parallelize_module(model, both["model"], {"block": ColwiseParallel()})
    return shard(model, mesh=both["data"])


def tied_between_groups():
    model = Net()
    model.head = nn.Linear(4, 8)
    model.head.weight = model.block.weight
    return shard(model)


def blocks_alone():
    model = Net()
    fully_shard(model.block, mesh=mesh(4))
    return model


def without_head():
    model = Net()
    return shard(model, ignored_params={model.head.weight})


MODELS = {
    "HSDP": (lambda: shard(mesh=mesh(2, 2)), "two dimensions"),
    "tensor parallel": (tensor_parallel, "tensor parallel"),
    "CPU offload": (lambda: shard(offload_policy=CPUOffloadPolicy(pin_memory=False)), "CPUOffloadPolicy"),
    "unshard_in_backward": (lambda: changed("set_unshard_in_backward", False), "set_unshard_in_backward"),
    "several groups": (lambda: shard(block={"mesh": mesh(2, 2)["data"]}), "several process groups"),
    "another dimension": (lambda: shard(shard_placement_fn=lambda p: Shard(p.dim() - 1)), "dimension 1"),
    "another number of ranks": (lambda: shard(reshard_after_forward=2), "reshard_after_forward=2"),
    "tied between groups": (tied_between_groups, "already managed by another FSDP group"),
    "blocks alone": (blocks_alone, r"fully_shard\(model\), too"),
    "ignored": (without_head, "'head.weight' is trained and not sharded"),
    "divisor": (lambda: changed("set_gradient_divide_factor", 3.0), "set_gradient_divide_factor"),
    "unused": (lambda: changed("set_reduce_scatter_unused_params", True), "set_reduce_scatter_unused_params"),
    "sums": (lambda: changed("set_force_sum_reduction_for_comms", True), "set_force_sum_reduction_for_comms"),
    "hook": (lambda: changed("set_all_reduce_hook", lambda x: None), "FSDP2's own communication"),
    "complex": (lambda: shard(Net(torch.complex64)), "complex"),
}


class Centralized(apexfx.Part):
    """Reads whole gradients."""

    def apply(self, end):
        end.set_gradients([g - g.mean() for g in end.gradients()])


OPTIONS = {
    "ddp": {"ddp": True}, "Centralized": {"parts": [Centralized()]},
    "record_dir": {"safeguard": apexfx.Safeguard(record_dir="bundles")},
    "replica_check_interval": {"safeguard": apexfx.Safeguard(replica_check_interval=2)},
    "fallback": {"fallback": "transform"},
    "cudagraphs": {"inner": "cudagraphs"}, "verify": {"verify": "each"}, "opt_level": {"opt_level": "O3"},
    "gather_shards": {"skip": ("gather_shards",)}, "slices": {"slices": 8},
}
OPTIMIZERS = {"FusedLAMB": lambda model: FusedLAMB(model.parameters()),
              "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
              "RMSprop": lambda model: RMSprop(model.parameters()), "hooks": lambda model: hooked(model)}


def hooked(model):
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def make(model, optimizer=None, **options):
    return apexfx.train_step(model, F.cross_entropy, optimizer or torch.optim.SGD(model.parameters(), lr=0.1),
                             **{"opt_level": "O0", "inner": "eager", **options})


@pytest.mark.parametrize("name", MODELS)
def test_how_a_model_is_sharded_is_refused(name):
    model, message = MODELS[name]
    with fake_process_group(4), pytest.raises(ValueError, match=message):
        make(model())


@pytest.mark.parametrize("name", [*OPTIONS, *OPTIMIZERS])
def test_what_is_not_there_for_sharded_models_is_refused(name):
    with fake_process_group(4):
        model = shard()
        optimizer = OPTIMIZERS[name](model) if name in OPTIMIZERS else None
        with pytest.raises(ValueError, match=rf"apexfx: .*{name}.*fully_shard\(\)"):
            make(model, optimizer, **OPTIONS.get(name, {}))


@pytest.mark.parametrize("kind, option", [("param_dtype", {"opt_level": "O1"}), ("output_dtype", {"opt_level": "O2"}),
                                          ("param_dtype", {"precision": {"head": "half"}})])
def test_what_is_computed_in_is_said_once(kind, option):
    with fake_process_group(4), pytest.raises(ValueError, match="MixedPrecisionPolicy that says in which dtypes to compute, too"):
        make(shard(mp_policy=MixedPrecisionPolicy(**{kind: torch.bfloat16})), **option)


def test_transform_says_that_train_step_does_it():
    with fake_process_group(4), pytest.raises(ValueError, match=r"train_step\(\) on a model under fully_shard"):
        apexfx.transform(shard())


class Writes(Net):
    def forward(self, x):
        with torch.no_grad():
            self.block.weight.mul_(0.9)
        return super().forward(x)


def batch():
    return torch.randn(2, 4), torch.tensor([0, 2])


@pytest.mark.parametrize("late", [True, False])
def test_what_is_sharded_later_or_is_of_the_loss_is_refused(late):
    with fake_process_group(4):
        model = Net() if late else shard()
        teacher = nn.Identity() if late else shard().requires_grad_(False)
        step = apexfx.train_step(model, lambda y, target: F.cross_entropy(y, target) + teacher(y[:, :1].expand(-1, 4)).sum(),
                                 torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", inner="eager")
        if late:
            step(*batch())
            shard(model)
        with pytest.raises(RuntimeError, match=r"is under fully_shard\(\) that was not when the step was made, or is not of"):
            step(*batch())


@pytest.mark.parametrize("sharded", [None, "optimizer"])
def test_a_parameter_that_becomes_a_dtensor_is_refused(sharded):
    with fake_process_group(4):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = apexfx.train_step(model, F.cross_entropy, optimizer, opt_level="O0", inner="eager", ddp=True, shard=sharded)
        step(*batch())
        model.head.weight = nn.Parameter(DTensor.from_local(model.head.weight.detach(), mesh(4), [Shard(0)]))
        optimizer.param_groups[0]["params"][2] = model.head.weight
        with pytest.raises(ValueError, match=r"parameter 'head.weight' is a DTensor"):
            step(*batch())


@pytest.mark.long
def test_what_a_call_does_otherwise_is_refused():
    with fake_process_group(4):
        step = make(shard(Writes()))
        with pytest.raises(ValueError, match=r"writes parameter 'block.weight' in place"):
            step(*batch())
        model = shard()
        step = make(model)
        step(*batch())
        for name, value, before in (("set_requires_gradient_sync", False, True), ("set_unshard_in_backward", False, True),
                                    ("set_gradient_divide_factor", 1.0, None), ("set_all_reduce_hook", print, None)):
            getattr(model, name)(value)
            with pytest.raises(ValueError, match=name if name != "set_all_reduce_hook" else "FSDP2's own communication"):
                step(*batch())
            getattr(model, name)(before)
        step(*batch())
        for check in (lambda: apexfx.check_splits(step, *batch()), lambda: apexfx.check_loop(step, print, [batch()])):
            with pytest.raises(ValueError, match=r"under fully_shard\(\) is run by no rank alone"):
                check()
        step.optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(ValueError, match=r"hooks are registered around its step\), and a step of which each rank updates"):
            step(*batch())
        assert isinstance(model, Net) and type(model.block).__name__ == "FSDPLinear"  # as they were
