from pathlib import Path

import pytest

from sm120.errors import PreflightError
from sm120.matrix.boundedlog import HEAD_BYTES, TAIL_BYTES, BoundedLog

LINE = b"0123456789abcde\n"


def test_a_short_log_is_kept_whole(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "logs" / "log", {})
    for part in (b"one\ntw", b"o\n\n", b"three without end"):
        log.write(part)
    assert log.lines() == ["one", "two", "three without end"]
    log.close()
    log.close()
    assert (tmp_path / "logs" / "log").read_bytes() == b"one\ntwo\n\nthree without end"


@pytest.mark.parametrize("size", [len(LINE) - 3, 1000, 1 << 16, 3 << 20])
def test_a_flood_is_bounded_on_disk_and_in_memory(tmp_path: Path, size: int) -> None:
    data = LINE * ((4 << 20) // len(LINE))
    log = BoundedLog(tmp_path / "log", {})
    for start in range(0, len(data), size):
        log.write(data[start : start + size])
    assert sum(map(len, log._tail)) <= TAIL_BYTES + size
    log.write(b"the end\n")
    assert log.lines()[-1] == "the end"
    log.close()
    text = (tmp_path / "log").read_bytes()
    assert text.startswith(LINE * (HEAD_BYTES // len(LINE)))
    assert text.endswith(b"the end\n")
    assert b"bytes left out; the last 64 KiB follow]" in text
    assert len(text) < HEAD_BYTES + TAIL_BYTES + 100


def test_a_secret_cut_by_two_reads_is_masked(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "log", {"MY_API_KEY": "correct horse"})
    log.write(b"the battery of the correct horse\ntoken hf_abcdefghijkl")
    log.write(b"mnopqrstuvwxyz\n")
    log.close()
    assert (tmp_path / "log").read_text() == "the battery of the ***\ntoken ***\n"


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(PreflightError):
        BoundedLog(tmp_path / "log", {})
