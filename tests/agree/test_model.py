"""The report about models that differ: what is named first, and how ranks are folded."""

from __future__ import annotations

from dataclasses import replace

from lockstep.agree.model import ModelDescription, TensorDescription, describe_differences
from lockstep.errors import rank_table

WEIGHT = TensorDescription("fc.weight", (4, 3), "float32", (3, 1), True)
BIAS = TensorDescription("fc.bias", (4,), "float32", (1,), True)
MASK = TensorDescription("mask", (4,), "bool", (1,))
MODEL = ModelDescription({"torch": "2.13.0"}, {"bucket_cap_mb": "None"}, (WEIGHT, BIAS), (MASK,), "digest")


def report(*models: ModelDescription) -> str:
    return describe_differences(dict(enumerate(models)))[0]


def test_json_round_trip() -> None:
    assert ModelDescription.from_json(MODEL.to_json()) == MODEL


def test_a_shape_is_named_with_both_values() -> None:
    other = replace(MODEL, parameters=(replace(WEIGHT, shape=(5, 3)), BIAS))
    text = report(MODEL, other, MODEL)
    assert "parameter fc.weight differs" in text
    assert "rank 0, 2 | [4, 3] float32" in text
    assert "rank 1    | [5, 3] float32" in text


def test_a_missing_parameter_is_named_rather_than_the_shift_it_causes() -> None:
    text = report(MODEL, replace(MODEL, parameters=(BIAS,)))
    assert "parameter fc.weight exists on some ranks only" in text
    assert "order of parameters" not in text


def test_an_order_swap_names_the_first_place() -> None:
    text = report(MODEL, replace(MODEL, parameters=(BIAS, WEIGHT)))
    assert "the order of parameters differs, first at fc.weight" in text
    assert "fc.bias comes at this place" in text


def test_versions_and_options_come_first() -> None:
    other = replace(MODEL, versions={"torch": "2.11.0"}, options={"bucket_cap_mb": "1"}, buffers=())
    text = report(MODEL, other)
    assert text.index("version of torch") < text.index("option bucket_cap_mb") < text.index("buffer mask")


def test_a_plan_that_differs_alone_is_said_so() -> None:
    assert "the plan (buckets) differs" in report(MODEL, replace(MODEL, plan_digest="other"))


def test_equal_values_are_folded_into_ranges() -> None:
    table = rank_table({0: "a", 1: "a", 2: "b", 3: "a", 4: "a", 7: "b"})
    assert table == "  rank 0-1, 3-4 | a\n  rank 2, 7     | b"
