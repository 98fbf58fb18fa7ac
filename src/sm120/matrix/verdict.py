"""From the verdicts of cells to those of backends and pairs, and to the task's exit code. Pure functions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sm120.errors import NothingChecked, NumericsError
from sm120.matrix.plan import (
    CRASH,
    FAIL,
    HANG,
    INCONCLUSIVE,
    PASS,
    SKIPPED,
    UNSUPPORTED,
    Cell,
    Plan,
    Result,
    Subject,
)

WRONG = (FAIL, CRASH, HANG)
RAN = (PASS, *WRONG)
"""Verdicts of cells that were run to an answer; not run is not passed."""
_WORST_FIRST = (FAIL, CRASH, HANG, INCONCLUSIVE, UNSUPPORTED, SKIPPED)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of a backend or a pair. PASS only when every cell passed and there was at least one."""

    word: str
    reason: str | None
    cells: int
    passed: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A MoE backend with an FP4 GEMM backend."""

    moe: str
    dense: str
    servable: bool
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Grid:
    """All that a run found out. ``backends`` is keyed by subject id."""

    backends: Mapping[str, Verdict]
    pairs: tuple[Pair, ...]

    def servable_pass(self) -> tuple[Pair, ...]:
        """The pairs that passed and that a server on this machine can use."""
        return tuple(pair for pair in self.pairs if pair.servable and pair.verdict.word == PASS)


def grid(plan: Plan, results: Mapping[str, Result], *, has_shared_expert: bool) -> Grid:
    """Judges every subject and every combination of a MoE backend with an FP4 GEMM backend."""
    backends = {s.id: subject_verdict(s, plan.cells_of(s.id), results) for s in plan.subjects}
    blocks = {(s.moe, s.dense): backends[s.id] for s in plan.subjects if s.operation == "block"}
    pairs = tuple(
        Pair(
            moe=moe.moe or "",
            dense=dense.dense or "",
            servable=moe.servable and dense.servable,
            verdict=pair_verdict(
                backends[moe.id],
                backends[dense.id],
                blocks.get((moe.moe, dense.dense)),
                has_shared_expert=has_shared_expert,
            ),
        )
        for moe in plan.subjects
        if moe.operation == "moe"
        for dense in plan.subjects
        if dense.operation == "dense"
    )
    return Grid(backends, pairs)


def subject_verdict(subject: Subject, cells: Sequence[Cell], results: Mapping[str, Result]) -> Verdict:
    """The worst verdict of its cells, or PASS when all of them passed."""
    if subject.unsupported is not None:
        return Verdict(UNSUPPORTED, subject.unsupported, len(cells), 0)
    if not cells:
        return Verdict(SKIPPED, "no cell of it was asked for", 0, 0)
    found = [results.get(cell.id, Result(SKIPPED, "not run")) for cell in cells]
    passed = sum(result.verdict == PASS for result in found)
    if passed == len(cells):
        return Verdict(PASS, None, passed, passed)
    worst = min((r for r in found if r.verdict != PASS), key=lambda result: _WORST_FIRST.index(result.verdict))
    alike = sum(result.verdict == worst.verdict for result in found)
    count = "" if alike == len(cells) else f"{alike} of {len(cells)} cells"
    reason = ": ".join(part for part in (count, worst.reason) if part) or None
    return Verdict(worst.verdict, reason, len(cells), passed)


def pair_verdict(moe: Verdict, dense: Verdict, block: Verdict | None, *, has_shared_expert: bool) -> Verdict:
    """PASS only when both backends passed and so did their block cells.

    A model without a shared expert has no block that the pair shares: its backends' own cells decide.
    """
    if block is None and has_shared_expert:
        block = Verdict(SKIPPED, "the pair's block was not planned", 0, 0)
    parts = {"MoE": moe, "FP4 GEMM": dense} | ({} if block is None else {"block": block})
    cells, passed = sum(v.cells for v in parts.values()), sum(v.passed for v in parts.values())
    if all(v.word == PASS and v.passed > 0 for v in parts.values()):
        return Verdict(PASS, None, cells, passed)
    denied = {name: v for name, v in parts.items() if v.word != PASS or v.passed == 0}
    # A block is skipped because of a backend: the backend's own verdict says more.
    name, worst = min(denied.items(), key=lambda item: _WORST_FIRST.index(item[1].word) if item[1].word != PASS else 99)
    word = worst.word if worst.word != PASS else INCONCLUSIVE
    return Verdict(word, f"{name}: {worst.reason or worst.word}", cells, passed)


def skip_reason(block: Subject, plan: Plan, results: Mapping[str, Result]) -> str | None:
    """Why a block need not run: one of its backends cannot run, or ran without a single PASS. None: run it.

    A backend none of whose own cells were asked for (``--only``) says nothing against the block.
    """
    for subject in plan.subjects:
        if subject.operation == "block" or not _belongs(subject, block):
            continue
        if subject.unsupported is not None:
            return f"{subject.id} is {UNSUPPORTED}: {subject.unsupported}"
        own = plan.cells_of(subject.id)
        if own and not any(_is(results, cell, (PASS,)) for cell in own):
            return f"{subject.id} has no PASS"
    return None


def exit_code(results: Collection[Result], found: Grid, *, require_servable: bool) -> int:
    """0: at least one cell ran and all that ran passed; 14: one was wrong or could not be judged; 3: none ran.

    With ``require_servable`` also 3 unless a pair passed that a server on this machine can use.
    """
    words = [result.verdict for result in results]
    if any(word in WRONG for word in words):
        return NumericsError.exit_code
    if PASS not in words:
        return NothingChecked.exit_code
    if INCONCLUSIVE in words:
        return NumericsError.exit_code
    if require_servable and not found.servable_pass():
        return NothingChecked.exit_code
    return 0


def _is(results: Mapping[str, Result], cell: Cell, words: Collection[str]) -> bool:
    return (result := results.get(cell.id)) is not None and result.verdict in words


def _belongs(subject: Subject, block: Subject) -> bool:
    return (subject.moe is not None and subject.moe == block.moe) or (
        subject.dense is not None and subject.dense == block.dense
    )
