"""The record of an environment, ``sm120-lock.json`` in its folder: written last, and what makes it count as whole.

Everything here reads only, starts nothing, and imports little: it stands at the beginning of every task.
"""

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from packaging.utils import canonicalize_name

from sm120 import errors, files
from sm120.stack.spec import Stack, request
from sm120.state import State

SCHEMA = 2
NAME = "sm120-lock.json"
EXCHANGE = "sm120-exchange.json"  # beside it, while the environment's kernels are exchanged for others
KERNELS = frozenset({"sgl-kernel", "sglang-kernel"})  # the import sgl_kernel is of both: only one can be installed


class Places(TypedDict):
    environment: Path  # the folder that has bin/python
    cuda_home: Path | None
    cache: Path
    capability: tuple[int, int] | None  # of the cards to compile for: those of 12.x, or else the first


@dataclass(frozen=True)
class Environment:
    """A Python that has a stack installed."""

    name: str
    python: Path
    lock: Path  # the record of what is installed
    fingerprint: str  # over name, version and SHA-256 of everything installed, kernels built here included
    fresh: bool  # made by this call
    adopted: bool = False  # somebody else's: used, never changed
    cuda_home: Path | None = None
    cache: Path = Path()  # where JIT compilers keep what they made
    proofs: tuple[Mapping[str, Any], ...] = field(default=(), compare=False)  # module, outcome, detail

    @functools.cached_property
    def variables(self) -> Mapping[str, str]:
        """What a process of this stack gets beside our own environment: CUDA home, architecture, caches, PATH.

        Found when they are first asked for: that looks at the GPUs, which a task without work need not wait for.
        """
        from sm120.stack import activation

        return activation.variables(self.name, base=os.environ, **self.places)

    @functools.cached_property
    def places(self) -> Places:
        """What the variables and the activation script are made of."""
        from sm120.host.gather import gpu_capabilities

        present = gpu_capabilities()
        return Places(
            environment=self.python.parents[1],
            cuda_home=self.cuda_home,
            cache=self.cache,
            capability=next((c for c in present if c[0] == 12), present[0] if present else None),
        )


def read(folder: Path) -> dict[str, Any]:
    """The record in an environment's folder. UsageError when it is damaged or of another version."""
    content = files.read_json(folder / NAME)
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise errors.UsageError(f"{folder / NAME} is of another version", where=str(folder / NAME))
    return content


def site_packages(environment: Path) -> Path:
    found = sorted(environment.glob("lib/python3.*/site-packages"))
    return found[0] if found else environment / "lib" / "site-packages"


def distributions(site: Path) -> list[tuple[str, str]]:
    """Canonical name and version of every distribution in a folder, from the names of its metadata folders."""
    names = (path.name.removesuffix(".dist-info").rpartition("-") for path in site.glob("*.dist-info"))
    return sorted((canonicalize_name(name), version) for name, _, version in names)


def expected(content: Mapping[str, Any]) -> dict[str, str]:
    """Name and version of what ought to be installed: as locked, but for kernels that were built. Of any content."""
    entries = content.get("distributions")
    locked = {str(e["name"]): str(e["version"]) for e in _named(entries)}
    built = _named(content.get("built"))[-1:]
    if built:
        locked = {name: version for name, version in locked.items() if canonicalize_name(name) not in KERNELS}
    return locked | {str(e["name"]): str(e["version"]) for e in built}


def _named(entries: object) -> list[dict[str, Any]]:
    found = entries if isinstance(entries, list) else []
    return [e for e in found if isinstance(e, dict) and "name" in e and "version" in e]


def fingerprint(content: Mapping[str, Any]) -> str:
    """The lock's, unless kernels were built since: then both count."""
    locked = str(content["fingerprint"])
    if not content.get("built"):
        return locked
    last = content["built"][-1]
    text = f"{locked}\n{last['name']}=={last['version']} sha256:{last['sha256']}"
    return hashlib.sha256(text.encode()).hexdigest()


def asked(stack: Stack) -> dict[str, Any]:
    """What decides whether an environment is still the one that the stack file asks for."""
    return {
        "request": request(stack),
        "imports": list(stack.imports),
        "driver_imports": list(stack.driver_imports),
        "cuda": stack.cuda,
    }


def digest(path: Path) -> str | None:
    """SHA-256 of a small file; None when there is none."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def why_not(stack: Stack, state: State) -> tuple[dict[str, Any] | None, str]:
    """The record of the stack's environment when that is whole, or else why it is not."""
    folder = state.env(stack.name)
    if not (folder / NAME).exists():
        return None, "its installation was not finished" if folder.exists() else "not installed yet"
    try:
        content = read(folder)
    except errors.UsageError:
        return None, "its record is damaged or of another version"
    if content.get("asked") != asked(stack):
        return None, "the stack file has changed"
    if content.get("folder") != str(folder):
        return None, "it was moved"
    if not os.access(folder / "bin" / "python", os.X_OK):
        return None, "its Python is gone"
    home = content.get("cuda_home")
    if home is not None and not Path(home).is_dir():
        return None, "its CUDA home is gone"
    if (folder / EXCHANGE).exists():
        return None, "an exchange of its kernels was interrupted"
    changed = _lock_changed(stack.name, state, content) or hand_made_changes(folder, content)
    return (None, changed) if changed else (content, "")


def _lock_changed(name: str, state: State, content: Mapping[str, Any]) -> str:
    path = state.lock_file(name)
    found = digest(path)
    if found == content.get("lock_sha256"):
        return ""
    if found is None:
        return "its lock is gone"
    from sm120.stack.lock import read_lock

    try:
        lock = read_lock(path)
    except errors.UsageError:
        return "its lock is damaged"
    return "" if lock.fingerprint == content.get("fingerprint") else "its lock has changed"


def hand_made_changes(folder: Path, content: Mapping[str, Any]) -> str:
    """Names what was installed or removed since the record was written; empty when nothing was."""
    recorded = set(content["present"])
    present = {f"{name} {version}" for name, version in distributions(site_packages(folder))}
    changes = [f"+ {x}" for x in sorted(present - recorded)] + [f"- {x}" for x in sorted(recorded - present)]
    return f"changed since: {', '.join(changes)}" if changes else ""


def environment(content: Mapping[str, Any], stack_name: str, state: State, *, fresh: bool) -> Environment:
    folder = state.env(stack_name)
    home = content.get("cuda_home")
    return Environment(
        stack_name,
        folder / "bin" / "python",
        folder / NAME,
        fingerprint(content),
        fresh=fresh,
        cuda_home=None if home is None else Path(home),
        cache=state.cache(stack_name),
        proofs=tuple(content["proved"]),
    )
