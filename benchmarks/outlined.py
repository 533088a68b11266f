"""Time a training step whose equal layers are outlined against the same step without that, and compare the memory.

    python benchmarks/outlined.py [--models gpt llama bert vit resnet50 moe] [--rounds 20] [--json results/outlined.json]

Steps of AdamW that clip gradients, by Inductor, on one thread. Both update in turn, by the time of the processor. Columns:
milliseconds without and with the pass, medians; without / with (above 1 is faster), the median with its quartiles; the peak of
the resident set over three steps, each in a process of its own and less what it held before, with / without; what was outlined,
where anything was.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import first_call
import harness
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import apexfx
from apexfx.tools.simulate.models import resnet50

WITHOUT, WITH = "without", "with"


class Experts(nn.Module):
    """A layer of experts, of which each token has the two that a gate gives most."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, num)
        self.up = nn.Parameter(torch.randn(num, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = self.gate(h)
        gates = scores.masked_fill(scores < scores.topk(2, dim=-1).values[..., 1:], float("-inf")).softmax(-1)
        return x + torch.einsum("nted,nte->ntd", F.silu(h.unsqueeze(1) @ self.up.unsqueeze(0)).matmul(self.down).transpose(1, 2),
                                gates)


def gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return first_call.Gpt(12, 128), (torch.randint(256, (8, 64)),)


def llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=12,
                                        num_attention_heads=4, num_key_value_heads=2)), (torch.randint(256, (4, 64)),)


def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
                                      num_attention_heads=4)), (torch.randint(256, (4, 64)),)


def vit() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, hidden_size=128, intermediate_size=512,
                                               num_hidden_layers=12, num_attention_heads=4, num_labels=10)), (
        torch.randn(8, 3, 64, 64),)


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return resnet50(), (torch.randn(4, 3, 64, 64),)


def moe() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [layer for _ in range(6) for layer in (first_call.Block(128), Experts(128, 8))]
    return nn.Sequential(nn.Embedding(256, 128), *layers, nn.Linear(128, 256)), (torch.randint(256, (4, 64)),)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "resnet50": resnet, "moe": moe}


def objective(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return getattr(out, "logits", out).float().square().mean()


def step_of(model: nn.Module, variant: str) -> apexfx.TrainStep:
    return apexfx.train_step(model, objective=objective, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), opt_level="O0",
                             max_grad_norm=1.0, skip=("outline_layers",) if variant == WITHOUT else ())


def peak(name: str, variant: str) -> int:
    """Return the bytes that three steps take at most, in a process of its own; what they compile is in the cache."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    step, before = step_of(model, variant), harness.resident("VmRSS")
    step(*batch)
    with open("/proc/self/clear_refs", "w") as file:  # the peak begins anew behind the first call
        file.write("5")
    for _ in range(3):
        step(*batch)
    return harness.resident("VmHWM") - before


def measure(name: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    steps = {variant: step_of(copy.deepcopy(model), variant) for variant in (WITHOUT, WITH)}
    for step in [*steps.values()] * 2:
        step(*batch)
    [stage] = [stage for graph in steps[WITH].report.graphs for stage in graph.stages if stage.stage == "step"]
    outlined = [match.detail for each in stage.passes if each.name == "outline_layers" for match in each.matches]
    times = harness.interleave({variant: lambda step=step: step(*batch) for variant, step in steps.items()}, rounds=rounds,
                               clock=time.process_time)
    peaks = {variant: harness.in_new_process(peak, name, variant) for variant in steps} if outlined else {}
    low, ratio, high = harness.ratios(times[WITHOUT], times[WITH])
    return {"model": name, **{variant: 1e3 * statistics.median(each) for variant, each in times.items()}, "ratio": ratio,
            "quartiles": [low, high], "memory": peaks[WITH] / peaks[WITHOUT] if peaks else None, "outlined": outlined}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        rows.append(row := harness.in_new_process(measure, name, options.rounds))
        print(name, row, flush=True)
    print(tabulate([(row["model"], f"{row[WITHOUT]:.1f}", f"{row[WITH]:.1f}",
                     f"{row['ratio']:.2f} ({row['quartiles'][0]:.2f}-{row['quartiles'][1]:.2f})",
                     "" if row["memory"] is None else f"{row['memory']:.2f}",
                     "; ".join(row["outlined"])) for row in rows],
                   headers=("model", "without, ms", "with, ms", "without / with", "memory", "outlined"), disable_numparse=True))
    harness.write_record(options.json, rows=rows)


if __name__ == "__main__":
    main()
