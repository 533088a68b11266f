"""Code that Inductor made is compared with its graph at its first call: planted miscompilations, and what follows."""

from __future__ import annotations

import copy
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.codecache import PyCodeCache

import apexfx
from apexfx.compiler import prover
from apexfx.compiler.kernel_files import several_kernels_a_file
from apexfx.observe.bundle import exact_copy
from tests.small_models import take_step
from tests.tables import table


class Masked(nn.Module):
    """GELU, a layer norm, a mask, a dropout, and a buffer that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(9, 17), nn.LayerNorm(17), nn.Linear(17, 5)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x, mask):
        h = self.norm(F.gelu(self.a(x)))
        out = self.b(F.dropout(torch.where(mask, h, -h), 0.1, self.training))
        self.seen += out.detach().mean(0)
        return out


def loss_of(model, x, mask, labels):
    return F.cross_entropy(model(x, mask), labels)


def program():
    torch.manual_seed(0)
    return Masked(), (torch.randn(33, 9), torch.rand(33, 17) > 0.3, torch.randint(0, 5, (33,)))


def make_step(model, optimizer=torch.optim.AdamW, **options):
    return apexfx.train_step(model, objective=loss_of, optimizer=optimizer(model.parameters(), lr=0.01), **{
        "opt_level": "O0", "max_grad_norm": 1.0, **options})


@pytest.fixture
def no_caches():
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


# ---- planted miscompilations ---------------------------------------------------------------------------------------------


def poke(call: str, place: int = -1):
    """Change the largest element of an argument of a call, behind it: of the last one, unless `place` says which."""
    def change(source):
        line = next(line for line in source.splitlines() if re.search(call, line) and not re.search("^ *#|def |= async", line))
        given = re.findall(r"\b(?:buf|arg)\d+(?:_1)?\b", line)
        indent = line[:len(line) - len(line.lstrip())]
        flat = f"{given[place]}.view(-1)"
        poked = f"{flat}[{flat}.abs().argmax()] += {flat}.abs().max() / 2 + 1e-3"
        return source.replace(line, f"{line}\n{indent}{poked}", 1)
    return change


def put(pattern: str, replacement: str):
    return lambda source: re.sub(pattern, replacement, source, count=1)


PLANTS = {  # what is done to the code, and which tensors have to be named; those of C++ are compiled anew
    "an element of an activation": (poke(r"extern_kernels\.addmm", -1), "gradient"),
    "an element of a mask": (poke(r"  cpp_fused_native_dropout"), "gradient"),
    "an element of what a backward multiplies": (poke(r"extern_kernels\.mm\(buf\d+, arg"), "gradient"),
    "an element of a gradient": (poke(r"extern_kernels\.mm\(reinterpret_tensor\(buf\d+, \(5, 33\)"), "gradient of 'b.weight'"),
    "an element of a bias's gradient": (poke(r"  cpp_fused_sum"), "gradient of 'a.bias'"),
    "an element of an updated parameter": (poke(r"apexfx\.adam_", 0), "change of 'a.weight'"),
    "an element of a moment": (poke(r"apexfx\.adam_", 13), "change of "),
    "an update that is lost": (put(r"(?m)^( +)torch\.ops\.apexfx\.adam_\.default\(.*$", r"\1pass"), "change of"),
    "a write to a buffer that is lost": (put(r"(cpp_fused__log_softmax\w+\((?!\[).*?, )(arg8_1)(?=, buf)", r"\1\2.clone()"),
                                         "change of 'seen'"),
    "a buffer that is written twice": (put(r"(?m)^( +)(cpp_fused_sum\w+\(buf.*)$", r"\1arg8_1.mul_(2)\n\1\2"),
                                       "change of 'seen'"),
    "an input that nothing writes": (put(r"(?m)^( +)(extern_kernels\.addmm\(arg7_1.*)$", r"\1arg2_1[0, 0] = 2\n\1\2"),
                                     "change of"),
    "two outputs that are swapped": (put(r"return \((\w+), (\w+), (\w+), ", r"return (\3, \2, \1, "), "output"),
    "two gradients that are swapped": (put(r"(adam_\.default\(\[.*?\], \[.*?)(buf\d+), (buf\d+), (buf\d+), rein",
                                           r"\1\3, \2, \4, rein"), "gradient of 'norm"),
    "a stale buffer": (put(r"(addmm\(arg7_1, )(buf\d+)", r"\1buf0"), "gradient"),
    "a weight read the other way": (put(r"\(17, 5\), \(1, 17\)", "(17, 5), (5, 1)"), "gradient"),
    "other random numbers": (put(r"(?m)^( +)(aten\.randint.*out=(buf\d+)\))$", r"\1\2\n\1\3.add_(1)"), "gradient"),
    "a sum without its last row": (put(r"(x1|x0)<static_cast<int64_t>\(33L\)", r"\1<static_cast<int64_t>(32L)"), "gradient"),
    "a tail that is not written": (put(r"(x\d)<static_cast<int64_t>\(17L\)",
                                       r"\1<static_cast<int64_t>(16L)"), "gradient"),
    "a mask turned round": (put(r"static_cast<float>\(0\.1\)", "static_cast<float>(0.9)"), "gradient"),
    "a constant": (put(r"0\.70710678118654\d*", "0.7101"), "gradient"),
    "a mean over another number": (put(r"static_cast<float>\(17\.0\)", "static_cast<float>(16.0)"), "gradient"),
    "another function": (put(r"\.erf\(\)", ".tanh()"), "gradient"),
}
IN_CPP = ("a sum without its last row", "a tail that is not written", "a mask turned round", "a constant",
          "a mean over another number", "another function")


def first_calls(run):
    """Return what `run` proves: each first call, and copies of its inputs."""
    found, call = [], prover.FirstCall.__call__

    def keep(self, args):
        found.append((self, [exact_copy(x) if isinstance(x, torch.Tensor) else x for x in args]))
        return call(self, args)

    with mock.patch.object(prover.FirstCall, "__call__", keep):
        run()
    return found


@pytest.fixture(scope="module")
def of_step():
    """Return the first call of a step, and its inputs."""
    model, batch = program()
    with torch._inductor.config.patch(force_disable_caches=True):
        [found] = first_calls(lambda: make_step(model)(*batch))
    return found


def prove(first, inputs, code):
    return prover._Proving(first.graph, code, first.stage, first.gradients, inputs).run(insists=True).proof


def planted(first, change):
    """Return code with a fault."""
    source = first._compiled.source_code
    faulty = change(source)
    assert faulty != source
    with several_kernels_a_file():
        return PyCodeCache.load(faulty).call


@pytest.mark.long
def test_code_without_a_fault_is_proved(of_step):
    first, inputs = of_step
    before = [exact_copy(x) for x in inputs if isinstance(x, torch.Tensor)]
    state = torch.get_rng_state()
    proof = prove(first, inputs, first.code)
    assert not proof.fault and not proof.note and len(proof.rows) > 20
    assert all(map(torch.equal, before, [x for x in inputs if isinstance(x, torch.Tensor)]))
    assert torch.equal(state, torch.get_rng_state())


@table(8, "plant", [pytest.param(name, marks=[pytest.mark.long] * (name in IN_CPP)) for name in PLANTS])
def test_a_planted_miscompilation_is_noticed(of_step, plant):
    first, inputs = of_step
    change, named = PLANTS[plant]
    proof = prove(first, inputs, planted(first, change))
    wrong = [row.name for row in proof.rows if row.is_wrong]
    assert any(name.startswith(named) for name in wrong), (proof.note, wrong)


# ---- what follows --------------------------------------------------------------------------------------------------------


def with_a_wrong_element(compiled):
    """Return code that has one element wrong: of what it returns, or of a parameter."""
    code = compiled.current_callable

    def run(args):
        kept = list(args)
        outputs = code(args)
        floating = [x for x in outputs if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 1]
        floating = floating or [x for x in kept if isinstance(x, torch.Tensor) and x.is_floating_point()]
        largest = max(floating, key=torch.Tensor.numel)
        largest[(0,) * largest.dim()] += 1
        return outputs

    return run


def trained(model, batch, run, calls=3):
    torch.manual_seed(0)
    losses = [float(run(*batch)) for _ in range(calls)]
    return losses, {name: x.clone() for name, x in model.state_dict().items()}


def assert_same(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    for name, x in one[1].items():
        torch.testing.assert_close(x, other[1][name], rtol=1e-4, atol=1e-6)


def test_a_step_of_wrong_code_trains_op_by_op_and_says_so(no_caches, caplog):
    model, batch = program()
    step = make_step(model)
    with mock.patch.object(prover, "plain_code", with_a_wrong_element):
        got = trained(model, batch, step)
    expected, _ = program()
    assert_same(got, trained(expected, batch, make_step(expected, verify="off")))  # Inductor's own code, which has no such fault
    [warning] = [record.getMessage() for record in caplog.records if "is wrong" in record.getMessage()]
    assert re.search(r"the code that Inductor made of graph 0 \(step\) is wrong: .* is .* of its size away from float64, and the "
                     r"same ops one by one are .*The graph runs op by op from here on", warning)
    assert "is wrong" in str(step.report) and "wrong" in step.report.proof()


@pytest.mark.long
def test_a_parameter_that_is_not_updated_is_named_at_o1(no_caches):
    def without_an_update(compiled):
        code = compiled.current_callable

        def run(args):
            [weight] = [x for x in args if x.shape == (17, 9) and x.abs().max() > 0.1]
            before = weight.clone()
            outputs = code(args)
            weight.copy_(before)
            return outputs

        return run

    model, batch = program()
    step = make_step(model, opt_level="O1", dtype=torch.bfloat16)
    with mock.patch.object(prover, "plain_code", without_an_update):
        step(*batch)
    [proof] = step.report.graphs[0].proofs
    assert [row.name for row in proof.rows if row.is_wrong] == ["change of 'a.weight'"]


@pytest.mark.long
def test_both_graphs_of_a_model_run_op_by_op(no_caches, caplog):
    def train(verify="auto"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 3))
        transformed, optimizer = apexfx.transform(model, opt_level="O0", verify=verify), torch.optim.SGD(model.parameters(), 0.1)
        x, losses = torch.randn(4, 2, 5, 5), []
        for _ in range(3):
            losses.append(take_step(optimizer, transformed(x).square().mean()).item())
        return transformed, (losses, model.state_dict())

    with mock.patch.object(prover, "plain_code", with_a_wrong_element):
        transformed, got = train()
    assert_same(got, train("off")[1])
    assert [proof.stage for proof in transformed.report.graphs[0].proofs if proof.fault] == ["forward", "backward"]


@pytest.mark.long
def test_an_interrupted_proof_leaves_everything_as_it_was(no_caches):
    model, batch = program()
    before = copy.deepcopy(model.state_dict())
    step = make_step(model)
    with mock.patch.object(prover._Proving, "_run_ops", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        step(*batch)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    expected, _ = program()
    assert_same(trained(model, batch, step), trained(expected, batch, make_step(expected, verify="off")))
    assert [proof.note for proof in step.report.graphs[0].proofs] == [""]


@pytest.mark.parametrize("insists", [False, True])
def test_memory_that_would_not_do(of_step, insists):
    first, inputs = of_step
    with mock.patch.object(prover, "free_bytes", lambda _: 1000):
        outcome = prover._Proving(first.graph, first.code, first.stage, first.gradients, inputs).run(insists=insists)
    assert bool(outcome.proof.rows) == insists != outcome.is_of_this_process
    assert insists or re.search(r"takes \d+ bytes where 1000 are free; verify='code' does it", outcome.proof.note)


def test_what_cannot_run_op_by_op_is_not_compared(of_step):
    first, inputs = of_step
    with mock.patch.object(prover.BesideFloat64, "run", side_effect=NotImplementedError("no such kernel")):
        proof = prove(first, inputs, first.code)
    assert "was not compared with it, since it cannot run op by op (NotImplementedError: no such kernel)" in proof.note


def test_a_kernel_that_cannot_be_named_stops_nothing(of_step):
    first, inputs = of_step
    with mock.patch.object(prover, "first_difference", side_effect=RuntimeError):
        proof = prove(first, inputs, planted(first, PLANTS["a stale buffer"][0]))
    assert "could not be looked at one by one (RuntimeError)" in proof.fault


@pytest.mark.long
def test_off_compares_nothing(no_caches):
    model, batch = program()
    step = make_step(model, verify="off")
    with mock.patch.object(prover, "_Proving", side_effect=AssertionError):
        step(*batch)
    assert step.report.proof().startswith("no code was compared")


@pytest.mark.long
def test_a_verdict_lies_beside_the_code_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def proofs():
        torch.compiler.reset()
        model, batch = program()
        step = make_step(model)
        step(*batch)
        return step.report.graphs[0].proofs

    assert [bool(proof.rows) for proof in proofs()] == [True]
    assert [proof.note for proof in proofs()] == [prover._BEFORE]
    [verdict] = (tmp_path / "apexfx").glob("*.proof.json")
    verdict.unlink()  # as where the process that had compiled was killed in its first call
    torch._dynamo.utils.counters.clear()
    assert [bool(proof.rows) for proof in proofs()] == [True]
    assert not torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]
    with mock.patch.object(prover, "plain_code", with_a_wrong_element):
        (tmp_path / "apexfx" / verdict.name).unlink()
        assert [bool(proof.fault) for proof in proofs()] == [True]
    assert not list((tmp_path / "apexfx").glob("*.proof.json"))


def test_a_report_keeps_its_proofs(of_step, tmp_path):
    report = apexfx.report.data.Report({"opt_level": "O0"})
    first, inputs = of_step
    proof = prove(first, inputs, first.code)
    assert type(proof).from_json(proof.to_json()) == proof and "code proved: " in str(proof)
    with pytest.raises(RuntimeError, match="there is no graph yet"):
        report.proof()


@pytest.mark.long
def test_random_numbers_of_kernels():
    from apexfx.observe.inductor_random import as_kernels_draw

    compiles_integers = torch.backends.cpu.get_cpu_capability() != "DEFAULT"  # where Inductor's own code of them does not compile

    def draws(x):
        return (torch.rand(7, 33), torch.randint(-5, 12345, (9, 100)) if compiles_integers else x, F.dropout(x, 0.3),
                torch.randn(50, 37))

    compiled, x, prims = torch.compile(draws), torch.ones(3, 50), torch.ops.prims
    torch.manual_seed(3)
    got = compiled(x)
    torch.manual_seed(3)
    seeds = as_kernels_draw(prims.inductor_seeds.default)(3 + compiles_integers, x.device)
    random, integers = map(as_kernels_draw, (prims.inductor_random.default, prims.inductor_randint.default))
    assert torch.equal(got[0], random([7, 33], seeds[0], "rand"))
    assert not compiles_integers or torch.equal(got[1], integers(-5, 12345, [9, 100], seeds[1]))
    assert torch.equal(got[2] != 0, random([3, 50], seeds[-2], "rand") > 0.3)
    torch.testing.assert_close(got[3], random([50, 37], seeds[-1], "randn"), rtol=5e-7, atol=1e-7)


KINDS = {
    "average": {"ema": apexfx.EMA(0.9)},
    "safeguard": {"safeguard": True},
    "accumulate": {"accumulate": 2},
    "Mean": {"objective": lambda model, x, mask, y: apexfx.Mean(F.cross_entropy(model(x, mask), y, reduction="sum"), len(y))},
    "Muon": {"optimizer": lambda params: [torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-3),
                                          torch.optim.AdamW([p for p in params if p.ndim != 2], lr=1e-3)]},
    "LAMB": {"optimizer": lambda params: apexfx.optimizers.FusedLAMB(params, lr=1e-3, max_grad_norm=None)},
    "traced": {"optimizer": lambda params: torch.optim.RAdam(params, lr=1e-3)},
    "float16": {"opt_level": "O2", "dtype": torch.float16},
    "bfloat16": {"opt_level": "O1", "dtype": torch.bfloat16, "max_grad_norm": 1.0},
    "recomputed": {"max_grad_norm": 0.1, "memory_budget": 10_000},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_many_kinds_are_proved(no_caches, kind):
    options = {"opt_level": "O0", "objective": loss_of, "optimizer": torch.optim.AdamW, **KINDS[kind]}
    model, batch = program()
    step = apexfx.train_step(model, optimizer=options.pop("optimizer")(list(model.parameters())), **options)
    for _ in range(4):
        step(*batch)
    proofs = [proof for graph in step.report.graphs for proof in graph.proofs]
    assert proofs and all(proof.rows and not proof.fault for proof in proofs), [(proof.note, proof.fault) for proof in proofs]


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(n)]) for n in (600, 100))

    def forward(self, x):
        return sum((torch.stack([*each]) * x[:len(each)]).square().sum() for each in (self.first, self.second))


@pytest.mark.long
def test_gradients_of_two_updates_in_a_row_are_all_proved(monkeypatch, no_caches):
    """An op of 600 parameters has gradients at places beyond 1,000."""
    found, run_ops = [], prover._Proving._run_ops
    monkeypatch.setattr(prover._Proving, "_run_ops", lambda *args, **named: found.append(run_ops(*args, **named)) or found[-1])
    model = Many()
    groups = [{"params": [*model.first], "weight_decay": 0.1}, {"params": [*model.second], "weight_decay": 0.0}]
    step = apexfx.train_step(model, objective=lambda model, x: model(x), optimizer=torch.optim.SGD(groups, 0.1, momentum=0.9),
                             opt_level="O0", max_grad_norm=1.0)
    step(torch.randn(600, 2))
    assert sum(what == "handed" for what, _ in found[0]) >= 700
