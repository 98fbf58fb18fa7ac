"""The operating system, its limits, and the container around it."""

import os
import platform
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm120.host.facts import Gpu, Host
from sm120.host.gather.text import read

_LIMITS = ("NOFILE", "MEMLOCK", "NPROC", "STACK", "AS", "FSIZE")
_SHARED_MEMORY = re.compile(r"\bGB10\b")


def host(gpus: Sequence[Gpu], env: Mapping[str, str], root: Path = Path("/")) -> Host:
    return Host(
        kernel=platform.release(),
        distribution=_distribution(root),
        glibc=_glibc(),
        container=_container(env, root),
        iommu=_iommu(read(root / "proc/cmdline") or ""),
        unified_memory=unified(gpus),
    )


def limits() -> dict[str, int | None]:
    """Soft limits by their ulimit names, in lower case; None is unlimited."""
    found: dict[str, int | None] = {}
    for name in _LIMITS:
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        found[name.lower()] = None if soft == resource.RLIM_INFINITY else soft
    return found


def unified(gpus: Sequence[Gpu]) -> bool | None:
    """Whether a GPU uses the machine's own memory: GB10, or a whole card for which NVML knows no memory of its own."""
    readable = [gpu for gpu in gpus if gpu.problem is None and gpu.compute_capability is not None]
    if not readable:
        return None
    return any(_SHARED_MEMORY.search(gpu.name) or (gpu.memory_total is None and not gpu.mig) for gpu in readable)


def _distribution(root: Path) -> str | None:
    found = re.search(r"^PRETTY_NAME=(.*)$", read(root / "etc/os-release") or "", re.MULTILINE)
    return (found[1].strip().strip("\"'") or None) if found else None


def _glibc() -> str | None:
    """``glibc 2.36`` → 2.36; other C libraries do not say."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    return text.partition(" ")[2] or None


def _container(env: Mapping[str, str], root: Path) -> str | None:
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    if env.get("container"):  # systemd's convention: lxc, systemd-nspawn, podman …
        return env["container"]
    if env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    groups = read(root / "proc/1/cgroup") or ""
    found = re.search(r"\b(docker|kubepods|lxc|libpod)\b", groups)
    names = {"kubepods": "kubernetes", "libpod": "podman"}
    return names.get(found[1], found[1]) if found else None


def _iommu(command_line: str) -> str | None:
    """``pt`` wins over ``on``; the vendor's own switch counts as the general one."""
    said: set[str] = set()
    for word in command_line.split():
        key, _, value = word.partition("=")
        if key in {"iommu", "intel_iommu", "amd_iommu"}:
            said.update(value.split(","))
        elif key == "iommu.passthrough" and value == "1":  # ARM's spelling
            said.add("pt")
    if "off" in said:
        return "off"
    if "pt" in said:
        return "pt"
    return "on" if said & {"on", "force"} else None
