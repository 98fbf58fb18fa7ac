"""What is wrong with libraries, and what to do about it. Pure: facts and verdicts in, findings out."""

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sm120.build.audit.model import (
    Capability,
    Finding,
    Fp4,
    Level,
    LibraryFacts,
    Operators,
    Runs,
    Verdict,
    said,
)
from sm120.build.audit.operators import Calls
from sm120.build.audit.rules import fp4_products, holdings
from sm120.host.binaries.loader import cuda_major

_BUILD = "scripts/inv build-kernels builds SGLang's for this stack"
_SHOWN = 6  # names of a list in one sentence
Verdicts = Mapping[tuple[str, Capability], Verdict]


def operators(libraries: Sequence[LibraryFacts], calls: Calls) -> Operators:
    """A namespace is the package's own when its libraries define one of the operators that it calls there."""
    schemas = {name for library in libraries for name in library.operators}
    known = schemas | {name for library in libraries for name in library.named}
    own = {space for space, name in calls.files if name in schemas}
    called = {name: path for (space, name), path in calls.files.items() if space in own}
    return Operators(
        missing={
            name: path for name, path in sorted(called.items()) if name not in known and name not in calls.stood_in
        },
        left_out=tuple(sorted(calls.stood_in - schemas)),
        extra=tuple(sorted(schemas - set(called))) if own else (),
    )


def findings(
    libraries: Sequence[LibraryFacts],
    verdicts: Verdicts,
    capabilities: Sequence[Capability],
    *,
    cuda: int | None,
    compared: str | None,
    operators: Operators,
) -> tuple[Finding, ...]:
    """The worst first. ``cuda``: major version of the stack's. ``compared``: why torch's symbols were not, if so."""
    judged = [library for library in libraries if library.judged]
    found: list[Finding] = []
    for package in dict.fromkeys(library.package for library in judged):  # an environment has several
        mine = _distinct(library for library in judged if library.package == package)
        found += _broken(mine)
        whole = [library for library in mine if library.problem is None]
        found += [*_cuda(package, whole, cuda), *_torch(package, whole), *_links(whole, cuda)]
        for capability in capabilities:
            found += _of_capability(package, whole, verdicts, capability)
    found += _of_operators(operators)
    if compared is not None and any(library.codes for library in judged):
        found.append(
            Finding(level=Level.NOTE, library=None, text="torch's symbols were not compared", evidence=compared)
        )
    order = list(Level)
    return tuple(sorted(found, key=lambda finding: order.index(finding.level)))


def _distinct(libraries: Iterable[LibraryFacts]) -> list[LibraryFacts]:
    """Of files with the same bytes the first: wheels hold no links, so one library comes under three names."""
    return list({library.sha256 or library.path: library for library in reversed(list(libraries))}.values())[::-1]


def _broken(mine: Sequence[LibraryFacts]) -> Iterator[Finding]:
    for library in mine:
        if library.problem is not None:
            yield Finding(
                level=Level.REFUSE,
                library=library.path,
                text=f"{library.path} cannot be judged: {library.problem}",
                evidence=" / ".join(library.tail) or library.problem,
                remedy="install, download or build it again",
            )


def _cuda(package: str | None, mine: Sequence[LibraryFacts], cuda: int | None) -> Iterator[Finding]:
    other = [one for one in mine if cuda is not None and one.cuda_major not in {None, cuda}]
    if other:
        yield Finding(
            level=Level.REFUSE,
            library=other[0].path if len(other) == 1 else None,
            text=f"{_subject(package, other)} for CUDA {other[0].cuda_major}, and the stack has CUDA {cuda}",
            evidence="; ".join(f"{one.path} needs {_some(_with_major(one))}" for one in other),
            remedy=f"take a build for CUDA {cuda}; {_BUILD}",
        )


def _with_major(library: LibraryFacts) -> list[str]:
    return [name for name in library.needed if cuda_major(name) is not None]


def _torch(package: str | None, mine: Sequence[LibraryFacts]) -> Iterator[Finding]:
    other = [one for one in mine if one.undefined_torch]
    if other:
        yield Finding(
            level=Level.REFUSE,
            library=other[0].path if len(other) == 1 else None,
            text=f"{_subject(package, other)} against another torch than the stack's, which lacks symbols that it uses",
            evidence="; ".join(f"{one.path}: {_some(one.undefined_torch, 2)}" for one in other),
            remedy=f"take a build for the stack's torch; {_BUILD}",
        )


def _subject(package: str | None, libraries: Sequence[LibraryFacts]) -> str:
    if len(libraries) == 1:
        return f"{libraries[0].path} is built"
    return f"{package or f'{len(libraries)} libraries'} {'is' if package else 'are'} built"


def _links(mine: Sequence[LibraryFacts], cuda: int | None) -> Iterator[Finding]:
    for library in mine:
        if library.unresolved and (cuda is None or library.cuda_major in {None, cuda}):
            yield Finding(
                level=Level.WARN,
                library=library.path,
                text=f"{library.path} needs CUDA libraries that the stack does not have: {_some(library.unresolved)}",
                evidence=f"DT_NEEDED: {', '.join(library.needed)}",
                remedy="install the packages that bring them, into the stack",
            )
        if library.machine != platform.machine():
            yield Finding(
                level=Level.WARN,
                library=library.path,
                text=f"{library.path} is for {library.machine}, and this machine is {platform.machine()}",
                evidence=f"its ELF header says {library.machine}",
            )


def _of_capability(
    package: str | None, whole: Sequence[LibraryFacts], verdicts: Verdicts, capability: Capability
) -> Iterator[Finding]:
    where = said(capability)
    loaded = []
    for library in whole:
        if library.codes and verdicts[library.path, capability].is_loaded:
            loaded.append(library)
        elif library.codes:
            text = f"{library.path} is not loaded on {where}: its package loads its twin there"
            yield Finding(level=Level.NOTE, library=library.path, text=text, evidence=holdings(library.codes))
    if loaded and not any(verdicts[library.path, capability].runs.loads for library in loaded):
        yield Finding(
            level=Level.REFUSE,
            library=None,
            text=f"nothing{f' of {package}' if package else ''} runs on {where}",
            evidence="; ".join(f"{library.path}: {holdings(library.codes)}" for library in loaded),
            remedy=f"take a build for {where}; {_BUILD}",
        )
        return
    for library in loaded:
        yield from _of_one(library, verdicts[library.path, capability], where)


def _of_one(library: LibraryFacts, verdict: Verdict, where: str) -> Iterator[Finding]:
    path, held = library.path, holdings(library.codes)
    products = fp4_products(library.operators)
    if verdict.runs is Runs.NO:
        text = f"{path} does not run on {where}"
        if products:
            text, held = f"{text}, and FP4 products are in it", f"{_some(products)}; {held}"
        level = Level.REFUSE if products else Level.WARN
        remedy = f"take a build for {where}; {_BUILD}" if products else None
        yield Finding(level=level, library=path, text=text, evidence=held, remedy=remedy)
        return
    if verdict.fp4 is Fp4.UNUSABLE:
        yield Finding(
            level=Level.REFUSE,
            library=path,
            text=f"{path} is not usable for FP4 on {where}: it binds FP4 products and holds no instruction for them",
            evidence=f"{_some(products)}; {held}; {verdict.reason}",
            remedy=f"take a build for {where}a; {_BUILD}",
        )
    elif verdict.runs is Runs.PTX_ONLY:
        text = f"{path} has only PTX for {where}: it loads after the driver has compiled it, and FP4 cannot be in it"
        yield Finding(level=Level.WARN, library=path, text=text, evidence=held)
    elif verdict.fp4 is Fp4.UNKNOWN:
        text = f"{path}: whether it holds FP4 code for {where} was not seen"
        yield Finding(level=Level.WARN, library=path, text=text, evidence=verdict.reason)
    if verdict.covered is not None and verdict.covered[0] < verdict.covered[1]:
        yield Finding(
            level=Level.WARN,
            library=path,
            text=f"{path} has code for {where} in {verdict.covered[0]} of its {verdict.covered[1]} parts: the"
            " others fail there, or wait for the driver to compile their PTX",
            evidence=held,
        )


def _of_operators(operators: Operators) -> Iterator[Finding]:
    if operators.left_out:
        yield Finding(
            level=Level.NOTE,
            library=None,
            text=f"left out on purpose: {len(operators.left_out)} operators, which say so when they are called",
            evidence=_some(operators.left_out),
        )
    if operators.missing:
        files = sorted(set(operators.missing.values()))
        yield Finding(
            level=Level.NOTE,
            library=None,
            text=f"the package's Python calls {len(operators.missing)} operators that none of its libraries defines;"
            " those for other machines (CPU, ROCm, MUSA) always are among them",
            evidence=f"{_some(tuple(operators.missing))}, in {_some(tuple(files))}",
        )


def _some(names: Sequence[str], shown: int = _SHOWN) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
