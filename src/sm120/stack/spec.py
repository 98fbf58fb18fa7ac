"""Stack files: TOML → a frozen ``Stack``. Every error names file and line."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm120 import config, errors, files

SCHEMA = 1
STACKS = config.CHECKOUT / "stacks"
_KEYS = {"schema", "summary", "python", "disk-mb", "packages", "prove", "index"}
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, kw_only=True)
class Index:
    """A package index of the stack's own, asked only for ``packages``, after the machine's own configuration."""

    url: str
    packages: tuple[str, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stack:
    name: str
    path: Path
    summary: str
    python: str  # a version specifier, as in >=3.11,<3.15
    disk_bytes: int
    packages: Mapping[str, str]  # canonical name → exact version, local tag included
    imports: tuple[str, ...]
    indexes: tuple[Index, ...]

    def requirements(self) -> list[str]:
        """In the file's order: what comes first is also what pip misses first."""
        return [f"{name}=={version}" for name, version in self.packages.items()]


def names() -> list[str]:
    return sorted(path.stem for path in STACKS.glob("*.toml"))


def load_stack(name: str | Path) -> Stack:
    """A stack by its name in stacks/ or by the path of a TOML file. Raises UsageError with file and line."""
    text = str(name)
    is_path = isinstance(name, Path) or "/" in text or text.endswith(".toml")
    path = Path(text).expanduser() if is_path else STACKS / f"{text}.toml"
    if not is_path and text not in names():
        raise errors.UsageError(
            f"no stack is named {text!r}; {errors.nearest(text, names())}",
            where=str(STACKS),
            remedy="name one of these, or give the path of a TOML file",
        )
    return parse(files.read_text(path), path)


def parse(text: str, path: Path) -> Stack:
    """A stack from the text of the file ``path``."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        what = re.sub(r" \(at .*\)$", "", str(error))
        raise _error(path, line, f"not TOML: {what}") from error
    except (RecursionError, ValueError) as error:  # nesting without end; a number or date out of range
        raise _error(path, 1, f"not TOML: {error}") from error
    return _Reader(text, path).stack(data)


def _error(path: Path, line: int, message: str) -> errors.UsageError:
    where = f"{path}:{line}"
    return errors.UsageError(
        f"{where}: {message}", where=where, remedy="correct the file; stacks/cpu.toml is an example"
    )


class _Reader:
    """Checks what TOML has read, and finds the line of what is wrong."""

    def __init__(self, text: str, path: Path) -> None:
        self._lines = text.splitlines()
        self._path = path

    def stack(self, data: dict[str, Any]) -> Stack:
        self._known(data, _KEYS, "")
        if data.get("schema") != SCHEMA or isinstance(data.get("schema"), bool):
            raise self._wrong("", "schema", f"schema must be {SCHEMA}, not {data.get('schema')!r}")
        disk = data.get("disk-mb")
        if not isinstance(disk, int) or isinstance(disk, bool) or not 0 < disk < 10**7:
            raise self._wrong("", "disk-mb", "disk-mb must be a whole number of megabytes above 0")
        name = self._path.stem
        if not _NAME.fullmatch(name):
            raise _error(self._path, 1, f"the file's name must be letters, digits, '.', '_' and '-', not {name!r}")
        packages = self._packages(data)
        return Stack(
            name=name,
            path=self._path,
            summary=self._text(data, "", "summary"),
            python=self._python(data),
            disk_bytes=disk * 10**6,
            packages=packages,
            imports=self._imports(data),
            indexes=self._indexes(data, packages),
        )

    def _python(self, data: Mapping[str, Any]) -> str:
        text = self._text(data, "", "python")
        try:
            SpecifierSet(text)
        except InvalidSpecifier as error:
            raise self._wrong("", "python", f"python is no version specifier: {text!r}") from error
        return text

    def _packages(self, data: Mapping[str, Any]) -> dict[str, str]:
        table = self._table(data, "packages")
        if not table:
            raise self._wrong("", "packages", "[packages] names no package")
        packages: dict[str, str] = {}
        for name, version in table.items():
            if not _NAME.fullmatch(name):
                raise self._wrong("packages", name, f"{name!r} is no package name")
            if not isinstance(version, str):
                raise self._wrong("packages", name, f"{name} must be an exact version in quotes, not {version!r}")
            try:
                Version(version)
            except InvalidVersion as error:
                message = f'{name} must be an exact version as in "2.13.0+cpu", not {version!r}'
                raise self._wrong("packages", name, message) from error
            if canonicalize_name(name) in packages:
                raise self._wrong("packages", name, f"{name} is named twice")
            packages[canonicalize_name(name)] = version
        return packages

    def _imports(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        if "prove" not in data:
            return ()
        table = self._table(data, "prove")
        self._known(table, {"imports"}, "prove")
        imports = self._texts(table, "prove", "imports")
        for module in imports:
            if not _MODULE.fullmatch(module):
                raise self._wrong("prove", "imports", f"{module!r} is no module name")
        return imports

    def _indexes(self, data: Mapping[str, Any], packages: Mapping[str, str]) -> tuple[Index, ...]:
        tables = data.get("index", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self._wrong("", "index", "an index is written as [[index]]")
        return tuple(self._index(table, number, packages) for number, table in enumerate(tables))

    def _index(self, table: Mapping[str, Any], number: int, packages: Mapping[str, str]) -> Index:
        self._known(table, {"url", "packages", "reason"}, "index", number)
        url = self._text(table, "index", "url", number)
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in {"https", "http", "file"} or parts.username is not None:
            message = "url must be an https, http or file URL without a user name (credentials belong in ~/.netrc)"
            raise self._wrong("index", "url", message, number)
        wanted = tuple(canonicalize_name(name) for name in self._texts(table, "index", "packages", number))
        for name in wanted:
            if name not in packages:
                raise self._wrong("index", "packages", f"{name} is not in [packages]", number)
        return Index(url=url, packages=wanted, reason=self._text(table, "index", "reason", number))

    def _table(self, data: Mapping[str, Any], key: str) -> dict[str, Any]:
        value = data.get(key)
        if not isinstance(value, dict):
            raise self._wrong("", key, f"[{key}] is missing" if value is None else f"{key} must be a table")
        return value

    def _text(self, table: Mapping[str, Any], name: str, key: str, number: int = 0) -> str:
        value = table.get(key)
        if not isinstance(value, str) or not value.strip():
            what = "is missing" if key not in table else f"must be text, not {value!r}"
            raise self._wrong(name, key, f"{key} {what}", number)
        return value

    def _texts(self, table: Mapping[str, Any], name: str, key: str, number: int = 0) -> tuple[str, ...]:
        value = table.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, key, f"{key} must be a list of names", number)
        return tuple(value)

    def _known(self, table: Mapping[str, Any], known: set[str], name: str, number: int = 0) -> None:
        for key in table:
            if key not in known:
                message = f"unknown key {key!r}; {errors.nearest(key, sorted(known))}"
                raise self._wrong(name, key, message, number)

    def _wrong(self, table: str, key: str, message: str, number: int = 0) -> errors.UsageError:
        return _error(self._path, self._line(table, key, number), message)

    def _line(self, table: str, key: str, number: int) -> int:
        """The line of a key, or else of its table, or else of the file. TOML's reader does not keep lines."""
        current, seen, table_line = "", -1, 1
        for line_number, line in enumerate(self._lines, start=1):
            header = re.match(r"\s*\[\[?\s*[\"']?([^\]\"']*?)[\"']?\s*\]\]?\s*(?:#.*)?$", line)
            if header:
                current = header[1]
                if current == (table or key):
                    seen += 1
                    if seen == number:
                        table_line = line_number
                        if not table:
                            return line_number
                continue
            inside = current == table and (not table or seen == number)
            if inside and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*(?:=|\.)", line):
                return line_number
        return table_line
