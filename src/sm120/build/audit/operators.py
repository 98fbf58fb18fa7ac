"""The operators that libraries define, and those that a package's Python calls.

A library registers an operator by a schema, ``name(Tensor a) -> Tensor``, which lies whole in its constants; or by its
name alone, which may be the end of another text there, because linkers merge texts. So a name counts as defined when
any text ends with it: this errs towards defined.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm120.build.patches.rules.standin import MARK
from sm120.host.binaries import elf
from sm120.host.binaries.regular import open_regular

EXPORTED = re.compile(rb"__tvm_ffi_(\w+)")  # how FlashInfer's modules offer a function to Python

_CONSTANTS = (".rodata", ".lrodata", ".data")
_LIMIT = 2**28  # bytes of one section; libtorch_cpu has 50 MB
_BLOCK = 2**22
_LONGEST = 2**16  # bytes of one text
_NAME = re.compile(rb"(?:(?:[A-Za-z_]\w*)::)?([A-Za-z_]\w*)(?:\.\w+)?\Z")
_PLAIN = re.compile(rb"[A-Za-z_]\w{0,99}\Z")
_SHOWN = re.compile(rb"[\x20-\x7e]")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What the Python files of a package call as ``torch.ops.NAMESPACE.OPERATOR``."""

    files: Mapping[tuple[str, str], str] = field(default_factory=dict)  # namespace, operator → a file
    stood_in: frozenset[str] = frozenset()  # operators whose library was left out on purpose

    @property
    def names(self) -> frozenset[str]:
        return frozenset(operator for _, operator in self.files)


def defined(library: Path, wanted: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """The operators with a schema, and those of ``wanted`` that some text ends with. Raises BinaryError, OSError."""
    schemas, named = set[str](), set[str]()
    names = {name.encode() for name in wanted}
    for text in _texts(library):
        name = schema_name(text)
        if name is not None:
            schemas.add(name)
            continue
        plain = _PLAIN.search(text[-101:])
        if plain is not None:
            named |= {end.decode() for start in range(len(plain[0])) if (end := plain[0][start:]) in names}
    return frozenset(schemas), frozenset(named)


def schema_name(text: bytes) -> str | None:
    """The operator's name when the text is, or ends with, a schema of torch's."""
    opening, arrow = text.find(b"("), text.rfind(b"->")
    if opening <= 0 or arrow < opening or not text[:arrow].rstrip().endswith(b")"):
        return None
    found = _NAME.search(text[:opening][-200:])
    if found is None:
        return None
    before = text[:opening][: -len(found[0])]
    return None if _SHOWN.fullmatch(before[-1:]) else found[1].decode("ascii")  # words before it: a message


def _texts(library: Path) -> Iterator[bytes]:
    """What stands between zero bytes in the sections of constants; longer texts than any schema are cut."""
    with open_regular(library) as file:
        for section in elf.sections(library):
            if not section.name.startswith(_CONSTANTS):
                continue
            file.seek(section.offset)
            left, rest = min(section.size, _LIMIT), b""
            while left > 0 and (block := file.read(min(_BLOCK, left))):
                left -= len(block)
                *whole, rest = (rest + block).split(b"\0")
                yield from filter(None, whole)
                rest = rest[-_LONGEST:]


def calls(files: Iterable[tuple[str, str]]) -> Calls:
    """Path and text of Python files. What is no Python is passed over, as Python itself does until it is imported."""
    found: dict[tuple[str, str], str] = {}
    stood_in = set[str]()
    for path, text in files:
        if "torch" not in text:
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if MARK in text:
            stood_in |= _stood_in(tree)
            continue
        for node in ast.walk(tree):
            call = _call(node)
            if call is not None:
                found.setdefault(call, path)
    return Calls(files=found, stood_in=frozenset(stood_in))


def _call(node: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.Attribute(
            attr=operator,
            value=ast.Attribute(attr=space, value=ast.Attribute(attr="ops", value=ast.Name(id="torch"))),
        ) if not operator.startswith("__"):
            return space, operator
    return None


def _stood_in(tree: ast.Module) -> set[str]:
    """The names in the loop of a file that the patch sm120-only wrote."""
    found = set[str]()
    for node in tree.body:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            found |= {
                one.value for one in node.iter.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    return found
