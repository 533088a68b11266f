"""Fused optimizers with Apex's names and signatures, on any device and for float32, float16, bfloat16 and float64.

For the graph of a training step read `end_of_step` (what its parts hand on to one another), `update` (what an update takes),
`update_rules` (which optimizers update by an op), `traced` (all others, by their own step), and `held_state` (what is refused of
the state they hold). The parts are in `train_step/parts`.

Half of the room is these: torch's optimizers in the graph of a step, where the norm, the skip and the loss scale are read on the
device, as those of torch.optim cannot.
"""

from __future__ import annotations

from .clip_grad import clip_grad_norm_ as clip_grad_norm_
from .fused_adagrad import FusedAdagrad as FusedAdagrad
from .fused_adam import FusedAdam as FusedAdam
from .fused_lamb import FusedLAMB as FusedLAMB
from .fused_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from .fused_novograd import FusedNovoGrad as FusedNovoGrad
from .fused_sgd import FusedSGD as FusedSGD
