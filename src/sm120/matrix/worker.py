"""The toolkit's side of the door: one worker process, one request at a time, and every way in which it can go wrong.

One thread a worker moves bytes in both directions, so a worker that floods stderr or never reads its stdin can block
neither itself nor us. The thread ends with the process; `Worker.close` waits for both.
"""

import contextlib
import json
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NoReturn, Self

from sm120.console import clean
from sm120.matrix.boundedlog import BoundedLog
from sm120.matrix.lost import (
    WorkerCrashed,
    WorkerGarbled,
    WorkerHung,
    WorkerRefused,
    ending,
    excerpt,
    finite,
    no_constant,
)
from sm120.process import spawn, terminate

LINE_BYTES: Final = 16 << 20
SHOWN_LINES: Final = 12
_POLL: Final = 0.1  # seconds; only a death that closes no pipe (a grandchild still holds it) is found by looking
_READ: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. ``quiet`` is the longest silence within a request; ``total`` is never extended by anything.

    ``leave``: for a process that has closed its output to end, since tearing down a GPU context takes a while.
    """

    start: float = 180.0
    quiet: float = 300.0
    total: float = 1800.0
    grace: float = 2.0
    leave: float = 10.0


@dataclass(slots=True)
class _Exchange:
    """The request that is under way."""

    id: int
    started: bool = False
    reply: Mapping[str, Any] | None = None
    alive_at: float = field(default_factory=time.monotonic)
    event: str | None = None


class Worker:
    """A process that speaks the protocol. Use as a context manager, or call `close`."""

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, limits: Limits | None = None
    ) -> None:
        """Starts the process in a session of its own. PreflightError when it cannot be started at all."""
        self.limits = limits or Limits()
        self.log = log
        self._ids = 0
        self._state = threading.Condition()
        self._exchange: _Exchange | None = None
        self._outgoing = bytearray()
        self._buffer = bytearray()
        self._fault: str | None = None
        self._output_ended = False
        self._input_ended = False
        self._abandoned = False
        self._closed = False
        self._gone = False
        self._stderr = BoundedLog(log, env)
        try:
            self._process = spawn(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd,
                env=dict(env),
                bufsize=0,
            )
        except BaseException:
            self._stderr.close()
            raise
        self._stdin, self._stdout, self._errors = (
            _pipe(self._process.stdin),
            _pipe(self._process.stdout),
            _pipe(self._process.stderr),
        )
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._pump, name=f"door-{self._process.pid}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hello(self) -> Mapping[str, Any]:
        """The first request, under the start-up limit."""
        return self.request("hello", quiet=self.limits.start, total=self.limits.start)

    def request(
        self, op: str, body: Mapping[str, Any] | None = None, *, quiet: float | None = None, total: float | None = None
    ) -> Mapping[str, Any]:
        """One request and its result. WorkerError when the worker is lost, WorkerRefused when it declines."""
        self._ids += 1
        exchange = _Exchange(self._ids)
        line = json.dumps({"id": exchange.id, "op": op, **(body or {})}, allow_nan=False).encode() + b"\n"
        with self._state:
            if self._closed:
                raise WorkerCrashed("was stopped", started=False)
            if self._exchange is not None:
                raise RuntimeError("a worker takes one request at a time")
            self._exchange = exchange
            self._outgoing += line
        self._wake()
        try:
            reply = self._await(
                exchange, self.limits.quiet if quiet is None else quiet, self.limits.total if total is None else total
            )
        finally:
            with self._state:
                self._exchange = None
                self._abandoned = exchange.reply is None
        return self._result(reply, exchange)

    def close(self) -> None:
        """Lets the process leave, then ends it and its group; returns when process and thread are gone."""
        self._end(polite=True)

    def kill(self) -> None:
        """`close` without waiting for the process to leave on its own. May be called from another thread."""
        self._end(polite=False)

    def _await(self, exchange: _Exchange, quiet: float, total: float) -> Mapping[str, Any]:
        deadline = exchange.alive_at + total
        while True:
            self._wait_settled(exchange, _POLL)
            now = time.monotonic()
            reply = exchange.reply
            if reply is None and (self._output_ended or self._exited()):
                # What it left in its pipes still counts; a grandchild that holds them open is not waited for.
                self._wait_settled(exchange, self.limits.leave)
                reply = exchange.reply
                if reply is None:
                    self._raise_death(exchange)
            if reply is not None:
                return reply
            if self._fault is not None:
                self.kill()
                raise WorkerGarbled(self._fault, started=exchange.started, tail=self._last_lines())
            silent = now - exchange.alive_at
            if silent > quiet or now > deadline:
                limit = f"silent for {silent:.1f} s" if silent > quiet else f"not done within {total:.0f} s"
                self.kill()
                raise WorkerHung(
                    limit + (f"; its last message was {exchange.event}" if exchange.event else ""),
                    started=exchange.started,
                    tail=self._last_lines(),
                )

    def _wait_settled(self, exchange: _Exchange, seconds: float) -> None:
        with self._state:
            self._state.wait_for(
                lambda: exchange.reply is not None or self._fault is not None or self._output_ended, timeout=seconds
            )

    def _raise_death(self, exchange: _Exchange) -> NoReturn:
        on_its_own = self._wait_exit(self.limits.leave)
        self.kill()
        started, tail = exchange.started, self._last_lines()
        if not on_its_own:
            raise WorkerGarbled("closed its output but went on running", started=started, tail=tail)
        how = ending(self._process.wait())
        if self._fault is None:
            raise WorkerCrashed(how, started=started, tail=tail)
        if self._process.returncode == 0:
            raise WorkerGarbled(self._fault, started=started, tail=tail)
        raise WorkerCrashed(f"{how}; before that, it {self._fault}", started=started, tail=tail)

    def _result(self, reply: Mapping[str, Any], exchange: _Exchange) -> Mapping[str, Any]:
        result, error = reply.get("result"), reply.get("error")
        if reply.get("ok") is True and isinstance(result, Mapping):
            return result
        if reply.get("ok") is False and isinstance(error, Mapping):
            raise WorkerRefused(str(error.get("kind")), str(error.get("message")), error)
        self.kill()
        message = f"sent a reply without result or error: {excerpt(json.dumps(reply).encode())}"
        raise WorkerGarbled(message, started=exchange.started, tail=self._last_lines())

    def _exited(self) -> bool:
        """Whether the process has ended, without reaping it: until then its group's number is its own."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _wait_exit(self, seconds: float) -> bool:
        """Whether it ended within that time. Its output ends first, which is told at once; the rest is looked for."""
        deadline = time.monotonic() + seconds
        with self._state:
            self._state.wait_for(lambda: self._output_ended, timeout=seconds)
        while not (exited := self._exited()) and time.monotonic() < deadline:
            time.sleep(_POLL / 50)
        return exited

    def _last_lines(self) -> list[str]:
        return [clean(line) for line in self._stderr.lines()[-SHOWN_LINES:]]

    def _end(self, *, polite: bool) -> None:
        with self._state:
            if self._closed:
                self._state.wait_for(lambda: self._gone)
                return
            self._closed = True
            self._input_ended = True
        self._wake()
        try:
            if polite and not self._abandoned:
                self._wait_exit(self.limits.grace)
        finally:
            terminate(self._process, self.limits.grace)
            with self._state:
                self._gone = True
            self._wake()
            self._thread.join()
            for descriptor in (self._wake_read, self._wake_write):
                os.close(descriptor)
            for stream in (self._stdin, self._stdout, self._errors):
                with contextlib.suppress(OSError):
                    stream.close()
            self._stderr.close()
            with self._state:
                self._state.notify_all()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    # What follows runs in the worker's own thread.

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for stream in (self._stdin, self._stdout, self._errors):
                os.set_blocking(stream.fileno(), False)
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._errors, selectors.EVENT_READ)
            while not self._gone:
                self._want_to_write(selector)
                for key, _ in selector.select():
                    if key.fileobj is self._stdin:
                        self._write()
                    elif key.fd == self._wake_read:
                        os.read(self._wake_read, _READ)
                    elif not self._read(key.fileobj is self._stdout):
                        selector.unregister(key.fileobj)
        for _ in range(LINE_BYTES // _READ):  # the last words of a process that is gone
            if not self._read(False):
                break

    def _want_to_write(self, selector: selectors.BaseSelector) -> None:
        registered = not self._stdin.closed and self._stdin in selector.get_map()
        if registered and (self._input_ended or not self._outgoing):
            selector.unregister(self._stdin)
        if self._input_ended:
            with contextlib.suppress(OSError):
                self._stdin.close()
        elif self._outgoing and not registered:
            selector.register(self._stdin, selectors.EVENT_WRITE)

    def _write(self) -> None:
        with self._state:
            data = bytes(self._outgoing[:_READ])
        try:
            sent = os.write(self._stdin.fileno(), data)
        except BlockingIOError:
            sent = 0
        except OSError:  # it no longer reads; how it ended is seen on its output
            sent = len(self._outgoing)
        with self._state:
            del self._outgoing[:sent]

    def _read(self, door: bool) -> bool:
        """One read from stdout (``door``) or stderr. False at its end, and when there is no more sense in reading."""
        try:
            data = os.read((self._stdout if door else self._errors).fileno(), _READ)
        except BlockingIOError:
            return not self._gone
        except OSError:
            data = b""
        if not door:
            self._stderr.write(data)
            return bool(data)
        with self._state:
            if data:
                self._take(data)
            elif self._buffer:
                self._fault = f"ended in the middle of a line: {excerpt(bytes(self._buffer[:200]))}"
            self._output_ended = not data
            self._state.notify_all()
            return bool(data) and self._fault is None

    def _take(self, data: bytes) -> None:
        self._buffer += data
        if b"\n" in data:
            *lines, rest = bytes(self._buffer).split(b"\n")
            self._buffer = bytearray(rest)
            for line in lines:
                self._fault = self._fault or self._take_line(line)
        if len(self._buffer) > LINE_BYTES:
            self._fault = self._fault or f"sent a line of more than {LINE_BYTES >> 20} MiB"

    def _take_line(self, line: bytes) -> str | None:
        """Files one message; what is wrong with it, or None."""
        if len(line) > LINE_BYTES:
            return f"sent a line of more than {LINE_BYTES >> 20} MiB"
        try:
            message = json.loads(line.decode("utf-8"), parse_constant=no_constant, parse_float=finite)
        except (ValueError, RecursionError):
            return f"sent what is not JSON: {excerpt(line)}"
        if not isinstance(message, dict):
            return f"sent what is no object: {excerpt(line)}"
        exchange, number = self._exchange, message.get("id")
        if exchange is None or type(number) is not int or number != exchange.id:
            expected = "nothing was asked" if exchange is None else f"the request was {exchange.id}"
            return f"answered request {number!r:.40} while {expected}"
        exchange.alive_at = time.monotonic()
        exchange.started = True
        if "event" in message:
            exchange.event = excerpt(str(message.get("message") or message["event"]).encode())
        elif exchange.reply is not None:
            return f"answered request {number} twice"
        else:
            exchange.reply = message
        return None


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise RuntimeError("a worker is started with all three pipes")
    return stream
