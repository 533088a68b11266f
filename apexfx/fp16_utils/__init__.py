"""Apex's tools for half training by hand: model conversion, master parameters, loss scalers, FP16_Optimizer."""

from __future__ import annotations

from .fp16_optimizer import FP16_Optimizer as FP16_Optimizer
from .loss_scaler import DynamicLossScaler as DynamicLossScaler
from .loss_scaler import LossScaler as LossScaler
from .masters import clip_grad_norm as clip_grad_norm
from .masters import master_params_to_model_params as master_params_to_model_params
from .masters import model_grads_to_master_grads as model_grads_to_master_grads
from .masters import prep_param_lists as prep_param_lists
from .masters import to_python_float as to_python_float
from .networks import BN_convert_float as BN_convert_float
from .networks import FP16Model as FP16Model
from .networks import convert_module as convert_module
from .networks import convert_network as convert_network
from .networks import network_to_half as network_to_half
from .networks import tofp16 as tofp16
