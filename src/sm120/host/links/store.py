"""The record of what was chosen: ``links.json`` in the state folder, which goes stale by itself."""

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from sm120 import files, redact
from sm120.errors import UsageError
from sm120.host.facts import Facts
from sm120.host.links.report import SCHEMA, LinkReport
from sm120.state import State

LIMIT: Final = 8 << 20  # bytes; eight GPUs make less than one MiB


def save(report: LinkReport, state: State) -> Path:
    """Writes the record whole. PreflightError where that cannot be."""
    files.write_json_atomic(state.links, redact.redact_json(report.as_json()))
    return state.links


def load_links(state: State, facts: Facts, *, gpus: Sequence[str] | None = None) -> LinkReport | None:
    """The newest report of ``doctor --links``, or None where there is none that holds for these facts.

    It holds for its own cards (``gpus``: UUIDs, by default all), driver and NCCL. A damaged record is none: it is made
    again by the command that made it.
    """
    report = _read(state.links)
    if report is None:
        return None
    wanted = sorted(gpus if gpus is not None else [gpu.uuid for gpu in facts.gpus])
    if list(report.key.gpus) != wanted or report.key.driver != facts.driver.version:
        return None
    installed = next((env for env in facts.environments if env.stack == report.stack), None)
    if installed is None:
        return None
    package = nccl_package({known.name: known.version for known in installed.distributions})
    is_package = "==" in (report.key.nccl or "")
    return report if (report.key.nccl == package if package is not None else not is_package) else None


def nccl_package(distributions: Mapping[str, str]) -> str | None:
    """NCCL's package and version, of the newest CUDA that has one; None where it is no package."""
    for name in sorted(distributions, reverse=True):
        if name.startswith("nvidia-nccl-cu"):
            return f"{name}=={distributions[name]}"
    return None


def _read(path: Path) -> LinkReport | None:
    try:
        if path.stat().st_size > LIMIT:
            return None
        document = files.read_json(path)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            return None
        report = _build(LinkReport, {name: value for name, value in document.items() if name != "schema"})
    except (OSError, UsageError, ValueError, TypeError, OverflowError, RecursionError):
        return None
    return report if isinstance(report, LinkReport) else None


def _build(kind: Any, value: Any) -> Any:
    """``value`` from JSON as ``kind``: dataclasses, tuples, mappings, enumerations and plain values. ValueError."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        (other,) = (arg for arg in inner if arg is not types.NoneType)
        return None if value is None else _build(other, value)
    if origin is tuple:
        return tuple(_build(inner[0], item) for item in _checked(list, value))
    if origin is Mapping:
        return {str(name): _build(inner[1], item) for name, item in _checked(dict, value).items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value)
    return _plain(kind, value)


def _plain(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    if kind is float:
        number = float(_checked((int, float), value))
        if not math.isfinite(number):
            raise ValueError("not finite")
        return number
    return kind(value) if issubclass(kind, enum.Enum) else _checked(kind, value)


def _dataclass(kind: Any, value: Any) -> Any:
    hints = typing.get_type_hints(kind)
    given = _checked(dict, value)
    unknown = given.keys() - hints.keys()
    if unknown:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    return kind(**{name: _build(hints[name], item) for name, item in given.items()})


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{json.dumps(value)[:40]} is no {kind}")
    return value
