"""What `diagnose` is to say of the programs under cases/: five that lose time, and one over ranks that does not.

The five are rebuilt from descriptions of what was found in published code, with models that a CPU trains in a second. Clean
programs on one process are rows of `test_diagnose.py`.

A line that is to be named ends with a comment, `# expected:` and kinds of findings, with semicolons between them. Where several
lines carry the same kind, any of them is right: they are one finding. What a clean program does is no finding of any kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "cases"
KINDS = {"buffer broadcast": "buffer_broadcast", "compile never entered": "compile_not_entered", "EMA loop": "ema_loop",
         "graph break": "graph_break", "host sync in the loop": "host_sync", "host sync in the model": "host_sync",
         "host sync in the model (the second)": "host_sync", "optimizer groups": "optimizer_groups"}


@dataclass(frozen=True)
class Program:
    """A training program and the answer.

    Attributes:
        file: under cases/.
        num_ranks: how many processes torchrun starts. 1: `python FILE`.
        source: where it was published, and what of it is here.
        also: what else is true of the program, in words: no finding that is asked for, and none that is invented.
        fixes: by kind, texts of the file and what takes their place: so changed, the program does the same without that loss.
    """

    file: str
    num_ranks: int = 1
    source: str = ""
    also: tuple[str, ...] = ()
    fixes: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()

    def expected(self) -> dict[str, frozenset[int]]:
        """Return the lines that are right, by kind of finding; {} of a clean program."""
        lines: dict[str, set[int]] = {}
        for number, text in enumerate((FOLDER / self.file).read_text().splitlines(), 1):
            for kind in re.split("; ", text.partition("  # expected: ")[2]):
                if kind:
                    lines.setdefault(kind, set()).add(number)
        return {kind: frozenset(numbers) for kind, numbers in lines.items()}

    def fixed(self, kind: str) -> str:
        """Return the text of the program without the loss of one kind.

        Raises:
            ValueError: a text to be replaced is not there once.
        """
        text = (FOLDER / self.file).read_text()
        for before, after in dict(self.fixes)[kind]:
            if text.count(before) != 1:
                raise ValueError(f"{self.file} has {text.count(before)} times, expected once: {before!r}")
            text = text.replace(before, after)
        return text


_DDP = "DistributedDataParallel(policy, bucket_cap_mb=1)"
_EMA_LOOP = '''\
        for name, average in self.model.state_dict().items():  # expected: EMA loop
            if average.dtype.is_floating_point:
                average *= decay  # expected: EMA loop
                average += (1 - decay) * new[name].detach()  # expected: EMA loop
'''
_EMA_LISTS = '''\
        averages = {name: tensor for name, tensor in self.model.state_dict().items() if tensor.is_floating_point()}
        torch._foreach_lerp_(list(averages.values()), [new[name] for name in averages], 1 - decay)
'''
_GROUP = '''\
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return groups
'''
_MERGED_GROUP = '''\
        groups.setdefault((rate, decay), []).append(parameter)
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]
'''

PROGRAMS = (
    Program("robot_policy.py", num_ranks=2,
            source="huggingface/lerobot#4612 and #4607: each forward waits for the broadcast of buffers that nothing changes, "
                   "and reads two losses back to the host",
            also=("exposed communication", "a model in eager mode: many small kernels"),
            fixes=(("buffer broadcast", ((_DDP, _DDP.replace(")", ", broadcast_buffers=False)")),)),)),
    Program("detector_compile.py",
            source="roboflow/rf-detr#1410: `compile=True` is taken, and training goes on in eager mode. There an option kept the "
                   "model from being compiled; here the compiled model is made, and the other one called",
            also=("a model in eager mode: many small kernels",),
            fixes=(("compile never entered", (("predicted = self.model(images)", "predicted = self.compiled(images)"),)),)),
    Program("detector_groups.py",
            source="roboflow/rf-detr#1409 and #1423: 465 groups of one parameter each, for 28 pairs of learning rate and "
                   "weight decay",
            also=("a model in eager mode: many small kernels",),
            fixes=(("optimizer groups", (("    groups = []\n", "    groups = {}\n"), (_GROUP, _MERGED_GROUP))),)),
    Program("molecules.py",
            source="isayevlab/aimnetcentral#109: `.item()` in a compiled forward, to know how many molecules there are, breaks "
                   "it into graphs",
            also=("host sync in the model, at the same line",),
            fixes=(("graph break", (("        number = int(molecule[-1].item()) + 1  # expected: graph break\n", ""),
                                    ("new_zeros(number, WIDTH)", "new_zeros(MOLECULES, WIDTH)"))),)),
    Program("moving_average.py",
            source="ultralytics/ultralytics#25315: the average of the weights is a loop over the state_dict, two ops a tensor",
            also=("a model in eager mode: many small kernels",),
            fixes=(("EMA loop", ((_EMA_LOOP, _EMA_LISTS),)),)),
    Program("ddp_accumulation.py", num_ranks=2, also=("exposed communication",)),
)

