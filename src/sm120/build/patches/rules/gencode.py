"""The ``-gencode`` flags of a project: where they stand, which target gets them, and their reduction."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sm120.build.patches.language import Argument, Command
from sm120.build.patches.source import BuildFile, Edit
from sm120.build.patches.targets import Project, Target, within

_CODE = r"(?:sm|compute|lto)_[0-9]+[a-z]?"
_ARCH = rf"arch=compute_([0-9]+[a-z]?),code=\[?{_CODE}(?:,{_CODE})*\]?"
_ONE = re.compile(rf"(?:-gencode|--generate-code)[= ]{_ARCH}")
_SECOND = re.compile(_ARCH)
_FIRST = {"-gencode", "--generate-code"}
_ANY = re.compile(r"-gencode|--generate-code")
_OPTIONS = {"target_compile_options", "add_compile_options"}
_PROPERTIES = {"set_target_properties", "set_property"}
EVERY = "every target"  # the key of flags that no single variable or target owns


class Unknown(Exception):
    """Flags in a form that the rule does not know. ``where`` is file:line."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(reason)
        self.where = where
        self.reason = reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    key: str  # the variable that is filled, or the target whose options these are
    file: BuildFile
    command: Command
    arguments: tuple[Argument, ...]  # one, or -gencode and what belongs to it
    arch: str  # "90a"

    @property
    def where(self) -> str:
        return self.file.where(self.arguments[0].start)


def family(arch: str) -> int:
    """10 for 100a, 12 for 120f and 121a."""
    return int(re.sub(r"[a-z]$", "", arch)) // 10


def flag(arch: str) -> str:
    return f'"-gencode=arch=compute_{arch},code=sm_{arch}"'


class Gencodes:
    """Raises Unknown when some flag cannot be understood."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self.sites = tuple(_sites(project))

    @cached_property
    def users(self) -> dict[str, list[Target]]:
        """Which targets get the flags of a key."""
        found: dict[str, list[Target]] = {}
        for target in self._project.targets:
            for key in self.keys(target):
                found.setdefault(key, []).append(target)
        return found

    def keys(self, target: Target) -> frozenset[str]:
        commands = self._project.about(target.name, *_OPTIONS, "set_target_properties")
        variables, _ = self._project.closure(argument for _, command in commands for argument in command.arguments)
        return variables | {EVERY, f"options of {target.name}"}

    def of(self, target: Target) -> list[str]:
        """The architectures that the target may be compiled for."""
        keys = self.keys(target)
        return list(dict.fromkeys(site.arch for site in self.sites if site.key in keys))

    def reduced(self, asked: Sequence[str], kept: set[str]) -> Iterator[Edit]:
        """What leaves the targets ``kept`` with the architectures asked for, each once, whatever the conditions."""
        for key in dict.fromkeys(site.key for site in self.sites):
            sites = [site for site in self.sites if site.key == key]
            users = self.users.get(key, [])
            if users and not any(user.name in kept for user in users):
                yield from _removals(sites)
                continue
            wanted = [user for user in users if user.name in kept]
            sure = [site for site in sites if all(_reached(site.file, site.command, user) for user in wanted)]
            if len(sure) == len(sites) and [site.arch for site in sites] == list(asked):
                continue
            if sure:
                home = sure[0]
                yield _replacement(home, asked)
                yield from _removals(site for site in sites if site is not home)
            else:
                yield self._added(key, sites, wanted, asked)
                yield from _removals(sites)

    def _added(self, key: str, sites: list[Site], users: list[Target], asked: Sequence[str]) -> Edit:
        """All flags of the key stand under a condition: they go where the variable is first filled."""
        for filling in self._project.fillings:
            at_hand = filling.variable == key and filling.values
            if at_hand and all(_reached(filling.file, filling.command, user) for user in users):
                last = filling.values[-1]
                indent = filling.file.newline + filling.file.indent(last.start)
                return filling.file.insert(last.end, "".join(f"{indent}{flag(arch)}" for arch in asked))
        raise Unknown(sites[0].where, f"{key} gets its architectures under conditions only")


def _reached(file: BuildFile, command: Command, user: Target) -> bool:
    return within(command, user.defined) if file is user.file else not command.inside


def _sites(project: Project) -> Iterator[Site]:
    for file, command in project.commands("set", "list", *_OPTIONS, *_PROPERTIES):
        words = command.arguments
        skip = False
        for index, argument in enumerate(words):
            if skip or not _ANY.search(argument.value):
                skip = False
                continue
            following = words[index + 1] if index + 1 < len(words) else None
            match = _ONE.fullmatch(argument.value)
            parts: tuple[Argument, ...] = (argument,)
            if match is None and argument.value in _FIRST and following is not None:
                match = _SECOND.fullmatch(following.value)
                parts, skip = (argument, following), True
            if match is None or command.name in _PROPERTIES:
                raise Unknown(file.where(argument.start), f"a -gencode in an unknown form: {argument.value[:80]}")
            yield Site(key=_key(command), file=file, command=command, arguments=parts, arch=match[1])


def _key(command: Command) -> str:
    if command.name in _OPTIONS:
        return EVERY if command.name == "add_compile_options" else f"options of {command.values[0]}"
    variable = command.values[0] if command.name == "set" else command.values[1]
    return EVERY if variable in {"CMAKE_CUDA_FLAGS", "CUDA_NVCC_FLAGS"} else variable


def _replacement(home: Site, asked: Sequence[str]) -> Edit:
    start, end = home.arguments[0].start, home.arguments[-1].end
    alone = not home.file.text[home.file.text.rfind("\n", 0, start) + 1 : start].strip()
    between = home.file.newline + home.file.indent(start) if alone else " "
    return home.file.replace(start, end, between.join(flag(arch) for arch in asked))


def _removals(sites: Iterable[Site]) -> Iterator[Edit]:
    """Takes the flags out, and a list(APPEND …) that would append nothing with them."""
    by_command: dict[Command, list[Site]] = {}
    for site in sites:
        by_command.setdefault(site.command, []).append(site)
    for command, some in by_command.items():
        file = some[0].file
        if command.name == "list" and sum(len(site.arguments) for site in some) == len(command.arguments) - 2:
            yield file.remove(command.start, command.end)
            continue
        for site in some:
            yield file.remove(site.arguments[0].start, site.arguments[-1].end)
