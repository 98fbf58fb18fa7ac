"""What a wheel installs, by its own RECORD (PyPA, "Binary distribution format")."""

import base64
import binascii
import csv
import hashlib
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors

# What zipfile raises for damaged, encrypted and unknown archives, besides OSError; and what reading a RECORD does.
BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError, OverflowError, KeyError),
    csv.Error,
)
_RECORD = re.compile(r"([^/]+\.dist-info)/RECORD")


@dataclass(frozen=True, kw_only=True)
class Contents:
    info: str  # the folder of its metadata
    hashes: Mapping[str, str | None]  # path in the archive → SHA-256 in hexadecimal, where it is one; RECORD left out
    unpacked: int  # bytes

    @property
    def installed(self) -> dict[str, str | None]:
        """Those that go to site-packages under the name that they have here."""
        return {path: digest for path, digest in self.hashes.items() if not path.split("/")[0].endswith(".data")}


def contents(wheel: Path) -> Contents:
    """Raises BinaryError when the wheel cannot be read."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return contents_of(archive)
    except (OSError, *BROKEN) as error:
        raise errors.BinaryError(
            f"{wheel.name} is not a whole wheel: {error}", where=str(wheel), remedy="put a whole copy of it there"
        ) from error


def contents_of(archive: zipfile.ZipFile) -> Contents:
    """ValueError when there is not one RECORD, of lines as they should be."""
    records = [found for name in archive.namelist() if (found := _RECORD.fullmatch(name))]
    if len(records) != 1:
        raise ValueError(f"{len(records)} RECORD files")
    hashes = {}
    for row in csv.reader(archive.read(records[0][0]).decode("utf-8").splitlines()):
        if len(row) != 3 or row[0].startswith("/") or ".." in row[0].split("/"):
            raise ValueError(f"a line of its RECORD: {','.join(row)[:100]}")
        hashes[row[0]] = _hexadecimal(row[1])
    hashes.pop(records[0][0], None)
    return Contents(info=records[0][1], hashes=hashes, unpacked=sum(info.file_size for info in archive.infolist()))


def _hexadecimal(field: str) -> str | None:
    algorithm, _, value = field.partition("=")
    if algorithm != "sha256":
        return None
    try:
        digest = base64.b64decode(value + "=", altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else None
