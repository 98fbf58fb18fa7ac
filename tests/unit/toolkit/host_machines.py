"""Machines that exist, as facts: the healthy ones that snapshots of broken ones are made from.

Numbers are those of public reports and data sheets; paths and serial numbers are invented.
"""

from collections.abc import Mapping
from dataclasses import replace

from sm120.host.facts import (
    Claim,
    Clash,
    Cpu,
    Disk,
    Distribution,
    Driver,
    Environment,
    Facts,
    Gpu,
    Host,
    Library,
    Memory,
    Pair,
    Tool,
    Toolkit,
    Torch,
    Version2,
    Wheel,
)

GIB = 2**30
STATE = "/home/ada/sm120/.sm120"
SITE = f"{STATE}/env/stable/lib/python3.12/site-packages"
ARCH_LIST = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
TOOLS = (
    Tool(name="g++", path="/usr/bin/g++", version="13.3.0"),
    Tool(name="cmake", path="/usr/bin/cmake", version="3.28.3"),
    Tool(name="git", path="/usr/bin/git", version="2.43.0"),
    Tool(name="nvcc"),
    Tool(name="ccache"),
)
PATH = "/usr/local/bin:/usr/bin:/bin"


# Cards


def rtx_5090(index: int = 0, *, number: int = 1) -> Gpu:
    """Idle, as it is most of the time: P8, and PCIe at generation 1 to save power."""
    return Gpu(
        index=index,
        uuid=f"GPU-5090{number:04d}-1111-2222-3333-444455556666",
        name="NVIDIA GeForce RTX 5090",
        bus_id=f"00000000:{number:02X}:00.0",
        compute_capability=(12, 0),
        memory_total=34_190_917_632,
        memory_used=510_000_000,
        pcie_generation=1,
        pcie_generation_max=5,
        pcie_generation_device_max=5,
        pcie_width=16,
        pcie_width_max=16,
        clock_sm=180,
        clock_sm_max=3090,
        clock_memory=405,
        power_draw=14.2,
        power_limit=575.0,
        power_limit_default=575.0,
        temperature=38,
        throttle_reasons=("gpu_idle",),
        performance_state=8,
        display_active=False,
        persistence=True,
        processes=0,
    )


def at_work(gpu: Gpu) -> Gpu:
    """Under full load: the power cap is reached, which is what it is for."""
    return replace(
        gpu,
        pcie_generation=gpu.pcie_generation_max,
        clock_sm=2700,
        power_draw=574.0,
        temperature=71,
        throttle_reasons=("sw_power_cap",),
        performance_state=1,
        memory_used=30 * GIB,
        processes=1,
    )


def rtx_pro_6000(index: int = 0, *, number: int = 0x41) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-6000{number:04x}-aaaa-bbbb-cccc-ddddeeeeffff",
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        bus_id=f"00000000:{number:02X}:00.0",
        compute_capability=(12, 0),
        memory_total=102_641_958_912,
        memory_used=4_000_000,
        pcie_generation=1,
        pcie_generation_max=5,
        pcie_generation_device_max=5,
        pcie_width=16,
        pcie_width_max=16,
        clock_sm=180,
        clock_sm_max=3090,
        power_draw=21.0,
        power_limit=600.0,
        power_limit_default=600.0,
        temperature=33,
        throttle_reasons=("gpu_idle",),
        performance_state=8,
        ecc=True,
        ecc_errors=0,
        display_active=False,
        mig=False,
        persistence=True,
        numa_node=0 if number < 0x80 else 1,
        processes=0,
    )


def gb10() -> Gpu:
    """NVML knows neither its memory nor a PCIe link that means anything."""
    return Gpu(
        index=0,
        uuid="GPU-0010aaaa-1111-2222-3333-444455556666",
        name="NVIDIA GB10",
        bus_id="0000000F:01:00.0",
        compute_capability=(12, 1),
        pcie_generation=1,
        pcie_generation_max=5,
        pcie_width=1,
        pcie_width_max=16,
        clock_sm=2411,
        clock_sm_max=3003,
        power_draw=11.0,
        temperature=44,
        performance_state=0,
        display_active=False,
        persistence=True,
        processes=1,
    )


def h200() -> Gpu:
    """A data-centre card stays in P0 and at full link speed when it is idle."""
    return Gpu(
        index=0,
        uuid="GPU-0200aaaa-1111-2222-3333-444455556666",
        name="NVIDIA H200",
        bus_id="00000000:19:00.0",
        compute_capability=(9, 0),
        memory_total=150_754_820_096,
        memory_used=600_000_000,
        pcie_generation=5,
        pcie_generation_max=5,
        pcie_generation_device_max=5,
        pcie_width=16,
        pcie_width_max=16,
        clock_sm=345,
        clock_sm_max=1980,
        power_limit=700.0,
        power_limit_default=700.0,
        throttle_reasons=("gpu_idle",),
        performance_state=0,
        ecc=True,
        ecc_errors=0,
        mig=False,
        persistence=True,
        processes=0,
    )


def pairs(number: int, read: str = "ok", *, socket: int = 4) -> tuple[Pair, ...]:
    """All pairs of cards; those of different CPU sockets lie SYS apart."""
    return tuple(
        Pair(a=a, b=b, path="NODE" if a // socket == b // socket else "SYS", read=read, write=read)
        for a in range(number)
        for b in range(a + 1, number)
    )


# Environments


def libraries(major: int = 13) -> tuple[Library, ...]:
    """As in the stable set: some packages carry one library for each CUDA or each torch."""
    torch = ("libtorch.so", "libtorch_cpu.so", "libc10.so", "libc10_cuda.so", "libtorch_cuda.so")
    hook = "torch_memory_saver_hook_mode_preload"
    return (
        Library(
            path="sgl_kernel/sm100/common_ops.abi3.so",
            distribution="sglang-kernel",
            needed=(f"libcudart.so.{major}", f"libcublas.so.{major}", *torch),
        ),
        Library(
            path="deep_gemm/_C.so",
            distribution="sgl-deep-gemm",
            needed=(f"libcudart.so.{major}", f"libnvrtc.so.{major}", f"libcublasLt.so.{major}", *torch),
        ),
        Library(
            path=f"{hook}_cu12.abi3.so",
            distribution="torch-memory-saver",
            needed=("libcuda.so.1", "libcudart.so.12"),
            unresolved_cuda=("libcuda.so.1", "libcudart.so.12") if major != 12 else ("libcuda.so.1",),
        ),
        Library(
            path=f"{hook}_cu13.abi3.so",
            distribution="torch-memory-saver",
            needed=("libcuda.so.1", "libcudart.so.13"),
            unresolved_cuda=("libcuda.so.1",) if major == 13 else ("libcuda.so.1", "libcudart.so.13"),
        ),
        Library(
            path=f"{hook}.abi3.so",
            distribution="torch-memory-saver",
            needed=("libcuda.so.1", "libcudart.so.12"),
        ),
        Library(
            path="torch_c_dlpack_ext/libtorch_c_dlpack_addon_torch27-cuda.so",
            distribution="torch-c-dlpack-ext",
            needed=torch,
            undefined_torch=("_ZN3c104cuda14device_synchronizeEv",),
        ),
        Library(path="nvidia_cutlass_dsl/cu12/lib/libcute_dsl_runtime.so", distribution="nvidia-cutlass-dsl-libs-cu12"),
        Library(path="nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so", distribution="nvidia-cutlass-dsl-libs-cu13"),
    )


STABLE = {
    "torch": "2.14.1",
    "triton": "3.8.0",
    "sglang": "0.5.23",
    "sglang-kernel": "0.4.10",
    "sgl-deep-gemm": "0.2.3.post2",
    "flashinfer-python": "0.7.2",
    "cuda-python": "13.4.4",
    "cuda-bindings": "13.4.4",
    "nvidia-cutlass-dsl": "4.8.0",
    "nvidia-cutlass-dsl-libs-base": "4.8.0",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.0",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.0",
    "nvidia-cublas": "13.1.1.3",
    "nvidia-cudnn-cu13": "9.24.0.43",
    "torch-memory-saver": "0.0.10",
    "torch-c-dlpack-ext": "0.1.5",
}
_REQUIRES = {
    "sglang": (
        "torch==2.14.1",
        "sglang-kernel==0.4.10",
        "flashinfer_python[cu13]==0.7.2",
        'torchcodec==0.17.0; sys_platform != "linux"',
    )
}


def distributions(
    versions: Mapping[str, str], requires: Mapping[str, tuple[str, ...]] = _REQUIRES
) -> tuple[Distribution, ...]:
    return tuple(
        Distribution(name=name, version=version, requires=requires.get(name, ())) for name, version in versions.items()
    )


def environment(
    stack: str = "stable",
    *,
    versions: Mapping[str, str] = STABLE,
    torch: Torch | None = None,
    requires: Mapping[str, tuple[str, ...]] = _REQUIRES,
) -> Environment:
    site = f"{STATE}/env/{stack}/lib/python3.12/site-packages"
    return Environment(
        stack=stack,
        python=f"{STATE}/env/{stack}/bin/python",
        python_version="3.12.3",
        site=site,
        distributions=distributions(versions, requires),
        torch=torch or Torch(version="2.14.1+cu130", cuda=(13, 0), arch_list=ARCH_LIST),
        libraries=libraries(),
        triton_ptxas=(13, 1),
        triton_ptxas_path=f"{site}/triton/backends/nvidia/bin/ptxas-blackwell",
        locked=dict(versions),
    )


def cpu_environment() -> Environment:
    versions = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "nvidia-cuda-runtime": "13.0.96"}
    return Environment(
        stack="cpu",
        python=f"{STATE}/env/cpu/bin/python",
        python_version="3.11.2",
        site=f"{STATE}/env/cpu/lib/python3.11/site-packages",
        distributions=distributions(versions),
        torch=Torch(version="2.13.0+cpu", arch_list=()),
        locked=versions,
    )


def cuda_home(stack: str = "stable", version: Version2 = (13, 0)) -> Toolkit:
    return Toolkit(
        root=f"{STATE}/cuda/{stack}",
        seen_by=(f"home:{stack}",),
        nvcc=version,
        ptxas=version,
        headers=version,
        cccl="3.0.2",
        cccl_under="include",
        library_folder="lib64",
        cudart=("libcudart.so", "libcudart.so.13", "libcudart.so.13.0.96"),
    )


def toolkit(version: Version2, *seen_by: str, root: str | None = None) -> Toolkit:
    """An installed toolkit, as NVIDIA's own installers leave it."""
    return Toolkit(
        root=root or f"/usr/local/cuda-{version[0]}.{version[1]}",
        seen_by=seen_by,
        nvcc=version,
        ptxas=version,
        headers=version,
        cccl="3.0.2" if version >= (13, 0) else "2.7.0",
        cccl_under="include/cccl" if version >= (13, 0) else "include",
        library_folder="lib64",
        cudart=("libcudart.so", f"libcudart.so.{version[0]}"),
    )


def wheels_toolkit(stack: str = "stable") -> Toolkit:
    """What NVIDIA's wheels make of site-packages: no lib64, no unversioned names."""
    return Toolkit(
        root=f"{STATE}/env/{stack}/lib/python3.12/site-packages/nvidia/cu13",
        seen_by=(f"wheels:{stack}",),
        nvcc=(13, 0),
        ptxas=(13, 0),
        headers=(13, 0),
        cccl="3.0.2",
        cccl_under="include/cccl",
        library_folder="lib",
        cudart=("libcudart.so.13",),
    )


# Machines


def disks(free: int = 800 * GIB) -> tuple[Disk, ...]:
    places = {
        "state": STATE,
        "runs": "/home/ada/sm120/runs",
        "temporary": "/tmp",
        "home": "/home/ada",
        "huggingface": "/home/ada/.cache/huggingface/hub",
        "flashinfer": "/home/ada/.cache/flashinfer",
        "triton": "/home/ada/.triton/cache",
    }
    return tuple(
        Disk(purpose=purpose, path=path, mount="/", filesystem="ext4", total=2 * free, free=free, writable=True)
        for purpose, path in places.items()
    )


def machine(gpus: tuple[Gpu, ...], *, memory: int = 128 * GIB, driver: str = "590.48.01") -> Facts:
    """A workstation or server with these cards, a driver for CUDA 13.1 and the stable stack."""
    return Facts(
        collected="2026-11-20T09:30:00Z",
        toolkit="0.1.0",
        host=Host(kernel="6.8.0-87-generic", distribution="Ubuntu 24.04.3 LTS", glibc="2.39", unified_memory=False),
        driver=Driver(
            version=driver,
            cuda=(13, 1),
            module="open",
            device_nodes=("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl"),
            pci_devices=tuple(f"{gpu.bus_id[4:].lower()} 10de:2bb1" for gpu in gpus),
        ),
        cpu=Cpu(architecture="x86_64", model="AMD EPYC 9355", cores=32, threads=64, allowed=64, numa_nodes=1),
        memory=Memory(
            total=memory,
            available=memory * 9 // 10,
            free=memory // 2,
            cached=memory // 3,
            shm_total=memory // 2,
            shm_free=memory // 2,
        ),
        gpus=gpus,
        disks=disks(),
        limits={"nofile": 1_048_576, "memlock": None},
        toolkits=(cuda_home(), wheels_toolkit()),
        tools=TOOLS,
        environments=(environment(),),
        variables={"PATH": PATH},
    )


def cpu_only() -> Facts:
    return replace(
        machine((), memory=16 * GIB),
        driver=Driver(error="NVML Shared Library Not Found"),
        toolkits=(replace(wheels_toolkit("cpu"), nvcc=None, ptxas=None),),
        environments=(cpu_environment(),),
        host=Host(kernel="6.1.0-41-amd64", distribution="Debian GNU/Linux 12 (bookworm)", glibc="2.36"),
        tools=(replace(TOOLS[0], version="12.2.0"), replace(TOOLS[1], version="3.31.6"), *TOOLS[2:]),
    )


def servers(number: int) -> Facts:
    """RTX PRO 6000 cards in one or two sockets, IOMMU in pass-through, peer access working."""
    cards = tuple(rtx_pro_6000(i, number=0x01 + 0x20 * i) for i in range(number))
    facts = machine(cards, memory=512 * GIB)
    return replace(facts, pairs=pairs(number), host=replace(facts.host, iommu="pt"))


def spark() -> Facts:
    """DGX Spark with its memory full of page cache."""
    facts = machine((gb10(),), memory=119 * GIB)
    return replace(
        facts,
        host=replace(facts.host, unified_memory=True, kernel="6.17.0-1014-nvidia"),
        cpu=Cpu(architecture="aarch64", model="Cortex-X925", cores=20, threads=20, allowed=20, numa_nodes=1),
        memory=Memory(total=119 * GIB, available=92 * GIB, free=6 * GIB, cached=84 * GIB, shm_total=60 * GIB),
    )


def mixed(*, chosen: bool = True) -> Facts:
    """Two cards for work, one of an older generation for the screen."""
    screen = replace(
        rtx_5090(0, number=1),
        uuid="GPU-3090aaaa-1111-2222-3333-444455556666",
        name="NVIDIA GeForce RTX 3090",
        compute_capability=(8, 6),
        memory_total=25_769_803_776,
        display_active=True,
        pcie_generation_max=4,
        pcie_generation_device_max=4,
        power_limit=350.0,
        power_limit_default=350.0,
    )
    gpus = (screen, rtx_5090(1, number=0x21), rtx_5090(2, number=0x41))
    facts = replace(machine(gpus), pairs=pairs(3))
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in gpus[1:])}
    return replace(facts, variables={**facts.variables, **(visible if chosen else {})})


def jit_cache() -> Facts:
    """FlashInfer with its finished modules: the local tag is CUDA's, not another version."""
    versions = {
        **STABLE,
        "flashinfer-python": "0.6.16",
        "flashinfer-cubin": "0.6.16",
        "flashinfer-jit-cache": "0.6.16+cu130",
    }
    return replace(machine((rtx_5090(),)), environments=(environment(versions=versions, requires={}),))


def container() -> Facts:
    """An image with everything in it, adopted as it is, with the limits that its documentation asks for."""
    facts = servers(2)
    own = replace(
        environment("image", versions={**STABLE, "flashinfer-jit-cache": "0.7.2+cu130"}),
        python="/srv/venv/bin/python",
        site="/srv/venv/lib/python3.12/site-packages",
        adopted=True,
    )
    return replace(
        facts,
        host=replace(facts.host, container="docker", iommu=None),
        driver=replace(
            facts.driver, device_nodes=("/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl")
        ),
        memory=replace(facts.memory, cgroup_limit=256 * GIB, cgroup_used=GIB, shm_total=16 * GIB),
        disks=tuple(replace(disk, filesystem="overlay") for disk in facts.disks),
        toolkits=(toolkit((13, 0), "CUDA_HOME", "PATH", "system"),),
        tools=(Tool(name="g++", path="/usr/bin/g++", version="13.3.0"),),
        environments=(own,),
        variables={"PATH": f"/usr/local/cuda-13.0/bin:{PATH}", "CUDA_HOME": "/usr/local/cuda-13.0"},
    )


def rented() -> Facts:
    """A rented card in an image made for it: a package with a part for a library that is not installed."""
    facts = container()
    cupy = Library(
        path="cupy_backends/cuda/libs/cutensor.cpython-312-x86_64-linux-gnu.so",
        distribution="cupy-cuda13x",
        needed=("libcutensor.so.2", "libstdc++.so.6"),
        unresolved_cuda=("libcutensor.so.2",),
    )
    return replace(
        facts,
        gpus=(h200(),),
        pairs=(),
        driver=replace(facts.driver, version="580.159.04", cuda=(13, 0)),
        limits={"nofile": 20000, "memlock": None},
        tools=(Tool(name="g++"),),
        environments=(replace(facts.environments[0], libraries=(*facts.environments[0].libraries, cupy)),),
        variables={
            **facts.variables,
            "CXX": "/usr/local/gcc/bin/g++",
            "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
            "TORCH_CUDA_ARCH_LIST": "9.0a",
        },
    )


def fresh() -> Facts:
    """A card and its driver, nothing set up yet, and an old toolkit of the distribution that nobody will use."""
    return replace(
        machine((rtx_5090(),)),
        environments=(),
        toolkits=(toolkit((12, 0), "PATH", root="/usr/lib/nvidia-cuda-toolkit"),),
    )


def system_cuda_12() -> Facts:
    """An older system toolkit beside the environment's own CUDA home, which its tasks use."""
    facts = machine((rtx_5090(),))
    return replace(facts, toolkits=(*facts.toolkits, toolkit((12, 6), "PATH", "system")))


def hand_made() -> Facts:
    """An adopted environment that builds with the system's toolkit of the same CUDA."""
    facts = container()
    return replace(
        facts,
        host=replace(facts.host, container=None),
        environments=(
            replace(facts.environments[0], stack="mine", distributions=distributions(STABLE), locked=STABLE),
        ),
    )


def older_set() -> Facts:
    """SGLang 0.5.15.post1 with torch 2.11.0: CuTe DSL packages that overlap, with the right one on disk."""
    versions = {
        **STABLE,
        "torch": "2.11.0",
        "triton": "3.6.0",
        "sglang": "0.5.15.post1",
        "sglang-kernel": "0.4.4",
        "sgl-deep-gemm": "0.1.4",
        "flashinfer-python": "0.6.12",
        "flashinfer-cubin": "0.6.12",
        "nvidia-cutlass-dsl-libs-base": "4.5.2",
        "nvidia-cutlass-dsl-libs-cu13": "4.5.2",
    }
    own = environment(
        versions=versions,
        torch=Torch(version="2.11.0+cu130", cuda=(13, 0), arch_list=ARCH_LIST),
        requires={"sglang": ("torch==2.11.0", "sglang-kernel==0.4.4", "flashinfer_python[cu13]==0.6.12")},
    )
    return replace(machine((rtx_5090(),)), environments=(replace(own, clashes=(cutlass_clash("cu13"),)),))


def cutlass_clash(on_disk: str | None) -> Clash:
    """The compiler of the CuTe DSL, written by two packages."""
    hashes = {"base": "ba5e" * 16, "cu13": "c013" * 16, "changed": "dead" * 16}
    return Clash(
        path="nvidia_cutlass_dsl/python_packages/cutlass/_mlir/_mlir_libs/_cutlass_ir.cpython-312-x86_64-linux-gnu.so",
        claims=tuple(
            Claim(distribution=f"nvidia-cutlass-dsl-libs-{name}", version="4.5.2", sha256=hashes[name])
            for name in ("base", "cu13")
        ),
        on_disk=hashes[on_disk] if on_disk else None,
    )


def wheel_store() -> Facts:
    """A kernel wheel that waits to be installed, and says inside what its name says."""
    name = "sgl_kernel-0.3.18.post2+cu130-cp310-abi3-manylinux2014_x86_64.whl"
    wheel = Wheel(
        path=f"{STATE}/wheels/{'ab' * 32}/{name}",
        name="sgl-kernel",
        version="0.3.18.post2+cu130",
        metadata_name="sgl_kernel",
        metadata_version="0.3.18.post2+cu130",
    )
    return replace(machine((rtx_5090(),)), wheels=(wheel,))


def wsl() -> Facts:
    """Windows' subsystem: no card on the PCI bus and no device nodes, and NVML works."""
    facts = machine((rtx_5090(),))
    return replace(
        facts,
        host=replace(facts.host, kernel="6.6.87.2-microsoft-standard-WSL2"),
        driver=replace(facts.driver, device_nodes=(), pci_devices=(), module=None),
    )
