"""One build file and the edits of it. What no edit names stays as it is, byte for byte."""

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from sm120.build.patches import language
from sm120.build.patches.language import Argument, Command, Kind


@dataclass(frozen=True, kw_only=True, order=True)
class Edit:
    """Puts ``text`` in the place of the characters from ``start`` to ``end`` of the file ``path``."""

    path: str
    start: int
    end: int
    text: str


class BuildFile:
    """A CMake file of the tree. Anything that is not UTF-8 goes through as it is. Raises NotCMake."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.text = data.decode("utf-8", "surrogateescape")
        self._tokens = language.tokens(self.text)
        self.commands = language.commands(self.text, self._tokens)
        self._starts = [token.start for token in self._tokens]

    @cached_property
    def newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def line(self, place: int) -> int:
        return self.text.count("\n", 0, place) + 1

    def where(self, place: int) -> str:
        return f"{self.path}:{self.line(place)}"

    def named(self, *names: str) -> Iterator[Command]:
        return (command for command in self.commands if command.name in names)

    def indent(self, place: int) -> str:
        """The white space at the beginning of the line."""
        begin = self.text.rfind("\n", 0, place) + 1
        line = self.text[begin:place].removeprefix(language.BOM)
        return line[: len(line) - len(line.lstrip(" \t"))]

    def line_end(self, place: int) -> int:
        """Where the line that ``place`` ends on is over, comments passed: before its line break, or the file's end."""
        index = bisect.bisect_left(self._starts, place)
        while index < len(self._tokens) and self._tokens[index].kind is not Kind.NEWLINE:
            index += 1
        end = self._tokens[index].start if index < len(self._tokens) else len(self.text)
        return end - 1 if end > place and self.text[end - 1] == "\r" else end

    def replace(self, start: int, end: int, text: str) -> Edit:
        return Edit(path=self.path, start=start, end=end, text=text)

    def insert(self, place: int, text: str) -> Edit:
        return self.replace(place, place, text)

    def insert_after(self, command: Command, lines: Iterable[str]) -> Edit:
        """New lines below the command, indented as it is."""
        indent = self.indent(command.start)
        text = "".join(f"{self.newline}{indent}{line}" if line else self.newline for line in lines)
        return self.insert(self.line_end(command.end), text)

    def remove(self, start: int, end: int) -> Edit:
        """Takes the text out; with its lines, comments behind it included, when nothing else stands on them."""
        begin = self.text.rfind("\n", 0, start) + 1
        stop = self.line_end(end)
        rest = self.text[end:stop].strip()
        if not self.text[begin:start].strip() and (not rest or rest.startswith("#")):
            after = self.text.find("\n", stop) + 1 or len(self.text)
            return self.replace(begin, after, "")
        if not self.text[begin:start].strip():  # the first thing on its line: the indentation stays
            return self.replace(start, end + len(self.text[end:stop]) - len(self.text[end:stop].lstrip(" \t")), "")
        return self.replace(begin + len(self.text[begin:start].rstrip(" \t")), end, "")

    def remove_argument(self, argument: Argument) -> Edit:
        return self.remove(argument.start, argument.end)


def edited(text: str, edits: Iterable[Edit]) -> str:
    """ValueError when two edits meet: a rule is wrong then, not the tree."""
    made, place = [], 0
    for edit in sorted(edits):
        if edit.start < place:
            raise ValueError(f"{edit.path}: two edits at character {edit.start}")
        made += [text[place : edit.start], edit.text]
        place = edit.end
    return "".join([*made, text[place:]])
