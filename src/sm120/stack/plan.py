"""What ``setup --dry-run`` says: what would be done, and why. Reads only, asks no network."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm120 import errors, files
from sm120.console import Console, size
from sm120.stack.fetch.store import Store
from sm120.stack.install import adopt
from sm120.stack.install.environment import look, misfit
from sm120.stack.install.interpreter import base_python
from sm120.stack.spec import Stack, load_stack
from sm120.state import State

if TYPE_CHECKING:
    from sm120.stack.lock import Lock

SCHEMA = 1


def install(name: str, why_this: str, state: State, *, lock: bool, mirror: Path | None) -> dict[str, Any]:
    """The plan for a stack from its indexes, with --lock or --mirror."""
    adopted = adopt.find(name, state)
    if adopted is not None:
        words = [f"nothing to do: the stack {name} is the adopted {adopted.python}"]
        return {"schema": SCHEMA, "stack": name, "install": False, "reason": "adopted", "words": words}
    stack = load_stack(name)
    found, why = look(stack, state)
    fitting, lock_why = _lock(stack, state, mended=lock or found is not None)
    plan = _plan(stack, state, fitting) | {
        "chosen_because": why_this,
        "install": found is None and not lock,
        "resolve": lock or (found is None and fitting is None),
        "reason": why or "it is installed and whole",
        "lock_reason": lock_why,
        "mirror": None if mirror is None else str(mirror.absolute()),
    }
    if lock:
        plan["words"] = [f"would resolve the stack {name}, write {plan['pylock']}, and install nothing"]
    elif found is not None:
        plan["words"] = [f"nothing to do: the stack {stack.name} is installed in {plan['environment']}"]
    else:
        source = f"as {plan['pylock']} says" if fitting else f"after resolving it ({lock_why})"
        plan["words"] = [f"would install the stack {stack.name} into {plan['environment']} ({why}), {source}"]
        plan["words"] += _needs(plan)
    if plan["resolve"]:
        plan["words"] += _asked(stack)
    if mirror is not None:
        plan["words"].append(f"would then bring the mirror {mirror} up to date")
    return plan


def offline(stack: Stack, lock: "Lock", folder: Path, state: State) -> dict[str, Any]:
    """The plan for a stack from a mirror."""
    found, why = look(stack, state, lock)
    plan = _plan(stack, state, lock, minor=lock.python) | {
        "chosen_because": f"the mirror {folder}",
        "install": found is None,
        "resolve": False,
        "reason": why or "it is installed and whole",
        "offline": str(folder.absolute()),
    }
    if found is not None:
        plan["words"] = [f"nothing to do: the stack {stack.name} is installed in {plan['environment']}"]
    else:
        plan["words"] = [f"would install the stack {stack.name} into {plan['environment']} from {folder}, offline"]
        plan["words"] += _needs(plan)
    return plan


def show(plan: Mapping[str, Any], console: Console) -> None:
    for line in plan["words"]:
        console.info(line)
    console.result({key: value for key, value in plan.items() if key != "words"})


def _plan(stack: Stack, state: State, lock: "Lock | None", minor: str | None = None) -> dict[str, Any]:
    folder = state.env(stack.name)
    missing = Store(state.wheels).missing_bytes(lock.files) if lock else None
    return {
        "schema": SCHEMA,
        "stack": stack.name,
        "environment": str(folder),
        "pylock": str(state.lock_file(stack.name)),
        "python": str(base_python(stack, minor).path),
        "needed_bytes": stack.disk_bytes + (missing or 0),
        "fetch_bytes": missing,
        "free_bytes": files.free_bytes(folder),
        "packages": [f"{f.name}=={f.version}" for f in lock.files] if lock else stack.requirements(),
        "indexes": [asdict(index) for index in stack.indexes],
        "nightly": None if stack.nightly is None else asdict(stack.nightly),
        "cuda_home": None if stack.cuda is None else str(state.cuda_home(stack.name)),
    }


def _lock(stack: Stack, state: State, *, mended: bool) -> "tuple[Lock | None, str]":
    """The lock that would be installed; or else why it would be made anew.

    A damaged one is the error that an installation ends with, unless it would be ``mended`` or is not needed.
    """
    from sm120.stack.lock import read_lock

    path = state.lock_file(stack.name)
    if not path.exists():
        return None, "it has no lock yet"
    try:
        lock = read_lock(path)
    except errors.UsageError as error:
        if not mended:
            raise
        return None, error.message
    why = misfit(lock, stack, base_python(stack))
    return (None, f"its lock does not fit: {why}") if why else (lock, "")


def _needs(plan: Mapping[str, Any]) -> list[str]:
    fetch = plan["fetch_bytes"]
    wheels = "the wheels' size is known when it is resolved" if fetch is None else f"{size(fetch)} of wheels to fetch"
    return [
        f"  with {plan['python']}, needing {size(plan['needed_bytes'])} of {size(plan['free_bytes'])} free; {wheels}"
    ]


def _asked(stack: Stack) -> list[str]:
    words = [f"  {requirement}" for requirement in stack.requirements()]
    otherwise = "if pip's own configuration lacks it"
    words += [f"  {', '.join(index.packages)}: from {index.url} {otherwise}" for index in stack.indexes]
    if stack.nightly is not None:
        words.append(f"  {', '.join(stack.nightly.names)}: from {stack.nightly.url}, of one day")
    words += [f"  {override.name}: {_override(override.specifier)} ({override.reason})" for override in stack.overrides]
    return words


def _override(specifier: str | None) -> str:
    if specifier is None:
        return "left out, whatever asks for it"
    return f"{specifier or 'as named above'}, whatever else asks for another"
