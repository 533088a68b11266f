"""Which module stands for which of Apex's, and what to use for those that have no stand-in."""

from __future__ import annotations

# Apex's module -> ours. A submodule that is not listed resolves to the submodule of the same name, if there is one.
MODULES = {
    "apex.amp": "apexfx.amp",
    "apex.amp.amp": "apexfx.amp.functions",
    "apex.amp.handle": "apexfx.amp.scale_loss",
    "apex.amp.opt": "apexfx.amp.legacy_wrapper",
    "apex.contrib.clip_grad": "apexfx.optimizers.clip_grad",
    "apex.contrib.clip_grad.clip_grad": "apexfx.optimizers.clip_grad",
    "apex.fp16_utils": "apexfx.fp16_utils",
    "apex.fp16_utils.fp16util": "apexfx.fp16_utils",
    "apex.multi_tensor_apply": "apexfx.multi_tensor_apply",
    "apex.normalization": "apexfx.normalization",
    "apex.optimizers": "apexfx.optimizers",
    "apex.optimizers.fused_mixed_precision_lamb": "apexfx.optimizers.fused_lamb",
    "apex.parallel": "apexfx.parallel",
    "apex.parallel.optimized_sync_batchnorm": "apexfx.parallel.sync_batchnorm",
    "amp_C": "apexfx.compat.amp_C",
    "apex_C": "apexfx.compat.apex_C",
}

# What NVIDIA removed in May 2025: provided here even where the rest of Apex is installed.
REMOVED_BY_NVIDIA = ("apex.amp", "apex.parallel", "apex.fp16_utils")

# Modules and names with no stand-in -> what to use.
ALTERNATIVES = {
    "apex.RNN": "torch.nn.LSTM and torch.nn.GRU, which amp casts at every level",
    "apex._autocast_utils": "torch.amp.custom_fwd(cast_inputs=...)",
    "apex.amp.__version__": "apexfx.__version__",
    "apex.amp._initialize": "apex.amp.initialize",
    "apex.amp._process_optimizer": "apex.amp.initialize; what it keeps is optimizer._amp_stash",
    "apex.amp.compat": "torch.is_tensor and torch.Tensor.is_floating_point",
    "apex.amp.rnn_compat": "torch.nn.LSTM and torch.nn.GRU, which amp casts as they are",
    "apex.amp.utils": "apex.amp.half_function and float_function, or torch.Tensor.half and float",
    "apex.amp.wrap": "apex.amp.register_half_function, register_float_function and register_promote_function",
    "apex.check_cudnn_version_and_warn": "torch.backends.cudnn.version()",
    "apex.contrib.bottleneck": "the plain bottleneck under apexfx.transform",
    "apex.contrib.conv_bias_relu": "torch.nn.Conv2d and torch.nn.ReLU under torch.compile",
    "apex.contrib.cudnn_gbn": "apex.parallel.SyncBatchNorm with a process group",
    "apex.contrib.fmha": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.focal_loss": "a focal loss in plain torch under torch.compile",
    "apex.contrib.group_norm": "torch.nn.GroupNorm under torch.compile",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d on channels_last inputs, or apex.parallel.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "indexing and multiplication under torch.compile",
    "apex.contrib.layer_norm": "apex.normalization.FusedLayerNorm, for any hidden size",
    "apex.contrib.multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool",
    "apex.contrib.optimizers": "apex.fp16_utils.FP16_Optimizer with apex.optimizers, or "
                               "torch.distributed.optim.ZeroRedundancyOptimizer",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured and torch.nn.utils.prune",
    "apex.contrib.torchsched": "torch.compile(model, backend='apex')",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib.xentropy": "torch.nn.functional.cross_entropy(..., label_smoothing=...)",
    "apex.contrib": "the plain module under torch.compile",
    "apex.fused_dense": "torch.nn.Linear and torch.nn.GELU(approximate='tanh') under torch.compile",
    "apex.mlp": "torch.nn.Sequential of torch.nn.Linear and torch.nn.ReLU under torch.compile",
    "apex.parallel.optimized_sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.parallel.sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "torch.distributed.tensor.parallel, or Megatron Core",
    "fast_layer_norm": "apex.normalization.FusedLayerNorm",
    "fast_multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
    "fused_adam_cuda": "apex.optimizers.FusedAdam",
    "fused_dense_cuda": "torch.nn.Linear under torch.compile",
    "fused_lamb_cuda": "apex.optimizers.FusedLAMB",
    "fused_layer_norm_cuda": "apex.normalization.FusedLayerNorm",
    "fused_weight_gradient_mlp_cuda": "torch.nn.Linear under torch.compile",
    "mlp_cuda": "torch.nn.Sequential under torch.compile",
    "syncbn": "apex.parallel.SyncBatchNorm",
    "xentropy_cuda": "torch.nn.functional.cross_entropy(..., label_smoothing=...)",
}


def resolve(name: str) -> str | None:
    """Return the module that stands for Apex's module `name`, or None."""
    if name in MODULES:
        return MODULES[name]
    parent, _, child = name.rpartition(".")
    ours = resolve(parent) if parent else None
    return f"{ours}.{child}" if ours is not None else None


def alternative(name: str) -> str:
    """Return what to use for a module that has no stand-in."""
    while name:
        if name in ALTERNATIVES:
            return ALTERNATIVES[name]
        name = name.rpartition(".")[0]
    return "NVIDIA's own package"
