"""Which distribution owns a file of site-packages, by the RECORD that its installer wrote, and who else claims it.

RECORD (PyPA, "Recording installed projects"): CSV lines of path, hash and size; the hash is ``sha256=`` and URL-safe
base64 without padding; the path is relative to site-packages or absolute.
"""

import base64
import binascii
import csv
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from sm120.host.binaries.regular import open_regular, read_limited
from sm120.host.facts import Claim, Clash

_RECORD_LIMIT = 2**26  # bytes; the largest seen holds 3 MiB
_HASHED_LIMIT = 2**36  # bytes of one file


@dataclass(frozen=True)
class Record:
    """One RECORD, without byte code."""

    name: str  # canonical
    version: str
    hashes: dict[str, str | None]  # path relative to site-packages → SHA-256 in hexadecimal


def read_records(site: Path) -> tuple[Record, ...]:
    """Every RECORD of an environment, in the order of their folders' names. Damaged lines are passed over."""
    root = _prefix(site)
    records = []
    for folder in sorted(site.glob("*.dist-info")):
        if folder.name.startswith("~"):  # what pip left behind when it was interrupted
            continue
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        data = read_limited(folder / "RECORD", _RECORD_LIMIT)
        if data is not None:
            hashes = dict(_entries(data.decode("utf-8", "replace").splitlines(), site, root))
            records.append(Record(canonicalize_name(name), version, hashes))
    return tuple(records)


def clashes(site: Path) -> tuple[Clash, ...]:
    """Files that several RECORDs claim with different contents, by path. Only these files are hashed."""
    claims: dict[str, list[Claim]] = {}
    for record in read_records(site):
        for path, digest in record.hashes.items():
            claims.setdefault(path, []).append(Claim(distribution=record.name, version=record.version, sha256=digest))
    return tuple(
        Clash(path=path, claims=tuple(claimed), on_disk=_sha256(site / path))
        for path, claimed in sorted(claims.items())
        if len({claim.sha256 for claim in claimed} - {None}) > 1
    )


def _prefix(site: Path) -> str:
    """The environment's own folder, above lib/python3.x/site-packages: a RECORD names nothing outside it."""
    parents = site.absolute().parents
    return str(parents[min(2, len(parents) - 1)])


def _entries(lines: Iterable[str], site: Path, root: str) -> Iterator[tuple[str, str | None]]:
    base = str(site.absolute())
    for line in lines:
        row = _row(line)
        if len(row) < 2 or not row[0] or "\0" in row[0]:
            continue
        path = os.path.normpath(row[0])
        if path.startswith(("/", "..")):
            absolute = os.path.normpath(os.path.join(base, path))  # noqa: PTH118 - Path would keep the dots
            if not absolute.startswith(root.rstrip("/") + "/"):
                continue
            path = os.path.relpath(absolute, base)
        if not path.endswith(".pyc") and path != ".":
            yield path, _hexadecimal(row[1])


def _row(line: str) -> list[str]:
    if '"' not in line:
        return line.rsplit(",", 2)
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _hexadecimal(field: str) -> str | None:
    algorithm, _, value = field.partition("=")
    if algorithm != "sha256":
        return None
    try:
        digest = base64.b64decode(value + "=", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None


def _sha256(path: Path) -> str | None:
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > _HASHED_LIMIT:
                return None
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
