"""What docs/compatibility.md says goes together, does; what it says is refused, is, and says what to do.

Copies, exports and torch.func are in test_transform_copies.py and compiler/test_refusals.py, hooks and second derivatives in
test_transform.py, activation checkpoints in world/, FSDP and torch's DDP in distributed/test_refusals.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, update_bn

import apexfx

INPUTS, LABELS = torch.randn(4, 8), torch.tensor([0, 1, 1, 0])


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))


def transformed(source=None, **options):
    return apexfx.transform(source or network(), inner="eager", **options)


def backward(model):
    F.cross_entropy(model(INPUTS), LABELS).backward()
    return [p.grad for p in model.parameters()]


def test_an_average_of_the_weights_runs():
    model = transformed()
    average = AveragedModel(model)
    backward(model)
    average.update_parameters(model)
    assert average(INPUTS).shape == (4, 2)
    update_bn([INPUTS], average)


def test_the_source_is_averaged():
    source = network()
    model = transformed(source)
    backward(model)
    AveragedModel(source).update_parameters(source)


@pytest.mark.parametrize("around", [
    DataParallel,  # without devices it calls the model
    lambda model: model.compile() or model,
], ids=["DataParallel", "compile"])  # fmt: skip
def test_a_wrapper_around_changes_nothing(around):
    model = transformed()
    wrapped = around(model)
    backward(wrapped)
    assert len(model.report.graphs) == 1


def test_autocast_around_is_for_o0():
    with torch.autocast("cpu", torch.bfloat16):
        backward(transformed(opt_level="O0"))
        with pytest.raises(ValueError, match="every op would be cast twice"):
            backward(transformed())


def with_weight_norm():
    source = network()
    parametrizations.weight_norm(source[0])
    return source


def pruned():
    source = network()
    prune.l1_unstructured(source[0], "weight", 0.5)
    return source


def with_hook():
    source = network()
    source[1].register_forward_hook(lambda module, args, output: output * 2)
    return source


@pytest.mark.parametrize("source", [with_weight_norm, pruned, with_hook])
def test_what_is_inside_is_captured(source):
    source = source()
    expected = source(INPUTS)
    model = transformed(source, opt_level="O0", fullgraph=True)
    assert torch.equal(model(INPUTS), expected)
    backward(model)


def test_hooks_on_parameters_run():
    seen = []
    model = transformed()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    backward(model)
    assert seen == [True]


def test_a_hessian_is_of_the_source_alone():
    source = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    hessian = torch.autograd.functional.hessian
    hessians = [hessian(lambda x: model(x).sum(), INPUTS[:1]) for model in (source, transformed(source))]
    assert [bool(each.any()) for each in hessians] == [True, False]


def test_lbfgs_inference_mode_and_anomaly_detection():
    model = transformed()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(INPUTS), LABELS)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.inference_mode():
        model(INPUTS)
    with torch.autograd.set_detect_anomaly(True):
        backward(model)


@pytest.mark.long
def test_save_pretrained_writes_the_source(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    source = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=100, n_positions=64))
    transformed(source).save_pretrained(tmp_path)
    assert type(GPT2LMHeadModel.from_pretrained(tmp_path)) is GPT2LMHeadModel


def test_a_loop_that_casts_too_is_refused():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(transformed())
    accelerate.state.AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="every op would be cast twice"):
        prepared(INPUTS)
