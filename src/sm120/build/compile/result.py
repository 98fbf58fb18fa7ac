"""What a build came to: its wheel, its slowest files, what ccache had, the memory of its compilers."""

import contextlib
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from sm120 import errors, files
from sm120.build.compile.explain import AGAIN
from sm120.build.compile.ninja import slowest

_PEAK = "sm120-peak"  # in the CMake folder: bytes of one nvcc, over all attempts at this build


def whole(wheel: Path, required: Iterable[str], log: Path) -> Path:
    """BuildError when the wheel cannot be read to its end, or lacks a library."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            damaged, names = archive.testzip(), archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise errors.BuildError(f"the wheel is damaged: {error}", where=str(wheel), remedy=AGAIN) from error
    if damaged is not None:
        raise errors.BuildError(f"the wheel is damaged at {damaged}", where=str(wheel), remedy=AGAIN)
    absent = missing(required, names)
    if absent:
        raise errors.BuildError(
            f"the build ended well, but its wheel lacks {', '.join(absent)}",
            where=str(log),
            remedy="scripts/inv build-kernels --patches shows what was left out, and why",
        )
    return wheel


def missing(required: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Those that no shared library in a wheel is called after: ``common_ops`` for ``sgl_kernel/common_ops.abi3.so``."""
    libraries = {path.name.split(".")[0] for name in names if ".so" in (path := PurePosixPath(name)).suffixes}
    return tuple(name for name in required if not {name, f"lib{name}"} & libraries)


def cache_counts(lines: Iterable[str]) -> tuple[int, int]:
    """Hits and misses from ccache's own log of this build."""
    words = [line.strip() for line in lines]
    return sum(word in {"direct_cache_hit", "preprocessed_cache_hit"} for word in words), words.count("cache_miss")


def slowest_steps(build: Path) -> tuple[tuple[str, float], ...]:
    try:
        return slowest((build / ".ninja_log").read_text("utf-8", "replace").splitlines())
    except OSError:
        return ()


def keep_peak(build: Path, peak: int) -> None:
    """A build that is gone on with must not forget what its first part needed."""
    if peak and build.exists():
        with contextlib.suppress(errors.PreflightError):
            files.write_text_atomic(build / _PEAK, str(max(peak, read_peak(build))))


def read_peak(build: Path) -> int:
    try:
        return int((build / _PEAK).read_text("utf-8"))
    except (OSError, ValueError):
        return 0


def need(peak: int, *, threads: int, ccache: tuple[int, int] | None) -> float | None:
    """Gigabytes for one nvcc thread; None when ccache had most files, so that the large ones may not have been seen."""
    hits, misses = ccache or (0, 0)
    return peak / threads / 1e9 if peak and hits <= misses else None
