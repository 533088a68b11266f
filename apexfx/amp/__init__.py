"""Apex's mixed precision API on the shared rule table, with loss scaling on the device.

`apexfx.amp._amp_state` is the state object, as in Apex, and also a module that can be imported from.

A third of the room (`functions`, `models`, `legacy_wrapper`, `stash`, the delayed unscaling of `scale_loss`) are names
and semantics of Apex that its scripts use, and that torch's autocast and GradScaler have nothing for.
"""

from __future__ import annotations

from ._amp_state import _amp_state as _amp_state
from ._amp_state import master_params as master_params
from .frontend import initialize as initialize
from .frontend import load_state_dict as load_state_dict
from .frontend import state_dict as state_dict
from .functions import float_function as float_function
from .functions import half_function as half_function
from .functions import init as init
from .functions import promote_function as promote_function
from .functions import register_float_function as register_float_function
from .functions import register_half_function as register_half_function
from .functions import register_promote_function as register_promote_function
from .scale_loss import disable_casts as disable_casts
from .scale_loss import scale_loss as scale_loss
