"""``build-kernels --component flashinfer``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sm120.build.audit import Audit, audit_modules, refuse, refuse_without_fp4, show
from sm120.build.flashinfer.making import BuiltModule, build
from sm120.build.flashinfer.modules import chosen, modules
from sm120.build.flashinfer.planning import Planned, plan, version_in
from sm120.build.flashinfer.target import LIST, Target, target, workspace
from sm120.build.toolchain import find
from sm120.console import Console, duration
from sm120.runs import Run
from sm120.stack.install.record import Environment

SCHEMA = 1


def build_flashinfer(
    environment: Environment,
    architectures: tuple[str, ...],
    jobs: int,
    only: tuple[str, ...],
    dry_run: bool,
    run: Run | None,
    console: Console,
) -> dict[str, object]:
    """Builds what a server's first start would compile; shows what, and what came of it.

    Raises UsageError (no FlashInfer, no such module), PreflightError (no CUDA home, disk), BuildError, BinaryError
    when what was built does not run there, or lacks the FP4 instructions that it is for.
    """
    wanted = chosen(only, modules())
    toolchain = find(environment)
    version = version_in(toolchain)
    targets = [target(architecture, toolchain.variables) for architecture in architectures]
    _warn_of_others(targets, toolchain.variables, console)
    planned = plan(toolchain, targets, wanted, run, console)
    faults = {f"{one.name} of FlashInfer {version}: {f.what} ({f.source})": None for one in planned for f in one.faults}
    for text in faults:
        console.warn(text)
    built = () if dry_run or run is None else build(planned, toolchain, jobs, run, console)
    _table(planned, built, console)
    result: dict[str, object] = {
        "schema": SCHEMA,
        "component": "flashinfer",
        "stack": environment.name,
        "version": str(version),
        "workspace": str(workspace(toolchain.variables)),
        "jobs": jobs,
        "dry_run": dry_run,
        "modules": [_described(one) for one in planned],
        "built": [{**asdict(one), "path": str(one.path)} for one in built],
        "audit": [],
    }
    if dry_run or run is None:
        return result
    console.result(result)  # what there is, should the audit refuse it
    with console.step("auditing them"):
        audits = [_audit(group, environment) for group in _groups(planned)]
    result["audit"] = [audit.as_json() for audit in audits]
    console.result(result)
    for audit in audits:
        show(audit, console)
        refuse(audit)
    for audit, group in zip(audits, _groups(planned), strict=True):
        if group[0].module.fp4:
            refuse_without_fp4(audit)
    return result


def _groups(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Of one architecture, and with FP4 instructions or without: what is audited together."""
    there = [one for one in planned if one.library is not None]
    kinds = {(one.target.architecture, one.module.fp4): None for one in there}
    return [[one for one in there if (one.target.architecture, one.module.fp4) == kind] for kind in kinds]


def _audit(group: Sequence[Planned], environment: Environment) -> Audit:
    first = group[0]
    return audit_modules(
        [one.library for one in group if one.library is not None],
        environment,
        first.target.architecture,
        fp4=first.module.fp4,
        package=f"FlashInfer's modules {'with' if first.module.fp4 else 'without'} FP4 for {first.target.listed}",
    )


def _warn_of_others(targets: Sequence[Target], variables: Mapping[str, str], console: Console) -> None:
    for one in targets:
        if not one.served:
            console.warn(
                f"a server of this stack on this machine compiles for {variables.get(LIST) or 'its own card'}, not for"
                f" {one.listed}: what is built now serves machines with such a card"
            )


def _described(one: Planned) -> dict[str, object]:
    return {
        "name": one.name,
        "why": one.module.why,
        "architecture": one.target.architecture,
        "state": one.state,
        "reason": one.why,
        "units": one.units,
        "library": None if one.library is None else str(one.library),
        "fp4": one.module.fp4,
        "faults": [{"what": fault.what, "source": fault.source} for fault in one.faults],
    }


def _table(planned: Sequence[Planned], built: Sequence[BuiltModule], console: Console) -> None:
    seconds = {(one.architecture, one.name): duration(one.seconds) for one in built}
    rows = []
    for one in planned:
        took = seconds.get((one.target.architecture, one.name), "")
        state = "built now" if took else f"{one.state}: {one.why}" if one.why else str(one.state)
        rows.append((one.name, one.module.why, one.target.architecture, state, one.units or "", took))
    console.table("FlashInfer's modules", ("module", "why", "for", "state", "files", "time"), rows)
