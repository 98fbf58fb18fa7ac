"""From the output of a build that failed to the first real error, the file, and the cure when it is known.

``failures.toml`` is the catalogue.
"""

import functools
import itertools
import re
import tomllib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120.build.compile.driver import MARK
from sm120.build.compile.ninja import counted, readable
from sm120.build.compile.output import marked, plain, stage_of

_FAILED = re.compile(r"FAILED: (?:\[code=(-?\d+)\] )?(.+)")
_CMAKE = re.compile(r"CMake Error(?: \(\w+\))?(?: in (\S+)| at (.+?):(\d+)(?: \(.*\))?)?:(?: (.+))?")
_NINJA = re.compile(r"ninja: (?:error|fatal): (.+)")
_KILLED = re.compile(r"Killed signal terminated program|died due to signal 9\b|^Killed$|: Killed\b", re.MULTILINE)
_ERRORS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<file>[^\s:()][^:()]*):(?P<line>\d+)(?::\d+)?: (?:fatal |internal compiler )?error: (?P<text>.+)",
        r"(?P<file>[^\s()][^()]*)\((?P<line>\d+)\): (?:catastrophic |internal )?error(?: #[\w-]+)?\s*: (?P<text>.+)",
        r"ptxas (?P<file>.+), line (?P<line>\d+); (?:error|fatal)\s*: (?P<text>.+)",
        r"(?P<text>(?:nvcc|ptxas|nvlink|fatbinary|cicc|cudafe\+\+)\s+(?:error|fatal)\s*: .+)",
        r"(?P<text>.*\bundefined reference to .+)",
        r"(?P<text>(?:\S*/)?ld(?:\.\w+)?: (?!warning|.*: in function).+)",
        r"(?P<text>(?:\S*/)?[\w+.-]+: (?:fatal |internal compiler )?error: .+)",
        r"(?P<text>.*(?:out of memory|virtual memory exhausted|No space left on device|Disk quota exceeded).*)",
        r"(?P<text>Killed)",
    )
)
_BEFORE = 60  # lines before CMake's error: what git said comes first
_KEPT = 2000  # lines of one failure; templates can fill books
_CHUNK = 8192  # a longer line of a child comes in pieces of this
_KILLED_CODE = "137"
_STEP_ENDS = re.compile(rf"\[\d+/\d+\] |ninja: |FAILED: |\*\*\* |{re.escape(MARK)}")
_MESSAGE_ENDS = re.compile(r"\S")  # CMake indents what belongs to its message
_ANY_LINE = re.compile("")


@dataclass(frozen=True, kw_only=True)
class Known:
    id: str
    pattern: re.Pattern[str]
    what: str
    cure: str
    source: str  # where it was met
    machine: bool = False  # the disk or the network is at fault, not the build
    naming: re.Pattern[str] | None = None  # finds the names that ``what`` and ``cure`` speak of, anywhere in the output


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    id: str
    what: str
    cure: str
    machine: bool


@dataclass(frozen=True, kw_only=True)
class Failure:
    first: str  # file:line: message
    file: str | None = None  # what was being made
    output: tuple[str, ...] = ()  # that belongs to it, without the command
    before: tuple[str, ...] = ()
    killed: bool = False  # by signal 9
    silent: bool = False  # no error is in the output at all

    def diagnosis(self) -> Diagnosis | None:
        """The first entry of the catalogue that the error itself fits, or else all that belongs to it."""
        texts = (self.first, "\n".join(self.output), "\n".join((*self.before, *self.output)))
        for text in texts:
            for known in catalogue():
                if known.pattern.search(text):
                    return _named(known, texts[-1])
        return None


class _Unnamed(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return key.upper()


def _named(known: Known, text: str) -> Diagnosis:
    found = known.naming.search(text) if known.naming is not None else None
    names = _Unnamed({name: value for name, value in found.groupdict().items() if value} if found else {})
    return Diagnosis(
        id=known.id, what=known.what.format_map(names), cure=known.cure.format_map(names), machine=known.machine
    )


@functools.cache
def catalogue() -> tuple[Known, ...]:
    return tuple(
        Known(
            id=entry["id"],
            pattern=re.compile(entry["pattern"], re.MULTILINE),
            what=entry["what"],
            cure=entry["cure"],
            source=entry["source"],
            machine=entry.get("machine", False),
            naming=re.compile(entry["naming"]) if "naming" in entry else None,
        )
        for entry in _data()["known"]
    )


def disk_full() -> Diagnosis:
    """For a build whose output does not say it."""
    (known,) = (entry for entry in catalogue() if entry.id == "disk-full")
    return _named(known, "")


@functools.cache
def _left_out() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in _data()["left-out"]))


@functools.cache
def _data() -> dict[str, list]:  # type: ignore[type-arg] # of strings and of tables
    return tomllib.loads(Path(__file__).with_name("failures.toml").read_text("utf-8"))


def left_out(line: str) -> bool:
    """Whether a line of CMake's says that a kernel will not be there, though the build goes on."""
    return _left_out().search(line) is not None


def find_failure(lines: Iterable[str]) -> Failure:
    """What went wrong first in the stage that was the last."""
    rows = (plain(line.rstrip("\n")) for line in lines)
    before: deque[str] = deque(maxlen=_BEFORE)
    failure: Failure | None = None
    line = next(rows, None)
    while line is not None:
        following = None
        ends = None if failure is not None else _begins(line)
        if stage_of(line) is not None:
            failure = None
            before.clear()
        elif ends is not None:
            body, following = _taken(rows, ends)
            failure = _failure(line, body, tuple(before))
        elif counted(line) is None:
            before.append(line)
        line = next(rows, None) if following is None else following
    return failure or Failure(first="no error is in its output", output=tuple(before), silent=True)


def _begins(line: str) -> re.Pattern[str] | None:
    """What ends the lines of the failure that begins with this one; None: none does."""
    if _FAILED.match(line):
        return _STEP_ENDS
    if _CMAKE.match(line):
        return _MESSAGE_ENDS
    own = marked(line)
    return _ANY_LINE if _NINJA.match(line) or (own is not None and own[0] == "error") else None


def _taken(rows: Iterator[str], ends: re.Pattern[str]) -> tuple[list[str], str | None]:
    """The lines before the first that ``ends`` fits, and that line."""
    body: list[str] = []
    for line in rows:
        if ends.match(line):
            return body, line
        if len(body) < _KEPT:
            body.append(line)
    return body, None


def _failure(line: str, body: Sequence[str], before: tuple[str, ...]) -> Failure:
    failed, cmake, own = _FAILED.match(line), _CMAKE.match(line), marked(line)
    if failed:
        return _step(failed, _without_command(body))
    if cmake:
        return _message(cmake, (line, *body), before)
    return Failure(first=(own[1] if own else "") or line, output=before[-10:])


def _without_command(body: Sequence[str]) -> tuple[str, ...]:
    first = 1
    while first < len(body) and len(body[first - 1].encode()) == _CHUNK:
        first += 1
    return tuple(body[first:])


def _step(failed: re.Match[str], output: tuple[str, ...]) -> Failure:
    file = readable(failed[2].split()[0])
    killed = failed[1] == _KILLED_CODE or bool(_KILLED.search("\n".join(output)))
    first = next((text for line in output if (text := error_in(line))), None)
    if first is None:
        said = next((line.strip() for line in output if line.strip()), None)
        first = said or (f"{file}: ended with exit code {failed[1]}" if failed[1] else f"{file}: failed without a word")
    return Failure(first=first, file=file, output=output, killed=killed)


def _message(cmake: re.Match[str], lines: tuple[str, ...], before: tuple[str, ...]) -> Failure:
    error = next((text for line in lines[1:] if (text := error_in(line.strip()))), None)
    if error is None:
        words = " ".join(itertools.islice((line.strip() for line in lines[1:] if line.strip()), 4))
        place = f"{cmake[2]}:{cmake[3]}: " if cmake[2] else f"{cmake[1]}: " if cmake[1] else ""
        error = f"{place}{cmake[4] or words or 'CMake Error'}"
    return Failure(first=error, output=lines, before=before)


def error_in(line: str) -> str | None:
    """``file:line: message`` when a line of a compiler's or linker's is an error."""
    for pattern in _ERRORS:
        match = pattern.fullmatch(line)
        if match:
            groups = match.groupdict()
            text = groups["text"].strip()
            return f"{groups['file']}:{groups['line']}: {text}" if groups.get("file") else text
    return None
