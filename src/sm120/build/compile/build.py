"""Configure → compile → wheel, as often as memory makes it necessary."""

import os
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors, files, process
from sm120.build.compile import driver
from sm120.build.compile.environment import (
    build_environment,
    ccache_environment,
    definitions,
    settings,
    without_what_changes_the_build,
)
from sm120.build.compile.explain import AGAIN, explain, full_disk, look_into, show
from sm120.build.compile.follow import Follow
from sm120.build.compile.jobs import Jobs, halved
from sm120.build.compile.leftovers import end_session
from sm120.build.compile.memory import Kill, Meter, oom_kills
from sm120.build.compile.output import Stage
from sm120.build.compile.result import cache_counts, keep_peak, need, read_peak, slowest_steps, whole
from sm120.build.compile.tools import lay_out
from sm120.build.toolchain import Toolchain
from sm120.console import Console
from sm120.runs import Run
from sm120.state import State

BACKEND = "scikit_build_core.build"


@dataclass(frozen=True, kw_only=True)
class Job:
    toolchain: Toolchain
    project: Path  # has pyproject.toml
    build: Path  # CMake's
    wheels: Path
    defines: Mapping[str, str]
    environment: Mapping[str, str]
    jobs: Jobs
    epoch: int
    required: tuple[str, ...]  # libraries that must be in the wheel: common_ops


@dataclass(frozen=True, kw_only=True)
class Compiled:
    wheel: Path
    seconds: float
    files: int  # steps that ninja took
    slowest: tuple[tuple[str, float], ...]  # of the whole build, whenever they were made
    peak_gb_per_thread: float | None  # None: nvcc compiled nothing, or too little to tell
    jobs: int
    ccache: tuple[int, int] | None  # hits, misses
    configure_log: Mapping[str, str]


class _TooLittleMemory(Exception):
    """The kernel killed a compiler of several."""


def compile_wheel(job: Job, run: Run, console: Console) -> Compiled:
    """Builds, or goes on with what an earlier call built. Raises BuildError, and PreflightError for disk and network.

    When the kernel kills a compiler for want of memory, half as many go on.
    """
    _check_backend(job.project)
    if job.jobs.tight:
        console.warn(f"memory may not be enough: {job.jobs.reason}")
    base, dropped = without_what_changes_the_build(os.environ)
    if dropped:
        console.warn(f"not used, since they would change the build: {', '.join(dropped)}")
    started = time.monotonic()
    attempts = [_Attempt(job, job.jobs, base, run, console)]
    while (wheel := _made(attempts[-1], console)) is None:
        attempts.append(_Attempt(job, halved(attempts[-1].jobs), base, run, console))
        console.info(f"    going on with {attempts[-1].jobs.reason}")
    last = attempts[-1]
    ccache = last.ccache_counts()
    return Compiled(
        wheel=wheel,
        seconds=time.monotonic() - started,
        files=sum(attempt.follow.steps for attempt in attempts),
        slowest=slowest_steps(job.build),
        peak_gb_per_thread=need(read_peak(job.build), threads=job.jobs.threads, ccache=ccache),
        jobs=last.jobs.jobs,
        ccache=ccache,
        configure_log=dict(last.follow.facts),
    )


def _made(attempt: "_Attempt", console: Console) -> Path | None:
    """None: the kernel killed one compiler of several for want of memory."""
    try:
        return attempt.make()
    except _TooLittleMemory as error:
        console.warn(str(error))
        return None


class _Attempt:
    def __init__(self, job: Job, jobs: Jobs, base: Mapping[str, str], run: Run, console: Console) -> None:
        self.jobs = jobs
        self._job, self._base, self._run, self._console = job, base, run, console
        self._log = run.log_path("build")
        self._cache_log = run.log_path("ccache")
        self.follow = Follow(console, jobs=jobs.jobs, site=str(job.toolchain.site), log=str(self._log))
        self._meter = Meter(self.follow.compiling)

    def make(self) -> Path:
        job = self._job
        tools = lay_out(job.build.parent / "tools", job.toolchain)
        with files.writing(job.wheels):
            job.wheels.mkdir(parents=True, exist_ok=True)
            for old in job.wheels.glob("*.whl"):
                old.unlink()
        environment = self._environment(tools)
        words = settings(job.build, definitions(job.toolchain, job.defines))
        argv = [str(job.toolchain.python), "-I", "-B", str(Path(driver.__file__)), str(tools), str(job.wheels), *words]
        begins = self._log.stat().st_size if self._log.exists() else 0
        before = oom_kills()
        with self.follow.shown():
            done = self._build(argv, environment)
            if self.follow.refusal is not None:
                raise self.follow.refusal
            if done.returncode != 0 or self.follow.wheel is None:
                raise self._error(begins, done, before)
            return whole(job.wheels / self.follow.wheel, job.required, self._log)

    def _environment(self, tools: Path) -> dict[str, str]:
        job = self._job
        environment = build_environment(
            self._base, job.toolchain, tools=tools, added=job.environment, jobs=self.jobs.jobs, epoch=job.epoch
        )
        if job.toolchain.ccache is None:
            return environment
        return environment | ccache_environment(self._base, cache=State.resolve().ccache, log=self._cache_log)

    def _build(self, argv: list[str], environment: Mapping[str, str]) -> process.Completed:
        def on_line(line: str) -> None:
            before = self.follow.stage
            self.follow.line(line)
            if self.follow.stage is Stage.COMPILE is not before and self.follow.process is not None:
                self._meter.follow(self.follow.process)  # not before: CMake's own trials are small

        try:
            with files.writing(self._log):
                done = process.run(
                    argv,
                    cwd=self._job.project,
                    env=environment,
                    log=self._log,
                    stream=self._console.verbose,
                    on_line=on_line,
                )
        except KeyboardInterrupt:
            raise errors.Interrupted("interrupted while building", where=str(self._job.build), remedy=AGAIN) from None
        finally:
            self._meter.stop()
            if self.follow.process is not None:
                end_session(self.follow.process)
            keep_peak(self._job.build, self._meter.device_peak)
        self._run.record_command(done, env=environment, cwd=self._job.project)
        return done

    def _error(self, begins: int, done: process.Completed, before: int | None) -> Exception:
        failure, kill = look_into(self._log, begins, done, before=before, after=oom_kills())
        if kill is Kill.MEMORY and self.jobs.jobs > 1:
            return _TooLittleMemory(f"{failure.file or 'the build'}: {kill}")
        show(failure, self._console)
        return explain(
            failure,
            kill,
            jobs=self.jobs.jobs,
            held=self._meter.peaks.get(failure.file or ""),
            log=str(self._log),
            full=full_disk(self._job.build, Path(tempfile.gettempdir())),
        )

    def ccache_counts(self) -> tuple[int, int] | None:
        if self._job.toolchain.ccache is None:
            return None
        try:
            return cache_counts(self._cache_log.read_text("utf-8", "replace").splitlines())
        except OSError:  # ccache older than 4.3 keeps none
            return None


def _check_backend(project: Path) -> None:
    path = project / "pyproject.toml"
    try:
        table = tomllib.loads(files.read_text(path)).get("build-system", {})
    except tomllib.TOMLDecodeError as error:
        raise errors.BuildError(f"{path} is no TOML: {error}", where=str(path)) from error
    backend = table.get("build-backend") if isinstance(table, dict) else None
    if backend != BACKEND or "backend-path" in table:
        own = " from a folder of its own" if isinstance(table, dict) and "backend-path" in table else ""
        raise errors.BuildError(
            f"the project asks for the build backend {backend or 'setuptools (it names none)'}{own}; "
            f"kernels are built by {BACKEND} alone",
            where=str(path),
            remedy="give a source that says so, as SGLang's does: --source DIR, or another stack",
        )
