"""Audits of libraries that never were: facts in, the audit of them out."""

import platform
from collections.abc import Sequence

from sm120.build.audit.auditing import verdicts_of
from sm120.build.audit.findings import findings
from sm120.build.audit.model import Arch, Audit, Capability, Code, LibraryFacts, Operators

ON: tuple[Capability, ...] = ((12, 0), (12, 1))
SM90A, SM120A, SM120F = Arch(9, 0, "a"), Arch(12, 0, "a"), Arch(12, 0, "f")


def library(path: str, *archs: Arch, kind: str = "cubin") -> LibraryFacts:
    codes = tuple(Code(arch=arch, kind=kind, count=1, size=10) for arch in archs)
    needed = ("libcudart.so.13", "libc10.so")
    return LibraryFacts(path=path, package="p", machine=platform.machine(), codes=codes, needed=needed, cuda_major=13)


def audit(
    *libraries: LibraryFacts,
    on: Sequence[Capability] = ON,
    cuda: int | None = 13,
    compared: str | None = None,
    bound: Operators | None = None,
) -> Audit:
    verdicts = verdicts_of(libraries, on)
    found = findings(libraries, verdicts, on, cuda=cuda, compared=compared, operators=bound or Operators())
    return Audit(
        subject="s",
        capabilities=tuple(on),
        libraries=libraries,
        verdicts=verdicts,
        operators=bound or Operators(),
        findings=found,
    )
