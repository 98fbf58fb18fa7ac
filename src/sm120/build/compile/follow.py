"""A build as the user sees it: stages as steps, ninja's count as progress.

And a look at every line for what must not be, so that hours are not spent on it.
"""

import contextlib
import threading
from collections.abc import Iterator

from sm120 import errors
from sm120.build.compile.failures import left_out
from sm120.build.compile.ninja import counted, jobs_of, output_of, readable
from sm120.build.compile.output import Stage, fact, marked, plain, stage_of
from sm120.console import Console, Progress

_TITLES = {
    Stage.START: "starting the build",
    Stage.CONFIGURE: "configuring",
    Stage.COMPILE: "compiling",
    Stage.INSTALL: "collecting what was compiled",
    Stage.WHEEL: "making the wheel",
}


class Follow:
    """``line`` takes the output as it comes, and ends the build early by raising BuildError."""

    def __init__(self, console: Console, *, jobs: int, site: str, log: str) -> None:
        self.stage = Stage.START
        self.steps = 0  # of ninja's
        self.facts: dict[str, str] = {}
        self.process: int | None = None
        self.wheel: str | None = None
        self.refusal: errors.BuildError | None = None
        self._refused_already = False
        self._console = console
        self._jobs = jobs
        self._site = site
        self._log = log
        self._step = contextlib.ExitStack()
        self._lock = threading.Lock()  # progress is told of from two threads
        self._progress: Progress | None = None
        self._done = self._total = 0

    @contextlib.contextmanager
    def shown(self) -> Iterator["Follow"]:
        """The step of the stage fails with the body."""
        with contextlib.ExitStack() as outer:
            outer.push(self._leave)
            self._enter(Stage.START)
            yield self

    def line(self, raw: str) -> None:
        if self._refused_already:  # what is in the pipe still goes to the log
            return
        if self.refusal is not None:  # raised now, when the line that it is about is in the log
            self._refused_already = True
            raise self.refusal
        line = plain(raw)
        stage, own = stage_of(line), marked(line)
        if stage is not None:
            self._leave(None, None, None)
            self._enter(stage)
        elif own is not None:
            self._own(*own)
        elif self.stage is Stage.COMPILE and (number := jobs_of(line)) is not None:
            self._check_jobs(number)
        elif self.stage is Stage.COMPILE and counted(line) is not None:
            self._count(line)
        elif (self.stage is Stage.CONFIGURE or line.startswith("-- ")) and left_out(line):
            self.refusal = self._refused(
                f"a kernel is left out of the build: {line.strip()}",
                "ask for an architecture that it exists for (--arch), or take another commit of the source",
            )
        elif self.stage is Stage.CONFIGURE and (found := fact(line)) is not None:
            self._fact(*found)

    def compiling(self, names: tuple[str, ...]) -> None:
        """From the thread that looks at the processes."""
        with self._lock:
            if self._progress is not None and names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                self._progress.advance(0, f"{names[0]}{more}")

    def _own(self, what: str, text: str) -> None:
        if what == "process":
            self.process = int(text)
        elif what == "wheel":
            self.wheel = text

    def _check_jobs(self, number: int) -> None:
        if number != self._jobs:
            self.refusal = self._refused(
                f"ninja runs {number} jobs at a time and not {self._jobs}: something in the project overrides it",
                "look for build.tool-args or CMAKE_BUILD_PARALLEL_LEVEL in its pyproject.toml",
            )

    def _fact(self, name: str, value: str) -> None:
        self.facts[name] = value
        if name == "torch" and not value.startswith(f"{self._site}/"):
            self.refusal = self._refused(
                f"CMake found another torch than the stack's: {value}",
                "unset Torch_DIR and CMAKE_PREFIX_PATH, and look for a torch in the source's own build files",
            )

    def _refused(self, message: str, remedy: str) -> errors.BuildError:
        return errors.BuildError(message, where=self._log, remedy=remedy)

    def _count(self, line: str) -> None:
        now = counted(line)
        if now is None:
            return
        with self._lock:
            if self._progress is None:
                self._progress = self._step.enter_context(self._console.progress(now.total, "compiling"))
                self._done, self._total = 0, now.total
            if now.total != self._total:  # CMake looked at its lists of files first, or ninja read its plan again
                self._progress.expect(now.total - self._total)
            output = output_of(now.what)
            self._progress.advance(now.done - self._done, readable(output) if output else None)
            self.steps += max(0, now.done - self._done)
            self._done, self._total = now.done, now.total

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self._step.enter_context(self._console.step(_TITLES[stage]))

    def _leave(self, kind: object, error: object, trace: object) -> None:
        with self._lock:
            self._progress = None
        self._step.__exit__(kind, error, trace)  # type: ignore[arg-type] # as it was handed over
