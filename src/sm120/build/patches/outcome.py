"""What is said of a patch on a tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from packaging.version import Version

from sm120 import errors
from sm120.build.patches.source import Edit
from sm120.build.patches.tree import Changes

ARCHITECTURES = {  # what nvcc calls them, and the CUDA that knows them first
    "120a": Version("12.8"),
    "120f": Version("12.9"),
    "121a": Version("12.9"),
    "121f": Version("12.9"),
}
COLUMNS = ("patch", "state", "why", "where")


class State(StrEnum):
    PENDING = "pending"  # it has something to change
    APPLIED = "applied"  # the tree holds it already, by this toolkit or by hand
    UPSTREAM = "upstream"  # the tree never needed it, or needs it no more: upstream says the same
    NOT_NEEDED = "not-needed"
    CONFLICT = "conflict"  # it should change something and cannot


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the tree will be built with. Raises UsageError for an architecture that is none of SM120's."""

    cmake: Version
    cuda: Version
    torch: Version | None = None
    component: Version | None = None
    architectures: tuple[str, ...] = ("120a",)
    compile_threads: int = 1  # of each nvcc

    def __post_init__(self) -> None:
        for arch in self.architectures or ("",):
            if arch not in ARCHITECTURES:
                raise errors.UsageError(
                    f"{arch or 'no'} architecture: sgl-kernel is built for SM120 only ({', '.join(ARCHITECTURES)})",
                    remedy="--arch 12.0a, 12.0f or 12.1a; a plain 12.0 has no FP4 instructions",
                )
        if self.compile_threads < 1:
            raise errors.UsageError(f"{self.compile_threads} threads of nvcc: one is the least")

    def version(self, subject: str) -> Version | None:
        return {"cmake": self.cmake, "cuda": self.cuda, "torch": self.torch, "component": self.component}[subject]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule found on one tree."""

    state: State
    reason: str
    where: tuple[str, ...] = ()  # file:line
    edits: tuple[Edit, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)  # whole files
    environment: Mapping[str, str] = field(default_factory=dict)  # for the build; {cuda} is the CUDA home
    left_out: tuple[str, ...] = ()  # targets


def upstream(reason: str, *where: str) -> Verdict:
    return Verdict(state=State.UPSTREAM, reason=reason, where=where)


def not_needed(reason: str, *where: str) -> Verdict:
    return Verdict(state=State.NOT_NEEDED, reason=reason, where=where)


def conflict(reason: str, *where: str) -> Verdict:
    return Verdict(state=State.CONFLICT, reason=reason, where=where)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    patch: str
    title: str
    state: State
    reason: str
    where: tuple[str, ...] = ()
    edits: int = 0  # places changed
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def row(self) -> tuple[str, str, str, str]:
        """In the order of COLUMNS."""
        shown = [*self.where[:3], *([f"and {len(self.where) - 3} more"] if len(self.where) > 3 else [])]
        return self.patch, str(self.state), self.reason, ", ".join(shown)

    def as_json(self) -> dict[str, object]:
        return {
            "patch": self.patch,
            "title": self.title,
            "state": str(self.state),
            "reason": self.reason,
            "where": list(self.where),
            "edits": self.edits,
            "environment": dict(self.environment),
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a series makes of a tree."""

    outcomes: tuple[Outcome, ...]
    series: str  # SHA-256 of the series: its files, and the source of its rules
    diff: str  # unified, of all patches together; "" when nothing changes
    environment: Mapping[str, str]  # for the build; {cuda} is the CUDA home
    left_out: tuple[str, ...]  # targets that this build leaves out
    changes: Changes = field(repr=False)  # path below the root: the new bytes

    @property
    def conflicts(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.state is State.CONFLICT)


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, str, str, str]]:
    return [outcome.row() for outcome in outcomes]
