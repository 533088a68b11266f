"""The one table of precision rules, as data: op name -> which dtype its floating arguments get, and why.

Read by the `precision` pass over a graph and by the eager executor over running code. Complete from Apex's O1 lists
(`apex/amp/lists/{torch,tensor,functional}_overrides.py`), and extended with the ops Apex missed.
Three things Apex did are left out on purpose: float64 is never cast down, complex and integer tensors are never
touched, and an in-place op that Apex refused on a half tensor computes in half, as its kernel accumulates in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import HALVES
from ..graph.op_names import is_foreign

KINDS = ("half", "half_if_mixed", "float", "promote", "sequence_promote", "banned", "batch_norm", "match_self", "dtype",
         "passthrough")
FLOATS = (*HALVES, torch.float32, torch.float64)


@dataclass(frozen=True)
class Rule:
    """What happens to the floating arguments of an op.

    Attributes:
        kind: "half": all to the half type. "half_if_mixed": the same, where their dtypes differ. "float", "banned":
            halves to float32. "promote", "sequence_promote": mixed dtypes to the widest. "match_self": the others to
            the first one's. "batch_norm": the parameters to the dtype of the statistics. "dtype": all to `dtype`.
            "passthrough": nothing.
        reason: one line for the cast ledger.
        family: what the op is: "matmul", "norm", "loss", ...
    """

    kind: str
    reason: str
    family: str = "user"
    dtype: torch.dtype | None = None


MIXED = "mixed arguments meet in the widest dtype"

_INTO_ITS_OWN = "an in-place op writes its own tensor, whose dtype cannot change"

# (kind, family, reason, names)
_TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("half", "convolution", "tensor cores multiply in half and accumulate in float32", """
        conv conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc"""),
    ("half", "matmul", "tensor cores multiply in half and accumulate in float32", """
        addmm addmv addr addbmm baddbmm bmm linear matmul mm mv inner einsum tensordot chain_matmul linalg_multi_dot"""),
    ("half", "attention", "a fused attention kernel works in half and keeps its softmax in float32", """
        scaled_dot_product_attention multi_head_attention_forward"""),
    ("half", "rnn", "a recurrent layer is matrix products; its state takes the dtype of its weights", """
        lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
        apexfx.lstm apexfx.gru apexfx.rnn_tanh apexfx.rnn_relu"""),
    ("half", "activation", "a learnt slope has the dtype of the activation it scales", "prelu"),
    ("float", "exponential", "grows or vanishes beyond half's range of exponents", """
        exp exp2 expm1 cosh sinh tan pow float_power log log10 log1p log2 logaddexp logaddexp2 logit xlogy erfinv
        reciprocal rsqrt acos acosh asin atanh lgamma digamma mvlgamma polygamma igamma igammac i0 hypot"""),
    ("float", "reduction", "a long sum in half loses its small terms", """
        sum nansum mean nanmean prod std std_mean var var_mean norm renorm dist cumsum cumprod logcumsumexp logsumexp
        cdist pdist trace trapz trapezoid cov corrcoef linalg_norm linalg_vector_norm linalg_matrix_norm
        cumulative_trapezoid embedding_bag"""),
    ("float", "softmax", "exponentials and their sum need float32", """
        softmax log_softmax softmin gumbel_softmax softplus logsigmoid adaptive_log_softmax_with_loss"""),
    ("float", "activation", "Apex computes it in float32: a difference of nearly equal exponentials", "gelu"),
    ("float", "norm", "a variance in half cancels; statistics stay in float32", """
        layer_norm group_norm instance_norm rms_norm local_response_norm normalize cosine_similarity
        pairwise_distance"""),
    ("float", "loss", "a loss is a sum of logarithms or squares; its gradient starts the backward pass", """
        poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss
        margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
        nll_loss_nd gaussian_nll_loss huber_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss
        triplet_margin_loss triplet_margin_with_distance_loss ctc_loss linear_cross_entropy"""),
    ("banned", "loss", "log of a half probability overflows for p < 6e-8: Apex refused it, here it runs in float32",
     "binary_cross_entropy"),
    ("float", "resampling", "coordinates in half address no more than 2048 pixels", """
        interpolate grid_sample affine_grid grid_sampler upsample_nearest1d upsample_nearest2d upsample_nearest3d
        upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d upsample_linear1d"""),
    ("float", "linalg", "a factorization or inverse has no half kernel and amplifies rounding", """
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_inv linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matrix_exp
        linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
        linalg_solve_triangular linalg_svd linalg_svdvals linalg_householder_product cholesky cholesky_inverse
        cholesky_solve det logdet slogdet inverse pinverse qr svd lu lu_solve matrix_exp matrix_power triangular_solve
        geqrf orgqr ormqr svd_lowrank pca_lowrank lobpcg"""),
    ("float", "spectral", "transforms and complex numbers have no general half kernel", """
        fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn
        fft_irfftn fft_hfft fft_ihfft stft istft complex polar view_as_complex"""),
    ("float", "statistics", "counting and ordering need values that half cannot tell apart", """
        quantile nanquantile histc histogram multinomial bincount"""),
    ("float", "transfer", "Apex: code that reads a value on the host expects float32", "cpu"),
    ("promote", "arithmetic", MIXED, """
        add sub mul outer div addcdiv addcmul atan2 cross bilinear dot vdot floor_divide remainder fmod maximum minimum fmax
        fmin lerp linalg_cross linalg_vecdot kron copysign nextafter heaviside"""),
    ("promote", "comparison", "mixed arguments are compared in the widest dtype", """
        eq equal ge gt le lt ne isclose allclose searchsorted bucketize isin"""),
    ("promote", "selection", "both sources of a selection need one dtype", """
        where scatter scatter_add scatter_reduce index_put index_add index_copy index_reduce index_fill masked_scatter
        masked_fill masked_select take_along_dim select_scatter slice_scatter diagonal_scatter clamp clamp_min clamp_max
        put fill threshold nan_to_num pad full_like"""),
    ("sequence_promote", "sequence", "pieces of one tensor meet in the widest dtype", """
        cat stack hstack vstack dstack column_stack row_stack block_diag cartesian_prod meshgrid broadcast_tensors"""),
    ("batch_norm", "batch_norm", "half activations with float32 parameters and statistics: the kernel takes both", """
        batch_norm apexfx.sync_batch_norm"""),
    ("passthrough", "norm", "the kernel takes any mix of dtypes and computes in float32", """
        apexfx.layer_norm apexfx.rms_norm"""),
    ("passthrough", "lookup", "a lookup computes nothing; the rows take the cast, not the table", "embedding one_hot"),
    ("passthrough", "activation", "bounded or piecewise linear: half is enough", """
        relu relu6 leaky_relu elu celu selu sigmoid tanh silu mish hardtanh hardswish hardsigmoid hardshrink softshrink
        softsign tanhshrink rrelu glu dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout
        feature_alpha_dropout erf erfc sin cos sqrt abs neg sign floor ceil round trunc frac logical_not
        square bernoulli"""),
    ("float", "pooling", "torch has no half kernel of it on the CPU", "avg_pool3d"),
    ("passthrough", "pooling", "a maximum or a small average", """
        pooling max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d
        lp_pool2d max_unpool1d max_unpool2d max_unpool3d unfold fold pixel_shuffle pixel_unshuffle amax amin max min
        argmax argmin sort topk kthvalue median mode argsort cummax cummin any all"""),
    ("passthrough", "autograd", "a gradient comes in the dtype of what it belongs to", "grad apexfx.apply_gradients"),
    ("passthrough", "view", "moves or describes data and computes nothing", """
        getitem view reshape flatten unflatten transpose t T mT mH adjoint permute squeeze unsqueeze expand
        expand_as contiguous narrow select split chunk unbind detach clone diagonal movedim flip roll repeat repeat_interleave
        tile view_as view_as_real real imag gather index_select take tril triu diag diag_embed as_strided ravel
        rot90 tensor_split hsplit vsplit dsplit attribute getattr size dim numel shape stride is_floating_point item
        tolist requires_grad_ register_hook retain_grad zero_ fill_ copy_ resize_ set_ data_ptr backward"""),
    ("match_self", "in_place", _INTO_ITS_OWN, "setitem"),
    ("passthrough", "factory", "makes a new tensor; only the dtype and device of its argument are read", """
        zeros_like ones_like empty_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full
        new_tensor zeros ones empty full arange rand randn linspace tensor"""),
    ("passthrough", "cast", "a cast that the user wrote is the user's, and stays", """
        to float half bfloat16 double type type_as int long short char byte bool _to_copy cuda numpy"""),
)

RULES: Mapping[str, Rule] = {
    name: Rule(kind, reason, family) for kind, family, reason, names in _TABLE for name in names.split()
}

_IN_PLACE = Rule("match_self", _INTO_ITS_OWN, "in_place")
_OUT = Rule("match_self", "the result goes into the tensor given as out=, whose dtype cannot change", "in_place")
_UNKNOWN = Rule("promote", "not in the table: mixed arguments meet in the widest dtype", "unknown")
FOREIGN = Rule("passthrough", "not torch's own: it keeps the dtypes it was written for", "foreign")

# Ops whose Python numbers are stored as the tensor's dtype; see `policy.limited`.
STORED_NUMBERS = frozenset("""
    masked_fill masked_fill_ index_fill index_fill_ fill fill_ full_like new_full clamp clamp_ clamp_min clamp_max where
    threshold threshold_ nan_to_num nan_to_num_ pad scatter scatter_ setitem""".split())

# The additive mask of attention, by position and name; see `policy.additive_mask`.
ADDITIVE_MASKS = {"scaled_dot_product_attention": (3, "attn_mask"), "multi_head_attention_forward": (16, "attn_mask")}

# What a batch norm adds to its result, by position and name: no parameter of it; see `policy.decide_call`.
RESIDUALS = {"apexfx.sync_batch_norm": (9, "residual")}

# Whose result is the same data, so that a dtype the user chose for the argument is still the user's choice.
SAME_DATA_FAMILIES = ("view", "cast")


def lookup(
    name: str, rules: Mapping[str, Rule] = RULES, *, in_place: bool = False, out: bool = False, names_dtype: bool = False,
    equation: Any = None,
) -> Rule:
    """Return the rule that holds for a call of the op called `name` (see `canonical_name`).

    Args:
        rules: the table, or a copy with a user's own entries.
        in_place: the op writes its first argument although its name does not say so (`inplace=True`).
        out: the op was given `out=`.
        names_dtype: a dtype is among the arguments.
        equation: the first argument of an einsum: where it sums over no index, it multiplies elements as `mul` does.
    """
    if out:
        return _OUT
    rule = rules.get(name)
    if name == "einsum" and rule is RULES[name] and isinstance(equation, str) and not _sums(equation):
        return RULES["mul"]
    if rule is None and name.endswith("_") and not is_foreign(name):
        in_place = True
        rule = rules.get(name[:-1])
    if in_place and (rule is None or rule.kind not in ("passthrough", "match_self", "batch_norm")):
        return _IN_PLACE
    if rule is not None and names_dtype and rule.kind in ("float", "banned"):
        return Rule("passthrough", "the call names the dtype it computes in", rule.family)
    if rule is not None:
        return rule
    return FOREIGN if is_foreign(name) else _UNKNOWN


def _sums(equation: str) -> bool:
    """Return whether the equation of an einsum sums over an index: one that is not in the result."""
    operands, arrow, result = equation.replace(" ", "").partition("->")
    indices = set(operands) - {",", "."}
    return bool(indices - set(result)) if arrow else any(operands.count(index) > 1 for index in indices)


def widest(dtypes: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype in which halves and float32 meet, or None where none is floating; the two halves meet in float32."""
    present = {d for d in dtypes if d in FLOATS}
    if not present:
        return None
    return present.pop() if len(present) == 1 else torch.float32


def decide(rule: Rule, dtypes: Sequence[torch.dtype | None], half: torch.dtype) -> tuple[torch.dtype | None, ...]:
    """Return the dtype each argument is to be cast to; None leaves it alone.

    Args:
        rule: from `lookup`.
        dtypes: of the arguments in order, nested sequences flattened; None for what is no tensor.
        half: the half type.
    """
    floating = [d for d in dtypes if d in FLOATS]
    if not floating or rule.kind == "passthrough":
        return (None,) * len(dtypes)
    if rule.kind == "dtype" and rule.family == "batch_norm" and rule.dtype in HALVES:
        # The statistics are written in place and stay as they are; the activation can move.
        activation = rule.dtype if dtypes[0] in (*HALVES, torch.float32) and dtypes[0] != rule.dtype else None
        return (activation, *_decide_batch_norm((rule.dtype, *dtypes[1:]))[1:])
    if rule.kind == "batch_norm":
        return _decide_batch_norm(dtypes)
    mixed = len(set(floating)) > 1
    targets = {
        "dtype": rule.dtype, "float": torch.float32, "banned": torch.float32,
        "half": half if mixed or floating[0] not in HALVES else None,  # either half stays: bfloat16 to float16 could overflow
        "half_if_mixed": half if mixed else None,
        "promote": widest(floating), "sequence_promote": widest(floating),
        "match_self": dtypes[0] if dtypes[0] in FLOATS else None,
    }
    if rule.kind not in targets:
        raise ValueError(f"apexfx: rule kind {rule.kind!r} was given, expected one of {', '.join(KINDS)}")
    target = targets[rule.kind]
    # float64 is never cast, and nothing to it: what meets it is float32, as without casts, and torch takes both or refuses.
    if torch.float64 in ((dtypes[0],) if rule.kind == "match_self" else floating):
        target = torch.float32
    return tuple(target if d in FLOATS and d not in (target, torch.float64) else None for d in dtypes)


def _decide_batch_norm(dtypes: Sequence[torch.dtype | None]) -> tuple[torch.dtype | None, ...]:
    """Activation first, then parameters and statistics in any order: these agree, in float32 unless all are half."""
    parameters = [d for d in dtypes[1:] if d in FLOATS]
    if dtypes[0] == torch.float64:
        return (None,) * len(dtypes)
    if len(set(parameters)) == 1 and parameters[0] in HALVES:
        return (parameters[0] if dtypes[0] in FLOATS and dtypes[0] != parameters[0] else None, *[None] * (len(dtypes) - 1))
    return (None, *(torch.float32 if d in HALVES else None for d in dtypes[1:]))


def consistent(rule: Rule, *, to_half: bool = True) -> Rule:
    """Return what is left of `rule` where everything was cast already (O0, O2, O3): no two dtypes meet in one op.

    Losses stay in float32, as their result is the graph's own output, and so do linalg and what makes complex numbers: matrix_exp
    in half is wrong, and complex() of bfloat16 raises when it runs alone.

    Args:
        to_half: where mixed matrix products go: to half (O2, O3) or to the widest dtype (O0).
    """
    if rule.kind == "half" and to_half:
        return Rule("half_if_mixed", rule.reason, rule.family)
    if rule.kind == "half" or (rule.kind == "float" and rule.family not in ("loss", "linalg", "spectral")):
        return Rule("promote", MIXED, rule.family)
    return rule
