"""What an audit reads from libraries, and what it says about them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

Capability = tuple[int, int]

_ARCH = re.compile(r"(?:sm|compute)_(\d{1,2})(\d)([af]?)")


@dataclass(frozen=True, order=True)
class Arch:
    """An architecture as compilers name it: sm_120a is (12, 0, "a"). Never compared as text."""

    major: int
    minor: int
    suffix: str = ""  # "a": this capability alone; "f": its family

    @classmethod
    def parse(cls, text: str) -> "Arch | None":
        found = _ARCH.fullmatch(text)
        return cls(int(found[1]), int(found[2]), found[3]) if found else None

    @property
    def number(self) -> int:
        return self.major * 10 + self.minor

    def __str__(self) -> str:
        return f"{self.number}{self.suffix}"


@dataclass(frozen=True, kw_only=True)
class Code:
    """All code of one kind for one architecture in a library."""

    arch: Arch
    kind: str  # cubin, or ptx
    count: int
    size: int | None  # bytes as stored; None: not known


@dataclass(frozen=True, kw_only=True)
class LibraryFacts:
    path: str  # in its wheel, in site-packages, or where it lies
    package: str | None = None
    judged: bool = True  # else its facts are shown, and nothing is refused for them
    sha256: str = ""
    size: int = 0
    machine: str = ""
    codes: tuple[Code, ...] = ()
    units: Mapping[tuple[tuple[Arch, str], ...], int] | None = None  # how many fat binaries hold exactly this code
    needed: tuple[str, ...] = ()  # DT_NEEDED
    cuda_major: int | None = None  # that it was linked for; None where its needs do not say
    undefined_torch: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()  # CUDA libraries that are found nowhere
    operators: tuple[str, ...] = ()  # with a schema, or exported to tvm-ffi
    named: frozenset[str] = frozenset()  # of the operators that Python calls, those that it names without a schema
    omma: Mapping[Arch, int] | None = None  # block-scaled FP4 MMA instructions; None: not looked at
    problem: str | None = None  # why it cannot be judged
    tail: tuple[str, ...] = ()  # what the tool said that failed


class Runs(StrEnum):
    EXACT = "exact"
    ARCH = "a"  # compiled for this capability alone
    FAMILY = "f"  # compiled for its family
    LOWER = "lower"  # plain code of a lower minor version
    PTX_ARCH = "PTX a/f"  # the driver compiles it; it may hold what is this architecture's own
    PTX_ONLY = "PTX only"  # the driver compiles it; FP4 cannot be in it
    HOST = "no GPU code"
    NO = "no"
    UNKNOWN = "unknown"

    @property
    def loads(self) -> bool:
        return self not in {Runs.NO, Runs.UNKNOWN}


class Fp4(StrEnum):
    NATIVE = "native"
    UNUSABLE = "not usable for FP4"  # binds an FP4 product, and holds no instruction for it
    NOT_BOUND = "not FP4"
    UNKNOWN = "not looked at"
    NONE = "-"  # does not run


@dataclass(frozen=True, kw_only=True)
class Verdict:
    runs: Runs
    fp4: Fp4
    reason: str
    covered: tuple[int, int] | None = None  # fat binaries that hold code for it, of all
    is_loaded: bool = True  # False: its package loads another library in its place


class Level(StrEnum):
    REFUSE = "refuse"
    WARN = "warn"
    NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Finding:
    level: Level
    library: str | None  # None: about the whole
    text: str
    evidence: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Operators:
    """What the Python of a package calls in its own namespaces, against what its libraries define."""

    missing: Mapping[str, str] = field(default_factory=dict)  # operator → the file that calls it
    left_out: tuple[str, ...] = ()  # on purpose: a file stands in for them
    extra: tuple[str, ...] = ()  # defined, and not called by the package's own Python


@dataclass(frozen=True, kw_only=True)
class Audit:
    subject: str
    capabilities: tuple[Capability, ...]
    libraries: tuple[LibraryFacts, ...]
    verdicts: Mapping[tuple[str, Capability], Verdict]
    operators: Operators
    findings: tuple[Finding, ...]

    @property
    def good(self) -> bool:
        """Something was judged, and nothing was refused."""
        return bool(self.judged) and not self.refused

    @property
    def judged(self) -> tuple[LibraryFacts, ...]:
        """The libraries that the verdict rests on."""
        return tuple(one for one in self.libraries if one.judged and (one.codes or one.problem))

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level is Level.REFUSE)

    def as_json(self) -> dict[str, object]:
        return {
            "subject": self.subject,
            "good": self.good,
            "capabilities": [said(capability) for capability in self.capabilities],
            "libraries": [self._library(one) for one in self.libraries],
            "operators": {
                "missing": dict(self.operators.missing),
                "left_out": list(self.operators.left_out),
                "extra": list(self.operators.extra),
            },
            "findings": [
                {
                    "level": str(one.level),
                    "library": one.library,
                    "text": one.text,
                    "evidence": one.evidence,
                    "remedy": one.remedy,
                }
                for one in self.findings
            ],
        }

    def _library(self, one: LibraryFacts) -> dict[str, object]:
        return {
            "name": one.path,
            "package": one.package,
            "judged": one.judged,
            "sha256": one.sha256,
            "size": one.size,
            "machine": one.machine,
            "cubins": names(one.codes, "cubin"),
            "ptx": names(one.codes, "ptx"),
            "codes": [
                {"arch": str(code.arch), "kind": code.kind, "count": code.count, "size": code.size}
                for code in one.codes
            ],
            "needed": list(one.needed),
            "cuda_major": one.cuda_major,
            "undefined": list(one.undefined_torch),
            "unresolved": list(one.unresolved),
            "operators": list(one.operators),
            "omma": None if one.omma is None else sum(one.omma.values()),
            "omma_by_architecture": None
            if one.omma is None
            else {str(arch): count for arch, count in sorted(one.omma.items())},
            "problem": one.problem,
            "tail": list(one.tail),
            "verdicts": {
                said(capability): {
                    "runs": str(verdict.runs),
                    "fp4": str(verdict.fp4),
                    "reason": verdict.reason,
                    "covered": None if verdict.covered is None else list(verdict.covered),
                    "loaded": verdict.is_loaded,
                }
                for capability in self.capabilities
                for verdict in (self.verdicts[one.path, capability],)
            },
        }


def said(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def names(codes: Iterable[Code], kind: str) -> list[str]:
    return [str(arch) for arch in sorted(code.arch for code in codes if code.kind == kind)]
