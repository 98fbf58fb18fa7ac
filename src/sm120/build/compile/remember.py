"""The memory that one nvcc thread needed in earlier builds, so that the next plan need not guess."""

import math

from sm120 import errors, files
from sm120.state import State

SCHEMA = 1


def remembered(state: State, component: str) -> float | None:
    """Gigabytes; None when it was not measured yet."""
    return _read(state).get(component)


def remember(state: State, component: str, peak: float) -> None:
    """The largest of all builds counts: one that took most from the cache, or was gone on with, shows too little."""
    path = state.root / "build" / "memory.json"
    with files.lock(path.with_suffix(".lock")):
        known = _read(state)
        known[component] = max(math.ceil(peak * 100) / 100, known.get(component, 0.0))
        files.write_json_atomic(path, {"schema": SCHEMA, "gb_per_thread": dict(sorted(known.items()))})


def _read(state: State) -> dict[str, float]:
    """A file that is missing or damaged says nothing: it only spares a guess."""
    try:
        content = files.read_json(state.root / "build" / "memory.json")
    except errors.UsageError:
        return {}
    table = content.get("gb_per_thread") if isinstance(content, dict) and content.get("schema") == SCHEMA else None
    if not isinstance(table, dict):
        return {}
    return {name: float(value) for name, value in table.items() if _is_amount(value)}


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
