import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sm120 import errors, files


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    files.write_json_atomic(path, {"a": [1, None, "ü\ud800"]})
    assert files.read_json(path) == {"a": [1, None, "ü\ud800"]}
    assert [p.name for p in path.parent.iterdir()] == ["file.json"]


def test_a_failed_write_leaves_the_old_file_and_no_rubble(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    files.write_json_atomic(path, {"old": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json_atomic(path, {"new": float("nan")})
    with pytest.raises(TypeError):
        files.write_json_atomic(path, {"new": object()})
    assert files.read_json(path) == {"old": 1}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EROFS, "cannot write"),
        (errno.EACCES, "cannot write"),
        (errno.EIO, "cannot"),
    ],
)
def test_what_the_disk_refuses_is_a_preflight_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(errors.PreflightError, match=words) as raised:
        files.write_json_atomic(tmp_path / "file.json", {})
    assert raised.value.remedy is not None
    assert "SM120_HOME" in raised.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.PreflightError, match="cannot write"):
        files.make_folder(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        pytest.param('{"a": 1,\n "b": }', ":2:7", id="syntax"),
        pytest.param("", ":1:1", id="empty"),
        pytest.param('{"a": 1', ":1:8", id="half"),
        pytest.param('{"a": NaN}', "", id="nan"),
        pytest.param('{"a": ' + "9" * 5000 + "}", "", id="number-of-5000-digits"),
        pytest.param("[" * 200_000, "", id="nested-without-end"),
    ],
)
def test_damaged_json_names_file_and_place(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(errors.UsageError, match="not JSON") as raised:
        files.read_json(path)
    assert f"{path}{place}" in raised.value.message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(errors.UsageError, match=r"not UTF-8.*byte 7"):
        files.read_json(path)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(errors.UsageError, match="cannot read"):
        files.read_json(tmp_path / name)


HOLD = """
import sys
from pathlib import Path
from sm120 import files
with files.lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_lock_between_processes_ends_with_its_holder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "lock"
    argv = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(errors.PreflightError, match="has held"),
            files.lock(path, timeout=0.2, waiting="wait a bit"),
        ):
            pytest.fail("the lock was held")
        threading.Timer(0.3, holder.kill).start()
        with files.lock(path, waiting="wait a bit") as fd:
            assert fd > 2
    assert capsys.readouterr().out.count("wait a bit") == 2


def test_lock_is_inherited_by_a_child_that_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with files.lock(path) as fd:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(fd,))
    try:
        with pytest.raises(errors.PreflightError), files.lock(path, timeout=0.1):
            pytest.fail("the child holds the lock")
    finally:
        child.kill()
        child.wait()
    with files.lock(path, timeout=10):
        pass


def test_free_bytes_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert files.free_bytes(tmp_path / "a" / "b") > 0


def test_written_files_are_readable_by_others_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files.write_json_atomic(tmp_path / "f", json.loads("{}"))
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640
