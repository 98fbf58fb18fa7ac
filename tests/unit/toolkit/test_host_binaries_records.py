"""Two distributions that claim one file: by their RECORDs, with what lies on the disk."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.toolkit.host_binaries_made import digest, install

from sm120.host.binaries import clashes, records
from sm120.host.facts import Claim, Clash

COMPILER = "nvidia_cutlass_dsl/python_packages/cutlass/_mlir/_mlir_libs/_cutlass_ir.so"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "env/lib/python3.11/site-packages"
    folder.mkdir(parents=True)
    return folder


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _record(site: Path, folder: str, content: str | bytes) -> None:
    place = site / folder
    place.mkdir(exist_ok=True)
    (place / "RECORD").write_bytes(content.encode() if isinstance(content, str) else content)


def test_the_file_of_the_one_installed_last_is_on_disk(site: Path) -> None:
    install(site, "nvidia-cutlass-dsl-libs-cu13", "4.4.1", {COMPILER: b"13", "same.pth": b"p", "own13.py": b""})
    install(site, "nvidia-cutlass-dsl-libs-base", "4.4.1", {COMPILER: b"base", "same.pth": b"p", "own.py": b""})
    clash = Clash(
        path=COMPILER,
        claims=(
            Claim(distribution="nvidia-cutlass-dsl-libs-base", version="4.4.1", sha256=_hex(b"base")),
            Claim(distribution="nvidia-cutlass-dsl-libs-cu13", version="4.4.1", sha256=_hex(b"13")),
        ),
        on_disk=_hex(b"base"),
    )
    assert clashes(site) == (clash,)


def test_a_clash_that_is_gone_from_the_disk_or_is_no_file(site: Path) -> None:
    for name, data in (("a", b"1"), ("b", b"2")):
        install(site, name, "1", {"gone.so": data, "pipe.so": data, "zero.so": data})
    for name in ("gone.so", "pipe.so", "zero.so"):
        (site / name).unlink()
    os.mkfifo(site / "pipe.so")
    (site / "zero.so").symlink_to("/dev/zero")
    assert [(clash.path, clash.on_disk) for clash in clashes(site)] == [
        ("gone.so", None),
        ("pipe.so", None),
        ("zero.so", None),
    ]


def test_only_files_that_clash_are_hashed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "a", "1", {"x": b"1", "y": b"1", "z": b"1"})
    install(site, "b", "1", {"x": b"2", "y": b"1"})
    hashed: list[Path] = []
    monkeypatch.setattr(records, "_sha256", hashed.append)
    assert [clash.path for clash in clashes(site)] == ["x"]
    assert hashed == [site / "x"]


def test_byte_code_and_files_without_a_hash_do_not_clash(site: Path) -> None:
    for name, data in (("a", b"1"), ("b", b"2"), ("c", b"3")):
        lines = [
            f"pkg/__pycache__/m.cpython-311.pyc,{digest(data)},1",
            f"half,{digest(data) if name == 'a' else ''},1",
            f"other,{digest(data).replace('sha256', 'sha512')},1",
            f"short,{digest(data)[:-4]},1",
        ]
        _record(site, f"{name}-1.dist-info", "\n".join(lines))
    assert clashes(site) == ()


def test_paths_are_compared_as_places(site: Path) -> None:
    spellings = ["../../../bin/x", "pkg/../../../../bin/x", str(site.parents[2] / "bin/x"), '"../../../bin/x"']
    for index, path in enumerate(spellings):
        _record(site, f"p{index}-1.dist-info", f"{path},{digest(str(index).encode())},1\n")
    (site.parents[2] / "bin").mkdir()
    (site.parents[2] / "bin/x").write_bytes(b"2")
    (clash,) = clashes(site)
    assert clash.path == "../../../bin/x"
    assert [claim.distribution for claim in clash.claims] == ["p0", "p1", "p2", "p3"]
    assert clash.on_disk == _hex(b"2")


def test_a_record_says_nothing_of_files_outside_its_environment(site: Path) -> None:
    for name, data in (("a", b"1"), ("b", b"2")):
        paths = ["with\0zero", "../../../../outside", "/etc/passwd", "../../../../env2/x", "/"]
        _record(site, f"{name}-1.dist-info", "".join(f"{path},{digest(data)},1\n" for path in paths))
    assert clashes(site) == ()


def test_names_and_versions_come_from_the_folder(site: Path) -> None:
    _record(site, "Some.Package_x-2.14.1+cu130.dist-info", "a,,\n")
    _record(site, "~orch-2.0.dist-info", "a,,\n")  # what an interrupted pip left
    (site / "none-1.dist-info").mkdir()
    (site / "file-1.dist-info").write_text("no folder")
    assert [(record.name, record.version) for record in records.read_records(site)] == [
        ("some-package-x", "2.14.1+cu130")
    ]


def test_paths_with_commas_and_quotes(site: Path) -> None:
    _record(site, "a-1.dist-info", f'"odd, ""name"".py",{digest(b"1")},1\nplain, name.py,{digest(b"1")},1\n')
    (record,) = records.read_records(site)
    assert list(record.hashes) == ['odd, "name".py', "plain, name.py"]


def test_a_damaged_line_costs_itself_only(site: Path) -> None:
    good = f"good.py,{digest(b'1')},1\n".encode()
    bad = [b'"never closed,', b"\xff\xfe\0,x,1", b"\0", b",,,", b"one", b'"' + b"x" * 200_000 + b'"', b"a,sha256=!,1"]
    _record(site, "a-1.dist-info", b"\n".join([*bad, good]))
    _record(site, "b-1.dist-info", good.replace(b"good.py,sha256=", b"good.py,sha256=A"))
    _record(site, "c-1.dist-info", f"good.py,{digest(b'2')},1\n")
    (clash,) = clashes(site)
    assert [(claim.distribution, claim.sha256) for claim in clash.claims] == [
        ("a", _hex(b"1")),
        ("b", None),
        ("c", _hex(b"2")),
    ]


def test_a_record_too_large_or_no_file_is_passed_over(site: Path) -> None:
    line = f"x,{digest(b'1')},1\n"
    _record(site, "a-1.dist-info", line)
    os.truncate(site / "a-1.dist-info/RECORD", 2**40)  # sparse
    (site / "b-1.dist-info").mkdir()
    os.mkfifo(site / "b-1.dist-info/RECORD")
    (site / "c-1.dist-info").mkdir()
    (site / "c-1.dist-info/RECORD").symlink_to("/dev/zero")
    _record(site, "d-1.dist-info", line)
    assert [record.name for record in records.read_records(site)] == ["d"]


@settings(deadline=None)
@given(st.binary(max_size=300) | st.text('ab/.,"\n=\0~ ', max_size=300).map(str.encode))
def test_any_record_is_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    site = tmp_path_factory.getbasetemp() / "lib/python3.11/site-packages"
    site.mkdir(parents=True, exist_ok=True)
    _record(site, "a-1.dist-info", content)
    _record(site, "b-1.dist-info", f"a,{digest(b'1')},1\n")
    for clash in clashes(site):
        assert clash.path == "a"
