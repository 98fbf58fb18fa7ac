"""The one error that a build which failed ends with."""

import tempfile
from pathlib import Path

from sm120 import errors, files
from sm120.build.compile.failures import Failure, disk_full, find_failure
from sm120.build.compile.memory import Kill, judge
from sm120.console import Console, clean, size
from sm120.process import TAIL_LINES, Completed

AGAIN = "the same command goes on with what is built"
_LENGTH = 1000  # of a compiler's message; templates have longer names
_WIDTH = 300  # of a line that is shown
_ROOM = 2**20  # bytes; with less than that free, no build gets far


def look_into(
    log: Path, begins: int, done: Completed, *, before: int | None, after: int | None
) -> tuple[Failure, Kill]:
    """The first failure in the log from byte ``begins`` on, and who killed what; the counts are ``oom_kills``."""
    with log.open("rb") as file:
        file.seek(begins)
        failure = find_failure(line.decode("utf-8", "replace") for line in file)
    killed = failure.killed or failure.silent or done.returncode < 0
    return failure, judge(killed=killed, before=before, after=after)


def show(failure: Failure, console: Console) -> None:
    """The last lines about it, unless all were shown as they came."""
    shown = [clean(line)[:_WIDTH] for line in failure.output[-TAIL_LINES:]]
    if shown and not console.verbose:
        console.info("\n".join(shown))


def full_disk(*folders: Path) -> Path | None:
    """The first of the folders in which nothing can be written for want of space.

    CMake and its helpers do not always say so: they leave a file cut short, and what reads it next complains of that.
    """
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_ROOM))
        except OSError as error:
            if error.errno in files.FULL:
                return folder
    return None


def explain(
    failure: Failure, kill: Kill, *, jobs: int, held: int | None, log: str, full: Path | None
) -> errors.ToolkitError:
    """The one error for a build that failed.

    ``held``: bytes that the file's compilers were seen to hold. ``full``: a folder of the build on a full disk.
    """
    file = failure.file or "the build"
    held_text = f" (seen with {size(held)})" if held else ""
    if kill is Kill.MEMORY:
        return errors.BuildError(
            f"{file} needs more memory than there is{held_text}: {kill}, with one job running",
            where=log,
            remedy=f"end other programs or add memory or swap; {AGAIN}",
        )
    known = failure.diagnosis()
    inside = f"{failure.file}: " if failure.file and failure.file not in failure.first else ""
    error = f"{inside}{failure.first}"[:_LENGTH]
    if full is not None:
        known = disk_full()
        return errors.PreflightError(f"{known.what} at {full}: {error}", where=log, remedy=known.cure)
    if failure.silent:
        return errors.BuildError(
            "the build ended without a word, as if somebody had killed it", where=log, remedy=AGAIN
        )
    if kill is Kill.PERHAPS:
        return errors.BuildError(
            f"{file}: a compiler was killed{held_text}; {kill}",
            where=log,
            remedy=f"run fewer at a time: --jobs {max(1, jobs // 2)}; {AGAIN}",
        )
    if kill is Kill.SOMEBODY:
        return errors.BuildError(f"{file}: {kill} (its counter did not rise)", where=log, remedy=AGAIN)
    if known is None:
        return errors.BuildError(error, where=log, remedy=f"read the log from its first error on; {AGAIN}")
    kind = errors.PreflightError if known.machine else errors.BuildError
    return kind(f"{known.what}: {error}", where=log, remedy=known.cure)
