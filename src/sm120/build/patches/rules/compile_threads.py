"""How many threads each nvcc starts, from the plan: they multiply with the jobs, and so does the memory."""

import itertools
import re

from sm120.build.patches.language import Argument
from sm120.build.patches.outcome import Context, State, Verdict, not_needed, upstream
from sm120.build.patches.rules.parameters import Parameter, Parameters, is_text
from sm120.build.patches.source import BuildFile, Edit
from sm120.build.patches.tree import Tree

PARAMETERS = {"option": Parameter(what="the name of a CMake variable", right=is_text)}
_FLAG = re.compile(r"--threads[= ]([0-9]+)\b")
_NUMBER = re.compile(r"\"?([0-9]+)\"?")


def judge(tree: Tree, context: Context, parameters: Parameters) -> Verdict:
    wanted = str(context.compile_threads)
    places = [
        (file, start, end)
        for file in tree.build_files()
        for start, end in [*_option(file, str(parameters["option"])), *_literal(file)]
    ]
    edits: list[Edit] = []
    where: list[str] = []
    for file, start, end in places:
        if file.text[start:end] != wanted:
            edits.append(file.replace(start, end, wanted))
            where.append(file.where(start))
    if edits:
        reason = f"nvcc --threads {wanted}, as planned, instead of {_others(places, wanted)}"
        return Verdict(state=State.PENDING, reason=reason, where=tuple(where), edits=tuple(edits))
    if places:
        return upstream(f"nvcc --threads is {wanted} already", *(file.where(start) for file, start, _ in places))
    return not_needed("the tree asks nvcc for no threads: each works on one file at a time")


def _others(places: list[tuple[BuildFile, int, int]], wanted: str) -> str:
    return ", ".join(sorted({file.text[start:end] for file, start, end in places} - {wanted}))


def _option(file: BuildFile, name: str) -> list[tuple[int, int]]:
    """The default of set(NAME n CACHE …)."""
    found = []
    for command in file.named("set"):
        if command.values[:1] == (name,) and "CACHE" in command.values:
            number = _NUMBER.fullmatch(command.arguments[1].token.text)
            if number:
                found.append(_span(command.arguments[1], number))
    return found


def _literal(file: BuildFile) -> list[tuple[int, int]]:
    """The number in --threads=32, written so or as two arguments."""
    found = []
    for command in file.named("set", "list", "target_compile_options", "add_compile_options", "string"):
        for argument in command.arguments:
            found += [_span(argument, match) for match in _FLAG.finditer(argument.token.text)]
        for argument, following in itertools.pairwise(command.arguments):
            number = _NUMBER.fullmatch(following.token.text)
            if argument.value == "--threads" and number:
                found.append(_span(following, number))
    return found


def _span(argument: Argument, match: re.Match[str]) -> tuple[int, int]:
    """Where the number of the match stands in the file."""
    return argument.start + match.start(1), argument.start + match.end(1)
