"""References: computed in a worker of their own, a little ahead of the cells that need them, shared by all subjects."""

import collections
import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from sm120.errors import PreflightError
from sm120.matrix.lost import WorkerError, WorkerRefused
from sm120.matrix.plan import Cell
from sm120.matrix.worker import Worker

_AHEAD: Final = 3
"""References that may lie ready before a cell asked for them: enough to never wait, and no more disk than that."""


class ReferenceFailed(Exception):
    """There is no reference: the cells that need it are INCONCLUSIVE."""


class References:
    """Start with a worker that already greeted; a worker that is lost is replaced by ``start``."""

    def __init__(self, worker: Worker, start: Callable[[], Worker], folder: Path) -> None:
        self._worker: Worker | None = worker
        self._start = start
        self._folder = folder
        self._state = threading.Condition()
        self._wanted: collections.deque[Cell] = collections.deque()
        self._done: dict[str, Path | str] = {}
        self._unused: set[str] = set()
        self._awaited: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="references", daemon=True)
        self._thread.start()

    def want(self, cells: Iterable[Cell]) -> None:
        """Names the cells to come, in the order in which they will ask."""
        with self._state:
            known = {cell.reference for cell in self._wanted} | self._done.keys()
            for cell in cells:
                if cell.reference is not None and cell.reference not in known:
                    known.add(cell.reference)
                    self._wanted.append(cell)
            self._state.notify_all()

    def get(self, key: str) -> Path:
        """Waits for one. ReferenceFailed with the reason when it could not be computed."""
        with self._state:
            self._awaited = key
            self._unused.discard(key)
            self._state.notify_all()
            self._state.wait_for(lambda: key in self._done or self._closing)
            self._awaited = None
            found = self._done.get(key, "no more references are computed")
        if isinstance(found, str):
            raise ReferenceFailed(found)
        return found

    def close(self) -> None:
        """Stops whatever is under way."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            worker = self._worker
        if worker is not None:
            worker.kill()
        self._thread.join()
        if (last := self._worker) is not None:  # one that was being started meanwhile
            last.kill()

    def _run(self) -> None:
        try:
            while (cell := self._next()) is not None:
                key = cell.reference or ""
                found = self._compute(key, cell)
                with self._state:
                    self._wanted.popleft()
                    self._done[key] = found
                    if self._awaited != key:
                        self._unused.add(key)
                    self._state.notify_all()
        finally:
            with self._state:
                self._closing = True  # whoever waits must not wait for ever
                self._state.notify_all()

    def _next(self) -> Cell | None:
        with self._state:
            self._state.wait_for(
                lambda: self._closing or (bool(self._wanted) and (len(self._unused) < _AHEAD or bool(self._awaited)))
            )
            return None if self._closing else self._wanted[0]

    def _compute(self, key: str, cell: Cell) -> Path | str:
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.ref"
        if path.is_file():  # of this very plan, from before an interruption; the worker writes it whole or not at all
            return path
        try:
            worker = self._ready()
            worker.request("reference", {"key": key, "case": cell.raw.get("case"), "path": str(path)})
        except WorkerRefused as error:
            return f"the reference could not be computed: {error.kind}: {error.message}"
        except PreflightError as error:
            return f"the reference could not be computed: {error.message}"
        except WorkerError as error:
            with self._state:
                self._worker = None
            return f"the reference could not be computed: its worker {error.message}"
        return path if path.is_file() else "the worker said that it wrote the reference, but did not"

    def _ready(self) -> Worker:
        with self._state:
            worker = self._worker
        if worker is not None:
            return worker
        worker = self._start()
        with self._state:
            self._worker = worker
        return worker
