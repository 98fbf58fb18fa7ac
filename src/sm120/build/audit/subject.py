"""Where libraries come from: a wheel, which is unpacked library by library, or files that lie somewhere."""

import contextlib
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from sm120 import errors, files
from sm120.console import size
from sm120.host.binaries.libraries import LIBRARY
from sm120.host.binaries.regular import open_regular, read_limited
from sm120.host.binaries.wheels import refused

_BLOCK = 2**20
_PYTHON_LIMIT = 2**22  # bytes of one Python file
_PYTHON_TOTAL = 2**27
# A wheel's libraries pack to a quarter or a third. Far more is a bomb, and no GPU code.
_RATIO = 200
_SMALL = 2**26  # bytes; what is not larger cannot hurt
_TOTAL = 2**36  # bytes of all libraries of one wheel
_SPARE = 10**9  # bytes of disk left free
_UNPACKED = "unpacked-"


class Item(Protocol):
    """A library that can be had as a file for a while."""

    @property
    def name(self) -> str: ...
    @property
    def package(self) -> str | None: ...
    @property
    def judged(self) -> bool: ...
    @property
    def size(self) -> int: ...
    def file(self) -> "contextlib.AbstractContextManager[tuple[Path, str]]":
        """The file and its SHA-256. Raises BinaryError."""
        ...


@dataclass(frozen=True, kw_only=True)
class File:
    """A library where it lies."""

    name: str
    path: Path
    package: str | None = None
    judged: bool = True

    @property
    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    @contextlib.contextmanager
    def file(self) -> Iterator[tuple[Path, str]]:
        try:
            with open_regular(self.path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise errors.BinaryError(f"cannot be read: {error.strerror or error}", where=str(self.path)) from error
        yield self.path, digest


@dataclass(frozen=True, kw_only=True)
class Member:
    """A library in a wheel."""

    wheel: Path
    archive: zipfile.ZipFile
    info: zipfile.ZipInfo
    folder: Path  # to unpack into
    package: str | None = None
    judged: bool = True

    @property
    def name(self) -> str:
        return self.info.filename

    @property
    def size(self) -> int:
        return self.info.file_size

    @contextlib.contextmanager
    def file(self) -> Iterator[tuple[Path, str]]:
        """Unpacked under a name of ours, and removed afterwards."""
        with files.writing(self.folder):
            folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            target = folder / "library.so"
            yield target, self._unpack(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _unpack(self, target: Path) -> str:
        digest = hashlib.sha256()
        with contextlib.ExitStack() as stack:
            with files.writing(target):
                out = stack.enter_context(target.open("wb"))
            with refused(self.wheel):
                packed = stack.enter_context(self.archive.open(self.info))
            while True:
                with refused(self.wheel):
                    data = packed.read(_BLOCK)
                if not data:
                    return digest.hexdigest()
                digest.update(data)
                with files.writing(target):
                    out.write(data)


def members(wheel: Path, archive: zipfile.ZipFile, folder: Path, package: str | None, at_once: int) -> list[Member]:
    """The libraries of a wheel, of which ``at_once`` are unpacked at a time.

    Raises BinaryError for sizes that no wheel has, PreflightError when the disk cannot hold them.
    """
    found = [info for info in archive.infolist() if LIBRARY.search(info.filename) and not info.is_dir()]
    for info in found:
        if info.file_size > _SMALL and info.file_size > _RATIO * info.compress_size:
            raise _bomb(wheel, f"{info.filename} would unpack to {info.file_size // max(1, info.compress_size)} times")
    total = sum(info.file_size for info in found)
    if total > _TOTAL:
        raise _bomb(wheel, f"its libraries would unpack to {size(total)}, from {size(wheel.stat().st_size)}")
    need = sum(sorted((info.file_size for info in found), reverse=True)[:at_once]) + _SPARE
    free = files.free_bytes(folder)
    if found and free < need:
        raise errors.PreflightError(
            f"not enough disk to unpack the libraries of {wheel.name}: {size(need)} are needed, {size(free)} are free",
            where=str(folder),
            remedy=f"free some space, or {files.MOVE_REMEDY}",
        )
    return [Member(wheel=wheel, archive=archive, info=info, folder=folder, package=package) for info in found]


def _bomb(wheel: Path, what: str) -> errors.BinaryError:
    return errors.BinaryError(
        f"{wheel.name} is not a usable wheel: {what}",
        where=str(wheel),
        remedy="download or build it again; no wheel with GPU code is packed like that",
    )


def python_in_wheel(wheel: Path, archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    left = _PYTHON_TOTAL
    for info in archive.infolist():
        if info.filename.endswith(".py") and info.file_size <= min(_PYTHON_LIMIT, left):
            left -= info.file_size
            with refused(wheel):
                yield info.filename, archive.read(info).decode("utf-8", "replace")


def python_in_files(root: Path, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    left = _PYTHON_TOTAL
    for path in paths:
        data = read_limited(root / path, min(_PYTHON_LIMIT, left)) if path.endswith(".py") else None
        if data is not None:
            left -= len(data)
            yield path, data.decode("utf-8", "replace")


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder for unpacked libraries. Those of processes that were killed are removed."""
    files.make_folder(parent)
    for rubble in parent.glob(f"{_UNPACKED}*"):
        owner = rubble.name.removeprefix(_UNPACKED).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(rubble, ignore_errors=True)
    with files.writing(parent):
        folder = Path(tempfile.mkdtemp(prefix=f"{_UNPACKED}{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
