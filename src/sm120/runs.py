"""The record of one task: ``runs/<utc>-<task>-<id>/`` with manifest, commands, logs and results.

Everything is redacted before it is written, and a file is whole or absent.
"""

import contextlib
import json
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sm120 import __version__, errors, files, redact
from sm120.process import Completed
from sm120.state import State

SCHEMA = 1
_MANIFEST = "manifest.json"
_COMMANDS = "commands.jsonl"
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def safe_name(name: str) -> str:
    """A file name made of any text."""
    return _NAME.sub("-", name).strip(".-")[:100] or "unnamed"


@dataclass
class Run:
    id: str
    path: Path
    _manifest: dict[str, Any] = field(repr=False)
    _started: float = field(default_factory=time.monotonic, repr=False)

    @classmethod
    def start(cls, state: State, task: str, argv: Sequence[str]) -> "Run":
        """Makes the folder and its manifest. Raises PreflightError when it cannot be written."""
        state.prepare()
        files.make_folder(state.runs)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        run_id = f"{stamp}-{safe_name(task)}-{secrets.token_hex(3)}"
        path = state.runs / run_id
        with files.writing(path):
            path.mkdir()
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "id": run_id,
            "task": task,
            "argv": redact.redact_argv(argv),
            "status": "running",
            "started": _now(),
            "pid": os.getpid(),
            "pid_started": psutil.Process().create_time(),
            "toolkit": __version__,
            "python": sys.version.split()[0],
            "platform": platform.platform(),
        }
        run = cls(run_id, path, manifest)
        run.write_json(_MANIFEST, manifest)
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """A run that exists. Raises UsageError with file and place when its manifest is missing or damaged."""
        manifest = files.read_json(path / _MANIFEST)
        if not isinstance(manifest, dict) or not all(
            isinstance(manifest.get(k), str) for k in ("id", "task", "status")
        ):
            raise errors.UsageError(f"{path / _MANIFEST} is no run manifest", where=str(path / _MANIFEST))
        if manifest.get("schema") != SCHEMA:
            raise errors.UsageError(
                f"{path / _MANIFEST} has schema {manifest.get('schema')!r}; this toolkit reads {SCHEMA}",
                where=str(path / _MANIFEST),
            )
        return cls(manifest["id"], path, manifest)

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self._manifest

    @property
    def task(self) -> str:
        return str(self._manifest["task"])

    @property
    def status(self) -> str:
        """``running``, ``finished``, or ``interrupted`` when its process ended without saying so."""
        status = str(self._manifest["status"])
        return "interrupted" if status == "running" and not self._is_alive() else status

    def _is_alive(self) -> bool:
        pid, started = self._manifest.get("pid"), self._manifest.get("pid_started")
        if not isinstance(pid, int) or not isinstance(started, float):
            return False
        try:
            return abs(psutil.Process(pid).create_time() - started) < 1
        except (psutil.Error, ValueError):
            return False

    def write_json(self, name: str, obj: object) -> Path:
        path = self.path / name
        files.write_json_atomic(path, redact.redact_json(obj))
        return path

    def read_json(self, name: str) -> object:
        return files.read_json(self.path / name)

    def log_path(self, name: str) -> Path:
        """Where the log of that name goes; the folder exists afterwards."""
        return files.make_folder(self.path / "logs") / f"{safe_name(name)}.log"

    def record_command(self, done: Completed, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Appends one line to commands.jsonl: words, what its environment had beside ours, exit code, seconds."""
        delta = {k: v for k, v in (env or {}).items() if os.environ.get(k) != v}
        line = {
            "argv": redact.redact_argv(done.argv),
            "cwd": str(cwd or Path.cwd()),
            "env": redact.redact_env(delta),
            "returncode": done.returncode,
            "timed_out": done.timed_out,
            "seconds": round(done.seconds, 3),
            "ended": _now(),
        }
        path = self.path / _COMMANDS
        with files.writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """The manifest says how the body failed, when it does; that it ended well is for ``finish`` to say."""
        try:
            yield
        except BaseException as error:
            code = error.exit_code if isinstance(error, errors.ToolkitError) else 1
            self.finish(130 if isinstance(error, KeyboardInterrupt) else code, {"error": str(error)})
            raise

    def finish(self, exit_code: int, summary: Mapping[str, object]) -> None:
        self._manifest.update(
            status="finished",
            ended=_now(),
            seconds=round(time.monotonic() - self._started, 3),
            exit_code=exit_code,
            summary=dict(summary),
        )
        self.write_json(_MANIFEST, self._manifest)


def latest(state: State, task: str) -> Run | None:
    """The newest run of a task whose manifest can be read."""
    for path in sorted(state.runs.glob(f"*-{safe_name(task)}-*/"), reverse=True):
        try:
            run = Run.open(path)
        except errors.UsageError:
            continue
        if run.task == task:
            return run
    return None
