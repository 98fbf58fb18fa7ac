"""What a shared library's ELF file says to the loader, and the symbols it offers and asks for.

Only headers, the dynamic segment and the dynamic symbol table are read, never code or GPU binaries, so that a library
of a gigabyte costs milliseconds. pyelftools, which the tests compare with, takes 5 s for the symbols of one torch
(0.2 s here), and neither bounds what a damaged file makes it read nor says which exceptions it raises.
Layout: System V ABI, chapters 4 and 5; numbers as in <elf.h>.
"""

import itertools
import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sm120 import errors
from sm120.host.binaries.regular import open_regular

MACHINES = {62: "x86_64", 183: "aarch64"}  # EM_X86_64, EM_AARCH64; as platform.machine() names them

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_DYNAMIC = struct.Struct("<qQ")
_SYMBOL = struct.Struct("<IBBHQQ")

_ET_DYN = 3
_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_STRSZ, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 10, 14, 15, 29
_SHT_NULL, _SHT_NOBITS, _SHT_DYNSYM = 0, 8, 11
_STB_LOCAL, _STB_WEAK = 0, 2
_SHN_UNDEF = 0
_VISIBLE = {0, 3}  # STV_DEFAULT, STV_PROTECTED

# Limits far above what libraries hold (torch 2.14.1: 76 thousand symbols, 5 MiB of names), far below what hurts.
_TABLE_LIMIT = 4096  # segments, sections
_DYNAMIC_LIMIT = 2**16  # bytes: 4096 entries
_SECTION_NAMES_LIMIT = 2**20  # bytes
_STRING_LIMIT = 4096  # bytes of one name or search path in the dynamic segment
_SYMBOLS_LIMIT = 2**26  # bytes: 2.8 million symbols
_NAMES_LIMIT = 2**27  # bytes, of the string table and again of all names read from it


@dataclass(frozen=True, kw_only=True)
class Elf:
    """One shared library. Names are as in the file; bytes that are no text are escaped."""

    machine: str  # x86_64, aarch64, or "machine 8"
    soname: str | None = None
    needed: tuple[str, ...] = ()  # DT_NEEDED, in order
    search: tuple[str, ...] = ()  # RUNPATH, or RPATH where there is none, unexpanded
    exported: frozenset[bytes] = frozenset()  # of the wanted symbols
    undefined: frozenset[bytes] = frozenset()  # of the wanted symbols; weak ones may stay undefined and are left out


@dataclass(frozen=True, kw_only=True)
class Section:
    """A named part of the file."""

    name: str
    offset: int
    size: int  # in the file


def read(path: Path, wanted: "re.Pattern[bytes] | None" = None) -> Elf:
    """Reads a 64-bit little-endian shared library; of its dynamic symbols only those whose start ``wanted`` matches.

    The names in the symbol table carry no version, so ``f@@VERS_2`` is ``f``. Raises BinaryError, in words, for a file
    that is no such library, is cut short or damaged, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            return _Reader(path, file.fileno()).elf(wanted)
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror or error}") from error


def sections(path: Path) -> tuple[Section, ...]:
    """The sections that lie in the file, in its order; none where its table of sections was stripped.

    Raises BinaryError as ``read`` does.
    """
    try:
        with open_regular(path) as file:
            return _Reader(path, file.fileno()).sections()
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror or error}") from error


def _error(path: Path, problem: str) -> errors.BinaryError:
    return errors.BinaryError(problem, where=str(path), remedy="install the package that owns this file again")


@dataclass(frozen=True)
class _Table:
    offset: int
    entry: int  # bytes
    count: int


@dataclass(frozen=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int  # in the file


@dataclass(frozen=True)
class _Section:
    name: int  # where it stands in the string table of the section names
    kind: int
    offset: int
    size: int
    link: int  # index of its string table


class _Reader:
    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd
        self._size = os.fstat(fd).st_size

    def elf(self, wanted: "re.Pattern[bytes] | None") -> Elf:
        machine, segment_table, section_table, _ = self._header()
        segments = self._segments(segment_table)
        self._inside(section_table.offset, section_table.entry * section_table.count)  # at the end: lost in any cut
        names = self._dynamic_names(segments)
        search = names(_DT_RUNPATH) or names(_DT_RPATH)
        exported, undefined = frozenset[bytes](), frozenset[bytes]()
        if wanted is not None:
            exported, undefined = self._symbols(wanted, section_table)
        return Elf(
            machine=MACHINES.get(machine, f"machine {machine}"),
            soname=next(iter(names(_DT_SONAME)), None),
            needed=names(_DT_NEEDED),
            search=tuple(folder for text in search for folder in text.split(":") if folder),
            exported=exported,
            undefined=undefined,
        )

    def sections(self) -> tuple[Section, ...]:
        _, _, table, names_at = self._header()
        rows = self._sections(table)
        if not rows:
            return ()
        if names_at >= len(rows):
            self._fail("damaged: sections without names")
        names = self._read(rows[names_at].offset, rows[names_at].size, _SECTION_NAMES_LIMIT, "a table of section names")
        found = []
        for row in rows:
            if row.kind not in {_SHT_NULL, _SHT_NOBITS}:
                self._inside(row.offset, row.size)
                name = names[row.name : names.find(b"\0", row.name)].decode("utf-8", "backslashreplace")
                found.append(Section(name=name, offset=row.offset, size=row.size))
        return tuple(found)

    def _fail(self, problem: str) -> NoReturn:
        raise _error(self._path, problem)

    def _inside(self, offset: int, size: int) -> None:
        if offset + size > self._size:
            self._fail(f"truncated or damaged: it holds {self._size} bytes, and speaks of byte {offset + size}")

    def _read(self, offset: int, size: int, limit: int, what: str) -> bytes:
        if size > limit:
            self._fail(f"damaged: {what} of {size} bytes")
        self._inside(offset, size)
        data = os.pread(self._fd, size, offset)
        if len(data) != size:  # it shrank while we read
            self._fail(f"truncated: {what} ends after {len(data)} of {size} bytes")
        return data

    def _rows(self, table: _Table, form: struct.Struct, what: str) -> Iterator[tuple[int, ...]]:
        if table.count and table.entry != form.size:
            self._fail(f"damaged: {what} with entries of {table.entry} bytes instead of {form.size}")
        return form.iter_unpack(self._read(table.offset, table.count * form.size, _TABLE_LIMIT * form.size, what))

    def _header(self) -> tuple[int, _Table, _Table, int]:
        """Machine, segment table, section table, and which section names the sections."""
        start = os.pread(self._fd, _HEADER.size, 0)
        if start[:4] != b"\x7fELF":
            self._fail("empty" if not start else "not an ELF file")
        if len(start) < _HEADER.size:
            self._fail(f"truncated: it holds {self._size} bytes")
        if start[4:6] != b"\x02\x01":
            self._fail("a 32-bit library" if start[4] == 1 else "not a little-endian 64-bit library")
        _, kind, machine, _, _, phoff, shoff, _, _, phentsize, phnum, shentsize, shnum, names = _HEADER.unpack(start)
        if kind != _ET_DYN:
            self._fail("an ELF file, but no shared library")
        return machine, _Table(phoff, phentsize, phnum), _Table(shoff, shentsize, shnum), names

    def _segments(self, table: _Table) -> list[_Segment]:
        rows = self._rows(table, _SEGMENT, "a segment table")
        segments = [_Segment(kind=row[0], offset=row[2], address=row[3], size=row[5]) for row in rows]
        for segment in segments:
            if segment.kind == _PT_LOAD:
                self._inside(segment.offset, segment.size)
        return segments

    def _sections(self, table: _Table) -> list[_Section]:
        rows = self._rows(table, _SECTION, "a section table")
        return [_Section(name=row[0], kind=row[1], offset=row[4], size=row[5], link=row[6]) for row in rows]

    def _dynamic_names(self, segments: list[_Segment]) -> Callable[[int], tuple[str, ...]]:
        """Gives the names that the dynamic segment's entries of one tag point to."""
        tags = self._dynamic(segments)
        values = dict(tags)
        base = _offset(values.get(_DT_STRTAB, 0), segments)
        size = values.get(_DT_STRSZ, 0)
        return lambda wanted: tuple(self._name(base, size, value) for tag, value in tags if tag == wanted)

    def _dynamic(self, segments: list[_Segment]) -> list[tuple[int, int]]:
        place = next((segment for segment in segments if segment.kind == _PT_DYNAMIC), None)
        if place is None:
            self._fail("an ELF file without a dynamic segment")
        size = place.size - place.size % _DYNAMIC.size
        rows = _DYNAMIC.iter_unpack(self._read(place.offset, size, _DYNAMIC_LIMIT, "a dynamic segment"))
        return list(itertools.takewhile(lambda row: row[0] != _DT_NULL, rows))

    def _name(self, base: int | None, size: int, offset: int) -> str:
        if base is None or offset >= size:
            self._fail("damaged: a name outside its string table")
        self._inside(base, offset)
        raw = os.pread(self._fd, min(size - offset, _STRING_LIMIT), base + offset)
        name, end, _ = raw.partition(b"\0")
        if not end:
            self._fail("damaged: a name without an end")
        return name.decode("utf-8", "backslashreplace")

    def _symbols(self, wanted: "re.Pattern[bytes]", section_table: _Table) -> tuple[frozenset[bytes], frozenset[bytes]]:
        # The loader finds symbols by hash and never counts them: only the section table knows how many there are.
        sections = self._sections(section_table)
        table = next((section for section in sections if section.kind == _SHT_DYNSYM), None)
        if table is None or table.link >= len(sections):
            self._fail("without a section of dynamic symbols")
        strings = sections[table.link]
        names = self._read(strings.offset, strings.size, _NAMES_LIMIT, "a string table")
        size = table.size - table.size % _SYMBOL.size
        symbols = _SYMBOL.iter_unpack(self._read(table.offset, size, _SYMBOLS_LIMIT, "a symbol table"))
        exported, undefined = set[bytes](), set[bytes]()
        budget = _NAMES_LIMIT  # names may overlap in a damaged file, and add up to more than the table
        for start, info, other, section, _, _ in symbols:
            if info >> 4 == _STB_LOCAL or not wanted.match(names, start):
                continue
            end = names.find(b"\0", start)
            budget -= end - start
            if end < 0 or budget < 0:
                self._fail("damaged: symbol names without an end")
            if section == _SHN_UNDEF:
                if info >> 4 != _STB_WEAK:
                    undefined.add(names[start:end])
            elif other & 3 in _VISIBLE:
                exported.add(names[start:end])
        return frozenset(exported), frozenset(undefined)


def _offset(address: int, segments: list[_Segment]) -> int | None:
    """Where in the file an address lies; None: in no segment that is loaded from it."""
    for segment in segments:
        if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.size:
            return segment.offset + address - segment.address
    return None
