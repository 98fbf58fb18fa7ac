"""What a library can run on. Rules of the CUDA programming guide, on facts; nothing is read here.

A folder's name says nothing about what is inside it. It does say which of two twins SGLang's package loads.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from sm120.build.audit.model import Arch, Capability, Code, Fp4, LibraryFacts, Runs, Verdict, names

# Code for a family runs on its members from the named one on. A capability that is not listed is a family by itself.
_FAMILIES: tuple[frozenset[Capability], ...] = (frozenset({(10, 0), (10, 3)}), frozenset({(12, 0), (12, 1)}))
_BEST = (Runs.EXACT, Runs.ARCH, Runs.FAMILY, Runs.LOWER, Runs.PTX_ARCH, Runs.PTX_ONLY)
_PTX = {Runs.PTX_ARCH, Runs.PTX_ONLY}
_FP4 = re.compile(r"(?:nv|mx)?fp4", re.IGNORECASE)
_PRODUCT = frozenset({"mm", "bmm", "gemm", "gemms", "matmul", "moe", "mma", "dot"})
# Weight-only products unpack FP4 and multiply in BF16: they need no FP4 instruction.
_OTHER = frozenset({"quant", "quantize", "dequant", "dequantize", "marlin", "w4a16", "data", "workspace", "prepare"})
# SGLang's loader takes sm90/ on capability 9.0 and sm100/ on every other one.
_TWINS = {"sm90": "sm100", "sm100": "sm90"}
_HOPPER: Capability = (9, 0)


def runs(arch: Arch, kind: str, capability: Capability) -> Runs:
    """How code for one architecture runs on a device."""
    own: Capability = (arch.major, arch.minor)
    if arch.suffix == "a":
        fits = own == capability
    elif arch.suffix == "f":
        fits = capability == own or (capability >= own and any({own, capability} <= family for family in _FAMILIES))
    elif kind == "ptx":
        fits = capability >= own
    else:
        fits = capability[0] == own[0] and capability >= own
    if not fits:
        return Runs.NO
    if kind == "ptx":
        return Runs.PTX_ARCH if arch.suffix else Runs.PTX_ONLY
    if arch.suffix:
        return Runs.ARCH if arch.suffix == "a" else Runs.FAMILY
    return Runs.EXACT if own == capability else Runs.LOWER


def best(codes: Iterable[tuple[Arch, str]], capability: Capability) -> Runs:
    """The best of several; what the driver would take."""
    found = {runs(arch, kind, capability) for arch, kind in codes}
    return next((one for one in _BEST if one in found), Runs.NO)


def fp4_products(operators: Iterable[str]) -> tuple[str, ...]:
    """Of the operators, those that multiply FP4 by FP4, by their names; quantisers and weight-only products are not."""
    found = []
    for operator in operators:
        words = set(operator.lower().split("_"))
        if _FP4.search(operator) and words & _PRODUCT and not words & _OTHER:
            found.append(operator)
    return tuple(found)


def judge(facts: LibraryFacts, capabilities: Sequence[Capability]) -> dict[Capability, Verdict]:
    return {capability: _verdict(facts, capability) for capability in capabilities}


def _verdict(facts: LibraryFacts, capability: Capability) -> Verdict:
    if facts.problem is not None:
        return Verdict(runs=Runs.UNKNOWN, fp4=Fp4.NONE, reason=facts.problem)
    if not facts.codes:
        return Verdict(runs=Runs.HOST, fp4=Fp4.NOT_BOUND, reason="it has no code for GPUs")
    how = best(((code.arch, code.kind) for code in facts.codes), capability)
    if how is Runs.NO:
        return Verdict(runs=how, fp4=Fp4.NONE, reason=f"it holds {holdings(facts.codes)} only")
    covered = _covered(facts.units, how, capability)
    used = ", ".join(_used(facts.codes, how, capability))
    reason = used if covered is None or covered[0] == covered[1] else f"{used}, in {covered[0]} of {covered[1]} parts"
    fp4, why = _fp4(facts, how, capability)
    return Verdict(runs=how, fp4=fp4, reason=f"{reason}; {why}" if why else reason, covered=covered)


def _used(codes: Iterable[Code], how: Runs, capability: Capability) -> list[str]:
    """What the driver can take: it compiles PTX only where no cubin runs."""
    kind = "ptx" if how in _PTX else "cubin"
    fitting = {code.arch for code in codes if code.kind == kind and runs(code.arch, kind, capability) is not Runs.NO}
    return [f"{prefix(kind)}_{arch}" for arch in sorted(fitting)]


def _covered(
    units: Mapping[tuple[tuple[Arch, str], ...], int] | None, how: Runs, capability: Capability
) -> tuple[int, int] | None:
    """Where cubins run, a part that has only PTX does not count: it can be slow to load, and has no FP4."""
    if units is None:
        return None
    enough = set(_BEST) if how in _PTX else set(_BEST) - _PTX
    return sum(count for codes, count in units.items() if best(codes, capability) in enough), sum(units.values())


def _fp4(facts: LibraryFacts, how: Runs, capability: Capability) -> tuple[Fp4, str]:
    products = fp4_products(facts.operators)
    if how is Runs.PTX_ONLY:
        return (Fp4.UNUSABLE, "loads, no FP4") if products else (Fp4.NOT_BOUND, "the driver compiles it")
    count = omma(facts, capability)
    if count:
        return Fp4.NATIVE, f"{count} OMMA"
    if how is Runs.PTX_ARCH:
        return Fp4.UNKNOWN, "the driver compiles it, so what it holds is seen only then"
    if count is None:
        return (Fp4.UNKNOWN, f"binds {products[0]}") if products else (Fp4.NOT_BOUND, "")
    return (Fp4.UNUSABLE, f"binds {products[0]}, holds no OMMA") if products else (Fp4.NOT_BOUND, "")


def omma(facts: LibraryFacts, capability: Capability) -> int | None:
    """FP4 instructions in the code that runs there; None where nobody looked. Other families than 12.x spell them
    otherwise.
    """
    if facts.omma is None or capability[0] != 12:
        return None
    return sum(count for arch, count in facts.omma.items() if runs(arch, "cubin", capability) is not Runs.NO)


def is_loaded(path: str, paths: Iterable[str], capability: Capability) -> bool:
    """False for the twin that SGLang's package passes by on this device."""
    place = PurePosixPath(path)
    other = _TWINS.get(place.parent.name)
    if other is None or str(place.parent.with_name(other) / place.name) not in set(paths):
        return True
    return (place.parent.name == "sm90") == (capability == _HOPPER)


def holdings(codes: Sequence[Code]) -> str:
    """``sm_80, sm_90a, PTX 80``"""
    cubins = [f"sm_{name}" for name in names(codes, "cubin")]
    return ", ".join([*cubins, *(f"PTX {name}" for name in names(codes, "ptx"))]) or "nothing"


def prefix(kind: str) -> str:
    return "sm" if kind == "cubin" else "compute"
