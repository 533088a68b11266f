"""Apex's names: which module stands for which, what to use for those that have no stand-in, and what is in each.

`install()` and the table of docs/apex.md are made of these.
"""

from __future__ import annotations

# Apex's module -> ours. A submodule that is not listed resolves to the submodule of the same name, if there is one.
MODULES = {
    "apex.amp": "apexfx.amp",
    "apex.amp.amp": "apexfx.amp.functions",
    "apex.amp.handle": "apexfx.amp.scale_loss",
    "apex.amp.opt": "apexfx.amp.legacy_wrapper",
    "apex.contrib.clip_grad": "apexfx.optimizers.clip_grad",
    "apex.contrib.clip_grad.clip_grad": "apexfx.optimizers.clip_grad",
    "apex.contrib.group_norm": "apexfx.compat.group_norm",
    "apex.contrib.group_norm.group_norm": "apexfx.compat.group_norm",
    "apex.contrib.layer_norm": "apexfx.compat.layer_norm",
    "apex.contrib.layer_norm.layer_norm": "apexfx.compat.layer_norm",
    "apex.contrib.xentropy": "apexfx.compat.xentropy",
    "apex.contrib.xentropy.softmax_xentropy": "apexfx.compat.xentropy",
    "apex.fp16_utils": "apexfx.fp16_utils",
    "apex.fp16_utils.fp16util": "apexfx.fp16_utils",
    "apex.fused_dense": "apexfx.compat.fused_dense",
    "apex.fused_dense.fused_dense": "apexfx.compat.fused_dense",
    "apex.mlp": "apexfx.compat.mlp",
    "apex.mlp.mlp": "apexfx.compat.mlp",
    "apex.multi_tensor_apply": "apexfx.multi_tensor_apply",
    "apex.normalization": "apexfx.normalization",
    "apex.optimizers": "apexfx.optimizers",
    "apex.optimizers.fused_mixed_precision_lamb": "apexfx.optimizers.fused_lamb",
    "apex.parallel": "apexfx.parallel",
    "apex.parallel.optimized_sync_batchnorm": "apexfx.parallel.sync_batchnorm",
    "amp_C": "apexfx.compat.amp_C",
    "apex_C": "apexfx.compat.apex_C",
    "fused_dense_cuda": "apexfx.compat.fused_dense_cuda",
    "fused_layer_norm_cuda": "apexfx.compat.fused_layer_norm_cuda",
    "mlp_cuda": "apexfx.compat.mlp_cuda",
    "syncbn": "apexfx.compat.syncbn",
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
    "apex.contrib.focal_loss": "a focal loss in plain torch under torch.compile, or torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.gpu_direct_storage": "torch.cuda.gds.GdsFile",
    "apex.contrib.groupbn": "torch.nn.BatchNorm2d on channels_last inputs, or apex.parallel.SyncBatchNorm",
    "apex.contrib.index_mul_2d": "indexing and multiplication under torch.compile",
    "apex.contrib.multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
    "apex.contrib.nccl_allocator": "torch.cuda.MemPool",
    "apex.contrib.openfold_triton": "torch.nn.functional.layer_norm and scaled_dot_product_attention under torch.compile",
    "apex.contrib.optimizers": "apexfx.train_step(model, loss_fn, optimizer, ddp=True, shard='optimizer') with FusedAdam of "
                               "apex.optimizers in the place of DistributedFusedAdam, the same without shard= with FusedLAMB in "
                               "that of DistributedFusedLAMB, and apex.fp16_utils.FP16_Optimizer in that of FP16_Optimizer",
    "apex.contrib.peer_memory": "torch.distributed's send and recv",
    "apex.contrib.sparsity": "torch.sparse.to_sparse_semi_structured and torch.nn.utils.prune",
    "apex.contrib.torchsched": "torch.compile(model, backend='apex')",
    "apex.contrib.transducer": "torchaudio.functional.rnnt_loss",
    "apex.contrib": "the plain module under torch.compile",
    "apex.deprecated_warning": "warnings.warn",
    "apex.distributed_testing": "torch.testing._internal.common_distributed",
    "apex.parallel.optimized_sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.parallel.sync_batchnorm_kernel": "apex.parallel.SyncBatchNorm",
    "apex.pyprof": "torch.profiler",
    "apex.reparameterization": "torch.nn.utils.parametrizations.weight_norm",
    "apex.transformer": "Megatron Core, or torch.distributed's tensor.parallel, pipelining and device_mesh; for its "
                        "softmax, rotary embedding and layers plain torch under torch.compile, and apex.normalization",
    "bnp": "torch.nn.BatchNorm2d on channels_last inputs",
    "distributed_adam_cuda": "apex.optimizers.FusedAdam, and apexfx.train_step(ddp=True, shard='optimizer')",
    "distributed_lamb_cuda": "apex.optimizers.FusedLAMB",
    "fast_layer_norm": "apex.contrib.layer_norm.FastLayerNorm",
    "fast_multihead_attn": "torch.nn.functional.scaled_dot_product_attention",
    "fmhalib": "torch.nn.functional.scaled_dot_product_attention",
    "focal_loss_cuda": "a focal loss in plain torch under torch.compile",
    "fused_adam_cuda": "apex.optimizers.FusedAdam",
    "fused_index_mul_2d": "indexing and multiplication under torch.compile",
    "fused_lamb_cuda": "apex.optimizers.FusedLAMB",
    "fused_rotary_positional_embedding": "a rotary embedding in plain torch under torch.compile",
    "fused_weight_gradient_mlp_cuda": "torch.nn.Linear under torch.compile",
    "generic_scaled_masked_softmax_cuda": "torch.softmax under torch.compile",
    "group_norm_cuda": "apex.contrib.group_norm.GroupNorm",
    "group_norm_v2_cuda": "apex.contrib.group_norm.GroupNorm",
    "scaled_masked_softmax_cuda": "torch.softmax under torch.compile",
    "scaled_softmax_cuda": "torch.softmax under torch.compile",
    "scaled_upper_triang_masked_softmax_cuda": "torch.nn.functional.scaled_dot_product_attention(..., is_causal=True)",
    "transducer_joint_cuda": "torchaudio.functional.rnnt_loss",
    "transducer_loss_cuda": "torchaudio.functional.rnnt_loss",
    "xentropy_cuda": "apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
}

# Apex's public modules that are here -> the names that its documentation has, that they export, and that scripts take from them.
PUBLIC = {
    "apex": "amp fp16_utils multi_tensor_apply normalization optimizers parallel DeprecatedFeatureWarning",
    "apex.amp": """initialize scale_loss state_dict load_state_dict master_params half_function float_function
        promote_function register_half_function register_float_function register_promote_function disable_casts
        init _amp_state""",
    "apex.amp.amp": """init half_function float_function promote_function register_half_function register_float_function
        register_promote_function""",
    "apex.amp.frontend": "initialize state_dict load_state_dict Properties opt_levels O0 O1 O2 O3",
    "apex.amp.handle": "scale_loss disable_casts AmpHandle NoOpHandle",
    "apex.amp.opt": "OptimWrapper",
    "apex.amp.scaler": "LossScaler",
    "apex.amp.lists": "functional_overrides tensor_overrides torch_overrides",
    "apex.amp._amp_state": "_amp_state AmpState maybe_print warn_or_err master_params",
    "apex.parallel": """DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model create_syncbn_process_group
        ReduceOp LARC""",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.multiproc": "main",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.distributed": """DistributedDataParallel Reducer flatten unflatten apply_flat_dist_call
        flat_dist_call split_half_float_double split_by_type extract_tensors""",
    "apex.optimizers": "FusedSGD FusedAdam FusedNovoGrad FusedLAMB FusedAdagrad FusedMixedPrecisionLamb FP16_Optimizer",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": """FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm
        fused_layer_norm fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine
        mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine manual_rms_norm
        FusedLayerNormAffineFunction FusedLayerNormFunction FusedRMSNormAffineFunction FusedRMSNormFunction
        FusedLayerNormAffineMixedDtypesFunction FusedRMSNormAffineMixedDtypesFunction""",
    "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "apex.fp16_utils": """BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads FP16Model
        convert_module convert_network master_params_to_model_params tofp16 to_python_float clip_grad_norm
        FP16_Optimizer LossScaler DynamicLossScaler""",
    "apex.fp16_utils.fp16util": "tofp16 network_to_half prep_param_lists",
    "apex.fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "apex.mlp": "MLP MlpFunction mlp_function",
    "apex.mlp.mlp": "MLP MlpFunction mlp_function",
    "apex.fused_dense": """FusedDense FusedDenseGeluDense DenseNoBias fused_dense_function dense_no_bias_function
        fused_dense_gelu_dense_function FusedDenseFunc DenseNoBiasFunc FusedDenseGeluDenseFunc""",
    "apex.fused_dense.fused_dense": """FusedDense FusedDenseGeluDense _fused_dense _dense_no_bias
        _fused_dense_gelu_dense""",
    "apex.contrib.clip_grad": "clip_grad_norm_",
    "apex.contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "apex.contrib.group_norm": "GroupNorm",
    "apex.contrib.group_norm.group_norm": "GroupNorm torch_group_norm",
    "apex.contrib.layer_norm": "FastLayerNorm",
    "apex.contrib.layer_norm.layer_norm": "FastLayerNorm FastLayerNormFN",
    "apex.contrib.xentropy": "SoftmaxCrossEntropyLoss",
    "apex.contrib.xentropy.softmax_xentropy": "SoftmaxCrossEntropyLoss",
    "amp_C": """multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp
        multi_tensor_l2norm_scale multi_tensor_unscale_l2norm multi_tensor_sgd multi_tensor_adam
        multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_adagrad
        multi_tensor_novograd multi_tensor_lamb multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda
        multi_tensor_lamb_stage2_cuda update_scale_hysteresis""",
    "apex_C": "flatten unflatten",
    "fused_dense_cuda": """linear_bias_forward linear_bias_backward linear_gelu_linear_forward
        linear_gelu_linear_backward""",
    "fused_layer_norm_cuda": """forward_affine forward backward_affine backward forward_affine_mixed_dtypes
        rms_forward_affine rms_forward rms_backward_affine rms_backward rms_forward_affine_mixed_dtypes""",
    "mlp_cuda": "forward backward",
    "syncbn": """welford_mean_var welford_parallel batchnorm_forward reduce_bn batchnorm_backward
        welford_mean_var_c_last batchnorm_forward_c_last reduce_bn_c_last batchnorm_backward_c_last relu_bw_c_last""",
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
