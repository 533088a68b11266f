"""Which op computes in which dtype, and why: the table of a model, the explanation of a module, the override that changes it."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

import apexfx


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.gamma = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return x + self.gamma * self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.blocks(x).mean(1))


def report_of(model, *inputs, opt_level="O1", **options):
    model = apexfx.transform(model, opt_level=opt_level, inner="eager", **options)
    with torch.no_grad():
        model(*inputs)
    return model.report


@functools.cache
def net_report(**options):
    return report_of(Net(), torch.randn(2, 5, 64), **options)


def test_the_table_folds_equal_layers():
    assert_expected_inline("\n".join(line.rstrip() for line in str(net_report().ops()).splitlines()), """\
ops at O1: 20 compute: 13 in f32, 7 in bf16; 0 move or describe data
  ops  op            dtype    rule     module                    why
-----  ------------  -------  -------  ------------------------  ---------------------------------------------------------
    3  F.layer_norm  f32      float    blocks.{0..2}.norm        a variance in half cancels; statistics stay in float32
    6  torch.linear  bf16     half     blocks.{0..2}.mlp.{0, 2}  tensor cores multiply in half and accumulate in float32
    3  torch.gelu    f32      float    blocks.{0..2}.mlp.1       Apex computes it in float32: a difference of nearly equal
                                                                 exponentials
    3  operator.mul  f32      promote  blocks.{0..2}             promoted by float32 blocks.{0..2}.gamma (2.5 KiB of casts
                                                                 each)
    3  operator.add  f32      promote  blocks.{0..2}             follows its input
    1  mean          f32      float    model                     a long sum in half loses its small terms
    1  torch.linear  bf16     half     head                      tensor cores multiply in half and accumulate in float32""")


def test_the_explanation_of_a_module():
    assert_expected_inline("\n".join(line.rstrip() for line in str(net_report().explain("blocks.1.mlp")).splitlines()), """\
blocks.1.mlp at O1: 3 ops, 2 in bf16, 1 in f32

torch.linear in bf16, blocks.1.mlp.0 (test_ops.py:25)
    half: tensor cores multiply in half and accumulate in float32
    of layer_norm_1 f32 -> bf16 (1.2 KiB), blocks.1.mlp.0.weight f32 -> bf16 (16.0 KiB), blocks.1.mlp.0.bias f32 -> bf16 (256 B)
    precision={'blocks.1.mlp.0': 'float32'} changes it

torch.gelu in f32, blocks.1.mlp.1 (test_ops.py:25)
    float: Apex computes it in float32: a difference of nearly equal exponentials
    of input_5 bf16 -> f32 (5.0 KiB)
    precision={'blocks.1.mlp.1': 'half'} changes it

torch.linear in bf16, blocks.1.mlp.2 (test_ops.py:25)
    half: tensor cores multiply in half and accumulate in float32
    of input_6 f32 -> bf16 (2.5 KiB), blocks.1.mlp.2.weight f32 -> bf16 (16.0 KiB), blocks.1.mlp.2.bias f32 -> bf16 (128 B)
    precision={'blocks.1.mlp.2': 'float32'} changes it""")


def test_a_promotion_names_its_cause_and_what_it_costs():
    explained = net_report().explain("mul")
    assert "precision={'mul': 'half'} changes it, and 2 other ops" in str(explained)
    op = explained[0]
    assert op.promoted_by == ("blocks.0.gamma",) and op.dtype == "f32" and op.module == "blocks.0"
    assert op.reason == "promoted by float32 blocks.0.gamma (2.5 KiB of casts)"  # one cast of 2 x 5 x 64 elements
    cast = op.operands[1]
    assert (cast.cast_from, cast.dtype, cast.cast_bytes) == ("bf16", "f32", 2 * 5 * 64 * 4) and op.cast_bytes == cast.cast_bytes


@pytest.mark.long
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_override_of_each_op_changes_it(level):
    explained = net_report(opt_level=level).explain("blocks.0")
    assert len(explained) == 6
    overrides = [explained.override(op) for op in explained]
    together = {key: dtype for override in overrides for key, dtype in override.items()}
    changed = report_of(Net(1), torch.randn(2, 5, 64), opt_level=level, precision=together).ops()
    for op, override in zip(explained, overrides):
        [(key, dtype)] = override.items()
        [now] = [o for o in changed if (o.op, o.module) == (op.op, op.module)]
        assert now.reason == f"override precision[{key!r}]"
        assert now.dtype == {"float32": "f32", "half": "bf16"}[dtype] != op.dtype


def test_a_batch_norm_is_overridden_by_its_path_whatever_stands_for_it():
    """It counts its batches in place, which no override changes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    explained = report_of(model, torch.randn(2, 3, 8, 8), opt_level="O2").explain("1")
    assert [explained.override(op) for op in explained] == [{}, {"1": "float32"}]
    changed = report_of(model, torch.randn(2, 3, 8, 8), opt_level="O2", precision={"1": "float32"}).explain("batch_norm")
    assert [(op.module, op.dtype) for op in changed] == [("1", "f32"), ("3", "bf16")]


class Kinds(nn.Module):
    """An op for each way in which a dtype is decided."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 8)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).amax((2, 3))
        by_hand = self.fc.weight.float() @ x.float().T
        with torch.autocast("cpu", enabled=False):
            off = torch.softmax(x, 1)
        inside = checkpoint(self.fc, x, use_reentrant=False)
        x.add_(1)
        return by_hand.T.sum() + off.sum(), inside, x.argmax(1)


def test_each_way_in_which_a_dtype_is_decided():
    report = report_of(Kinds(), torch.randn(2, 3, 8, 8))
    reasons = {op.name: (op.dtype, op.rule, op.reason) for op in report.ops()}
    assert reasons["batch_norm"] == ("bf16", "batch_norm",
                                     "half activations with float32 parameters and statistics: the kernel takes both")
    assert reasons["relu"] == ("bf16", "passthrough", "follows batch_norm of norm, bfloat16")
    assert reasons["matmul"] == ("f32", "passthrough", "the user's code made every operand float32")
    assert reasons["softmax"] == ("bf16", "promote", "inside autocast(enabled=False): only what would not fit together is cast")
    assert reasons["add_"][:2] == ("bf16", "match_self")
    assert reasons["argmax"] == ("bf16", "passthrough", "follows amax, bfloat16")
    [inside] = [op for op in report.ops() if op.name == "linear"]
    assert "." in inside.node and inside.module == "fc" and inside.rule == "half"


def test_what_moves_data_is_no_op_that_computes_and_has_no_override():
    explained = report_of(Kinds(), torch.randn(2, 3, 8, 8)).explain("model")
    views = [op for op in explained if not op.computes]
    assert {op.name for op in views} >= {"float", "getitem"} and all(explained.override(op) == {} for op in views)


def test_no_override_is_advised_of_what_ends_a_step(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters()), dtype=torch.float16, inner="eager",
                             precision={"0": "float32", "mul": "half"})
    step(torch.randn(4, 8), torch.randint(4, (4,)))
    assert step.report.uncovered() == ["precision['mul'] covers no module path and no op"]  # the product with the loss scale
    with pytest.raises(RuntimeError, match="that of a whole training step; its stages are forward and step"):
        step.print_readable(stage="backward")
    assert "does not reach" not in caplog.text + str(step.report)
    explained = str(step.report.explain("loss"))
    assert explained.startswith("loss at O1: 1 op, 1 in f32\n")
    assert "F.cross_entropy in f32" in explained and "apply_gradients" not in explained and "getitem" not in explained
    assert [op.op for op in step.report.explain("2.weight") if op.computes] == ["torch.linear"]
    assert explained.splitlines()[-1].startswith("and ") and explained.endswith("compute nothing: they move or describe data")


def test_many_operands_are_cut():
    class Sum(nn.Module):
        def forward(self, *xs):
            return torch.cat(xs).exp()

    line = next(line for line in str(report_of(Sum(), *(torch.randn(2) for _ in range(12))).explain("cat")).splitlines()
                if line.startswith("    of "))
    assert line.count(" f32") == 8 and line.endswith(", and 4 more")


def test_the_loss_of_a_step_is_outside_of_the_model():
    model = Net(1)
    step = apexfx.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", inner="eager")
    step(torch.randn(2, 5, 64), torch.randint(10, (2,)))
    [loss] = [op for op in step.report.explain("loss") if op.name == "cross_entropy"]
    assert loss.dtype == "f32" and loss.where == "loss" and "model" in loss.reason
    assert {op.dtype for op in step.report.explain("blocks")} == {"bf16"}


def test_without_the_pass_no_rule_is_claimed():
    assert {(op.rule, op.dtype) for op in net_report(skip=("precision",)).ops()} == {("", "f32")}


def test_a_module_and_a_parameter_of_two_names_answer_to_both(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10, bias=False)
            self.again, self.head.weight = self.body, self.embedding.weight

        def forward(self, x):
            return self.head(self.again(self.embedding(x)))

    model = apexfx.transform(Tied(), inner="eager")
    model(torch.randint(10, (4,)))
    model.report.to_json(tmp_path / "report.json")
    for report in (model.report, apexfx.Report.load(tmp_path / "report.json")):
        for one, other in (("body", "again"), ("embedding.weight", "head.weight")):
            assert list(report.explain(one)) == list(report.explain(other))
        assert [op.op for op in report.explain("head.weight") if op.computes] == ["torch.linear"]


def test_complex_numbers_have_a_dtype():
    model = apexfx.transform(nn.Linear(2, 2, dtype=torch.complex64), opt_level="O0", inner="eager")
    model(torch.ones(1, 2, dtype=torch.complex64))
    assert "1 compute: 1 in complex64; " in model.report.ops().summary
    assert list(model.report.explain("")) == list(model.report.explain("model")) == list(model.report.ops())


def test_an_unknown_module_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"explain\('block.0.mlp'\) .* did you mean 'blocks.0.mlp'\?"):
        net_report().explain("block.0.mlp")
    with pytest.raises(RuntimeError, match="there is no graph yet"):
        apexfx.transform(Net(), inner="eager").report.ops()
