"""The facts of one library: its ELF file, its operators, its GPU code."""

import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm120 import errors, files
from sm120.build.audit import cuobjdump, operators
from sm120.build.audit.cuobjdump import Tools
from sm120.build.audit.model import Arch, Capability, Code, LibraryFacts, Runs
from sm120.build.audit.rules import fp4_products, is_loaded, runs
from sm120.host.binaries import elf, fatbin, loader
from sm120.host.binaries.symbols import TORCH

_WANTED = re.compile(TORCH.pattern + b"|" + operators.EXPORTED.pattern)


_TEMPORARY = re.compile(r"[^' ]*/sm120-audit-\w+/part\.fatbin")
_PART = 2**25  # bytes; cuobjdump takes up to 25 times that in memory


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an audit is asked to find out."""

    tools: Tools
    capabilities: tuple[Capability, ...]
    sass: bool | str  # True: of every library; "fp4": of those that bind an FP4 product; False: of none
    paths: tuple[str, ...] = ()  # of all libraries that are audited together
    wanted: frozenset[str] = frozenset()  # operators that Python calls
    scratch: Path | None = None  # for what is cut out of a library; None: where temporary files go
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
        tail = tuple(_TEMPORARY.sub(facts.path, line.replace(str(path), facts.path)) for line in error.tail)
        facts = replace(facts, problem=str(error), tail=tail)
    return Read(facts=facts, header=header)


def _code(path: Path, facts: LibraryFacts, request: Request) -> LibraryFacts:
    pieces, listed = _listed(path, request)
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
    return facts if archs is None else replace(facts, omma=_omma(path, archs, pieces, request))


def _listed(path: Path, request: Request) -> tuple[tuple[fatbin.Piece, ...] | None, list[tuple[Arch, str]]]:
    """The pieces, and what each is for; None for the pieces where cuobjdump does not see them as we do."""
    try:
        pieces = fatbin.pieces(path)
    except errors.BinaryError:
        pieces = ()
    listed = [
        one for part in _parts(path, pieces, request) for one in cuobjdump.listing(request.tools, part, request.stop)
    ]
    if pieces and [(arch.number, kind) for arch, kind in listed] == [(one.number, one.kind) for one in pieces]:
        return pieces, listed
    return None, list(cuobjdump.listing(request.tools, path, request.stop))


def _parts(path: Path, pieces: Sequence[fatbin.Piece], request: Request) -> Iterator[Path]:
    """Small files with these pieces, one at a time."""
    with tempfile.TemporaryDirectory(prefix="sm120-audit-", dir=request.scratch) as folder:
        part = Path(folder, "part.fatbin")
        for batch in fatbin.batches(pieces, _PART):
            with files.writing(part):
                fatbin.write(path, batch, part)
            yield part


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


def _omma(
    path: Path, archs: Sequence[Arch], pieces: Sequence[fatbin.Piece] | None, request: Request
) -> dict[Arch, int]:
    numbers = {arch.number for arch in archs}
    wanted = [piece for piece in pieces or () if piece.kind == "cubin" and piece.number in numbers]
    counted: Counter[Arch] = Counter()
    for part in _parts(path, wanted, request) if pieces is not None else [path]:
        for number in sorted(numbers):
            found = cuobjdump.count_omma(request.tools, part, number, request.stop)
            counted.update({arch: count for arch, count in found.items() if arch in archs})
    unseen = [arch for arch in archs if arch not in counted]
    if unseen:
        raise cuobjdump.Failed(f"cuobjdump lists code for sm_{unseen[0]} and disassembles none")
    return dict(counted)
