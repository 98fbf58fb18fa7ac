"""Keeps every verdict as it comes, and tells the user how far the matrix is and how long it will still take."""

import time

from sm120.console import Console, Progress, duration
from sm120.matrix.journal import Journal
from sm120.matrix.plan import PASS, Cell, Plan, Result


def time_left(done: float, total: float, seconds: float) -> float | None:
    """Seconds that the rest will take when it goes on as it went; None while nothing is known."""
    return seconds * (total - done) / done if 0 < done <= total else None


class Watcher:
    """The schedule's observer."""

    def __init__(self, plan: Plan, journal: Journal, console: Console, progress: Progress) -> None:
        """``progress`` counts to 100."""
        self.notes: list[str] = []
        self._journal = journal
        self._console = console
        self._progress = progress
        self._cost = {cell.id: cell.cost for cell in plan.cells}
        self._settled = set(journal.results)
        self._before = sum(self._cost[cell] for cell in self._settled if cell in self._cost)
        self._done = self._before
        self._shown = 0
        self._began = time.monotonic()
        self._step("")

    def begun(self, cell: Cell) -> None:
        """Shows what is running."""
        self._step(cell.id)

    def ended(self, cell: Cell, result: Result) -> None:
        """Keeps a verdict; an amended one replaces the first."""
        self._journal.append(cell.id, result)
        if cell.id not in self._settled:
            self._settled.add(cell.id)
            self._done += self._cost[cell.id]
        self._step(cell.id)
        line = f"{result.verdict} {cell.id}" + (f": {result.reason}" if result.reason else "")
        (self._console.detail if result.verdict == PASS else self._console.info)(line)

    def note(self, text: str) -> None:
        """Shown now and in the report."""
        self.notes.append(text)
        self._console.warn(text)

    def _step(self, name: str) -> None:
        total = sum(self._cost.values()) or 1.0
        percent = min(100, int(100 * self._done / total))
        left = time_left(self._done - self._before, total - self._before, time.monotonic() - self._began)
        rest = "" if left is None else f", {duration(left)} left"
        self._progress.advance(percent - self._shown, f"cell {len(self._settled)} of {len(self._cost)}{rest}  {name}")
        self._shown = percent
