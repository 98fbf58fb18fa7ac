"""The results of a run as they come: one JSON object a line, the first of them saying what run it is.

A line is written whole or torn only at the very end of the file (the process was killed while writing it); a torn last
line is dropped and its cell runs again. The last line of a cell counts: a verdict may be amended.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sm120.errors import UsageError
from sm120.files import writing
from sm120.matrix.plan import INCONCLUSIVE, MalformedReply, Result, stored_result
from sm120.redact import redact_json

SCHEMA: Final = 1
FILE: Final = "results.jsonl"


class Journal:
    """Open for appending. Use `create` or `resume`, as a context manager."""

    def __init__(self, path: Path, header: Mapping[str, Any], results: Mapping[str, Result]) -> None:
        self.header = header
        self.results: dict[str, Result] = dict(results)
        self._path = path
        with writing(path):
            self._file = path.open("ab")

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> Self:
        """A new journal. PreflightError when it cannot be written."""
        journal = cls(path, header, {})
        journal._append({"schema": SCHEMA, **header})
        return journal

    @classmethod
    def resume(cls, path: Path) -> Self:
        """An existing one, a torn last line cut off. UsageError when it is damaged elsewhere or has another schema."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot resume: {path}: {error.strerror or error}", where=str(path)) from error
        whole = data[: data.rfind(b"\n") + 1]
        entries = [_entry(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]
        if not entries:
            raise UsageError(f"cannot resume: {path} was interrupted before its plan was written", where=str(path))
        header, *rest = entries
        if header.get("schema") != SCHEMA:
            raise UsageError(
                f"cannot resume: {path} has schema {header.get('schema')!r}, this toolkit writes {SCHEMA}",
                where=str(path),
            )
        stored = dict(_stored(path, number, entry) for number, entry in enumerate(rest, 2))
        # INCONCLUSIVE says nothing of the backend: a full disk or memory, or a reference that failed. It runs again.
        results = {cell: result for cell, result in stored.items() if result.verdict != INCONCLUSIVE}
        if len(whole) < len(data):
            with writing(path), path.open("r+b") as file:
                file.truncate(len(whole))
        return cls(path, header, results)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, cell: str, result: Result) -> None:
        """Keeps one verdict; it survives whatever happens to this process."""
        self.results[cell] = result
        self._append({"cell": cell, "result": result.to_json()})

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(redact_json(entry), allow_nan=False).encode() + b"\n"
        with writing(self._path):
            self._file.write(line)
            self._file.flush()


def _entry(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        entry = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise _damaged(path, number, str(error)) from error
    if not isinstance(entry, dict):
        raise _damaged(path, number, "not an object")
    return entry


def _stored(path: Path, number: int, entry: Mapping[str, Any]) -> tuple[str, Result]:
    cell, result = entry.get("cell"), entry.get("result")
    if not isinstance(cell, str) or not isinstance(result, Mapping):
        raise _damaged(path, number, "no cell or no result")
    try:
        return cell, stored_result(result)
    except MalformedReply as error:
        raise _damaged(path, number, str(error)) from error


def _damaged(path: Path, number: int, why: str) -> UsageError:
    return UsageError(
        f"cannot resume: {path}:{number} is damaged: {why}",
        where=f"{path}:{number}",
        remedy="start the matrix afresh, without --resume",
    )
