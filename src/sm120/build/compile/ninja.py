"""What ninja says while it works, and what it keeps of it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_COUNTED = re.compile(r"\[(\d{1,9})/(\d{1,9})\] (.*)")
_COMMAND = re.compile(r"Run Build Command\(s\): (?:\S*/)?(?:ninja|ninja-build|samu)\b(.*)")
_JOBS = re.compile(r"(?:^|\s)(?:-j|--jobs)[\s=]*(\d+)")
_OUTPUT = re.compile(r"(?:^|\s)-o (\S+)")
# A file from outside of the project has its whole path there, as those of the dependencies in deps/ have.
_OBJECT_OF = re.compile(r"(?:.*/)?CMakeFiles/[^/]+\.dir/(?:.*/(?=deps/))?(.+)")
_HEADER = re.compile(r"# ninja log v([567])")


@dataclass(frozen=True)
class Counted:
    """``[done/total] what``: told when a step has ended."""

    done: int
    total: int
    what: str  # the command's first 8 kB


def counted(line: str) -> Counted | None:
    match = _COUNTED.match(line)
    return Counted(int(match[1]), int(match[2]), match[3]) if match else None


def jobs_of(line: str) -> int | None:
    """How many jobs ninja runs, from the line in which CMake says how it starts it: the last word counts."""
    match = _COMMAND.match(line)
    numbers = _JOBS.findall(match[1]) if match else []
    return int(numbers[-1]) if numbers else None


def output_of(command: str) -> str | None:
    """What a compiler's or linker's command makes."""
    found = _OUTPUT.findall(command)
    return found[-1].strip("\"'") if found else None


def readable(output: str) -> str:
    """``csrc/a.cu`` for ``CMakeFiles/ops.dir/csrc/a.cu.o``; any other output as it is."""
    match = _OBJECT_OF.fullmatch(output)
    return (match[1] if match else output).removesuffix(".o")


def durations(lines: Iterable[str]) -> dict[str, float]:
    """Seconds by output, from ``.ninja_log``: the last time that each was made. Damaged lines are left out.

    A step with several outputs counts once, by its first.
    """
    rows = iter(lines)
    if not _HEADER.match(next(rows, "")):
        return {}
    found: dict[str, tuple[int, int, str]] = {}
    for row in rows:
        fields = row.rstrip("\n").split("\t")
        if len(fields) == 5 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]) >= int(fields[0]):
            found[fields[3]] = (int(fields[0]), int(fields[1]), fields[4])
    steps: dict[tuple[int, int, str], str] = {}
    for output, step in found.items():
        steps.setdefault(step, output)
    return {output: (end - start) / 1000 for (start, end, _), output in steps.items()}


def slowest(lines: Iterable[str], most: int = 10) -> tuple[tuple[str, float], ...]:
    found = durations(lines)
    return tuple(sorted(((readable(name), seconds) for name, seconds in found.items()), key=lambda one: -one[1])[:most])
