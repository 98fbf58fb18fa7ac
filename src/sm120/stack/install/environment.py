"""From a stack to its environment: lock, wheels, virtual environment, CUDA home, proof, record.

The environment is made in place and its record is written last. Without a record that fits, the folder counts as rubble
and is made again, so an interrupted installation is never taken for a whole one; the lock and the wheels stay.
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm120 import errors, files
from sm120.console import Console, size
from sm120.runs import Run
from sm120.stack.install import adopt, exchange, record
from sm120.stack.install.record import Environment
from sm120.stack.spec import Stack, load_stack
from sm120.state import State

if TYPE_CHECKING:
    from sm120.stack.fetch.store import Store
    from sm120.stack.fetch.transport import Transport
    from sm120.stack.install.interpreter import Interpreter
    from sm120.stack.lock import Lock


def ensure_environment(
    stack: Stack | str, state: State, console: Console, *, given: "Lock | None" = None
) -> Environment:
    """The stack's environment; installs it when it is missing, unfinished, changed by hand, or of another lock.

    A name may be that of an adopted interpreter, which is looked over and never changed. ``given`` is a lock whose
    files are all local: then nothing asks the network. Raises PreflightError (no network, no space, no wheel for this
    Python, an adopted interpreter that has changed) and BinaryError (what came is not what the lock says).
    """
    name = stack if isinstance(stack, str) else stack.name
    adopted = adopt.find(name, state)
    if adopted is not None and given is None:
        return adopted
    if isinstance(stack, str):
        stack = load_stack(stack)
    found, why = _look(stack, state, given)
    if found is not None:
        if not state.activation(stack.name).exists():
            write_activation(found, state)
        return found
    with exchange.alone(stack.name, state) as held:
        found, why = _look(stack, state, given)
        if found is not None:
            return found
        with _recorded(state, ["setup", "--stack", str(stack.path)]) as run:
            if exchange.mend(stack.name, state, run, console, held):
                found, why = _look(stack, state, given)
            if found is not None:
                run.finish(0, {"stack": stack.name, "fingerprint": found.fingerprint})
                return found
            with console.step(f"installing the stack {stack.name} ({why})"):
                made = _Making(stack, state, console, run, held).make(given)
            run.finish(0, {"stack": stack.name, "lock": str(made.lock), "fingerprint": made.fingerprint})
        return made


def look(stack: Stack | str, state: State, given: "Lock | None" = None) -> tuple[Environment | None, str]:
    """The environment when it is whole, of this stack and of the given lock, or else why not.

    Starts nothing and writes nothing.
    """
    name = stack if isinstance(stack, str) else stack.name
    adopted = adopt.find(name, state)
    if adopted is not None:
        return adopted, ""
    return _look(load_stack(stack) if isinstance(stack, str) else stack, state, given)


def _look(stack: Stack, state: State, given: "Lock | None") -> tuple[Environment | None, str]:
    content, why = record.why_not(stack, state)
    if content is None:
        return None, why
    if given is not None and given.fingerprint != content["fingerprint"]:
        return None, "another lock is given"
    return record.environment(content, stack.name, state, fresh=False), ""


@dataclass(frozen=True, kw_only=True)
class Relocked:
    lock: "Lock"
    before: "Lock | None"


def relock(stack: Stack, state: State, console: Console) -> Relocked:
    """Resolves anew and writes the lock, unless it names the very files that it named before. Installs nothing."""
    from sm120.stack.lock import read_lock, write_lock

    with (
        exchange.alone(stack.name, state) as held,
        _recorded(state, ["setup", "--lock", "--stack", str(stack.path)]) as run,
    ):
        path = state.lock_file(stack.name)
        before = None
        with contextlib.suppress(errors.UsageError):  # a damaged one is what --lock mends
            before = read_lock(path) if path.exists() else None
        making = _Making(stack, state, console, run, held)
        with console.step(f"resolving the stack {stack.name}"), making.store.in_use():
            lock = making.resolve()
        if before is None or replace(before, created="", sources=()) != replace(lock, created="", sources=()):
            write_lock(lock, path)
        run.finish(0, {"stack": stack.name, "lock": str(path), "fingerprint": lock.fingerprint})
        return Relocked(lock=lock, before=before)


@contextlib.contextmanager
def _recorded(state: State, argv: list[str]) -> Iterator[Run]:
    run = Run.start(state, "setup", argv)
    with run.failing():
        yield run


def misfit(lock: "Lock", stack: Stack, base: "Interpreter") -> str:
    """Why a lock is not one to install for this stack, on this machine, with this Python; empty when it is."""
    from sm120.stack.install.interpreter import platform_tag

    if lock.stack != stack.name:
        return f"it is of the stack {lock.stack}"
    if lock.request != record.asked(stack)["request"]:
        return "the stack file has changed"
    if lock.python != base.minor:
        return f"it is for Python {lock.python}, and {base.path} is {base.version}"
    if lock.platform != platform_tag():
        return f"it is for {lock.platform}, and this machine is {platform_tag()}"
    return ""


class _Making:
    """One installation, under the stack's lock between processes."""

    def __init__(self, stack: Stack, state: State, console: Console, run: Run, held: int) -> None:
        from sm120.stack.fetch.store import Store

        self.stack, self.state, self.console, self.run, self.held = stack, state, console, run, held
        self.store: Store = Store(state.wheels)

    def make(self, given: "Lock | None") -> Environment:
        from sm120.stack.install.interpreter import base_python

        base = base_python(self.stack, given.python if given else None)
        self._check_space(self.stack.disk_bytes, "")
        with self.store.in_use():
            lock = self._lock(given, base)
            self._fetch(lock, given)
            made = self._install(lock, base)
        self._prune()
        return made

    def resolve(self) -> "Lock":
        from sm120.stack.install.interpreter import base_python
        from sm120.stack.resolve.resolution import resolve

        return resolve(self.stack, self.state, self.console, self.run, python=base_python(self.stack).path)

    def _lock(self, given: "Lock | None", base: "Interpreter") -> "Lock":
        """The lock to install: the given one, the one that is there, or a new one. It is written before anything."""
        from sm120.stack.lock import read_lock, write_lock

        path = self.state.lock_file(self.stack.name)
        if given is None and path.exists():
            lock = read_lock(path)
            why = misfit(lock, self.stack, base)
            if not why:
                return lock
            self.console.info(f"    its lock does not fit ({why}): resolving anew")
        elif given is not None and path.exists():
            with contextlib.suppress(errors.UsageError):
                lock = read_lock(path)
                if lock.fingerprint == given.fingerprint and not misfit(lock, self.stack, base):
                    return lock  # the same, and it knows where the files come from
        lock = given or self.resolve()
        write_lock(lock, path)
        return lock

    def _fetch(self, lock: "Lock", given: "Lock | None") -> None:
        missing = self.store.missing_bytes(lock.files)
        self._check_space(self.stack.disk_bytes + missing, f" ({size(missing)} of them for wheels)" if missing else "")
        fetch(given or lock, self.store, self.console, offline=given is not None)

    def _check_space(self, needed: int, what: str) -> None:
        folder = self.state.env(self.stack.name)
        free = files.free_bytes(folder)
        if free < needed:
            raise errors.PreflightError(
                f"the stack {self.stack.name} needs {size(needed)}{what} in {folder.parent}: {size(needed - free)} more"
                f" than the {size(free)} that are free",
                where=str(folder.parent),
                remedy=f"free some space, or {files.MOVE_REMEDY}",
            )

    def _install(self, lock: "Lock", base: "Interpreter") -> Environment:
        from sm120.stack.install import verify
        from sm120.stack.install.installer import Installer
        from sm120.stack.install.interpreter import make_venv

        stack, folder = self.stack, self.state.env(self.stack.name)
        verify.check_pins(stack, lock)
        with files.writing(folder):
            if folder.exists():
                shutil.rmtree(folder)
        python = make_venv(base, folder, self.run, self.held)
        self.console.info(f"    installing {len(lock.files)} packages")
        installer = Installer(python=python, store=self.store, run=self.run, console=self.console, held=self.held)
        again = [file for last in stack.last for name in last.packages if (file := lock.file(name))]
        installer.install(lock.files, again)
        site = record.site_packages(folder)
        verify.check_versions(lock, site)
        verify.check_torch(stack, lock, site)
        home = self._cuda_home(site)
        content = {
            "schema": record.SCHEMA,
            "stack": stack.name,
            "asked": record.asked(stack),
            "folder": str(folder),
            "python": str(base.path),
            "python_version": base.version,
            "sources": list(lock.sources),
            "lock_sha256": record.digest(self.state.lock_file(stack.name)),
            "fingerprint": lock.fingerprint,
            "cuda_home": home,
            "proved": [],
            "installed": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": self.run.id,
            "present": [f"{name} {version}" for name, version in record.distributions(site)],
            "distributions": [
                {"name": file.name, "version": file.version, "url": file.url, "sha256": file.sha256}
                for file in lock.files
            ],
        }
        content["proved"] = self._prove(lock, record.environment(content, stack.name, self.state, fresh=True), site)
        made = record.environment(content, stack.name, self.state, fresh=True)
        write_activation(made, self.state)
        self.run.write_json(record.NAME, content)
        files.write_json_atomic(folder / record.NAME, content)
        return made

    def _cuda_home(self, site: Path) -> str | None:
        if self.stack.cuda is None:
            return None
        from sm120.stack.cuda.home import make_cuda_home

        made = make_cuda_home(site, self.state.cuda_home(self.stack.name))
        for problem in made.problems:
            self.console.warn(f"CUDA home: {problem}")
        if made.version != self.stack.cuda or not made.usable:
            raise errors.BinaryError(
                f"the CUDA home made of the stack {self.stack.name} is"
                + (f" of CUDA {made.version}, not {self.stack.cuda}" if made.usable else " not usable")
                + (f"; missing: {', '.join(made.missing)}" if made.missing else ""),
                where=str(made.path),
                remedy=f"correct the CUDA packages in {self.stack.path}, then run the same command again",
            )
        return str(made.path)

    def _prove(self, lock: "Lock", environment: Environment, site: Path) -> list[dict[str, Any]]:
        from sm120.stack.install import verify
        from sm120.stack.install.installer import clean_environment

        self.console.info("    proving it")
        env = {**clean_environment(), **environment.variables}
        proofs = verify.prove(
            self.stack.imports, self.stack.driver_imports, environment.python, env, self.run, self.held
        )
        verify.check_proofs(self.stack.name, proofs, self.run.log_path("prove"))
        verify.check_imported_torch(lock, site, proofs)
        return [asdict(proof) for proof in proofs]

    def _prune(self) -> None:
        """Drops the wheels that no lock names. A lock that cannot be read might name any."""
        from sm120.stack.lock import read_lock

        kept: set[str] = set()
        try:
            for path in self.state.lock_file("any").parent.glob("pylock.*.toml"):
                kept.update(file.sha256 for file in read_lock(path).files)
        except errors.UsageError as error:
            self.console.warn(f"no old wheels are dropped: {error.message}")
            return
        freed = self.store.prune(kept)
        if freed:
            self.console.info(f"    dropped {size(freed)} of wheels that no lock names any more")


def write_activation(environment: Environment, state: State) -> None:
    """The script that sets in a shell what every later task sets."""
    from sm120.stack import activation

    text = activation.script(environment.name, **environment.places)
    files.write_text_atomic(state.activation(environment.name), text)


def fetch(lock: "Lock", store: "Store", console: Console, *, offline: bool = False) -> None:
    """Every wheel of a lock into the store, whole. BinaryError when one is not, or no longer, what the lock says."""
    missing = [file for file in lock.files if not store.path(file).exists()]
    if missing:
        console.info(f"    fetching {len(missing)} wheels, {size(store.missing_bytes(missing))}")
        is_local = offline or all(file.url.startswith("file:") for file in missing)
        store.fetch(missing, None if is_local else _transport(), console)
    store.check(lock.files)


def _transport() -> "Transport":
    # Imported here alone: to import it opens a socket, which an installation without a network must not do.
    from sm120.stack.fetch.transport import Transport
    from sm120.stack.resolve.pipconfig import read_pip_config

    return Transport(read_pip_config())
