"""``dev.bench build`` with programs of our own in the place of nvcc, cuobjdump and ccache."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm120 import errors
from sm120.console import Console
from sm120.dev import bench, bench_build
from sm120.dev.bench_build import ALONE, UPSTREAM, Bench, Sample, Way, median, peak_memory, ratio

NVCC = """\
while [ "$1" != -o ]; do
    case $1 in -gencode=*) archs="$archs ${1##*code=}" ;; esac
    shift
done
for arch in $archs; do printf '%0100d.%s.cubin\\n' 0 "$arch"; done > "$2"
"""
CCACHE = """\
mkdir -p "$CCACHE_DIR"
case $1 in
--print-stats) echo "direct_cache_hit $(wc -l < "$CCACHE_DIR/hits" 2>/dev/null || echo 0)" ;;
*)
    "$@"
    if [ -e "$CCACHE_DIR/kept" ]; then echo hit >> "$CCACHE_DIR/hits"; fi
    touch "$CCACHE_DIR/kept" ;;
esac
"""
CUOBJDUMP = 'cat "$2"\n'

Programs = Callable[..., Path]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """A folder with the programs, some of them other than usual."""

    def make(**texts: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, text in {"nvcc": NVCC, "cuobjdump": CUOBJDUMP, "ccache": CCACHE, **texts}.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}")
            (folder / name).chmod(0o755)
        return folder

    return make


def make_bench(tmp_path: Path, folder: Path, *, ccache: bool = True) -> Bench:
    (tmp_path / "work").mkdir()
    variables = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return Bench(tmp_path / "work", variables, str(folder / "ccache") if ccache else None)


def test_what_is_compiled_each_way(tmp_path: Path, programs: Programs) -> None:
    bench = make_bench(tmp_path, programs())
    alone, upstream, threads, cold, warm = (bench.argv(way) for way in bench.ways)
    assert [word for word in alone if "gencode" in word] == ["-gencode=arch=compute_120a,code=sm_120a"]
    assert [word.rpartition("_")[2] for word in upstream if "gencode" in word] == list(UPSTREAM)
    assert set(threads) - set(upstream) == {"--threads=32"}
    assert cold == warm == [str(tmp_path / "bin" / "ccache"), *alone]
    assert str(bench_build.SOURCE) in alone


def test_the_file_that_is_compiled_is_there() -> None:
    assert "mma.sync.aligned.kind::mxf4nvf4" in bench_build.SOURCE.read_text("utf-8")


def test_without_ccache_nothing_goes_by_it(tmp_path: Path, programs: Programs) -> None:
    bench = make_bench(tmp_path, programs(), ccache=False)
    assert [way.name for way in bench.ways if way.cached or "ccache" in bench.argv(way)[0]] == []
    assert len(bench.ways) == 3


def test_the_object_of_another_architecture_is_no_measurement(tmp_path: Path, programs: Programs) -> None:
    bench = make_bench(tmp_path, programs(nvcc=NVCC.replace("$arch", "sm_90")))
    with pytest.raises(errors.BuildError, match=r"for \['90'\], not for \['120a'\]"):
        bench.compile(bench.ways[0])


@pytest.mark.parametrize(
    ("way", "ccache"),
    [
        pytest.param(-2, CCACHE.replace("[ -e", "true || [ -e"), id="hit in an empty cache"),
        pytest.param(-1, CCACHE.replace("touch", "true"), id="kept nothing"),
    ],
)
def test_a_cache_that_does_something_else_is_no_measurement(
    tmp_path: Path, programs: Programs, way: int, ccache: str
) -> None:
    bench = make_bench(tmp_path, programs(ccache=ccache))
    with pytest.raises(errors.BuildError, match="ccache did not do"):
        bench.compile(bench.ways[way])


def test_a_failure_shows_what_the_compiler_said(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = make_bench(tmp_path, programs(nvcc="echo unknown thing; exit 3\n"))
    with pytest.raises(errors.BuildError, match="nvcc ended with exit code 3"):
        bench.compile(bench.ways[0])
    assert "unknown thing" in capsys.readouterr().out


def test_another_compilers_flags_and_cache_are_left_out(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-gencode=arch=compute_75,code=sm_75")
    monkeypatch.setenv("CCACHE_DISABLE", "1")
    says = 'echo "flags=$NVCC_APPEND_FLAGS off=$CCACHE_DISABLE" >> "$CCACHE_DIR.said"\n'
    bench = make_bench(tmp_path, programs(nvcc=says + NVCC))
    bench.compile(bench.ways[0])
    assert (tmp_path / "work" / "ccache.said").read_text() == "flags= off=\n"


def test_memory_is_that_of_all_descendants_together() -> None:
    """Two at one time, and one of them a child's child."""
    hold = "import time; x = bytearray(60_000_000); time.sleep(0.6)"
    with peak_memory() as peak:
        direct = subprocess.Popen([sys.executable, "-c", hold])
        nested = subprocess.Popen(["/bin/sh", "-c", f"{sys.executable} -c '{hold}'; true"])
        direct.wait()
        nested.wait()
    assert 120_000_000 < peak() < 250_000_000
    with peak_memory() as peak:
        time.sleep(0.1)
    assert peak() == 0


def test_medians_and_ratios() -> None:
    middle = median([Sample(9.0, 100, 50), Sample(1.0, 300, 50), Sample(2.0, 200, 70)])
    assert middle == Sample(2.0, 200, 50)
    assert ratio(Sample(6.0, 100, 150), middle) == {"time": 3.0, "memory": 0.5, "size": 3.0}


@pytest.mark.parametrize("has_ccache", [True, False])
def test_the_whole_benchmark(
    tmp_path: Path,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_ccache: bool,
) -> None:
    folder = programs(nvcc=f"sleep 0.1\n{NVCC}")
    stack = SimpleNamespace(variables={"PATH": f"{folder}:{os.environ['PATH']}"})
    monkeypatch.setattr(bench_build, "ensure_environment", lambda *_: stack)
    monkeypatch.setattr(shutil, "which", lambda name: str(folder / name) if has_ccache else None)
    result = bench.BENCHMARKS["build"].run(Console.current())
    ways: dict[str, Any] = {name: value for name, value in result.items() if isinstance(value, dict)}
    upstream = ways["SGLang's architectures"]
    assert upstream["ratios"]["size"] == pytest.approx(len(UPSTREAM) / len(ALONE), rel=0.05)
    assert ways["sm_120a alone"]["ratios"] is None
    cached = [name for name in ways if "ccache" in name]
    assert len(cached) == (2 if has_ccache else 0)
    said = capsys.readouterr().out
    assert ("ccache is not installed" in said) is not has_ccache
    assert "median of 3 rounds" in said


def test_a_way_is_prepared_before_it_is_timed(tmp_path: Path, programs: Programs) -> None:
    bench = make_bench(tmp_path, programs())
    cold, warm = bench.ways[-2:]
    for _ in range(2):
        cold.prepare()
        assert isinstance(bench.compile(cold), Sample)
        assert isinstance(bench.compile(warm), Sample)
    with pytest.raises(errors.BuildError, match="ccache did not do"):
        bench.compile(cold)
    assert Way(name="x", against=None).architectures == ALONE
