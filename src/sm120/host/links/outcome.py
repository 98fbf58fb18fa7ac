"""What a child's messages amount to. It is not trusted: whatever it prints becomes a verdict, never an exception."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from sm120.console import clean
from sm120.process import Completed

PREFIX: Final = '{"links": 1,'
_MOST_LINES: Final = 100_000
_KEPT: Final = 16  # descriptions of what was wrong
_SHOWN: Final = 3  # last lines of a child that died


class Verdict(StrEnum):
    RIGHT = "RIGHT"
    WRONG = "WRONG"  # came out different, with success reported
    HANG = "HANG"
    CRASH = "CRASH"
    SKIPPED = "SKIPPED"


class OutOfMemory(Exception):
    """A GPU had not the memory for the check, which therefore says nothing about links."""


class _Garbled(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class Timing:
    """All-reduces of one message size. Seconds."""

    bytes: int
    ranks: int
    calls: int
    median: float
    p99: float
    noise: float  # by how much the medians of the blocks differ, relative to the median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second over each link, as nccl-tests counts them."""
        return self.bytes / self.median * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True, kw_only=True)
class Outcome:
    verdict: Verdict
    detail: str = ""  # why it is not RIGHT, in words
    checks: int = 0
    wrong: int = 0
    where: tuple[Mapping[str, Any], ...] = ()  # some of what was wrong, as the child described it
    timings: tuple[Timing, ...] = ()
    direct: bool | None = None  # of a pair: whether either GPU can reach the other's memory
    bandwidth: Mapping[str, float] = field(default_factory=dict)  # of a pair: bytes a second by direction
    machine: Mapping[str, Any] = field(default_factory=dict)
    stuck: tuple[int, ...] = ()  # process ids that could not be killed
    seconds: float = 0.0


class Collector:
    """Takes a child's lines as they come, and keeps what may be a message."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.flooded = False

    def __call__(self, line: str) -> None:
        if not line.startswith(PREFIX):
            return
        if len(self.messages) < _MOST_LINES:
            self.messages.append(line)
        else:
            self.flooded = True


def judge(collector: Collector, done: Completed, ranks: int) -> Outcome:
    """The outcome of a child. OutOfMemory where the check could not be made for want of memory."""
    try:
        said = _read(collector, ranks)
    except _Garbled as error:
        return Outcome(verdict=Verdict.CRASH, detail=str(error), seconds=done.seconds)
    if said.memory:
        raise OutOfMemory(said.memory)
    verdict, detail = _verdict(said, done, ranks)
    return Outcome(
        verdict=verdict,
        detail=detail,
        checks=said.checks,
        wrong=said.wrong,
        where=tuple(said.where),
        timings=_merge(said.timings, ranks),
        direct=said.direct,
        bandwidth=said.bandwidth,
        machine=said.machine,
        stuck=tuple(said.stuck),
        seconds=done.seconds,
    )


@dataclass
class _Said:
    """Everything that the messages of a child say, by kind."""

    done: set[int] = field(default_factory=set)
    checks: int = 0
    wrong: int = 0
    reported: int = 0  # messages about something wrong; the first of them are kept
    where: list[Mapping[str, Any]] = field(default_factory=list)
    timings: dict[int, list[Timing]] = field(default_factory=dict)  # by size
    hung: str = ""
    lost: str = ""
    memory: str = ""
    steps: dict[int, str] = field(default_factory=dict)
    direct: bool | None = None
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    stuck: list[int] = field(default_factory=list)


def _read(collector: Collector, ranks: int) -> _Said:
    if collector.flooded:
        raise _Garbled(f"sent more than {_MOST_LINES} messages")
    said = _Said()
    for line in collector.messages:
        try:
            message = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
            _take(said, message, ranks)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise _Garbled(f"sent what is not the protocol: {clean(line[:200])}") from error
    return said


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _finite(text: str) -> float:
    return _number(abs(float(text))) * (-1 if text.startswith("-") else 1)


def _take(said: _Said, message: Mapping[str, Any], ranks: int) -> None:
    """Files one message. Any of the errors above: it is not sound."""
    event = message["event"]
    if event == "hung":
        doing = ", ".join(
            f"rank {_whole(r)} in {clean(str(at))} for {_number(s):.0f} s" for r, at, s in message["ranks"]
        )
        said.hung = f"silent for {_number(message['seconds']):.0f} s: {doing}"
    elif event == "stuck":
        said.stuck = [_whole(pid) for pid in message["pids"]]
    else:
        rank = _whole(message["rank"])
        if rank >= ranks:
            raise ValueError(f"rank {rank}")
        _OF_A_RANK[event](said, rank, message)


def _ready(said: _Said, rank: int, message: Mapping[str, Any]) -> None:
    """Nothing rests on it here: it is the supervisor's."""


def _at(said: _Said, rank: int, message: Mapping[str, Any]) -> None:
    said.steps[rank] = clean(str(message["step"]))


def _wrong(said: _Said, rank: int, message: Mapping[str, Any]) -> None:
    said.reported += 1
    if said.reported <= _KEPT:
        said.where.append({**message["where"], "rank": rank})


def _timed(said: _Said, _rank: int, message: Mapping[str, Any]) -> None:
    timing = _timing(message)
    said.timings.setdefault(timing.bytes, []).append(timing)


def _pair(said: _Said, _rank: int, message: Mapping[str, Any]) -> None:
    said.direct = message["direct"] is True


def _bandwidth(said: _Said, _rank: int, message: Mapping[str, Any]) -> None:
    said.bandwidth = {str(name): _number(value) for name, value in message["by"].items()}


def _machine(said: _Said, _rank: int, message: Mapping[str, Any]) -> None:
    words = {name: _word(message[name]) for name in ("torch", "cuda", "nccl", "package")}
    gpus = [
        {"uuid": str(_word(gpu["uuid"])), "name": str(_word(gpu["name"])), "free": _whole(gpu["free"])}
        for gpu in message["gpus"]
    ]
    said.machine = {**words, "gpus": gpus}


def _done(said: _Said, rank: int, message: Mapping[str, Any]) -> None:
    said.done.add(rank)
    said.checks += _whole(message["checks"])
    said.wrong += _whole(message["wrong"])


def _failed(said: _Said, rank: int, message: Mapping[str, Any]) -> None:
    text = f"rank {rank}: {clean(str(message['message']))}"
    if message["kind"] == "memory":
        said.memory = said.memory or text
    else:
        said.lost = said.lost or text


def _lost(said: _Said, rank: int, message: Mapping[str, Any]) -> None:
    where = f" in {said.steps[rank]}" if rank in said.steps else ""
    code = message["code"]
    if type(code) is not int or abs(code) > 255:
        raise ValueError(f"{code!r:.40} is no exit code")
    said.lost = said.lost or f"rank {rank} {_ending(code)}{where}"


_OF_A_RANK: Final[Mapping[str, Callable[[_Said, int, Mapping[str, Any]], None]]] = {
    "ready": _ready,
    "at": _at,
    "wrong": _wrong,
    "timing": _timed,
    "pair": _pair,
    "bandwidth": _bandwidth,
    "machine": _machine,
    "done": _done,
    "failed": _failed,
    "lost": _lost,
}


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _word(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    return None if value is None else clean(value)


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r:.40} is no number")
    return float(value)


def _timing(message: Mapping[str, Any]) -> Timing:
    median, blocks = _number(message["median"]), [_number(block) for block in message["blocks"]]
    ranks, size, calls = (_whole(message[name]) for name in ("ranks", "bytes", "calls"))
    if not median or not blocks or not ranks or not size or not calls:
        raise ValueError("an empty timing")
    noise = _number((max(blocks) - min(blocks)) / median)
    return Timing(bytes=size, ranks=ranks, calls=calls, median=median, p99=_number(message["p99"]), noise=noise)


def _merge(timings: Mapping[int, Sequence[Timing]], ranks: int) -> tuple[Timing, ...]:
    """One timing a size, of the slowest rank: nobody is done before it is. Sizes that a rank did not report are out."""
    slowest = (max(own, key=lambda timing: timing.median) for own in timings.values() if len(own) == ranks)
    return tuple(sorted(slowest, key=lambda timing: timing.bytes))


def _verdict(said: _Said, done: Completed, ranks: int) -> tuple[Verdict, str]:
    """Wrong data comes first: it is what nothing else would notice."""
    if said.wrong or said.reported:
        return Verdict.WRONG, f"{max(said.wrong, said.reported)} of {said.checks or 'its'} results are wrong"
    if said.hung:
        return Verdict.HANG, said.hung
    if done.timed_out:
        doing = ", ".join(f"rank {rank} in {step}" for rank, step in sorted(said.steps.items())) or "nothing was said"
        return Verdict.HANG, f"not done within {done.seconds:.0f} s: {doing}"
    if said.lost:
        return Verdict.CRASH, said.lost + _last_words(done)
    if len(said.done) < ranks or done.returncode != 0:
        return Verdict.CRASH, f"the child {_ending(done.returncode)} before it was done{_last_words(done)}"
    if not said.checks:
        return Verdict.CRASH, "the child checked nothing"
    return Verdict.RIGHT, ""


def _last_words(done: Completed) -> str:
    noise = [line for line in done.tail if line.strip() and not line.startswith(PREFIX)]
    return "".join(f"\n  {line[:300]}" for line in noise[-_SHOWN:])


def _ending(code: int) -> str:
    import signal

    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
