"""Locks: what a stack resolved to, one wheel a package with URL and SHA-256, as a PEP 751 pylock.toml.

What PEP 751 has no word for stands in ``[tool.sm120]``. A lock is read like a file from a stranger: every name in it
becomes a path or a request.
"""

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from packaging.pylock import Package as PylockPackage
from packaging.pylock import Pylock, PylockValidationError

from sm120 import errors, files

SCHEMA = 1
_CREATOR = "sm120-toolkit"
_LARGEST = 32 * 2**20  # bytes; a lock of 250 packages has 150 KB
_SCHEMES = {"https", "http", "file"}
_REMEDY = "make it again: add --lock to the setup command; or take a whole copy of it"


@dataclass(frozen=True, kw_only=True)
class LockedFile:
    name: str  # canonical
    version: str
    filename: str  # a wheel's
    url: str  # without credentials; in a mirror a path relative to the lock
    sha256: str
    size: int | None  # bytes; None when no index said it


@dataclass(frozen=True, kw_only=True)
class Lock:
    stack: str
    request: str  # spec.request of the stack that was resolved
    python: str  # "3.11"
    platform: str  # "linux_x86_64"
    created: str  # ISO 8601, UTC
    sources: tuple[str, ...]  # what served the files, without credentials
    files: tuple[LockedFile, ...]  # sorted by name

    @property
    def fingerprint(self) -> str:
        """SHA-256 over name, version and SHA-256 of every file."""
        lines = sorted(f"{file.name}=={file.version} sha256:{file.sha256}" for file in self.files)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def file(self, name: str) -> LockedFile | None:
        return next((file for file in self.files if file.name == name), None)


def write_lock(lock: Lock, path: Path) -> None:
    """Writes a valid pylock.toml; the same lock gives the same bytes."""
    import tomli_w

    data = _document(lock)
    Pylock.from_dict(data)  # ours is valid, or this is a mistake of ours
    files.write_text_atomic(path, tomli_w.dumps(data))


def read_lock(path: Path) -> Lock:
    """Raises UsageError, with the file and the place in it, for anything but a whole lock of this toolkit's."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise errors.UsageError(
            f"cannot read {path}: {error.strerror or error}",
            where=str(path),
            remedy="make it first: add --lock to the setup command",
        ) from error
    if size > _LARGEST:
        raise _damaged(path, f"{size} bytes are too many for a lock")
    try:
        data = tomllib.loads(files.read_text(path))
        pylock = Pylock.from_dict(data)  # a wheel's name fits the package and its version, or it is refused here
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise _damaged(path, f"not TOML: {error}") from error
    except PylockValidationError as error:
        raise _damaged(path, f"not a pylock file: {error}") from error
    return _lock(path, pylock)


def _document(lock: Lock) -> dict[str, Any]:
    return {
        "lock-version": "1.0",
        "requires-python": f"=={lock.python}.*",
        "created-by": _CREATOR,
        "packages": [_package(file) for file in sorted(lock.files, key=lambda file: file.name)],
        "tool": {
            "sm120": {
                "schema": SCHEMA,
                "stack": lock.stack,
                "request": lock.request,
                "python": lock.python,
                "platform": lock.platform,
                "created": lock.created,
                "sources": list(lock.sources),
            }
        },
    }


def _package(file: LockedFile) -> dict[str, Any]:
    wheel: dict[str, Any] = {"name": file.filename, "url" if urlsplit(file.url).scheme else "path": file.url}
    if file.size is not None:
        wheel["size"] = file.size
    wheel["hashes"] = {"sha256": file.sha256}
    return {"name": file.name, "version": file.version, "wheels": [wheel]}


def _lock(path: Path, pylock: Pylock) -> Lock:
    tool = pylock.tool or {}
    ours = tool.get("sm120")
    if pylock.created_by != _CREATOR or not isinstance(ours, Mapping):
        raise _damaged(path, f"written by {pylock.created_by!r}, not by this toolkit")
    if ours.get("schema") != SCHEMA:
        raise _damaged(path, f"[tool.sm120] has schema {ours.get('schema')!r}; this toolkit reads {SCHEMA}")
    words = {key: _text(path, ours, key) for key in ("stack", "request", "python", "platform", "created")}
    if not re.fullmatch(r"3\.\d{1,3}", words["python"]):
        raise _damaged(path, f"[tool.sm120] python is no version as in 3.11: {words['python']!r}")
    sources = ours.get("sources")
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise _damaged(path, "[tool.sm120] sources must be a list of texts")
    locked = [_file(path, number, package) for number, package in enumerate(pylock.packages)]
    seen: set[str] = set()
    for file in locked:
        if file.name in seen:
            raise _damaged(path, f"{file.name} is there twice")
        seen.add(file.name)
    if not locked:
        raise _damaged(path, "it names no package")
    return Lock(**words, sources=tuple(sources), files=tuple(sorted(locked, key=lambda file: file.name)))


def _file(path: Path, number: int, package: PylockPackage) -> LockedFile:
    place = f"packages[{number}] ({package.name})"
    if package.version is None or not package.wheels or len(package.wheels) != 1:
        raise _damaged(path, f"{place} must have a version and one wheel")
    wheel = package.wheels[0]
    filename, url, sha256 = wheel.filename, wheel.url or wheel.path or "", wheel.hashes.get("sha256", "")
    if not _is_file_name(filename):
        raise _damaged(path, f"{place} has a wheel with no usable file name: {filename!r}")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise _damaged(path, f"{place} has no SHA-256")
    if wheel.size is not None and wheel.size < 0:
        raise _damaged(path, f"{place} has the size {wheel.size}")
    if not _is_good_url(url):
        raise _damaged(path, f"{place} has no usable URL or path")
    return LockedFile(
        name=package.name, version=str(package.version), filename=filename, url=url, sha256=sha256, size=wheel.size
    )


def _is_file_name(text: str) -> bool:
    """One part of a path, that is: it says where a wheel is put."""
    return text not in {"", ".", ".."} and not any(sign in "/\\" or ord(sign) < 32 for sign in text)


def _is_good_url(url: str) -> bool:
    """A URL of a known kind without credentials, or a relative path that stays where it is."""
    if any(ord(sign) <= 32 or ord(sign) == 127 for sign in url):
        return False
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if parts.scheme:
        return parts.scheme in _SCHEMES and "@" not in parts.netloc and bool(parts.path)
    path = PurePosixPath(url)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not parts.netloc


def _text(path: Path, table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise _damaged(path, f"[tool.sm120] {key} must be text, not {value!r}")
    return value


def _damaged(path: Path, problem: str) -> errors.UsageError:
    return errors.UsageError(f"{path} is not a lock that can be used: {problem}", where=str(path), remedy=_REMEDY)
