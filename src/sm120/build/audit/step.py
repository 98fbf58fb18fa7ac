"""The audit as a step of a build: of the wheel before it is installed, of FlashInfer's modules after they are built."""

from collections.abc import Sequence
from pathlib import Path

from sm120 import errors
from sm120.build.audit.auditing import audit_files, audit_wheel
from sm120.build.audit.cuobjdump import Tools, find_tools
from sm120.build.audit.model import Audit, Capability, said
from sm120.build.audit.rules import omma
from sm120.stack.install.record import Environment, site_packages

_TOOLS = "scripts/inv setup --stack cpu"
_MEANT_FOR: dict[str, tuple[Capability, ...]] = {  # code for a family is asked for by those who have both
    "120a": ((12, 0),),
    "120f": ((12, 0), (12, 1)),
    "121a": ((12, 1),),
    "121f": ((12, 1),),
}


def capabilities(architectures: Sequence[str]) -> tuple[Capability, ...]:
    """The devices that what was compiled for these architectures must run on; ``120a`` as nvcc calls them."""
    return tuple(sorted({capability for name in architectures for capability in _MEANT_FOR[name]}))


def tools_of(environment: Environment) -> Tools:
    """Of the stack's CUDA home. Raises PreflightError when there is none."""
    if environment.cuda_home is None:
        raise errors.PreflightError(
            f"the stack {environment.name} has no CUDA home, whose tools read what a library holds",
            where=str(environment.python),
            remedy=f"{_TOOLS}, then the same command with --stack cpu",
        )
    from sm120.stack.cuda.home import read_cuda_home

    home = read_cuda_home(environment.cuda_home, site_packages(environment.python.parents[1]))
    version = home.version if home is not None else None
    return find_tools(environment.cuda_home, int(version.partition(".")[0]) if version else None)


def audit_built(wheel: Path, environment: Environment, architectures: Sequence[str], scratch: Path) -> Audit:
    """Of a wheel, for the devices that it was built for and the torch that it is to run with."""
    return audit_wheel(
        wheel,
        tools=tools_of(environment),
        torch_site=site_packages(environment.python.parents[1]),
        capabilities=capabilities(architectures),
        scratch=scratch,
    )


def audit_modules(
    modules: Sequence[Path], environment: Environment, architecture: str, *, fp4: bool, package: str
) -> Audit:
    """Of a JIT's modules for one architecture. ``fp4``: their FP4 instructions are counted."""
    return audit_files(
        modules,
        tools=tools_of(environment),
        torch_site=site_packages(environment.python.parents[1]),
        capabilities=capabilities([architecture]),
        sass=fp4,
        package=package,
    )


def refuse(done: Audit) -> None:
    """Raises BinaryError with the worst that was found; NothingChecked when there was nothing to judge."""
    if not done.judged:
        held = f"none of its {len(done.libraries)} libraries holds" if done.libraries else "it has no library with"
        raise errors.NothingChecked(f"nothing to audit in {done.subject}: {held} code for GPUs", where=done.subject)
    refused = done.refused
    if refused:
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        raise errors.BinaryError(
            f"{done.subject}: {refused[0].text}{more}", where=refused[0].library, remedy=refused[0].remedy
        )


def refuse_without_fp4(done: Audit) -> None:
    """Raises BinaryError for a library without FP4 instructions on a device that it was built for."""
    for library in done.libraries:
        for capability in done.capabilities:
            if not omma(library, capability):
                raise errors.BinaryError(
                    f"{library.path} holds no FP4 instruction for {said(capability)}: FP4 is not in it, or emulated",
                    where=library.path,
                    remedy="delete its folder and build it again; scripts/inv doctor says whether CUDA fits",
                )
