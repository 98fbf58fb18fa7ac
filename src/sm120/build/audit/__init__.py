"""What a binary can run on, for anyone's wheel: architectures, FP4 instructions, CUDA and torch, operators."""

from sm120.build.audit.auditing import audit_files, audit_folder, audit_wheel
from sm120.build.audit.cuobjdump import Tools, find_tools
from sm120.build.audit.model import (
    Arch,
    Audit,
    Capability,
    Code,
    Finding,
    Fp4,
    Level,
    LibraryFacts,
    Operators,
    Runs,
    Verdict,
)
from sm120.build.audit.rules import judge
from sm120.build.audit.show import show
from sm120.build.audit.step import audit_built, audit_modules, refuse, refuse_without_fp4

__all__ = [
    "Arch",
    "Audit",
    "Capability",
    "Code",
    "Finding",
    "Fp4",
    "Level",
    "LibraryFacts",
    "Operators",
    "Runs",
    "Tools",
    "Verdict",
    "audit_built",
    "audit_files",
    "audit_folder",
    "audit_modules",
    "audit_wheel",
    "find_tools",
    "judge",
    "refuse",
    "refuse_without_fp4",
    "show",
]
