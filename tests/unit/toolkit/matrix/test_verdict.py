from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120.matrix.plan import VERDICTS, Cell, Plan, Result, Subject
from sm120.matrix.verdict import Grid, Verdict, exit_code, grid, pair_verdict, skip_reason

DENSE = Subject("dense:a", "dense", None, "a", None, servable=True)
MOE = Subject("moe:x", "moe", "x", None, None, servable=True)
BLOCK = Subject("block:x+a", "block", "x", "a", None, servable=True)


def cell(subject: Subject, number: int) -> Cell:
    return Cell(f"{subject.id}/{number}", subject.id, None, 1.0, {})


PLAN = Plan((DENSE, MOE, BLOCK), tuple(cell(s, n) for s in (DENSE, MOE, BLOCK) for n in (1, 2)), ())


def results(**changes: str) -> dict[str, Result]:
    """All PASS but for the named cells, such as ``dense_a_1``."""
    found = {c.id: Result("PASS") for c in PLAN.cells}
    for name, word in changes.items():
        operation, backend, number = name.split("_")
        found[f"{operation}:{backend}/{number}"] = Result(word, "why")
    return found


def judged(found: Mapping[str, Result], plan: Plan = PLAN, *, shared: bool = True) -> Grid:
    return grid(plan, found, has_shared_expert=shared)


def test_all_passed() -> None:
    found = judged(results())
    (pair,) = found.pairs
    assert pair.verdict == Verdict("PASS", None, 6, 6)
    assert found.servable_pass() == (pair,)


@pytest.mark.parametrize("word", [word for word in VERDICTS if word != "PASS"])
@pytest.mark.parametrize(("where", "name"), [("dense_a_1", "FP4 GEMM"), ("moe_x_2", "MoE")])
def test_one_cell_decides(where: str, name: str, word: str) -> None:
    found = judged(results(**{where: word}))
    (pair,) = found.pairs
    assert pair.verdict == Verdict(word, f"{name}: 1 of 2 cells: why", 6, 5)
    assert found.servable_pass() == ()


def test_a_missing_result_is_no_pass() -> None:
    found = results()
    del found["moe:x/1"]
    (pair,) = judged(found).pairs
    assert pair.verdict.word == "SKIPPED"
    assert pair.verdict.reason == "MoE: 1 of 2 cells: not run"


def test_the_backends_own_verdict_says_more_than_a_skipped_block() -> None:
    found = results(dense_a_1="FAIL", dense_a_2="FAIL")
    found |= {
        "block:x+a/1": Result("SKIPPED", "dense:a has no PASS"),
        "block:x+a/2": Result("SKIPPED", "dense:a has no PASS"),
    }
    (pair,) = judged(found).pairs
    assert pair.verdict.reason == "FP4 GEMM: why"


def test_a_backend_without_cells_is_no_pass() -> None:
    plan = Plan(PLAN.subjects, tuple(c for c in PLAN.cells if c.subject != "moe:x"), ())
    (pair,) = judged(results(), plan).pairs
    assert pair.verdict.word == "SKIPPED"


def test_a_pair_without_its_block_is_no_pass_unless_the_model_has_none() -> None:
    plan = Plan((DENSE, MOE), tuple(c for c in PLAN.cells if c.subject != "block:x+a"), ())
    (pair,) = judged(results(), plan).pairs
    assert pair.verdict.word == "SKIPPED"
    (pair,) = judged(results(), plan, shared=False).pairs
    assert pair.verdict.word == "PASS"


WORDS = st.sampled_from(VERDICTS)
PARTS = st.builds(Verdict, WORDS, st.none(), st.integers(0, 3), st.integers(0, 3))


@given(moe=PARTS, dense=PARTS, block=st.none() | PARTS, shared=st.booleans())
@settings(deadline=None)
def test_a_pair_passes_only_when_all_of_its_parts_did(
    moe: Verdict, dense: Verdict, block: Verdict | None, shared: bool
) -> None:
    found = pair_verdict(moe, dense, block, has_shared_expert=shared)
    parts = [moe, dense] + ([block] if block is not None else [])
    every = all(part.word == "PASS" and part.passed > 0 for part in parts) and (block is not None or not shared)
    assert (found.word == "PASS") == every


@pytest.mark.parametrize(
    ("words", "servable", "required", "expected"),
    [
        pytest.param(["PASS"], True, False, 0, id="pass"),
        pytest.param(["PASS", "UNSUPPORTED", "SKIPPED"], True, False, 0, id="pass-and-not-run"),
        pytest.param([], True, False, 3, id="none"),
        pytest.param(["UNSUPPORTED", "SKIPPED"], True, False, 3, id="none-ran"),
        pytest.param(["INCONCLUSIVE"], True, False, 3, id="none-judged"),
        pytest.param(["PASS", "INCONCLUSIVE"], True, False, 14, id="not-all-judged"),
        pytest.param(["PASS", "FAIL"], True, False, 14, id="fail"),
        pytest.param(["PASS", "CRASH"], True, False, 14, id="crash"),
        pytest.param(["HANG"], True, False, 14, id="hang"),
        pytest.param(["PASS"], False, True, 3, id="not-servable"),
        pytest.param(["PASS"], True, True, 0, id="servable"),
        pytest.param(["FAIL"], False, True, 14, id="fail-comes-first"),
    ],
)
def test_exit_codes(words: list[str], servable: bool, required: bool, expected: int) -> None:
    dense = Subject("dense:a", "dense", None, "a", None, servable=servable)
    plan = Plan((dense, MOE, BLOCK), PLAN.cells, ())
    found = [Result(word) for word in words]
    assert exit_code(found, judged(results(), plan), require_servable=required) == expected


def test_skip_reasons() -> None:
    assert skip_reason(BLOCK, PLAN, results()) is None
    assert skip_reason(BLOCK, PLAN, results(dense_a_1="FAIL")) is None
    assert skip_reason(BLOCK, PLAN, results(dense_a_1="FAIL", dense_a_2="CRASH")) == "dense:a has no PASS"
    assert skip_reason(BLOCK, PLAN, {}) == "dense:a has no PASS"
    only = Plan(PLAN.subjects, tuple(c for c in PLAN.cells if c.subject == "block:x+a"), ())
    assert skip_reason(BLOCK, only, {}) is None
    refused = Subject("moe:x", "moe", "x", None, "no card", servable=False)
    assert skip_reason(BLOCK, Plan((refused, BLOCK), (), ()), {}) == "moe:x is UNSUPPORTED: no card"
    other = Subject("dense:b", "dense", None, "b", "no card", servable=False)
    assert skip_reason(BLOCK, Plan((other, DENSE, MOE, BLOCK), PLAN.cells, ()), results()) is None
