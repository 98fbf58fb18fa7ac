"""Children: run with their output kept, stopped as a whole group, and never left behind."""

import collections
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from sm120 import errors, files, redact
from sm120.console import Console, clean

TAIL_LINES = 40
LOG_LIMIT = 256 * 2**20  # bytes kept of one child's output; a flood must not fill the disk
_LINE_LIMIT = 8192  # bytes; a longer line is cut in pieces
_POLL = 0.1  # seconds between looks at a child whose pipe is silent


@dataclass(frozen=True)
class Completed:
    argv: tuple[str, ...]
    returncode: int  # negative: ended by that signal
    seconds: float
    tail: tuple[str, ...]  # the last lines of its output, stdout and stderr together, without secrets
    timed_out: bool = False


def run(
    argv: Sequence[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    log: Path | None = None,
    stream: bool = False,
    on_line: Callable[[str], None] | None = None,
    grace: float = 5.0,
    pass_fds: Sequence[int] = (),
) -> Completed:
    """Runs a command to its end and keeps its output.

    The child gets a session of its own, no standard input, and the whole environment ``env`` (None: ours). When it
    ends, whatever it left running in its group is killed. After ``timeout`` seconds, or when we are interrupted, the
    group is stopped (interrupt, terminate, kill). ``stream`` shows the lines as they come. A program that
    cannot be started is a PreflightError.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        sink = _Sink(_open_log(stack, log), redact.redactor(env or {}), stream=stream, on_line=on_line)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        proc = spawn(argv, cwd=cwd, env=env, pass_fds=pass_fds, **pipes)
        try:
            timed_out = not _pump(proc, sink, None if timeout is None else started + timeout)
        finally:
            terminate(proc, grace)
            if proc.stdout is not None:
                _drain(proc.stdout.fileno(), sink)
                proc.stdout.close()
            sink.close()
        return Completed(tuple(argv), proc.returncode, time.monotonic() - started, tuple(sink.tail), timed_out)


def spawn(argv: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """``subprocess.Popen`` in a session of its own, so that ``terminate`` can stop all that it starts."""
    try:
        return subprocess.Popen(list(argv), start_new_session=True, **options)
    except (OSError, ValueError) as error:
        raise errors.PreflightError(
            f"cannot start {argv[0]}: {getattr(error, 'strerror', None) or error}",
            remedy="check that the program is installed and on PATH",
        ) from error


def terminate(proc: "subprocess.Popen[bytes]", grace: float = 5.0) -> int:
    """Stops a child and all it started: interrupt, terminate, kill, ``grace`` seconds apart. Returns its exit code.

    A child that has ended already only loses the processes it left behind. Descendants that went into a session of
    their own are killed as well.
    """
    family = _descendants(proc.pid) if not _ended(proc) else []
    try:
        for sign in (signal.SIGINT, signal.SIGTERM):
            if _ended(proc):
                break
            _signal(proc, sign)
            _wait_end(proc, grace)
    finally:  # a second ^C ends the patience, not the killing
        # The leader is not reaped yet, so its process group's number cannot have passed to somebody else.
        _signal(proc, signal.SIGKILL)
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
        proc.wait()
    return proc.returncode


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _ended(proc: "subprocess.Popen[bytes]") -> bool:
    """Whether the child has ended, without reaping it."""
    if proc.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, proc.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _wait_end(proc: "subprocess.Popen[bytes]", seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not _ended(proc) and time.monotonic() < deadline:
        time.sleep(0.02)


def _signal(proc: "subprocess.Popen[bytes]", sign: signal.Signals) -> None:
    if proc.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(proc.pid) == proc.pid:
            os.killpg(proc.pid, sign)
        else:
            os.kill(proc.pid, sign)


def _pump(proc: "subprocess.Popen[bytes]", sink: "_Sink", deadline: float | None) -> bool:
    """Feeds the child's output to the sink until it ends. False: the deadline passed first."""
    if proc.stdout is None:
        raise ValueError("the child has no pipe")
    fd = proc.stdout.fileno()
    os.set_blocking(fd, False)
    poll = select.poll()
    poll.register(fd, select.POLLIN | select.POLLHUP)
    is_open = True
    while is_open or not _ended(proc):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        if not is_open:
            time.sleep(_POLL / 5)
        elif poll.poll(_POLL * 1000):
            data = os.read(fd, 65536)
            sink.write(data)
            is_open = bool(data)
        elif _ended(proc):  # a process it left behind holds the pipe
            break
    return True


def _drain(fd: int, sink: "_Sink") -> None:
    """What is still in the pipe; never waits for more than is there."""
    budget = LOG_LIMIT
    while budget > 0:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return
        if not data:
            return
        sink.write(data)
        budget -= len(data)


def _open_log(stack: contextlib.ExitStack, log: Path | None) -> IO[bytes] | None:
    if log is None:
        return None
    with files.writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(log.open("ab"))


class _Sink:
    """Splits output into lines, takes secrets out, and keeps log and tail."""

    def __init__(
        self,
        log: IO[bytes] | None,
        mask: Callable[[str], str],
        *,
        stream: bool,
        on_line: Callable[[str], None] | None,
    ) -> None:
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._log = log
        self._mask = mask
        self._stream = stream
        self._on_line = on_line
        self._rest = b""
        self._logged = 0
        self._left_out = 0

    def write(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)
        while len(self._rest) > _LINE_LIMIT:
            self._line(self._rest[:_LINE_LIMIT])
            self._rest = self._rest[_LINE_LIMIT:]

    def close(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        if self._log is not None and self._left_out:
            self._log.write(f"[{self._left_out} bytes left out: the log holds {LOG_LIMIT} at most]\n".encode())

    def _line(self, raw: bytes) -> None:
        line = self._mask(raw.decode("utf-8", "replace").rstrip("\r"))
        self.tail.append(clean(line))
        if self._on_line is not None:
            self._on_line(line)
        if self._stream:
            Console.current().info(line)
        if self._log is None:
            return
        data = line.encode("utf-8", "replace") + b"\n"
        if self._logged + len(data) > LOG_LIMIT:
            self._left_out += len(data)
            return
        self._logged += len(data)
        self._log.write(data)
