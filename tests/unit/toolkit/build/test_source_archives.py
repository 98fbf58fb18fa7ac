import gzip
import io
import tarfile
import time
from pathlib import Path

import pytest

from sm120 import errors
from sm120.build.source import archives
from sm120.build.source.archives import unpack


def _archive(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload] # the mode is a parameter
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size, info.mode = len(member[1]), 0o755 if member[0].endswith(".sh") else 0o644
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def _link(name: str, target: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return info


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_the_one_folder_on_top_is_taken_off(tmp_path: Path, mode: str) -> None:
    path = _archive(tmp_path / "a", ("n-1/x", b"1"), ("n-1/b/run.sh", b"2"), _link("n-1/l", "x"), mode=mode)
    root = unpack(path, tmp_path / "out")
    assert root == tmp_path / "out" / "n-1"
    assert (root / "l").read_bytes() == b"1"
    assert (root / "b" / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (root / "x").stat().st_mtime > time.time() - 3600  # the archive says 1970


def test_two_things_on_top_stay_as_they_are(tmp_path: Path) -> None:
    assert unpack(_archive(tmp_path / "a", ("n/x", b"1"), ("y", b"2")), tmp_path / "out") == tmp_path / "out"
    assert unpack(_archive(tmp_path / "b", ("y", b"2")), tmp_path / "one") == tmp_path / "one"


@pytest.mark.parametrize(
    "member",
    [
        ("../outside", b"1"),
        _link("n/l", "/etc/passwd"),
        _link("n/l", "../../outside"),
    ],
)
def test_nothing_leaves_the_folder(tmp_path: Path, member: tuple[str, bytes] | tarfile.TarInfo) -> None:
    with pytest.raises(errors.BinaryError, match="cannot be unpacked"):
        unpack(_archive(tmp_path / "a", member), tmp_path / "deep" / "out")
    assert not (tmp_path / "deep" / "outside").exists()


def test_a_file_through_a_link_does_not_leave(tmp_path: Path) -> None:
    path = _archive(tmp_path / "a", _link("n", ".."), ("n/outside", b"1"))
    with pytest.raises(errors.BinaryError):
        unpack(path, tmp_path / "deep" / "out")
    assert not (tmp_path / "deep" / "outside").exists()


def test_a_damaged_or_cut_archive(tmp_path: Path) -> None:
    path = _archive(tmp_path / "a", ("n/x", bytes(range(256)) * 400))
    whole = path.read_bytes()
    damaged = whole[:200] + b"\xff" * 100 + whole[300:]
    for number, data in enumerate((whole[:300], damaged, b"no archive", gzip.compress(b"x" * 600), b"")):
        path.write_bytes(data)
        with pytest.raises(errors.BinaryError, match="cannot be unpacked"):
            unpack(path, tmp_path / f"out{number}")


def test_too_many_or_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _archive(tmp_path / "a", ("n/x", b"1"), ("n/y", b"22"))
    monkeypatch.setattr(archives, "LARGEST", 2)
    with pytest.raises(errors.BinaryError, match="it holds more"):
        unpack(path, tmp_path / "one")
    monkeypatch.setattr(archives, "LARGEST", 100)
    monkeypatch.setattr(archives, "MOST", 1)
    with pytest.raises(errors.BinaryError, match="it holds more"):
        unpack(path, tmp_path / "two")
