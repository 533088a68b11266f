"""Does another torch have the private names that apexfx uses?  python tests/check_torch_names.py WHEEL_OR_FOLDER ...

Reads the sources of a torch wheel (or of a folder that holds an unpacked one) without installing or importing it, so a wheel
for any platform will do: `pip download --no-deps --only-binary=:all: --platform macosx_11_0_arm64 torch==2.11.0`.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

NAMES = [Path(__file__).parent.parent / "apexfx" / name for name in ("_torch.py", "_torch_compilers.py", "_torch_fsdp.py")]
# Set or read as attributes, so no import statement mentions them.
SETTINGS = {
    "torch/_inductor/config.py": ("post_grad_custom_post_pass", "reorder_for_peak_memory"),
    "torch/_inductor/output_code.py": ("_fx_graph_cache_key",),
    "torch/_dynamo/config.py": ("allow_rnn", "allow_unspec_int_on_nn_module", "fail_on_recompile_limit_hit", "recompile_limit"),
    "torch/_functorch/config.py": ("force_non_lazy_backward_lowering",),
    "torch/nn/parallel/distributed.py": ("_active_ddp_module",),
    "torch/nn/modules/module.py": ("_compiled_call_impl",),
    "torch/_functorch/_aot_autograd/utils.py": ("_boxed_call",),
    "torch/_C/__init__.pyi": ("_version",),
    "torch/_dynamo/convert_frame.py": ("_torchdynamo_orig_backend",),
    "torch/distributed/fsdp/_dynamo_utils.py": ("_is_fsdp_managed_module",),
    "torch/distributed/fsdp/_fully_shard/_fully_shard.py": ("_is_fsdp_managed_module", "_orig_cls_mro_index"),
    "torch/distributed/fsdp/_fully_shard/_fsdp_state.py": ("_fsdp_param_groups",),
    "torch/distributed/fsdp/_fully_shard/_fsdp_param.py": ("_orig_size", "fsdp_placement", "is_dtensor", "sharded_param",
                                                            "_module_info"),
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py": ("mesh_info", "mp_policy", "reduce_grads", "unshard_in_backward",
                                                                  "post_forward_mesh_info", "gradient_divide_factor",
                                                                  "reduce_scatter_unused_params",
                                                                  "force_sum_reduction_for_comms"),
}


class Torch:
    """The Python sources of one torch, in a wheel or a folder."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path) if path.is_file() else None
        self._folder = path
        self._names = set(self._archive.namelist()) if self._archive else None

    def has(self, name: str) -> bool:
        return name in self._names if self._names is not None else (self._folder / name).exists()

    def read(self, name: str) -> str:
        return self._archive.read(name).decode() if self._archive else (self._folder / name).read_text()


def imports() -> Iterator[tuple[str, str]]:
    """Yield (module, name) for everything that `apexfx/_torch*.py` import from torch."""
    for node in (node for file in NAMES for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.rpartition(".")[::2] for alias in node.names if alias.name.startswith("torch."))


def missing(torch: Torch) -> list[str]:
    """Return what `torch` lacks, one line each."""
    lines = []
    for module, name in imports():
        folder = module.replace(".", "/")
        # Functions compiled into torch itself are declared in a stub.
        files = ("torch/_C/_VariableFunctions.pyi",) if module == "torch" else (f"{folder}.py", f"{folder}/__init__.py")
        source = next((f for f in files if torch.has(f)), None)
        if torch.has(f"{folder}/{name}.py") or torch.has(f"{folder}/{name}/__init__.py"):
            continue
        if source is None:
            lines.append(f"module {module}")
        elif not re.search(rf"^\s*(def|class)\s+{name}\b|^\s*{name}\b|\bimport\b.*\b{name}\b", torch.read(source), re.M):
            lines.append(f"{module}.{name}")
    for file, names in SETTINGS.items():
        text = torch.read(file) if torch.has(file) else ""
        lines += [f"{file}: {name}" for name in names if not re.search(rf"(?:^\s*|\.){name}\b\s*[:=]", text, re.M)]
    return lines


def main(paths: list[str]) -> int:
    if not paths:
        print(__doc__)
        return 2
    worst = 0
    for path in paths:
        lacking = missing(Torch(Path(path)))
        print(f"{Path(path).name}: " + (f"lacks {', '.join(lacking)}" if lacking else "has every name"))
        worst |= bool(lacking)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
