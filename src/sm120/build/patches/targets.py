"""Which libraries the build files define, and which variables each is made of."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sm120.build.patches.language import Argument, Command
from sm120.build.patches.source import BuildFile

_DEFINE = {"python_add_library", "add_library", "pybind11_add_module", "nanobind_add_module"}
_NO_CODE = {"IMPORTED", "ALIAS", "INTERFACE"}
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_SET_ENDS = {"CACHE", "PARENT_SCOPE"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    name: str
    file: BuildFile
    defined: Command


@dataclass(frozen=True, kw_only=True, eq=False)
class Filling:
    """A place that puts values into a variable: set(V …) or list(APPEND V …)."""

    variable: str
    file: BuildFile
    command: Command
    values: tuple[Argument, ...]


class Project:
    """The build files of a tree, looked at together."""

    def __init__(self, files: Sequence[BuildFile]) -> None:
        self.files = tuple(files)

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        return tuple(
            Target(name=command.values[0], file=file, defined=command)
            for file, command in self.commands(*_DEFINE)
            if command.arguments and not _NO_CODE & set(command.values)
        )

    @cached_property
    def fillings(self) -> tuple[Filling, ...]:
        return tuple(_fillings(self.commands("set", "list")))

    def commands(self, *names: str) -> Iterator[tuple[BuildFile, Command]]:
        return ((file, command) for file in self.files for command in file.named(*names))

    def closure(self, arguments: Iterable[Argument]) -> tuple[frozenset[str], tuple[Argument, ...]]:
        """The variables that the arguments refer to, through other variables too, and all arguments met on the way."""
        seen: set[str] = set()
        met: list[Argument] = list(arguments)
        todo = [name for argument in met for name in references(argument.value)]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            values = [value for filling in self.fillings if filling.variable == name for value in filling.values]
            met += values
            todo += [other for value in values for other in references(value.value)]
        return frozenset(seen), tuple(met)

    def about(self, target: str, *names: str) -> Iterator[tuple[BuildFile, Command]]:
        """The commands of these names whose subject is the target."""
        return (
            (file, command)
            for file, command in self.commands(*names)
            if command.arguments and command.values[0] == target
        )


def references(text: str) -> list[str]:
    return _REFERENCE.findall(text)


def _fillings(commands: Iterable[tuple[BuildFile, Command]]) -> Iterator[Filling]:
    for file, command in commands:
        values = command.values
        if command.name == "set" and len(values) > 1:
            stop = next((i for i, value in enumerate(values) if value in _SET_ENDS), len(values))
            yield Filling(variable=values[0], file=file, command=command, values=command.arguments[1:stop])
        elif command.name == "list" and len(values) > 1 and values[0].upper() in {"APPEND", "PREPEND"}:
            yield Filling(variable=values[1], file=file, command=command, values=command.arguments[2:])


def within(outer: Command, inner: Command) -> bool:
    """Whether ``outer`` is reached whenever ``inner`` is: it stands in no block and branch that ``inner`` is not in."""
    return outer.inside == inner.inside[: len(outer.inside)]
