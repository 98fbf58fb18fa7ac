"""An audit as a user reads it: libraries by capability, sizes by architecture, then what was found."""

from sm120.build.audit.model import Audit, LibraryFacts, Runs, Verdict, said
from sm120.build.audit.rules import prefix
from sm120.console import Console, size

_RUNS = {
    Runs.EXACT: "yes",
    Runs.ARCH: "yes (a)",
    Runs.FAMILY: "yes (family)",
    Runs.LOWER: "yes (lower)",
    Runs.PTX_ARCH: "compiled at load",
    Runs.PTX_ONLY: "compiled at load",
    Runs.HOST: "-",
    Runs.NO: "no",
    Runs.UNKNOWN: "not known",
}


def show(audit: Audit, console: Console) -> None:
    rows = [
        (one.path, said(capability), _RUNS[verdict.runs], verdict.fp4, _why(verdict))
        for one in audit.libraries
        for capability in audit.capabilities
        for verdict in (audit.verdicts[one.path, capability],)
    ]
    console.table(audit.subject, ("library", "on", "runs", "FP4", "why"), rows)
    held = [(one.path, size(one.size), _sizes(one)) for one in audit.libraries if one.codes]
    if held:
        console.table("", ("library", "size", "of it for GPUs"), held)
    for finding in audit.findings:
        console.info("")
        console.info(f"{finding.level.upper()}: {finding.text}")
        console.info(f"  read: {finding.evidence}")
        if finding.remedy is not None:
            console.info(f"  cure: {finding.remedy}")


def _why(verdict: Verdict) -> str:
    return verdict.reason if verdict.is_loaded else f"its package loads the twin; {verdict.reason}"


def _sizes(one: LibraryFacts) -> str:
    return ", ".join(
        f"{prefix(code.kind)}_{code.arch}" + ("" if code.size is None else f" {size(code.size)}") for code in one.codes
    )
