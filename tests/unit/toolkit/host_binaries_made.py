"""Makes small ELF libraries and environments, byte by byte, so that each can be wrong in one way."""

import base64
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GLOBAL, WEAK, LOCAL = 1, 2, 0
DEFAULT, HIDDEN, PROTECTED = 0, 2, 3


@dataclass(frozen=True)
class Symbol:
    name: str
    defined: bool = True
    binding: int = GLOBAL
    visibility: int = DEFAULT


class _Strings:
    def __init__(self) -> None:
        self.data = b"\0"

    def add(self, text: str) -> int:
        self.data += text.encode() + b"\0"
        return len(self.data) - len(text.encode()) - 1


def library(
    *,
    needed: Sequence[str] = (),
    soname: str | None = None,
    rpath: str | None = None,
    runpath: str | None = None,
    symbols: Sequence[Symbol] = (),
    exports: Sequence[str] = (),
    undefined: Sequence[str] = (),
    machine: int = 62,
    kind: int = 3,
    base: int = 0x1000,  # of its addresses
) -> bytes:
    """A shared library without code: headers, strings, symbols, dynamic segment, section table."""
    strings = _Strings()
    tags = [(1, strings.add(name)) for name in needed]
    tags += [(tag, strings.add(text)) for tag, text in ((14, soname), (15, rpath), (29, runpath)) if text is not None]
    every = [*symbols, *map(Symbol, exports), *(Symbol(name, defined=False) for name in undefined)]
    rows = [(0, 0, 0, 0)] + [(strings.add(s.name), s.binding << 4 | 2, s.visibility, int(s.defined)) for s in every]
    table = b"".join(struct.pack("<IBBHQQ", *row, 0, 0) for row in rows)
    names_at = 64 + 2 * 56
    table_at = names_at + len(strings.data)
    tags += [(5, base + names_at), (10, len(strings.data)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags)
    dynamic_at = table_at + len(table)
    sections_at = dynamic_at + len(dynamic)
    size = sections_at + 3 * 64
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01", kind, machine, 1, 0, 64, sections_at, 0, 64, 56, 2, 64, 3, 0,
    )  # fmt: skip
    segments = struct.pack("<IIQQQQQQ", 1, 4, 0, base, base, size, size, 4096)
    segments += struct.pack("<IIQQQQQQ", 2, 4, dynamic_at, base + dynamic_at, 0, len(dynamic), len(dynamic), 8)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 11, 2, base + table_at, table_at, len(table), 2, 1, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 2, base + names_at, names_at, len(strings.data), 0, 0, 1, 0)
    return header + segments + strings.data + table + dynamic + sections


def digest(data: bytes) -> str:
    """As a RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def install(site: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    """Puts a distribution into ``site``, over what is there."""
    lines = []
    for path, data in files.items():
        place = site / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        lines.append(f"{path},{digest(data)},{len(data)}")
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "RECORD").write_text("\n".join([*lines, f"{folder.name}/RECORD,,"]) + "\n")
