"""Properties of the plan: pure data, so worlds of any size are tested in one process."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.plan import BucketCaps, ParameterSpec, Plan, build_plan
from lockstep.plan.caps import MIB

KINDS = [("float32", 4), ("bfloat16", 2), ("float64", 8)]


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    specs = []
    for index in range(draw(st.integers(0, 30))):
        dtype, itemsize = draw(st.sampled_from(KINDS))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        specs.append(
            ParameterSpec(
                name=f"layer{index}.weight",
                shape=shape,
                dtype=dtype,
                itemsize=itemsize,
                device=draw(st.sampled_from(["cpu:0", "cuda:0", "cuda:1"])),
                sparse=draw(st.integers(0, 9)) == 0,
            )
        )
    return specs


@st.composite
def caps(draw: st.DrawFn) -> BucketCaps:
    size = st.integers(1, 20_000)
    per_bucket = tuple(draw(st.lists(size, max_size=3)))
    if per_bucket:
        return BucketCaps(max(per_bucket), per_bucket[0], per_bucket)
    return BucketCaps(draw(size), draw(size))


def kind_of(spec: ParameterSpec) -> tuple[str, str, bool]:
    return spec.dtype, spec.device, spec.sparse


@given(parameter_lists(), caps())
def test_every_parameter_travels_exactly_once(specs: list[ParameterSpec], caps: BucketCaps) -> None:
    plan = build_plan(specs, caps)
    assert sorted(p.name for p in plan.parameters) == sorted(s.name for s in specs)
    assert {p.name: p for p in plan.parameters} == {s.name: s for s in specs}
    assert [b.index for b in plan] == list(range(len(plan)))


@given(parameter_lists(), caps())
def test_a_bucket_holds_one_kind(specs: list[ParameterSpec], caps: BucketCaps) -> None:
    for bucket in build_plan(specs, caps):
        assert len({kind_of(p) for p in bucket.parameters}) == 1
        if bucket.sparse:
            assert len(bucket.parameters) == 1


@given(parameter_lists(), caps())
def test_caps_are_held_by_every_bucket_of_more_than_one_parameter(specs, caps: BucketCaps) -> None:
    seen: dict[tuple[str, str, bool], int] = {}
    for bucket in build_plan(specs, caps):
        kind = kind_of(bucket.parameters[0])
        if bucket.sparse:
            continue
        position = seen.get(kind, 0)
        seen[kind] = position + 1
        cap = caps.cap_for(position)
        before_last = bucket.num_bytes - bucket.parameters[-1].num_bytes
        if len(bucket.parameters) > 1:
            assert bucket.num_bytes <= cap * 9 / 8 or before_last <= cap / 64


@given(parameter_lists(), caps())
def test_buckets_are_not_cut_shorter_than_the_caps_ask(specs, caps: BucketCaps) -> None:
    """The next parameter of the same kind really would not have fitted."""
    previous: dict[tuple[str, str, bool], tuple[int, int]] = {}
    for bucket in build_plan(specs, caps):
        kind = kind_of(bucket.parameters[0])
        if bucket.sparse:
            continue
        if kind in previous:
            num_bytes, position = previous[kind]
            assert num_bytes + bucket.parameters[0].num_bytes > caps.cap_for(position)
            assert num_bytes > caps.cap_for(position) // 64
        previous[kind] = (bucket.num_bytes, previous[kind][1] + 1 if kind in previous else 0)


@given(parameter_lists(), caps())
def test_order_is_kept(specs: list[ParameterSpec], caps: BucketCaps) -> None:
    """Within a kind, parameters leave in the reverse of declaration order; a bucket leaves when it is complete."""
    place = {spec.name: i for i, spec in enumerate(reversed(specs))}
    plan = build_plan(specs, caps)
    for kind in {kind_of(s) for s in specs}:
        names = [p.name for b in plan for p in b.parameters if kind_of(p) == kind]
        assert [place[n] for n in names] == sorted(place[n] for n in names)
    completed = [max(place[n] for n in bucket.names) for bucket in plan]
    assert completed == sorted(completed)


@given(parameter_lists(), caps())
def test_digest_and_json_survive_a_round_trip(specs: list[ParameterSpec], caps: BucketCaps) -> None:
    plan = build_plan(specs, caps)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


@settings(max_examples=20, deadline=None)
@given(parameter_lists(), caps(), st.integers(2, 256))
def test_all_ranks_of_a_world_make_the_same_plan(specs, caps: BucketCaps, world: int) -> None:
    digests = {build_plan(list(specs), caps).digest for _ in range(world)}
    assert len(digests) == 1


@given(parameter_lists().filter(lambda specs: len(specs) > 1), caps(), st.randoms())
def test_an_observed_order_is_followed(specs: list[ParameterSpec], caps: BucketCaps, random) -> None:
    order = [s.name for s in specs]
    random.shuffle(order)
    plan = build_plan(specs, caps, ready_order=order)
    assert plan.order == "observed"
    for kind in {kind_of(s) for s in specs}:
        names = [p.name for b in plan for p in b.parameters if kind_of(p) == kind]
        assert names == [name for name in order if name in set(names)]


@given(parameter_lists().filter(lambda specs: any(s.num_bytes for s in specs)))
def test_the_digest_tells_layouts_apart(specs: list[ParameterSpec]) -> None:
    plan = build_plan(specs)
    changed = [ParameterSpec(s.name, (*s.shape, 1), s.dtype, s.itemsize, s.device, s.stride, s.sparse) for s in specs]
    assert build_plan(changed).digest != plan.digest


def test_offsets_follow_the_sizes() -> None:
    specs = [ParameterSpec(n, (size,), "float32", 4) for n, size in (("a", 3), ("b", 0), ("c", 5))]
    (bucket,) = build_plan(specs)
    assert bucket.names == ("c", "b", "a")
    assert bucket.offsets == (0, 5, 5)
    assert bucket.num_elements == 8


def test_the_default_starts_with_a_small_bucket() -> None:
    specs = [ParameterSpec(str(i), (MIB // 8,), "float32", 4) for i in range(10)]  # 512 KiB each
    plan = build_plan(specs)
    assert [len(b.parameters) for b in plan] == [2, 8]


def test_a_bias_between_matrices_of_the_caps_size_does_not_travel_alone() -> None:
    shapes = [("matrix", 1024), ("bias", 4)] * 4
    specs = [ParameterSpec(f"{i}.{n}", (size,), "float32", 4) for i, (n, size) in enumerate(shapes)]
    plan = build_plan(specs, BucketCaps(4096, 4096))
    assert len(plan) == 4
    assert all(4096 <= bucket.num_bytes <= 4096 * 9 / 8 for bucket in plan)


def test_two_parameters_of_one_name_are_refused() -> None:
    spec = ParameterSpec("a", (1,), "float32", 4)
    with pytest.raises(ValueError, match="'a'"):
        build_plan([spec, spec])


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_a_cap_must_be_a_positive_number(bad: float) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        BucketCaps.from_megabytes(bad)
    with pytest.raises(ValueError, match="bucket_cap_mb_list"):
        BucketCaps.from_megabytes(cap_mb_list=[1, bad])


def test_a_cap_list_is_used_in_launch_order_and_its_last_entry_repeats() -> None:
    caps = BucketCaps.from_megabytes(cap_mb_list=[1, 2])
    assert [caps.cap_for(i) for i in range(4)] == [MIB, 2 * MIB, 2 * MIB, 2 * MIB]
    assert caps.cap_bytes == 2 * MIB


def test_a_plan_that_was_edited_is_refused() -> None:
    data = json.loads(build_plan([ParameterSpec("a", (4,), "float32", 4)]).to_json())
    data["buckets"][0][0]["shape"] = [5]
    with pytest.raises(ValueError, match="digest"):
        Plan.from_json(json.dumps(data))
    data["format"] = 99
    with pytest.raises(ValueError, match="format 99"):
        Plan.from_json(json.dumps(data))


def test_the_table_names_buckets_bytes_and_parameters() -> None:
    specs = [ParameterSpec(f"block.{i}.weight", (256,), "float32", 4) for i in range(5)]
    plan = build_plan(specs, BucketCaps(2048, 2048))
    text = str(plan)
    assert plan.digest[:12] in text
    assert "block.4.weight, block.3.weight" in text
    assert "2.00 KiB" in text
    assert len(text.splitlines()) == 2 + len(plan)


def test_bucket_of_finds_the_bucket_by_name() -> None:
    plan = build_plan([ParameterSpec(n, (4,), "float32", 4) for n in "ab"], BucketCaps(16, 16))
    assert plan.bucket_of("a").index == 1
    with pytest.raises(KeyError, match="nope"):
        plan.bucket_of("nope")
