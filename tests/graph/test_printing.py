"""Printed graphs run: the text of every stage, executed, computes what the graph computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx._torch_compilers import aot_autograd
from apexfx.compiler import capture
from apexfx.graph import printing
from apexfx.graph.nodes import set_value


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        h = F.relu(self.norm(self.conv(x))).mean((2, 3))
        scale = torch.arange(4, device=x.device, dtype=torch.float32)
        return self.head(h * scale).clamp(max=float("inf")), h[:, None, 1:3]


class ConvNetOfOneOutput(ConvNet):
    def forward(self, image):
        return super().forward(image)[0]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def block(self, x):
        return checkpoint(lambda y: self.second(torch.tanh(y)), self.first(x), use_reentrant=False)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False).sin()


def run_text(text, inputs):
    namespace = {}
    exec(compile(text, "<printed>", "exec"), namespace)
    return namespace["GraphModule"]()(*inputs)


def collect(model, *inputs, backward=True):
    """Return {stage: (graph module, text, real inputs, real outputs)} of one training step of `model`."""
    seen = {}

    def keep(stage, gm):
        text = printing.to_python(gm, header=f"{stage} graph")

        def call(*args):
            copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            outputs = gm(*args)
            seen[stage] = (gm, text, copies, outputs)
            return outputs

        return call

    def boxed(stage):
        def compiler(gm, _):
            function = keep(stage, gm)

            def call(args):
                taken = list(args)
                args.clear()
                return function(*taken)

            call._boxed_call = True
            return call

        return compiler

    def backend(gm, example_inputs):
        capture.annotate(gm, example_inputs)
        printed = keep("dynamo", gm)
        compiled = aot_autograd(fw_compiler=boxed("forward"), bw_compiler=boxed("backward"))(gm, list(example_inputs))

        def run(*args):
            with torch.no_grad():
                printed(*[a.detach().clone() for a in args])
            return compiled(*args)

        return run

    result = torch.compile(model, backend=backend)(*inputs)
    if backward:
        leaves = result if isinstance(result, tuple) else (result,)
        sum(leaf.sum() for leaf in leaves).backward()
    return seen


@pytest.mark.parametrize("model, shape", [(ConvNet(), (2, 3, 6, 6)), (Checkpointed(), (4, 6))],
                         ids=["conv net", "nested checkpoints"])
def test_the_text_of_every_stage_computes_what_its_graph_does(model, shape):
    seen = collect(model, torch.randn(shape))
    assert set(seen) == {"dynamo", "forward", "backward"}
    for stage, (_, text, inputs, expected) in seen.items():
        outputs = run_text(text, [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs])
        expected = expected if isinstance(expected, (tuple, list)) else (expected,)
        assert len(outputs) == len(expected), stage
        for got, wanted in zip(outputs, expected):
            if isinstance(wanted, torch.Tensor):
                assert torch.equal(got, wanted), stage
            else:
                assert got == wanted, stage


def test_text_shows_shapes_dtypes_and_the_user_s_source():
    gm, text, *_ = collect(ConvNet(), torch.randn(2, 3, 6, 6), backward=False)["dynamo"]
    assert text.startswith(f"# dynamo graph: {len(gm.graph.nodes)} nodes\n")
    assert '"f32[2, 4, 4, 4]" = torch.conv2d(' in text
    assert "code: h = F.relu(self.norm(self.conv(x))).mean((2, 3))" in text
    assert max(map(len, text.splitlines())) < 1000


def test_nested_bodies_are_nested_classes():
    _, text, *_ = collect(Checkpointed(), torch.randn(4, 6), backward=False)["dynamo"]
    assert text.count("class ") == 3
    assert text.count(" = apexfx.graph.printing.as_graph_module(self.WrapBody") == 2


def test_tensors_and_functions_the_graph_holds_are_written_out():
    graph = fx.Graph()
    x = graph.placeholder("x")
    small, large = graph.get_attr("held.small"), graph.get_attr("large")
    graph.output(graph.call_function(torch.add, (graph.call_function(torch.mul, (x, small)), large)))
    root = nn.Module()
    root.held = nn.Module()
    root.held.register_buffer("small", torch.tensor([1.5, float("inf"), -2.0], dtype=torch.bfloat16))
    root.register_buffer("large", torch.zeros(65, 3))
    gm = fx.GraphModule(root, graph)
    text = printing.to_python(gm)
    assert "torch.tensor([1.5, inf, -2.0], dtype=torch.bfloat16, device='cpu')" in text
    assert "torch.empty([65, 3], dtype=torch.float32, device='cpu')  # values not printed" in text
    assert run_text(text, [torch.ones(65, 3)]).shape == (65, 3)
    assert torch.equal(run_text(text.replace("torch.empty", "torch.zeros"), [torch.ones(65, 3)]), gm(torch.ones(65, 3)))


def test_a_function_of_the_user_is_imported():
    graph = fx.Graph()
    graph.output(graph.call_function(printing.short_dtype, (torch.float16,)))
    text = printing.to_python(fx.GraphModule(nn.Module(), graph))
    assert run_text(text, []) == "f16"


def test_comparable_lines_ignore_what_every_edit_changes():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.relu, (graph.call_function(torch.neg, (x,)),)))
    gm = fx.GraphModule(nn.Module(), graph)
    first, second = (printing.to_python(gm, header=h) for h in ("graph after a (1.0 ms)", "graph after b (2.0 ms)"))
    assert first != second
    assert printing.comparable(first) == printing.comparable(second)
    assert not any(line.endswith("= None") for line in first.splitlines())
    assert any("torch.relu(neg)" in line for line in printing.comparable(first))


def test_no_line_ends_in_blanks():
    for _, text, _, _ in collect(ConvNet(), torch.randn(2, 3, 6, 6)).values():
        assert "\n\n" in text and not re.search(r"[ \t]$", text, re.MULTILINE)


def test_a_group_s_long_name_is_short_where_it_is_read_and_whole_where_it_runs():
    name = "4a2ad14e7181d5235b64cf37fcd715cb5ce5c8e7"
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", name)))
    text = printing.to_python(fx.GraphModule(nn.Module(), graph))
    assert f"'{name}'" in text
    assert any("'sum', '4a2ad14')" in line for line in printing.comparable(text))
    assert not any(name in line for line in printing.comparable(text))


class TestFormatGraph(TestCase):
    def graph(self):
        graph = fx.Graph()
        x = graph.placeholder("x")
        set_value(x, torch.empty(2, 3))
        half = graph.call_method("to", (x, torch.bfloat16))
        set_value(half, torch.empty(2, 3, dtype=torch.bfloat16))
        total = graph.call_function(torch.sum, (half,), {"dim": (1,), "dtype": torch.float32})
        set_value(total, torch.empty(2))
        graph.output((total, half))
        return fx.GraphModule(nn.Module(), graph)

    def test_one_numbered_line_a_node(self):
        self.assertExpectedInline(printing.format_graph(self.graph()), """\
in   %x: f32[2,3]
%0 = to(%x, bfloat16) -> bf16[2,3]
%1 = torch.sum(%0, dim=[1], dtype=float32) -> f32[2]
out  [%1, %0]""")

    def test_only_keeps_matching_lines(self):
        self.assertExpectedInline(printing.format_graph(self.graph(), only="sum"), """\
%1 = torch.sum(%0, dim=[1], dtype=float32) -> f32[2]""")


class TestNames:
    """Printed graphs speak of the user's parameters and inputs."""

    def code(self, model, *inputs, **where):
        model = apexfx.transform(model, opt_level="O1", dtype=torch.bfloat16, inner="eager")
        result = model(*inputs)
        result.sum().backward()
        return model.report.code(**where)

    def test_forward(self):
        text = self.code(ConvNetOfOneOutput(), torch.randn(2, 3, 6, 6))
        cast = 'conv_weight_bf16: "bf16[4, 3, 3, 3]" = torch.ops.aten._to_copy.default(conv_weight, dtype = torch.bfloat16)'
        assert cast in text
        assert re.search(r"torch\.conv2d\(image_bf16, conv_weight_bf16, conv_bias_bf16\b", text)
        assert not re.search(r"\b[Ll]_(self|image)_|= None$", text, re.MULTILINE)

    def test_backward_and_lowered_forward(self):
        backward = self.code(ConvNetOfOneOutput(), torch.randn(2, 3, 6, 6), stage="backward")
        assert "# gradient of conv.weight\n" in backward and "# gradient of output 0\n" in backward
        assert "norm_weight: " in backward and "primals_" not in backward and "AOTOutput" not in backward
        lowered = self.code(ConvNetOfOneOutput(), torch.randn(2, 3, 6, 6), after="lowered")
        assert "head_bias: " in lowered and "primals_" not in lowered and "# saved for backward\n" in lowered

    def test_a_module_of_torch_s_own(self):
        text = self.code(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4))
        assert '_0_weight: "f32[3, 4]"' in text and 'inputs_0: "f32[2, 4]"' in text
        assert "named_inputs" not in text and "  # File" not in text

    def test_batch_norms_show_the_users_line(self):
        text = self.code(ConvNetOfOneOutput(), torch.randn(2, 3, 6, 6), stage="backward") + self.code(
            ConvNetOfOneOutput(), torch.randn(2, 3, 6, 6))
        assert "batch_norm" in text and "test_printing.py:" in text
        assert "traceable.py" not in text and "runtime.py" not in text

    def test_layers_of_the_package_show_the_users_line(self):
        model = nn.Sequential(apexfx.normalization.FusedLayerNorm(4), apexfx.parallel.SyncBatchNorm(4))
        step = apexfx.train_step(model, objective=lambda m, x: apexfx.Mean(m(x).square().sum(), 8), inner="eager",
                                 optimizer=torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0")
        step(torch.randn(2, 4))
        files = {line.partition(":")[0] for op in step.report.ops() for line in [op.source] if line}
        assert files == {"test_printing.py"}, files

    def test_casts_at_the_entry_have_no_line_of_their_own(self):
        compiled = torch.compile(nn.Sequential(nn.Linear(4, 3)), backend="apex", options={"opt_level": "O2", "inner": "eager"})
        compiled(torch.randn(2, 4))
        text = apexfx.last_report().code()
        assert "_0_weight_bf16" in text and "No stacktrace" not in text

    def test_keywords_and_paths(self, monkeypatch):
        class Keywords(nn.Linear):
            def forward(self, **kwargs):
                return super().forward(kwargs["image"])

        monkeypatch.chdir(Path(__file__).parent)
        model = apexfx.transform(Keywords(4, 3), opt_level="O0", inner="eager")
        model(image=torch.randn(2, 4))
        assert 'image: "f32[2, 4]",\n' in model.report.code()
        assert re.search(r"# File: test_printing\.py:\d+ in forward, code: return super", model.report.code())

    def test_an_input_that_shares_its_name_with_a_value(self):
        class Shadow(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 4))

            def forward(self, x, device):
                first = x
                x = x @ self.weight
                weight = self.weight + device
                return x + weight @ first

        x, device = torch.randn(4, 4), torch.randn(4)
        gm, text, inputs, expected = collect(Shadow(), x, device)["dynamo"]
        assert torch.equal(run_text(text, inputs)[0], expected[0])
        assert 'x_input: "f32[4, 4]"' in text and 'weight_param: "f32[4, 4]"' in text and 'device_input: "f32[4]"' in text
