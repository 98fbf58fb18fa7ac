"""The layout of GPU code, made byte by byte; what nvcc makes is in the integration tests."""

import contextlib
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sm120 import errors
from sm120.host.binaries import elf, loader
from sm120.host.binaries.elf import Section
from sm120.host.binaries.fatbin import Piece, batches, pieces
from sm120.host.binaries.fatbin import write as cut_out

PTX, CUBIN, OTHER = 1, 2, 8


def piece(kind: int, number: int, size: int, header: int = 64) -> bytes:
    head = struct.pack("<HHIQIIII", kind, 0x101, header, size, 0, 0, 0, number)
    return head.ljust(header, b"\0") + b"x" * size


def fatbin(*held: bytes) -> bytes:
    body = b"".join(held)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(content: bytes, name: str = ".nv_fatbin", *, no_names: bool = False) -> bytes:
    """An ELF file with this section and one for the names."""
    names = b"\0" + name.encode() + b"\0.names\0"
    table = 64 + len(content) + len(names)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 0, table, 0, 64, 56, 0, 64, 3, 9 if no_names else 2,
    )  # fmt: skip
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 1, 1, 2, 0, 64, len(content), 0, 0, 8, 0)
    sections += struct.pack("<IIQQQQIIQQ", len(name) + 2, 3, 0, 0, 64 + len(content), len(names), 0, 0, 1, 0)
    return header + content + names + sections


def write(folder: Path, data: bytes) -> Path:
    path = folder / "x.so"
    path.write_bytes(data)
    return path


def test_pieces_by_fat_binary(tmp_path: Path) -> None:
    content = fatbin(piece(CUBIN, 80, 16), piece(PTX, 80, 8), piece(CUBIN, 120, 24, header=96)) + bytes(8)
    content += fatbin() + fatbin(piece(OTHER, 90, 8), piece(CUBIN, 120, 40))
    assert pieces(write(tmp_path, library(content))) == (
        Piece(unit=0, kind="cubin", number=80, size=16, offset=80, length=80),
        Piece(unit=0, kind="ptx", number=80, size=8, offset=160, length=72),
        Piece(unit=0, kind="cubin", number=120, size=24, offset=232, length=120),
        Piece(unit=2, kind="cubin", number=120, size=40, offset=464, length=104),
    )


def test_pieces_are_cut_out_as_small_fat_binaries(tmp_path: Path) -> None:
    held = (piece(CUBIN, 80, 16), piece(CUBIN, 120, 200), piece(PTX, 120, 8), piece(CUBIN, 90, 8))
    path = write(tmp_path, library(fatbin(*held[:2]) + fatbin(*held[2:])))
    groups = list(batches(pieces(path), 150))
    assert [[one.number for one in group] for group in groups] == [[80], [120], [120, 90]]
    for number, expected in enumerate((fatbin(held[0]), fatbin(held[1]), fatbin(*held[2:]))):
        cut_out(path, groups[number], tmp_path / "part")
        assert (tmp_path / "part").read_bytes() == expected


def test_another_section_is_not_looked_into(tmp_path: Path) -> None:
    assert pieces(write(tmp_path, library(fatbin(piece(CUBIN, 80, 16)), "__nv_relfatbin"))) == ()


def test_sections_have_names_and_places(tmp_path: Path) -> None:
    path = write(tmp_path, library(b"12345678", ".rodata"))
    assert elf.sections(path) == (
        Section(name=".rodata", offset=64, size=8),
        Section(name=".names", offset=72, size=16),
    )


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        fatbin(piece(CUBIN, 80, 16))[:-8],
        fatbin(piece(CUBIN, 80, 16)[:-8]),
        fatbin(struct.pack("<HHIQIIII", 2, 1, 64, 2**60, 0, 0, 0, 80)),
        fatbin(struct.pack("<HHIQIIII", 2, 1, 0, 0, 0, 0, 0, 80)),
    ],
)
def test_damage_is_said_in_words(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(errors.BinaryError, match="damaged"):
        pieces(write(tmp_path, library(content)))


def test_sections_without_names_are_damage(tmp_path: Path) -> None:
    with pytest.raises(errors.BinaryError, match="sections without names"):
        elf.sections(write(tmp_path, library(b"", no_names=True)))


def test_a_file_that_is_cut_short_or_none(tmp_path: Path) -> None:
    whole = library(fatbin(piece(CUBIN, 80, 16)))
    for data in (b"", b"text", whole[:100], whole[:-1]):
        with pytest.raises(errors.BinaryError):
            pieces(write(tmp_path, data))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_damage_ends_in_words_or_pieces(tmp_path: Path, changes: Sequence[tuple[int, int]]) -> None:
    data = bytearray(library(fatbin(piece(CUBIN, 80, 16), piece(PTX, 80, 8)) + fatbin(piece(CUBIN, 120, 24))))
    for place, value in changes:
        data[place % len(data)] = value
    with contextlib.suppress(errors.BinaryError):
        assert all(one.size <= len(data) for one in pieces(write(tmp_path, bytes(data))))


@pytest.mark.parametrize(
    ("name", "major"),
    [
        ("libcudart.so.12", 12),
        ("libcudart-9c7b9a1d2e.so.13", 13),
        ("libcublasLt.so.13", 13),
        ("libnvrtc.so.12", 12),
        ("libcusparse.so.12", None),
        ("libcudart.so", None),
        ("libcuda.so.1", None),
        ("libc10.so", None),
    ],
)
def test_the_cuda_that_a_name_belongs_to(name: str, major: int | None) -> None:
    assert loader.cuda_major(name) == major
