"""One small call for every op that the rule table casts for: name -> (function, positional arguments, keywords)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_map

from apexfx._torch import FakeTensorMode
from apexfx.graph.nodes import evaluate, set_value
from apexfx.precision.rules import RULES

_generator = torch.Generator().manual_seed(0)


def _random(*shape: int) -> Tensor:
    """Return values in [0.25, 0.75]: valid for logarithms, inverse sines, probabilities; exact in half."""
    return torch.randint(64, 193, shape, generator=_generator) / 256


x, y, z = _random(2, 4), _random(2, 4), _random(2, 4)
row, image, volume, sequence = _random(4), _random(2, 4, 6, 6), _random(2, 4, 4, 4, 4), _random(2, 4, 6)
square = _random(4, 4) + 2 * torch.eye(4)
spd = square @ square.mT
spd = (spd * 16).round() / 16
batch = _random(3, 4, 4)
classes, bags = torch.tensor([1, 3]), torch.tensor([[0, 1], [2, 3]])
index = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]])
mask = torch.tensor([[True, False, True, False], [False, True, True, False]])
plus_minus = torch.tensor([[1.0, -1.0, 1.0, -1.0], [-1.0, 1.0, 1.0, -1.0]])
_lu, _pivots = torch.linalg.lu_factor(square)
_reflections, _tau = torch.geqrf(square)


def _is_removed(name: str) -> bool:
    """Tell whether a function of torch does nothing any more but to say so."""
    try:
        getattr(torch, name)(spd)
    except RuntimeError as error:
        return "is now removed" in str(error)
    return False


_OLD = {name: _is_removed(name) for name in ("cholesky", "qr")}  # 2.15 has removed both

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def call(function: Any, *args: Any, **kwargs: Any) -> Call:
    return function, args, kwargs


def _each(names: str, *args: Any, owner: Any = torch, prefix: str = "", **kwargs: Any) -> dict[str, Call]:
    return {prefix + name: call(getattr(owner, name), *args, **kwargs) for name in names.split()}


_linalg: dict[str, Any] = {"owner": torch.linalg, "prefix": "linalg_"}

SAMPLES: dict[str, Call] = {
    # half
    "conv": call(torch.ops.aten.convolution.default, sequence, _random(3, 4, 3), _random(3), [1], [0], [1], False, [0],
                 1),
    "conv1d": call(F.conv1d, sequence, _random(3, 4, 3), _random(3)),
    "conv2d": call(F.conv2d, image, _random(3, 4, 3, 3), _random(3)),
    "conv3d": call(F.conv3d, volume, _random(3, 4, 2, 2, 2), _random(3)),
    "conv_transpose1d": call(F.conv_transpose1d, sequence, _random(4, 3, 3)),
    "conv_transpose2d": call(F.conv_transpose2d, image, _random(4, 3, 3, 3)),
    "conv_transpose3d": call(F.conv_transpose3d, volume, _random(4, 3, 2, 2, 2)),
    "conv_tbc": call(torch.conv_tbc, _random(6, 2, 4), _random(3, 4, 3), _random(3)),
    "addmm": call(torch.addmm, x, x, square), "addmv": call(torch.addmv, row, square, row),
    "addr": call(torch.addr, square, row, row), "addbmm": call(torch.addbmm, square, batch, batch),
    "baddbmm": call(torch.baddbmm, batch, batch, batch), "bmm": call(torch.bmm, batch, batch),
    "linear": call(F.linear, x, square, row), "matmul": call(torch.matmul, x, square), "mm": call(torch.mm, x, square),
    "mv": call(torch.mv, square, row), "inner": call(torch.inner, x, y), "outer": call(torch.outer, row, row),
    "einsum": call(torch.einsum, "ij,jk->ik", x, square), "tensordot": call(torch.tensordot, x, square, 1),
    "chain_matmul": call(torch.chain_matmul, x, square, square),
    "linalg_multi_dot": call(torch.linalg.multi_dot, [x, square, square]),
    "scaled_dot_product_attention": call(F.scaled_dot_product_attention, batch, batch, batch),
    "multi_head_attention_forward": call(
        F.multi_head_attention_forward, batch, batch, batch, 4, 2, _random(12, 4) - 0.5, _random(12), None, None, False,
        0.0, _random(4, 4) - 0.5, _random(4), need_weights=False),
    "lstm": call(torch.lstm, batch, (_random(1, 4, 4), _random(1, 4, 4)),
                 (_random(16, 4) - 0.5, _random(16, 4) - 0.5, _random(16), _random(16)), True, 1, 0.0, False,
                 False, False),
    **{f"rnn_{kind}": call(getattr(torch, f"rnn_{kind}"), batch, _random(1, 4, 4),
                           (_random(4, 4) - 0.5, _random(4, 4) - 0.5, _random(4), _random(4)), True, 1, 0.0, False,
                           False, False)
       for kind in ("tanh", "relu")},
    "gru": call(torch.gru, batch, _random(1, 4, 4),
                (_random(12, 4) - 0.5, _random(12, 4) - 0.5, _random(12), _random(12)), True, 1, 0.0, False,
                False, False),
    **{f"apexfx.{kind}": call(
        getattr(torch.ops.apexfx, kind).default, batch, None, [_random(1, 4, 4) for _ in range(states)],
        [_random(rows, 4) - 0.5, _random(rows, 4) - 0.5, _random(rows), _random(rows)], True, 1, True, False, False,
        [False] * (5 + states))
       for kind, rows, states in (("lstm", 16, 2), ("gru", 12, 1), ("rnn_tanh", 4, 1), ("rnn_relu", 4, 1))},
    "lstm_cell": call(torch.lstm_cell, x, (y, z), _random(16, 4) - 0.5, _random(16, 4) - 0.5, _random(16), _random(16)),
    "gru_cell": call(torch.gru_cell, x, y, _random(12, 4) - 0.5, _random(12, 4) - 0.5, _random(12), _random(12)),
    **_each("rnn_tanh_cell rnn_relu_cell", x, y, square - 2, square - 2, row, row),
    "prelu": call(F.prelu, sequence - 0.5, row),
    # float: elementwise, reductions
    **_each("""exp exp2 expm1 cosh sinh tan log log10 log1p log2 logit erfinv reciprocal rsqrt acos asin atanh lgamma
               digamma i0 trapz trapezoid""", x),
    "acosh": call(torch.acosh, x + 1), "pow": call(torch.pow, x, 2.5), "float_power": call(torch.float_power, x, 2.5),
    **_each("logaddexp logaddexp2 xlogy igamma igammac hypot dist", x, y),
    "mvlgamma": call(torch.mvlgamma, x + 2, 2), "polygamma": call(torch.polygamma, 1, x),
    **_each("sum nansum mean nanmean prod std std_mean var var_mean norm", x),
    **_each("cumsum cumprod logcumsumexp logsumexp", x, 1),
    "renorm": call(torch.renorm, x, 2, 0, 0.5), "cdist": call(torch.cdist, x, y), "pdist": call(F.pdist, x),
    "trace": call(torch.trace, square), "cumulative_trapezoid": call(torch.cumulative_trapezoid, x),
    **_each("norm vector_norm", x, **_linalg), **_each("matrix_norm", square, **_linalg),
    "embedding_bag": call(F.embedding_bag, bags, square),
    # float: softmax, norms, losses
    **_each("softmax log_softmax softmin normalize", x, owner=F, dim=-1),
    "gumbel_softmax": call(F.gumbel_softmax, x), **_each("softplus logsigmoid gelu", x, owner=F),
    "layer_norm": call(F.layer_norm, x, (4,), row, row), "rms_norm": call(F.rms_norm, x, (4,), row),
    "group_norm": call(F.group_norm, image, 2, row, row), "local_response_norm": call(F.local_response_norm, image, 2),
    "instance_norm": call(F.instance_norm, image, None, None, row, row),
    **_each("cosine_similarity pairwise_distance", x, y, owner=F),
    **_each("poisson_nll_loss kl_div l1_loss mse_loss smooth_l1_loss huber_loss binary_cross_entropy "
            "binary_cross_entropy_with_logits", x, y, owner=F),
    "cosine_embedding_loss": call(F.cosine_embedding_loss, x, y, torch.tensor([1, -1])),
    **_each("cross_entropy nll_loss multi_margin_loss", x, classes, owner=F),
    "nll_loss_nd": call(torch._C._nn.nll_loss_nd, x, classes),
    **_each("hinge_embedding_loss soft_margin_loss", x, plus_minus, owner=F),
    "margin_ranking_loss": call(F.margin_ranking_loss, x, y, plus_minus),
    "multilabel_margin_loss": call(F.multilabel_margin_loss, x, torch.tensor([[1, 3, -1, 0], [0, -1, 1, 2]])),
    "multilabel_soft_margin_loss": call(F.multilabel_soft_margin_loss, x, mask.float()),
    **_each("triplet_margin_loss triplet_margin_with_distance_loss", x, y, z, owner=F),
    # float: resampling, linear algebra, spectra, statistics, transfer
    "avg_pool3d": call(F.avg_pool3d, volume, 2),
    "interpolate": call(F.interpolate, image, scale_factor=2, mode="bilinear"),
    "grid_sample": call(F.grid_sample, image, _random(2, 3, 3, 2), align_corners=False),
    "grid_sampler": call(torch.grid_sampler, image, _random(2, 3, 3, 2), 0, 0, False),
    "affine_grid": call(F.affine_grid, _random(2, 2, 3), (2, 4, 6, 6), align_corners=False),
    **_each("cholesky cholesky_ex cond det eigh eigvalsh inv inv_ex lu lu_factor matrix_exp matrix_rank pinv qr "
            "slogdet svd svdvals eigvals eig", spd, **_linalg),
    **_each("solve solve_ex", spd, square, **_linalg), **_each("matrix_power", square, 2, **_linalg),
    "linalg_solve_triangular": call(torch.linalg.solve_triangular, spd.triu(), square, upper=True),
    "linalg_lu_solve": call(torch.linalg.lu_solve, _lu, _pivots, square),
    "linalg_householder_product": call(torch.linalg.householder_product, _reflections, _tau),
    **_each("det logdet slogdet inverse pinverse svd lu matrix_exp geqrf svd_lowrank", spd),
    **_each(" ".join(name for name, removed in _OLD.items() if not removed), spd),
    "cholesky_inverse": call(torch.cholesky_inverse, spd.tril()),
    "cholesky_solve": call(torch.cholesky_solve, square, spd.tril()),
    "lu_solve": call(torch.lu_solve, square, _lu, _pivots), "matrix_power": call(torch.matrix_power, square, 2),
    "triangular_solve": call(torch.triangular_solve, square, spd.triu()),
    "orgqr": call(torch.orgqr, _reflections, _tau), "ormqr": call(torch.ormqr, _reflections, _tau, square),
    **_each("fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn", x, owner=torch.fft,
            prefix="fft_"),
    "stft": call(torch.stft, _random(16), 8, return_complex=True, window=torch.ones(8)),
    "complex": call(torch.complex, x, y), "polar": call(torch.polar, x, y),
    "view_as_complex": call(torch.view_as_complex, _random(3, 2)),
    **_each("quantile nanquantile", x, 0.25), "histc": call(torch.histc, x, 4, 0, 1),
    "histogram": call(torch.histogram, x, 4, range=(0.0, 1.0)), "multinomial": call(torch.multinomial, x, 2),
    "cpu": call(torch.Tensor.cpu, x),
    # promote
    **_each("""add sub mul div atan2 floor_divide remainder fmod maximum minimum fmax fmin copysign nextafter heaviside
               eq ge gt le lt ne isclose isin kron""", x, y),
    "addcdiv": call(torch.addcdiv, x, y, z), "addcmul": call(torch.addcmul, x, y, z),
    "cross": call(torch.cross, _random(2, 3), _random(2, 3)), "dot": call(torch.dot, row, row.flip(0)),
    "linalg_cross": call(torch.linalg.cross, _random(2, 3), _random(2, 3)), "vdot": call(torch.vdot, row, row.flip(0)),
    "linalg_vecdot": call(torch.linalg.vecdot, x, y), "bilinear": call(F.bilinear, x, y, _random(3, 4, 4), _random(3)),
    "lerp": call(torch.lerp, x, y, 0.25), "searchsorted": call(torch.searchsorted, row.sort().values, x),
    "bucketize": call(torch.bucketize, x, row.sort().values),
    "where": call(torch.where, mask, x, y), "scatter": call(torch.scatter, x, 0, index, y),
    "scatter_add": call(torch.scatter_add, x, 0, index, y),
    "scatter_reduce": call(torch.scatter_reduce, x, 0, index, y, "sum"),
    "index_put": call(torch.index_put, x, (torch.tensor([0]),), row),
    "put": call(torch.Tensor.put, x, torch.tensor([0]), row[:1]),
    **_each("index_add index_copy", x, 0, torch.tensor([1]), y[:1]),
    "index_reduce": call(torch.Tensor.index_reduce, x, 0, torch.tensor([1]), y[:1], "amax"),
    "index_fill": call(torch.index_fill, x, 0, torch.tensor([1]), row[0]),
    "masked_fill": call(torch.masked_fill, x, mask, row[0]),
    "masked_scatter": call(torch.masked_scatter, x, mask, y),
    "select_scatter": call(torch.select_scatter, x, row, 0, 1),
    "slice_scatter": call(torch.slice_scatter, x, y[:1], 0, 0, 1),
    "diagonal_scatter": call(torch.diagonal_scatter, square, row),
    "clamp": call(torch.clamp, x, y),
    "clamp_min": call(torch.clamp_min, x, y), "clamp_max": call(torch.clamp_max, x, y),
    # sequence_promote, batch_norm
    **_each("cat stack hstack vstack dstack column_stack row_stack", [x, y]),
    "block_diag": call(torch.block_diag, x, y), "cartesian_prod": call(torch.cartesian_prod, row, row),
    "meshgrid": call(torch.meshgrid, row, row, indexing="ij"),
    "broadcast_tensors": call(torch.broadcast_tensors, x, row),
    "batch_norm": call(F.batch_norm, image, row, row, row, row, False),
}  # fmt: skip

# Not run, and why.
NOT_RUN = {
    "no graph can hold it: its shape or result depends on data": """
        cov corrcoef gaussian_nll_loss ctc_loss linalg_lstsq bincount equal allclose masked_select""",
    "another spelling or a composition of one that is run": """
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d
        upsample_trilinear3d upsample_linear1d adaptive_log_softmax_with_loss linear_cross_entropy istft lobpcg
        pca_lowrank take_along_dim""",
    "removed from torch": " ".join(name for name, removed in _OLD.items() if removed),
    "takes one tensor, so there is nothing to promote": "fill threshold nan_to_num pad full_like",
    "has tests of its own": "apexfx.sync_batch_norm setitem",
}

# Results that are random, or unique only up to a sign or an order: their dtypes are checked, not their values.
NOT_UNIQUE = frozenset("""gumbel_softmax multinomial linalg_eig linalg_eigh linalg_qr linalg_svd qr svd svd_lowrank
    linalg_eigvals nextafter geqrf lu linalg_lu linalg_lu_factor linalg_inv_ex""".split())


def prepared(kind, args, half):
    """Return the arguments in dtypes that make the rule act: float32 for half, half for float, both for promotion."""
    count = 0

    def prepare(a):
        nonlocal count
        if not isinstance(a, Tensor) or not a.is_floating_point():
            return a
        count += 1
        return a.to(half) if kind in ("float", "banned") or (kind != "half" and count == 1) else a.clone()

    return tree_map(prepare, args)


def graph_of(function, args, kwargs, *, symbolic=False):
    """Return a graph of one call with its fake values, `symbolic` or plain sizes, and the tensors it takes."""
    graph, mode, tensors = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv() if symbolic else None), []

    def placeholder(a):
        if not isinstance(a, Tensor):
            return a
        node = graph.placeholder(f"in{len(tensors)}")
        sizes = {"symbolic_context": StatelessSymbolicContext([DimDynamic.DYNAMIC] * a.dim()),
                 "source": ConstantSource(node.name)} if symbolic else {}
        set_value(node, mode.from_tensor(a, **sizes))
        tensors.append(a)
        return node

    args, kwargs = tree_map(placeholder, (args, kwargs))
    node = graph.call_function(function, args, kwargs)
    set_value(node, evaluate(node, mode))
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph), node, tensors


def fitting(name, half):
    """Return the call of an op in dtypes that make its rule act; in float32 where the op takes no half at all."""
    function, *given = SAMPLES[name]
    given = prepared(RULES[name].kind, given, half)
    try:
        graph_of(function, *given)
    except RuntimeError:  # so no program could have captured it with half
        given = tree_map(lambda a: a.float() if isinstance(a, Tensor) and a.dtype == half else a, given)
    return function, *given


class Recording(fx.Interpreter):
    """Gives what one node returned, before the graph's outputs are cast back."""

    def __init__(self, gm, node):
        super().__init__(gm)
        self.wanted = node

    def run_node(self, n):
        out = super().run_node(n)
        if n is self.wanted:
            self.found = out
        return out

    def result(self, *inputs):
        self.run(*inputs)
        return self.found
