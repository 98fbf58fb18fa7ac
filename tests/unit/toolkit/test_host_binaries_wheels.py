"""Wheel files: the name outside against the METADATA inside, and words for whatever else a file may be."""

import io
import os
import re
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120 import errors
from sm120.host.binaries import wheel_facts
from sm120.host.binaries.wheels import open_wheel
from sm120.host.facts import Wheel

NAME = "sgl_kernel-0.3.18.post2+cu130-cp310-abi3-manylinux2014_x86_64.whl"
INSIDE = "sgl_kernel-0.3.18.post2.dist-info/METADATA"
METADATA = "Metadata-Version: 2.4\nName: sgl-kernel\nVersion: 0.3.18.post2\nName: other\n\nVersion: 9 of this text\n"


def _zip(members: Mapping[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


GOOD = _zip({"sgl_kernel/__init__.py": "", INSIDE: METADATA})


def _wheel(folder: Path, data: bytes, name: str = NAME) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_name_and_metadata_are_told_apart(tmp_path: Path) -> None:
    path = _wheel(tmp_path, GOOD)
    assert wheel_facts(path) == Wheel(
        path=str(path),
        name="sgl-kernel",
        version="0.3.18.post2+cu130",
        metadata_name="sgl-kernel",
        metadata_version="0.3.18.post2",
    )


@pytest.mark.parametrize("text", [METADATA.replace("\n", "\r\n"), "name :x\nVERSION:0.3.18.post2\nname:SGL_Kernel"])
def test_metadata_is_read_as_a_header(tmp_path: Path, text: str) -> None:
    found = wheel_facts(_wheel(tmp_path, _zip({INSIDE: text}, zipfile.ZIP_STORED)))
    assert (found.metadata_name, found.metadata_version, found.problem) == ("sgl-kernel", "0.3.18.post2", None)


def test_a_file_name_that_is_none_still_has_its_inside_read(tmp_path: Path) -> None:
    found = wheel_facts(_wheel(tmp_path, GOOD, "download.whl"))
    assert (found.name, found.version, found.metadata_version) == (None, None, "0.3.18.post2")
    assert found.problem == "its file name is not that of a wheel"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no whole zip archive"),
        (b"<html>404</html>", "no whole zip archive"),
        (GOOD[:-1], "no whole zip archive"),
        (GOOD[: len(GOOD) // 2], "no whole zip archive"),
        (_zip({}), "holds no .dist-info/METADATA"),
        (_zip({"a/b.dist-info/METADATA": METADATA}), "holds no .dist-info/METADATA"),
        (_zip({INSIDE: METADATA, "b-1.dist-info/METADATA": METADATA}), "holds 2 .dist-info/METADATA"),
        (_zip({INSIDE: METADATA, "../../.bashrc": ""}), "written outside: ../../.bashrc"),
        (_zip({INSIDE: METADATA, "a/../../b": ""}), "written outside: a/../../b"),
        (_zip({INSIDE: METADATA, "/etc/x": ""}), "written outside: /etc/x"),
        (_zip({INSIDE: METADATA, "..": ""}), "written outside: .."),
        (_zip({INSIDE: METADATA}, zipfile.ZIP_LZMA), "a method that wheels do not use"),
        (_zip({INSIDE: "Version: 1\n"}), "names no package and version"),
        (_zip({INSIDE: "Version: 1\r\n\r\nName: of the text\r\n"}), "names no package and version"),
        (_zip({INSIDE: "Name: x\nVersion:  \n"}), "names no package and version"),
        (_zip({INSIDE: "\nName: x\nVersion: 1\n"}), "names no package and version"),
        (_zip({INSIDE: b"\xff\xfe\0"}), "names no package and version"),
    ],
)
def test_a_bad_wheel_gets_words(tmp_path: Path, data: bytes, words: str) -> None:
    found = wheel_facts(_wheel(tmp_path, data))
    assert words in (found.problem or "")
    assert (found.name, found.version) == ("sgl-kernel", "0.3.18.post2+cu130")
    assert (found.metadata_name, found.metadata_version) == (None, None)


def test_names_that_only_look_like_leaving_are_fine(tmp_path: Path) -> None:
    assert wheel_facts(_wheel(tmp_path, _zip({INSIDE: METADATA, "..x/y": "", "a/../b": "", "...": ""}))).problem is None


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = _wheel(tmp_path, _zip({INSIDE: bytes(2**26)}))
    tracemalloc.start()
    try:
        assert "larger than any package's" in (wheel_facts(path).problem or "")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_list_of_members_without_measure_is_not_read(tmp_path: Path) -> None:
    path = _wheel(tmp_path, b"")
    size = 2**30
    with path.open("wb") as file:
        file.truncate(size)  # sparse
        file.seek(size)
        file.write(b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 1, 1, size, 0, 0))
    assert "list of members is larger" in (wheel_facts(path).problem or "")


def test_an_encrypted_wheel_gets_words(tmp_path: Path) -> None:
    data = bytearray(_zip({INSIDE: METADATA}))
    struct.pack_into("<H", data, 6, 1)
    struct.pack_into("<H", data, data.index(b"PK\x01\x02") + 8, 1)
    assert "no whole zip archive" in (wheel_facts(_wheel(tmp_path, bytes(data))).problem or "")


def test_what_is_no_regular_file_gets_words(tmp_path: Path) -> None:
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir), ("gone", lambda path: None)):
        path = tmp_path / f"{name}-1-py3-none-any.whl"
        make(path)
        found = wheel_facts(path)
        assert (found.name, found.version) == (name, "1")
        assert "it cannot be read: " in (found.problem or "")


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_damage_is_read_or_told(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    found = wheel_facts(_wheel(tmp_path_factory.getbasetemp(), bytes(data)))
    assert (found.problem is None) == (found.metadata_version is not None)


# Wheels opened to be unpacked


def _opened(path: Path) -> list[str]:
    with open_wheel(path) as archive:
        return archive.namelist()


def test_a_wheel_is_opened(tmp_path: Path) -> None:
    assert _opened(_wheel(tmp_path, GOOD)) == ["sgl_kernel/__init__.py", INSIDE]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no whole zip archive"),
        (b"not a wheel", "no whole zip archive"),
        (GOOD[:-30], "no whole zip archive"),
        (_zip({"../evil.so": b"x"}), "written outside: ../evil.so"),
        (_zip({"/etc/evil.so": b"x"}), "written outside: /etc/evil.so"),
        (_zip({"a/../../evil.so": b"x"}), "written outside"),
        (_zip({"a.so": b"x"}, zipfile.ZIP_LZMA), "packed as wheels do not: a.so"),
    ],
)
def test_what_is_no_sound_wheel_is_refused_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(errors.BinaryError, match=re.escape(words)) as raised:
        _opened(_wheel(tmp_path, data))
    assert raised.value.where == str(tmp_path / NAME)
    assert raised.value.remedy is not None


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    data = bytearray(_zip({"a.so": b"x"}))
    data[data.rindex(b"PK\x01\x02") + 8] |= 1  # the flag in the list of members
    with pytest.raises(errors.BinaryError, match="packed as wheels do not"):
        _opened(_wheel(tmp_path, bytes(data)))


def test_a_wheel_that_is_not_there_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(errors.BinaryError, match="cannot be read"):
        _opened(tmp_path / NAME)


def test_a_failure_of_the_caller_is_not_taken_for_one_of_the_wheel(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), open_wheel(_wheel(tmp_path, GOOD)):
        raise ValueError("mine")
