"""What a machine is, as data: gathered on one machine, judged there or elsewhere.

Sizes are bytes, clocks MHz, power watts, temperatures degrees Celsius. ``None`` means that it could not be read: an
unknown is never a zero. Everything here is plain data with no judgement in it; the rules judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

SCHEMA = 1

Version2 = tuple[int, int]  # major, minor: a CUDA version or a compute capability


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as NVML sees it, in PCI bus order."""

    index: int  # NVML's
    uuid: str
    name: str
    bus_id: str
    compute_capability: Version2 | None = None
    memory_total: int | None = None  # None on unified memory, where NVML says N/A
    memory_used: int | None = None
    pcie_generation: int | None = None  # now; drops when the card is idle
    pcie_generation_max: int | None = None  # of card and slot together
    pcie_generation_device_max: int | None = None  # of the card alone
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    clock_sm: int | None = None
    clock_sm_max: int | None = None
    clock_memory: int | None = None
    power_draw: float | None = None
    power_limit: float | None = None
    power_limit_default: float | None = None
    temperature: int | None = None
    throttle_reasons: tuple[str, ...] = ()  # NVML's names: sw_power_cap, hw_slowdown, hw_thermal_slowdown …
    performance_state: int | None = None  # 0 is fastest
    ecc: bool | None = None
    ecc_errors: int | None = None  # uncorrected, since the last reset
    display_active: bool | None = None
    mig: bool | None = None
    persistence: bool | None = None
    numa_node: int | None = None
    processes: int | None = None  # compute processes on it
    problem: str | None = None  # why NVML could not read it: lost, needs a reset …


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What lies between two GPUs, by NVML index."""

    a: int
    b: int
    path: str | None = None  # as nvidia-smi topo: PIX, PXB, PHB, NODE, SYS; NV# for # links of NVLink
    read: str | None = None  # peer reads: ok, chipset_not_supported, disabled_by_regkey, not_supported, unknown …
    write: str | None = None


@dataclass(frozen=True, kw_only=True)
class Driver:
    version: str | None = None
    cuda: Version2 | None = None  # the newest CUDA that it runs
    module: str | None = None  # "open" or "proprietary" kernel module
    error: str | None = None  # why NVML could not be read, in its words
    device_nodes: tuple[str, ...] = ()  # /dev/nvidia* that exist
    pci_devices: tuple[
        str, ...
    ] = ()  # NVIDIA's display controllers on the bus, driver or not: "0000:01:00.0 10de:2bb1"


@dataclass(frozen=True, kw_only=True)
class Cpu:
    architecture: str
    model: str | None = None
    cores: int | None = None  # physical
    threads: int | None = None
    allowed: int | None = None  # threads this process may use: affinity and cgroup quota
    numa_nodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    total: int | None = None
    available: int | None = None  # the kernel's MemAvailable: what can be had without swapping
    free: int | None = None  # MemFree, without reclaimable page cache
    cached: int | None = None
    swap_total: int | None = None
    swap_free: int | None = None
    cgroup_limit: int | None = None  # the tightest of all levels; None: no limit
    cgroup_used: int | None = None  # at that level, without file cache that the kernel can drop at once
    shm_total: int | None = None
    shm_free: int | None = None


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The file system under a folder that the toolkit or the stack writes to."""

    purpose: str  # state, runs, temporary, home, huggingface, flashinfer, triton, torch-extensions, inductor, tvm-ffi …
    path: str
    mount: str | None = None
    filesystem: str | None = None  # ext4, xfs, overlay, tmpfs, nfs4 …
    total: int | None = None
    free: int | None = None
    writable: bool | None = None
    problem: str | None = None  # why it could not be read: a file server that does not answer …


@dataclass(frozen=True, kw_only=True)
class Toolkit:
    """One CUDA toolkit that a program could pick up."""

    root: str
    seen_by: tuple[str, ...]  # CUDA_HOME, CUDA_PATH, PATH, LD_LIBRARY_PATH, system, wheels:<environment>, home:<stack>
    nvcc: Version2 | None = None
    ptxas: Version2 | None = None
    headers: Version2 | None = None  # CUDART_VERSION of its cuda_runtime_api.h
    cccl: str | None = None  # version of its libcu++ (cuda/std/__cccl/version.h or cub/version.cuh)
    cccl_under: str | None = None  # include or include/cccl: where <cuda/std/utility> lies
    library_folder: str | None = None  # lib64, lib or targets/…/lib, relative to root
    cudart: tuple[str, ...] = ()  # file names: libcudart.so, libcudart.so.13 …
    problems: tuple[str, ...] = ()  # what could not be read, in words


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str  # nvcc, ptxas, gcc, g++, cmake, ninja, git, ccache, ld, nvidia-smi …
    path: str | None = None  # None: not found
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class Distribution:
    name: str  # canonical
    version: str
    requires: tuple[str, ...] = ()  # Requires-Dist lines that name torch, CUDA or kernel packages


@dataclass(frozen=True, kw_only=True)
class Library:
    """A kernel library of an environment, read from its ELF file."""

    path: str  # relative to site-packages
    distribution: str | None = None
    needed: tuple[str, ...] = ()  # DT_NEEDED
    undefined_torch: tuple[str, ...] = ()  # libtorch or c10 symbols that no library of the installed torch exports
    unresolved_cuda: tuple[str, ...] = ()  # of its needed CUDA libraries, those found nowhere it would look
    problem: str | None = None  # why it could not be read: truncated, not ELF …


@dataclass(frozen=True, kw_only=True)
class Claim:
    distribution: str
    version: str
    sha256: str | None = None  # from its RECORD


@dataclass(frozen=True, kw_only=True)
class Clash:
    """A file that more than one distribution's RECORD claims with different contents."""

    path: str  # relative to site-packages
    claims: tuple[Claim, ...]
    on_disk: str | None = None  # SHA-256; None: gone


@dataclass(frozen=True, kw_only=True)
class Torch:
    version: str
    cuda: Version2 | None = None  # torch.version.cuda; None: a CPU build
    arch_list: tuple[str, ...] | None = None  # sm_90, sm_120, compute_120 …; None: torch could not be imported
    problem: str | None = None  # why it could not be imported


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A Python environment that holds a stack."""

    stack: str
    python: str
    python_version: str | None = None
    site: str | None = None  # its site-packages
    adopted: bool = False
    distributions: tuple[Distribution, ...] = ()
    torch: Torch | None = None  # None: not installed
    libraries: tuple[Library, ...] = ()
    clashes: tuple[Clash, ...] = ()
    triton_ptxas: Version2 | None = None
    triton_ptxas_path: str | None = None
    locked: Mapping[str, str] = field(default_factory=dict)  # name → version, from the stack's lock
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel file that waits to be installed: what its name says, and what is inside."""

    path: str
    name: str | None = None
    version: str | None = None  # from the file name
    metadata_name: str | None = None
    metadata_version: str | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Host:
    kernel: str | None = None
    distribution: str | None = None  # PRETTY_NAME of os-release
    glibc: str | None = None
    container: str | None = None  # docker, podman, lxc …; None: none seen
    iommu: str | None = None  # as the kernel's command line says: on, pt, off; None: not said
    unified_memory: bool | None = None  # GPU and CPU share memory (GB10)


@dataclass(frozen=True, kw_only=True)
class Facts:
    collected: str  # UTC, ISO 8601
    toolkit: str  # version of this toolkit
    host: Host
    driver: Driver
    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()
    disks: tuple[Disk, ...] = ()
    limits: Mapping[str, int | None] = field(default_factory=dict)  # soft limits: nofile, memlock … None: unlimited
    toolkits: tuple[Toolkit, ...] = ()
    tools: tuple[Tool, ...] = ()
    environments: tuple[Environment, ...] = ()
    wheels: tuple[Wheel, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)  # those that change behaviour, secrets masked
    unread: tuple[str, ...] = ()  # probes that failed, in words
    schema: int = SCHEMA
