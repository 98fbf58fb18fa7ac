"""From libraries to an audit: read in parallel, compared with the stack, judged."""

import concurrent.futures
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from sm120 import errors
from sm120.build.audit import findings, operators, rules, subject
from sm120.build.audit.comparison import Comparison
from sm120.build.audit.cuobjdump import Tools
from sm120.build.audit.model import Audit, Capability, LibraryFacts, Verdict
from sm120.build.audit.operators import Calls
from sm120.build.audit.reading import Read, Request, read
from sm120.console import Console
from sm120.host.binaries.libraries import library_files
from sm120.host.binaries.wheels import open_wheel, wheel_facts

SM120: tuple[Capability, ...] = ((12, 0),)
_AT_ONCE = 4  # libraries; cuobjdump maps each whole, and they wait for the disk


def audit_wheel(
    path: Path,
    *,
    tools: Tools,
    torch_site: Path | None,
    capabilities: Sequence[Capability] = SM120,
    sass: bool | str = "fp4",
    scratch: Path,
) -> Audit:
    """``scratch``: a folder with room for its largest libraries. Raises BinaryError for what is no sound wheel.

    ``torch_site``: site-packages of the stack, None where there is nothing to compare with. ``sass``: count the FP4
    instructions of every library (True), of those that bind an FP4 product ("fp4"), or of none.
    """
    package = wheel_facts(path).name
    with open_wheel(path) as archive, subject.scratch(scratch) as folder:
        return audit_items(
            path.name,
            subject.members(path, archive, folder, package, _at_once()),
            operators.calls(subject.python_in_wheel(path, archive)),
            tools=tools,
            torch_site=torch_site,
            capabilities=capabilities,
            sass=sass,
            scratch=folder,
        )


def audit_folder(
    folder: Path,
    *,
    tools: Tools,
    torch_site: Path | None,
    capabilities: Sequence[Capability] = SM120,
    sass: bool | str = "fp4",
    package: str | None = None,
) -> Audit:
    """All libraries below a folder, and what the Python files in it call."""
    python = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py"))
    return audit_items(
        str(folder),
        [subject.File(name=name, path=folder / name, package=package) for name in sorted(library_files(folder))],
        operators.calls(subject.python_in_files(folder, python)),
        tools=tools,
        torch_site=torch_site,
        capabilities=capabilities,
        sass=sass,
    )


def audit_files(
    paths: Sequence[Path],
    *,
    tools: Tools,
    torch_site: Path | None,
    capabilities: Sequence[Capability] = SM120,
    sass: bool | str = "fp4",
    package: str | None = None,
) -> Audit:
    """Single libraries, as those of a JIT's cache."""
    return audit_items(
        package or f"{len(paths)} files",
        [subject.File(name=str(path), path=path, package=package) for path in paths],
        Calls(),
        tools=tools,
        torch_site=torch_site,
        capabilities=capabilities,
        sass=sass,
    )


def audit_items(
    name: str,
    items: Sequence[subject.Item],
    calls: Calls,
    *,
    tools: Tools,
    torch_site: Path | None,
    capabilities: Sequence[Capability],
    sass: bool | str,
    scratch: Path | None = None,
) -> Audit:
    """``scratch``: for temporary files; None: where the system has them."""
    request = Request(
        tools=tools,
        capabilities=tuple(capabilities),
        sass=sass,
        scratch=scratch,
        paths=tuple(item.name for item in items),
        wanted=calls.names,
    )
    comparison = Comparison(site=torch_site)
    libraries = comparison.compare(_read_all(items, request))
    verdicts = verdicts_of(libraries, capabilities)
    bound = findings.operators(libraries, calls)
    return Audit(
        subject=name,
        capabilities=tuple(capabilities),
        libraries=libraries,
        verdicts=verdicts,
        operators=bound,
        findings=findings.findings(
            libraries, verdicts, capabilities, cuda=tools.cuda, compared=comparison.why_not, operators=bound
        ),
    )


def verdicts_of(
    libraries: Sequence[LibraryFacts], capabilities: Sequence[Capability]
) -> Mapping[tuple[str, Capability], Verdict]:
    paths = [library.path for library in libraries]
    return {
        (library.path, capability): replace(verdict, is_loaded=rules.is_loaded(library.path, paths, capability))
        for library in libraries
        for capability, verdict in rules.judge(library, capabilities).items()
    }


def _at_once() -> int:
    return max(1, min(_AT_ONCE, len(psutil.Process().cpu_affinity())))


def _read_all(items: Sequence[subject.Item], request: Request) -> list[Read]:
    """In the order of ``items``; the largest first, because the last to end is waited for."""
    found: dict[int, Read] = {}
    order = sorted(range(len(items)), key=lambda index: -items[index].size)
    with Console.current().progress(len(items), "libraries") as progress:
        pool = concurrent.futures.ThreadPoolExecutor(_at_once())
        try:
            waiting = {pool.submit(_read_one, items[index], request): index for index in order}
            for done in concurrent.futures.as_completed(waiting):
                found[waiting[done]] = done.result()
                progress.advance(label=items[waiting[done]].name)
        finally:  # after an error or ^C, what still runs is stopped
            request.stop.set()
            pool.shutdown(cancel_futures=True)
    return [found[index] for index in range(len(items))]


def _read_one(item: subject.Item, request: Request) -> Read:
    start = LibraryFacts(path=item.name, package=item.package, judged=item.judged, size=item.size)
    try:
        with item.file() as (path, digest):
            return read(path, replace(start, sha256=digest), request)
    except errors.BinaryError as error:
        return Read(facts=replace(start, problem=error.message))
