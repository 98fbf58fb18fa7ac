"""The build files of a source tree, read when they are asked for, with changes laid over them in memory."""

import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors
from sm120.build.patches.language import NotCMake
from sm120.build.patches.source import BuildFile, Edit, edited

ROOT_FILE = "CMakeLists.txt"
LARGEST = 4 * 2**20  # bytes; SGLang's largest build file has 30 kB
FOLDERS = {  # the newest first: a checkout that holds both keeps the old one as a remnant
    "python/sglang/kernels/aot": "since July 2026 (sgl-project/sglang#32648)",
    "sgl-kernel": "until July 2026",
}
_HERE = re.compile(r"\$\{(CMAKE_CURRENT_LIST_DIR|CMAKE_CURRENT_SOURCE_DIR|PROJECT_SOURCE_DIR|CMAKE_SOURCE_DIR)\}")

Reader = Callable[[str], bytes | None]  # a path below the root, with /: the file's bytes, or None
Changes = dict[str, bytes | None]  # None: the file is taken away


@dataclass(frozen=True, kw_only=True)
class Layout:
    folder: str  # of sgl-kernel's build, below the root; "" when the root is that folder
    when: str

    def path(self, name: str) -> str:
        return posixpath.join(self.folder, name)


def detect_layout(root: Path) -> Layout:
    """Where sgl-kernel's build lies in a checkout of SGLang, or in a copy of its folder alone. Raises PatchError."""
    for folder, when in FOLDERS.items():
        if (root / folder / ROOT_FILE).is_file():
            return Layout(folder=folder, when=when)
    if (root / ROOT_FILE).is_file() and (root / "pyproject.toml").is_file():
        return Layout(folder="", when="the folder by itself")
    places = " or ".join(f"{folder}/{ROOT_FILE}" for folder in FOLDERS)
    raise errors.PatchError(
        f"{root} is no source tree of sgl-kernel: it has neither {places}",
        where=str(root),
        remedy="name a checkout of SGLang, or its folder sgl-kernel or python/sglang/kernels/aot",
    )


class Broken(Exception):
    """A file cannot be read as what it should be. ``where`` is file:line."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class Tree:
    """``layout.folder`` and the reader's root decide what a path means; rules speak of paths below the folder."""

    def __init__(self, read: Reader, layout: Layout, changes: Mapping[str, bytes | None] | None = None) -> None:
        self._read = read
        self.layout = layout
        self.changes: Changes = dict(changes or {})
        self._parsed: dict[str, BuildFile] = {}

    def bytes_of(self, path: str) -> bytes | None:
        """By the path below the root. Raises Broken for a file that no build file can be."""
        if path in self.changes:
            return self.changes[path]
        return self.original(path)

    def original(self, path: str) -> bytes | None:
        data = self._read(path)
        if data is not None and len(data) > LARGEST:
            raise Broken(f"{path}:1", f"{len(data)} bytes are more than a build file has")
        return data

    def text(self, name: str) -> str | None:
        data = self.bytes_of(self.layout.path(name))
        return None if data is None else data.decode("utf-8", "surrogateescape")

    def cmake(self, name: str) -> BuildFile | None:
        """By the path below the component's folder. Raises Broken when it is no CMake."""
        path = self.layout.path(name)
        if path not in self._parsed:
            data = self.bytes_of(path)
            if data is None:
                return None
            try:
                self._parsed[path] = BuildFile(path, data)
            except NotCMake as error:
                raise Broken(f"{path}:{error.line}", f"not CMake: {error}") from error
        return self._parsed[path]

    @property
    def main(self) -> BuildFile:
        file = self.cmake(ROOT_FILE)
        if file is None:
            raise Broken(f"{self.layout.path(ROOT_FILE)}:1", "the file is missing")
        return file

    def build_files(self) -> tuple[BuildFile, ...]:
        """What CMake reads of this tree: the main file, and what include() and add_subdirectory() name of it."""
        found: dict[str, BuildFile] = {}
        todo = [(ROOT_FILE, "")]
        while todo:
            name, folder = todo.pop(0)
            if name in found or (file := self.cmake(name)) is None:
                continue
            found[name] = file
            for command in file.named("include", "add_subdirectory"):
                if command.arguments and (target := self.resolve(command.values[0], name, folder)) is not None:
                    is_folder = command.name == "add_subdirectory"
                    todo.append((posixpath.join(target, ROOT_FILE), target) if is_folder else (target, folder))
        return tuple(found.values())

    def resolve(self, value: str, name: str, folder: str = "") -> str | None:
        """A path that a build file names, below the component's folder; None when it is elsewhere or not known."""
        places = {
            "CMAKE_CURRENT_LIST_DIR": posixpath.dirname(name),
            "CMAKE_CURRENT_SOURCE_DIR": folder,
            "PROJECT_SOURCE_DIR": "",
            "CMAKE_SOURCE_DIR": "",
        }
        found = _HERE.match(value)
        base, rest = (places[found[1]], value[found.end() :].lstrip("/")) if found else (folder, value)
        if "$" in rest or rest.startswith("/"):
            return None
        path = posixpath.normpath(posixpath.join(base, rest))
        if path.split("/")[0] == "..":
            return None
        return "" if path == "." else path

    def with_edits(self, edits: Iterable[Edit], written: Mapping[str, str]) -> "Tree":
        """The tree with edits of CMake files, and with whole files ``written`` (paths below the root)."""
        by_file: dict[str, list[Edit]] = {}
        for edit in edits:
            by_file.setdefault(edit.path, []).append(edit)
        changes: Changes = {path: text.encode("utf-8", "surrogateescape") for path, text in written.items()}
        for path, some in by_file.items():
            text = (self.bytes_of(path) or b"").decode("utf-8", "surrogateescape")
            changes[path] = edited(text, some).encode("utf-8", "surrogateescape")
        return self.with_changes(changes)

    def with_changes(self, changes: Mapping[str, bytes | None]) -> "Tree":
        made = Tree(self._read, self.layout, {**self.changes, **changes})
        made._parsed = {path: file for path, file in self._parsed.items() if path not in changes}
        return made


def reader(root: Path) -> Reader:
    """Reads below ``root`` and never outside it: a link that leads out is refused with Broken."""
    home = root.resolve()

    def read(path: str) -> bytes | None:
        place = root / path
        try:
            if not place.resolve().is_relative_to(home):
                raise Broken(f"{path}:1", "the path leads out of the tree by a symbolic link")
            if not place.is_file():
                return None
            with place.open("rb") as file:
                return file.read(LARGEST + 1)
        except (OSError, RuntimeError) as error:  # RuntimeError: a link that leads to itself
            raise Broken(f"{path}:1", f"cannot be read: {getattr(error, 'strerror', None) or error}") from error

    return read
