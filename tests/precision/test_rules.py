"""The rule table as data: complete against Apex's lists, one name an op, decisions without any tensor."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from apexfx.graph.op_names import canonical_name
from apexfx.precision.rules import _TABLE, FLOATS, KINDS, RULES, Rule, consistent, decide, lookup, widest

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# apex/amp/lists/torch_overrides.py, tensor_overrides.py, functional_overrides.py, as names of the table.
APEX = {
    "half": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr
        matmul mm mv addbmm baddbmm bmm linear __matmul__ rnn_relu_cell rnn_tanh_cell gru_cell lstm_cell""",
    "float": """acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm
        prod std sum var renorm __pow__ __rpow__ cpu interpolate grid_sample softplus softmin log_softmax softmax gelu
        layer_norm group_norm local_response_norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss
        cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
        multilabel_soft_margin_loss multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss
        soft_margin_loss triplet_margin_loss ctc_loss""",
    "promote": """addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne __add__ __div__ __eq__
        __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rdiv__ __rmul__ __rsub__ __rtruediv__ __sub__
        __truediv__""",
    "sequence_promote": "cat stack",
    "banned": "binary_cross_entropy",
    "match_self": """__ipow__ __iadd__ __idiv__ __imul__ __isub__ __itruediv__ addmm_ addmv_ addr_ baddbmm_ exp_ log_
        pow_ cumsum_ renorm_ add_ div_ mul_ eq_ addcmul_""",
}
MISSED_BY_APEX = {
    "half": "scaled_dot_product_attention einsum multi_head_attention_forward lstm gru inner tensordot",
    "float": """logsumexp cdist pdist instance_norm rms_norm log1p mean linalg_norm linalg_inv fft_rfft quantile
        embedding_bag""",
    "match_self": "setitem",
    "promote": "outer ger where scatter scatter_add index_put index_add masked_fill lerp maximum clamp",
    "batch_norm": "batch_norm apexfx.sync_batch_norm",
    "passthrough": "embedding relu max_pool2d view getitem copy_ to float zeros_like",
}


@pytest.mark.parametrize("source", [APEX, MISSED_BY_APEX], ids=["apex", "missed by apex"])
def test_the_table_is_complete(source):
    wrong = {
        name: lookup(canonical_name(name)).kind
        for kind, names in source.items() for name in names.split() if lookup(canonical_name(name)).kind != kind
    }
    assert not wrong


def test_every_op_has_one_rule_with_a_reason_of_one_line():
    names = [name for _, _, _, names in _TABLE for name in names.split()]
    assert sorted(set(names)) == sorted(names)
    assert all(rule.kind in KINDS and rule.reason and "\n" not in rule.reason for rule in RULES.values())


@pytest.mark.parametrize("spellings", [
    (torch.add, operator.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, "add", "__radd__",
     torch.ops.aten.add.Tensor, torch.ops.aten.add),
    (operator.iadd, torch.Tensor.__iadd__, "__iadd__", torch.Tensor.add_, "add_", torch.ops.aten.add_.Tensor),
    (torch._C._nn.linear, F.linear, torch.ops.aten.linear.default),
    (torch.softmax, F.softmax, torch.Tensor.softmax, "softmax", torch.special.softmax, torch.ops.aten._softmax.default),
    (torch.log_softmax, F.log_softmax, torch.Tensor.log_softmax, torch.special.log_softmax),
    (operator.truediv, torch.div, torch.true_divide, "__truediv__", "__rdiv__", "divide"),
    (operator.matmul, torch.matmul, "__matmul__", "__rmatmul__", torch.linalg.matmul),
    (operator.itruediv, "__idiv__", "__itruediv__", "div_", "divide_"),
    (torch.pow, "__pow__", torch.Tensor.__rpow__, operator.pow),
    (torch.conv2d, F.conv2d, torch.ops.aten.conv2d.default),
    (torch.layer_norm, F.layer_norm, torch.ops.aten.native_layer_norm.default),
    (torch.cat, torch.concat, torch.concatenate),
    (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default),
    (torch.einsum, torch.functional.einsum),
    (operator.and_, "__and__", torch.bitwise_and),
], ids=lambda spellings: canonical_name(spellings[0]))  # fmt: skip
def test_every_spelling_has_one_name(spellings):
    assert {canonical_name(s) for s in spellings} == {canonical_name(spellings[0])}


def test_a_function_that_is_not_torchs_meets_no_rule_by_its_name():
    def softmax(x):
        return x

    assert canonical_name(softmax).endswith("softmax") and canonical_name(softmax) not in RULES
    assert lookup(canonical_name(softmax)).kind == "passthrough"


@pytest.mark.parametrize("kind, dtypes, expected", [
    ("half", (f32, f32, None), (bf16, bf16, None)),
    ("half", (bf16, f32), (None, bf16)),
    ("half", (f16, f16), (None, None)),  # half of the other type stays: a cast to it could overflow
    ("half", (f16, bf16), (bf16, None)),
    ("half", (f64, f64), (None, None)),
    ("half", (f64, f32), (None, None)),
    ("half", (f64, bf16), (None, f32)),
    ("half_if_mixed", (f32, f32), (None, None)),
    ("half_if_mixed", (bf16, f32), (None, bf16)),
    ("float", (bf16, None, f32), (f32, None, None)),
    ("float", (f64,), (None,)),
    ("banned", (f16, f16), (f32, f32)),
    ("promote", (bf16, f32), (f32, None)),
    ("promote", (f16, bf16), (f32, f32)),
    ("promote", (bf16, bf16), (None, None)),
    ("promote", (bf16, f64), (f32, None)),
    ("sequence_promote", (bf16, f32, bf16), (f32, None, f32)),
    ("match_self", (bf16, f32), (None, bf16)),
    ("match_self", (f32, f16), (None, f32)),
    ("match_self", (f32, f64), (None, None)),
    ("match_self", (f64, f32, bf16), (None, None, f32)),
    ("batch_norm", (f64, bf16, bf16), (None, None, None)),
    ("match_self", (None, f32), (None, None)),
    ("batch_norm", (bf16, f32, f32, f32, f32), (None,) * 5),
    ("batch_norm", (bf16, f32, f32, bf16, bf16), (None, None, None, f32, f32)),
    ("batch_norm", (f32, bf16, bf16, bf16, bf16), (bf16, None, None, None, None)),
    ("batch_norm", (f32, f32, f32, f32, f32), (None,) * 5),
    ("passthrough", (bf16, f32), (None, None)),
    ("half", (None, torch.int64, torch.bool), (None, None, None)),
])  # fmt: skip
def test_decide(kind, dtypes, expected):
    assert decide(Rule(kind, "for the test"), dtypes, bf16) == expected


@pytest.mark.parametrize("dtypes", [(f64, f32, bf16), (f64,), (torch.int64, f64), (torch.bool, torch.int32, None)], ids=str)
def test_no_rule_casts_an_integer_or_lowers_a_double(dtypes):
    for rule in (*RULES.values(), *map(consistent, RULES.values())):
        for dtype, target in zip(dtypes, decide(rule, dtypes, f16)):
            assert target is None or (dtype in FLOATS and dtype != f64), rule


def test_users_rules_are_entries_beside_the_table():
    name = canonical_name(torch.nn.functional.relu)
    rules = {**RULES, name: Rule("float", "registered by the user")}
    assert decide(lookup(name, rules), (bf16,), bf16) == (f32,) and decide(lookup(name), (bf16,), bf16) == (None,)


def test_widest():
    assert [widest(d) for d in [(), (None,), (f16, f16), (f16, bf16), (f16, f32)]] == [None, None, f16, f32, f32]
