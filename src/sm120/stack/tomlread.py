"""TOML read with errors that name file and line. TOML's own reader does not keep lines, so they are looked for."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120 import errors, files

_HEADER = re.compile(r"\s*\[\[?\s*[\"']?([^\]\"']*?)[\"']?\s*\]\]?\s*(?:#.*)?$")

_LARGEST = 2**20  # bytes; a stack file has about 3 KB


def read(path: Path, remedy: str) -> str:
    """The text of a file. UsageError for anything else, such as a device, which may have no end."""
    if not path.is_file():
        raise errors.UsageError(f"{path} is no file", where=str(path), remedy=remedy)
    size = path.stat().st_size
    if size > _LARGEST:
        raise errors.UsageError(
            f"{path} has {size} bytes; this toolkit reads up to {_LARGEST}", where=str(path), remedy=remedy
        )
    return files.read_text(path)


def load(text: str, path: Path, remedy: str) -> "Document":
    """Raises UsageError with file and line when the text is not TOML."""
    document = Document(text, path, remedy)
    if text.startswith("\ufeff"):
        raise document.error(1, "not TOML: it begins with a byte order mark; save it as UTF-8 without one")
    try:
        document.data.update(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        what = re.sub(r" \(at .*\)$", "", str(error))
        raise document.error(line, f"not TOML: {what}") from error
    except (RecursionError, ValueError) as error:  # nesting without end; a number or date out of range
        raise document.error(1, f"not TOML: {error}") from error
    return document


@dataclass(frozen=True)
class Place:
    """Where a value stands: the key in a table, ``number`` counting the tables of that name ([[index]])."""

    table: str
    key: str
    number: int = 0


class Document:
    """What TOML has read, and the checks that find the line of what is wrong."""

    def __init__(self, text: str, path: Path, remedy: str) -> None:
        self.data: dict[str, Any] = {}
        self.path = path
        self._lines = text.splitlines()
        self._remedy = remedy

    def error(self, line: int, message: str) -> errors.UsageError:
        where = f"{self.path}:{line}"
        return errors.UsageError(f"{where}: {message}", where=where, remedy=self._remedy)

    def wrong(self, place: Place, message: str) -> errors.UsageError:
        return self.error(self._line(place), message)

    def table(self, key: str) -> dict[str, Any]:
        """The table of that name; an empty one when the file has none."""
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(Place("", key), f"{key} must be a table")
        return value

    def tables(self, key: str) -> list[dict[str, Any]]:
        """The tables of an array, as in [[index]]."""
        value = self.data.get(key, [])
        if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
            raise self.wrong(Place("", key), f"{key} is written as [[{key}]]")
        return value

    def text(self, table: Mapping[str, Any], place: Place, key: str | None = None) -> str:
        """Text that must be there; ``key`` when it stands in an inline table at ``place``."""
        key = key or place.key
        value = table.get(key)
        if not isinstance(value, str) or not value.strip():
            what = "is missing" if key not in table else f"must be text, not {value!r}"
            raise self.wrong(place, f"{key} {what}")
        return value

    def texts(self, table: Mapping[str, Any], place: Place, key: str | None = None) -> tuple[str, ...]:
        key = key or place.key
        value = table.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.wrong(place, f"{key} must be a list of names")
        return tuple(value)

    def known(self, table: Mapping[str, Any], known: set[str], name: str, number: int = 0) -> None:
        """Refuses a key that is not one of ``known`` in the table ``name``."""
        for key in table:
            if key not in known:
                raise self.wrong(Place(name, key, number), _unknown(key, known))

    def known_inline(self, table: Mapping[str, Any], known: set[str], place: Place) -> None:
        for key in table:
            if key not in known:
                raise self.wrong(place, _unknown(key, known))

    def _line(self, place: Place) -> int:
        """The line of a key, or else of its table, or else of the file."""
        current, seen, table_line = "", -1, 1
        for line_number, line in enumerate(self._lines, start=1):
            header = _HEADER.match(line)
            if header:
                current = header[1]
                if current == f"{place.table}.{place.key}":  # a table of its own instead of an inline one
                    return line_number
                if current == (place.table or place.key):
                    seen += 1
                    if seen == place.number:
                        table_line = line_number
                        if not place.table:
                            return line_number
                continue
            inside = current == place.table and (not place.table or seen == place.number)
            if inside and re.match(rf"\s*[\"']?{re.escape(place.key)}[\"']?\s*(?:=|\.)", line):
                return line_number
        return table_line


def _unknown(key: str, known: set[str]) -> str:
    return f"unknown key {key!r}; {errors.nearest(key, sorted(known))}"
