"""Targets taken out of a project: every command about them, or the file that is only about them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sm120.build.patches.language import Command
from sm120.build.patches.rules.gencode import Unknown
from sm120.build.patches.source import BuildFile, Edit
from sm120.build.patches.targets import Project, Target, references

_ABOUT = re.compile(r"target_\w+|python_add_library|add_library|pybind11_add_module|nanobind_add_module")
_INSTALL_WORDS = {"LIBRARY", "RUNTIME", "ARCHIVE", "DESTINATION", "EXPORT", "COMPONENT", "OPTIONAL", "PUBLIC_HEADER"}
_NAMED = {"function", "macro", "option"}


@dataclass(frozen=True, kw_only=True)
class Removal:
    edits: tuple[Edit, ...]
    dropped: tuple[BuildFile, ...]  # read no more, so not edited


def leave_out(project: Project, main: BuildFile, reasons: Mapping[str, str]) -> Removal:
    """``reasons``: target → why. Raises Unknown for a mention that cannot be taken out."""
    out = [target for target in project.targets if target.name in reasons]
    edits: list[Edit] = []
    dropped: list[BuildFile] = []
    for file in dict.fromkeys(target.file for target in out):
        include = _droppable(project, file, main, set(reasons))
        if include is not None:
            names = [target for target in out if target.file is file]
            edits.append(main.replace(include.start, include.end, _told(main, include, names, reasons)))
            dropped.append(file)
    for target in out:
        if target.file not in dropped:
            edits += _commands_out(project, target, reasons[target.name])
    return Removal(edits=tuple(edits), dropped=tuple(dropped))


def _told(file: BuildFile, command: Command, targets: list[Target], reasons: Mapping[str, str]) -> str:
    lines = [f'message(STATUS "sm120: {target.name} is left out: {reasons[target.name]}")' for target in targets]
    return f"{file.newline}{file.indent(command.start)}".join(lines)


def _droppable(project: Project, file: BuildFile, main: BuildFile, out: set[str]) -> Command | None:
    """The include() of a file that builds nothing else and makes nothing that another file uses."""
    if file is main or any(target.file is file and target.name not in out for target in project.targets):
        return None
    name = file.path.rpartition("/")[2]
    includes = [
        command for command in main.named("include") if command.values and command.values[0].endswith(f"/{name}")
    ]
    made = {filling.variable for filling in project.fillings if filling.file is file}
    made |= {command.values[0] for command in file.named(*_NAMED) if command.values}
    for command in file.named("fetchcontent_declare", "fetchcontent_populate", "fetchcontent_makeavailable"):
        made |= {f"{value}_{kind}_DIR" for value in command.values[:1] for kind in ("SOURCE", "BINARY")}
    made -= {filling.variable for filling in project.fillings if filling.file is not file}
    used = {
        word
        for other in project.files
        if other is not file
        for command in other.commands
        for word in (command.name, *(name for value in command.values for name in references(value)))
    }
    return includes[0] if len(includes) == 1 and not made & used else None


def _commands_out(project: Project, target: Target, reason: str) -> Iterator[Edit]:
    for file in project.files:
        for command in file.commands:
            if target.name not in command.values and not _in_expression(command, target.name):
                continue
            if command.name in {"if", "elseif"}:
                continue  # a condition may ask for a target that is not there
            if command is target.defined:
                yield file.replace(command.start, command.end, _told(file, command, [target], {target.name: reason}))
            else:
                yield _out(file, command, target.name)


def _in_expression(command: Command, name: str) -> bool:
    found = re.compile(rf"\$<TARGET_\w+:{re.escape(name)}[>,]")
    return any(found.search(value) for value in command.values)


def _out(file: BuildFile, command: Command, name: str) -> Edit:
    """Takes the target out of one command, or the command out."""
    values = command.values
    subjects = _subjects(command)
    if name not in subjects or values.count(name) != 1:
        reason = f"{command.name}() names {name} in a way that the rule does not know"
        raise Unknown(file.where(command.start), reason)
    if len(subjects) > 1:
        return file.remove_argument(command.arguments[values.index(name)])
    return file.remove(command.start, command.end)


def _subjects(command: Command) -> tuple[str, ...]:
    """What the command is about; without its subjects it says nothing."""
    values = command.values
    if command.name == "install" and values[0] == "TARGETS":
        return _until(values[1:], _INSTALL_WORDS)
    if command.name == "set_target_properties":
        return _until(values, {"PROPERTIES"})
    if command.name == "set_property" and values[0] == "TARGET":
        return _until(values[1:], {"PROPERTY", "APPEND", "APPEND_STRING"})
    if command.name == "add_dependencies":
        return values[:1] if command.values[0] in values[:1] and len(values) > 2 else values[1:]
    if command.name == "foreach":
        return values[1:]
    return values[:1] if _ABOUT.fullmatch(command.name) else ()


def _until(values: tuple[str, ...], words: set[str]) -> tuple[str, ...]:
    stop = next((index for index, value in enumerate(values) if value in words), len(values))
    return values[:stop]
