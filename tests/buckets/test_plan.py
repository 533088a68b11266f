"""The bucket plan: a pure function of the parameters; data that prints, saves, edits and replays."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline

from apexfx.buckets.bucket import dim_order
from apexfx.buckets.plan import BucketPlan, GradientSpec, check_options, default_message_size, plan_buckets
from apexfx.config import BucketConfig

CPU = torch.device("cpu")


def spec(name, shape, dtype=torch.float32, output_dtype=None, **other):
    return GradientSpec(name, tuple(shape), dtype, output_dtype or dtype, other.pop("device", CPU), **other)


def specs_of(num=6, numel=10):
    return [spec(f"p{i}", (numel,)) for i in range(num)]


def groups(plan):
    return [list(bucket.parameters) for bucket in plan.buckets]


def offsets(bucket):
    return [slot.offset_bytes for slot in bucket.slots]


def test_buckets_fill_in_reverse_order_of_first_use_and_close_by_element_count():
    plan = plan_buckets(specs_of(), BucketConfig(message_size=25), world_size=2, group_name="0")
    assert groups(plan) == [["p5", "p4", "p3"], ["p2", "p1", "p0"]]
    assert groups(plan_buckets(specs_of(), BucketConfig(message_size=20), 2)) == [["p5", "p4"], ["p3", "p2"], ["p1", "p0"]]


def test_message_size_counts_elements_of_one_dtype_not_bytes():
    mixed = [spec("a", (10,)), spec("h", (10,), torch.bfloat16), spec("b", (10,)), spec("g", (10,), torch.bfloat16)]
    plan = plan_buckets(mixed, BucketConfig(message_size=20), 2)
    assert groups(plan) == [["g", "h"], ["b", "a"]]
    assert [bucket.dtype for bucket in plan.buckets] == [torch.bfloat16, torch.float32]


def test_devices_do_not_share_a_bucket():
    plan = plan_buckets([spec("a", (1,)), spec("b", (1,), device=torch.device("meta"))], BucketConfig(), 2)
    assert groups(plan) == [["b"], ["a"]] and [b.device for b in plan.buckets] == ["meta", "cpu"]


def test_a_trigger_that_shares_another_gradient_counts_too():
    shared = [spec("a", (4,)), spec("b", (4,), shared_with=("tied",)), spec("c", (4,))]
    assert groups(plan_buckets(shared, BucketConfig(trigger_params=("tied",)), 2)) == [["c", "b"], ["a"]]


@pytest.mark.parametrize(("options", "divides"), [
    ({}, (1.0, 4.0)),
    ({"gradient_predivide_factor": 2.0}, (2.0, 2.0)),
    ({"gradient_average": False}, (1.0, 1.0)),
    ({"gradient_average": False, "gradient_predivide_factor": 2.0}, (2.0, 1.0)),
    ({"layout": "ddp"}, (4.0, 1.0)),
    ({"layout": "ddp", "gradient_average": False}, (1.0, 1.0)),
    ({"layout": "ddp", "gradient_predivide_factor": 2.0}, (2.0, 2.0)),
])
def test_divisors(options, divides):
    [bucket] = plan_buckets(specs_of(), BucketConfig(**options), world_size=4).buckets
    assert (bucket.predivide, bucket.postdivide) == divides


@pytest.mark.parametrize(("options", "dtype", "reduced"), [
    ({}, torch.bfloat16, torch.bfloat16),
    ({"allreduce_always_fp32": True}, torch.bfloat16, torch.float32),
    ({"allreduce_always_fp32": True}, torch.float64, torch.float64),
    ({"comm_dtype": torch.bfloat16}, torch.float32, torch.bfloat16),
    ({"comm_dtype": torch.float16}, torch.complex64, torch.complex64),
])
def test_dtype_on_the_wire(options, dtype, reduced):
    [bucket] = plan_buckets([spec("a", (3,), dtype)], BucketConfig(**options), 2).buckets
    assert (bucket.dtype, bucket.reduce_dtype, bucket.output_dtype) == (dtype, reduced, dtype)


@pytest.mark.parametrize(("dtype", "output", "comm"), [
    (torch.float32, torch.float32, None), (torch.bfloat16, torch.float32, None),
    (torch.float32, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32), (torch.float64, torch.float64, None),
])
def test_every_slot_is_aligned_on_the_wire_and_in_the_gradients(dtype, output, comm):
    odd = [spec("a", (3, 5), dtype, output), spec("b", (), dtype, output), spec("c", (7,), dtype, output)]
    [bucket] = plan_buckets(odd, BucketConfig(comm_dtype=comm), 2).buckets
    for slot in bucket.slots:
        assert slot.offset_bytes % 16 == 0
        assert slot.offset_bytes // bucket.reduce_dtype.itemsize * bucket.output_dtype.itemsize % 16 == 0
    assert bucket.total_bytes % 16 == 0
    assert bucket.numel == sum(slot.numel for slot in bucket.slots) + sum(bucket.padding())


def test_the_ddp_layout_is_packed():
    [bucket] = plan_buckets([spec("a", (3,)), spec("b", (5,))], BucketConfig(layout="ddp"), 2).buckets
    assert offsets(bucket) == [0, 20] and bucket.total_bytes == 32


@pytest.mark.parametrize("cap_mb", [25.0, 4.0, 0.5])
def test_the_ddp_layout_closes_buckets_where_torch_does(cap_mb):
    generator = random.Random(0)
    for _ in range(20):
        shapes = [(generator.choice([64, 1000, 300_000, 3_000_000]),) for _ in range(generator.randint(1, 12))]
        named = [spec(f"p{i}", shape) for i, shape in enumerate(shapes)]
        limits = [2**20, 25 * 2**20] if cap_mb == 25.0 else [int(cap_mb * 2**20)]
        ready = [torch.empty(shape, device="meta") for shape in reversed(shapes)]
        indices, _ = dist._compute_bucket_assignment_by_size(ready, limits, [False] * len(ready), list(range(len(ready))))
        expected = [[named[len(named) - 1 - i].name for i in bucket] for bucket in indices]
        assert groups(plan_buckets(named, BucketConfig(layout="ddp", bucket_cap_mb=cap_mb), 2)) == expected


def test_the_ddp_order_puts_the_weight_of_a_norm_or_convolution_before_its_bias():
    named = [spec("conv.weight", (8, 3, 3, 3)), spec("conv.bias", (8,)), spec("bn.weight", (8,)), spec("bn.bias", (8,)),
             spec("fc.weight", (5, 8)), spec("fc.bias", (5,))]
    plan = plan_buckets(named, BucketConfig(layout="ddp"), 2)
    assert groups(plan) == [["fc.bias", "fc.weight", "bn.weight", "bn.bias", "conv.weight", "conv.bias"]]


def test_dim_order():
    assert dim_order((4, 3, 2, 2), torch.empty(4, 3, 2, 2).stride()) is None
    channels_last = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert dim_order((4, 3, 2, 2), channels_last.stride()) == (0, 2, 3, 1)
    assert dim_order((4, 3), torch.empty(3, 4).t().stride()) == (1, 0)
    assert dim_order((4, 3), torch.empty(1, 3).expand(4, 3).stride()) is None
    assert dim_order((4, 3), torch.empty(4, 6)[:, :3].stride()) is None
    pointwise = torch.empty(4, 3, 1, 1).to(memory_format=torch.channels_last)
    assert dim_order((4, 3, 1, 1), pointwise.stride()) is None  # the same bytes either way
    assert dim_order((), ()) is None


def random_plan(seed):
    generator = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    specs = []
    for i in range(generator.randint(1, 30)):
        shape = tuple(generator.choice([1, 2, 3, 5, 8]) for _ in range(generator.randint(0, 4)))
        dtype = generator.choice(dtypes)
        output = torch.float32 if dtype.itemsize == 2 and generator.random() < 0.5 else dtype
        order = tuple(generator.sample(range(len(shape)), len(shape))) if generator.random() < 0.3 and shape else None
        specs.append(spec(f"layer{i}.weight", shape, dtype, output, dim_order=order))
    size = generator.choice([{"message_size": 1}, {"message_size": 20}, {"message_size": 100}, {"layout": "ddp"}])
    config = BucketConfig(allreduce_always_fp32=generator.random() < 0.3,
                          gradient_predivide_factor=generator.choice([1.0, 2.0, 3.0]), **size)
    return specs, config, plan_buckets(specs, config, generator.choice([1, 2, 3, 8]), "0")


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_holds_every_gradient_once_without_overlap_and_survives_json(seed, tmp_path):
    specs, config, plan = random_plan(seed)
    assert sorted(plan.parameters) == sorted(s.name for s in specs)
    for bucket in plan.buckets:
        ends = [slot.offset_bytes + slot.numel * bucket.reduce_dtype.itemsize for slot in bucket.slots]
        assert all(end <= start for end, start in zip(ends, offsets(bucket)[1:])) and ends[-1] <= bucket.total_bytes
        assert all(padding >= 0 for padding in bucket.padding())
        assert math.isclose(bucket.predivide * bucket.postdivide, plan.world_size)
    plan.save(tmp_path / "plan.json")
    assert BucketPlan.load(tmp_path / "plan.json") == plan
    plan.check(specs, world_size=plan.world_size)


def test_the_plan_does_not_depend_on_the_rank():
    on = [[dataclasses.replace(s, device=torch.device("cuda", rank)) for s in specs_of()] for rank in (0, 1)]
    first, second = (plan_buckets(s, BucketConfig(message_size=20), 2, "0") for s in on)
    assert first == second


def test_a_plan_for_another_model_is_refused_with_the_first_difference():
    specs = specs_of(3)
    plan = plan_buckets(specs, BucketConfig(), 2)
    cases = [
        ([*specs, spec("new", (1,))], r"the model has parameter 'new' \(float32\[1\]"),
        (specs[:2], r"the bucket plan holds parameter 'p2', which the model was expected to have"),
        ([specs[0], spec("p1", (5, 2)), specs[2]],
         r"parameter 'p1' was given as float32\[5, 2\] .* the bucket plan expects float32\[10\]"),
        ([specs[0], spec("p1", (10,), torch.bfloat16), specs[2]], r"parameter 'p1' was given as bfloat16\[10\]"),
        ([specs[0], spec("p1", (10,), device=torch.device("cuda", 1)), specs[2]], r"'p1' was given .* on cuda"),
    ]
    for given, message in cases:
        with pytest.raises(ValueError, match=message):
            plan.check(given)
    with pytest.raises(ValueError, match="divides for 2 ranks and the group has 3"):
        plan.check(specs, world_size=3)


def test_options_that_name_what_the_model_has_not_are_refused_at_the_door():
    parameters = {"p0": torch.empty(10), "p1": torch.empty(10), "frozen": torch.empty(1)}
    check_options(BucketConfig(trigger_params=("p1",)), parameters, 2)
    with pytest.raises(ValueError, match="trigger_params names 'p11', which is no parameter of the model; did you mean 'p1'?"):
        check_options(BucketConfig(trigger_params=("p11",)), parameters, 2)
    plan = plan_buckets(specs_of(2), BucketConfig(), 2)
    check_options(BucketConfig(plan=plan), parameters, 2)
    with pytest.raises(ValueError, match="holds parameter 'p1'"):
        check_options(BucketConfig(plan=plan), {"p0": torch.empty(10)}, 2)
    with pytest.raises(ValueError, match=r"'p1' was given with shape \[5, 2\], the bucket plan expects \[10\]"):
        check_options(BucketConfig(plan=plan), parameters | {"p1": torch.empty(5, 2)}, 2)
    with pytest.raises(ValueError, match="divides for 2 ranks and the group has 4"):
        check_options(BucketConfig(plan=plan), parameters, 4)
    with pytest.raises(TypeError, match="plan=3"):
        check_options(BucketConfig(plan=3), parameters, 2)


def test_regroup_edits_the_buckets():
    plan = plan_buckets([spec(f"p{i}", (3,)) for i in range(4)], BucketConfig(), 2)
    edited = plan.regroup([["p3"], ["p0", "p2", "p1"]])
    assert groups(edited) == [["p3"], ["p0", "p2", "p1"]] and edited.layout == "edited"
    assert offsets(edited.buckets[1]) == [0, 16, 32]
    with pytest.raises(ValueError, match="every parameter of the plan once; see 'p0'"):
        plan.regroup([["p3", "p2", "p1"]])
    with pytest.raises(ValueError, match="see 'p1'"):
        plan.regroup([["p3", "p2", "p1", "p1", "p0"]])
    mixed = plan_buckets([spec("a", (3,)), spec("h", (3,), torch.float16)], BucketConfig(), 2)
    with pytest.raises(ValueError, match="'a' and 'h' cannot share a bucket: dtype is float32 and float16"):
        mixed.regroup([["h", "a"]])


def test_an_edited_file_is_checked_when_it_is_read(tmp_path):
    path = tmp_path / "plan.json"

    def edited(**change):
        data = plan_buckets(specs_of(2), BucketConfig(), 2).to_json()
        data["buckets"][0]["slots"][1] |= change.pop("slot", {})
        data["buckets"][0] |= change.pop("bucket", {})
        path.write_text(json.dumps(data | change))
        return BucketPlan.load(path)

    assert edited(slot={"offset_bytes": 40}).buckets[0].padding() == [0, 4]
    with pytest.raises(ValueError, match="no room for 'p1' at offset_bytes=0"):
        edited(slot={"offset_bytes": 36})
    with pytest.raises(ValueError, match="version 2 was given, expected 1"):
        edited(version=2)
    with pytest.raises(ValueError, match="malformed bucket plan"):
        edited(slot={"shape": None})
    with pytest.raises(ValueError, match="predivide=0"):
        edited(bucket={"predivide": 0})
    with pytest.raises(ValueError, match="start='soon'"):
        edited(bucket={"start": "soon"})
    for wrong, message in (
        ({"bucket": {"total_bytes": 192}}, "total_bytes=192, of which 112 hold no gradient; set total_bytes to the end"),
        ({"bucket": {"total_bytes": 80}}, "no room for 'p0' at offset_bytes=48"),
        ({"bucket": {"total_bytes": 97}}, "total_bytes=97, expected a multiple of 4 bytes"),
        ({"bucket": {"total_bytes": "96"}}, "total_bytes='96', expected"),
        ({"bucket": {"reduce_dtype": "float64"}}, "elements of reduce_dtype=float64, and BucketConfig"),
        ({"bucket": {"reduce_dtype": "float16"}}, "elements of reduce_dtype=float16, and BucketConfig"),
        ({"bucket": {"dtype": "nn"}}, "dtype='nn', expected the name of a dtype"),
        ({"bucket": {"dtype": "float33"}}, "bucket 0 of the plan has dtype='float33', expected the name of a dtype"),
        ({"bucket": {"predivid": 1.0}}, "has 'predivid', which is no field of one; they are device, dtype"),
        ({"bucket": {"postdivide": "2"}}, "postdivide='2'"),
        ({"bucket": {"predivide": math.inf}}, "predivide=inf"), ({"bucket": {"slots": []}}, "holds no gradient; leave it out"),
        ({"slot": {"offset_bytes": -16}}, "offset_bytes=-16, expected sizes"), ({"slot": {"offset_bytes": 50}}, "multiple of 4"),
        ({"slot": {"offset_bytes": 64}}, "no room for 'p0' at offset_bytes=64"), ({"slot": {"shape": [40]}}, "no room for 'p0'"),
        ({"slot": {"shape": [1]}}, "of which 52 hold no gradient"), ({"slot": {"dim_order": [1]}}, "every dimension once"),
        ({"slot": {"parameter": "p1"}}, "holds 'p1' twice"), ({"slot": {"shared_with": ["p1"]}}, "holds 'p1' twice"),
        ({"world_size": 0}, "world_size=0, expected a number of ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            edited(**wrong)
    path.write_text("{")
    with pytest.raises(ValueError, match="plan.json is not JSON"):
        BucketPlan.load(path)
    with pytest.raises(ValueError, match=r"none.json' cannot be read \(No such file or directory\); give plan= a file"):
        BucketPlan.load(tmp_path / "none.json")


def test_a_plan_edited_in_code_is_checked_too():
    plan = plan_buckets(specs_of(), BucketConfig(), 2)
    bucket = plan.buckets[0]
    for buckets in ([dataclasses.replace(bucket, total_bytes=2 * bucket.total_bytes)],
                    [dataclasses.replace(bucket, slots=bucket.slots[:3])], [bucket, bucket]):
        with pytest.raises(ValueError, match="hold no gradient|holds 'p5' twice"):
            dataclasses.replace(plan, buckets=tuple(buckets))


def test_print():
    plan = plan_buckets(specs_of(4, 2**18), BucketConfig(message_size=2**19), 2)
    assert_expected_inline(str(plan), """\
bucket plan: 2 allreduces, 4.000 MiB, 2 ranks, layout 'reverse'
bucket    parameters    n    dtype    MiB    divide pre / post    start after    wait before    window MFLOP
--------  ------------  ---  -------  -----  -------------------  -------------  -------------  --------------
0         p3, p2        2    float32  2.000  1 / 2                ready          -              -
1         p1, p0        2    float32  2.000  1 / 2                ready          -              -""")


@pytest.mark.parametrize(("num_parameters", "numel", "expected"), [
    (4, 2**10, 2**19), (16, 2**18, 2**20), (9, 10**7, 10_000_000), (16, 2**18 + 1, 2**20 + 4),
])
def test_without_a_size_a_model_makes_four_buckets_that_are_neither_tiny_nor_larger_than_apex_s(num_parameters, numel, expected):
    specs = specs_of(num_parameters, numel)
    assert default_message_size(sum(spec.numel for spec in specs)) == expected
    given = plan_buckets(specs, BucketConfig(message_size=expected), 2)
    assert plan_buckets(specs, BucketConfig(), 2) == given
