"""What the record of an environment says of kernels that were built, and what a wheel's own RECORD says."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.toolkit.build.wheels_made import digest, record, write_wheel

from sm120 import errors
from sm120.stack.install.contents import contents
from sm120.stack.install.record import expected, fingerprint

LOCKED = [
    {"name": "torch", "version": "2.13.0", "sha256": "0" * 64},
    {"name": "sglang-kernel", "version": "0.4.4", "sha256": "1" * 64},
]
FIRST = {"name": "sglang-kernel", "version": "0.4.4+sm120.a", "sha256": "2" * 64, "wheel": "a.whl"}
SECOND = {"name": "sgl-kernel", "version": "0.3.21+sm120.b", "sha256": "3" * 64, "wheel": "b.whl"}


@pytest.mark.parametrize(
    ("built", "kernels"),
    [
        (None, {"sglang-kernel": "0.4.4"}),
        ([], {"sglang-kernel": "0.4.4"}),
        ([FIRST], {"sglang-kernel": "0.4.4+sm120.a"}),
        ([FIRST, SECOND], {"sgl-kernel": "0.3.21+sm120.b"}),
        ([SECOND, FIRST], {"sglang-kernel": "0.4.4+sm120.a"}),
    ],
)
def test_what_ought_to_be_installed(built: list[Any] | None, kernels: dict[str, str]) -> None:
    content = {"distributions": LOCKED} | ({} if built is None else {"built": built})
    assert expected(content) == {"torch": "2.13.0", **kernels}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "version", "x"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["distributions", "built", "other"]), JSON))
def test_of_a_record_with_anything_in_it(content: dict[str, Any]) -> None:
    assert all(isinstance(text, str) for pair in expected(content).items() for text in pair)


def test_what_is_built_changes_the_fingerprint_and_going_back_restores_it() -> None:
    chains: list[list[Any]] = [
        [FIRST],
        [SECOND],
        [{**FIRST, "sha256": "4" * 64}],
        [{**FIRST, "version": "0.4.4+other"}],
    ]
    locked = fingerprint({"fingerprint": "f" * 64})
    found = [fingerprint({"fingerprint": "f" * 64, "built": chain}) for chain in chains]
    assert locked == fingerprint({"fingerprint": "f" * 64, "built": []}) == "f" * 64
    assert len({locked, *found}) == 5
    assert fingerprint({"fingerprint": "e" * 64, "built": [FIRST]}) != found[0]
    assert fingerprint({"fingerprint": "f" * 64, "built": [SECOND, FIRST]}) == found[0]


def test_what_a_wheel_installs(tmp_path: Path) -> None:
    text = "a = 1\n"
    wheel = write_wheel(tmp_path, record(), {"sgl_kernel/a.py": text, "x-1.data/scripts/tool": "", "b, c.py": ""})
    found = contents(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert {*found.hashes, f"{found.info}/RECORD"} == {*archive.namelist()}
        assert found.unpacked == sum(info.file_size for info in archive.infolist())
    assert "x-1.data/scripts/tool" not in found.installed
    assert found.installed["sgl_kernel/a.py"] is not None
    assert len(found.installed["sgl_kernel/a.py"]) == 64


@pytest.mark.parametrize(
    "lines", [{"../out.py": digest("")}, {"/etc/out.py": digest("")}, {"a/../../out.py": digest("")}], ids=str
)
def test_a_wheel_that_leaves_its_folder_is_refused(tmp_path: Path, lines: dict[str, str]) -> None:
    wheel = write_wheel(tmp_path, record(), dict.fromkeys(lines, ""))
    with pytest.raises(errors.BinaryError, match="a line of its RECORD"):
        contents(wheel)


def test_no_wheel_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    for data in (b"", b"PK\x03\x04", b"no zip at all" * 100):
        path.write_bytes(data)
        with pytest.raises(errors.BinaryError, match="not a whole wheel"):
            contents(path)
    path.unlink()
    with pytest.raises(errors.BinaryError, match="not a whole wheel"):
        contents(path)
