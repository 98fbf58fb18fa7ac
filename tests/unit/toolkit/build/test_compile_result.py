"""What is asked of a wheel, and what ccache says."""

import zipfile
from pathlib import Path

import pytest

from sm120 import errors
from sm120.build.compile.result import cache_counts, keep_peak, missing, need, read_peak, slowest_steps, whole


@pytest.mark.parametrize(
    ("required", "names", "absent"),
    [
        (("common_ops",), ["sgl_kernel/common_ops.abi3.so"], ()),
        (("common_ops",), ["sgl_kernel/sm100/common_ops.cpython-312-x86_64-linux-gnu.so"], ()),
        (("nccl",), ["lib/libnccl.so.2"], ()),
        (("common_ops",), ["sgl_kernel/common_ops.py", "common_ops/x.so"], ("common_ops",)),
        (("ops", "flash"), ["a/common_ops.abi3.so"], ("ops", "flash")),
        ((), [], ()),
    ],
)
def test_libraries_that_are_missing(required: tuple[str, ...], names: list[str], absent: tuple[str, ...]) -> None:
    assert missing(required, names) == absent


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/ops.abi3.so", "code" * 1000)
    return path


def test_a_whole_wheel_is_returned(wheel: Path) -> None:
    assert whole(wheel, ("ops",), Path("log")) == wheel


def test_a_wheel_without_a_required_library_is_refused(wheel: Path) -> None:
    with pytest.raises(errors.BuildError, match="lacks flash_ops") as caught:
        whole(wheel, ("ops", "flash_ops"), Path("/run/build.log"))
    assert caught.value.where == "/run/build.log"


def test_a_cut_wheel_is_refused(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:2000])
    with pytest.raises(errors.BuildError, match="damaged"):
        whole(wheel, (), Path("log"))


def test_a_wheel_with_a_flipped_byte_is_refused(wheel: Path) -> None:
    data = bytearray(wheel.read_bytes())
    data[500] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(errors.BuildError, match="damaged at a/ops"):
        whole(wheel, (), Path("log"))


def test_a_wheel_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.BuildError, match="damaged"):
        whole(tmp_path / "no.whl", (), Path("log"))


def test_counts_of_ccache() -> None:
    log = """# a.cc
cache_miss
direct_cache_miss
local_storage_miss
preprocessed_cache_miss
# a.cc
direct_cache_hit
local_storage_hit
# b.cc
direct_cache_miss
preprocessed_cache_hit
# cache_miss_in_a_name.cc
called_for_link
"""
    assert cache_counts(log.splitlines()) == (2, 1)


def test_the_largest_peak_of_all_attempts_is_kept(tmp_path: Path) -> None:
    assert read_peak(tmp_path) == 0
    keep_peak(tmp_path, 700)
    keep_peak(tmp_path, 30)
    keep_peak(tmp_path, 0)
    assert read_peak(tmp_path) == 700
    keep_peak(tmp_path / "not there", 5)
    (tmp_path / "sm120-peak").write_text("?")
    assert read_peak(tmp_path) == 0


def test_no_log_no_slowest(tmp_path: Path) -> None:
    assert slowest_steps(tmp_path) == ()


@pytest.mark.parametrize(
    ("peak", "threads", "ccache", "gigabytes"),
    [
        (3_000_000_000, 1, None, 3.0),
        (3_000_000_000, 2, (0, 70), 1.5),
        (3_000_000_000, 1, (0, 0), 3.0),  # gone on with: what was compiled before counts
        (80_000_000, 1, (69, 1), None),
        (0, 1, None, None),
    ],
)
def test_need_of_one_thread(peak: int, threads: int, ccache: tuple[int, int] | None, gigabytes: float | None) -> None:
    assert need(peak, threads=threads, ccache=ccache) == gigabytes
