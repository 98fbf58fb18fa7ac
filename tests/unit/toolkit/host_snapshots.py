"""The snapshots in snapshots/: healthy machines, and each of them with one thing broken, with the findings expected.

``python -m tests.unit.toolkit.host_snapshots`` writes the files anew after a change here.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.unit.toolkit import host_machines as machines
from tests.unit.toolkit.host_machines import GIB, SITE

from sm120.host.codec import facts_to_json
from sm120.host.facts import (
    Claim,
    Clash,
    Facts,
    Gpu,
    Toolkit,
)

FOLDER = Path(__file__).parent / "snapshots"
Change = Callable[[Facts], Facts]


@dataclass(frozen=True, kw_only=True)
class Healthy:
    facts: Facts
    notes: frozenset[str] = frozenset()  # ids of notes; a healthy machine gets nothing worse


@dataclass(frozen=True, kw_only=True)
class Broken:
    base: str
    change: Change
    adds: Mapping[str, str]  # id → severity
    drops: frozenset[str] = field(default_factory=frozenset)  # notes of the base that go


def _notes(*ids: str) -> frozenset[str]:
    return frozenset(ids)


HEALTHY: Mapping[str, Healthy] = {
    "rtx-5090-idle": Healthy(facts=machines.machine((machines.rtx_5090(),))),
    "rtx-5090-at-work": Healthy(
        facts=machines.machine((machines.at_work(machines.rtx_5090()),)), notes=_notes("gpu-busy")
    ),
    "rtx-5090-x4-no-peer": Healthy(
        facts=replace(
            machines.machine(tuple(machines.rtx_5090(i, number=0x01 + 0x20 * i) for i in range(4)), memory=256 * GIB),
            pairs=machines.pairs(4, "chipset_not_supported"),
        ),
        notes=_notes("peer-access"),
    ),
    "rtx-pro-6000-display": Healthy(
        facts=machines.machine((replace(machines.rtx_pro_6000(), display_active=True),)),
    ),
    "rtx-pro-6000-x4": Healthy(facts=machines.servers(4)),
    "rtx-pro-6000-x8": Healthy(facts=machines.servers(8)),
    "dgx-spark": Healthy(facts=machines.spark(), notes=_notes("unified-memory", "not-sm120", "gpu-busy")),
    "h200": Healthy(facts=machines.machine((machines.h200(),), memory=1024 * GIB), notes=_notes("not-sm120")),
    "cpu-only": Healthy(facts=machines.cpu_only(), notes=_notes("gpu-none")),
    "container": Healthy(facts=machines.container()),
    "rented-h200": Healthy(facts=machines.rented(), notes=_notes("not-sm120", "cuda-library-missing")),
    "hand-made": Healthy(facts=machines.hand_made()),
    "fresh": Healthy(facts=machines.fresh()),
    "jit-cache": Healthy(facts=machines.jit_cache()),
    "older-set": Healthy(facts=machines.older_set()),
    "system-cuda-12": Healthy(facts=machines.system_cuda_12()),
    "mixed-chosen": Healthy(facts=machines.mixed()),
    "wheel-store": Healthy(facts=machines.wheel_store()),
    "wsl": Healthy(facts=machines.wsl(), notes=_notes("wsl")),
}


# Changes: each returns what makes a healthy machine ill.


def gpu(index: int = 0, /, **changes: Any) -> Change:
    return lambda facts: replace(
        facts, gpus=tuple(replace(g, **changes) if i == index else g for i, g in enumerate(facts.gpus))
    )


def every_gpu(change: Callable[[Gpu], Gpu]) -> Change:
    return lambda facts: replace(facts, gpus=tuple(change(g) for g in facts.gpus))


def driver(**changes: Any) -> Change:
    return lambda facts: replace(facts, driver=replace(facts.driver, **changes))


def host(**changes: Any) -> Change:
    return lambda facts: replace(facts, host=replace(facts.host, **changes))


def memory(**changes: Any) -> Change:
    return lambda facts: replace(facts, memory=replace(facts.memory, **changes))


def env(**changes: Any) -> Change:
    return lambda facts: replace(facts, environments=(replace(facts.environments[0], **changes),))


def torch(**changes: Any) -> Change:
    def change(facts: Facts) -> Facts:
        present = facts.environments[0].torch
        assert present is not None
        return env(torch=replace(present, **changes))(facts)

    return change


def packages(**versions: str | None) -> Change:
    """Other versions of installed packages, named with underscores; None takes one away."""

    def change(facts: Facts) -> Facts:
        wanted = {name.replace("_", "-"): version for name, version in versions.items()}
        kept = {d.name: d for d in facts.environments[0].distributions}
        for name, version in wanted.items():
            if version is None:
                del kept[name]
            else:
                kept[name] = replace(kept[name], version=version)
        return env(distributions=tuple(kept.values()))(facts)

    return change


def relocked(facts: Facts) -> Facts:
    """The lock that goes with what is installed."""
    return env(locked={d.name: d.version for d in facts.environments[0].distributions})(facts)


def library(path: str, /, **changes: Any) -> Change:
    def change(facts: Facts) -> Facts:
        every = facts.environments[0].libraries
        assert any(lib.path == path for lib in every)
        return env(libraries=tuple(replace(lib, **changes) if lib.path == path else lib for lib in every))(facts)

    return change


def variables(**changes: str | None) -> Change:
    def change(facts: Facts) -> Facts:
        both = {**facts.variables, **changes}
        return replace(facts, variables={name: value for name, value in both.items() if value is not None})

    return change


def toolkits(*chosen: Toolkit) -> Change:
    return lambda facts: replace(facts, toolkits=chosen)


def used_toolkit(**changes: Any) -> Change:
    """The toolkit that builds use, which comes first."""
    return lambda facts: replace(facts, toolkits=(replace(facts.toolkits[0], **changes), *facts.toolkits[1:]))


def disk(purpose: str, **changes: Any) -> Change:
    def change(facts: Facts) -> Facts:
        assert any(d.purpose == purpose for d in facts.disks)
        return replace(facts, disks=tuple(replace(d, **changes) if d.purpose == purpose else d for d in facts.disks))

    return change


def tool(name: str, **changes: Any) -> Change:
    return lambda facts: replace(
        facts, tools=tuple(replace(t, **changes) if t.name == name else t for t in facts.tools)
    )


def wheel(**changes: Any) -> Change:
    def change(facts: Facts) -> Facts:
        (present,) = facts.wheels
        return replace(facts, wheels=(replace(present, **changes),))

    return change


def both(*changes: Change) -> Change:
    def change(facts: Facts) -> Facts:
        for one in changes:
            facts = one(facts)
        return facts

    return change


def no_cards(facts: Facts) -> Facts:
    return replace(facts, gpus=(), pairs=())


KERNELS = "sgl_kernel/sm100/common_ops.abi3.so"
TORCH_LIBRARIES = ("libtorch.so", "libc10.so")
CUDA_12_KERNELS = library(KERNELS, needed=("libcudart.so.12", *TORCH_LIBRARIES), unresolved_cuda=("libcudart.so.12",))
ABI_SYMBOL = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"
REFUSE, WARN, NOTE = "refuse", "warn", "note"
OLD_SET = packages(sglang="0.5.10.post1", sglang_kernel="0.4.1")

BROKEN: Mapping[str, Broken] = {
    # The driver.
    "driver-missing": Broken(
        base="fresh",
        change=both(
            no_cards,
            driver(version=None, cuda=None, module=None, device_nodes=(), error="NVML Shared Library Not Found"),
        ),
        adds={"driver-missing": REFUSE},
    ),
    "driver-mismatch": Broken(
        base="rtx-5090-idle",
        change=both(no_cards, driver(cuda=None, error="RM has detected an NVML/RM version mismatch.")),
        adds={"driver-library-mismatch": REFUSE},
    ),
    "driver-proprietary-module": Broken(
        base="rtx-5090-idle",
        change=both(no_cards, driver(module="proprietary")),
        adds={"driver-kernel-module": REFUSE},
    ),
    "driver-fails": Broken(
        base="rtx-5090-idle",
        change=both(no_cards, driver(error="Unknown Error")),
        adds={"driver-unusable": REFUSE},
    ),
    "container-without-cards": Broken(
        base="container",
        change=both(no_cards, driver(device_nodes=(), error="Driver Not Loaded", cuda=None)),
        adds={"driver-unusable": WARN},
    ),
    "container-without-uvm": Broken(
        base="container",
        change=driver(device_nodes=("/dev/nvidia0", "/dev/nvidiactl")),
        adds={"uvm-node-missing": REFUSE},
    ),
    "driver-570": Broken(
        base="rtx-5090-idle",
        change=driver(version="570.86.10", cuda=(12, 8)),
        adds={"driver-below-cuda13": REFUSE},
    ),
    "driver-570-cuda-python-13": Broken(
        base="hand-made",
        change=both(
            driver(version="575.57.08", cuda=(12, 9)),
            torch(version="2.11.0+cu129", cuda=(12, 9)),
            packages(torch="2.11.0+cu129"),
            relocked,
            env(libraries=()),
            toolkits(machines.toolkit((12, 9), "CUDA_HOME", "PATH", "system", root="/usr/local/cuda-12.9")),
            variables(CUDA_HOME="/usr/local/cuda-12.9"),
        ),
        adds={"driver-below-cuda13": REFUSE},
    ),
    "driver-570-fresh": Broken(
        base="fresh",
        change=driver(version="570.86.10", cuda=(12, 8)),
        adds={"driver-below-cuda13": WARN},
    ),
    "driver-older-than-torch": Broken(
        base="rtx-5090-idle",
        change=both(
            driver(version="580.95.05", cuda=(13, 0)),
            torch(version="2.15.0+cu132", cuda=(13, 2)),
            packages(torch="2.15.0"),
            relocked,
        ),
        adds={"driver-older-than-cuda": WARN},
    ),
    "driver-older-than-nvcc": Broken(
        base="hand-made",
        change=toolkits(machines.toolkit((13, 3), "CUDA_HOME", "PATH", "system", root="/usr/local/cuda-13.0")),
        adds={"driver-older-than-cuda": WARN},
    ),
    "wsl-of-5090": Broken(
        base="rtx-5090-idle",
        change=host(kernel="6.6.87.2-microsoft-standard-WSL2"),
        adds={"wsl": NOTE},
    ),
    "card-taken-out": Broken(
        base="rtx-5090-idle",
        change=both(
            no_cards,
            driver(
                version=None,
                cuda=None,
                module=None,
                device_nodes=(),
                pci_devices=(),
                error="NVML Shared Library Not Found",
            ),
        ),
        adds={"gpu-none": NOTE},
    ),
    # The cards.
    "card-lost": Broken(
        base="rtx-pro-6000-x4",
        change=gpu(2, uuid="", name="unknown", bus_id="", compute_capability=None, problem="GPU is lost"),
        adds={"gpu-unreadable": REFUSE},
    ),
    "mixed": Broken(
        base="mixed-chosen",
        change=variables(CUDA_VISIBLE_DEVICES=None),
        adds={"cards-mixed": WARN, "display-card": NOTE},
    ),
    "mixed-by-number": Broken(
        base="mixed-chosen",
        change=variables(CUDA_VISIBLE_DEVICES="0,1"),
        adds={"cards-mixed": WARN, "display-card": NOTE},
    ),
    "mixed-screen-by-slot": Broken(
        base="mixed-chosen",
        change=variables(CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID"),
        adds={"not-sm120": NOTE},
    ),
    "memory-uneven": Broken(
        base="rtx-pro-6000-x4",
        change=gpu(3, name="NVIDIA GeForce RTX 5090", memory_total=34_190_917_632, ecc=None, ecc_errors=None),
        adds={"memory-uneven": NOTE},
    ),
    "visible-devices-beyond": Broken(
        base="rtx-pro-6000-x4",
        change=variables(CUDA_VISIBLE_DEVICES="0,1,7,2"),
        adds={"visible-devices": REFUSE},
    ),
    "visible-devices-other-uuid": Broken(
        base="mixed-chosen",
        change=variables(CUDA_VISIBLE_DEVICES="GPU-ffffffff-0000-0000-0000-000000000000"),
        adds={"visible-devices": REFUSE},
    ),
    "visible-devices-none": Broken(
        base="rtx-5090-idle",
        change=variables(CUDA_VISIBLE_DEVICES=""),
        adds={"visible-devices": WARN},
    ),
    "display-among-four": Broken(
        base="rtx-pro-6000-x4",
        change=gpu(0, display_active=True),
        adds={"display-card": NOTE},
    ),
    "hopper-in-the-slot": Broken(
        base="rtx-5090-idle",
        change=lambda facts: replace(facts, gpus=(machines.h200(),)),
        adds={"not-sm120": NOTE},
    ),
    "ecc-errors": Broken(base="rtx-pro-6000-x4", change=gpu(1, ecc_errors=2), adds={"ecc-errors": WARN}),
    "too-hot": Broken(
        base="rtx-5090-at-work",
        change=gpu(throttle_reasons=("sw_power_cap", "hw_thermal_slowdown"), temperature=90, clock_sm=1600),
        adds={"gpu-throttled": WARN},
    ),
    "power-limit": Broken(base="rtx-5090-idle", change=gpu(power_limit=450.0), adds={"power-limit": NOTE}),
    "persistence-off": Broken(base="rtx-5090-idle", change=gpu(persistence=False), adds={"persistence-off": NOTE}),
    "mig-on": Broken(base="rtx-pro-6000-x4", change=gpu(0, mig=True), adds={"mig-on": WARN}),
    "busy": Broken(base="rtx-pro-6000-x4", change=gpu(1, processes=2, memory_used=70 * GIB), adds={"gpu-busy": NOTE}),
    # Links.
    "pcie-eight-lanes": Broken(base="rtx-5090-idle", change=gpu(pcie_width=8), adds={"pcie-width": WARN}),
    "pcie-slow-at-work": Broken(base="rtx-5090-at-work", change=gpu(pcie_generation=3), adds={"pcie-generation": WARN}),
    "pcie-old-slot": Broken(base="rtx-5090-idle", change=gpu(pcie_generation_max=4), adds={"pcie-slot": NOTE}),
    "no-peer-access": Broken(
        base="rtx-pro-6000-x8",
        change=lambda facts: replace(facts, pairs=machines.pairs(8, "chipset_not_supported")),
        adds={"peer-access": NOTE},
    ),
    "iommu-on": Broken(base="rtx-pro-6000-x4", change=host(iommu="on"), adds={"iommu-translated": WARN}),
    "nccl-preset": Broken(base="rtx-pro-6000-x8", change=variables(NCCL_P2P_LEVEL="SYS"), adds={"nccl-settings": NOTE}),
    "nccl-sockets": Broken(
        base="rtx-5090-x4-no-peer", change=variables(NCCL_SHM_DISABLE="1"), adds={"nccl-settings": WARN}
    ),
    "expandable-segments": Broken(
        base="rtx-pro-6000-x4",
        change=variables(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512, expandable_segments:True"),
        adds={"expandable-segments": WARN},
    ),
    # Memory and limits.
    "host-memory-16": Broken(
        base="rtx-5090-idle", change=memory(total=16 * GIB, available=14 * GIB), adds={"host-memory": NOTE}
    ),
    "cgroup-8": Broken(base="container", change=memory(cgroup_limit=8 * GIB), adds={"host-memory": NOTE}),
    "spark-full": Broken(
        base="dgx-spark",
        change=memory(available=9 * GIB, cached=2 * GIB),
        adds={"unified-memory": WARN},
        drops=_notes("unified-memory"),
    ),
    "unified-memory-of-5090": Broken(
        base="rtx-5090-idle", change=host(unified_memory=True), adds={"unified-memory": NOTE}
    ),
    "small-shm": Broken(base="container", change=memory(shm_total=64 * 2**20), adds={"shared-memory": WARN}),
    "few-files": Broken(
        base="rtx-5090-idle",
        change=lambda facts: replace(facts, limits={"nofile": 1024, "memlock": 8_388_608}),
        adds={"limits": NOTE},
    ),
    "memlock-in-container": Broken(
        base="container",
        change=lambda facts: replace(facts, limits={"nofile": 1_048_576, "memlock": 65_536}),
        adds={"limits": NOTE},
    ),
    # Folders.
    "cache-on-nfs": Broken(
        base="rtx-5090-idle",
        change=both(
            disk("flashinfer", filesystem="nfs4", mount="/home"), disk("triton", filesystem="nfs4", mount="/home")
        ),
        adds={"cache-on-network": NOTE},
    ),
    "state-on-lustre": Broken(
        base="rtx-pro-6000-x8",
        change=disk("state", filesystem="lustre", mount="/home"),
        adds={"cache-on-network": WARN},
    ),
    "home-server-gone": Broken(
        base="rtx-pro-6000-x8",
        change=disk(
            "home",
            filesystem="nfs4",
            mount="/home",
            free=None,
            total=None,
            writable=None,
            problem="no answer within 10 s",
        ),
        adds={"folder-silent": WARN},
    ),
    "state-server-gone": Broken(
        base="rtx-pro-6000-x8",
        change=disk("state", free=None, total=None, writable=None, problem="no answer within 10 s"),
        adds={"folder-silent": REFUSE},
    ),
    "cache-read-only": Broken(
        base="rtx-5090-idle", change=disk("triton", writable=False), adds={"folder-not-writable": NOTE}
    ),
    "state-read-only": Broken(
        base="rtx-5090-idle", change=disk("state", writable=False), adds={"folder-not-writable": REFUSE}
    ),
    "disk-full-fresh": Broken(base="fresh", change=disk("state", free=6 * GIB), adds={"disk-space": WARN}),
    "disk-full": Broken(base="rtx-5090-idle", change=disk("state", free=GIB), adds={"disk-space": WARN}),
    "small-tmp": Broken(
        base="rtx-5090-idle",
        change=disk("temporary", free=GIB // 2, filesystem="tmpfs", mount="/tmp"),
        adds={"disk-space": WARN},
    ),
    # Environments.
    "half-installed": Broken(
        base="rtx-5090-idle",
        change=env(problem="its installation was not finished"),
        adds={"environment-broken": WARN},
    ),
    "torch-not-importable": Broken(
        base="rtx-5090-idle",
        change=torch(arch_list=None, problem="ImportError: libcudnn.so.9: cannot open shared object file"),
        adds={"environment-broken": REFUSE},
    ),
    "torch-replaced-by-cpu": Broken(
        base="rtx-5090-idle",
        change=both(
            torch(version="2.14.1+cpu", cuda=None, arch_list=()), packages(torch="2.14.1+cpu"), env(libraries=())
        ),
        adds={"torch-replaced": REFUSE},
    ),
    "torch-replaced-by-cu129": Broken(
        base="rtx-5090-idle",
        change=both(
            env(locked={**machines.STABLE, "torch": "2.14.1+cu130"}),
            packages(torch="2.14.1+cu129"),
            torch(version="2.14.1+cu129", cuda=(12, 9)),
            env(libraries=(), triton_ptxas=(13, 1)),
            toolkits(machines.cuda_home(version=(12, 9))),
        ),
        adds={"torch-replaced": REFUSE},
    ),
    "packages-changed": Broken(
        base="rtx-5090-idle",
        change=packages(nvidia_cublas="13.3.0.5", torch_c_dlpack_ext=None),
        adds={"packages-changed": WARN},
    ),
    "torch-cpu-adopted": Broken(
        base="hand-made",
        change=both(
            torch(version="2.14.1+cpu", cuda=None, arch_list=()),
            packages(torch="2.14.1+cpu"),
            env(locked={}, libraries=()),
        ),
        adds={"torch-cpu-build": REFUSE},
    ),
    "torch-before-blackwell": Broken(
        base="rtx-5090-idle",
        change=torch(arch_list=("sm_50", "sm_70", "sm_80", "sm_90")),
        adds={"torch-arch-list": REFUSE},
    ),
    "torch-ptx-only": Broken(
        base="rtx-5090-idle",
        change=torch(arch_list=("sm_80", "sm_90", "compute_90")),
        adds={"torch-arch-list": WARN},
    ),
    "torch-120a-on-121": Broken(
        base="dgx-spark",
        change=torch(arch_list=("sm_90", "sm_120a")),
        adds={"torch-arch-list": REFUSE},
    ),
    "torch-without-the-screen-card": Broken(
        base="mixed-chosen",
        change=both(
            torch(arch_list=("sm_100", "sm_120")),
            variables(CUDA_VISIBLE_DEVICES=None),
        ),
        adds={"torch-arch-list": WARN, "cards-mixed": WARN, "display-card": NOTE},
    ),
    # What the loader finds.
    "kernels-for-cuda-12": Broken(base="rtx-5090-idle", change=CUDA_12_KERNELS, adds={"cuda-major-mixed": REFUSE}),
    "kernels-for-cuda-12-cpu-machine": Broken(
        base="rtx-5090-idle",
        change=both(
            CUDA_12_KERNELS,
            no_cards,
            driver(
                version=None,
                cuda=None,
                module=None,
                device_nodes=(),
                pci_devices=(),
                error="NVML Shared Library Not Found",
            ),
        ),
        adds={"cuda-major-mixed": REFUSE, "gpu-none": NOTE},
    ),
    "kernels-for-cuda-13-beside-cu129": Broken(
        base="hand-made",
        change=both(
            torch(version="2.11.0+cu129", cuda=(12, 9)),
            packages(torch="2.11.0+cu129", cuda_python="12.9.0", cuda_bindings="12.9.0"),
            relocked,
            toolkits(machines.toolkit((12, 9), "CUDA_HOME", "PATH", "system")),
            env(libraries=machines.libraries()[:2]),
            variables(CUDA_HOME="/usr/local/cuda-12.9"),
        ),
        adds={"cuda-major-mixed": REFUSE},
    ),
    "nvrtc-missing": Broken(
        base="rtx-5090-idle",
        change=library("deep_gemm/_C.so", unresolved_cuda=("libnvrtc.so.13",)),
        adds={"cuda-library-missing": REFUSE},
    ),
    "nvshmem-missing": Broken(
        base="rtx-5090-idle",
        change=library("deep_gemm/_C.so", unresolved_cuda=("libnvshmem_host.so.3",)),
        adds={"cuda-library-missing": WARN},
    ),
    "abi-other-torch": Broken(
        base="rtx-5090-idle", change=library(KERNELS, undefined_torch=(ABI_SYMBOL,)), adds={"torch-abi": REFUSE}
    ),
    "abi-on-spark": Broken(
        base="dgx-spark", change=library(KERNELS, undefined_torch=(ABI_SYMBOL,)), adds={"torch-abi": REFUSE}
    ),
    "abi-of-its-own-torch": Broken(
        base="rtx-5090-idle",
        change=library(
            "torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch27-cuda.so",
            path="torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch214-cuda.so",
        ),
        adds={"torch-abi": REFUSE},
    ),
    "truncated-kernels": Broken(
        base="rtx-5090-idle",
        change=library(KERNELS, needed=(), problem="ends in the middle of its section headers"),
        adds={"library-unreadable": WARN},
    ),
    # Packages that must agree.
    "cubin-older": Broken(
        base="jit-cache",
        change=both(packages(flashinfer_cubin="0.6.13"), relocked),
        adds={"flashinfer-versions": REFUSE},
    ),
    "jit-cache-other-cuda": Broken(
        base="jit-cache",
        change=both(packages(flashinfer_jit_cache="0.6.16+cu129"), relocked),
        adds={"flashinfer-versions": REFUSE},
    ),
    "jit-cache-other-minor": Broken(
        base="jit-cache",
        change=both(packages(flashinfer_jit_cache="0.6.16+cu132"), relocked),
        adds={"flashinfer-versions": WARN},
    ),
    "bypass-set": Broken(
        base="rtx-5090-idle",
        change=variables(FLASHINFER_DISABLE_VERSION_CHECK="0"),
        adds={"version-check-bypassed": WARN},
    ),
    "bypass-hides-mismatch": Broken(
        base="jit-cache",
        change=both(
            packages(flashinfer_python="0.6.11", flashinfer_cubin="0.6.11", flashinfer_jit_cache="0.6.9+cu130"),
            relocked,
            variables(FLASHINFER_DISABLE_VERSION_CHECK="1"),
        ),
        adds={"flashinfer-versions": REFUSE, "version-check-bypassed": REFUSE},
    ),
    "bypass-hides-old-kernels": Broken(
        base="rtx-5090-idle",
        change=both(packages(sglang_kernel="0.4.6"), relocked, variables(SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="true")),
        adds={"version-check-bypassed": REFUSE},
    ),
    "cutlass-wrong-one": Broken(
        base="older-set", change=env(clashes=(machines.cutlass_clash("base"),)), adds={"cutlass-dsl-libs": REFUSE}
    ),
    "cutlass-on-hopper": Broken(
        base="older-set",
        change=lambda facts: replace(facts, gpus=(machines.h200(),)),
        adds={"cutlass-dsl-libs": WARN, "not-sm120": NOTE},
    ),
    "cutlass-changed": Broken(
        base="older-set", change=env(clashes=(machines.cutlass_clash("changed"),)), adds={"file-clash": WARN}
    ),
    "cutlass-gone": Broken(
        base="older-set", change=env(clashes=(machines.cutlass_clash(None),)), adds={"file-clash": WARN}
    ),
    "shared-library-path": Broken(
        base="older-set",
        change=env(
            clashes=(
                Clash(
                    path="nvidia/cu13/lib/libnvshmem_host.so.3",
                    claims=(
                        Claim(distribution="nvidia-nvshmem-cu13", version="3.4.5", sha256="11" * 32),
                        Claim(distribution="sgl-deep-ep", version="0.1.2.post1", sha256="22" * 32),
                    ),
                    on_disk="22" * 32,
                ),
            )
        ),
        adds={"file-clash": NOTE},
    ),
    "wheel-mislabelled": Broken(
        base="wheel-store", change=wheel(metadata_version="0.3.18.post2"), adds={"wheel-name": REFUSE}
    ),
    "wheel-damaged": Broken(
        base="wheel-store",
        change=wheel(metadata_name=None, metadata_version=None, problem="not a zip file"),
        adds={"wheel-name": WARN},
    ),
    # Toolkits.
    "cuda-home-nowhere": Broken(
        base="hand-made",
        change=both(
            variables(CUDA_HOME="/usr/local/cuda-12.4"),
            toolkits(
                Toolkit(root="/usr/local/cuda-12.4", seen_by=("CUDA_HOME",), problems=("there is no such folder",)),
                machines.toolkit((13, 0), "PATH", "system"),
            ),
        ),
        adds={"cuda-home-missing": REFUSE},
    ),
    "cuda-home-nowhere-managed": Broken(
        base="rtx-5090-idle", change=variables(CUDA_HOME="/usr/local/cuda-gone"), adds={"cuda-home-missing": WARN}
    ),
    "cuda-home-12": Broken(
        base="hand-made",
        change=both(
            variables(CUDA_HOME="/usr/local/cuda-12.9"),
            toolkits(machines.toolkit((12, 9), "CUDA_HOME", "PATH", "system")),
        ),
        adds={"cuda-home-other-cuda": REFUSE},
    ),
    "cuda-home-12-managed": Broken(
        base="system-cuda-12",
        change=both(
            variables(CUDA_HOME="/usr/local/cuda-12.6"),
            lambda facts: replace(
                facts, toolkits=(*facts.toolkits[:2], machines.toolkit((12, 6), "CUDA_HOME", "PATH", "system"))
            ),
        ),
        adds={"cuda-home-other-cuda": NOTE},
    ),
    "two-toolkits": Broken(
        base="hand-made",
        change=toolkits(machines.toolkit((13, 0), "CUDA_HOME", "system"), machines.toolkit((12, 8), "PATH", "system")),
        adds={"toolkits-mixed": WARN},
    ),
    "two-toolkits-managed": Broken(
        base="rtx-5090-idle",
        change=both(
            variables(CUDA_HOME="/usr/local/cuda-13.0"),
            lambda facts: replace(
                facts,
                toolkits=(
                    *facts.toolkits,
                    machines.toolkit((13, 0), "CUDA_HOME", "system"),
                    machines.toolkit((12, 8), "PATH", "system"),
                ),
            ),
        ),
        adds={"toolkits-mixed": NOTE},
    ),
    "nvcc-newer-than-headers": Broken(
        base="hand-made",
        change=used_toolkit(nvcc=(13, 1), cccl="3.1.0"),
        adds={"nvcc-headers": REFUSE},
    ),
    "nvcc-newer-than-headers-old-cccl": Broken(
        base="hand-made", change=used_toolkit(nvcc=(13, 1), cccl="2.8.0"), adds={"nvcc-headers": WARN}
    ),
    "nvcc-wheel-unused": Broken(
        base="rtx-5090-idle",
        change=lambda facts: replace(
            facts, toolkits=(facts.toolkits[0], replace(facts.toolkits[1], nvcc=(13, 5), ptxas=(13, 5)))
        ),
        adds={"nvcc-headers": NOTE},
    ),
    "nvcc-missing": Broken(
        base="hand-made",
        change=both(toolkits(), variables(CUDA_HOME=None, PATH=machines.PATH)),
        adds={"nvcc-missing": WARN},
    ),
    "nvcc-missing-with-jit-cache": Broken(
        base="container",
        change=both(toolkits(), variables(CUDA_HOME=None, PATH=machines.PATH)),
        adds={"nvcc-missing": NOTE},
    ),
    "wheels-as-cuda-home": Broken(
        base="hand-made",
        change=both(
            toolkits(replace(machines.wheels_toolkit(), seen_by=("CUDA_HOME", "PATH"))),
            variables(CUDA_HOME=f"{SITE}/nvidia/cu13"),
        ),
        adds={"cudart-unlinkable": WARN},
    ),
    "toolkit-half-read": Broken(
        base="hand-made",
        change=used_toolkit(ptxas=None, problems=("bin/ptxas ended with 127: no output",)),
        adds={"toolkit-unreadable": NOTE},
    ),
    "ld-library-path": Broken(
        base="system-cuda-12",
        change=both(
            variables(LD_LIBRARY_PATH="/usr/local/cuda-12.6/lib64"),
            lambda facts: replace(
                facts, toolkits=(*facts.toolkits[:2], machines.toolkit((12, 6), "PATH", "LD_LIBRARY_PATH", "system"))
            ),
        ),
        adds={"ld-library-path": WARN},
    ),
    # Compilers.
    "nvcc-12-6": Broken(
        base="hand-made",
        change=both(
            torch(version="2.11.0+cu126", cuda=(12, 6)),
            packages(torch="2.11.0+cu126", cuda_python="12.6.2", cuda_bindings="12.6.2"),
            relocked,
            env(libraries=(), triton_ptxas=(12, 8)),
            toolkits(machines.toolkit((12, 6), "CUDA_HOME", "PATH", "system")),
            variables(CUDA_HOME="/usr/local/cuda-12.6"),
        ),
        adds={"nvcc-too-old": REFUSE},
    ),
    "nvcc-12-8": Broken(
        base="hand-made",
        change=both(
            torch(version="2.11.0+cu128", cuda=(12, 8)),
            packages(torch="2.11.0+cu128", cuda_python="12.8.0", cuda_bindings="12.8.0"),
            relocked,
            env(libraries=(), triton_ptxas=(12, 8)),
            toolkits(machines.toolkit((12, 8), "CUDA_HOME", "PATH", "system")),
            variables(CUDA_HOME="/usr/local/cuda-12.8"),
        ),
        adds={"nvcc-too-old": WARN},
    ),
    "nvcc-12-8-on-spark": Broken(
        base="dgx-spark",
        change=both(
            torch(version="2.11.0+cu128", cuda=(12, 8)),
            packages(torch="2.11.0+cu128", cuda_python="12.8.0", cuda_bindings="12.8.0"),
            relocked,
            env(libraries=()),
            toolkits(machines.cuda_home(version=(12, 8))),
        ),
        adds={"nvcc-too-old": REFUSE},
    ),
    "arch-list-of-hopper": Broken(
        base="rtx-5090-idle",
        change=variables(FLASHINFER_CUDA_ARCH_LIST="9.0a 10.0a"),
        adds={"arch-list-variable": WARN},
    ),
    "arch-list-semicolons": Broken(
        base="rtx-5090-idle",
        change=variables(FLASHINFER_CUDA_ARCH_LIST="12.0f;12.1a"),
        adds={"arch-list-variable": WARN},
    ),
    "arch-list-120a-on-spark": Broken(
        base="dgx-spark", change=variables(FLASHINFER_CUDA_ARCH_LIST="12.0a"), adds={"arch-list-variable": WARN}
    ),
    "triton-ptxas-12-8-on-spark": Broken(
        base="dgx-spark",
        change=both(
            packages(triton="3.5.1"),
            relocked,
            env(triton_ptxas=(12, 8), triton_ptxas_path=f"{SITE}/triton/backends/nvidia/bin/ptxas"),
        ),
        adds={"triton-ptxas": REFUSE},
    ),
    "triton-ptxas-12-4": Broken(
        base="hand-made",
        change=both(
            env(triton_ptxas=(12, 4), triton_ptxas_path="/usr/local/cuda-12.4/bin/ptxas"),
            variables(TRITON_PTXAS_BLACKWELL_PATH="/usr/local/cuda-12.4/bin/ptxas"),
        ),
        adds={"triton-ptxas": REFUSE},
    ),
    "glibc-2-41-cuda-12-9": Broken(
        base="hand-made",
        change=both(
            host(glibc="2.41", distribution="Debian GNU/Linux 13 (trixie)"),
            torch(version="2.11.0+cu129", cuda=(12, 9)),
            packages(torch="2.11.0+cu129", cuda_python="12.9.0", cuda_bindings="12.9.0"),
            relocked,
            env(libraries=()),
            toolkits(machines.toolkit((12, 9), "CUDA_HOME", "PATH", "system")),
            variables(CUDA_HOME="/usr/local/cuda-12.9"),
        ),
        adds={"glibc-cuda-headers": REFUSE},
    ),
    "glibc-2-42-cuda-13-0": Broken(
        base="rtx-5090-idle",
        change=host(glibc="2.42", distribution="Ubuntu 25.10"),
        adds={"glibc-cuda-headers": REFUSE},
    ),
    "no-compiler": Broken(base="rtx-5090-idle", change=tool("g++", path=None), adds={"compiler-missing": WARN}),
    "no-compiler-with-jit-cache": Broken(
        base="container", change=tool("g++", path=None), adds={"compiler-missing": NOTE}
    ),
    "cmake-3-22": Broken(base="rtx-5090-idle", change=tool("cmake", version="3.22.1"), adds={"cmake-old": NOTE}),
    # Variables.
    "deepgemm-on-12-0": Broken(base="rtx-5090-idle", change=both(OLD_SET, relocked), adds={"deepgemm": WARN}),
    "deepgemm-on-12-1": Broken(
        base="dgx-spark", change=both(packages(sglang="0.5.18"), relocked), adds={"deepgemm": WARN}
    ),
    "ld-preload": Broken(
        base="rtx-5090-idle", change=variables(LD_PRELOAD="/usr/lib/libjemalloc.so.2"), adds={"ld-preload": NOTE}
    ),
    "python-path": Broken(
        base="rtx-5090-idle", change=variables(PYTHONPATH="/home/ada/src/sglang/python"), adds={"python-path": NOTE}
    ),
    "half-read": Broken(
        base="rtx-5090-idle",
        change=lambda facts: replace(facts, unread=("the home folder /home/ada: no answer within 10 s",)),
        adds={"facts-unread": NOTE},
    ),
}


def facts_of(name: str) -> Facts:
    if name in HEALTHY:
        return HEALTHY[name].facts
    broken = BROKEN[name]
    return broken.change(HEALTHY[broken.base].facts)


def expected(name: str) -> frozenset[tuple[str, str]]:
    """(id, severity) of all findings, no more and no less."""
    if name in HEALTHY:
        return frozenset((note, NOTE) for note in HEALTHY[name].notes)
    broken = BROKEN[name]
    kept = expected(broken.base) - {(note, NOTE) for note in broken.drops}
    return kept | frozenset(broken.adds.items())


NAMES = (*HEALTHY, *BROKEN)


def sparse(facts: Facts) -> dict[str, object]:
    """Facts as JSON without what is as by default, so that a snapshot shows what it is about."""
    plain = _sparse(facts, facts_to_json(facts))
    assert isinstance(plain, dict)
    return {"schema": facts.schema, **plain}


def _sparse(value: object, plain: object) -> object:
    if dataclasses.is_dataclass(value):
        assert isinstance(plain, dict)
        return {
            item.name: _sparse(getattr(value, item.name), plain[item.name])
            for item in dataclasses.fields(value)
            if not _default(item, getattr(value, item.name))
        }
    if isinstance(value, tuple) and isinstance(plain, list):
        return [_sparse(inner, outer) for inner, outer in zip(value, plain, strict=True)]
    return plain


def _default(item: "dataclasses.Field[Any]", value: object) -> bool:
    if item.default_factory is not dataclasses.MISSING:
        return bool(value == item.default_factory())
    return item.default is not dataclasses.MISSING and bool(value == item.default)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name in NAMES:
        path_of(name).write_text(_text(sparse(facts_of(name))), "utf-8")


def _text(plain: Mapping[str, object]) -> str:
    """One line for each field, and for each item of a list."""
    lines = []
    for key, value in plain.items():
        items = [_line(item) for item in value] if isinstance(value, list) else []
        lines.append(f" {_line(key)}: " + ("[\n  " + ",\n  ".join(items) + "\n ]" if items else _line(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    write()
