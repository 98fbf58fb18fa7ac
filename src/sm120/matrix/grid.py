"""What the user reads at the end: the grid, what failed and how to reproduce it, what was left out."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sm120.console import Console
from sm120.matrix.door import PLUGINS_VARIABLE, plugins
from sm120.matrix.plan import INCONCLUSIVE, PASS, UNSUPPORTED, Cell, Plan, Result
from sm120.matrix.verdict import RAN, WRONG, Grid, Verdict

_SHOWN_FAILURES = 20
_SHOWN_REASON = 60


@dataclass(frozen=True, slots=True)
class Repeat:
    """The flags that decide what a cell is, besides its id."""

    model: str
    tp: int
    seed: int
    profile: str
    stack: str | None = None
    device: str | None = None

    def command(self, cell: str | None = None) -> str:
        """One command that runs exactly that cell again."""
        words = [
            *([f"{PLUGINS_VARIABLE}={named}"] if (named := plugins()) else []),
            "scripts/inv",
            "validate-backends",
            "--model",
            self.model,
            "--tp",
            str(self.tp),
            "--seed",
            str(self.seed),
        ]
        words += [] if self.profile == "default" else [f"--{self.profile}"]
        words += [] if self.stack is None else ["--stack", self.stack]
        words += [] if self.device is None else ["--device", self.device]
        line = shlex.join(words)
        # Quoted even where the shell would not need it: ids are patterns to --only.
        return (
            line if cell is None else f"{line} --only {shlex.quote(cell) if shlex.quote(cell) != cell else repr(cell)}"
        )


def show(console: Console, plan: Plan, results: Mapping[str, Result], found: Grid, repeat: Repeat) -> None:
    """Prints everything but the gate's line."""
    _show_grid(console, plan, found)
    _show_failures(console, plan, results, repeat)
    for note in plan.reduced:
        console.info(f"reduced: {note}")
    for note in dict.fromkeys(note for result in results.values() for note in result.notes):
        console.info(f"note: {note}")
    console.info(summary(plan, results))


def summary(plan: Plan, results: Mapping[str, Result]) -> str:
    """Counts by verdict, and how far from its bound the best-judged PASS stayed."""
    words = [results[cell.id].verdict if cell.id in results else "not run" for cell in plan.cells]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    etas = [r.eta for r in results.values() if r.verdict == PASS and r.eta is not None]
    worst = f"; largest error of a PASS: {max(etas):.4f} of its bound" if etas else ""
    return f"{sum(word in RAN for word in words)} of {len(words)} cells ran: {counts or 'none'}{worst}"


def failures(plan: Plan, results: Mapping[str, Result], repeat: Repeat) -> list[dict[str, Any]]:
    """What --json says of every cell that was wrong or could not be judged."""
    return [
        {
            "cell": cell.id,
            "subject": cell.subject,
            "verdict": result.verdict,
            "reason": result.reason,
            "findings": [dict(finding) for finding in result.findings],
            "reproduce": repeat.command(cell.id),
            "reproducer": result.reproducer,
        }
        for cell, result in _failed(plan, results)
    ]


def rows(plan: Plan, found: Grid) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the grid: MoE backends down, FP4 GEMM backends across, each with its own verdict."""
    dense = [subject for subject in plan.subjects if subject.operation == "dense"]
    moe = [subject for subject in plan.subjects if subject.operation == "moe"]
    pairs = {(pair.moe, pair.dense): pair.verdict for pair in found.pairs}
    columns = ["MoE \\ FP4 GEMM", "own cells", *(subject.dense or "" for subject in dense)]
    table = [["own cells", "", *(_word(found.backends[subject.id]) for subject in dense)]]
    for subject in moe:
        own = _word(found.backends[subject.id])
        table.append(
            [subject.moe or "", own, *(_word(pairs[subject.moe or "", column.dense or ""]) for column in dense)]
        )
    return columns, table


def _show_grid(console: Console, plan: Plan, found: Grid) -> None:
    columns, table = rows(plan, found)
    console.table("Grid: the model's MoE block, by pair of backends", columns, table)


def _show_failures(console: Console, plan: Plan, results: Mapping[str, Result], repeat: Repeat) -> None:
    failed = list(_failed(plan, results))
    for cell, result in failed[:_SHOWN_FAILURES]:
        for line in failure_lines(cell, result, repeat):
            console.info(line)
    if len(failed) > _SHOWN_FAILURES:
        console.info(f"and {len(failed) - _SHOWN_FAILURES} more cells that did not pass; all are in the run's record")


def failure_lines(cell: Cell, result: Result, repeat: Repeat) -> Iterator[str]:
    """One failure as text: verdict and reason, tier and condition, the worst element, how to see it again."""
    yield f"{result.verdict} {cell.id}" + (f": {result.reason}" if result.reason else "")
    for finding in result.findings[:3]:
        condition = _condition(finding.get("condition"))
        yield f"    {finding.get('tier', '?')} {finding.get('check', '?')}{condition}: {finding.get('message', '')}"
        if isinstance(worst := finding.get("worst"), list) and worst and isinstance(worst[0], Mapping):
            yield f"    worst element: {_element(worst[0])}"
    if len(result.findings) > 3:
        yield f"    and {len(result.findings) - 3} more findings"
    if result.details is not None and result.details.get("log"):
        yield f"    log: {result.details['log']}"
    yield f"    again: {repeat.command(cell.id)}"
    if result.reproducer:
        yield f"    stand-alone reproducer: {result.reproducer}"


def _failed(plan: Plan, results: Mapping[str, Result]) -> Iterator[tuple[Cell, Result]]:
    for cell in plan.cells:
        result = results.get(cell.id)
        if result is not None and result.verdict in (*WRONG, INCONCLUSIVE):
            yield cell, result


def _condition(raw: object) -> str:
    if not isinstance(raw, Mapping) or not raw:
        return ""
    return f" at {', '.join(f'{key}={_plain(value)}' for key, value in raw.items() if value is not None)}"


def _element(raw: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(raw[key])}" for key in ("row", "col", "got", "want", "bound", "eta") if key in raw)


def _plain(value: object) -> str:
    if value is None:
        return "NaN"  # JSON has no NaN; the protocol writes null
    if isinstance(value, float):
        return f"{value:.6g}"
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


def _word(verdict: Verdict) -> str:
    if verdict.word == PASS:
        return f"{PASS} ({verdict.passed})"
    reason = verdict.reason or ""
    if verdict.word == UNSUPPORTED:
        reason = reason.removeprefix("MoE: ").removeprefix("FP4 GEMM: ")
    short = reason if len(reason) <= _SHOWN_REASON else reason[: _SHOWN_REASON - 3] + "..."
    return f"{verdict.word}: {short}" if short else verdict.word
