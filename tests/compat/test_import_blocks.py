"""How public projects import Apex, bare, guarded and by extension name: what resolves, falls back, or raises."""

from __future__ import annotations

import textwrap

import pytest

# Project -> the shape of its imports, and an expression that holds after them, or part of the error that they raise.
BLOCKS = {
    "DeepSpeed": ("""
        try:
            import apex
            from apex import amp
            APEX_INSTALLED = True
        except ImportError:
            APEX_INSTALLED = False
        from apex.multi_tensor_apply import multi_tensor_applier
        import amp_C
        """, "APEX_INSTALLED and multi_tensor_applier.available and amp_C.multi_tensor_l2norm"),
    "Megatron-LM, norms": ("""
        try:
            import apex
            HAVE_APEX = True
        except ImportError:
            HAVE_APEX = False
        try:
            from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
            HAVE_PERSIST_LAYER_NORM = True
        except ImportError:
            HAVE_PERSIST_LAYER_NORM = False
        try:
            from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, FusedRMSNormAffineFunction
            HAVE_FUSED_LAYER_NORM = True
        except ImportError:
            HAVE_FUSED_LAYER_NORM = False
        """, "HAVE_APEX and HAVE_PERSIST_LAYER_NORM and HAVE_FUSED_LAYER_NORM"),
    "gpt-neox": ("""
        import importlib
        from apex.normalization import FusedLayerNorm as LayerNorm
        fused_layer_norm_cuda = importlib.import_module("fused_layer_norm_cuda")
        """, "fused_layer_norm_cuda.forward_affine and LayerNorm(4)"),
    "transformers": ("""
        import importlib.util
        def is_apex_available():
            return importlib.util.find_spec("apex") is not None
        try:
            from apex.normalization import FusedRMSNorm
            T5LayerNorm = FusedRMSNorm
        except ImportError:
            T5LayerNorm = None
        """, "is_apex_available() and T5LayerNorm(4)"),
    "fairseq": ("""
        import importlib
        try:
            from apex.optimizers import FusedAdam as _FusedAdam
            from apex.multi_tensor_apply import multi_tensor_applier
        except ImportError:
            _FusedAdam = None
        try:
            importlib.import_module("fused_adam_cuda")
            has_v1 = True
        except ImportError:
            has_v1 = False
        """, "_FusedAdam and not has_v1"),
    "MLPerf RNN-T": ("""
        from apex.mlp import MLP
        from apex.contrib.transducer import TransducerJoint
        """, "use torchaudio.functional.rnnt_loss"),
    "Apex's own tests": ("""
        try:
            import bnp
            from apex.contrib.groupbn.batch_norm import BatchNorm2d_NHWC
            SKIP_TEST = None
        except ImportError as e:
            SKIP_TEST = e
        """, "'torch.nn.BatchNorm2d' in str(SKIP_TEST)"),
}  # fmt: skip


@pytest.mark.parametrize("project", BLOCKS)
def test_what_a_projects_imports_do(python, project):
    block, result = BLOCKS[project]
    code = f"import apexfx.compat\napexfx.compat.install()\n{textwrap.dedent(block)}"
    if result.startswith("use "):
        with pytest.raises(ModuleNotFoundError, match=result):
            python(code)
    else:
        python(f"{code}\nassert {result}")


SWITCHES = ("HAVE_PERSIST_LAYER_NORM", "HAVE_FUSED_LAYER_NORM", "T5LayerNorm", "_FusedAdam", "has_v1")
GUARDED = [project for project, (block, result) in BLOCKS.items() if "except" in block and "raise" not in block]


@pytest.mark.parametrize("project", [project for project in GUARDED if project != "DeepSpeed"])
def test_a_part_switches_no_project_into_what_it_leaves_out(python, project):
    """With amp alone every guard says no, but for those that ask for no more than `import apex`."""
    block, _ = BLOCKS[project]
    python(f"""
import apexfx.compat
apexfx.compat.install(only=("apex.amp",))
{textwrap.dedent(block)}
found = [name for name in {SWITCHES} if globals().get(name)]
assert not found, found
""")
