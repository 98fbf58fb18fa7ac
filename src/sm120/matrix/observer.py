"""Keeps every verdict as it comes, and tells the user how far the matrix is."""

from sm120.console import Console, Progress
from sm120.matrix.journal import Journal
from sm120.matrix.plan import PASS, Cell, Plan, Result


class Watcher:
    """The schedule's observer. Progress, and with it the time left, goes by the cost of what is left."""

    def __init__(self, plan: Plan, journal: Journal, console: Console, progress: Progress) -> None:
        """``progress`` counts to 100."""
        self.notes: list[str] = []
        self._journal = journal
        self._console = console
        self._progress = progress
        self._total = len(plan.cells)
        self._settled = set(journal.results)
        self._cost = {cell.id: cell.cost for cell in plan.cells if cell.id not in self._settled}
        self._all = sum(self._cost.values())
        self._done = 0.0
        self._shown = 0

    def begun(self, cell: Cell) -> None:
        """Shows what is running."""
        self._step(cell.id)

    def ended(self, cell: Cell, result: Result) -> None:
        """Keeps a verdict; an amended one replaces the first."""
        self._journal.append(cell.id, result)
        self._settled.add(cell.id)
        self._done += self._cost.pop(cell.id, 0.0)
        self._step(cell.id)
        line = f"{result.verdict} {cell.id}" + (f": {result.reason}" if result.reason else "")
        (self._console.detail if result.verdict == PASS else self._console.info)(line)

    def note(self, text: str) -> None:
        """Shown now and in the report."""
        self.notes.append(text)
        self._console.warn(text)

    def _step(self, name: str) -> None:
        percent = min(100, int(100 * self._done / self._all)) if self._all else 0
        self._progress.advance(
            percent - self._shown, f"% of the work, cell {len(self._settled)} of {self._total}, {name}"
        )
        self._shown = percent
