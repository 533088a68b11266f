"""What a step over rows of the parameters does not have: options, and optimizers and parts that make an element of others."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..optimizers.fused_adagrad import FusedAdagrad
from ..optimizers.fused_adam import FusedAdam
from ..optimizers.fused_sgd import FusedSGD
from .optimizer_list import OptimizerList
from .options import StepOptions

# All but Muon, which makes matrices whole, update each element by itself.
_OPTIMIZERS = (*(getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "RAdam", "Adamax",
                                                         "Adadelta", "Muon")), FusedAdagrad, FusedAdam, FusedSGD)
OF_ROWS = "a step of which each rank updates its rows of the parameters (under fully_shard(), or by shard=)"


def check_over_rows(options: StepOptions, optimizers: OptimizerList, step: str, also: Mapping[str, object]) -> None:
    """Refuse what a step does not have yet of which each rank has rows.

    Args:
        step: names it in errors.
        also: what else it does not have, by name, and whether that was given.

    Raises:
        ValueError: it names what was given.
    """
    config, safeguard = options.config, options.safeguard
    given = {"fallback=": options.fallback, "verify='each'": config.verify == "each",
             "inner='cudagraphs'": config.inner == "cudagraphs",
             "record_dir=": safeguard is not None and safeguard.record_dir is not None, **also}
    if unsupported := [name for name, value in given.items() if value]:
        raise ValueError(f"apexfx: {unsupported[0]} was given, which {step} does not have yet; leave it out")
    if others := [part for part in options.parts if not part.by_element]:
        raise ValueError(f"apexfx: the part {others[0]} was given, and in {OF_ROWS} a part has those rows; give its class "
                         "by_element = True if what it makes of an element follows from that element, end.norm and end.norms "
                         "alone")
    if whole := [type(each).__name__ for each in optimizers if type(each) not in _OPTIMIZERS]:
        raise ValueError(f"apexfx: {whole[0]} was given, and {OF_ROWS} has "
                         f"{', '.join(each.__name__ for each in _OPTIMIZERS)} alone; use one of them")
