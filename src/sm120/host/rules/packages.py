"""Packages that must agree with each other: FlashInfer's parts, files that two packages write, wheels that wait."""

import shlex
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sm120.host.facts import Clash, Environment, Facts, Wheel
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import (
    BLACKWELL,
    again,
    cards,
    count,
    cuda_tag,
    dotted,
    grouped,
    is_set,
    kinds,
    listed,
    parsed,
    pip_install,
    same_version,
    torch_cuda,
    torch_read,
    version_of,
)

_CUTLASS_BASE = "nvidia-cutlass-dsl-libs-base"
_CUTLASS_CU13 = "nvidia-cutlass-dsl-libs-cu13"
_KERNEL_PINS = ("flashinfer-python", "flashinfer-cubin", "sgl-kernel", "sglang-kernel")


def flashinfer_versions(facts: Facts) -> Iterator[Finding]:
    """FlashInfer, its cubins and its compiled modules are one version (vllm #49804, tokenspeed #284).

    Base versions are compared, and a jit-cache's local tag with torch's CUDA: 0.6.16+cu130 beside 0.6.16 is right
    (flashinfer #4337).
    """
    for environment in facts.environments:
        differing, own = _flashinfer_parts(environment), version_of(environment, "flashinfer-python")
        if differing:
            yield Finding(
                id="flashinfer-versions",
                severity=Severity.REFUSE,
                what=f"In environment {environment.stack} flashinfer-python is {own}, and {listed(differing)}.",
                read=(f"flashinfer-python {own}, {listed(differing)}: {environment.site or environment.python}",),
                why="FlashInfer refuses to start, or does without the part that does not fit; with its check turned "
                "off, kernels of one version get the arguments of another: illegal accesses and missing kernels.",
                cure=again(
                    environment,
                    pip_install(environment, "--no-deps", f"{differing[0].partition(' ')[0]}=={own}"),
                ),
            )
        yield from _jit_cache_cuda(environment)


def _flashinfer_parts(environment: Environment) -> list[str]:
    """The parts whose version is not FlashInfer's own, as ``name is version``."""
    own = parsed(version_of(environment, "flashinfer-python"))
    if own is None or own.public == "0.0.0":  # built from source without its version file; upstream skips it too
        return []
    found = []
    for distribution in environment.distributions:
        name = canonicalize_name(distribution.name)
        if name == "flashinfer-cubin" or name.startswith("flashinfer-jit-cache"):
            version = parsed(distribution.version)
            if version is not None and version.public != own.public:
                found.append(f"{name} is {distribution.version}")
    return found


def _jit_cache_cuda(environment: Environment) -> Iterator[Finding]:
    cuda = torch_cuda(environment)
    for distribution in environment.distributions:
        tag = cuda_tag(distribution.version)
        if canonicalize_name(distribution.name).startswith("flashinfer-jit-cache") and cuda and tag and tag != cuda:
            yield Finding(
                id="flashinfer-versions",
                severity=Severity.REFUSE if tag[0] != cuda[0] else Severity.WARN,
                what=f"In environment {environment.stack} {distribution.name} {distribution.version} is built for CUDA "
                f"{dotted(tag)}, and torch for CUDA {dotted(cuda)}.",
                read=(
                    f"{distribution.name} {distribution.version}: {environment.site or environment.python}",
                    torch_read(environment),
                ),
                why="Its modules are linked against another CUDA runtime than the one that torch loads.",
                cure=again(environment, f"install the build of {distribution.name} for CUDA {dotted(cuda)}"),
            )


def version_check_bypassed(facts: Facts) -> Iterator[Finding]:
    """Switches that silence upstream's own version checks (vllm #49804; sglang's launch-time checks)."""
    # FlashInfer takes any text for yes, SGLang only what reads as yes.
    bypasses = {
        "FLASHINFER_DISABLE_VERSION_CHECK": bool(facts.variables.get("FLASHINFER_DISABLE_VERSION_CHECK")),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": is_set(facts.variables.get("SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK")),
    }
    for variable in (name for name, used in bypasses.items() if used):
        differing = [
            f"{difference} in environment {environment.stack}"
            for environment in facts.environments
            for difference in (
                _flashinfer_parts(environment) if variable.startswith("FLASHINFER") else _unmet_pins(environment)
            )
        ]
        yield Finding(
            id="version-check-bypassed",
            severity=Severity.REFUSE if differing else Severity.WARN,
            what=f"{variable} is set, and versions do differ: {listed(differing)}."
            if differing
            else f"{variable} is set, so that versions that do not fit each other go unnoticed.",
            read=(f"{variable}={facts.variables[variable]}: environment", *differing[:3]),
            why="With the check turned off, kernels that do not fit are called all the same: illegal memory accesses, "
            "missing kernels, wrong numbers.",
            cure=f"unset {variable}",
        )


def _unmet_pins(environment: Environment) -> list[str]:
    """What sglang pins exactly and has in another version, as ``name is version instead of version``."""
    sglang = next((d for d in environment.distributions if canonicalize_name(d.name) == "sglang"), None)
    found = []
    for line in sglang.requires if sglang else ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        name = canonicalize_name(requirement.name)
        installed = parsed(version_of(environment, name))
        pins = [s.version for s in requirement.specifier if s.operator == "=="]
        if name not in _KERNEL_PINS or requirement.marker is not None or installed is None or not pins:
            continue
        if not requirement.specifier.contains(installed.public, prereleases=True):
            found.append(f"{name} is {installed} instead of {pins[0]}")
    return found


def cutlass_dsl_libs(facts: Facts) -> Iterator[Finding]:
    """Two packages write the CuTe DSL's compiler to one path (NVIDIA/cutlass #3170, sglang #25938).

    On Blackwell libs-cu13 must win, since the other's ptxas cannot assemble FP4 instructions; on Hopper libs-base.
    Only where both really write one file: since 4.8 they do not.
    """
    present = kinds(cards(facts))
    if not present:
        return
    blackwell = max(present)[0] >= BLACKWELL
    wanted, severity = (_CUTLASS_CU13, Severity.REFUSE) if blackwell else (_CUTLASS_BASE, Severity.WARN)
    for environment in facts.environments:
        clashes = [clash for clash in environment.clashes if _is_cutlass(clash)]
        wrong = [clash for clash in clashes if _owner(clash) not in {wanted, None}]
        if wrong:
            loser = _owner(wrong[0])
            version = next(claim.version for claim in wrong[0].claims if claim.distribution == wanted)
            yield Finding(
                id="cutlass-dsl-libs",
                severity=severity,
                what=f"In environment {environment.stack} {count(len(wrong), 'file')} of the CuTe DSL "
                f"{'is' if len(wrong) == 1 else 'are'} {loser}'s, and this machine's cards need {wanted}'s.",
                read=(
                    *(f"{clash.path}: its SHA-256 and the RECORD of {loser}" for clash in wrong[:3]),
                    f"{grouped(cards(facts))}: NVML",
                ),
                why="Both packages write the same path and the one installed last wins. "
                + (
                    "The wrong one makes PTX with a malformed opcode, _mma, and FP4 kernels do not compile."
                    if blackwell
                    else "The wrong one was seen to end in illegal addresses under CUDA graphs on Hopper."
                ),
                cure=again(
                    environment,
                    pip_install(environment, "--force-reinstall --no-deps", f"{wanted}=={version}"),
                ),
            )


def file_clash(facts: Facts) -> Iterator[Finding]:
    """A file that several packages claim with different contents, by RECORD and by what is on disk."""
    for environment in facts.environments:
        known = [c for c in environment.clashes if len(c.claims) > 1 and all(claim.sha256 for claim in c.claims)]
        foreign = [clash for clash in known if _owner(clash) is None]
        if foreign:
            owners = sorted({claim.distribution for clash in foreign for claim in clash.claims})
            yield Finding(
                id="file-clash",
                severity=Severity.WARN,
                what=f"In environment {environment.stack} {count(len(foreign), 'file')} that {listed(owners)} write "
                f"{'is' if len(foreign) == 1 else 'are'} none of theirs: {listed(clash.path for clash in foreign)}.",
                read=tuple(
                    f"{clash.path}: {clash.on_disk or 'gone'}, and the packages' RECORDs" for clash in foreign[:3]
                ),
                why="The file was changed or removed after the installation; what runs is nobody's tested build.",
                cure=again(environment, f"install {owners[0]} again"),
            )
        shared = [clash for clash in known if _owner(clash) and not _is_cutlass(clash) and ".so" in clash.path]
        if shared:
            yield Finding(
                id="file-clash",
                severity=Severity.NOTE,
                what=f"In environment {environment.stack} {count(len(shared), 'library path')} "
                f"{'is' if len(shared) == 1 else 'are'} written by several packages: "
                f"{listed(f'{clash.path} is {_owner(clash)}’s' for clash in shared)}.",
                read=tuple(f"{clash.path}: its SHA-256 and the packages' RECORDs" for clash in shared[:3]),
                why="The one installed last wins, so another order of installation gives another environment.",
                cure=None,
            )


def _is_cutlass(clash: Clash) -> bool:
    return {_CUTLASS_BASE, _CUTLASS_CU13} <= {claim.distribution for claim in clash.claims}


def _owner(clash: Clash) -> str | None:
    """The distribution whose file is on disk."""
    return next((c.distribution for c in clash.claims if c.sha256 and c.sha256 == clash.on_disk), None)


def wheel_name(facts: Facts) -> Iterator[Finding]:
    """A wheel whose file name and metadata name different versions (sglang #14327, #20953)."""
    for wheel in facts.wheels:
        difference = _wheel_difference(wheel)
        if wheel.problem or difference:
            yield Finding(
                id="wheel-name",
                severity=Severity.REFUSE if difference else Severity.WARN,
                what=f"The wheel {wheel.path.rpartition('/')[2]} {difference or f'cannot be used: {wheel.problem}'}.",
                read=(
                    f"{wheel.problem or f'{wheel.metadata_name} {wheel.metadata_version}, in METADATA'}: {wheel.path}",
                ),
                why="pip downloads such a wheel and then discards it, or the server rejects the version that it finds."
                if difference
                else "A damaged wheel cannot be installed.",
                cure=f"rm {shlex.quote(wheel.path)}",
            )


def _wheel_difference(wheel: Wheel) -> str | None:
    if wheel.name and wheel.metadata_name and canonicalize_name(wheel.name) != canonicalize_name(wheel.metadata_name):
        return f"is named {wheel.name} and holds {wheel.metadata_name}"
    if wheel.version and wheel.metadata_version and not same_version(wheel.version, wheel.metadata_version):
        return f"is named {wheel.version} and holds {wheel.metadata_version}"
    return None
