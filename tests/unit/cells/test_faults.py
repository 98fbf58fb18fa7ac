"""The catalogue: large enough, well named, nothing idle; and the judge on a small sample of it.

All of it over whole seeds is the self-test, which runs on its own.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sm120_cells import selftest
from sm120_cells.cases import DenseCase, MoeCase
from sm120_cells.evaluate import evaluate
from sm120_cells.faults import Mutant, catalogue
from sm120_cells.judge import poisoned, same_bits
from sm120_cells.probes import dense_operands, moe_operands
from sm120_cells.subjects import PATTERNS, DenseSubject, MoeSubject

ALL = list(catalogue())
FAULTS = [m for m in ALL if m.kind == "fault"]
RIGHT = [m for m in ALL if m.kind == "right"]


def title(mutant: Mutant) -> str:
    return f"{mutant.operation}: {mutant.name}"


def the(operation: str, name: str) -> Mutant:
    return next(m for m in ALL if (m.operation, m.name) == (operation, name))


def test_the_catalogue_is_large_and_every_entry_says_where_it_comes_from() -> None:
    assert len(FAULTS) >= 40
    for operation in ("dense", "moe"):
        assert len([m for m in FAULTS if m.operation == operation]) >= 20
        assert len([m for m in RIGHT if m.operation == operation]) >= 10
    assert len({title(m) for m in ALL}) == len(ALL)
    for mutant in ALL:
        assert mutant.source.strip(), mutant.name
        assert (mutant.dense is None) != (mutant.moe is None)


def test_the_faults_that_were_asked_for_are_there() -> None:
    names = " | ".join(m.name for m in FAULTS)
    for words in (
        "zeros at one M",
        "rows beyond the last full block of 128 doubled",
        "32-row atom",
        "gate and up swapped",
        "clamp of SwiGLU dropped",
        "routed scaling dropped",
        "-1 taken as the last expert",
        "empty expert's slot not zeroed",
        "stale in 1 of 50 calls",
        "reads padding",
        "neighbour's alpha",
        "bf16 accumulator",
        "13-bit accumulator",
        "GELU for SiLU",
        "one row 5 % too large",
        "twenty elements",
        "wrong only when block scales span",
    ):
        assert words in names


# --- no fault is idle -------------------------------------------------------------------------------------------------


def cases(mutant: Mutant) -> Iterator[DenseCase | MoeCase]:
    """Cases of the self-test that a W4A4 fault meets, the cheapest first."""
    if mutant.dense is not None:
        yield from sorted(selftest.dense_cases(0, "fp4"), key=lambda c: (len(c.ms) > 1, c.n * c.k * max(c.ms)))
    else:
        yield from sorted(selftest.moe_cases(0, "fp4"), key=lambda c: (len(c.tokens) > 1, c.probe != "bound"))


@cache
def operands(case: DenseCase | MoeCase) -> Any:
    return dense_operands(case) if isinstance(case, DenseCase) else moe_operands(case)


def subject(mutant: Mutant, case: DenseCase | MoeCase) -> DenseSubject | MoeSubject:
    if isinstance(case, DenseCase):
        assert mutant.dense is not None
        return DenseSubject(case, operands(case), mutant.dense(0))
    assert mutant.moe is not None
    return MoeSubject(case, operands(case), mutant.moe(0))


def observe(made: DenseSubject | MoeSubject, rows: int, pattern: Any) -> tuple[Tensor, ...]:
    """Everything a call may have written: the output with its surroundings, and the buffers of its inputs."""
    posed = made.pose(made.inputs(rows), pattern)
    fence = poisoned(rows + 256, made.columns, torch.device("cpu"))
    made.call(posed, fence[128 : 128 + rows])
    return (fence, *posed.buffers)


@cache
def right(case: DenseCase | MoeCase, rows: int) -> tuple[Tensor, ...]:
    operation = "dense" if isinstance(case, DenseCase) else "moe"
    return observe(subject(the(operation, "SM120 model"), case), rows, PATTERNS[0])


def differs(mutant: Mutant) -> bool:
    """Whether a fault shows in anything: under each padding, at every size of a sweep, in 64 calls."""
    for case in cases(mutant):
        made = subject(mutant, case)
        rows = max(made.sweep) if len(made.sweep) == 1 else 17
        calls = [(rows, pattern) for pattern in PATTERNS]
        calls += [(rows, PATTERNS[0])] * made.repeats
        calls += [(size, PATTERNS[0]) for size in made.sweep]
        for size, pattern in calls:
            got = observe(made, size, pattern)
            if not same_bits(got[0], right(case, size)[0]):
                return True
            buffers = made.pose(made.inputs(size), pattern).buffers
            if any(not torch.equal(_bytes(a), _bytes(b)) for a, b in zip(got[1:], buffers, strict=True)):
                return True
    return False


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


STALE = "stale result returned"
"""Right as long as nothing but the padding changes between calls; the relations see it (below)."""


@pytest.mark.parametrize("mutant", [m for m in FAULTS if m.name != STALE], ids=title)
def test_no_fault_is_idle(mutant: Mutant) -> None:
    assert differs(mutant)


# --- a sample of the self-test ----------------------------------------------------------------------------------------


def judged(mutant: Mutant, case: DenseCase | MoeCase) -> Any:
    """One mutant on one case of the self-test."""
    for made, expected in selftest._subjects(mutant, 0, torch.device("cpu")):
        if made.case == case:  # type: ignore[attr-defined]  # subjects of the self-test have a case
            return evaluate(made, expected)
    raise AssertionError(case)


@pytest.mark.parametrize(
    ("name", "probe", "tier"),
    [
        ("weight scale rows rotated in one 32-row atom", "readback", "T1"),
        ("13-bit accumulator", "unit", None),
        ("13-bit accumulator", "repeat", "T1"),
        (STALE, "repeat", "T3"),
        ("a tile stale in 1 of 50 calls", "repeat", "T4"),
        ("activations changed in place", "repeat", "T0"),
    ],
)
def test_dense_faults_are_caught_in_the_tier_that_is_meant_for_them(name: str, probe: str, tier: str | None) -> None:
    mutant = the("dense", name)
    outcome = judged(mutant, next(c for c in selftest.dense_cases(0, "fp4") if c.probe == probe))
    assert outcome.verdict == ("PASS" if tier is None else "FAIL")
    if tier is not None:
        assert tier in {f.tier for f in outcome.findings}


@pytest.mark.parametrize(
    ("name", "routing"), [("-1 taken as the last expert", "minus_one"), ("gate and up swapped", "one_expert")]
)
def test_moe_faults_are_caught(name: str, routing: str) -> None:
    case = next(c for c in selftest.moe_cases(0, "fp4") if (c.probe, c.routing) == ("isolated", routing))
    assert judged(the("moe", name), case).verdict == "FAIL"
    assert judged(the("moe", "dequantised fp32 product"), case).verdict == "PASS"


def test_a_whole_judgement_of_a_right_variant_and_of_a_fault() -> None:
    """As the self-test reports them, with what the published criteria would have said."""
    one = selftest.judge_mutant(the("dense", "dequantised fp32 product"), 0).to_json()
    assert (one["caught"], one["tiers"], one["first"]) == (False, [], None)
    assert 0.5 < one["eta"] <= 1.0
    assert set(one["criteria"].values()) == {True}
    other = selftest.judge_mutant(the("dense", "output 5 % too large"), 0).to_json()
    assert other["caught"]
    assert other["first"]["tier"] == "T1"
    assert other["criteria"]["cosine > 0.97"]
    assert other["criteria"]["DeepGEMM diff < 0.02"]
    assert other["cells"] == len(selftest.dense_cases(0, "fp4"))
