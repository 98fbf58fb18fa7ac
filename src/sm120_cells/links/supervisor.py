"""Starts the ranks of a request, passes on what they say, and sees to it that none outlives its use.

Needs the standard library only, so that it stands when torch, CUDA or a rank does not.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, NoReturn

RANK_FLAG: Final = "--rank"
LINE_BYTES: Final = 4096  # of a message or a piece of noise; the toolkit takes lines of up to 8192
_PR_SET_PDEATHSIG: Final = 1
_LOOK: Final = 0.1  # seconds between looks at what closes no pipe: an end, a silence
_LEAVE: Final = 2.0  # seconds for the last words of the others, once one rank is lost
_KILLED: Final = 10.0  # seconds for a killed rank to go; tearing down a GPU context takes a while


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the process ``parent``, which started it, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it had ended before that
            os._exit(1)


def say(event: str, **content: Any) -> None:
    """One message to the toolkit."""
    sys.stdout.write(json.dumps({"links": 1, "event": event, **content}, allow_nan=False) + "\n")
    sys.stdout.flush()


@dataclass
class _Lines:
    """Splits a stream into lines; one without an end is cut in pieces."""

    rest: bytes = b""

    def take(self, data: bytes) -> Iterator[str]:
        """The lines that ``data`` completes; at the end of the stream (no data), what is left."""
        self.rest += data
        *lines, self.rest = self.rest.split(b"\n")
        if self.rest and (not data or len(self.rest) > LINE_BYTES):
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            for start in range(0, len(line), LINE_BYTES):
                yield line[start : start + LINE_BYTES].decode("utf-8", "replace")


@dataclass
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    step: str = "starting"
    heard: float = field(default_factory=time.monotonic)
    is_ready: bool = False
    is_done: bool = False


class _Ended(Exception):
    """The signal that ends this process."""


def supervise(path: Path, request: Mapping[str, Any]) -> int:
    """Runs the request at ``path``. 0: every rank said that it was done."""
    die_with_parent(int(request["parent"]))
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a text stream always can
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, _end)
    ranks: list[_Rank] = []
    with selectors.DefaultSelector() as selector:
        try:
            for number in range(int(request["ranks"])):
                ranks.append(_start(path, number, selector))  # noqa: PERF401  # known at once: the next may not start
            return _watch(ranks, selector, start=float(request["start"]), quiet=float(request["quiet"]))
        except _Ended:
            return 1
        finally:
            for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(sign, signal.SIG_IGN)
            _kill(ranks, selector)


def _end(signum: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise _Ended


def _start(path: Path, number: int, selector: selectors.BaseSelector) -> _Rank:
    door, theirs = os.pipe()
    own = [RANK_FLAG, str(number), str(theirs), str(os.getpid())]
    words = [sys.executable, "-m", "sm120_cells.links", str(path), *own]
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(theirs,)
        )
    except BaseException:
        os.close(door)
        raise
    finally:
        os.close(theirs)
    rank = _Rank(number, process)
    noise = process.stdout
    assert noise is not None
    for stream, is_door in ((os.fdopen(door, "rb", buffering=0), True), (noise, False)):
        os.set_blocking(stream.fileno(), False)
        selector.register(stream, selectors.EVENT_READ, (rank, is_door, _Lines()))
    return rank


def _watch(ranks: Sequence[_Rank], selector: selectors.BaseSelector, *, start: float, quiet: float) -> int:
    while True:
        _pass_on(selector, _LOOK)
        lost = [rank for rank in ranks if rank.process.poll() is not None and not _is_sound(rank)]
        if lost:
            _last_words(selector)
            lost = [rank for rank in lost if not _is_sound(rank)]  # some had said it, and were not heard yet
            for rank in lost:
                say("lost", rank=rank.number, code=rank.process.returncode, step=rank.step)
            if lost:
                return 1
        if all(rank.process.poll() is not None for rank in ranks):
            _last_words(selector)
            return 0
        now = time.monotonic()
        silent = [r for r in ranks if not r.is_done and now - r.heard > (quiet if r.is_ready else start)]
        if silent:
            doing = [[r.number, r.step[:80], round(now - r.heard, 1)] for r in ranks]
            say("hung", seconds=round(max(now - r.heard for r in silent), 1), ranks=doing)
            return 1
        if all(r.is_done for r in ranks) and now - max(r.heard for r in ranks) > quiet:
            return 0  # all was said; a rank that cannot leave is killed


def _is_sound(rank: _Rank) -> bool:
    return rank.is_done and rank.process.returncode == 0


def _last_words(selector: selectors.BaseSelector) -> None:
    deadline = time.monotonic() + _LEAVE
    while time.monotonic() < deadline and _pass_on(selector, _LOOK):
        pass


def _pass_on(selector: selectors.BaseSelector, timeout: float) -> bool:
    """Passes on what the ranks wrote meanwhile. Whether there was something."""
    if not selector.get_map():
        time.sleep(timeout)
        return False
    ready = selector.select(timeout)
    for key, _ in ready:
        stream: IO[bytes] = key.fileobj  # type: ignore[assignment]  # only such streams are registered
        rank, is_door, lines = key.data
        data = os.read(stream.fileno(), 1 << 16)
        for line in lines.take(data):
            if is_door:
                _hear(rank, line)
            elif line.strip():
                sys.stdout.write(f"[rank {rank.number}] {line}\n")
        sys.stdout.flush()
        if not data:
            selector.unregister(stream)
            stream.close()
    return bool(ready)


def _hear(rank: _Rank, line: str) -> None:
    rank.heard = time.monotonic()
    try:
        message = json.loads(line)
        event, step = message["event"], message.get("step")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        say("garbled", rank=rank.number, line=line[:200])
        return
    rank.step = step if event == "at" and isinstance(step, str) else rank.step
    rank.is_ready = rank.is_ready or event == "ready"
    rank.is_done = rank.is_done or event == "done"
    sys.stdout.write(line + "\n")


def _kill(ranks: Sequence[_Rank], selector: selectors.BaseSelector) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.process.kill()
    deadline = time.monotonic() + _KILLED
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        _pass_on(selector, _LOOK)
    stuck = [rank.process.pid for rank in ranks if rank.process.poll() is None]
    if stuck:
        say("stuck", pids=stuck)
    for key in list(selector.get_map().values()):
        with contextlib.suppress(OSError):
            key.fileobj.close()  # type: ignore[union-attr]  # streams, as above
