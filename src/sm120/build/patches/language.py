"""The CMake language, read without loss: the tokens of a file, joined, are its very text.

After cmake-language(7) and CMake's own scanner (cmListFileLexer): bracket arguments and comments, quoted arguments with
continued lines, unquoted arguments in the old form (``a"b c"``, ``$(VAR)``), nested parentheses.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

_UNQUOTED = r'(?:[^ \0\t\r\n()#"\[=\\]|\\[^\0\n])'
_MAKE = r"\$\([A-Za-z0-9_]*\)"
_LEGACY = rf'(?:{_MAKE}|{_UNQUOTED}|"(?:{_MAKE}|{_UNQUOTED}|[ \t\[=])*+")'
# In this order: a bracket wins over a line comment and over an unquoted argument that would be longer.
_TOKEN = re.compile(
    rf"""(?P<bracket>\#?\[(?P<equals>=*)\[)
    | (?P<comment>\#[^\0\n]*+)
    | (?P<newline>\n)
    | (?P<space>[\ \t\r]++)
    | (?P<open>\()
    | (?P<close>\))
    | (?P<unquoted>(?:{_MAKE}|{_UNQUOTED}|=|\[=*{_LEGACY})(?:{_LEGACY}|[\[=])*+|\[)
    | (?P<quoted>"(?:[^\\\0"]|\\[^\0])*+")""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ESCAPE = re.compile(r"\\(?:(\n)|([trn])|(;)|([^A-Za-z0-9;\n]))")
_CONTROL = {"t": "\t", "r": "\r", "n": "\n"}
_OPENS = {name: f"end{name}" for name in ("if", "foreach", "while", "function", "macro", "block")}
_CLOSES = {end: begin for begin, end in _OPENS.items()}
BOM = "\ufeff"


class Kind(Enum):
    BOM = "byte order mark"
    SPACE = "space"
    NEWLINE = "newline"
    COMMENT = "comment"
    BRACKET_COMMENT = "bracket comment"
    OPEN = "("
    CLOSE = ")"
    UNQUOTED = "unquoted"
    QUOTED = "quoted"
    BRACKET = "bracket argument"


_TRIVIA = {Kind.BOM, Kind.SPACE, Kind.NEWLINE, Kind.COMMENT, Kind.BRACKET_COMMENT}
_KINDS = {
    "comment": Kind.COMMENT,
    "newline": Kind.NEWLINE,
    "space": Kind.SPACE,
    "open": Kind.OPEN,
    "close": Kind.CLOSE,
    "unquoted": Kind.UNQUOTED,
    "quoted": Kind.QUOTED,
}


class NotCMake(ValueError):
    """The text is not CMake. ``line`` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class Token:
    kind: Kind
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument; a nested parenthesis is an argument of its own, as it is for CMake."""

    token: Token

    @property
    def start(self) -> int:
        return self.token.start

    @property
    def end(self) -> int:
        return self.token.end

    @property
    def value(self) -> str:
        """The text that CMake sees, variable references as written."""
        text = self.token.text
        if self.token.kind is Kind.BRACKET:
            width = text.index("[", 1) + 1
            return text[width:-width].removeprefix("\n")
        if self.token.kind is Kind.QUOTED:
            text = text[1:-1]
        return _ESCAPE.sub(_unescape, text)


def _unescape(found: re.Match[str]) -> str:
    continued, control, semicolon, other = found.groups()
    if continued:
        return ""
    if control:
        return _CONTROL[control]
    return r"\;" if semicolon else str(other)


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of a block that a command stands in: the block's opening command, and which branch (if, elseif, else)."""

    opened_by: "Command"
    head: "Command"  # the command whose condition rules this branch


@dataclass(frozen=True, slots=True, eq=False)
class Command:
    name: str  # lower case: CMake does not mind
    arguments: tuple[Argument, ...]
    start: int
    end: int  # behind the closing parenthesis
    line: int  # from 1
    inside: tuple[Branch, ...] = field(repr=False)  # outermost first

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(argument.value for argument in self.arguments)


def tokens(text: str) -> list[Token]:
    """Every character of ``text`` in its token. Raises NotCMake."""
    found: list[Token] = []
    place = 0
    if text.startswith(BOM):
        found.append(Token(Kind.BOM, BOM, 0))
        place = 1
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise NotCMake(text.count("\n", 0, place) + 1, _broken(text, place))
        kind = str(match.lastgroup) if match["bracket"] is None else "bracket"
        token = _bracket(text, match) if kind == "bracket" else Token(_KINDS[kind], match[0], place)
        found.append(token)
        place = token.end
    return found


def _bracket(text: str, match: re.Match[str]) -> Token:
    closing = text.find(f"]{match['equals']}]", match.end())
    if closing < 0:
        raise NotCMake(text.count("\n", 0, match.start()) + 1, f"{match[0]} is never closed")
    end = closing + len(match["equals"]) + 2
    kind = Kind.BRACKET_COMMENT if match[0].startswith("#") else Kind.BRACKET
    return Token(kind, text[match.start() : end], match.start())


def _broken(text: str, place: int) -> str:
    return 'a quoted argument is never closed: "' if text[place] == '"' else f"unexpected character {text[place]!r}"


def commands(text: str, found: list[Token]) -> tuple[Command, ...]:
    """The invocations in the order of the text, each with the blocks it stands in. Raises NotCMake."""
    made: list[Command] = []
    blocks: list[Branch] = []
    for name, arguments, end, line in _invocations(text, found):
        inside = tuple(blocks)
        lower = name.text.lower()
        if lower in _CLOSES or lower in {"elseif", "else"}:
            _expect_open(blocks, lower, line)
            inside = tuple(blocks[:-1])
        command = Command(lower, tuple(arguments), name.start, end, line, inside)
        made.append(command)
        if lower in _OPENS:
            blocks.append(Branch(command, command))
        elif lower in _CLOSES:
            blocks.pop()
        elif lower in {"elseif", "else"}:
            blocks[-1] = Branch(blocks[-1].opened_by, command)
    if blocks:
        opened = blocks[-1].opened_by
        raise NotCMake(opened.line, f"{opened.name}() is never closed")
    return tuple(made)


def _expect_open(blocks: list[Branch], name: str, line: int) -> None:
    wanted = _CLOSES.get(name, "if")
    if not blocks or blocks[-1].opened_by.name != wanted:
        raise NotCMake(line, f"{name}() without an open {wanted}()")


def _invocations(text: str, found: list[Token]) -> Iterator[tuple[Token, list[Argument], int, int]]:
    """Name, arguments, end and line of each command."""
    line, position, fresh = 1, 0, True
    while position < len(found):
        token = found[position]
        if token.kind in _TRIVIA:
            if token.kind in {Kind.NEWLINE, Kind.BRACKET_COMMENT}:
                fresh = token.kind is Kind.NEWLINE
            line += token.text.count("\n")
            position += 1
            continue
        if token.kind is not Kind.UNQUOTED or not _NAME.fullmatch(token.text):
            raise NotCMake(line, f"expected a command, found {token.text[:40]!r}")
        if not fresh:
            raise NotCMake(line, f"expected a new line before {token.text}")
        opening = position + 1
        while opening < len(found) and found[opening].kind is Kind.SPACE:
            opening += 1
        if opening == len(found) or found[opening].kind is not Kind.OPEN:
            raise NotCMake(line, f"expected ( after {token.text}")
        arguments, closing = _arguments(found, opening, line, token.text)
        yield token, arguments, found[closing].end, line
        line += text.count("\n", token.start, found[closing].end)
        position, fresh = closing + 1, False


def _arguments(found: list[Token], opening: int, line: int, name: str) -> tuple[list[Argument], int]:
    """The arguments, and the index of the closing parenthesis."""
    made: list[Argument] = []
    depth = 1
    for index in range(opening + 1, len(found)):
        token = found[index]
        if token.kind in _TRIVIA:
            continue
        depth += {Kind.OPEN: 1, Kind.CLOSE: -1}.get(token.kind, 0)
        if depth == 0:
            return made, index
        made.append(Argument(token))
    raise NotCMake(line, f"the parenthesis of {name}( is never closed")
