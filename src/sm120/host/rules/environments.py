"""The environments as a whole: torch as locked, for these cards, and able to start."""

import re
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from packaging.utils import canonicalize_name

from sm120.host.facts import Environment, Facts, Gpu, Torch, Version2
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import (
    again,
    capability,
    cards,
    compiles,
    cuda_environments,
    cuda_tag,
    dotted,
    grouped,
    listed,
    parsed,
    pip_install,
    same_version,
    selection,
    torch_read,
    version_of,
)


def environment_broken(facts: Facts) -> Iterator[Finding]:
    """An environment whose installation did not end, or whose torch cannot be imported."""
    for environment in facts.environments:
        if environment.problem:
            yield Finding(
                id="environment-broken",
                severity=Severity.WARN,
                what=f"Environment {environment.stack} is not whole: {environment.problem}.",
                read=(f"{environment.problem}: {environment.site or environment.python or environment.stack}",),
                why="What was read from it may be half of the truth, and nothing should run in it.",
                cure=again(environment, f"scripts/inv setup --adopt {shlex.quote(environment.python or 'PYTHON')}"),
            )
        elif environment.torch and environment.torch.problem:
            yield Finding(
                id="environment-broken",
                severity=Severity.REFUSE,
                what=f"In environment {environment.stack} torch {environment.torch.version} cannot be imported.",
                read=(torch_read(environment), f"import torch: {environment.torch.problem}"),
                why="Nothing of the stack starts without it.",
                cure=again(environment, f"{shlex.quote(environment.python)} -c 'import torch'"),
            )


def torch_replaced(facts: Facts) -> Iterator[Finding]:
    """A later installation pulled another torch in, often the CPU build (spark-vllm-docker PR #263)."""
    for environment in facts.environments:
        locked = _locked(environment).get("torch")
        if locked and not _torch_as_locked(environment, locked):
            yield Finding(
                id="torch-replaced",
                severity=Severity.REFUSE,
                what=f"Environment {environment.stack} was locked with torch {locked} and has "
                f"{_torch_found(environment)}.",
                read=(f"torch {locked}: the lock of {environment.stack}", torch_read(environment)),
                why="Something installed later replaced it. Kernels built for the locked torch do not load in another, "
                "and a CPU build does not see the cards.",
                cure=again(environment, pip_install(environment, "--force-reinstall --no-deps", f"torch=={locked}")),
            )


def _locked(environment: Environment) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in environment.locked.items()}


def _torch_as_locked(environment: Environment, locked: str) -> bool:
    """Whether torch is the locked one.

    The package of the general index has no local tag in its metadata, while torch itself says 2.14.1+cu130.
    """
    torch = environment.torch
    if torch is None:
        return False
    packaged = version_of(environment, "torch")
    if packaged is not None and not same_version(packaged, locked):
        return False
    wanted, found = parsed(locked), parsed(torch.version)
    if wanted is None or found is None:
        return torch.version == locked
    if wanted.local is None:
        return wanted.public == found.public and not _is_cpu(torch)
    tag = cuda_tag(locked)
    return wanted.public == found.public and (tag == torch.cuda if tag else wanted.local == found.local)


def _is_cpu(torch: Torch) -> bool:
    return torch.version.partition("+")[2] == "cpu"


def _torch_found(environment: Environment) -> str:
    torch = environment.torch
    if torch is None:
        return "none"
    return f"torch {torch.version} ({f'CUDA {dotted(torch.cuda)}' if torch.cuda else 'a CPU build'})"


def packages_changed(facts: Facts) -> Iterator[Finding]:
    """Other packages than the lock says."""
    for environment in facts.environments:
        changed = []
        present: dict[str, str] = {canonicalize_name(d.name): d.version for d in reversed(environment.distributions)}
        for name, version in sorted(_locked(environment).items()):
            installed = present.get(name)
            if name != "torch" and installed is None:
                changed.append(f"{name} {version} is gone")
            elif name != "torch" and installed and not same_version(installed, version):
                changed.append(f"{name} is {installed} instead of {version}")
        if changed:
            yield Finding(
                id="packages-changed",
                severity=Severity.WARN,
                what=f"Environment {environment.stack} is not as locked: {listed(changed)}.",
                read=(f"{listed(changed, 8)}: METADATA in {environment.site or environment.python}, and its lock",),
                why="What was proven is not what is installed; a result from here cannot be repeated from the lock.",
                cure=again(environment, f"scripts/inv setup --adopt {shlex.quote(environment.python)}"),
            )


def torch_cpu_build(facts: Facts) -> Iterator[Finding]:
    """A CPU build of torch beside packages that need a card (spark-vllm-docker PR #263)."""
    for environment in facts.environments:
        torch = environment.torch
        if torch and torch.cuda is None and not torch.problem and cards(facts) and compiles(environment):
            if "torch" in _locked(environment):
                continue  # as locked, or torch-replaced says so
            yield Finding(
                id="torch-cpu-build",
                severity=Severity.REFUSE,
                what=f"Environment {environment.stack} holds GPU kernel packages and a CPU build of torch, "
                f"{torch.version}.",
                read=(torch_read(environment),),
                why="A CPU build does not see any card: torch.cuda.is_available() is False.",
                cure=f"install the CUDA build of torch {torch.version.partition('+')[0]} into {environment.python}",
            )


class Target(NamedTuple):
    """One entry of torch's list: machine code (sm_120, sm_120a, sm_120f) or PTX (compute_120)."""

    ptx: bool
    capability: Version2
    suffix: str  # "": and later minor versions; a: this very one; f: its family


def target(text: str) -> Target | None:
    found = re.fullmatch(r"(sm|compute)_(\d{1,2})(\d)([af]?)", text.strip())
    return Target(found[1] == "compute", (int(found[2]), int(found[3])), found[4]) if found else None


def runs(entry: Target, on: Version2) -> bool:
    """Whether this target's code runs there (CUDA C++ Programming Guide, compute capabilities and feature sets)."""
    if entry.suffix == "a":
        return entry.capability == on
    if entry.ptx and not entry.suffix:
        return entry.capability <= on
    return entry.capability[0] == on[0] and entry.capability[1] <= on[1]


def torch_arch_list(facts: Facts) -> Iterator[Finding]:
    """Each visible card needs an entry of its own or of its family in torch's list (vllm #21633, #19741)."""
    visible = selection(facts).gpus
    for environment, _ in cuda_environments(facts):
        entries = [
            entry for text in (environment.torch and environment.torch.arch_list) or () if (entry := target(text))
        ]
        if not entries:
            continue  # not read
        code = [gpu for gpu in visible if _covered(entries, gpu, ptx=False)]
        ptx = [gpu for gpu in visible if gpu not in code and _covered(entries, gpu, ptx=True)]
        none = [gpu for gpu in visible if gpu.compute_capability and gpu not in code and gpu not in ptx]
        if none:
            yield _uncovered(
                environment,
                none,
                Severity.WARN if code else Severity.REFUSE,
                "no code that runs on",
                "The first kernel there ends in “no kernel image is available for execution on the device”.",
            )
        if ptx:
            yield _uncovered(
                environment,
                ptx,
                Severity.WARN,
                "PTX only for",
                "The driver compiles every kernel at its first use, which takes minutes, and without the instructions "
                "that only this architecture has, FP4 among them.",
            )


def _covered(entries: list[Target], gpu: Gpu, *, ptx: bool) -> bool:
    return any(entry.ptx is ptx and gpu.compute_capability and runs(entry, gpu.compute_capability) for entry in entries)


def _uncovered(environment: Environment, gpus: list[Gpu], severity: Severity, has: str, why: str) -> Finding:
    torch = environment.torch
    archs = listed((torch and torch.arch_list) or (), 16)
    return Finding(
        id="torch-arch-list",
        severity=severity,
        what=f"In environment {environment.stack} torch has {has} {grouped(gpus)}.",
        read=(f"{archs}: torch in {environment.python}", f"{grouped(gpus)}: NVML"),
        why=why,
        cure=again(environment, f"install a torch that has sm_{''.join(capability(gpus[0]).split('.'))}")
        if environment.adopted
        else "scripts/inv setup --stack nightly",
    )
