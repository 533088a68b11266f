"""`import apex` means this package; what is not provided says what to use; NVIDIA's own package wins."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import apexfx.compat
from apexfx.compat.__main__ import main

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


def test_every_spelling_that_scripts_use(python):
    python("""
        import apexfx.compat
        assert apexfx.compat.install() == "installed" == apexfx.compat.install()
        import apex
        from apex import amp
        import apexfx.amp, apexfx.parallel
        assert amp is apexfx.amp is apex.amp
        from apex.amp import _amp_state
        from apex.amp._amp_state import _amp_state as state, maybe_print, master_params, warn_or_err
        assert _amp_state is state and _amp_state.hard_override is False
        import apex.amp._amp_state
        assert apexfx.amp._amp_state is state
        from apex.amp.scaler import LossScaler
        from apex.amp.frontend import O0, O1, O2, O3, Properties, opt_levels
        from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
        from apex.parallel import DistributedDataParallel as DDP, Reducer, SyncBatchNorm, convert_syncbn_model
        from apex.parallel import create_syncbn_process_group
        from apex.parallel.LARC import LARC
        import apex.parallel.LARC
        assert isinstance(apexfx.parallel.LARC, type) or apexfx.parallel.LARC.LARC is LARC
        assert apex.parallel.DistributedDataParallel is DDP
        from apex.parallel.distributed import DistributedDataParallel
        assert DistributedDataParallel is DDP
        from apex.parallel.sync_batchnorm import SyncBatchNorm as SBN
        assert SBN is SyncBatchNorm
        from apex.optimizers import FusedAdam, FusedSGD, FusedLAMB, FusedNovoGrad, FusedAdagrad, FusedMixedPrecisionLamb
        from apex.optimizers.fused_adam import FusedAdam as FA
        assert FA is FusedAdam
        from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm
        from apex.normalization.fused_layer_norm import FusedLayerNorm as FLN
        from apex.multi_tensor_apply import multi_tensor_applier, MultiTensorApply
        assert multi_tensor_applier.available
        from apex.fp16_utils import *
        FP16_Optimizer, network_to_half, DynamicLossScaler
        from apex.fp16_utils.fp16_optimizer import FP16_Optimizer as FO
        from apex.fp16_utils.loss_scaler import LossScaler as LS
        from apex.contrib.clip_grad import clip_grad_norm_
        import amp_C, apex_C
        amp_C.multi_tensor_scale, apex_C.flatten
        assert "amp" in apex.__all__
    """)


def test_what_is_not_provided_names_the_alternative(python):
    out = python("""
        import apexfx.compat
        apexfx.compat.install()
        for name in ("apex.RNN", "apex.mlp", "apex.contrib.xentropy", "apex.contrib.sparsity", "syncbn", "apex.amp.nothing",
                     "fused_layer_norm_cuda"):
            try:
                __import__(name)
            except ImportError as error:
                print(error)
        import amp_C
        try:
            amp_C.multi_tensor_novograd
        except AttributeError as error:
            print(error)
    """).splitlines()
    assert "torch.nn.LSTM" in out[0] and "torch.nn.Sequential" in out[1] and "label_smoothing" in out[2]
    assert "torch.compile" in out[3] and "SyncBatchNorm" in out[4] and "'apex.amp.nothing'" in out[5]
    assert "FusedLayerNorm" in out[6] and "apex.optimizers" in out[7]
    assert len(out) == 8


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


@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.long)])
def test_an_unmodified_classifier_script(level):
    out = run_script(SCRIPTS / "classifier.py", "--opt-level", level, "--keep-batchnorm-fp32", *(["True"] if level == "O2" else ["None"]))
    assert float(out.splitlines()[-1].split()[-1]) > 0.8


def test_an_unmodified_finetuning_script(tmp_path):
    out = run_script(SCRIPTS / "finetune.py", "--fp16", "--output", tmp_path / "checkpoint.pt")
    assert "resumed at the same loss" in out


def test_an_unmodified_distributed_script():
    out = run_script(SCRIPTS / "distributed.py", "--world-size", 2)
    assert "ranks agree" in out


def test_the_command_line_explains_itself(capsys):
    assert main(["--help"]) == 0 and "usage: python -m apexfx.compat" in capsys.readouterr().out
    assert main([]) == 2 and "usage" in capsys.readouterr().err
    assert main(["nofile.py"]) == 2 and "can't open 'nofile.py'" in capsys.readouterr().err
