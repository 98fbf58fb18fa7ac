"""Cases as they cross the door: round trip, refusals that name the field, names and digests."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120_cells.cases import (
    Activation,
    BlockCase,
    Case,
    CaseError,
    DenseCase,
    DenseProbe,
    Format,
    MoeCase,
    MoeProbe,
    Routing,
    Spread,
    case_from_json,
    case_to_json,
    operation,
)

WHOLE = st.integers(1, 1 << 20)
GROUPS = st.integers(1, 512).map(lambda x: 16 * x)
SWEEP = st.lists(st.integers(0, 5000), min_size=1, max_size=5).map(tuple)
SEED = st.integers(0, 1 << 40)
ACTIVATION = st.builds(
    Activation,
    limit=st.none() | st.floats(0.5, 100),
    alpha=st.floats(0.1, 4),
    beta=st.floats(-2, 2),
)
SCALING = st.floats(1e-3, 1e3)
DENSE = st.builds(
    DenseCase,
    probe=st.sampled_from(get_args(DenseProbe)),
    n=WHOLE,
    k=GROUPS,
    ms=SWEEP,
    format=st.sampled_from(get_args(Format)),
    spread=st.sampled_from(get_args(Spread)),
    seed=SEED,
    projection=st.sampled_from(["", "qkv_proj", "o_proj"]),
)
EXPERTS = st.integers(1, 600).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, min(e, 32))))


@st.composite
def moe_cases(draw: st.DrawFn) -> MoeCase:
    experts, top_k = draw(EXPERTS)
    return MoeCase(
        probe=draw(st.sampled_from(get_args(MoeProbe))),
        tokens=draw(SWEEP),
        hidden=draw(GROUPS),
        intermediate=draw(GROUPS),
        experts=experts,
        top_k=top_k,
        activation=draw(ACTIVATION),
        routed_scaling=draw(SCALING),
        routing=draw(st.sampled_from(get_args(Routing))),
        format=draw(st.sampled_from(get_args(Format))),
        spread=draw(st.sampled_from(get_args(Spread))),
        seed=draw(SEED),
    )


@st.composite
def block_cases(draw: st.DrawFn) -> BlockCase:
    experts, top_k = draw(EXPERTS)
    return BlockCase(
        tokens=draw(st.integers(1, 5000)),
        hidden=draw(GROUPS),
        intermediate=draw(GROUPS),
        experts=experts,
        top_k=top_k,
        shared_intermediate=draw(GROUPS),
        shared_gate=draw(st.booleans()),
        activation=draw(ACTIVATION),
        routed_scaling=draw(SCALING),
        seed=draw(SEED),
    )


DENSE_ONE = DenseCase("bound", 256, 512, (1, 33))
MOE_ONE = MoeCase("bound", (16,), 256, 128, 8, 3)
BLOCK_ONE = BlockCase(16, 256, 128, 8, 3, 64, shared_gate=True)


@given(DENSE | moe_cases() | block_cases())
def test_a_case_survives_the_door(case: Case) -> None:
    text = json.dumps(case_to_json(case), allow_nan=False)
    again = case_from_json(json.loads(text))
    assert again == case
    assert type(again) is type(case)
    assert (again.name, again.digest) == (case.name, case.digest)


def test_operations() -> None:
    assert [operation(c) for c in (DENSE_ONE, MOE_ONE, BLOCK_ONE)] == ["dense", "moe", "block"]


def changed(case: Case, **fields: Any) -> dict[str, Any]:
    return {**case_to_json(case), **fields}


@pytest.mark.parametrize("case", [DENSE_ONE, MOE_ONE, BLOCK_ONE])
def test_an_unknown_field_is_named(case: Case) -> None:
    with pytest.raises(CaseError, match="tokns"):
        case_from_json(changed(case, tokns=3))


@pytest.mark.parametrize("case", [DENSE_ONE, MOE_ONE, BLOCK_ONE])
def test_a_missing_field_is_named(case: Case) -> None:
    data = case_to_json(case)
    first = "n" if isinstance(case, DenseCase) else "hidden"
    del data[first]
    with pytest.raises(CaseError, match=rf"'{first}'"):
        case_from_json(data)


@pytest.mark.parametrize("operation_", ["attention", "", None, [], {}, 3])
def test_an_unknown_operation(operation_: Any) -> None:
    with pytest.raises(CaseError, match="operation must be one of dense, moe, block"):
        case_from_json(changed(DENSE_ONE, operation=operation_))


NOT_COUNTS = [0, -1, True, 1.0, "64", None, [64], 1 << 24, 10**30]


@pytest.mark.parametrize("value", NOT_COUNTS)
@pytest.mark.parametrize(
    ("case", "field"),
    [
        (DENSE_ONE, "n"),
        (DENSE_ONE, "k"),
        (MOE_ONE, "hidden"),
        (MOE_ONE, "intermediate"),
        (MOE_ONE, "experts"),
        (MOE_ONE, "top_k"),
        (BLOCK_ONE, "tokens"),
        (BLOCK_ONE, "shared_intermediate"),
        (BLOCK_ONE, "hidden"),
    ],
)
def test_what_is_not_a_count_is_refused_by_name(case: Case, field: str, value: Any) -> None:
    with pytest.raises(CaseError, match=rf"^{field} "):
        case_from_json(changed(case, **{field: value}))


@pytest.mark.parametrize("value", [[], [-1], [True], [1.5], ["1"], [None], [1 << 24], "12", 5, None, {"a": 1}])
@pytest.mark.parametrize(("case", "field"), [(DENSE_ONE, "ms"), (MOE_ONE, "tokens")])
def test_what_is_not_a_sweep_is_refused_by_name(case: Case, field: str, value: Any) -> None:
    with pytest.raises(CaseError, match=rf"^{field} "):
        case_from_json(changed(case, **{field: value}))


@pytest.mark.parametrize(
    ("case", "field"),
    [(DENSE_ONE, "k"), (MOE_ONE, "hidden"), (MOE_ONE, "intermediate"), (BLOCK_ONE, "shared_intermediate")],
)
@pytest.mark.parametrize("value", [1, 15, 24, 520])
def test_k_must_be_a_multiple_of_16(case: Case, field: str, value: int) -> None:
    with pytest.raises(CaseError, match=rf"^{field} must be a multiple of 16"):
        case_from_json(changed(case, **{field: value}))


@pytest.mark.parametrize("value", ["EXACT", "", None, 1, True, [], {}])
@pytest.mark.parametrize(
    ("case", "field"),
    [
        (DENSE_ONE, "probe"),
        (DENSE_ONE, "format"),
        (DENSE_ONE, "spread"),
        (MOE_ONE, "probe"),
        (MOE_ONE, "routing"),
        (MOE_ONE, "format"),
        (MOE_ONE, "spread"),
    ],
)
def test_a_choice_that_is_not_offered_is_refused_by_name(case: Case, field: str, value: Any) -> None:
    with pytest.raises(CaseError, match=rf"^{field} must be one of "):
        case_from_json(changed(case, **{field: value}))


@pytest.mark.parametrize("value", [True, -1, 1.0, "0", None, [0]])
@pytest.mark.parametrize("case", [DENSE_ONE, MOE_ONE, BLOCK_ONE])
def test_a_seed_is_a_whole_number(case: Case, value: Any) -> None:
    with pytest.raises(CaseError, match=r"^seed "):
        case_from_json(changed(case, seed=value))


@pytest.mark.parametrize("value", [0, -2.5, float("nan"), float("inf"), 1e9, "2", None, True, [1]])
@pytest.mark.parametrize("case", [MOE_ONE, BLOCK_ONE])
def test_routed_scaling_is_positive_and_finite(case: Case, value: Any) -> None:
    with pytest.raises(CaseError, match=r"^routed_scaling "):
        case_from_json(changed(case, routed_scaling=value))


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "activation"),
        ("silu", "activation"),
        ([1], "activation"),
        ({"limits": 7.0}, "limits"),
        ({"limit": -1.0}, "limit"),
        ({"limit": "7"}, "limit"),
        ({"limit": float("nan")}, "limit"),
        ({"limit": True}, "limit"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": None}, "alpha"),
        ({"alpha": float("inf")}, "alpha"),
        ({"beta": float("nan")}, "beta"),
        ({"beta": "0"}, "beta"),
    ],
)
@pytest.mark.parametrize("case", [MOE_ONE, BLOCK_ONE])
def test_an_activation_that_cannot_be_is_refused_by_name(case: Case, value: Any, named: str) -> None:
    with pytest.raises(CaseError, match=named):
        case_from_json(changed(case, activation=value))


def test_the_gate_of_a_shared_expert_is_a_truth_value() -> None:
    with pytest.raises(CaseError, match="shared_gate"):
        case_from_json(changed(BLOCK_ONE, shared_gate="yes"))


def test_a_projection_is_text() -> None:
    with pytest.raises(CaseError, match="projection"):
        case_from_json(changed(DENSE_ONE, projection=["qkv_proj"]))


@pytest.mark.parametrize("case", [MOE_ONE, BLOCK_ONE])
def test_more_experts_a_token_than_there_are(case: Case) -> None:
    with pytest.raises(CaseError, match=r"top_k \(9\) exceeds experts \(8\)"):
        case_from_json(changed(case, top_k=9))


@pytest.mark.parametrize("data", [None, [], "dense", 3])
def test_what_is_not_a_mapping_is_not_a_case(data: Any) -> None:
    with pytest.raises(CaseError):
        case_from_json(data)


# --- names and digests ----------------------------------------------------------------------------------------------

VARIATIONS: list[tuple[Case, dict[str, Any]]] = [
    (
        DENSE_ONE,
        {
            "probe": "unit",
            "n": 264,
            "k": 528,
            "ms": (1, 34),
            "format": "bf16",
            "spread": "span",
            "seed": 1,
            "projection": "qkv_proj",
        },
    ),
    (
        MOE_ONE,
        {
            "probe": "onehot",
            "tokens": (17,),
            "hidden": 272,
            "intermediate": 144,
            "experts": 9,
            "top_k": 2,
            "activation": Activation(limit=7.0),
            "routed_scaling": 2.5,
            "routing": "skewed",
            "format": "bf16",
            "spread": "span",
            "seed": 1,
        },
    ),
    (
        BLOCK_ONE,
        {
            "tokens": 17,
            "hidden": 272,
            "intermediate": 144,
            "experts": 9,
            "top_k": 2,
            "shared_intermediate": 80,
            "shared_gate": False,
            "activation": Activation(alpha=1.702),
            "routed_scaling": 2.5,
            "format": "bf16",
            "seed": 1,
        },
    ),
]


@pytest.mark.parametrize(("case", "fields"), VARIATIONS)
def test_the_digest_changes_with_every_field(case: Case, fields: dict[str, Any]) -> None:
    assert set(fields) == set(case.to_json()), "every field is varied"
    variants: list[Case] = [case, *(replace(case, **{name: value}) for name, value in fields.items())]
    assert len({c.digest for c in variants}) == len(variants)


def test_names_are_stable() -> None:
    """Names are what ``--only`` and old records refer to."""
    assert DENSE_ONE.name == "bound-m1..33-n256-k512-s0"
    case = DenseCase("bound", 64, 128, (7,), "bf16", "span", 3, "o_proj")
    assert case.name == "o_proj-bound-span-w4a16-m7-n64-k128-s3"
    assert MOE_ONE.name == "bound-t16-h256-i128-e8-k3-s0"
    clamped = replace(MOE_ONE, activation=Activation(limit=7.0), routing="minus_one", tokens=(0, 1, 2), seed=4)
    assert clamped.name == "bound-minus_one-clamped-t0..2-h256-i128-e8-k3-s4"
    assert BLOCK_ONE.name == "block-t16-h256-i128-e8-k3-shared64-s0"


@pytest.mark.parametrize("make", [lambda: DENSE_ONE, lambda: MOE_ONE, lambda: BLOCK_ONE])
def test_digests_do_not_depend_on_the_process(make: Callable[[], Case]) -> None:
    assert make().digest == case_from_json(json.loads(json.dumps(case_to_json(make())))).digest
    assert len(make().digest) == 16
