"""Compilers against cards and system: nvcc and ptxas for 12.x, glibc's headers against CUDA's, the host compiler."""

import re
import shlex
from collections.abc import Iterator

from sm120.host.facts import Environment, Facts, Tool, Toolkit, Version2
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import (
    compiling_environments,
    cuda_environments,
    dotted,
    grouped,
    jit_toolkit,
    jit_toolkits,
    names,
    parsed,
    release,
    setup,
    sm12x,
    tool_read,
    version_of,
)

_KNOWS_120 = (12, 8)  # nvcc and ptxas that know sm_120 and sm_120a (CUDA 12.8 release notes)
_KNOWS_121 = (12, 9)  # … and sm_121 and the family target sm_120f
# The first CUDA whose crt/math_functions.h agrees with glibc's declarations, read in the headers of nvidia-cuda-nvcc
# 12.8 and 12.9 and of nvidia-cuda-crt 13.0 to 13.3: sinpi and cospi (glibc 2.41) in 13.0, rsqrt (glibc 2.42) in 13.2.
_GLIBC = (((2, 42), (13, 2), "rsqrt"), ((2, 41), (13, 0), "sinpi and cospi"))
_BLACKWELL_PTXAS = (3, 6)  # since then Triton has a ptxas of its own for Blackwell cards (triton/knobs.py)


def _needs(facts: Facts) -> Version2 | None:
    """The oldest CUDA that can compile for every visible 12.x card."""
    minors = {gpu.compute_capability[1] for gpu in sm12x(facts) if gpu.compute_capability}
    return None if not minors else _KNOWS_120 if minors == {0} else _KNOWS_121


def _cards(facts: Facts) -> str:
    return grouped(sm12x(facts))


def nvcc_too_old(facts: Facts) -> Iterator[Finding]:
    """CUDA 12.8 knows 120a only, 12.9 and newer 120f and 121a too (flashinfer #3633)."""
    needed = _needs(facts)
    if needed is None:
        return
    archs = facts.variables.get("FLASHINFER_CUDA_ARCH_LIST", "").split()
    for toolkit, environments in jit_toolkits(facts):
        if toolkit.nvcc is None or toolkit.nvcc >= _KNOWS_121:
            continue
        plain = toolkit.nvcc >= needed
        if plain and archs == ["12.0a"]:
            continue
        yield Finding(
            id="nvcc-too-old",
            severity=Severity.WARN if plain else Severity.REFUSE,
            what=f"The toolkit for {names(environments)} has nvcc {dotted(toolkit.nvcc)}, which "
            + (
                f"compiles for 12.0 as sm_120a only: {_cards(facts)}."
                if plain
                else f"cannot compile for {_cards(facts)}; that takes {dotted(needed)}."
            ),
            read=(tool_read("nvcc", toolkit.nvcc, toolkit), f"{_cards(facts)}: NVML"),
            why="FlashInfer swallows “SM 12.x requires CUDA >= 12.9” and ends later in “No supported CUDA "
            "architectures found for major versions [12]”."
            if plain
            else "Every kernel that is built while the server runs fails.",
            cure="export FLASHINFER_CUDA_ARCH_LIST=12.0a" if plain else setup(environments),
        )


def arch_list_variable(facts: Facts) -> Iterator[Finding]:
    """FLASHINFER_CUDA_ARCH_LIST: words like 12.0f with blanks between (flashinfer/compilation_context.py, #1966)."""
    text = facts.variables.get("FLASHINFER_CUDA_ARCH_LIST")
    gpus = sm12x(facts)
    if not text or not gpus:
        return
    words = [re.fullmatch(r"(\d{1,2})\.(\d)([af]?)", word) for word in text.split(" ")]
    malformed = [word for word, found in zip(text.split(" "), words, strict=True) if found is None]
    archs = [((int(found[1]), int(found[2])), found[3]) for found in words if found]
    left = [gpu for gpu in gpus if not any(_for(gpu.compute_capability, *arch) for arch in archs)]
    problem = (
        f"holds {malformed[0]!r}, which FlashInfer cannot read"
        if malformed
        else f"leaves out {grouped(left)}"
        if left
        else _needs_newer(facts, archs)
    )
    if problem:
        yield Finding(
            id="arch-list-variable",
            severity=Severity.WARN,
            what=f"FLASHINFER_CUDA_ARCH_LIST is {text!r} and {problem}.",
            read=(f"FLASHINFER_CUDA_ARCH_LIST={text}: environment", f"{_cards(facts)}: NVML"),
            why="FlashInfer builds for what this variable says, not for the card: kernels fail to build or to load.",
            cure="unset FLASHINFER_CUDA_ARCH_LIST",
        )


def _for(on: Version2 | None, arch: Version2, suffix: str) -> bool:
    """Whether a kernel for this entry runs on the card; without a suffix FlashInfer adds the right one."""
    return arch == on or (suffix == "f" and on is not None and arch[0] == on[0] and arch[1] <= on[1])


def _needs_newer(facts: Facts, archs: list[tuple[Version2, str]]) -> str | None:
    newer = any(arch[0] == 12 and (suffix == "f" or arch[1] > 0) for arch, suffix in archs)
    for toolkit, _ in jit_toolkits(facts):
        if newer and toolkit.nvcc and toolkit.nvcc < _KNOWS_121:
            return f"needs nvcc 12.9, and {toolkit.root} has {dotted(toolkit.nvcc)}"
    return None


def triton_ptxas(facts: Facts) -> Iterator[Finding]:
    """Triton assembles with its own ptxas; that of CUDA 12.8 does not know sm_121a (vllm #32704, triton #10331)."""
    needed = _needs(facts)
    if needed is None:
        return
    for environment, _ in cuda_environments(facts):
        own_for_blackwell = release(version_of(environment, "triton")) >= _BLACKWELL_PTXAS
        if environment.triton_ptxas is None or environment.triton_ptxas >= needed:
            continue
        variable = "TRITON_PTXAS_BLACKWELL_PATH" if own_for_blackwell else "TRITON_PTXAS_PATH"
        chosen = facts.variables.get(variable)
        other = _newer_ptxas(facts, environment, needed)
        yield Finding(
            id="triton-ptxas",
            severity=Severity.REFUSE,
            what=f"Triton in environment {environment.stack} assembles with ptxas {dotted(environment.triton_ptxas)}, "
            f"which does not know {_cards(facts)}.",
            read=(
                f"ptxas {dotted(environment.triton_ptxas)}: {environment.triton_ptxas_path or environment.site}",
                f"{variable} {chosen or 'not set'}: environment",
                f"{_cards(facts)}: NVML",
            ),
            why=f"Every Triton kernel ends in “ptxas fatal: Value 'sm_12{_newest(facts)}a' is not defined for option "
            "'gpu-name'”.",
            cure=f"export {variable}={shlex.quote(f'{other.root}/bin/ptxas')}" if other else setup([environment]),
        )


def _newest(facts: Facts) -> int:
    return max(gpu.compute_capability[1] for gpu in sm12x(facts) if gpu.compute_capability)


def _newer_ptxas(facts: Facts, environment: Environment, needed: Version2) -> Toolkit | None:
    first = jit_toolkit(facts, environment)
    every = ([first] if first else []) + list(facts.toolkits)
    return next((toolkit for toolkit in every if toolkit.ptxas and toolkit.ptxas >= needed), None)


def glibc_cuda_headers(facts: Facts) -> Iterator[Finding]:
    """C23's sinpi and rsqrt are noexcept in glibc, not in older CUDA headers (llama.cpp #19100, nixpkgs #484031)."""
    glibc = release(facts.host.glibc)
    for toolkit, environments in jit_toolkits(facts):
        fixed = next(((cuda, what) for since, cuda, what in _GLIBC if glibc >= since), None)
        version = toolkit.headers or toolkit.nvcc
        if fixed is None or version is None or version >= fixed[0]:
            continue
        cuda, functions = fixed
        yield Finding(
            id="glibc-cuda-headers",
            severity=Severity.REFUSE,
            what=f"Glibc {facts.host.glibc} and the headers of CUDA {dotted(version)}, for {names(environments)}, "
            f"declare {functions} differently.",
            read=(
                f"glibc {facts.host.glibc}: confstr CS_GNU_LIBC_VERSION",
                f"CUDA {dotted(version)}: cuda_runtime_api.h of {toolkit.root}",
            ),
            why="Nothing compiles: “exception specification is incompatible with that of previous function”; CMake "
            "reports it as a broken nvcc. The headers of CUDA need no editing: they are right in a newer CUDA.",
            cure=f"use a stack with CUDA {dotted(cuda)} or newer, or a container whose glibc is older than "
            f"{'2.42' if functions == 'rsqrt' else '2.41'}",
        )


def compiler_missing(facts: Facts) -> Iterator[Finding]:
    """CUDA's compiler needs a host compiler, and torch extensions are C++."""
    tool = _tool(facts, "g++")
    named = any(facts.variables.get(name) for name in ("CXX", "CUDAHOSTCXX"))
    if tool is None or tool.path is not None or named:
        return
    compiling = [environment for environment, _ in compiling_environments(facts)]
    finished = all(version_of(environment, "flashinfer-jit-cache") for environment in compiling)
    yield Finding(
        id="compiler-missing",
        severity=Severity.WARN if sm12x(facts) and not (compiling and finished) else Severity.NOTE,
        what="There is no g++ on PATH.",
        read=("g++: not found on PATH",),
        why="nvcc calls it for the host half of every kernel: what is built while the server runs fails, and so do "
        "build-kernels and some tests of this toolkit.",
        cure="install the system's C++ compiler, as in: sudo apt install g++",
    )


def cmake_old(facts: Facts) -> Iterator[Finding]:
    """The toolkit brings its own CMake; sgl-kernel built by hand asks for 3.26 (its CMakeLists.txt)."""
    tool = _tool(facts, "cmake")
    version = parsed(tool.version) if tool else None
    if tool and tool.path and version is not None and version.release < (3, 26):
        yield Finding(
            id="cmake-old",
            severity=Severity.NOTE,
            what=f"The cmake on PATH is {tool.version}.",
            read=(f"cmake {tool.version}: {tool.path}",),
            why="This toolkit uses its own; only kernels that are built by hand would need 3.26 or newer.",
            cure=None,
        )


def _tool(facts: Facts, name: str) -> Tool | None:
    return next((tool for tool in facts.tools if tool.name == name), None)
