"""The installed stack: a virtual environment in the state folder, and the lock that says what is in it.

The environment is made in place and its lock is written last. Without a lock that fits, the folder counts as rubble and
is made again, so an interrupted installation is never taken for a whole one.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from sm120 import errors, files
from sm120.console import Console
from sm120.process import Completed
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack import verify
from sm120.stack.pip import Distribution, NoSuchVersion, Pip
from sm120.stack.spec import Index, Stack
from sm120.state import State

SCHEMA = 1
LOCK_NAME = "sm120-lock.json"


@dataclass(frozen=True)
class Environment:
    name: str
    python: Path
    lock: Path
    fingerprint: str  # over name, version and SHA-256 of everything installed
    fresh: bool  # made by this call


def ensure_environment(stack: Stack, state: State, console: Console) -> Environment:
    """The stack's environment; installs it when it is missing, unfinished, changed by hand, or of other pins.

    Raises PreflightError (no network, no space, no wheel for this Python) and BinaryError (what came is not what the
    stack says).
    """
    found, why = look(stack, state)
    if found is not None:
        return found
    state.prepare()
    waiting = f"another process is setting up the stack {stack.name}; waiting for it"
    with files.lock(state.root / "env" / f"{stack.name}.lock", waiting=waiting) as held:
        found, why = look(stack, state)
        if found is not None:
            return found
        run = Run.start(state, "setup", ["setup", "--stack", str(stack.path)])
        try:
            with console.step(f"installing the stack {stack.name} ({why})"):
                made = _make(stack, state, console, run, held)
        except BaseException as error:
            code = error.exit_code if isinstance(error, errors.ToolkitError) else 1
            run.finish(130 if isinstance(error, KeyboardInterrupt) else code, {"error": str(error)})
            raise
        run.finish(0, {"stack": stack.name, "lock": str(made.lock), "fingerprint": made.fingerprint})
        return made


def look(stack: Stack, state: State) -> tuple[Environment | None, str]:
    """The environment when it is whole and of this stack, or else why not. Starts nothing and writes nothing."""
    folder = state.env(stack.name)
    lock = folder / LOCK_NAME
    if not lock.exists():
        return None, "its installation was not finished" if folder.exists() else "not installed yet"
    try:
        content = files.read_json(lock)
    except errors.UsageError:
        return None, "its lock is damaged"
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        return None, "its lock is of another version"
    if content.get("request") != request(stack):
        return None, "the stack file has changed"
    if content.get("folder") != str(folder):
        return None, "it was moved"
    python = folder / "bin" / "python"
    if not os.access(python, os.X_OK):
        return None, "its Python is gone"
    changed = _changed(folder, content)
    if changed:
        return None, f"changed since: {changed}"
    return Environment(stack.name, python, lock, str(content["fingerprint"]), fresh=False), ""


def request(stack: Stack) -> str:
    """What decides whether an installed environment is still the one asked for."""
    asked = {"python": stack.python, "packages": dict(stack.packages), "imports": stack.imports}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _changed(folder: Path, content: Mapping[str, Any]) -> str:
    """Names what was installed or removed since the lock was written; empty when nothing was."""
    recorded = {f"{d['name']} {d['version']}" for d in content["distributions"]}
    present = {f"{name} {version}" for name, version in verify.installed(verify.site_packages(folder)).items()}
    return ", ".join([f"+ {x}" for x in sorted(present - recorded)] + [f"- {x}" for x in sorted(recorded - present)])


def _make(stack: Stack, state: State, console: Console, run: Run, held: int) -> Environment:
    folder = state.env(stack.name)
    base = base_python(stack)
    _check_space(stack, folder)
    log = run.log_path("pip")
    with files.writing(folder):
        if folder.exists():
            shutil.rmtree(folder)
    _venv(base, folder, run)
    python = folder / "bin" / "python"
    pip = Pip(python, log, console.verbose, console.info, run.record_command, (held,))
    distributions, source = _install(stack, pip, console)
    site = verify.site_packages(folder)
    verify.check_pins(stack, site, distributions)
    verify.check_torch(stack, site)
    versions = verify.prove(stack, python, run)
    content = {
        "schema": SCHEMA,
        "stack": stack.name,
        "request": request(stack),
        "folder": str(folder),
        "python": str(base),
        "source": source,
        "proved": versions,
        "fingerprint": _fingerprint(distributions),
        "installed": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": run.id,
        "distributions": [asdict(d) for d in distributions],
    }
    lock = folder / LOCK_NAME
    run.write_json(LOCK_NAME, content)
    files.write_json_atomic(lock, content)
    return Environment(stack.name, python, lock, str(content["fingerprint"]), fresh=True)


def _fingerprint(distributions: list[Distribution]) -> str:
    lines = sorted(f"{d.name}=={d.version} sha256:{d.sha256}" for d in distributions)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _install(stack: Stack, pip: Pip, console: Console) -> tuple[list[Distribution], str]:
    """Through the machine's own pip configuration; what that lacks comes from the stack's index for it, alone."""
    done: list[Distribution] = []
    sources = ["pip configuration"]
    settled: set[str] = set()
    while True:
        try:
            done += pip.install(stack.requirements())
            return sorted(done, key=lambda d: d.name), ", ".join(sources)
        except NoSuchVersion as error:
            index = next((index for index in stack.indexes if error.package in index.packages), None)
            if index is None or error.package in settled:
                raise
            settled.add(error.package)
            console.info(f"    {error.message}; asking {index.url}: {index.reason}")
            done += _from_index(pip, stack, index, error.package)
            sources.append(f"{index.url} for {error.package}")


def _from_index(pip: Pip, stack: Stack, index: Index, package: str) -> list[Distribution]:
    wanted = f"{package}=={stack.packages[package]}"
    try:
        return pip.install(["--no-deps", "--index-url", index.url, wanted])
    except errors.PreflightError as error:
        raise errors.PreflightError(
            f"{wanted} is not to be had: the machine's own pip configuration does not have it, and from {index.url}:"
            f" {error.message}",
            where=error.where,
            remedy=f"make {index.url} reachable, or put the wheel in a folder and type pip config set global.find-links"
            " /folder; a wheel fits one Python version, and SM120_PYTHON chooses that",
        ) from error


def _check_space(stack: Stack, folder: Path) -> None:
    free = files.free_bytes(folder)
    if free < stack.disk_bytes:
        raise errors.PreflightError(
            f"the stack {stack.name} needs {stack.disk_bytes} bytes in {folder.parent}, {free} are free",
            where=str(folder.parent),
            remedy=f"free some space, or {files.MOVE_REMEDY}",
        )


def base_python(stack: Stack) -> Path:
    """An interpreter that the stack has wheels for: the toolkit's own, or else one on PATH."""
    wanted = SpecifierSet(stack.python)
    own = Path(getattr(sys, "_base_executable", None) or sys.executable)
    own_version = ".".join(str(part) for part in sys.version_info[:3])
    seen = [f"{own} is {own_version}"]
    if wanted.contains(own_version, prereleases=True):
        return own
    for minor in range(30, 10, -1):
        found = shutil.which(f"python3.{minor}")
        if found is None or not wanted.contains(f"3.{minor}.99"):
            continue
        done = run_process([found, "-I", "-c", "import platform; print(platform.python_version())"], timeout=30)
        version = done.tail[-1] if done.tail and not done.returncode else "not one that starts"
        seen.append(f"{found} is {version}")
        if not done.returncode and wanted.contains(version, prereleases=True):
            return Path(found)
    raise errors.PreflightError(
        f"the stack {stack.name} needs a Python {stack.python}; {'; '.join(seen)}",
        where=str(stack.path),
        remedy="install one of these versions so that it is on PATH, as in: apt install python3.13 python3.13-venv",
    )


def _venv(base: Path, folder: Path, run: Run) -> None:
    # Without pip: the toolkit's own pip installs into it.
    argv = [str(base), "-I", "-m", "venv", "--without-pip", str(folder)]
    done: Completed = run_process(argv, log=run.log_path("venv"))
    run.record_command(done)
    if done.returncode:
        raise errors.PreflightError(
            f"{base} could not make a virtual environment: {done.tail[-1] if done.tail else 'no output'}",
            where=str(run.log_path("venv")),
            remedy="install its venv module (Debian, Ubuntu: apt install python3-venv), then try again",
        )
