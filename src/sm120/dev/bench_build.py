"""``dev.bench build``: what compiling for SM120 alone saves, and what ccache does.

One file (bench_build.cu), by the CPU stack's nvcc, in alternation: for sm_120a, for the architectures that SGLang's own
build compiles with CUDA 13, and the same with as many nvcc threads as that build starts. Then for sm_120a by way of
ccache: with an empty cache, and again. Times are of this machine, at this moment; what carries over is their ratio.
"""

import os
import re
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from sm120 import errors
from sm120.console import Console, size
from sm120.process import run
from sm120.stack import ensure_environment, load_stack
from sm120.state import State

ROUNDS = 3
ALONE = ("120a",)
UPSTREAM = ("80", "89", "90", "90a", "100a", "103a", "120a")
SUMMARY = "one file for sm_120a alone against SGLang's own architectures, and by way of ccache, cold and warm"
SOURCE = Path(__file__).with_suffix(".cu")
_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr", "--compress-mode=size")
_BASE, _COLD = "sm_120a alone", "sm_120a by ccache, nothing kept"
_LOOK = 0.02  # seconds between looks at the compilers' memory


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compile: ``prepare`` is not timed."""

    name: str
    against: str | None  # the way that its numbers are divided by
    architectures: tuple[str, ...] = ALONE
    threads: int = 1  # of nvcc
    cached: bool = False
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Sample:
    seconds: float
    peak: int  # bytes of all compilers together
    size: int  # bytes of the object file


def build(console: Console) -> dict[str, object]:
    """Measures and prints. BuildError when a compilation fails or did not do what is measured."""
    environment = ensure_environment(load_stack("cpu"), State.resolve(), console)
    ccache = shutil.which("ccache")
    if ccache is None:
        console.info("ccache is not installed: what it saves is not measured")
    with tempfile.TemporaryDirectory(prefix="sm120-bench-") as name:
        bench = Bench(Path(name), environment.variables, ccache)
        samples: dict[str, list[Sample]] = {way.name: [] for way in bench.ways}
        for number in range(1, ROUNDS + 1):
            for way in bench.ways:
                with console.step(f"round {number} of {ROUNDS}: {way.name}"):
                    way.prepare()
                    samples[way.name].append(bench.compile(way))
    return _show(bench.ways, samples, console)


class Bench:
    """``variables``: what the stack's processes get beside our own environment."""

    def __init__(self, folder: Path, variables: Mapping[str, str], ccache: str | None) -> None:
        self._object = folder / "bench_build.o"
        self._cache = folder / "ccache"
        self._ccache = ccache
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("CCACHE_", "NVCC_"))},
            **variables,
            "CCACHE_DIR": str(self._cache),
            "CCACHE_CONFIGPATH": str(folder / "ccache.conf"),  # not the user's, who may have turned it off
        }

    @property
    def ways(self) -> tuple[Way, ...]:
        ways = (
            Way(name=_BASE, against=None),
            Way(name="SGLang's architectures", against=_BASE, architectures=UPSTREAM),
            Way(name="the same, nvcc --threads=32", against=_BASE, architectures=UPSTREAM, threads=32),
        )
        if self._ccache is None:
            return ways
        cold = Way(name=_COLD, against=_BASE, cached=True, prepare=self._forget)
        return (*ways, cold, Way(name="sm_120a by ccache, again", against=_COLD, cached=True))

    def compile(self, way: Way) -> Sample:
        self._object.unlink(missing_ok=True)
        hits = self._hits() if way.cached else 0
        with peak_memory() as peak:
            seconds = self._run(self.argv(way))
        if way.cached and (self._hits() > hits) != (way.against == _COLD):
            raise errors.BuildError("ccache did not do what is measured: a hit with an empty cache, or none afterwards")
        listed = self._output("cuobjdump", "--list-elf", str(self._object))
        found = set(re.findall(r"\.sm_(\w+)\.cubin", listed))
        if found != set(way.architectures):
            raise errors.BuildError(f"the object file is for {sorted(found)}, not for {sorted(way.architectures)}")
        return Sample(seconds, peak(), self._object.stat().st_size)

    def argv(self, way: Way) -> list[str]:
        gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in way.architectures]
        launcher = [self._ccache] if way.cached and self._ccache else []
        return [
            *(*launcher, "nvcc", *_FLAGS, f"--threads={way.threads}", *gencode),
            *("-c", str(SOURCE), "-o", str(self._object)),
        ]

    def _forget(self) -> None:
        shutil.rmtree(self._cache, ignore_errors=True)

    def _hits(self) -> int:
        stats = self._output(str(self._ccache), "--print-stats")
        return sum(int(n) for n in re.findall(r"^(?:direct|preprocessed)_cache_hit\s+(\d+)", stats, re.MULTILINE))

    def _run(self, argv: Sequence[str]) -> float:
        done = run(argv, env=self._env)
        if done.returncode:
            for line in done.tail[-20:]:
                Console.current().info(line)
            raise errors.BuildError(f"{argv[0]} ended with exit code {done.returncode}", where=str(SOURCE))
        return done.seconds

    def _output(self, *argv: str) -> str:
        lines: list[str] = []
        run(argv, env=self._env, on_line=lines.append)
        return "\n".join(lines)


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """The largest sum of what our descendants held at one time, in bytes; to be asked when the body is over."""
    largest = 0
    over = threading.Event()

    def look() -> None:
        nonlocal largest
        while not over.wait(_LOOK):
            largest = max(largest, sum(_held(child) for child in psutil.Process().children(recursive=True)))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield lambda: largest
    finally:
        over.set()
        watcher.join()


def _held(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has ended
        return 0


def _show(ways: Sequence[Way], samples: Mapping[str, Sequence[Sample]], console: Console) -> dict[str, object]:
    middle = {name: median(some) for name, some in samples.items()}
    rows: list[tuple[str, ...]] = []
    result: dict[str, object] = {"rounds": ROUNDS, "architectures": list(UPSTREAM)}
    for way in ways:
        own = middle[way.name]
        ratios = None if way.against is None else ratio(own, middle[way.against])
        rows.append(
            (
                way.name,
                *(f"{own.seconds:.2f} s", size(own.peak), size(own.size)),
                "" if ratios is None else " / ".join(f"{value:.3g}" for value in ratios.values()),
                way.against or "",
            )
        )
        result[way.name] = {
            "seconds": round(own.seconds, 3),
            "peak_bytes": own.peak,
            "object_bytes": own.size,
            "against": way.against,
            "ratios": ratios,
        }
    console.table(
        f"{SOURCE.name}, median of {ROUNDS} rounds side by side",
        ("way", "time", "peak memory", "object file", "ratios of the three", "against"),
        rows,
    )
    return result


def median(samples: Sequence[Sample]) -> Sample:
    return Sample(
        statistics.median(sample.seconds for sample in samples),
        round(statistics.median(sample.peak for sample in samples)),
        round(statistics.median(sample.size for sample in samples)),
    )


def ratio(own: Sample, base: Sample) -> dict[str, float]:
    return {
        "time": round(own.seconds / base.seconds, 3),
        "memory": round(own.peak / base.peak, 3),
        "size": round(own.size / base.size, 3),
    }
