"""What a wheel file says of itself: its name against the METADATA inside (pitfall A05)."""

import contextlib
import itertools
import posixpath
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from sm120 import errors
from sm120.host.binaries.regular import open_regular
from sm120.host.facts import Wheel

_DIRECTORY_LIMIT = 2**25  # bytes of the list of members; torch's holds 2 MiB
_METADATA_LIMIT = 2**21  # bytes, unpacked
_FIELD_LIMIT = 200  # characters of a name or a version
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")
# What zipfile raises for damaged, encrypted and unknown archives, besides OSError.
_BROKEN = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError)


class _Unusable(Exception):
    """Says in words what is wrong with the wheel."""


class _Limited(BufferedReader):
    """zipfile reads the whole list of members at once, however long the archive says it is."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _DIRECTORY_LIMIT:
            raise _Unusable("its list of members is larger than that of any wheel")
        return super().read(size)


@contextlib.contextmanager
def open_wheel(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive of a wheel whose list of members was found sound. Sizes that it declares are for the caller to judge.

    Raises BinaryError, in words, for a file that is no such archive or holds a member that would be written outside.
    """
    with contextlib.ExitStack() as stack:
        with refused(path):
            file = stack.enter_context(open_regular(path))
            archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(_Limited(file.raw))))
            _check_outside(archive)
            unusual = next((member for member in archive.infolist() if not _is_usual(member)), None)
            if unusual is not None:
                raise _Unusable(f"it holds a file packed as wheels do not: {unusual.filename[:_FIELD_LIMIT]}")
        yield archive


@contextlib.contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turns what reading a wheel's archive raises into a BinaryError."""
    try:
        with _in_words():
            yield
    except _Unusable as error:
        raise errors.BinaryError(
            f"{path.name} is not a usable wheel: {error}", where=str(path), remedy="download or build it again"
        ) from error


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _Unusable(f"it cannot be read: {error.strerror or error}") from error
    except _BROKEN as error:
        raise _Unusable(f"it is no whole zip archive: {error}") from error


def _check_outside(archive: zipfile.ZipFile) -> None:
    outside = next((member.filename for member in archive.infolist() if _leaves(member.filename)), None)
    if outside is not None:
        raise _Unusable(f"it holds a file that would be written outside: {outside[:_FIELD_LIMIT]}")


def _is_usual(member: zipfile.ZipInfo) -> bool:
    """Methods that wheels do not use unpack in unbounded memory, or not at all; the flag says encrypted."""
    return member.compress_type in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED} and not member.flag_bits & 1


def wheel_facts(path: Path) -> Wheel:
    """Reads name and version from a wheel's file name and from inside it. Never raises for what the file holds."""
    name = version = problem = None
    metadata: dict[str, str] = {}
    try:
        parsed = parse_wheel_filename(path.name)
        name, version = str(parsed[0]), str(parsed[1])
    except InvalidWheelFilename:
        problem = "its file name is not that of a wheel"
    try:
        metadata = _fields(path)
    except _Unusable as error:
        problem = str(error)
    return Wheel(
        path=str(path),
        name=name,
        version=version,
        metadata_name=canonicalize_name(metadata["name"]) if "name" in metadata else None,
        metadata_version=metadata.get("version"),
        problem=problem,
    )


def _fields(path: Path) -> dict[str, str]:
    """The METADATA fields ``name`` and ``version``."""
    with _in_words(), open_regular(path) as file, _Limited(file.raw) as limited, zipfile.ZipFile(limited) as archive:
        data = _metadata(archive)
    fields: dict[str, str] = {}
    lines = (line.rstrip("\r") for line in data.decode("utf-8", "replace").split("\n"))
    for line in itertools.takewhile(bool, lines):  # after the first empty line comes the description
        key, _, value = line.partition(":")
        if key.lower() in {"name", "version"}:
            fields.setdefault(key.lower(), value.strip()[:_FIELD_LIMIT])
    if len(fields) != 2 or not all(fields.values()):
        raise _Unusable("its METADATA names no package and version")
    return fields


def _metadata(archive: zipfile.ZipFile) -> bytes:
    _check_outside(archive)
    found = [member for member in archive.infolist() if _METADATA.fullmatch(member.filename)]
    if len(found) != 1:
        raise _Unusable(f"it holds {len(found) or 'no'} .dist-info/METADATA instead of one")
    if found[0].compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:  # others unpack in unbounded memory
        raise _Unusable("its METADATA is packed by a method that wheels do not use")
    with archive.open(found[0]) as file:
        data = file.read(_METADATA_LIMIT + 1)
    if len(data) > _METADATA_LIMIT:
        raise _Unusable("its METADATA is larger than any package's")
    return data


def _leaves(name: str) -> bool:
    return posixpath.normpath(name).split("/")[0] in {"", ".."}
