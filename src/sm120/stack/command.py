"""``setup``: resolve a stack, lock it, install it and prove it; keep a mirror of it, or take it from one."""

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm120 import errors, files
from sm120.console import Console, duration, size
from sm120.stack import plan
from sm120.stack.install import adopt
from sm120.stack.install.environment import Relocked, ensure_environment, fetch, relock, write_activation
from sm120.stack.install.record import Environment
from sm120.stack.selection import select
from sm120.stack.spec import STACKS, Stack, is_name, load_stack, request
from sm120.state import State

if TYPE_CHECKING:
    from sm120.stack.lock import Lock

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    stack: str = ""  # empty: by the cards of this machine
    lock: bool = False
    mirror: Path | None = None
    offline: Path | None = None
    adopt: Path | None = None
    dry_run: bool = False


def setup(options: Options) -> None:
    _check(options)
    console, state = Console.current(), State.resolve()
    if options.adopt is not None:
        _adopt(options, options.adopt, state, console)
    elif options.offline is not None:
        _offline(options, options.offline, state, console)
    else:
        name, why = (options.stack, "asked for") if options.stack else _default(console)
        _refuse_adopted(options, name, state)
        if options.dry_run:
            plan.show(plan.install(name, why, state, lock=options.lock, mirror=options.mirror), console)
        elif options.lock:
            _lock(load_stack(name), options.mirror, state, console)
        else:
            _install(name, why, options.mirror, state, console)


def _check(options: Options) -> None:
    """UsageError for flags that contradict each other."""
    given = {
        "--adopt": options.adopt is not None,
        "--offline": options.offline is not None,
        "--mirror": options.mirror is not None,
        "--lock": options.lock,
    }
    for one, others, why in (
        ("--adopt", ("--offline", "--mirror", "--lock"), "an adopted interpreter is used as it is: nothing is locked"),
        ("--offline", ("--lock",), "a mirror brings its own lock"),
        ("--offline", ("--mirror",), "to have a second mirror, copy the folder"),
    ):
        for other in others:
            if given[one] and given[other]:
                raise errors.UsageError(f"{one} and {other} do not go together: {why}", remedy=f"leave {other} out")


def _default(console: Console) -> tuple[str, str]:
    """Nightly where a card needs it, cpu elsewhere; and why."""
    from sm120.host.gather import gpu_capabilities

    present = [f"{major}.{minor}" for major, minor in gpu_capabilities()]
    ours = next((text for text in present if text.startswith("12.")), None)
    if ours is not None:
        name, why = "nightly", f"a card of compute capability {ours} is in this machine"
    else:
        found = f"its cards are {', '.join(present)}" if present else "no card is seen"
        name, why = "cpu", f"no card of compute capability 12.x is in this machine: {found}"
    console.info(f"taking the stack {name}: {why} (--stack takes another)")
    return name, why


def _refuse_adopted(options: Options, name: str, state: State) -> None:
    if state.adopted(name).exists() and (options.lock or options.mirror is not None):
        raise errors.UsageError(
            f"{name} is an adopted interpreter: it has no lock and no wheels",
            where=str(state.adopted(name)),
            remedy=f"to set up the stack {name} itself: rm {shlex.quote(str(state.adopted(name)))}",
        )


def _install(name: str, why: str, mirror: Path | None, state: State, console: Console) -> None:
    if mirror is not None:
        _check_mirror(mirror, load_stack(name))
    started = time.monotonic()
    environment = ensure_environment(name, state, console)
    result = _report(environment, state, console, time.monotonic() - started)
    if not environment.adopted:
        stack = load_stack(name)
        _select(stack, name, state)
        if mirror is not None:
            result["mirror"] = _mirror(mirror, stack, state, console)
    else:
        select(state, environment.name)
    console.result({**result, "chosen_because": why})


def _select(stack: Stack, name: str, state: State) -> None:
    """A stack file of the user's is remembered by its whole path."""
    select(state, name if stack.path.parent == STACKS else str(stack.path.absolute()))


def _offline(options: Options, folder: Path, state: State, console: Console) -> None:
    from sm120.stack.fetch.mirror import open_mirror

    mirror = open_mirror(folder, options.stack)
    stack = mirror.stack
    if state.adopted(stack.name).exists():
        raise errors.UsageError(
            f"{stack.name} is an adopted interpreter here",
            where=str(state.adopted(stack.name)),
            remedy=f"to set up the stack {stack.name} itself: rm {shlex.quote(str(state.adopted(stack.name)))}",
        )
    if options.dry_run:
        plan.show(plan.offline(stack, mirror.lock, folder, state), console)
        return
    started = time.monotonic()
    environment = ensure_environment(stack, state, console, given=mirror.lock)
    result = _report(environment, state, console, time.monotonic() - started)
    _select(*_own_stack_file(stack, state), state)
    console.result({**result, "chosen_because": f"the mirror {mirror.folder}"})


def _own_stack_file(stack: Stack, state: State) -> tuple[Stack, str]:
    """The stack that later tasks load: the checkout's when it is the same, else a copy of the mirror's."""
    try:
        own = load_stack(stack.name)
    except errors.UsageError:
        own = None
    if own is not None and request(own) == request(stack):
        return own, own.name
    copy = state.stack_file(stack.name)
    files.write_text_atomic(copy, files.read_text(stack.path))
    return load_stack(copy), str(copy)


def _lock(stack: Stack, mirror: Path | None, state: State, console: Console) -> None:
    if mirror is not None:
        _check_mirror(mirror, stack)
    relocked = relock(stack, state, console)
    lock, path = relocked.lock, state.lock_file(stack.name)
    changes = _changes(relocked)
    total, known = sum(file.size or 0 for file in lock.files), all(file.size is not None for file in lock.files)
    amount = size(total) if known else f"at least {size(total)}"
    console.info(f"{len(lock.files)} packages, {amount} of wheels, {size(stack.disk_bytes)} when installed: {path}")
    if relocked.before is None:
        console.info("the lock is new")
    elif changes:
        console.table("changed", ("package", "before", "now"), changes)
    else:
        console.info("nothing has changed since it was made")
    result: dict[str, object] = {
        "schema": SCHEMA,
        "stack": stack.name,
        "pylock": str(path),
        "fingerprint": lock.fingerprint,
        "packages": len(lock.files),
        "bytes": total,
        "sources": list(lock.sources),
        "is_new": relocked.before is None,
        "changes": [dict(zip(("package", "before", "now"), change, strict=True)) for change in changes],
    }
    if mirror is not None:
        result["mirror"] = _mirror(mirror, stack, state, console)
    console.result(result)


def _changes(relocked: Relocked) -> list[tuple[str, str, str]]:
    """Package, version before and version now; a wheel that changed under its version says so."""
    if relocked.before is None:
        return []
    before = {file.name: file for file in relocked.before.files}
    now = {file.name: file for file in relocked.lock.files}
    changes = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old is None or new is None or old.version != new.version:
            changes.append((name, old.version if old else "-", new.version if new else "-"))
        elif old.sha256 != new.sha256:
            changes.append((name, f"{old.version} {old.sha256[:12]}", f"{new.version} {new.sha256[:12]}"))
    return changes


def _check_mirror(folder: Path, stack: Stack) -> None:
    """Before hours of work, not after them."""
    from sm120.stack.fetch.mirror import check_ours

    check_ours(folder, stack)


def _mirror(folder: Path, stack: Stack, state: State, console: Console) -> dict[str, object]:
    from sm120.stack.fetch import mirror
    from sm120.stack.fetch.store import Store
    from sm120.stack.lock import read_lock

    lock: Lock = read_lock(state.lock_file(stack.name))
    store = Store(state.wheels)
    with console.step(f"bringing the mirror {folder} up to date"), store.in_use():
        fetch(lock, store, console)
        added = mirror.write(folder, stack, lock, store, console)
    console.info(
        f"{folder} holds {len(lock.files)} wheels, {added} of them new; to install from it, without a network:"
    )
    console.info(f"  scripts/inv setup --offline {shlex.quote(str(folder))}")
    return {"folder": str(folder.absolute()), "wheels": len(lock.files), "added": added}


def _adopt(options: Options, python: Path, state: State, console: Console) -> None:
    name = options.stack or adopt.DEFAULT_NAME
    if not is_name(name) or name.endswith(".toml"):
        raise errors.UsageError(
            f"with --adopt, --stack is the name to adopt it by: short, of letters, digits, '.', '_' and '-', no file;"
            f" not {name!r}",
            remedy=f"leave --stack out to call it {adopt.DEFAULT_NAME}",
        )
    with console.step(f"looking over {python}"):
        environment, content = adopt.adopt(python, name, state, write=not options.dry_run)
    torch = content["torch"]
    console.info(f"Python {content['python_version']}, torch {torch['version']} for CUDA {torch['cuda'] or '-'},")
    console.info(f"{len(content['distributions'])} packages; it is used as it is, and never changed")
    if options.dry_run:
        console.info(f"would adopt {python} as the stack {name}")
    else:
        write_activation(environment, state)
        select(state, name)
        console.info(f"adopted as the stack {name}: later tasks use it (--stack takes another)")
    console.result(
        {
            "schema": SCHEMA,
            "stack": name,
            "adopted": True,
            "dry_run": options.dry_run,
            "python": str(environment.python),
            "python_version": content["python_version"],
            "torch": torch,
            "packages": len(content["distributions"]),
            "record": str(environment.lock),
            "fingerprint": environment.fingerprint,
        }
    )


def _report(environment: Environment, state: State, console: Console, seconds: float) -> dict[str, Any]:
    name, place = environment.name, environment.python.parents[1]
    if environment.adopted:
        console.info(f"the stack {name} is the adopted {environment.python}: nothing to do")
    elif environment.fresh:
        _show(environment, console)
        console.info(f"the stack {name} is ready in {place} ({duration(seconds)})")
        if any(state.kernels(name).glob("*.whl")):
            console.info(f"the kernels that were built for it are not in it: scripts/inv build-kernels --stack {name}")
    else:
        console.info(f"the stack {name} is ready in {place}: nothing to do ({seconds:.3f} s)")
    activation = state.activation(name)
    if activation.exists():
        console.info(f"to use it in a shell: . {shlex.quote(str(activation))}")
    return {
        "schema": SCHEMA,
        "stack": name,
        "fresh": environment.fresh,
        "adopted": environment.adopted,
        "seconds": round(seconds, 3),
        "environment": str(place),
        "python": str(environment.python),
        "lock": str(environment.lock),
        "pylock": None if environment.adopted else str(state.lock_file(name)),
        "fingerprint": environment.fingerprint,
        "cuda_home": None if environment.cuda_home is None else str(environment.cuda_home),
        "activation": str(activation) if activation.exists() else None,
        "proved": [_proof(proof) for proof in environment.proofs],
    }


def _proof(proof: Mapping[str, Any]) -> dict[str, Any]:
    return {key: proof[key] for key in ("module", "outcome", "detail")}


def _show(environment: Environment, console: Console) -> None:
    content = files.read_json(environment.lock)
    if isinstance(content, dict):
        rows = [(d["name"], d["version"], d["sha256"][:16]) for d in content["distributions"]]
        console.table("installed", ("package", "version", "sha256"), rows)
    if environment.proofs:
        proofs = [(proof["module"], proof["outcome"], proof["detail"]) for proof in environment.proofs]
        console.table("proved", ("import", "verdict", "version or reason"), proofs)
