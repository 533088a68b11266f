"""Bad options are refused before anything is touched, in a sentence that says what was given and what was expected."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re

import pytest
import torch

import apexfx
from apexfx.compiler.rewritten_graph import numeric_options
from apexfx.config import OPT_LEVELS, BucketConfig, TransformConfig
from apexfx.train_step.options import StepOptions


@pytest.mark.parametrize("level", ["01", 1, "o2", None, "O4"])
def test_unknown_opt_level(level):
    with pytest.raises(ValueError, match=r"opt_level=.* expected one of 'O0', 'O1', 'O2', 'O3' \(the letter O"):
        TransformConfig(opt_level=level)


def test_unknown_option_names_the_nearest():
    with pytest.raises(ValueError, match="unknown option 'optlevel'; did you mean 'opt_level'"):
        TransformConfig.from_options({"optlevel": "O1"})
    with pytest.raises(ValueError, match="unknown option 'loss_scale': the graphs hold no loss scaling; use"):
        TransformConfig.from_options({"loss_scale": "dynamic"})


@pytest.mark.parametrize(("key", "hint"), [
    ("fp16", "dtype= names the half type"), ("amp", "opt_level='O1'"), ("keep_batchnorm", "did you mean 'keep_batchnorm_fp32'"),
    ("num_losses", "use torch.amp.GradScaler"), ("master_weights", "are the master weights"),
    ("max_grad_norm", "an option of train_step()"), ("optimizer", "an option of train_step()"), ("mode", "list_mode_options"),
    ("find_unused_parameters", "which graphs do without"), ("bucket_cap_mb", "give ddp=BucketConfig"),
    ("gradient_accumulation_steps", "has no_sync()"), ("channels_last", "memory_format=torch.channels_last"),
    ("cast_model_outputs", "cast what the model returns"), ("cudagraphs", "inner='cudagraphs'"),
    *((key, "max_grad_norm= of train_step() clips") for key in ("clip_grad", "grad_clip", "clip_grad_norm", "max_norm")),
    *((key, "ema=apexfx.EMA(decay) of train_step()") for key in ("model_ema", "ema_decay", "use_ema")),
    *((key, "dtype= names the half type") for key in ("use_amp", "bf16", "mixed_precision")),
    *((key, "accumulate= of train_step()") for key in ("grad_accum", "grad_accumulation", "accumulation_steps")),
    *((key, "call scheduler.step() behind") for key in ("scheduler", "lr_scheduler")),
    ("backend", "as inner='inductor'"), ("label_smoothing", "nn.CrossEntropyLoss(label_smoothing=)"),
])  # fmt: skip
def test_options_of_apex_are_led_to_ours(key, hint):
    with pytest.raises(ValueError, match=f"unknown option '{key}'[:;] .*{re.escape(hint)}.* Known options: opt_level, "):
        TransformConfig.from_options({key: True})


def test_all_options_of_a_step_are_led_to_it():
    own = {f.name for f in dataclasses.fields(StepOptions)} | {*inspect.signature(apexfx.train_step).parameters}
    for key in own - {"config", "model", "options"}:
        with pytest.raises(ValueError, match=f"unknown option '{key}': (an option of train_step|the graphs hold no loss scal)"):
            TransformConfig.from_options({key: True})


@pytest.mark.parametrize(("options", "message"), [
    ({"sync_bn": 1}, "sync_bn=1 .*expected True or False"),
    ({"dtype": torch.float64}, "dtype=torch.float64 .*expected torch.float16, torch.bfloat16, 'float16', 'bfloat16' or None"),
    ({"dtype": "float32"}, "dtype='float32' .*expected torch.float16"),
    ({"ddp": "yes"}, "ddp='yes' .*expected True, False or a BucketConfig"),
    ({"passes": "mine"}, "passes='mine' .*expected a list or tuple"),
    ({"skip": [1]}, "expected names of passes"),
    ({"inner_options": True}, "inner_options=True .*expected a mapping of names to values"),
    ({"inner_options": {"cpp_wrapper": 1}}, r"inner_options\['cpp_wrapper'\]=1 .*expected True or False"),
    ({"inner_options": {"cpp.simdlen": len}}, "expected a number, a text, True, False or None"),
    ({"inner_options": {"cpp.threads": "4"}}, r"\['cpp.threads'\]='4' \(str\) was given, expected a whole number"),
    ({"inner_options": {"cpp.threads": True}}, "expected a whole number"),
    ({"opt_level": "O2", "keep_batchnorm_fp32": 1}, "expected True, False or None"),
    ({"process_group": "0", "sync_bn": True}, "expected a torch.distributed.ProcessGroup"),
    ({"precision": ["x"]}, "expected a mapping"),
    ({"precision": torch.nn.Sequential(torch.nn.ReLU())}, r"precision=Sequential\(\.\.\.\) .*expected a mapping"),
    ({"sync_bn": torch.ones(2, 2)}, r"sync_bn=Tensor\(\.\.\.\) \(Tensor\) .*expected True or False"),
])
def test_wrong_type(options, message):
    with pytest.raises(TypeError, match=message):
        TransformConfig.from_options(options)


@pytest.mark.parametrize(("options", "message"), [
    ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True needs opt_level O2 or O3"),
    ({"opt_level": "O0", "dtype": "bfloat16"}, "dtype=torch.bfloat16 .*opt_level='O0', which casts nothing to it; 'O1'"),
    ({"ddp": True}, "init_process_group"),
    ({"inner": "tvm"}, "inner='tvm' was given, expected one of 'inductor'"),
    ({"verify": True}, "verify=True was given"),
    ({"inner_options": {"cpp_wraper": True}}, "'cpp_wraper', which is no option of Inductor's.*; did you mean 'cpp_wrapper'"),
    ({"inner_options": {"post_grad_custom_post_pass": None}}, "give passes="),
    ({"inner_options": {"triton.cudagraphs": True}}, "give inner='cudagraphs'"),
    ({"inner_options": {"use_post_grad_passes": False}}, "give skip=, .* those of backward and step run there"),
    ({"inner_options": {"cpp_wrapper": True}, "inner": "cudagraphs"}, "records no CUDA graphs of C\\+\\+"),
    ({"inner_options": {"cpp_wrapper": True}, "inner": "eager"}, "with inner='eager', and they are Inductor's"),
])
def test_impossible_combination(options, message):
    with pytest.raises(ValueError, match=message):
        TransformConfig.from_options(options)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"message_size": 0}, TypeError, "positive number of elements"),
    ({"allreduce_trigger_params": []}, TypeError, "unknown option 'allreduce_trigger_params'; did you mean 'trigger_params'"),
    ({"num_allreduce_streams": 2}, TypeError, "an argument of DistributedDataParallel, .* leave it out"),
    ({"layout": "zigzag"}, ValueError, "layout='zigzag'"),
    ({"gradient_predivide_factor": -1.0}, TypeError, "positive number"),
    ({"delay_allreduce": True, "trigger_params": ("a",)}, ValueError, "give one of them"),
    *[({"layout": "ddp", **option}, ValueError, f"where torch DDP does, at bucket_cap_mb; {next(iter(option))} needs")
      for option in ({"delay_allreduce": True}, {"trigger_params": ("a",)}, {"message_size": 5})],
    ({"bucket_cap_mb": 1.0}, ValueError, "give message_size, a number of elements, or that layout too"),
    ({"comm_dtype": torch.int32}, TypeError, "floating torch.dtype"),
    ({"comm_dtype": torch.bfloat16, "allreduce_always_fp32": True}, ValueError, "contradicts"),
    ({"timeout_s": True}, TypeError, "timeout_s=True"),
    ({"trigger_params": "head.weight"}, TypeError, "list or tuple of names"),
    *[({"plan": "plan.json", name: value}, ValueError, f"is replayed as it is, and decides about {name} too; leave it out")
      for name, value in (("message_size", 5), ("layout", "ddp"), ("bucket_cap_mb", 1.0), ("delay_allreduce", True),
                          ("trigger_params", ("a",)), ("allreduce_always_fp32", True), ("gradient_average", False),
                          ("gradient_predivide_factor", 2.0), ("comm_dtype", torch.float32))],
    ({"plan": "plan.json", "layout": "ddp", "message_size": 5}, ValueError, "about message_size, layout too; leave them out"),
])
def test_bucket_options(options, error, message):
    with pytest.raises(error, match=message):
        BucketConfig(**options)
    BucketConfig(plan="plan.json", timeout_s=5.0)


def test_keep_batchnorm_fp32_overrides_the_level():
    assert TransformConfig(opt_level="O2").level is OPT_LEVELS["O2"]
    assert not TransformConfig(opt_level="O2", keep_batchnorm_fp32=False).level.keep_batchnorm_fp32
    assert TransformConfig(opt_level="O3", keep_batchnorm_fp32=True).level.keep_batchnorm_fp32


def test_half_dtype_follows_the_device():
    assert TransformConfig().half_dtype([torch.device("cpu"), torch.device("cuda")]) == torch.float16
    assert TransformConfig().half_dtype([torch.device("cpu")]) == torch.bfloat16
    for given in (torch.float16, "float16"):
        assert TransformConfig(dtype=given).half_dtype([torch.device("cpu")]) == torch.float16


def test_pickles():
    config = TransformConfig(opt_level="O2", precision={"head": "float32"})
    assert pickle.loads(pickle.dumps(config)).describe() == config.describe()


def test_ranks_compare_what_inductor_is_given():
    rounds = {"emulate_precision_casts": True}
    assert numeric_options(TransformConfig(inner_options=rounds))["inner_options"] == rounds
