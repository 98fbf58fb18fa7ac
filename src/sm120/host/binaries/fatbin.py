"""How GPU code lies in a library: which pieces make up one fat binary, how large each is as it is stored.

What architecture a piece is for, cuobjdump says: the suffix (a, f) is in bits that are documented nowhere. Sizes it
does not say at all, and it unpacks all the code of a library at once (5 GB of memory for libtorch_cuda), so that pieces
can be cut out as small fat binaries for it.
Layout, read from what nvcc 12 and 13 write: a header of magic, version, size of the header, size of what follows; then
pieces, each with its kind, the size of its own header and of its data, and its SM number.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors
from sm120.host.binaries import elf
from sm120.host.binaries.regular import open_regular

SECTION = ".nv_fatbin"
KINDS = {1: "ptx", 2: "cubin"}

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_PIECE = struct.Struct("<HHIQIIII")
_ALIGNMENT = 8
_BLOCK = 2**20
_LIMIT = 2**20  # pieces; SGLang's flash_ops has 1116


@dataclass(frozen=True, kw_only=True)
class Piece:
    unit: int  # which fat binary of the library it is in: one a source file
    kind: str  # cubin or ptx; other kinds are not for the driver, and left out
    number: int  # 120: of the architecture, without its suffix
    size: int  # bytes, packed where it is
    offset: int  # in the file, of its header
    length: int  # bytes, with its header


def pieces(path: Path) -> tuple[Piece, ...]:
    """Every piece in the order of the file; none where there is no GPU code. Raises BinaryError for a damaged file."""
    found = [section for section in elf.sections(path) if section.name == SECTION]
    try:
        with open_regular(path) as file:
            return tuple(piece for section in found for piece in _section(path, file.fileno(), section))
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror or error}") from error


def batches(found: Iterable[Piece], limit: int) -> Iterator[tuple[Piece, ...]]:
    """The pieces in their order, in groups of ``limit`` bytes; what is larger is a group by itself."""
    group: list[Piece] = []
    for piece in found:
        if group and sum(one.length for one in group) + piece.length > limit:
            yield tuple(group)
            group = []
        group.append(piece)
    if group:
        yield tuple(group)


def write(path: Path, found: Sequence[Piece], target: Path) -> None:
    """One fat binary of these pieces of the library at ``path``. OSError when it cannot be read or written."""
    with open_regular(path) as file, target.open("wb") as out:
        out.write(_HEADER.pack(_MAGIC, 1, _HEADER.size, sum(piece.length for piece in found)))
        for piece in found:
            file.seek(piece.offset)
            left = piece.length
            while left > 0 and (data := file.read(min(left, _BLOCK))):
                out.write(data)
                left -= len(data)


def _section(path: Path, fd: int, section: elf.Section) -> Iterator[Piece]:
    at, end, unit, count = section.offset, section.offset + section.size, 0, 0
    while at + _HEADER.size <= end:
        magic, _, header, size = _HEADER.unpack(os.pread(fd, _HEADER.size, at))
        if magic == 0:  # padding between two
            at += _ALIGNMENT
            continue
        if magic != _MAGIC or header < _HEADER.size or at + header + size > end:
            raise _damaged(path, f"damaged: no fat binary at byte {at}")
        place, stop = at + header, at + header + size
        while place + _PIECE.size <= stop:
            kind, _, own, data, _, _, _, number = _PIECE.unpack(os.pread(fd, _PIECE.size, place))
            count += 1
            if own < _PIECE.size or place + own + data > stop or count > _LIMIT:
                raise _damaged(path, f"damaged: GPU code at byte {place} that its fat binary does not hold")
            if kind in KINDS:
                yield Piece(unit=unit, kind=KINDS[kind], number=number, size=data, offset=place, length=own + data)
            place += own + data
        at, unit = stop + -stop % _ALIGNMENT, unit + 1


def _damaged(path: Path, problem: str) -> errors.BinaryError:
    return errors.BinaryError(problem, where=str(path), remedy="install the package that owns this file again")
