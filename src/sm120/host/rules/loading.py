"""What the loader makes of an environment's kernel libraries: CUDA major, libtorch symbols, missing libraries."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from sm120.host.facts import Environment, Facts, Library, Version2
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import again, count, cuda_environments, dotted, listed, release, torch_read, version_of

# Libraries whose soname carries the CUDA major version since CUDA 12 (others count for themselves: libcufft.so.12 is
# CUDA 13's, libcusparse.so.12 belongs to both).
_BY_MAJOR = re.compile(r"^lib(?:cudart|nvrtc|nvrtc-builtins|cublas|cublasLt|nvJitLink)\.so\.(\d{1,3})(?:\.\d+)*$")
_DRIVERS_OWN = re.compile(r"^lib(?:cuda|nvidia-[\w-]+|nvcuvid)\.so\b")  # these come with the driver, not with packages
_CORE = re.compile(r"^lib(?:cudart|nvrtc|nvJitLink|cublas|cublasLt|cudnn|cufft|curand|cusolver|cusparse|nccl)\b")
# Packages that a server loads whole; others may hold parts for what is not installed, as cupy does for cuTENSOR.
_ESSENTIAL = re.compile(r"^(?:torch|torchvision|torchaudio|triton|vllm|deep-gemm|sglang|sgl|flashinfer)(?:-|$)")
# Some packages ship the same library once for each CUDA or torch version and load the one that fits.
_VARIANT = re.compile(r"[_.-]?cu(?:da)?_?1[1-9]\d?(?![0-9])")
_FOR_TORCH = re.compile(r"torch_?(\d)[._]?(\d{1,2})(?![0-9])")


def cuda_major_mixed(facts: Facts) -> Iterator[Finding]:
    """One CUDA major over what is really loaded: DT_NEEDED, never package names (sglang #18203, vllm #44335)."""
    for environment, cuda in cuda_environments(facts):
        for distribution, libraries in _by_distribution(_of_other_cuda(environment, cuda)).items():
            every = {n for library in libraries for n in _other_majors(library, cuda)}
            needed = sorted(every, key=lambda name: (not name.startswith("libcudart"), name))  # the best known first
            name = _named(environment, distribution)
            yield Finding(
                id="cuda-major-mixed",
                severity=Severity.REFUSE if _essential(distribution) else Severity.WARN,
                what=f"In environment {environment.stack} {name} needs {listed(needed)}, and torch is built for CUDA "
                f"{dotted(cuda)}.",
                read=(
                    *(f"{', '.join(_other_majors(lib, cuda))}: DT_NEEDED of {lib.path}" for lib in libraries[:3]),
                    torch_read(environment),
                ),
                why=f"It is a build for another CUDA: its import ends in “{needed[0]}: cannot open shared object "
                f"file”, or two CUDA runtimes share a process. A link from {needed[0]} to the library of another major "
                "version is no cure: it only moves the failure to where nobody looks for it.",
                cure=again(
                    environment,
                    f"install the build of {distribution or 'this library'} for CUDA {cuda[0]} in its place",
                ),
            )


def _of_other_cuda(environment: Environment, cuda: Version2) -> list[Library]:
    """Libraries of another CUDA major, but for those whose twin for torch's CUDA lies beside them."""
    right = {_VARIANT.sub("", lib.path) for lib in environment.libraries if _fits(lib, cuda)}
    return [
        lib for lib in environment.libraries if _other_majors(lib, cuda) and _VARIANT.sub("", lib.path) not in right
    ]


def _majors(library: Library) -> Iterator[tuple[str, int]]:
    for name in library.needed:
        found = _BY_MAJOR.match(name)
        if found:
            yield name, int(found[1])


def _other_majors(library: Library, cuda: Version2) -> list[str]:
    return [name for name, major in _majors(library) if major != cuda[0]]


def _fits(library: Library, cuda: Version2) -> bool:
    return any(major == cuda[0] for _, major in _majors(library))


def cuda_library_missing(facts: Facts) -> Iterator[Finding]:
    """A CUDA library of torch's own major version that is found nowhere (sglang-omni #620)."""
    for environment, cuda in cuda_environments(facts):
        # One of another CUDA major is another rule's, or never loaded, since its twin is.
        lacking = [lib for lib in environment.libraries if not _other_majors(lib, cuda) and _absent(lib)]
        for distribution, libraries in _by_distribution(lacking).items():
            absent = sorted({name for lib in libraries for name in _absent(lib)})
            core = Severity.REFUSE if any(_CORE.match(name) for name in absent) else Severity.WARN
            yield Finding(
                id="cuda-library-missing",
                severity=core if _essential(distribution) else Severity.NOTE,
                what=f"In environment {environment.stack} {_named(environment, distribution)} needs {listed(absent)}, "
                "found in no folder where the loader looks.",
                read=tuple(f"{', '.join(_absent(lib))}: DT_NEEDED of {lib.path}" for lib in libraries[:3]),
                why=f"Its import ends in “{absent[0]}: cannot open shared object file”."
                if _essential(distribution)
                else "That part of it cannot be loaded; whether anything asks for it is another question.",
                cure=again(environment, f"install the package that brings {absent[0]} into {environment.python}"),
            )


def _absent(library: Library) -> list[str]:
    return [name for name in library.unresolved_cuda if not _DRIVERS_OWN.match(name)]


def torch_abi(facts: Facts) -> Iterator[Finding]:
    """The C++ ABI of libtorch changes with every release: ABI, not architecture (sglang #30562, #29317, #18203)."""
    for environment in facts.environments:
        if environment.torch is None:
            continue
        torch = release(environment.torch.version)[:2]
        broken = [lib for lib in environment.libraries if lib.undefined_torch and not _for_other_torch(lib, torch)]
        for distribution, libraries in _by_distribution(broken).items():
            symbols = sorted({symbol for lib in libraries for symbol in lib.undefined_torch})
            yield Finding(
                id="torch-abi",
                severity=Severity.REFUSE if _essential(distribution) else Severity.WARN,
                what=f"In environment {environment.stack} {_named(environment, distribution)} needs "
                f"{count(len(symbols), 'symbol')} that torch {environment.torch.version} does not have, such as "
                f"{symbols[0]}.",
                read=(
                    *(f"{listed(lib.undefined_torch, 2)}: undefined in {lib.path}" for lib in libraries[:3]),
                    torch_read(environment),
                ),
                why="It was compiled against another torch. The import error names a missing kernel or architecture, "
                "but the cause is the ABI: adding sm_120 or sm_121 to it would change nothing.",
                cure=again(
                    environment,
                    f"install the {distribution or 'library'} that was built for torch {environment.torch.version}",
                ),
            )


def _for_other_torch(library: Library, torch: tuple[int, ...]) -> bool:
    """Its name says for which torch it is, and that is another one: libtorch_c_dlpack_addon_torch27-cuda.so."""
    found = _FOR_TORCH.search(library.path.rpartition("/")[2])
    return found is not None and (int(found[1]), int(found[2])) != torch


def library_unreadable(facts: Facts) -> Iterator[Finding]:
    """A library that is no whole ELF file: an interrupted installation, a full disk."""
    for environment in facts.environments:
        damaged = [lib for lib in environment.libraries if lib.problem]
        if damaged:
            yield Finding(
                id="library-unreadable",
                severity=Severity.WARN,
                what=f"In environment {environment.stack} {count(len(damaged), 'kernel file')} cannot be read: "
                f"{listed(lib.path for lib in damaged)}.",
                read=tuple(f"{lib.problem}: {lib.path}" for lib in damaged[:3]),
                why="A damaged library fails when it is loaded, which may be in the middle of a run.",
                cure=again(environment, f"install {damaged[0].distribution or 'its package'} again"),
            )


def _essential(distribution: str | None) -> bool:
    return distribution is None or _ESSENTIAL.match(distribution) is not None


def _by_distribution(libraries: Iterable[Library]) -> dict[str | None, list[Library]]:
    found: dict[str | None, list[Library]] = defaultdict(list)
    for library in libraries:
        found[library.distribution].append(library)
    return dict(found)


def _named(environment: Environment, distribution: str | None) -> str:
    if distribution is None:
        return "a library of no package"
    version = version_of(environment, distribution)
    return f"{distribution} {version}" if version else distribution
