"""Benchmarks of the toolkit itself, by name. Add one to ``BENCHMARKS``."""

from collections.abc import Callable
from dataclasses import dataclass

from sm120 import errors
from sm120.console import Console
from sm120.dev import bench_build, bench_matrix, bench_setup


@dataclass(frozen=True)
class Benchmark:
    summary: str
    run: Callable[[Console], dict[str, object]]  # prints its table, returns what --json prints


@dataclass(frozen=True, kw_only=True)
class Options:
    name: str = ""


BENCHMARKS: dict[str, Benchmark] = {
    "build": Benchmark(bench_build.SUMMARY, bench_build.build),
    "matrix": Benchmark(bench_matrix.SUMMARY, bench_matrix.matrix),
    "setup": Benchmark(bench_setup.SUMMARY, bench_setup.setup),
}


def bench(options: Options) -> None:
    console = Console.current()
    if options.name not in BENCHMARKS:
        raise errors.UsageError(
            f"no benchmark is named {options.name!r}; {errors.nearest(options.name, sorted(BENCHMARKS))}"
        )
    console.info(BENCHMARKS[options.name].summary)
    console.result({"schema": 1, options.name: BENCHMARKS[options.name].run(console)})
