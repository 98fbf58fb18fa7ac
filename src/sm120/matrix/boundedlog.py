"""A child's stderr: its beginning in a file, its end in memory, so that a flood fills no disk and hides no end."""

import collections
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from sm120.files import writing
from sm120.redact import redactor

HEAD_BYTES: Final = 1 << 20
TAIL_BYTES: Final = 64 << 10


class BoundedLog:
    """Appends to ``path``, without secrets. Written by one thread, read after that thread has ended."""

    def __init__(self, path: Path, env: Mapping[str, str]) -> None:
        """``env`` is the child's, whose secrets it may print. PreflightError when the file cannot be opened."""
        self._redact = redactor(env)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("ab")
        self._room = HEAD_BYTES
        self._partial = b""
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0
        self._dropped = 0

    def write(self, data: bytes) -> None:
        """Takes the next bytes of the stream."""
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        if self._room <= 0:
            self._dropped += len(data)
            return
        self._partial += data
        end = self._partial.rfind(b"\n") + 1
        if end or len(self._partial) >= self._room:  # redacted by whole lines: a secret may be cut by two reads
            end = end or len(self._partial)
            self._append(self._partial[:end])
            self._partial = self._partial[end:]

    def lines(self) -> list[str]:
        """The last lines that hold something, without secrets."""
        return [line.rstrip() for line in self._end().splitlines() if line.strip()]

    def close(self) -> None:
        """Writes what is still to be written; harmless when repeated."""
        if self._file.closed:
            return
        self._append(self._partial)
        self._partial = b""
        if self._dropped:
            note = f"\n[{self._dropped} bytes left out; the last {TAIL_BYTES >> 10} KiB follow]\n"
            self._room = 2 * TAIL_BYTES
            self._append(note.encode() + self._end().encode())
        with contextlib.suppress(OSError):
            self._file.close()

    def _end(self) -> str:
        return self._redact(b"".join(self._tail)[-TAIL_BYTES:].decode("utf-8", "replace"))

    def _append(self, data: bytes) -> None:
        kept, left = data[: self._room], data[self._room :]
        self._room -= len(kept)
        self._dropped += len(left)
        with contextlib.suppress(OSError):  # a full disk must not stop the reading
            self._file.write(self._redact(kept.decode("utf-8", "replace")).encode())
            self._file.flush()
