"""The doctor's rules: pure functions of facts, each with a stable id."""

from collections.abc import Mapping

from sm120.host.facts import Facts
from sm120.host.findings import Finding, Rule, Severity
from sm120.host.rules import (
    cards,
    compilers,
    driver,
    environments,
    health,
    links,
    loading,
    memory,
    packages,
    storage,
    toolkits,
    variables,
)

RULES: Mapping[str, Rule] = {
    "driver-missing": driver.missing,
    "driver-library-mismatch": driver.library_mismatch,
    "driver-kernel-module": driver.kernel_module,
    "driver-unusable": driver.unusable,
    "uvm-node-missing": driver.uvm_node_missing,
    "driver-below-cuda13": driver.below_cuda13,
    "driver-older-than-cuda": driver.older_than_cuda,
    "wsl": driver.wsl,
    "gpu-none": driver.gpu_none,
    "gpu-unreadable": cards.gpu_unreadable,
    "cards-mixed": cards.cards_mixed,
    "memory-uneven": cards.memory_uneven,
    "visible-devices": cards.visible_devices,
    "display-card": cards.display_card,
    "not-sm120": cards.not_sm120,
    "ecc-errors": health.ecc_errors,
    "gpu-throttled": health.throttled,
    "power-limit": health.power_limit,
    "persistence-off": health.persistence_off,
    "mig-on": health.mig_on,
    "gpu-busy": health.gpu_busy,
    "pcie-width": links.pcie_width,
    "pcie-generation": links.pcie_generation,
    "pcie-slot": links.pcie_slot,
    "peer-access": links.peer_access,
    "iommu-translated": links.iommu_translated,
    "nccl-settings": links.nccl_settings,
    "expandable-segments": links.expandable_segments,
    "host-memory": memory.host_memory,
    "unified-memory": memory.unified_memory,
    "shared-memory": memory.shared_memory,
    "limits": memory.limits,
    "cache-on-network": storage.cache_on_network,
    "folder-silent": storage.folder_silent,
    "folder-not-writable": storage.folder_not_writable,
    "disk-space": storage.disk_space,
    "environment-broken": environments.environment_broken,
    "torch-replaced": environments.torch_replaced,
    "packages-changed": environments.packages_changed,
    "torch-cpu-build": environments.torch_cpu_build,
    "torch-arch-list": environments.torch_arch_list,
    "cuda-major-mixed": loading.cuda_major_mixed,
    "cuda-library-missing": loading.cuda_library_missing,
    "torch-abi": loading.torch_abi,
    "library-unreadable": loading.library_unreadable,
    "flashinfer-versions": packages.flashinfer_versions,
    "version-check-bypassed": packages.version_check_bypassed,
    "cutlass-dsl-libs": packages.cutlass_dsl_libs,
    "file-clash": packages.file_clash,
    "wheel-name": packages.wheel_name,
    "cuda-home-missing": toolkits.cuda_home_missing,
    "cuda-home-other-cuda": toolkits.cuda_home_other_cuda,
    "toolkits-mixed": toolkits.toolkits_mixed,
    "nvcc-headers": toolkits.nvcc_headers,
    "nvcc-missing": toolkits.nvcc_missing,
    "cudart-unlinkable": toolkits.cudart_unlinkable,
    "toolkit-unreadable": toolkits.toolkit_unreadable,
    "ld-library-path": toolkits.ld_library_path,
    "nvcc-too-old": compilers.nvcc_too_old,
    "arch-list-variable": compilers.arch_list_variable,
    "triton-ptxas": compilers.triton_ptxas,
    "glibc-cuda-headers": compilers.glibc_cuda_headers,
    "compiler-missing": compilers.compiler_missing,
    "cmake-old": compilers.cmake_old,
    "deepgemm": variables.deepgemm,
    "ld-preload": variables.preload,
    "python-path": variables.python_path,
    "facts-unread": variables.unread,
}

_ORDER = {severity: place for place, severity in enumerate(Severity)}


def judge(facts: Facts) -> tuple[Finding, ...]:
    """What all rules say, worst first. A rule that fails is this toolkit's defect, and costs only its own findings."""
    findings: list[Finding] = []
    for name, rule in RULES.items():
        try:
            findings += rule(facts)
        except Exception as error:  # noqa: BLE001 - whatever it is, the user still gets what the other rules say
            findings.append(_failed(name, error))
    return tuple(sorted(findings, key=lambda finding: (_ORDER[finding.severity], finding.id, finding.what)))


def _failed(name: str, error: Exception) -> Finding:
    return Finding(
        id="rule-failed",
        severity=Severity.NOTE,
        what=f"The rule {name} could not judge these facts: {type(error).__name__}: {error}.",
        read=(f"{type(error).__name__}: {error}",),
        why="This is a defect of this toolkit, and what the rule would have said is unknown.",
        cure="report it with the facts: scripts/inv doctor --save FILE",
    )
