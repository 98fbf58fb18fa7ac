"""The ways in which a worker is lost or declines, and the words for them."""

import math
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from sm120.console import clean


class WorkerError(Exception):
    """The worker is gone. ``started`` tells whether it had acknowledged the request that was under way."""

    def __init__(self, message: str, *, started: bool, tail: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.started = started
        self.tail = tuple(tail)


class WorkerCrashed(WorkerError):
    """It ended on its own: exit code or signal, and the last lines of stderr."""


class WorkerHung(WorkerError):
    """It was silent for too long and was killed."""


class WorkerGarbled(WorkerError):
    """It wrote what is not the protocol and was killed."""


class WorkerRefused(Exception):
    """It answered that it will not do this; it is alive and well. ``kind`` and ``detail`` are its own."""

    def __init__(self, kind: str, message: str, detail: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.detail = detail


def ending(code: int) -> str:
    """What an exit code says, in words."""
    if code >= 0:
        return f"ended with exit code {code}" + (" without an answer" if code == 0 else "")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def excerpt(data: bytes) -> str:
    text = clean(data[:160].decode("utf-8", "replace")).strip()
    return repr(text[:120] + ("..." if len(data) > 120 else ""))


def finite(text: str) -> float:
    """A number of the protocol. 1e999 is JSON, but Python reads it as infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
