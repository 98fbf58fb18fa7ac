"""The C++ standard of host and CUDA code, raised everywhere the tree names a lower one."""

import itertools
import re
from collections.abc import Iterator

from sm120.build.patches.language import Argument, Command
from sm120.build.patches.outcome import Context, State, Verdict, conflict, upstream
from sm120.build.patches.rules.parameters import Parameter, Parameters
from sm120.build.patches.source import BuildFile, Edit
from sm120.build.patches.tree import Tree

_ORDER = ("98", "03", "11", "14", "17", "20", "23", "26")
PARAMETERS = {"standard": Parameter(what="a number such as 20", right=lambda v: type(v) is int and str(v) in _ORDER)}
_DRAFTS = {"0x": "11", "1y": "14", "1z": "17", "2a": "20", "2b": "23", "2c": "26"}
_FLAG = re.compile(r"-std[= ](?:c|gnu)\+\+([0-9][0-9a-z])\b|\bcxx_std_([0-9]{2})\b|\bcuda_std_([0-9]{2})\b")
_VARIABLE = re.compile(r"(?:\w+_)?(?:CXX|CUDA)_STANDARD")  # also the properties CXX_STANDARD and CUDA_STANDARD
_NUMBER = re.compile(r"\"?([0-9]{2})\"?")
_TALK = {"message", "if", "elseif", "while", "option"}


def judge(tree: Tree, context: Context, parameters: Parameters) -> Verdict:  # noqa: ARG001 - the form of a rule
    wanted = str(parameters["standard"])
    edits: list[Edit] = []
    low: list[str] = []
    enough: list[str] = []
    for file in tree.build_files():
        for start, end in _places(file):
            found = _DRAFTS.get(file.text[start:end], file.text[start:end])
            if found in _ORDER and _ORDER.index(found) < _ORDER.index(wanted):
                edits.append(file.replace(start, end, wanted))
                low.append(file.where(start))
            else:
                enough.append(file.where(start))
    if edits:
        reason = f"this torch's headers need C++{wanted}; the tree names a lower standard"
        return Verdict(state=State.PENDING, reason=reason, where=tuple(low), edits=tuple(edits))
    if enough:
        return upstream(f"the tree says C++{wanted} or newer everywhere", *enough)
    return conflict("the tree names no C++ standard that could be raised", tree.main.where(0))


def _places(file: BuildFile) -> Iterator[tuple[int, int]]:
    """Where the two characters of a standard stand."""
    for command in file.commands:
        if command.name in _TALK:
            continue
        for argument in command.arguments:
            for found in _FLAG.finditer(argument.token.text):
                begin, end = found.span(found.lastindex or 0)
                yield argument.start + begin, argument.start + end
        yield from _numbers(command)


def _numbers(command: Command) -> Iterator[tuple[int, int]]:
    """The values of set(… CXX_STANDARD 17) and of PROPERTIES CXX_STANDARD 17."""
    if command.name not in {"set", "set_target_properties", "set_property"}:
        return
    pairs: list[tuple[Argument, Argument]] = list(itertools.pairwise(command.arguments))
    for name, value in pairs[:1] if command.name == "set" else pairs:
        number = _NUMBER.fullmatch(value.token.text)
        if _VARIABLE.fullmatch(name.value) and number:
            yield value.start + number.start(1), value.start + number.end(1)
