"""Every op of the rule table, run through O1 on its own: the dtype it saw, its value against float64, and eager's to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.utils._pytree import tree_leaves, tree_map

from apexfx.compiler.pipeline import Pipeline
from apexfx.graph.nodes import signature, value
from apexfx.graph.op_names import canonical_name
from apexfx.precision.rules import FLOATS, RULES
from apexfx.testing import assert_close
from tests.forward_graphs import precision
from tests.passes.op_samples import NOT_RUN, NOT_UNIQUE, SAMPLES, Recording, fitting, graph_of
from tests.precision.test_two_executors import copied, differences, in_eager
from tests.tables import table

COMPOSED = ("svd_lowrank",)  # torch shows the eager executor the functions it is composed of, not the call itself
ACTIVE = [name for name, rule in RULES.items() if rule.kind != "passthrough"]


def test_every_rule_that_casts_is_run():
    assert sorted(ACTIVE) == sorted([*SAMPLES, *" ".join(NOT_RUN.values()).split()])
    assert not [name for name, (function, _, _) in SAMPLES.items() if canonical_name(function) != name]


@table(1, "half", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("family", sorted({RULES[name].family for name in SAMPLES}))
def test_every_op_of(family, half):
    failures = {}
    for name in SAMPLES:
        if RULES[name].family == family:
            try:
                check(name, half)
            except Exception as error:  # all of a family's failures at once, each with its op
                failures[name] = f"{type(error).__name__}: {error}"
    assert not failures


def check(name, half):
    function, args, kwargs = fitting(name, half)
    kind = RULES[name].kind
    gm, node, tensors = graph_of(function, args, kwargs)
    Pipeline([precision("O1", half)], verify="final").run("forward", gm)

    seen = check_dtypes(node, kind, half)
    torch.manual_seed(0)
    result = Recording(gm, node).result(*tree_map(copied, tensors))
    torch.manual_seed(0)
    eager = in_eager(half, function, args, kwargs)
    assert name in COMPOSED or not differences(result, eager, values=name not in NOT_UNIQUE)
    exact = function(*tree_map(double, args), **tree_map(double, kwargs))
    for actual, expected in zip(tree_leaves(result), tree_leaves(exact), strict=True):
        if not isinstance(actual, Tensor) or name in NOT_UNIQUE:
            continue
        dtype = half if half in seen else torch.float32
        if actual.is_complex():
            actual, expected = torch.view_as_real(actual.resolve_conj()), torch.view_as_real(expected.resolve_conj())
        if not expected.is_floating_point():
            assert torch.equal(actual, expected)
        elif name.startswith(("linalg", "cholesky", "det", "logdet", "slogdet", "inverse", "pinverse")):
            assert_close(actual, expected, dtype=dtype, scale=64)  # the condition number of the sample
        else:
            # A product of half numbers sums some tens of them; a recurrent layer chains several such products.
            assert_close(actual, expected, dtype=dtype, scale=4)


def check_dtypes(node, kind, half):
    """Return the floating dtypes that `node` is given, which are those that its rule says."""
    seen = {a.meta["val"].dtype for a in node.all_input_nodes if a.meta["val"].dtype in FLOATS}
    if kind == "batch_norm":
        assert seen == {half, torch.float32}
    else:
        assert seen == ({half} if kind == "half" else {torch.float32})
    return seen


# C++ composes these of what asks for plain sizes.
NEED_PLAIN_SIZES = "lstm addbmm trace linalg_solve_triangular cholesky_solve".split()


@pytest.mark.parametrize("names", [NEED_PLAIN_SIZES, pytest.param([*SAMPLES], marks=pytest.mark.long)], ids=["some", "all"])
def test_every_op_with_sizes_that_are_symbols(names):
    for name in names:
        try:
            gm, node, _ = graph_of(*fitting(name, torch.bfloat16), symbolic=True)
        except UnsupportedOperatorException:  # so no program could have captured it
            assert name in ("geqrf", "histogram")
            continue
        sizes = signature(value(node))
        Pipeline([precision("O1")], verify="final").run("forward", gm)
        check_dtypes(node, RULES[name].kind, torch.bfloat16)
        assert [s[1:] for s in signature(value(node)) if isinstance(s, tuple)] == [s[1:] for s in sizes if isinstance(s, tuple)]


def double(a):
    return a.double() if isinstance(a, Tensor) and a.is_floating_point() else a
