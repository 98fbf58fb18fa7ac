"""A built wheel into its stack's environment, over the kernels that are there, and back."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from sm120 import errors
from sm120.build.wheel import Built
from sm120.console import Console
from sm120.runs import Run
from sm120.stack.install import exchange, record
from sm120.stack.install.environment import fetch
from sm120.stack.install.exchange import Entry, Kernels
from sm120.stack.install.record import Environment
from sm120.state import State


@dataclass(frozen=True, kw_only=True)
class Installed:
    before: str | None  # name and version; None where there was no kernel package
    after: str | None
    kept: str | None  # what --rollback now puts in; None where it takes the kernel package out, or has nothing to do


def install(built: Built, environment: Environment, state: State, run: Run, console: Console) -> Installed:
    """Puts the wheel in; what it replaces is kept for ``rollback``. The same wheel again is only looked over.

    Raises UsageError for an adopted environment, which is never changed, PreflightError (no space, an environment that
    has changed), BinaryError (a clash with another package, files that are not what the wheel says).
    """
    if environment.adopted:
        raise _adopted(built.path, environment)
    with _kernels(environment, state, run, console) as (kernels, content):
        _check_torch(built, kernels)
        chain = _chain(content, kernels, console)
        entry = {"name": built.name, "version": built.version, "sha256": built.sha256, "wheel": built.path.name}
        before = kernels.wheels(content.get("built", []))
        is_there = bool(chain) and chain[-1] == entry
        if not is_there:
            # Of two wheels of one name only the later one is still a file.
            chain = [*(one for one in chain if one["wheel"] != entry["wheel"]), entry]
        if not is_there or kernels.wrong_files(kernels.wheels(chain)):
            kernels.put(content, chain)
        return Installed(before=_said(before), after=_name(entry), kept=_said(kernels.wheels(chain[:-1])))


def rollback(environment: Environment, state: State, run: Run, console: Console) -> Installed:
    """Puts in again what the last ``install`` replaced. UsageError when there is nothing to go back to."""
    if environment.adopted:
        raise errors.UsageError(
            f"{environment.name} is an adopted interpreter: nothing was installed into it",
            where=str(environment.lock),
            remedy="leave --rollback out",
        )
    with _kernels(environment, state, run, console) as (kernels, content):
        built = content.get("built", [])
        if not built:
            raise errors.UsageError(
                f"no kernels that were built are in {environment.name}: there is nothing to go back to",
                where=str(environment.lock),
                remedy=f"to put some in: scripts/inv build-kernels --stack {environment.name}",
            )
        last = _name(built[-1])
        chain = _chain({**content, "built": built[:-1]}, kernels, console)
        kernels.put(content, chain)
        kept = _said(kernels.wheels(chain[:-1])) if chain else None
        return Installed(before=last, after=_said(kernels.wheels(chain)), kept=kept)


@contextmanager
def _kernels(
    environment: Environment, state: State, run: Run, console: Console
) -> Iterator[tuple[Kernels, dict[str, Any]]]:
    """The environment's kernels and its record, under its lock; what an interruption left is put right first."""
    name = environment.name
    with exchange.alone(name, state) as held:
        kernels = Kernels(name=name, state=state, run=run, console=console, held=held)
        with kernels.store.in_use():
            exchange.mend(name, state, run, console, held)
            yield kernels, _whole(kernels)


def _whole(kernels: Kernels) -> dict[str, Any]:
    """The environment was whole before the build; whoever changed it since did not hold its lock for that long."""
    again = "run the same command again: it makes the environment anew, and what is built is kept"
    try:
        content = record.read(kernels.folder)
    except errors.UsageError as error:
        raise errors.PreflightError(
            f"the environment {kernels.name} is not whole", where=error.where, remedy=again
        ) from error
    why = "an exchange was interrupted" if kernels.mark.exists() else record.hand_made_changes(kernels.folder, content)
    if why:
        raise errors.PreflightError(
            f"the environment {kernels.name} is not as it was: {why}", where=str(kernels.folder), remedy=again
        )
    return content


def _check_torch(built: Built, kernels: Kernels) -> None:
    wanted, found = built.record.get("torch"), dict(record.distributions(kernels.site)).get("torch")
    if wanted is not None and (found is None or Version(found) != Version(wanted)):
        raise errors.BinaryError(
            f"{built.path.name} was built against torch {wanted}, and {kernels.name} has {found or 'none'}",
            where=str(kernels.site),
            remedy=f"build it anew: scripts/inv build-kernels --stack {kernels.name}",
        )


def _chain(content: dict[str, Any], kernels: Kernels, console: Console) -> list[Entry]:
    """The built wheels that can still be put in, the last one last; without any, the lock's are brought."""
    chain: list[Entry] = []
    for entry in content.get("built", []):
        if all(kernels.have(file) for file in kernels.wheels([entry])):
            chain.append(entry)
        else:
            console.warn(f"{entry['wheel']} is gone from {kernels.state.kernels(kernels.name)}: no way back to it")
    if not chain:
        _bring_locked(kernels, console)
    return chain


def _bring_locked(kernels: Kernels, console: Console) -> None:
    """What cannot be had again must not be taken out."""
    from sm120.stack.lock import read_lock

    lock = read_lock(kernels.state.lock_file(kernels.name))
    fetch(replace(lock, files=kernels.wheels([])), kernels.store, console)


def _adopted(wheel: Path, environment: Environment) -> errors.UsageError:
    python, names = shlex.quote(str(environment.python)), " ".join(sorted(record.KERNELS))
    return errors.UsageError(
        f"{environment.name} is an adopted interpreter, which is never changed; the wheel is {wheel}",
        where=str(environment.lock),
        remedy=f"install it by hand: {python} -m pip uninstall -y {names}; {python} -m pip install --no-deps"
        f" {shlex.quote(str(wheel))}; then scripts/inv setup --adopt {python} --stack {environment.name}",
    )


def _name(entry: Entry) -> str:
    return f"{entry['name']} {entry['version']}"


def _said(wheels: Sequence[Any]) -> str | None:
    return ", ".join(f"{file.name} {file.version}" for file in wheels) or None
