"""One class a kind of failure. Each says what is wrong, where it was read, and what to type next."""

from typing import ClassVar


class ToolkitError(Exception):
    """A failure that the toolkit can explain. ``exit_code`` is the task's exit code; see README.md for the list."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, remedy: str | None = None, where: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.where = where

    def as_json(self) -> dict[str, object]:
        return {
            "kind": type(self).__name__,
            "exit_code": self.exit_code,
            "message": self.message,
            "where": self.where,
            "remedy": self.remedy,
        }


class UsageError(ToolkitError):
    """A flag, a name or a file that the user gave is wrong."""

    exit_code = 2


class NothingChecked(ToolkitError):
    """The task ran to its end but checked nothing. Not run is not passed."""

    exit_code = 3


class PreflightError(ToolkitError):
    """The machine, its disk or its network does not let the task start or go on."""

    exit_code = 10


class PatchError(ToolkitError):
    exit_code = 11


class BuildError(ToolkitError):
    exit_code = 12


class BinaryError(ToolkitError):
    exit_code = 13


class NumericsError(ToolkitError):
    """A kernel returned wrong numbers, crashed or hung."""

    exit_code = 14


class ServerError(ToolkitError):
    exit_code = 15


class BenchmarkInvalid(ToolkitError):
    exit_code = 16


class GateError(ToolkitError):
    """The gate is missing or stale."""

    exit_code = 17


class Interrupted(ToolkitError):
    exit_code = 130


def nearest(word: str, known: list[str]) -> str:
    """A clause that offers the known names nearest to a mistyped one, or all of them when none is near."""
    import difflib

    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(sorted(known)) if known else "none is known"
