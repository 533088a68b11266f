"""Code that Inductor made is compared with its graph at its first call: planted miscompilations, right programs, and what follows."""

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


# ---- planted miscompilations ----------------------------------------------------------------------------------------------------


def poke(call: str, place: int = -1):
    """Change one element of an argument of a call, behind it: of the last one, unless `place` says which."""
    def change(source):
        line = next(line for line in source.splitlines() if re.search(call, line) and not re.search("^ *#|def |= async", line))
        given = re.findall(r"\b(?:buf|arg)\d+(?:_1)?\b", line)
        indent = line[:len(line) - len(line.lstrip())]
        poked = f"{given[place]}.view(-1)[:1].mul_(1.5).add_(1e-3)"
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
    "a buffer that is written twice": (put(r"(?m)^( +)(cpp_fused_sum\w+\(buf.*)$", r"\1arg8_1.mul_(2).add_(1)\n\1\2"),
                                       "change of 'seen'"),
    "an input that nothing writes": (put(r"(?m)^( +)(cpp_fused_sum\w+\(buf.*)$", r"\1arg2_1[0, 0] = 2\n\1\2"), "change of"),
    "two outputs that are swapped": (put(r"return \((\w+), (\w+), (\w+), ", r"return (\3, \2, \1, "), "output"),
    "two gradients that are swapped": (put(r"(adam_\.default\(\[.*?\], \[.*?)(buf\d+), (buf\d+), (buf\d+), rein", r"\1\3, \2, \4, rein"),
                                       "gradient of 'norm"),
    "a stale buffer": (put(r"(addmm\(arg7_1, )(buf\d+)", r"\1buf0"), "gradient"),
    "a weight read the other way": (put(r"\(17, 5\), \(1, 17\)", "(17, 5), (5, 1)"), "gradient"),
    "other random numbers": (put(r"(?m)^( +)(aten\.randint.*out=(buf\d+)\))$", r"\1\2\n\1\3.add_(1)"), "gradient"),
    "a sum without its last row": (put(r"(x1|x0)<static_cast<int64_t>\(33L\)", r"\1<static_cast<int64_t>(32L)"), "gradient"),
    "a tail that is not written": (put(r"static_cast<int64_t>\(17L\); (\w+)\+=\(static_cast", r"static_cast<int64_t>(16L); \1+=(static_cast"),
                                   "gradient"),
    "a mask turned round": (put(r"> static_cast<float>\(0\.1\)|static_cast<float>\(0\.1\)", "> static_cast<float>(0.9)"), "gradient"),
    "a constant": (put(r"0\.70710678118654\d*", "0.7101"), "gradient"),
    "a mean over another number": (put(r"static_cast<float>\(17\.0\)", "static_cast<float>(16.0)"), "gradient"),
    "another function": (put(r"\.erf\(\)", ".tanh()"), "gradient"),
}
IN_CPP = [name for name in PLANTS if name in ("a sum without its last row", "a tail that is not written", "a mask turned round",
                                              "a constant", "a mean over another number", "another function")]


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


def test_code_without_a_fault_is_proved(of_step):
    first, inputs = of_step
    before = [exact_copy(x) for x in inputs if isinstance(x, torch.Tensor)]
    state = torch.get_rng_state()
    proof = prove(first, inputs, first.code)
    assert not proof.fault and not proof.note and len(proof.rows) > 20
    assert all(map(torch.equal, before, [x for x in inputs if isinstance(x, torch.Tensor)]))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("plant", [pytest.param(name, marks=[pytest.mark.long] * (name in IN_CPP)) for name in PLANTS])
def test_a_planted_miscompilation_is_noticed(of_step, plant):
    first, inputs = of_step
    change, named = PLANTS[plant]
    proof = prove(first, inputs, planted(first, change))
    wrong = [row.name for row in proof.rows if row.is_wrong]
    assert any(name.startswith(named) for name in wrong), (proof.note, wrong)
