"""Which stack a task uses when it is told none: the one that ``setup`` made last."""

import contextlib

from sm120 import errors, files
from sm120.state import State


def selected(state: State) -> str | None:
    """What to give as --stack; None when nothing was set up yet. UsageError when the record is damaged."""
    if not state.selected.exists():
        return None
    content: object = None
    with contextlib.suppress(errors.UsageError):  # damaged: the error below also says what to do
        content = files.read_json(state.selected)
    name = content.get("stack") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name:
        raise errors.UsageError(
            f"{state.selected} does not name a stack",
            where=str(state.selected),
            remedy="name one with --stack; the next setup writes the file anew",
        )
    return name


def select(state: State, stack: str) -> None:
    """Remembers it. What is remembered already is not written again: a call without work needs no space."""
    with contextlib.suppress(errors.UsageError):
        if selected(state) == stack:
            return
    files.write_json_atomic(state.selected, {"schema": 1, "stack": stack})
