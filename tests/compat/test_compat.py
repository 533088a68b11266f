"""`import apex` means this package; what is not provided says what to use; NVIDIA's own package wins."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import apexfx.compat
from apexfx.compat.__main__ import main
from apexfx.compat.names import ALTERNATIVES

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def python(monkeypatch, capsys):
    """Run code with Apex's names untaken, in this interpreter; return its output."""

    def forget():
        apexfx.compat.uninstall()
        for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C", "apex_C")]:
            del sys.modules[name]
        importlib.invalidate_caches()

    def run(code, *, path=()):
        forget()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [*map(str, path), *sys.path])
            try:
                exec(compile(textwrap.dedent(code), "<script>", "exec"), {"__name__": "script"})
            finally:
                forget()
        return capsys.readouterr().out

    return run


def test_spellings_that_scripts_use_name_the_same_objects(python):
    python("""
        import apexfx.compat
        assert apexfx.compat.install() == "installed" == apexfx.compat.install()
        import apex
        from apex import amp
        import apexfx.amp, apexfx.parallel
        assert amp is apexfx.amp is apex.amp
        from apex.amp import _amp_state
        from apex.amp._amp_state import _amp_state as state
        assert _amp_state is state and _amp_state.hard_override is False
        import apex.amp._amp_state
        assert apexfx.amp._amp_state is state
        from apex.parallel import DistributedDataParallel as DDP, SyncBatchNorm
        from apex.parallel.LARC import LARC
        import apex.parallel.LARC
        assert isinstance(apexfx.parallel.LARC, type) or apexfx.parallel.LARC.LARC is LARC
        assert apex.parallel.DistributedDataParallel is DDP
        from apex.parallel.distributed import DistributedDataParallel
        assert DistributedDataParallel is DDP
        from apex.parallel.sync_batchnorm import SyncBatchNorm as SBN
        assert SBN is SyncBatchNorm
        from apex.optimizers import FusedAdam
        from apex.optimizers.fused_adam import FusedAdam as FA
        assert FA is FusedAdam
        from apex.multi_tensor_apply import multi_tensor_applier
        assert multi_tensor_applier.available
        from apex.fp16_utils import *
        FP16_Optimizer, network_to_half, DynamicLossScaler
        assert "amp" in apex.__all__
    """)


# Every public module of Apex -> what scripts import from it.
PUBLIC = {
    "apex": "amp fp16_utils multi_tensor_apply normalization optimizers parallel DeprecatedFeatureWarning",
    "apex.amp": """initialize scale_loss state_dict load_state_dict master_params half_function float_function
        promote_function register_half_function register_float_function register_promote_function disable_casts
        init _amp_state""",
    "apex.amp.amp": """init half_function float_function promote_function register_half_function register_float_function
        register_promote_function""",
    "apex.amp.frontend": "initialize state_dict load_state_dict Properties opt_levels O0 O1 O2 O3",
    "apex.amp.handle": "scale_loss disable_casts AmpHandle NoOpHandle",
    "apex.amp.opt": "OptimWrapper",
    "apex.amp.scaler": "LossScaler",
    "apex.amp.lists": "functional_overrides tensor_overrides torch_overrides",
    "apex.amp._amp_state": "_amp_state AmpState maybe_print warn_or_err master_params",
    "apex.parallel": """DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model create_syncbn_process_group
        ReduceOp LARC""",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.multiproc": "main",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.distributed": """DistributedDataParallel Reducer flatten unflatten apply_flat_dist_call
        flat_dist_call split_half_float_double split_by_type extract_tensors""",
    "apex.optimizers": "FusedSGD FusedAdam FusedNovoGrad FusedLAMB FusedAdagrad FusedMixedPrecisionLamb FP16_Optimizer",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": """FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm
        fused_layer_norm fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine
        mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine manual_rms_norm
        FusedLayerNormAffineFunction FusedLayerNormFunction FusedRMSNormAffineFunction FusedRMSNormFunction""",
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "apex.fp16_utils": """BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads FP16Model
        convert_module convert_network master_params_to_model_params tofp16 to_python_float clip_grad_norm
        FP16_Optimizer LossScaler DynamicLossScaler""",
    "apex.fp16_utils.fp16util": "tofp16 network_to_half prep_param_lists",
    "apex.fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "apex.contrib.clip_grad": "clip_grad_norm_",
    "apex_C": "flatten unflatten",
    "amp_C": """multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp
        multi_tensor_l2norm_scale multi_tensor_unscale_l2norm multi_tensor_sgd multi_tensor_adam
        multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_adagrad
        multi_tensor_novograd multi_tensor_lamb multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda
        multi_tensor_lamb_stage2_cuda update_scale_hysteresis""",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_of_apex_can_be_imported(python, module):
    names = ", ".join(PUBLIC[module].split())
    python(f"import apexfx.compat; apexfx.compat.install()\nfrom {module} import {names}")


# What is not there -> part of what the error says to use.
MISSING = {
    "import apex.RNN": "torch.nn.LSTM", "from apex import RNN": "torch.nn.LSTM",
    "import apex; apex.RNN": "torch.nn.LSTM", "from apex.RNN import LSTM": "torch.nn.LSTM",
    "from apex.mlp import MLP": "torch.nn.Sequential", "import apex; apex.mlp.MLP": "torch.nn.Sequential",
    "from apex.fused_dense import FusedDense": "torch.nn.Linear",
    "from apex.contrib.xentropy import SoftmaxCrossEntropyLoss": "label_smoothing",
    "from apex.contrib import xentropy": "label_smoothing",
    "import apex.contrib; apex.contrib.xentropy": "label_smoothing",
    "import apex.contrib.optimizers.distributed_fused_adam": "ZeroRedundancyOptimizer",
    "from apex.contrib.multihead_attn import SelfMultiheadAttn": "scaled_dot_product_attention",
    "from apex.contrib.layer_norm import FastLayerNorm": "FusedLayerNorm",
    "import apex.contrib.nothing": "torch.compile",
    "from apex.transformer import parallel_state": "torch.distributed.tensor.parallel",
    "from apex import pyprof": "torch.profiler", "from apex.amp import wrap": "register_half_function",
    "import apex.amp.wrap": "register_half_function", "from apex.amp.utils import cached_cast": "half_function",
    "from apex.amp.rnn_compat import has_old_rnns": "torch.nn.LSTM",
    "from apex.amp.compat import filter_attrs": "torch.is_tensor",
    "from apex.amp._initialize import check_params_fp32": "apex.amp.initialize",
    "from apex.amp._process_optimizer import AmpOptimizerState": "_amp_stash",
    "from apex.parallel import sync_batchnorm_kernel": "SyncBatchNorm", "import syncbn": "SyncBatchNorm",
    "import fused_layer_norm_cuda": "FusedLayerNorm", "import fused_adam_cuda": "FusedAdam",
    "import mlp_cuda": "torch.nn.Sequential", "import fused_dense_cuda": "torch.nn.Linear",
    "import apex.nothing": "NVIDIA's own package", "import amp_C; amp_C.multi_tensor_nothing": "apex.optimizers",
}  # fmt: skip


@pytest.mark.parametrize("statement", MISSING)
def test_what_is_not_provided_names_the_alternative(python, statement):
    python("import apexfx.compat; apexfx.compat.install()")
    with pytest.raises((ImportError, AttributeError), match=f"provides no .*use .*{re.escape(MISSING[statement])}"):
        python(f"import apexfx.compat; apexfx.compat.install()\n{statement}")


def test_nothing_of_this_package_is_called_missing():
    ours = [name.replace("apex", "apexfx", 1) for name in ALTERNATIVES if name.startswith("apex.")]
    parents = {name for name in ours if importlib.util.find_spec(name.rpartition(".")[0])}
    assert not [name for name in parents if importlib.util.find_spec(name)]


def test_an_extension_that_was_built_by_itself_is_found(python, tmp_path):
    (tmp_path / "fused_layer_norm_cuda.py").write_text("theirs = True")
    python("""
        import apexfx.compat
        apexfx.compat.install()
        import fused_layer_norm_cuda
        assert fused_layer_norm_cuda.theirs
    """, path=[tmp_path])
    sys.modules.pop("fused_layer_norm_cuda", None)


def package(folder, *modules):
    for module in modules:
        (folder / "apex" / module).mkdir(parents=True)
        (folder / "apex" / module / "__init__.py").write_text("theirs = True")
    (folder / "apex" / "__init__.py").write_text("theirs = True")


def test_nvidias_package_with_amp_is_left_alone(python, tmp_path):
    package(tmp_path, "amp", "optimizers", "normalization")
    python("""
        import apexfx.compat
        assert apexfx.compat.install() == "nvidia"
        import apex
        from apex import amp
        assert apex.theirs and amp.theirs
    """, path=[tmp_path])


def test_what_nvidia_removed_is_added_to_the_rest(python, tmp_path):
    package(tmp_path, "optimizers", "normalization")
    python("""
        import apex
        import apexfx.compat
        assert apexfx.compat.install() == "added"
        from apex import amp, optimizers
        from apex.parallel import convert_syncbn_model
        import apexfx.amp, apex.fp16_utils
        assert apex.theirs and optimizers.theirs and amp is apexfx.amp
        from apex.amp import _amp_state
        assert _amp_state.verbosity == 1
    """, path=[tmp_path])


def test_the_unrelated_package_of_that_name_is_replaced(python, tmp_path):
    package(tmp_path, "models")
    python("""
        import apexfx.compat
        assert apexfx.compat.install() == "installed"
        from apex import amp
        amp.initialize
    """, path=[tmp_path])
    python("""
        import apex, apexfx.compat
        try:
            apexfx.compat.install()
        except RuntimeError as error:
            assert "before `import apex`" in str(error)
        else:
            raise SystemExit("no error")
    """, path=[tmp_path])


def test_uninstall_takes_the_names_back(python):
    python("""
        import sys, apexfx.compat
        apexfx.compat.install()
        import apex.amp, amp_C
        apexfx.compat.uninstall()
        assert not [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]
        try:
            import apex
        except ImportError:
            pass
        else:
            raise SystemExit("still there")
    """)


def run_script(*arguments, timeout=150):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "apexfx.compat", *map(str, arguments)], capture_output=True, text=True,
                          env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_unmodified_classifier_script(level):
    keep = "True" if level == "O2" else "None"
    out = run_script(SCRIPTS / "classifier.py", "--opt-level", level, "--keep-batchnorm-fp32", keep)
    assert float(out.splitlines()[-1].split()[-1]) > 0.8


@pytest.mark.long
def test_an_unmodified_finetuning_script(tmp_path):
    out = run_script(SCRIPTS / "finetune.py", "--fp16", "--output", tmp_path / "checkpoint.pt")
    assert "resumed at the same loss" in out


@pytest.mark.long
def test_an_unmodified_distributed_script():
    out = run_script(SCRIPTS / "distributed.py", "--world-size", 2)
    assert "ranks agree" in out


def test_the_command_line_explains_itself(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m apexfx.compat") and "Run a script written for NVIDIA Apex, unchanged" in said
    assert all(f"\n  {word} " in said for word in ("SCRIPT", "-m MODULE", "ARGS"))
    for arguments in ([], ["-m"]):
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("usage") and captured.out == ""
    assert main(["nofile.py"]) == 2 and "can't open 'nofile.py'" in capsys.readouterr().err
