"""Runs a plan: one process a subject, restarted after it was lost, probed after anything but a PASS."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from sm120.errors import PreflightError
from sm120.matrix.door import Door, greet
from sm120.matrix.fingerprint import Fingerprint, differences
from sm120.matrix.lost import WorkerError, WorkerHung, WorkerRefused
from sm120.matrix.plan import (
    CRASH,
    HANG,
    INCONCLUSIVE,
    PASS,
    SKIPPED,
    UNSUPPORTED,
    Cell,
    MalformedReply,
    Plan,
    Result,
    Subject,
    read_result,
)
from sm120.matrix.references import ReferenceFailed, References
from sm120.matrix.verdict import skip_reason
from sm120.matrix.worker import Worker
from sm120.runs import safe_name

REFERENCES = "references"
"""Folder of the run that holds them while it lasts."""
_REPRODUCERS = "reproducers"
_PROBE_SECONDS = 120.0
_STARTS = 2  # attempts in a row before a subject is given up


class Observer(Protocol):
    """Told of everything that happens, from the thread that runs the schedule."""

    def begun(self, cell: Cell) -> None:
        """A cell is about to run."""

    def ended(self, cell: Cell, result: Result) -> None:
        """A cell has a verdict; a second call for the same cell amends it."""

    def note(self, text: str) -> None:
        """Something that the report should mention."""


class StackChanged(PreflightError):
    """Verdicts of two different stacks must not meet in one grid: the whole run ends."""


class GivenUp(Exception):
    """No worker can be had for this subject: its remaining cells are INCONCLUSIVE."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is run and where. ``identity`` turns a hello into what must be the same in all workers."""

    plan: Plan
    door: Door
    identity: Callable[[Mapping[str, Any]], Fingerprint]
    observer: Observer


def run(job: Job, control: Worker, hello: Mapping[str, Any], done: Mapping[str, Result]) -> dict[str, Result]:
    """Runs every cell that has no verdict yet and returns all verdicts.

    ``control`` is the worker that made the plan; it goes on to compute the references, and is ended here. Interrupting
    (KeyboardInterrupt) ends all processes; the verdicts so far have reached the observer.
    """
    results = dict(done)
    expected = job.identity(hello)

    def start(name: str) -> Worker:
        return _start(job, name, expected)

    reproducers = _folder(job.door.folder / _REPRODUCERS)
    references = References(control, lambda: start("references"), _folder(job.door.folder / REFERENCES))
    try:
        own = [subject for subject in job.plan.subjects if subject.operation != "block"]
        blocks = [subject for subject in job.plan.subjects if subject.operation == "block"]
        for phase in (own, blocks):
            todo = {subject.id: _todo(job, subject, results) for subject in phase}
            references.want(cell for cells in todo.values() for cell in cells)
            for subject in phase:
                if todo[subject.id]:
                    _Seat(job, subject, references, start, results).run(todo[subject.id])
    finally:
        references.close()
        with contextlib.suppress(OSError):  # there are some
            reproducers.rmdir()
    return results


def _start(job: Job, name: str, expected: Fingerprint) -> Worker:
    worker = job.door.open(name)
    try:
        found = job.identity(greet(worker))
    except BaseException:
        worker.kill()
        raise
    if found != expected:
        worker.kill()
        raise StackChanged(
            f"something changed while the matrix was running: {'; '.join(map(str, differences(expected, found)[:4]))}",
            remedy="run it again from the beginning",
        )
    return worker


def _todo(job: Job, subject: Subject, results: dict[str, Result]) -> tuple[Cell, ...]:
    """The subject's cells that need a process; those that need none get their verdict here."""
    cells = tuple(cell for cell in job.plan.cells_of(subject.id) if cell.id not in results)
    if subject.unsupported is not None:
        given = Result(UNSUPPORTED, subject.unsupported)
    elif subject.operation == "block" and (reason := skip_reason(subject, job.plan, results)) is not None:
        given = Result(SKIPPED, reason)
    else:
        return cells
    for cell in cells:
        results[cell.id] = given
        job.observer.ended(cell, given)
    return ()


class _Seat:
    """The process of one subject, and its replacements."""

    def __init__(
        self,
        job: Job,
        subject: Subject,
        references: References,
        start: Callable[[str], Worker],
        results: dict[str, Result],
    ) -> None:
        self._job = job
        self._subject = subject
        self._references = references
        self._start = start
        self._results = results
        self._worker: Worker | None = None
        self._answered: Cell | None = None
        """The last cell that this very process answered."""
        self._suspect: str | None = None
        """The cell after which the device must prove itself."""

    def run(self, cells: Sequence[Cell]) -> None:
        given_up: str | None = None
        try:
            for cell in cells:
                if given_up is None:
                    try:
                        self._cell(cell)
                    except GivenUp as reason:
                        given_up = str(reason)
                if given_up is not None:
                    self._settle(cell, Result(INCONCLUSIVE, given_up))
        except BaseException:
            self._leave(kill=True)
            raise
        self._leave(kill=False)

    def _cell(self, cell: Cell) -> None:
        reference: str | None = None
        if cell.reference is not None:
            try:
                reference = str(self._references.get(cell.reference))
            except ReferenceFailed as error:
                self._settle(cell, Result(INCONCLUSIVE, str(error)))
                return
        self._job.observer.begun(cell)
        try:
            result = self._attempt(cell, reference)
        except WorkerError as error:
            if error.started or self._answered is None:
                result = self._lost(error)
            else:
                # It died after its last answer and before it took this cell, which is therefore not to blame.
                self._amend(self._answered, error)
                result = self._again(cell, reference)
        if result.verdict != PASS:
            self._suspect = cell.id
        if self._worker is not None:
            self._answered = cell
        self._settle(cell, result)

    def _again(self, cell: Cell, reference: str | None) -> Result:
        try:
            return self._attempt(cell, reference)
        except WorkerError as error:
            return self._lost(error)

    def _attempt(self, cell: Cell, reference: str | None) -> Result:
        worker = self._ready()
        reproducer = self._job.door.folder / _REPRODUCERS / f"{safe_name(cell.id)}.py"
        body = {"cell": dict(cell.raw), "reference": reference, "reproducer": str(reproducer)}
        began = time.monotonic()
        try:
            result = read_result(worker.request("run", body))
        except WorkerRefused as error:
            result = Result(INCONCLUSIVE, f"the worker could not run it: {error.kind}: {error.message}")
        except MalformedReply as error:
            self._leave(kill=True)
            return Result(CRASH, f"the worker's answer is not one: {error}")
        seconds = {**(result.seconds or {}), "door": round(time.monotonic() - began, 6)}
        return replace(result, seconds=seconds)

    def _lost(self, error: WorkerError) -> Result:
        log = None if self._worker is None else str(self._worker.log)
        self._leave(kill=True)
        last = f"; its last line: {error.tail[-1]}" if error.tail else ""
        return Result(
            HANG if isinstance(error, WorkerHung) else CRASH,
            f"the worker {error.message}{last}",
            details={"stderr": list(error.tail), "log": log},
        )

    def _amend(self, cell: Cell, error: WorkerError) -> None:
        lost = self._lost(error)
        self._job.observer.note(f"{cell.id}: the worker was lost after its answer: {error.message}")
        before = self._results[cell.id]
        if before.verdict == PASS:
            self._settle(cell, replace(lost, reason=f"after its answer, which was a PASS, {lost.reason}"))
        self._suspect = cell.id

    def _ready(self) -> Worker:
        """A process that is running and, where there is a reason for doubt, has passed the device-state probe."""
        fresh = self._worker is None
        worker = self._open()
        if self._suspect is None:
            return worker
        why = self._probe(worker)
        if why is not None and not fresh:
            self._job.observer.note(f"the device-state probe failed after {self._suspect} ({why}): worker restarted")
            self._leave(kill=True)
            worker = self._open()
            why = self._probe(worker)
        if why is not None:
            self._leave(kill=True)
            raise GivenUp(f"the device-state probe fails even in a fresh process, after {self._suspect}: {why}")
        self._suspect = None
        return worker

    def _open(self) -> Worker:
        attempts = 0
        while self._worker is None:
            try:
                self._worker = self._start(self._subject.id)
            except StackChanged:
                raise
            except PreflightError as error:
                attempts += 1
                if attempts >= _STARTS:
                    raise GivenUp(f"no worker could be started: {error.message}") from error
        return self._worker

    def _probe(self, worker: Worker) -> str | None:
        """What the device-state probe found wrong, or None."""
        try:
            answer = worker.request("probe", quiet=_PROBE_SECONDS, total=_PROBE_SECONDS)
        except (WorkerError, WorkerRefused) as error:
            return error.message
        return None if answer.get("ok") is True else str(answer.get("message") or "wrong result")

    def _settle(self, cell: Cell, result: Result) -> None:
        self._results[cell.id] = result
        self._job.observer.ended(cell, result)

    def _leave(self, *, kill: bool) -> None:
        worker, self._worker, self._answered = self._worker, None, None
        if worker is not None:
            (worker.kill if kill else worker.close)()


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path
