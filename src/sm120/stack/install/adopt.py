"""Interpreters that exist already: proven, fingerprinted, used by later tasks, and never changed.

What is read of them is read with ``-I -B``: no user folder, no variables, no byte code written.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sm120 import errors, files
from sm120.stack.install.record import Environment
from sm120.state import State

DEFAULT_NAME = "adopted"
SCHEMA = 1
# What is read of a record. Another schema has other keys.
_KEYS = {"stack": str, "python": str, "adopted": str, "fingerprint": str, "folders": list, "metadata": dict}
_SECONDS = 600.0  # a first import of torch from a slow disk takes minutes
_LINES = 100_000  # one a distribution; a program that is no Python may print for ever
_OLDEST = (3, 10)  # what the cells run on

_ASK = """
import json, os, platform, sys
import importlib.metadata
sys.dont_write_bytecode = True
found = []
for distribution in importlib.metadata.distributions():
    path = getattr(distribution, "_path", None)
    if path is not None and distribution.metadata["Name"]:
        found.append([distribution.metadata["Name"], distribution.version or "", os.path.abspath(str(path))])
print("\\nadopted " + json.dumps({"version": platform.python_version(), "folders": sys.path}))
for item in found:
    print("package " + json.dumps(item))
"""

_TORCH = """
import json, torch
print("\\nadopted " + json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "file": torch.__file__}))
"""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One distribution of an interpreter."""

    name: str  # canonical
    version: str
    sha256: str  # of its RECORD, or of what stands for one


def adopt(python: Path, name: str, state: State, *, write: bool = True) -> tuple[Environment, dict[str, Any]]:
    """Registers the interpreter under a name; the environment, and the record.

    Raises UsageError when it is no interpreter that can be used, BinaryError when its torch does not import.
    """
    python = _interpreter(python)
    said, found = _ask(python)
    version, folders = str(said["version"]), [str(folder) for folder in said["folders"]]
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise errors.UsageError(
            f"{python} is Python {version}; the cells need {'.'.join(map(str, _OLDEST))} or newer",
            where=str(python),
            remedy="adopt a newer one",
        )
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "stack": name,
        "python": str(python),
        "python_version": version,
        "folders": folders,
        "metadata": _metadata(folders),
        "torch": _torch(python),
        "fingerprint": fingerprint(found),
        "adopted": datetime.now(UTC).isoformat(timespec="seconds"),
        "distributions": [vars(item) for item in found],
    }
    if write:
        state.prepare()
        files.write_json_atomic(state.adopted(name), content)
    return _environment(content, state, fresh=True), content


def find(name: str, state: State) -> Environment | None:
    """The interpreter adopted under this name, when there is one. PreflightError when it is not as it was then."""
    path = state.adopted(name)
    if not path.exists():
        return None
    content: Any = None
    with contextlib.suppress(errors.UsageError):  # damaged: the error below also says what to do
        content = files.read_json(path)
    if not isinstance(content, dict) or not all(isinstance(content.get(k), kind) for k, kind in _KEYS.items()):
        raise errors.UsageError(
            f"{path} is of another version or damaged",
            where=str(path),
            remedy=f"adopt it again: scripts/inv setup --adopt PYTHON --stack {name}",
        )
    changes = _changes(content)
    if changes:
        shown = ", ".join(changes[:5]) + (f" and {len(changes) - 5} more" if len(changes) > 5 else "")
        raise errors.PreflightError(
            f"the adopted interpreter {content['python']} has changed since {content['adopted']}: {shown}",
            where=str(path),
            remedy="look at the changes; then adopt it again:"
            f" scripts/inv setup --adopt {shlex.quote(content['python'])} --stack {name}",
        )
    return _environment(content, state, fresh=False)


def fingerprint(found: Sequence[Found]) -> str:
    lines = sorted(f"{item.name}=={item.version} record:{item.sha256}" for item in found)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _environment(content: Mapping[str, Any], state: State, *, fresh: bool) -> Environment:
    name = str(content["stack"])
    return Environment(
        name,
        Path(content["python"]),
        state.adopted(name),
        str(content["fingerprint"]),
        fresh=fresh,
        adopted=True,
        cache=state.cache(name),
    )


def _changes(content: Mapping[str, Any]) -> list[str]:
    """What is different now; without starting the interpreter."""
    if not os.access(content["python"], os.X_OK):
        return ["the interpreter is gone"]
    before: dict[str, str] = content["metadata"]
    now = _metadata(content["folders"])
    changes = []
    for path in sorted(before.keys() | now.keys()):
        if before.get(path) != now.get(path):
            sign = "+ " if path not in before else "- " if path not in now else "changed "
            changes.append(sign + Path(path).name.rpartition(".")[0])
    return changes


def _metadata(folders: Sequence[str]) -> dict[str, str]:
    """Every distribution's metadata folder, shadowed ones too, with the SHA-256 that stands for what it installed."""
    found = {}
    for folder in folders:
        try:
            entries = list(Path(folder).iterdir())
        except OSError:  # python311.zip, which is on every path and need not be there
            continue
        for path in entries:
            if path.name.endswith((".dist-info", ".egg-info")):
                found[str(path)] = _record_sha256(path)
    return found


def _record_sha256(path: Path) -> str:
    """Over what a distribution lists of itself; for one without a list, over its metadata."""
    candidates = (path / "RECORD", path / "installed-files.txt", path / "METADATA", path / "PKG-INFO", path)
    for candidate in candidates:
        if candidate.is_file():
            try:
                return files.sha256(candidate)
            except OSError:
                break
    return "unreadable"


def _interpreter(python: Path) -> Path:
    # The name itself is not resolved: a virtual environment's interpreter is a link, and the link makes it one.
    path = python.parent.resolve() / python.name
    if path.is_dir():
        inside = path / "bin" / "python"
        raise errors.UsageError(
            f"--adopt: {python} is a folder",
            where=str(python),
            remedy=f"name its interpreter: --adopt {shlex.quote(str(inside))}"
            if inside.exists()
            else "name an interpreter",
        )
    if not os.access(path, os.X_OK):
        what = "may not be executed" if path.exists() else "does not exist"
        raise errors.UsageError(f"--adopt: {python} {what}", where=str(python), remedy="name a Python interpreter")
    return path


def _run(python: Path, script: str) -> tuple[int, list[str], list[str]]:
    """Exit code, the lines it was asked for, and its last lines."""
    from sm120.process import run as run_process
    from sm120.stack.install.installer import clean_environment

    lines: list[str] = []

    def keep(line: str) -> None:
        if line.startswith(("adopted ", "package ")) and len(lines) < _LINES:
            lines.append(line)

    env = {**clean_environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    done = run_process([str(python), "-I", "-B", "-c", script], env=env, timeout=_SECONDS, on_line=keep)
    return done.returncode, lines, [line for line in done.tail if line.strip()]


def _ask(python: Path) -> tuple[dict[str, Any], list[Found]]:
    from packaging.utils import canonicalize_name

    try:
        code, lines, tail = _run(python, _ASK)
    except errors.PreflightError as error:
        code, lines, tail = 1, [], [error.message]
    said: Any = _parsed(lines[0]) if lines else None
    packages = [_parsed(line) for line in lines[1:]]
    if code or not _is_interpreter(said) or not all(_is_package(package) for package in packages):
        raise errors.UsageError(
            f"--adopt: {python} does not answer as a Python does: {tail[-1][:200] if tail else 'no output'}",
            where=str(python),
            remedy="name a Python interpreter, as in /opt/venv/bin/python",
        )
    found: dict[str, Found] = {}
    for title, version, path in packages:
        name = canonicalize_name(title)
        # The first on the path is the one that is imported.
        found.setdefault(name, Found(name=name, version=version, sha256=_record_sha256(Path(path))))
    return said, sorted(found.values(), key=lambda item: item.name)


def _parsed(line: str) -> Any:
    """What stands behind the first word; None when that is not JSON."""
    try:
        return json.loads(line.partition(" ")[2])
    except (ValueError, RecursionError):
        return None


def _is_interpreter(said: Any) -> bool:
    return (
        isinstance(said, dict)
        and re.match(r"\d+\.\d+\.", str(said.get("version"))) is not None
        and isinstance(said.get("folders"), list)
    )


def _is_package(said: Any) -> bool:
    return isinstance(said, list) and len(said) == 3 and all(isinstance(text, str) for text in said)


def _torch(python: Path) -> dict[str, Any]:
    code, lines, tail = _run(python, _TORCH)
    found = _parsed(lines[-1]) if lines else None
    if code or not isinstance(found, dict) or not {"version", "cuda", "file"} <= found.keys():
        raise errors.BinaryError(
            f"{python} cannot be adopted: its torch does not import: {tail[-1] if tail else 'no output'}",
            where=str(python),
            remedy="mend it, or adopt another; to see the whole of it:"
            f" {shlex.quote(str(python))} -I -B -c 'import torch'",
        )
    return found
