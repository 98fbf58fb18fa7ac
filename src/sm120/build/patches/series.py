"""A series of patches: series.toml names them in order, each is one TOML file. Errors name file and line."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from sm120 import config, errors, files
from sm120.build.patches.rules import RULES
from sm120.stack import tomlread
from sm120.stack.tomlread import Document, Place

FOLDER = config.CHECKOUT / "patches" / "sgl-kernel"
SERIES_FILE = "series.toml"
SUBJECTS = ("cmake", "cuda", "torch", "component")
BASES = ("component", "repository")
_SCHEMA = 1
_KEYS = {"schema", "title", "why", "references", "removable", "kind", "rule", "diff", "base", "applies", "parameters"}
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_DIFF_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.(?:patch|diff)")
_REMEDY = "correct the file; patches/sgl-kernel/guard-cmake-policies.toml is an example"
_DIFF_LIMIT = 4 * 2**20  # bytes
_LIMIT = 2**20  # bytes of a TOML file
# What decides an edit: a change of any of these can change what a series makes of a tree.
_SOURCES = ("language.py", "source.py", "tree.py", "targets.py", "engine.py", "gitdiff.py")


@dataclass(frozen=True, kw_only=True)
class Patch:
    name: str
    path: Path
    title: str
    why: str
    references: tuple[str, ...]
    removable: str  # when the patch can go
    applies: Mapping[str, SpecifierSet]  # subject → versions it is for
    rule: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    diff: bytes | None = field(default=None, repr=False)
    diff_path: Path | None = None
    base: str = "component"  # what the paths of the diff are relative to

    @property
    def sha256(self) -> str:
        parts = [self.path.read_bytes(), self.diff or b""]
        return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Series:
    path: Path
    patches: tuple[Patch, ...]
    sha256: str  # over the patch files with their parameters, their order, and the source of the rules


def load_series(folder: Path = FOLDER) -> Series:
    """Raises PatchError with file and line for anything wrong in the folder."""
    try:
        return _load(folder)
    except errors.UsageError as error:
        raise errors.PatchError(error.message, where=error.where, remedy=error.remedy or _REMEDY) from error


def _load(folder: Path) -> Series:
    path = folder / SERIES_FILE
    document = _document(path)
    document.known(document.data, {"schema", "patches"}, "")
    _schema(document)
    names = document.data.get("patches")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise document.wrong(Place("", "patches"), "patches must be a list of names")
    for name in names:
        if not _NAME.fullmatch(name):
            raise document.wrong(
                Place("", "patches"), f"{name!r} is no name of a patch: lower case, digits and hyphens"
            )
        if names.count(name) > 1:
            raise document.wrong(Place("", "patches"), f"{name} is named twice")
    patches = tuple(_patch(folder, name, document) for name in names)
    _all_named(folder, patches, document)
    return Series(path=path, patches=patches, sha256=_digest(patches))


def _document(path: Path) -> Document:
    if path.is_file() and path.stat().st_size > _LIMIT:
        raise errors.UsageError(f"{path}:1: more than {_LIMIT} bytes", where=f"{path}:1", remedy=_REMEDY)
    return tomlread.load(files.read_text(path), path, _REMEDY)


def _schema(document: Document) -> None:
    if document.data.get("schema") != _SCHEMA:
        raise document.wrong(Place("", "schema"), f"schema must be {_SCHEMA}, not {document.data.get('schema')!r}")


def _all_named(folder: Path, patches: tuple[Patch, ...], document: Document) -> None:
    """A file that nothing names would be left out in silence."""
    known = {SERIES_FILE, *(patch.path.name for patch in patches)}
    known |= {patch.diff_path.name for patch in patches if patch.diff_path}
    for path in sorted(folder.iterdir()):
        if path.suffix in {".toml", ".patch", ".diff"} and path.name not in known:
            what = (
                f"add {path.stem!r}" if path.suffix == ".toml" else f"write a .toml with kind = 'diff' for {path.name}"
            )
            raise document.wrong(
                Place("", "patches"), f"{path.name} is in no patch of the series: {what}, or remove it"
            )


def _patch(folder: Path, name: str, series: Document) -> Patch:
    path = folder / f"{name}.toml"
    if not path.is_file():
        raise series.wrong(Place("", "patches"), f"{name} has no file {path.name} here")
    document = _document(path)
    data = document.data
    document.known(data, _KEYS, "")
    _schema(document)
    texts = {key: document.text(data, Place("", key)) for key in ("title", "why", "removable")}
    kind = document.text(data, Place("", "kind"))
    common: dict[str, Any] = {
        **texts,
        "name": name,
        "path": path,
        "references": document.texts(data, Place("", "references")),
        "applies": _applies(document),
    }
    if kind == "rule":
        return Patch(**common, **_rule(document))
    if kind == "diff":
        return Patch(**common, **_diff(document, folder))
    raise document.wrong(Place("", "kind"), f"kind must be 'rule' or 'diff', not {kind!r}")


def _applies(document: Document) -> dict[str, SpecifierSet]:
    table = document.table("applies")
    document.known(table, set(SUBJECTS), "applies")
    found = {}
    for subject in table:
        place = Place("applies", subject)
        try:
            found[subject] = SpecifierSet(document.text(table, place), prereleases=True)
        except InvalidSpecifier as error:
            raise document.wrong(place, f"{subject}: {error}") from error
    return found


def _rule(document: Document) -> dict[str, Any]:
    data = document.data
    for key in ("diff", "base"):
        if key in data:
            raise document.wrong(Place("", key), f"{key} is for kind = 'diff'")
    name = document.text(data, Place("", "rule"))
    if name not in RULES:
        raise document.wrong(Place("", "rule"), f"no rule {name!r}; {errors.nearest(name, list(RULES))}")
    wanted, given = RULES[name].parameters, document.table("parameters")
    document.known(given, set(wanted), "parameters")
    for key, parameter in wanted.items():
        if not parameter.right(given.get(key)):
            raise document.wrong(Place("parameters", key), f"the rule {name} needs {key}: {parameter.what}")
    return {"rule": name, "parameters": given}


def _diff(document: Document, folder: Path) -> dict[str, Any]:
    data = document.data
    for key in ("rule", "parameters"):
        if key in data:
            raise document.wrong(Place("", key), f"{key} is for kind = 'rule'")
    name = document.text(data, Place("", "diff"))
    base = data.get("base", "component")
    if base not in BASES:
        raise document.wrong(Place("", "base"), f"base must be {' or '.join(BASES)}, not {base!r}")
    if not _DIFF_NAME.fullmatch(name):
        raise document.wrong(Place("", "diff"), f"{name!r} is no name of a .patch file in this folder")
    path = folder / name
    try:
        if path.stat().st_size > _DIFF_LIMIT:
            raise document.wrong(Place("", "diff"), f"{name} has more than {_DIFF_LIMIT} bytes")
        return {"diff": path.read_bytes(), "diff_path": path, "base": base}
    except OSError as error:
        raise document.wrong(Place("", "diff"), f"{name} cannot be read: {error.strerror or error}") from error


def _digest(patches: tuple[Patch, ...]) -> str:
    here = Path(__file__).parent
    sources = [here / name for name in _SOURCES] + sorted((here / "rules").glob("*.py"))
    rules = {path.name: files.sha256(path) for path in sources}
    order = [[patch.name, patch.sha256] for patch in patches]
    return hashlib.sha256(json.dumps([order, rules], sort_keys=True).encode()).hexdigest()
