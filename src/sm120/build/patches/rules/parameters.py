"""What a patch file hands to its rule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

Parameters = Mapping[str, Any]  # checked against the rule's PARAMETERS when the series is loaded


@dataclass(frozen=True, kw_only=True)
class Parameter:
    what: str  # ends "the rule x needs y: …"
    right: Callable[[Any], bool]


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def is_version(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(Version(value))
    except InvalidVersion:
        return False


def is_table_of(*keys: str) -> Callable[[object], bool]:
    """For a table of tables that have these keys, all of them texts."""

    def right(value: object) -> bool:
        return isinstance(value, dict) and all(
            isinstance(inner, dict) and set(inner) == set(keys) and all(map(is_text, inner.values()))
            for inner in value.values()
        )

    return right
