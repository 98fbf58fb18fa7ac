"""What a build's copy of the tree already went through: a file beside the build files, believed while they match it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sm120.build.patches.outcome import Applied, State
from sm120.build.patches.series import Patch
from sm120.build.patches.tree import Broken, Tree

NAME = ".sm120-patches.json"
_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Ledger:
    applied: Mapping[str, str] = field(default_factory=dict)  # patch → its SHA-256
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    touched: tuple[str, ...] = ()

    def holds(self, patch: Patch) -> bool:
        return self.applied.get(patch.name) == patch.sha256


def read(tree: Tree) -> Ledger:
    """An empty one when there is none, or when a file was changed since."""
    try:
        text = tree.text(NAME)
        found: Any = json.loads(text or "{}")
        if found.get("schema") != _SCHEMA:
            return Ledger()
        if any(_digest(tree.bytes_of(path)) != digest for path, digest in found["files"].items()):
            return Ledger()
        return Ledger(
            applied={str(name): str(digest) for name, digest in found["applied"].items()},
            left_out={str(name): tuple(map(str, targets)) for name, targets in found["left_out"].items()},
            touched=tuple(map(str, found["files"])),
        )
    except (Broken, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Ledger()


def text_of(tree: Tree, patches: Sequence[Patch], made: Applied) -> str:
    """What the ledger of the tree will say when ``made`` is written."""
    after = tree.with_changes(made.changes)
    touched = {*read(tree).touched, *made.changes}
    by_name = {patch.name: patch for patch in patches}
    held = {outcome.patch for outcome in made.outcomes if outcome.state in {State.PENDING, State.APPLIED}}
    document = {
        "schema": _SCHEMA,
        "applied": {name: by_name[name].sha256 for name in sorted(held)},
        "left_out": {outcome.patch: list(outcome.left_out) for outcome in made.outcomes if outcome.left_out},
        "files": {path: _digest(after.bytes_of(path)) for path in sorted(touched)},
    }
    return json.dumps(document, indent=2) + "\n"


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()
