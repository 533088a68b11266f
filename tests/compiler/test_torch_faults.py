"""The register of torch's faults: each small program is wrong on plain torch, and the test of it fails on the day it is not.

Then the row says in which version it is gone; row, and what it names, go once no supported version of torch has the fault
(docs/torch_versions.md). One fault has no program here: Dynamo fails at the exception table of `compiled_model.py` _run, which
dynamo_skip keeps it off, and captures small functions like it; `test_transform.py` runs a transformed model under an outer
torch.compile.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import default_partition
from torch.utils.checkpoint import checkpoint

import apexfx
from apexfx._torch import fake_process_group
from tests.small_models import Model

ROWS: list[Fault] = []


@dataclass(frozen=True)
class Fault:
    """A fault of torch's.

    Attributes:
        what: is wrong.
        issues: of pytorch/pytorch, or pull requests, by number.
        met: who met it, where no issue says so: programs, or users.
        gone: the first minor version of torch without it; "" for none yet.
        ours: what there is here because of it.
        is_there: a program on plain torch; returns whether it is wrong.
        slow: whether it compiles with Inductor.
    """

    what: str
    issues: tuple[int, ...]
    met: str
    gone: str
    ours: str
    is_there: Callable[[], bool]
    slow: bool


def fault(what: str, *issues: int, ours: str, met: str = "", gone: str = "", slow: bool = False) -> Callable[..., Any]:
    def register(is_there: Callable[[], bool]) -> Callable[[], bool]:
        ROWS.append(Fault(what, issues, met, gone, ours, is_there, slow))
        return is_there

    return register


def compiled(function: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def differ(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], backend: str = "aot_eager") -> bool:
    """Return whether a compiled function returns, or leaves in its arguments, other numbers than in eager torch."""
    runs = []
    for run in (function, compiled(function, backend)):
        torch.manual_seed(0)
        args = make()
        out = run(*args)
        runs.append([x.detach().clone() for x in (*args, *(out if isinstance(out, tuple) else (out,))) if isinstance(x, Tensor)])
    return any(not torch.allclose(one, other, equal_nan=True) for one, other in zip(*runs, strict=True))


def raises(text: str, function: Callable[[], Any]) -> bool:
    """Return whether a function raises an error with that text."""
    try:
        function()
    except Exception as error:  # of several classes
        return text in str(error)
    return False


def unpatched(program: str) -> str:
    """Return what a program prints in a process that has no patch of ours."""
    run = subprocess.run([sys.executable, "-c", f"import torch\n{program}"], capture_output=True, text=True, check=False)
    return run.stdout + run.stderr


def is_stale(forward: Callable[..., Any], before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether a call goes on with what a module held in the first."""
    module = Model(forward, layer=nn.Linear(2, 2), other=nn.Linear(2, 2))
    run, x = compiled(module, "eager"), torch.ones(2)
    for held in (before, after):
        for name, make in held.items():
            module.__dict__[name] = make(module)
        now = run(x)
    return not torch.equal(now, module(x))


# ---- Dynamo: what is captured -----------------------------------------------------------------------------------------------


@fault("a number of Python's random is handed on as float64 where it was captured as float32", 198187, slow=True,
       ours="compiler/torch_faults.py widen_drawn_numbers")
def drawn_numbers() -> bool:
    def scaled(x):
        return x * random.uniform(0, 1)

    numbers = []
    for run in (scaled, compiled(scaled, "inductor")):
        random.seed(0)
        numbers.append(run(torch.ones(())).item())
    return abs(numbers[0] - numbers[1]) > 1e-6


@fault("a random.Random of the program's is drawn from once, while it is captured",
       145445, 196437, ours="compiler/refusals.py check_python_objects")
def own_random_objects() -> bool:
    numbers = random.Random(0)
    run = compiled(lambda x: x * numbers.random(), "eager")
    return torch.equal(run(torch.ones(1)), run(torch.ones(1)))


@fault("an index that is a tensor of no dimension is a number that no graph knows", gone="2.14", slow=True,
       met="diffusion by one time step, a bank of features",
       ours="_torch_compilers.py _select_numbers, _read_by_numbers, _write_by_numbers")
def indices_of_no_dimension() -> bool:
    return "data-dependent" in unpatched("torch.compile(lambda bank, k: bank[k] * 1, backend='aot_eager', fullgraph=True)("
                                         "torch.ones(5, 4), torch.tensor(2))")


@fault("what a method of an object that is made while it is captured writes into a list of its closure is lost", 197896,
       ours="_torch_compilers.py _bind_containers")
def lists_in_closures() -> bool:
    kept: list[Tensor] = []

    class Recorder:
        def keep(self, x):
            kept.append(x)

    compiled(lambda x: (Recorder().keep(x), x + 1)[1], "eager")(torch.ones(2))
    return not kept


@fault("torch.autograd.grad takes no generator, and no rows that its backward alone counts",
       met="MAML over model.parameters(), the mask tokens of BERT, wav2vec2 and MAE", ours="_torch_compilers.py _trace_gradients")
def derivatives_that_are_not_captured() -> bool:
    def by_generator(w):
        return torch.autograd.grad(w.sum(), iter([w]))

    def counts_rows(w):
        h = 1 * torch.ones(3, 2)
        h[h.sum(1) > 0] = w
        return torch.autograd.grad(h.sum(), [w])

    fails = 0
    for function in (by_generator, counts_rows):
        try:
            with torch._dynamo.config.patch(trace_autograd_ops=True):
                compiled(function, "eager")(torch.ones(2, requires_grad=True))
        except torch._dynamo.exc.TorchDynamoException:
            fails += 1
    return fails == 2


@fault("an object that is found by a local and by a global is not guarded to be one",
       met="models with an Enum for a mode", ours="_torch.py guard_shared_objects")
def shared_objects() -> bool:
    return is_stale(lambda m, x: x * KINDS[m.kind], {"kind": lambda m: FIRST}, {"kind": lambda m: SECOND})


class Kind:
    pass


FIRST, SECOND = Kind(), Kind()
KINDS = {FIRST: 2.0, SECOND: 3.0}


@fault("what later calls of a nested_compile_region return has no history where the graph holds its backward", 178777,
       ours="_torch_compilers.py _inline_region")
def histories_of_regions() -> bool:
    region = torch.compiler.nested_compile_region(lambda x: x.sin())

    def forward(x):
        y = region(region(region(x)))
        return torch.autograd.grad(y.sum(), x, allow_unused=True)[0] is None

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        return compiled(forward)(torch.ones(2, requires_grad=True))


@fault("what an object is at a place, and what is put in front of a registered module, is not guarded", 111562, 196360, 197859,
       ours='docs/train_step.md, "Not seen"')
def objects_at_places() -> bool:
    stale = (is_stale(lambda m, x: x * (2 if m.one is m.two else 3), {"one": lambda m: m.other, "two": lambda m: m.layer},
                      {"one": lambda m: m.layer}),
             is_stale(lambda m, x: x * (2 if m.one is m.two else 3), {"one": lambda m: object(), "two": lambda m: m.one},
                      {"one": lambda m: object()}),
             is_stale(lambda m, x: m.layer(x), {}, {"layer": lambda m: m.other}))
    return all(stale)


class Doubled(torch.autograd.Function):
    """The gradient is not that of its forward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@fault("the backward of a torch.autograd.Function is lost under torch.func", 193279, 129845,
       ours="compiler/torch_faults.py _check_functions")
def functions_under_transforms() -> bool:
    return differ(torch.func.grad(lambda x: Doubled.apply(x).sum()), lambda: (torch.ones(2),), "eager")


@fault("a batch norm of momentum=None reads its counter on the host",
       met="torch.optim.swa_utils.update_bn", ours="compiler/dynamo_batch_norm.py, its half of momentum")
def cumulative_batch_norm() -> bool:
    return raises("data-dependent", lambda: compiled(nn.BatchNorm1d(2, momentum=None), "eager")(torch.randn(3, 2)))


@fault("a GRU is captured step by step",
       met="speech, trajectories", ours="compiler/dynamo_layers.py and ops/recurrent.py, but for LSTM")
def unrolled_gru() -> bool:
    nodes = []

    def count(gm, _):
        nodes.append(len(gm.graph.nodes))
        return gm

    for length in (2, 4):
        with torch._dynamo.config.patch(allow_rnn=True):
            compiled(nn.GRU(2, 2), aot_autograd(fw_compiler=count), dynamic=False)(torch.randn(length, 1, 2))
    return nodes[0] != nodes[1]


@fault("a float that one capture made a constant is one in later captures of other functions, too",
       met="temperatures that are annealed, of two models in a process", ours="_torch_compilers.py forget_specialized_floats")
def constants_of_another_function() -> bool:
    def graphs_of(function: Callable[..., Any]) -> int:
        before = counters["stats"]["unique_graphs"]
        run = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
        for number in (0.5, 0.6, 0.7):
            run(torch.ones(2), number)
        return counters["stats"]["unique_graphs"] - before

    torch.compiler.reset()
    graphs_of(lambda x, number: torch.full((2,), number) * x)
    return graphs_of(lambda x, number: x * number) > 1


@fault("a float that an op takes, or a forward keeps, is that of an earlier graph by the cache of AOTAutograd", 197889,
       slow=True, ours="compiler/torch_faults.py cached_with_guards")
def kept_floats() -> bool:
    def forward(m, x):
        m.factor = m.factor + 0.25
        return x * m.factor

    run = compiled(Model(forward, factor=1.0), "inductor")
    return [run(torch.ones(())).item() for _ in range(5)] != [1.25, 1.5, 1.75, 2.0, 2.25]


@fault("a float that bounds a clamp is a constant of a graph for each value",
       met="the clip range of PPO, which Stable-Baselines3 anneals", ours="_torch_compilers.py tensorify_clamps")
def bounds_of_clamps() -> bool:
    run, before = compiled(lambda x, number: x.clamp(-number, number)), counters["stats"]["unique_graphs"]
    for number in (0.5, 0.6, 0.7):
        run(torch.ones(2), number)
    return counters["stats"]["unique_graphs"] - before > 2


@fault("a collective that eager does not differentiate is differentiated",
       met="Barlow Twins over ranks", ours="_torch.py is_remapped_collective")
def differentiated_collectives() -> bool:
    def gathered(x):
        out = [torch.zeros(2), torch.zeros(2)]
        dist.all_gather(out, x * 1)
        return out[0]

    x = torch.ones(2, requires_grad=True)
    with fake_process_group(2):
        return compiled(gathered)(x).requires_grad and not gathered(x).requires_grad


@fault("a forward derivative that is not captured switches autograd off once its frames are closed", gone="2.14", slow=True,
       met="a notebook with a jvp through a layer norm", ours="_torch.py close_frames")
def autograd_off_behind_frames() -> bool:
    return unpatched("import gc\n"
                     "w = torch.ones(2, requires_grad=True)\n"
                     "norm = lambda x: torch.nn.functional.layer_norm(x, (2,), w)\n"
                     "gradient = lambda x: torch.autograd.grad(torch.func.jvp(norm, (x,), (x,))[1].sum(), w)\n"
                     "torch._dynamo.config.trace_autograd_ops = True\n"
                     "try: torch.compile(gradient, backend='aot_eager', fullgraph=True)(torch.ones(2, 2))\n"
                     "except Exception: pass\n"
                     "gc.collect()\n"
                     "print('records', (w * 1).requires_grad)").endswith("records False\n")


# ---- AOTAutograd: what is lost ----------------------------------------------------------------------------------------------


@fault("what is written into a 0-dim float64 input is lost", gone="2.14",
       met="RunningMeanStd of reinforcement learning, whose count is one", ours="compiler/torch_faults.py _keep_scalar_writes, "
       "_torch_compilers.py without_tensorify")
def scalar_writes() -> bool:
    def forward(t, x):
        t.mul_(0.5)
        return x * 2

    return differ(forward, lambda: (torch.tensor(1.0, dtype=torch.float64), torch.ones(2)))


@fault("a write through x.unfold() with gaps sets what lies in them to 0", 198102,
       ours="compiler/torch_faults.py check_lowered_rightly")
def windows_with_gaps() -> bool:
    return differ(lambda x: x.unfold(0, 2, 3).add_(1).sum(), lambda: (torch.ones(8),))


@fault("x.data *= y puts into x the memory that it has, which is not compiled", ours="compiler/torch_faults.py keep_own_memory",
       met="weights that are masked in the forward, as those of PixelCNN")
def data_written_by_an_operator() -> bool:
    def masked(x, y):
        x.data *= y
        return x * 2

    run = lambda: compiled(masked)(torch.ones(2, requires_grad=True), torch.ones(2))  # noqa: E731
    return raises("set_", run) or raises("frozen storage", run)


@fault("torch.linalg.pinv of a complex matrix", 198118, 197084, ours="compiler/torch_faults.py check_lowered_rightly")
def complex_pinv() -> bool:
    return differ(torch.linalg.pinv, lambda: (torch.randn(3, 2, dtype=torch.complex128),))


@fault("multilabel_margin_loss counts targets behind the first -1", 141017, 185464, gone="2.14",
       ours="compiler/torch_faults.py check_lowered_rightly")
def padded_labels() -> bool:
    return differ(F.multilabel_margin_loss, lambda: (torch.tensor([[1.0, -1.0, 0.5]]), torch.tensor([[0, -1, -1]])))


@fault("a write through a dropout that drops nothing is lost", 115249, 195422, gone="2.14",
       ours="compiler/torch_faults.py _check_dropouts")
def dropouts_of_nothing() -> bool:
    return differ(lambda x: F.dropout(x, 0.5, False).add_(1).sum(), lambda: (torch.ones(2),))


@fault("a backward computes again from an input what the forward has written since", 197039,
       ours="compiler/torch_faults.py save_before_writes")
def recomputed_from_what_was_written() -> bool:
    def forward(x, w, memory):
        read = (x @ w * memory.exp()).tanh().sum()
        with torch.no_grad():
            memory.mul_(0.5)
        return read

    def gradient(run):
        w = torch.ones(2, 2, requires_grad=True)
        run(torch.full((2, 2), 0.1), w, torch.ones(2, 2)).backward()
        return w.grad

    return not torch.allclose(gradient(compiled(forward)), gradient(forward))


@fault("an LSTM of oneDNN cannot be saved for its backward", 158007, ours="compiler/torch_faults.py _traceable_rnn")
def lstm_of_one_dnn() -> bool:
    with torch._dynamo.config.patch(allow_rnn=True):
        return raises("vc_check", lambda: compiled(nn.LSTM(2, 2))(torch.randn(3, 1, 2))[0].sum().backward())


@fault("attention that drops nothing is refused in a checkpoint of a graph that holds its backward",
       gone="2.14", met="transformers whose blocks are checkpointed", ours="_torch_compilers.py refuse_checkpoints_of")
def checkpointed_attention() -> bool:
    def gradient(x):
        out = checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)
        return torch.autograd.grad(out.sum(), x)[0]

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        return raises("does not support RNG ops", lambda: compiled(gradient)(torch.randn(1, 1, 3, 4, requires_grad=True)))


@fault("the result of a batch norm of another layout is laid out otherwise than its fake one",
       met="point clouds", ours="compiler/inner_compilers.py copy_where_no_view_is")
def layout_of_batch_norm() -> bool:
    def forward(x, w):
        return F.linear(F.batch_norm(x.mT, None, None, training=True).mT, w).view(3, 6, 2, 4)

    args = torch.randn(3, 6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    forward(*args)
    return raises("view size is not compatible", lambda: compiled(forward)(*args))


@fault("the result of an op of several that nothing reads is taken for one tensor",
       met="an auxiliary head behind a dropout, which a forward leaves out", ours="compiler/inner_compilers.py _partition")
def unread_results() -> bool:
    def forward(x):
        F.dropout(x, 0.5)
        return x * 2

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=default_partition)
    with torch._inductor.config.patch(fallback_random=True):
        return raises("to be a tensor", lambda: compiled(forward, backend)(torch.ones(2, requires_grad=True)))


# ---- autograd and ops, in eager torch, too ----------------------------------------------------------------------------------


def third_derivative(norm: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    x, v, w = torch.randn(3, 4, 5, dtype=torch.float64).unbind()
    x.requires_grad_()
    y = (norm(x) * w).sum()
    for _ in range(3):
        y = (torch.autograd.grad(y, x, create_graph=True)[0] * v).sum()
    return y.detach()


def normalized(x: Tensor, dim: int) -> Tensor:
    centered = x - x.mean(dim, keepdim=True)
    return centered * (centered.square().mean(dim, keepdim=True) + 1e-5).rsqrt()


@fault("the third derivative of a layer norm takes its statistics for constants", 175754,
       ours="train_step/derivatives.py compose_norms, its layer norm")
def third_derivative_of_layer_norm() -> bool:
    return not torch.allclose(third_derivative(lambda x: F.layer_norm(x, x.shape[-1:])),
                              third_derivative(lambda x: normalized(x, -1)))


@fault("the third derivative of a batch norm takes its statistics for constants", 186256, gone="2.14",
       ours="train_step/derivatives.py compose_norms, its batch and instance norm")
def third_derivative_of_batch_norm() -> bool:
    def wrong():
        return not torch.allclose(third_derivative(lambda x: F.batch_norm(x, None, None, training=True)),
                                  third_derivative(lambda x: normalized(x, 0)))

    return not raises("does not support 3rd+ order derivatives", wrong) and wrong()


@fault("the gradient of a forward derivative of a determinant is wrong", 192540,
       ours="train_step/derivatives.py _WRONG_BEHIND_JVP")
def gradient_of_jvp_of_det() -> bool:
    torch.manual_seed(0)
    a, v = torch.randn(2, 3, 3, dtype=torch.float64).unbind()

    def by(derivative):
        return torch.func.grad(lambda x: derivative(torch.linalg.det, x))(a)

    forward = by(lambda f, x: torch.func.jvp(f, (x,), (v,))[1])
    return not torch.allclose(forward, by(lambda f, x: (torch.func.grad(f)(x) * v).sum()))


@fault("SGD(fused=True) updates half parameters wrongly on the CPU", 191763, gone="2.14",
       ours="train_step/parameters.py, amp/optimizers.py _warn_of_half_sgd")
def fused_sgd_of_halves() -> bool:
    def updated(**options):
        p = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5, **options)
        p.grad = torch.ones_like(p)
        optimizer.step()
        return p.detach()

    return not torch.equal(updated(fused=True), updated(fused=False))


@fault("avg_pool3d has no half kernel on the CPU", met="video models", ours='precision/rules.py, "pooling"')
def half_avg_pool3d() -> bool:
    return raises("not implemented", lambda: F.avg_pool3d(torch.ones(1, 1, 2, 2, 2, dtype=torch.bfloat16), 2))


@fault("nn.SyncBatchNorm refuses tensors of the CPU",
       met="ranks without a GPU", ours="compiler/dynamo_batch_norm.py SyncBatchNorm, on the CPU alone")
def synchronized_batch_norm_on_the_cpu() -> bool:
    with fake_process_group(2):
        return raises("expected input tensor to be on GPU", lambda: nn.SyncBatchNorm(2)(torch.randn(3, 2)))


@fault("an input that is returned takes the place of another output, where one that requires a gradient is written",
       met="nn.ReLU(inplace=True) behind a graph break", ours="compiler/torch_faults.py leave_out_written_inputs")
def returned_inputs() -> bool:
    def forward(x, buffer):
        x.relu_()
        return x + 1, buffer.mul_(3)

    return differ(forward, lambda: (torch.ones(3, requires_grad=True) * 1, torch.ones(3)))


# ---- Inductor: what is rewritten --------------------------------------------------------------------------------------------


@fault("a tensor is detached where another output is a detached view of its memory", 100348, 195357, slow=True,
       ours="compiler/torch_faults.py clone_detached_outputs")
def detached_outputs() -> bool:
    layer = nn.Linear(4, 8)

    def forward(x):
        y = layer(x)
        return y[:, :4], y.detach()

    compiled(forward, "inductor")(torch.ones(2, 4))[0].sum().backward()
    return layer.weight.grad is None


@fault("norms of two dtypes, which eager refuses, are computed", 151478, 150993, slow=True, ours="compiler/mixed_dtypes.py")
def mixed_dtypes() -> bool:
    def forward(x, w):
        return F.layer_norm(x, (2,), w)

    args = torch.ones(2, 2, dtype=torch.float64), torch.ones(2)
    compiled(forward, "inductor")(*args)
    return raises("mixed dtype", lambda: forward(*args))


@fault("what is compared with its own maximum is computed again, with other bits", 195214, 186799, slow=True,
       ours="compiler/torch_faults.py HoldCompared")
def compared_with_its_maximum() -> bool:
    def gradient(run):
        torch.manual_seed(0)
        x = torch.randn(64, 33, requires_grad=True)
        run(x).backward()
        return x.grad

    def forward(x):
        return ((x.bfloat16() * 1.7).exp() / 3).amax(1).float().sum()

    return not torch.allclose(gradient(compiled(forward, "inductor")), gradient(forward), rtol=0.1)


@fault("a loop that is split unevenly leaves out what is beyond the last whole part", 195582, slow=True,
       ours="_torch_compilers.py whole_loops")
def loops_split_unevenly() -> bool:
    def padded(x, scale, weight):
        return F.pad((x * scale.view(1, 50, 1)).reshape(3, 450), (0, -400)) @ weight

    return differ(padded, lambda: (torch.randn(3, 50, 9), torch.randn(50), torch.randn(50, 10)), "inductor")


@fault("code that keeps rows written over another buffer is not made", 188228, 196570, slow=True,
       ours="_torch_compilers.py whole_loops")
def rows_written_over_others() -> bool:
    def masked(x):
        mask = torch.full((8, 8), -10000.0)
        mask[torch.arange(8).unsqueeze(0), torch.arange(8).unsqueeze(1)] = 0
        return torch.softmax(x + mask, -1)

    return raises("KeyError", lambda: compiled(masked, "inductor")(torch.randn(8, 8)))


@fault("a write by a mask behind one by rows is done in front of it", slow=True,
       met="generated programs", ours="_torch_compilers.py keep_written_values")
def rows_then_a_mask() -> bool:
    def written(x, rows, mask):
        h = x * 2
        h[rows] = 1.0
        h[mask] = 0.0
        return h

    return differ(written, lambda: (torch.ones(4, 6), torch.tensor([2, 0]), torch.rand(4, 6) > 0.5), "inductor")


@fault("a write to rows of an expanded tensor is done in its memory", 183986, 188084, gone="2.14", slow=True,
       ours="_torch_compilers.py keep_written_values")
def rows_of_an_expanded_tensor() -> bool:
    return differ(lambda x, rows: (x * 2).expand(4, 6).index_add(0, rows, torch.ones(2, 6)),
                  lambda: (torch.ones(1, 6), torch.tensor([2, 0])), "inductor")


@fault("a copy of what is written behind it takes what was written", 198131, slow=True,
       ours="compiler/torch_faults.py read_before_writes")
def copied_before_a_write() -> bool:
    def handed_on(last, now, weight):
        last[0:, :] = now[0:, :]
        now.add_(1)
        return last * weight

    return differ(handed_on, lambda: (torch.zeros(3, 4), torch.arange(12.0).reshape(3, 4), torch.ones(3, 4, requires_grad=True)),
                  "inductor")


@fault("what is copied later of a list is computed from what is written by then", slow=True,
       met="torch.optim.Adam(amsgrad=True)", ours="compiler/torch_faults.py copy_one_by_one")
def copies_of_a_list() -> bool:
    def copied(a, b):
        torch._foreach_copy_([a, b], [a * 2, a * 3])

    return differ(copied, lambda: (torch.ones(2), torch.ones(2)), "inductor")


@fault("alpha is dropped where a product of matrices is added", 167313, slow=True, ours="compiler/torch_faults.py keep_keywords")
def alpha_of_an_added_product() -> bool:
    def added(x, a, b):
        return torch.add(x, a @ b, alpha=2.0)

    return differ(added, lambda: (torch.ones(3, 3), torch.ones(3, 4), torch.ones(4, 3)), "inductor")


@fault("dtype is dropped where a constant is summed up", 189518, gone="2.14", slow=True,
       ours="compiler/torch_faults.py keep_keywords")
def dtype_of_a_summed_constant() -> bool:
    def forward(x):
        return x + torch.full((4,), 0.5).cumsum(0, dtype=torch.int64)

    return differ(forward, lambda: (torch.ones(4),), "inductor")


@fault("memory that is moved within itself is read after it is written", 101950, slow=True,
       ours="_torch_compilers.py keep_order_of_writes, realize_what_reads_it")
def moved_memory() -> bool:
    def move(q):
        q[1:] = q[:-1].clone()
        return q.sum()

    return differ(move, lambda: (torch.rand(8, 6),), "inductor")


@fault("memory that was written is moved within itself and read after it is written again", 162410, slow=True,
       ours="_torch_compilers.py keep_order_of_writes, reads_no_earlier_write")
def written_and_moved_memory() -> bool:
    def move(q, rows):
        q[rows] = 1.0
        q.copy_(q.flip(0))
        return q.sum()

    return differ(move, lambda: (torch.rand(8, 6), torch.tensor([1, 4])), "inductor")


@fault("an input that is negated when it is read comes in with the other sign", 145093, 197856, slow=True,
       ours="compiler/torch_faults.py check_not_negated")
def negated_inputs() -> bool:
    return differ(lambda x: x * 2, lambda: (torch.complex(torch.ones(2), torch.ones(2)).conj().imag,), "inductor")


@fault("rows that torch.randperm(n) takes", gone="2.14", slow=True,
       met="mixup", ours="compiler/rewritten_graph.py _explained, its randperm")
def permuted_rows() -> bool:
    permuted = compiled(lambda x: x[torch.randperm(len(x))], "inductor")
    return raises("argname=slice_shape", lambda: permuted(torch.randn(8, 3)))


@fault("two gradients that are equal are one memory", slow=True,
       met="the two biases of a recurrent cell", ours="train_step/state.py _unshared")
def equal_gradients() -> bool:
    def gradients(one, other):
        return torch.autograd.grad((one + other).sum(), (one, other))

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        one, other = compiled(gradients, "inductor")(*(torch.ones(2, requires_grad=True) for _ in range(2)))
    return one.data_ptr() == other.data_ptr()


@fault("the gradient of a slice whose length is read from data is not lowered", gone="2.14", slow=True,
       met="batches cut to their longest row", ours="compiler/lowerings.py _slice_scatter")
def slices_by_data() -> bool:
    return "Could not guard on data-dependent" in unpatched(
        "gradient = lambda x, n: torch.autograd.grad(x[:, :n.max().item()].square().mean(), x)\n"
        "torch._dynamo.config.trace_autograd_ops = torch._dynamo.config.capture_scalar_outputs = True\n"
        "torch.compile(gradient, fullgraph=True)(torch.ones(2, 4, requires_grad=True), torch.tensor([2]))")


@fault("tangents that are zero are made by a call that gives them no memory", gone="2.14", slow=True,
       met="MeanFlow", ours="compiler/lowerings.py _efficientzerotensor")
def zero_tangents() -> bool:
    return "aten._efficientzerotensor.default(" in unpatched(
        "from torch._inductor.utils import run_and_get_code\n"
        "b = torch.ones(2, requires_grad=True)\n"
        "linear = lambda x: torch.nn.functional.linear(x, torch.ones(2, 2), b)\n"
        "layer = lambda x: linear(linear(x).tanh())\n"
        "gradient = lambda x: torch.autograd.grad(torch.func.jvp(layer, (x,), (x,))[1].square().mean(), b)\n"
        "torch._dynamo.config.trace_autograd_ops = True\n"
        "print(run_and_get_code(torch.compile(gradient, fullgraph=True), torch.ones(2, 2)))")


# ---- the register -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [
    pytest.param(row, id=row.is_there.__name__, marks=[pytest.mark.long] * row.slow) for row in ROWS])
def test_the_fault_is_where_it_is_said_to_be(row):
    where = ", ".join(f"https://github.com/pytorch/pytorch/issues/{number}" for number in row.issues) or "no issue known"
    what = f"torch {torch.__version__}: {row.what} ({where})"
    if row.gone and torch.__version__ >= row.gone:
        assert not row.is_there(), f"{what}: it is there, and the row says that it is gone in {row.gone}. Mend the row"
    else:
        assert row.is_there(), (f"{what}: it is gone. Say so in the row; where no supported version has it, delete the row "
                                f"and {row.ours}")


def test_a_row_says_who_met_it_and_what_is_to_go_is_there():
    package = Path(apexfx.__file__).parent
    for row in ROWS:
        assert row.issues or row.met and "nobody" not in row.met, row.what
        files = re.findall(r"\S+\.(?:py|md)", row.ours)
        text = "".join((package.parent if file.startswith("docs/") else package).joinpath(file).read_text() for file in files)
        names = re.findall(r"\b[a-z]*(?:_[a-zA-Z]+)+\b", re.sub(r"\S+\.(?:py|md)", "", row.ours))
        assert files and all(name in text for name in names), row.ours
