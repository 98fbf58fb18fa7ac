"""Facts as JSON: written whole, read back strictly."""

import dataclasses
import functools
import math
import stat
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from sm120 import errors, files
from sm120.errors import UsageError
from sm120.host.facts import SCHEMA, Disk, Environment, Facts, Gpu, Pair, Tool, Toolkit

LIMIT = 16 * 2**20  # bytes; a machine with many environments makes less than one MiB
_LARGEST = 2**63  # whole numbers stay below it; a hostile one must not slow arithmetic down
_LONGEST = 2**17  # characters of one text: Linux gives no variable more bytes
# What rules compare with each other, and how many of these the largest machine could have: work grows with the square.
_MOST: Mapping[object, int] = {Gpu: 64, Pair: 64 * 63 // 2, Disk: 64, Tool: 64, Toolkit: 64, Environment: 64}
_REMEDY = "scripts/inv doctor --save FILE writes a facts file on the machine to be judged"


def facts_to_json(facts: Facts) -> dict[str, object]:
    plain = _plain(facts)
    assert isinstance(plain, dict)
    return plain


def facts_from_json(obj: object, where: str) -> Facts:
    """Facts from a JSON value; ``where`` names its origin in errors. UsageError names the place of what is wrong."""
    if not isinstance(obj, dict) or "schema" not in obj:
        raise UsageError(f"{where} is no facts file: it says no schema", where=where, remedy=_REMEDY)
    schema = obj["schema"]
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise UsageError(
            f"{where} was written by a newer toolkit (schema {_short(schema)}; this one knows {SCHEMA})",
            where=where,
            remedy="update this checkout, or save the facts with this toolkit",
        )
    if schema != SCHEMA or isinstance(schema, bool):
        raise UsageError(f"{where}: schema must be {SCHEMA}, not {_short(schema)}", where=where, remedy=_REMEDY)
    facts = _Reader(where).read(obj, Facts, "")
    assert isinstance(facts, Facts)
    return facts


def load_facts(path: Path) -> Facts:
    """Reads a facts file. UsageError when it is missing, no file, larger than ``LIMIT``, not JSON, or not facts."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}", where=str(path), remedy=_REMEDY
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f"{path} is not a file", where=str(path), remedy=_REMEDY)
    if status.st_size > LIMIT:
        raise UsageError(
            f"{path} has {status.st_size} bytes; a facts file has {LIMIT} at most", where=str(path), remedy=_REMEDY
        )
    return facts_from_json(files.read_json(path), str(path))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _short(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _LARGEST:
        return "a number of 64 bits or more"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = repr(value[:61] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "…"


class _Reader:
    """Follows the dataclasses' type hints; its depth is theirs, whatever the document nests."""

    def __init__(self, where: str) -> None:
        self._where = where

    def read(self, value: object, wanted: Any, place: str) -> object:
        origin = typing.get_origin(wanted)
        if origin in (types.UnionType, typing.Union):
            return self._optional(value, wanted, place)
        if origin is tuple:
            return self._tuple(value, typing.get_args(wanted), place)
        if origin is Mapping:
            return self._mapping(value, typing.get_args(wanted)[1], place)
        if dataclasses.is_dataclass(wanted):
            assert isinstance(wanted, type)
            return self._record(value, wanted, place)
        return self._scalar(value, wanted, place)

    def _optional(self, value: object, wanted: Any, place: str) -> object:
        (inner,) = (arg for arg in typing.get_args(wanted) if arg is not types.NoneType)
        return None if value is None else self.read(value, inner, place)

    def _tuple(self, value: object, args: tuple[Any, ...], place: str) -> tuple[object, ...]:
        if not isinstance(value, list):
            self._wrong(place, "a list", value)
        if args[-1] is Ellipsis:
            most = _MOST.get(args[0])
            if most is not None and len(value) > most:
                self._wrong(place, f"a list of {most} at most", value)
            return tuple(self.read(item, args[0], f"{place}[{i}]") for i, item in enumerate(value))
        if len(value) != len(args):
            self._wrong(place, f"a list of {len(args)}", value)
        return tuple(
            self.read(item, arg, f"{place}[{i}]") for i, (item, arg) in enumerate(zip(value, args, strict=True))
        )

    def _mapping(self, value: object, inner: Any, place: str) -> Mapping[str, object]:
        if not isinstance(value, dict):
            self._wrong(place, "an object", value)
        return {key: self.read(item, inner, f"{place}[{_short(key)}]") for key, item in value.items()}

    def _record(self, value: object, cls: type, place: str) -> object:
        if not isinstance(value, dict):
            self._wrong(place, "an object", value)
        fields = {field.name: field for field in dataclasses.fields(cls)}
        prefix = f"{place}." if place else ""
        for key in value:
            if key not in fields:
                known = errors.nearest(key[:60], list(fields))
                self._fail(f"{place or 'the top'} has an unknown field {_short(key)}; {known}")
        hints = _hints(cls)
        read: dict[str, object] = {}
        for name, field in fields.items():
            if name in value:
                read[name] = self.read(value[name], hints[name], prefix + name)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                self._fail(f"{prefix}{name} is missing")
        return cls(**read)

    def _scalar(self, value: object, wanted: Any, place: str) -> object:
        if wanted is str and isinstance(value, str):
            if len(value) > _LONGEST:
                self._fail(f"{place} has {len(value)} characters; a text has {_LONGEST} at most")
            return value
        if wanted is bool and isinstance(value, bool):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST:
            if wanted is int:
                return value
            if wanted is float:
                return float(value)
        if wanted is float and isinstance(value, float) and math.isfinite(value):
            return value
        names = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}
        return self._wrong(place, names[wanted], value)

    def _wrong(self, place: str, wanted: str, value: object) -> NoReturn:
        self._fail(f"{place or 'the top'} must be {wanted}, not {_short(value)}")

    def _fail(self, text: str) -> NoReturn:
        raise UsageError(f"{self._where}: {text}", where=self._where, remedy=_REMEDY)
