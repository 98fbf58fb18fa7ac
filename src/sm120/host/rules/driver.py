"""The NVIDIA driver: is it there, does it work, and is it new enough for the environments."""

from collections.abc import Iterator

from sm120.host.facts import Environment, Facts
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import (
    cards,
    count,
    cuda_environments,
    dotted,
    jit_toolkit,
    listed,
    parsed,
    release,
    sm12x,
    tool_read,
    torch_read,
    version_of,
)

_CUDA_13_DRIVER = 580  # the first driver branch that runs CUDA 13 (CUDA 13.0 release notes)
_INSTALL = "install NVIDIA driver 580 or newer with the open kernel module, then reboot"


def missing(facts: Facts) -> Iterator[Finding]:
    """A card on the bus that no driver serves: no package is at fault then."""
    driver = facts.driver
    if driver.pci_devices and driver.version is None and not driver.device_nodes and not facts.gpus:
        number = count(len(driver.pci_devices), "NVIDIA card")
        yield Finding(
            id="driver-missing",
            severity=Severity.REFUSE,
            what=f"On the PCI bus is {number}, {listed(driver.pci_devices)}, and no NVIDIA driver is loaded.",
            read=(f"{listed(driver.pci_devices, 8)}: /sys/bus/pci/devices", f"NVML: {driver.error or 'lists no card'}"),
            why="Without a driver nothing sees a card: torch reports that CUDA is not available.",
            cure=_INSTALL if facts.host.container is None else f"on the host, not in this container: {_INSTALL}",
        )


def library_mismatch(facts: Facts) -> Iterator[Finding]:
    """The driver was updated under a running kernel module (NVML: driver/library version mismatch)."""
    driver = facts.driver
    loaded = driver.version or "of unknown version"
    if driver.error and "mismatch" in driver.error.lower():
        yield Finding(
            id="driver-library-mismatch",
            severity=Severity.REFUSE,
            what=f"The driver's libraries are of another version than the loaded kernel module, {loaded}.",
            read=(f"NVML: {driver.error}", f"kernel module {loaded}: /proc/driver/nvidia/version"),
            why="The driver was updated while its old module stayed loaded; until that changes no CUDA program starts.",
            cure="reboot"
            if facts.host.container is None
            else "reboot the host, then make a new container: this one was given libraries of another driver",
        )


def kernel_module(facts: Facts) -> Iterator[Finding]:
    """Blackwell cards are served by the open kernel module only (NVIDIA driver README, open kernel modules)."""
    driver = facts.driver
    if driver.module == "proprietary" and driver.pci_devices and not facts.gpus and not _given_no_card(facts):
        yield Finding(
            id="driver-kernel-module",
            severity=Severity.REFUSE,
            what="The driver runs its proprietary kernel module and lists no card, with "
            f"{listed(driver.pci_devices)} on the PCI bus.",
            read=(
                f"proprietary module, {driver.version or 'of unknown version'}: /proc/driver/nvidia/version",
                f"{listed(driver.pci_devices)}: /sys/bus/pci/devices",
                f"NVML: {driver.error or 'lists no card'}",
            ),
            why="Blackwell cards need the open kernel module; with the other one nvidia-smi says that no devices were "
            "found.",
            cure="install the driver's packages with -open in their name, then reboot",
        )


def unusable(facts: Facts) -> Iterator[Finding]:
    """A driver that is loaded while NVML shows no card."""
    driver = facts.driver
    loaded = driver.version is not None or bool(driver.device_nodes)
    explained = any(library_mismatch(facts)) or any(kernel_module(facts))
    if not loaded or facts.gpus or explained or not (driver.error or driver.pci_devices):
        return
    name = f"driver {driver.version or 'of unknown version'}"
    read = (f"{name}: /proc/driver/nvidia/version", f"NVML: {driver.error or 'lists no card'}")
    if _given_no_card(facts):
        yield Finding(
            id="driver-unusable",
            severity=Severity.WARN,
            what=f"The host runs {name}, and this {facts.host.container} container was given no card.",
            read=(*read, "no device nodes: /dev/nvidia*"),
            why="Inside a container only the cards that it was started with exist.",
            cure="start the container with --gpus all (docker) or --device nvidia.com/gpu=all (podman)",
        )
        return
    yield Finding(
        id="driver-unusable",
        severity=Severity.REFUSE,
        what=f"The {name} is loaded, and NVML shows no card: {driver.error or 'it lists none'}.",
        read=read,
        why="What NVML cannot open CUDA cannot open either.",
        cure="look for NVRM and Xid lines: sudo dmesg | grep -E 'NVRM|Xid'",
    )


def _given_no_card(facts: Facts) -> bool:
    """A container sees the host's driver in /proc and its cards in /sys, whether it may use them or not."""
    return facts.host.container is not None and not facts.driver.device_nodes


def uvm_node_missing(facts: Facts) -> Iterator[Finding]:
    """A container with cards but without the unified-memory device, without which cuInit fails."""
    nodes = facts.driver.device_nodes
    if facts.host.container and cards(facts) and nodes and not any("uvm" in node for node in nodes):
        yield Finding(
            id="uvm-node-missing",
            severity=Severity.REFUSE,
            what=f"This {facts.host.container} container has {listed(nodes)} and no /dev/nvidia-uvm.",
            read=(f"{listed(nodes, 8)}: /dev",),
            why="NVML works without that node, but CUDA does not: torch says that CUDA is unknown or not initialised.",
            cure="on the host: sudo nvidia-modprobe -u -c 0; then start the container again with --gpus all",
        )


def below_cuda13(facts: Facts) -> Iterator[Finding]:
    """CUDA 13 needs driver 580 or newer (public reports: "found version 12080", error 35 from CuTe DSL)."""
    driver = facts.driver
    number = release(driver.version)
    new_enough = driver.cuda >= (13, 0) if driver.cuda else number >= (_CUDA_13_DRIVER,)
    if new_enough or not (driver.cuda or number):
        return
    name = f"driver {driver.version or 'of unknown version'}"
    runs = f"The {name} runs CUDA up to {dotted(driver.cuda)}" if driver.cuda else f"The driver is {driver.version}"
    read = (f"{name}, CUDA {dotted(driver.cuda) if driver.cuda else 'not said'}: NVML",)
    for environment, cuda in cuda_environments(facts):
        needing = _cuda13_packages(environment, torch_is_13=cuda >= (13, 0))
        if needing:
            yield Finding(
                id="driver-below-cuda13",
                severity=Severity.REFUSE,
                what=f"{runs}, and environment {environment.stack} holds {listed(needing)}.",
                read=(*read, torch_read(environment)),
                why="Packages built for CUDA 13 stop with “driver too old (found version 12080)”, or with error 35.",
                cure=_INSTALL,
            )
    if not facts.environments and sm12x(facts):
        yield Finding(
            id="driver-below-cuda13",
            severity=Severity.WARN,
            what=f"{runs}, and the stacks for this card bring CUDA 13.",
            read=read,
            why="What setup installs would stop with “driver too old”.",
            cure=_INSTALL,
        )


def _cuda13_packages(environment: Environment, *, torch_is_13: bool) -> list[str]:
    found = [f"torch {environment.torch.version}"] if torch_is_13 and environment.torch else []
    for name in ("cuda-python", "cuda-bindings"):
        version = parsed(version_of(environment, name))
        if version is not None and version.major >= 13:
            found.append(f"{name} {version}")
    return found


def older_than_cuda(facts: Facts) -> Iterator[Finding]:
    """PTX of a newer minor version than the driver's cannot be compiled by it (cudaErrorUnsupportedPtxVersion).

    Finished machine code (cubin) of the same major version runs: CUDA's minor version compatibility.
    """
    limit = facts.driver.cuda
    if limit is None:
        return
    for environment, cuda in cuda_environments(facts):
        newer = (
            [(f"torch's CUDA {dotted(cuda)}", torch_read(environment))] if limit[0] == cuda[0] and cuda > limit else []
        )
        toolkit = jit_toolkit(facts, environment)
        if toolkit and toolkit.nvcc and toolkit.nvcc[0] == limit[0] and toolkit.nvcc > limit:
            newer.append((f"nvcc {dotted(toolkit.nvcc)}", tool_read("nvcc", toolkit.nvcc, toolkit)))
        if newer:
            wanted = max(cuda, (toolkit and toolkit.nvcc) or cuda)
            yield Finding(
                id="driver-older-than-cuda",
                severity=Severity.WARN,
                what=f"The driver knows CUDA up to {dotted(limit)}, and environment {environment.stack} has "
                f"{' and '.join(name for name, _ in newer)}.",
                read=(
                    f"driver {facts.driver.version or 'of unknown version'}, CUDA {dotted(limit)}: NVML",
                    *(where for _, where in newer),
                ),
                why="Kernels that ship as machine code run; one that ships as PTX only fails at its first use with "
                "cudaErrorUnsupportedPtxVersion, so that one model runs and another does not.",
                cure=f"install a driver that runs CUDA {dotted(wanted)}, then reboot",
            )


def wsl(facts: Facts) -> Iterator[Finding]:
    """Windows' subsystem: the kernel names Microsoft (CUDA on WSL user guide, known limitations)."""
    if "microsoft" in (facts.host.kernel or "").lower():
        yield Finding(
            id="wsl",
            severity=Severity.NOTE,
            what=f"This is Windows' subsystem for Linux, kernel {facts.host.kernel}.",
            read=(f"kernel {facts.host.kernel}: uname -r",),
            why="There the driver is Windows' own, pinned memory is limited, cards cannot reach each other, and part "
            "of NVML is missing: speed measured here says little about Linux.",
            cure=None,
        )


def gpu_none(facts: Facts) -> Iterator[Finding]:
    """A machine without an NVIDIA card."""
    if not facts.gpus and not facts.driver.pci_devices and not facts.driver.device_nodes and not facts.driver.version:
        yield Finding(
            id="gpu-none",
            severity=Severity.NOTE,
            what="This machine has no NVIDIA card.",
            read=("no NVIDIA card: /sys/bus/pci/devices", f"NVML: {facts.driver.error or 'lists no card'}"),
            why="The references, the SM120 model and builds run here; kernels can be validated on a card only.",
            cure=None,
        )
