"""`import apex` means this package; what is not provided says what to use; NVIDIA's own package wins."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import apexfx.compat
from apexfx.compat.__main__ import main
from apexfx.compat.names import ALTERNATIVES, PUBLIC

SCRIPTS = Path(__file__).parent / "scripts"


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
        assert "amp" in apex.__all__ and not hasattr(apex, "RNN")
        assert apex.mlp.MLP and apex.contrib.xentropy.SoftmaxCrossEntropyLoss
    """)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_of_apex_can_be_imported(python, module):
    names = ", ".join(PUBLIC[module].split())
    python(f"import apexfx.compat; apexfx.compat.install()\nfrom {module} import {names}")


# What is not there -> part of what the error says to use.
MISSING = {
    "import apex.RNN": "torch.nn.LSTM", "from apex import RNN": "torch.nn.LSTM",
    "import apex; apex.RNN": "torch.nn.LSTM", "from apex.RNN import LSTM": "torch.nn.LSTM",
    "from apex.contrib.bottleneck import Bottleneck": "apexfx.transform",
    "from apex.contrib import sparsity": "to_sparse_semi_structured",
    "import apex.contrib; apex.contrib.focal_loss": "sigmoid_focal_loss",
    "import apex; apex.transformer": "Megatron Core",
    "import apex.contrib.optimizers.distributed_fused_adam": "shard='optimizer') with FusedAdam",
    "from apex.contrib.optimizers import DistributedFusedLAMB": "FusedLAMB in that of DistributedFusedLAMB",
    "from apex.contrib.multihead_attn import SelfMultiheadAttn": "scaled_dot_product_attention",
    "import apex.contrib.nothing": "torch.compile",
    "from apex.transformer import parallel_state": "device_mesh",
    "from apex import pyprof": "torch.profiler", "from apex.amp import wrap": "register_half_function",
    "import apex.amp.wrap": "register_half_function", "from apex.amp.utils import cached_cast": "half_function",
    "from apex.amp.rnn_compat import has_old_rnns": "torch.nn.LSTM",
    "from apex.amp.compat import filter_attrs": "torch.is_tensor",
    "from apex.amp._initialize import check_params_fp32": "apex.amp.initialize",
    "from apex.amp._process_optimizer import AmpOptimizerState": "_amp_stash",
    "from apex.parallel import sync_batchnorm_kernel": "SyncBatchNorm", "import fused_adam_cuda": "FusedAdam",
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


def test_what_is_not_provided_is_none_to_those_who_ask(python):
    python("""
        import importlib.util, apexfx.compat
        apexfx.compat.install()
        find_spec = importlib.util.find_spec
        assert find_spec("apex") and find_spec("apex.mlp") and find_spec("apex.contrib.group_norm") and find_spec("amp_C")
        assert find_spec("apex.RNN") is find_spec("apex.contrib.sparsity") is find_spec("fused_adam_cuda") is None
    """)


@pytest.mark.parametrize("extension", ["fused_layer_norm_cuda", "fused_adam_cuda"])
def test_an_extension_that_was_built_by_itself_is_found(python, tmp_path, extension):
    (tmp_path / f"{extension}.py").write_text("theirs = True")
    python(f"""
        import apexfx.compat
        apexfx.compat.install()
        import {extension}
        assert {extension}.theirs
    """, path=[tmp_path])
    sys.modules.pop(extension, None)


def test_only_what_is_named_is_there(python, tmp_path):
    python("""
        import apexfx.compat
        assert apexfx.compat.install(only=("apex.amp", "apex.contrib.xentropy", "amp_C")) == "installed"
        import amp_C, apex
        from apex import amp
        from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
        assert apex.__all__ == ["amp"] and not hasattr(apex, "optimizers")
        for name in ("apex.optimizers", "apex.contrib.group_norm", "apex.parallel.LARC"):
            try:
                __import__(name)
            except ImportError as error:
                assert f"leaves out {name!r}" in str(error) or "apex.parallel" in str(error), error
            else:
                raise SystemExit(name)
        try:
            import mlp_cuda
        except ModuleNotFoundError as error:
            assert str(error) == "No module named 'mlp_cuda'"
    """)
    python("""
        import apexfx.compat
        apexfx.compat.install(only=["amp_C"])
        try:
            import apex
        except ModuleNotFoundError:
            import amp_C
        else:
            raise SystemExit("apex is there")
    """)
    with pytest.raises(ValueError, match="only= has .'apex.RNN'."):
        apexfx.compat.install(only=("apex.RNN", "apex.amp"))
    package(tmp_path, "optimizers", "normalization", "mlp")
    python("""
        import apexfx.compat
        assert apexfx.compat.install(only=("apex.mlp",)) == "nvidia"  # which is its own there
        assert apexfx.compat.install(only=("apex.amp", "apex.mlp")) == "added"
        import apex.mlp, apex.amp
        assert apex.mlp.theirs and apex.amp.initialize
    """, path=[tmp_path])
    python("""
        import apexfx.compat
        assert apexfx.compat.install(only=("apex.mlp",), force=True) == "installed"
        from apex.mlp import MLP
    """, path=[tmp_path])


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
def test_an_unmodified_finetuning_script(tmp_path):
    out = run_script(SCRIPTS / "finetune.py", "--fp16", "--output", tmp_path / "checkpoint.pt")
    assert "resumed at the same loss" in out


@pytest.mark.long
def test_an_unmodified_distributed_script():
    out = run_script(SCRIPTS / "distributed.py", "--world-size", 2)
    assert "ranks agree" in out


@pytest.mark.long
@pytest.mark.parametrize("installed", [(), ("amp", "optimizers")], ids=["none", "nvidia"])
def test_a_process_that_a_script_starts_has_the_names(tmp_path, monkeypatch, installed):
    if installed:
        package(tmp_path, *installed)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    child = "import apex; print(apex.theirs)" if installed else "import syncbn; from apex.mlp import MLP; print(syncbn.reduce_bn)"
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)")
    assert "True" in run_script(script) if installed else "reduce_bn" in run_script(script)


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
