"""What the build files of a tree ask FetchContent for, read from their text.

Only what is sure is taken over; what is not is left to CMake, with the reason.
"""

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sm120 import errors
from sm120.build.patches.language import Command
from sm120.build.patches.source import BuildFile
from sm120.build.patches.targets import Filling, Project, references
from sm120.build.patches.tree import Broken, Layout, Tree, reader
from sm120.build.source.address import archived, is_tarball
from sm120.build.source.model import Dependency

_GIT = {"GIT_REPOSITORY", "GIT_TAG", "GIT_SUBMODULES", "GIT_SUBMODULES_RECURSE"}
_URL = {"URL", "URL_HASH"}
_MEANS_NOTHING = {  # to what arrives
    *("GIT_SHALLOW", "GIT_PROGRESS", "GIT_REMOTE_NAME", "DOWNLOAD_EXTRACT_TIMESTAMP", "DOWNLOAD_NO_PROGRESS"),
    *("TIMEOUT", "INACTIVITY_TIMEOUT", "TLS_VERIFY", "SOURCE_SUBDIR", "EXCLUDE_FROM_ALL", "SYSTEM"),
    *("OVERRIDE_FIND_PACKAGE", "USES_TERMINAL_DOWNLOAD", "QUIET", "PREFIX", "STAMP_DIR", "TMP_DIR"),
}
_KEYWORD = re.compile(r"[A-Z][A-Z0-9_]{2,}")
_VALUES = {"ON", "OFF", "TRUE", "FALSE", "YES"}  # words in capitals that are no keywords
_FALSE = {"0", "OFF", "NO", "FALSE", "N", "IGNORE", "NOTFOUND", ""}
_SHA256 = re.compile(r"SHA256=([0-9a-f]{64})", re.IGNORECASE)
_WITHIN = re.compile(r"\$\{([^${}]+)_SOURCE_DIR\}/(.+)")
_DEEPEST = 8  # variables in variables


class _LeftToCMake(Exception):
    """Why we do not fetch it."""


def dependencies(root: Path, folder: str, changes: Mapping[str, bytes | None]) -> tuple[Dependency, ...]:
    """What the build files, with the changes, make available. Raises PatchError."""
    tree = Tree(reader(root), Layout(folder=folder, when=""), changes)
    try:
        project = Project(tree.build_files())
    except Broken as error:
        raise errors.PatchError(
            f"{error.where}: {error.reason}", where=error.where, remedy="correct the file, or take another commit"
        ) from error
    available, is_all_known = _made_available(project)
    found: dict[str, Dependency] = {}
    for file, command in project.commands("fetchcontent_declare"):
        if command.arguments:
            name = command.values[0].lower()
            if name in available or not is_all_known:
                one = _read(name, command.values[1:], file, command, project)
                found[name] = _either(found.get(name, one), one)
    for file, command in project.commands("fetchcontent_populate"):
        name = command.values[0].lower() if command.arguments else ""
        if {*_GIT, *_URL} & set(command.values):  # the form that looks at no declaration and no variable
            reason = "FetchContent_Populate says itself where it is from, and then looks at nothing else"
            found[name] = Dependency(name=name, kind="cmake", place=file.where(command.start), reason=reason)
    return tuple(found.values())


def _either(first: Dependency, second: Dependency) -> Dependency:
    """CMake takes the declaration that it comes to first, and which one that is depends on its conditions."""
    if replace(second, place=first.place) == first:
        return first
    reason = f"it is declared at {first.place} and in another way at {second.place}"
    return Dependency(name=first.name, kind="cmake", place=first.place, reason=reason)


def _made_available(project: Project) -> tuple[set[str], bool]:
    """Names that the files populate; False when a variable hides some."""
    names: set[str] = set()
    is_all_known = True
    for _, command in project.commands("fetchcontent_populate", "fetchcontent_makeavailable"):
        values = command.values[:1] if command.name == "fetchcontent_populate" else command.values
        names.update(value.lower() for value in values)
        is_all_known = is_all_known and not any("$" in value for value in values)
    return names, is_all_known


def _read(name: str, words: Sequence[str], file: BuildFile, command: Command, project: Project) -> Dependency:
    place = file.where(command.start)
    try:
        return _understood(name, _by_keyword(words), project.fillings, place)
    except _LeftToCMake as why:
        return Dependency(name=name, kind="cmake", place=place, reason=str(why))


def _understood(name: str, words: Mapping[str, list[str]], fillings: Sequence[Filling], place: str) -> Dependency:
    inside = _inside(words.get("SOURCE_DIR"))
    given = {
        keyword: [_expanded(value, fillings) for value in words[keyword]]
        for keyword in (*_GIT, *_URL)
        if keyword in words
    }
    if "GIT_REPOSITORY" in given and "URL" not in given:
        return _git(name, given, inside, place)
    if "URL" in given and not _GIT & set(given):
        return _archive(name, given, inside, place)
    raise _LeftToCMake("it is neither one git repository nor one archive")


def _by_keyword(words: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if _KEYWORD.fullmatch(word) and word not in _VALUES:
            if word not in {*_GIT, *_URL, *_MEANS_NOTHING, "SOURCE_DIR"}:
                raise _LeftToCMake(f"its argument {word} is CMake's to understand")
            current = found.setdefault(word, [])
        elif current is None:
            raise _LeftToCMake(f"its argument {word} is CMake's to understand")
        else:
            current.append(word)
    return found


def _expanded(value: str, fillings: Sequence[Filling], depth: int = 0) -> str:
    if depth > _DEEPEST or "$ENV{" in value or "$<" in value or "$CACHE{" in value:
        raise _LeftToCMake(f"only CMake knows what {value} is")
    for variable in dict.fromkeys(references(value)):
        texts = {
            _expanded(filling.values[0].value, fillings, depth + 1)
            for filling in fillings
            if filling.variable == variable and filling.command.name == "set" and _is_plain(filling)
        }
        if len(texts) != 1:
            why = "is set nowhere in the build files" if not texts else "has more than one value"
            raise _LeftToCMake(f"{variable} {why}")
        value = value.replace(f"${{{variable}}}", texts.pop())
    if "${" in value:
        raise _LeftToCMake(f"only CMake knows what {value} is")
    return value


def _is_plain(filling: Filling) -> bool:
    """Not one that takes the value from the environment: what CMake does without it is what we do."""
    return len(filling.values) == 1 and "$ENV{" not in filling.values[0].value


def _inside(values: Sequence[str] | None) -> str:
    """Where in another dependency it goes."""
    if values is None:
        return ""
    found = _WITHIN.fullmatch(values[0]) if len(values) == 1 else None
    path = posixpath.normpath(found[2]) if found else ".."
    if found is None or "$" in path or path.startswith(("/", "..")) or path == ".":
        raise _LeftToCMake(f"only CMake knows where SOURCE_DIR {' '.join(values)} is")
    return f"{found[1].lower()}/{path}"


def _git(name: str, given: Mapping[str, list[str]], inside: str, place: str) -> Dependency:
    if len(given["GIT_REPOSITORY"]) != 1 or len(given.get("GIT_TAG", [])) != 1:
        raise _LeftToCMake("it has no GIT_TAG, and CMake takes the branch master then")
    paths = [path for value in given.get("GIT_SUBMODULES", []) for path in value.split(";") if path]
    submodules: bool | tuple[str, ...] = tuple(paths) if "GIT_SUBMODULES" in given else True
    recurse = given.get("GIT_SUBMODULES_RECURSE", ["ON"])
    if recurse and recurse[0].upper() in _FALSE and submodules:
        raise _LeftToCMake("GIT_SUBMODULES_RECURSE is off")
    return Dependency(
        name=name,
        kind="git",
        url=given["GIT_REPOSITORY"][0],
        revision=given["GIT_TAG"][0].removeprefix("origin/"),
        submodules=submodules or False,
        inside=inside,
        place=place,
    )


def _archive(name: str, given: Mapping[str, list[str]], inside: str, place: str) -> Dependency:
    url = given["URL"][0] if given["URL"] else ""
    if not url.startswith(("https://", "http://")) or not is_tarball(url):
        raise _LeftToCMake(f"URL {url} is no tar archive on a server")
    hashes = given.get("URL_HASH", [])
    matched = _SHA256.fullmatch(hashes[0]) if len(hashes) == 1 else None
    if "URL_HASH" in given and matched is None:
        raise _LeftToCMake(f"URL_HASH {' '.join(hashes)} is no SHA256")
    sha256 = matched[1].lower() if matched else None
    source = archived(url)
    return Dependency(
        name=name,
        kind="archive",
        url=url,
        revision=source[1] if source else (sha256 or ""),
        sha256=sha256,
        inside=inside,
        place=place,
    )
