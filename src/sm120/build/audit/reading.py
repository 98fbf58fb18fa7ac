"""The facts of one library: its ELF file, its operators, its GPU code."""

import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm120 import errors
from sm120.build.audit import cuobjdump, operators
from sm120.build.audit.cuobjdump import Tools
from sm120.build.audit.model import Arch, Capability, Code, LibraryFacts, Runs
from sm120.build.audit.rules import fp4_products, is_loaded, runs
from sm120.host.binaries import elf, fatbin, loader
from sm120.host.binaries.symbols import TORCH

_WANTED = re.compile(TORCH.pattern + b"|" + operators.EXPORTED.pattern)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an audit is asked to find out."""

    tools: Tools
    capabilities: tuple[Capability, ...]
    sass: bool | str  # True: of every library; "fp4": of those that bind an FP4 product; False: of none
    paths: tuple[str, ...] = ()  # of all libraries that are audited together
    wanted: frozenset[str] = frozenset()  # operators that Python calls
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, kw_only=True)
class Read:
    facts: LibraryFacts
    header: elf.Elf | None = None  # None: it could not be read


def read(path: Path, start: LibraryFacts, request: Request) -> Read:
    """Fills in what the file says. Never raises for what it holds: that is its ``problem``."""
    try:
        header = elf.read(path, _WANTED)
        schemas, named = operators.defined(path, request.wanted)
    except errors.BinaryError as error:
        return Read(facts=replace(start, problem=error.message))
    except OSError as error:
        return Read(facts=replace(start, problem=f"cannot be read: {error.strerror or error}"))
    exported = {found[1].decode() for name in header.exported if (found := operators.EXPORTED.fullmatch(name))}
    facts = replace(
        start,
        machine=header.machine,
        needed=header.needed,
        cuda_major=next((major for name in header.needed if (major := loader.cuda_major(name))), None),
        operators=tuple(sorted(schemas | exported)),
        named=named,
    )
    try:
        facts = _code(path, facts, request)
    except cuobjdump.Failed as error:
        tail = tuple(line.replace(str(path), facts.path) for line in error.tail)
        facts = replace(facts, problem=str(error), tail=tail)
    return Read(facts=facts, header=header)


def _code(path: Path, facts: LibraryFacts, request: Request) -> LibraryFacts:
    listed = cuobjdump.listing(request.tools, path, request.stop)
    pieces = _pieces(path, listed)
    sizes: Counter[tuple[Arch, str]] = Counter()
    units: dict[int, set[tuple[Arch, str]]] = {}
    for one, piece in zip(listed, pieces or (), strict=False):
        sizes[one] += piece.size
        units.setdefault(piece.unit, set()).add(one)
    codes = tuple(
        Code(arch=arch, kind=kind, count=count, size=sizes[arch, kind] if pieces is not None else None)
        for (arch, kind), count in sorted(Counter(listed).items())
    )
    facts = replace(
        facts,
        codes=codes,
        units=Counter(tuple(sorted(unit)) for unit in units.values()) if pieces is not None else None,
    )
    archs = _to_disassemble(facts, request)
    return facts if archs is None else replace(facts, omma=_omma(path, archs, request))


def _pieces(path: Path, listed: Sequence[tuple[Arch, str]]) -> tuple[fatbin.Piece, ...] | None:
    """As they lie in the file; None where that does not agree with what cuobjdump lists."""
    try:
        pieces = fatbin.pieces(path)
    except errors.BinaryError:
        return None
    same = [(arch.number, kind) for arch, kind in listed] == [(piece.number, piece.kind) for piece in pieces]
    return pieces if same else None


def _to_disassemble(facts: LibraryFacts, request: Request) -> tuple[Arch, ...] | None:
    """The architectures of the cubins that an asked device with OMMA would run; None: nobody is to look."""
    if not request.sass or (request.sass == "fp4" and not fp4_products(facts.operators)):
        return None
    devices = [one for one in request.capabilities if one[0] == 12 and is_loaded(facts.path, request.paths, one)]
    if not devices or not facts.codes:
        return None
    return tuple(
        code.arch
        for code in facts.codes
        if code.kind == "cubin" and any(runs(code.arch, code.kind, device) is not Runs.NO for device in devices)
    )


def _omma(path: Path, archs: Sequence[Arch], request: Request) -> dict[Arch, int]:
    return cuobjdump.count_omma(request.tools, path, archs, request.stop) if archs else {}
