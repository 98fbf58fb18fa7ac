"""Findings: what a rule says about facts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from sm120.host.facts import Facts


class Severity(StrEnum):
    REFUSE = "refuse"  # nothing that comes later can be trusted, or it will fail
    WARN = "warn"  # works, but slower, riskier or not everywhere
    NOTE = "note"  # good to know


@dataclass(frozen=True, kw_only=True)
class Finding:
    id: str  # stable: scripts and documents refer to it
    severity: Severity
    what: str  # one sentence with the values that were read
    read: tuple[str, ...]  # where each value was read: "nvcc 12.8: /usr/local/cuda/bin/nvcc --version"
    why: str  # what happens otherwise
    cure: str | None  # a command to type, or the one thing to do; None: nothing needs doing


Rule = Callable[[Facts], Iterable[Finding]]
