"""The ELF reader: what it says of good files, and that it says it in words of bad ones."""

import os
import re
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.toolkit.host_binaries_made import DEFAULT, GLOBAL, HIDDEN, LOCAL, PROTECTED, WEAK, Symbol, library

from sm120 import errors
from sm120.host.binaries import elf

ALL = re.compile(rb".")
GOOD = library(
    needed=("liba.so", "libb.so.2"), soname="libgood.so.1", runpath="$ORIGIN", exports=("f",), undefined=("g",)
)


def _write(folder: Path, data: bytes) -> Path:
    path = folder / "lib.so"
    path.write_bytes(data)
    return path


def _problem(path: Path) -> str:
    with pytest.raises(errors.BinaryError) as caught:
        elf.read(path, ALL)
    assert caught.value.where == str(path)
    return caught.value.message


def test_a_library_says_what_it_needs_and_where_it_looks(tmp_path: Path) -> None:
    data = library(
        needed=("libz.so.1", "libc.so.6"), soname="libx.so.3", rpath="/old", runpath="$ORIGIN/../lib:/usr/x:"
    )
    assert elf.read(_write(tmp_path, data)) == elf.Elf(
        machine="x86_64",
        soname="libx.so.3",
        needed=("libz.so.1", "libc.so.6"),
        search=(
            "$ORIGIN/../lib",
            "/usr/x",
        ),  # the loader ignores RPATH beside RUNPATH, and an empty folder is no folder
    )
    assert elf.read(_write(tmp_path, library(rpath="/a:/b"))).search == ("/a", "/b")
    assert elf.read(_write(tmp_path, library(machine=183))).machine == "aarch64"
    assert elf.read(_write(tmp_path, library(machine=8))).machine == "machine 8"


def test_symbols_are_those_that_the_loader_would_bind(tmp_path: Path) -> None:
    symbols = [
        Symbol(f"{kind}_{binding}_{visibility}", kind == "defined", binding, visibility)
        for kind in ("defined", "undefined")
        for binding in (GLOBAL, WEAK, LOCAL, 10)  # 10: GNU unique
        for visibility in (DEFAULT, HIDDEN, PROTECTED)
    ]
    found = elf.read(_write(tmp_path, library(symbols=symbols)), ALL)
    assert found.exported == {
        f"defined_{binding}_{visibility}".encode()
        for binding in (GLOBAL, WEAK, 10)
        for visibility in (DEFAULT, PROTECTED)
    }
    assert found.undefined == {
        f"undefined_{binding}_{visibility}".encode()
        for binding in (GLOBAL, 10)
        for visibility in (DEFAULT, HIDDEN, PROTECTED)
    }


def test_only_wanted_symbols_are_kept_and_none_without_asking(tmp_path: Path) -> None:
    path = _write(tmp_path, library(exports=("ab", "xab"), undefined=("abc", "b")))
    found = elf.read(path, re.compile(rb"ab"))
    assert [*found.exported, *found.undefined] == [b"ab", b"abc"]
    found = elf.read(path)
    assert [*found.exported, *found.undefined] == []


def test_bytes_that_are_no_text_are_escaped(tmp_path: Path) -> None:
    path = _write(tmp_path, library(needed=("libX.so",)).replace(b"libX", b"li\xffX"))
    assert elf.read(path).needed == ("li\\xffX.so",)


def _patched(offset: int, form: str, value: int) -> bytes:
    data = bytearray(GOOD)
    struct.pack_into(form, data, offset, value)
    return bytes(data)


SECTIONS = struct.unpack_from("<Q", GOOD, 40)[0]
DYNSYM, STRINGS = SECTIONS + 64, SECTIONS + 128
NAMES = struct.unpack_from("<Q", GOOD, STRINGS + 32)[0]
LOAD, DYNAMIC = 64, 64 + 56
TAGS = struct.unpack_from("<Q", GOOD, DYNAMIC + 8)[0]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"INPUT(libfoo.so.1)\n", "not an ELF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not an ELF file"),
        (b"\x7fELF\x02\x01", "truncated: it holds 6 bytes"),
        (_patched(4, "B", 1), "32-bit"),
        (_patched(5, "B", 2), "not a little-endian 64-bit library"),
        (library(kind=2), "no shared library"),
        (library(kind=1), "no shared library"),
        (_patched(54, "<H", 57), "entries of 57 bytes"),
        (_patched(58, "<H", 0), "entries of 0 bytes"),
        (_patched(56, "<H", 0xFFFF), "damaged: a segment table"),
        (_patched(60, "<H", 0xFFFF), "truncated or damaged"),
        (_patched(32, "<Q", 2**64 - 1), "truncated or damaged"),
        (_patched(40, "<Q", 2**64 - 1), "truncated or damaged"),
        (_patched(LOAD + 32, "<Q", 2**63), "truncated or damaged"),
        (_patched(DYNAMIC, "<I", 0x70000000), "without a dynamic segment"),
        (_patched(DYNAMIC + 32, "<Q", 2**40), "damaged: a dynamic segment"),
        (_patched(DYNAMIC + 8, "<Q", 2**40), "truncated or damaged"),
        (_patched(LOAD + 16, "<Q", 2**40), "outside its string table"),
        (_patched(TAGS + 8, "<Q", NAMES), "outside its string table"),
        (_patched(TAGS + 8, "<Q", 2**64 - 1), "outside its string table"),
        (_patched(DYNSYM + 32, "<Q", 2**50), "damaged: a symbol table"),
        (_patched(DYNSYM + 24, "<Q", 2**50), "truncated or damaged"),
        (_patched(DYNSYM + 40, "<I", 77), "without a section of dynamic symbols"),
        (_patched(DYNSYM + 4, "<I", 2), "without a section of dynamic symbols"),
        (_patched(STRINGS + 32, "<Q", 2**50), "damaged: a string table"),
        (_patched(STRINGS + 32, "<Q", NAMES - 1), "symbol names without an end"),
    ],
)
def test_a_bad_file_gets_words(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in _problem(_write(tmp_path, data))


def test_a_file_cut_anywhere_is_noticed(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        _problem(_write(tmp_path, GOOD[:length]))
    assert elf.read(_write(tmp_path, GOOD), ALL).exported == {b"f"}


def test_names_that_overlap_do_not_multiply(tmp_path: Path) -> None:
    name = "n" * 100_000
    data = library(symbols=[Symbol(name)] + [Symbol("")] * 3000)
    at = struct.unpack_from("<Q", data, struct.unpack_from("<Q", data, 40)[0] + 64 + 24)[0]
    rows = bytearray(data)
    start = struct.unpack_from("<I", data, at + 24)[0]
    for index in range(3000):  # each symbol's name is the same long text from another byte on
        struct.pack_into("<I", rows, at + (index + 2) * 24, start + index)
    path = _write(tmp_path, bytes(rows))
    tracemalloc.start()
    try:
        assert "symbol names without an end" in _problem(path)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_a_file_that_claims_terabytes_costs_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path, _patched(DYNSYM + 32, "<Q", 2**41))
    os.truncate(path, 2**42)  # sparse: the claim is true
    assert "damaged: a symbol table of" in _problem(path)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    pipe, loop, zero, folder = (tmp_path / name for name in ("pipe.so", "loop.so", "zero.so", "folder.so"))
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    zero.symlink_to("/dev/zero")
    folder.mkdir()
    for path in (pipe, zero, folder):
        assert _problem(path) == "cannot be read: not a regular file"
    assert "cannot be read: Too many levels of symbolic links" in _problem(loop)
    assert "cannot be read: No such file" in _problem(tmp_path / "gone.so")


def test_a_link_to_a_library_is_read(tmp_path: Path) -> None:
    (tmp_path / "link.so").symlink_to(_write(tmp_path, GOOD))
    assert elf.read(tmp_path / "link.so").soname == "libgood.so.1"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=12))
@example([(39, 255)])
def test_any_damage_is_read_or_told(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    path = _write(tmp_path_factory.getbasetemp(), bytes(data))
    try:
        found = elf.read(path, ALL)
    except errors.BinaryError as error:
        assert error.message  # noqa: PT017 - either outcome is right
    else:
        assert len(found.needed) <= 4096


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_after_the_magic_are_read_or_told(tmp_path_factory: pytest.TempPathFactory, rest: bytes) -> None:
    path = _write(tmp_path_factory.getbasetemp(), b"\x7fELF\x02\x01\x01" + rest)
    with pytest.raises(errors.BinaryError):
        elf.read(path, ALL)
