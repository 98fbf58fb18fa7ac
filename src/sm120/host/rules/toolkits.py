"""The CUDA toolkit that kernels would be built with: is there one, is it whole, and does it fit torch."""

import re
import shlex
from collections.abc import Iterator

from sm120.host.facts import Facts, Toolkit, Version2
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import (
    compiling_environments,
    cuda_environments,
    cuda_variable,
    dotted,
    home,
    jit_toolkit,
    jit_toolkits,
    listed,
    names,
    parsed,
    seen_by,
    setup,
    shell_toolkit,
    sm12x,
    tool_read,
    toolkit_version,
    torch_read,
    version_of,
)


def cuda_home_missing(facts: Facts) -> Iterator[Finding]:
    """CUDA_HOME names a folder that holds no toolkit; builds look nowhere else then (flashinfer's get_cuda_path)."""
    variable = cuda_variable(facts)
    if variable is None:
        return
    name, value = variable
    toolkit = seen_by(facts, name)
    if toolkit is not None and (toolkit.nvcc or toolkit.headers):
        return
    without = [environment for environment, _ in compiling_environments(facts) if home(facts, environment) is None]
    problem = listed(toolkit.problems) if toolkit and toolkit.problems else "no toolkit is there"
    yield Finding(
        id="cuda-home-missing",
        severity=Severity.REFUSE if without else Severity.WARN,
        what=f"{name} is {value}, and {problem}.",
        read=(f"{name}={value}: environment", f"{problem}: {value}"),
        why="Builds trust this variable and look nowhere else; they end in “nvcc: not found”.",
        cure=f"unset {name}",
    )


def cuda_home_other_cuda(facts: Facts) -> Iterator[Finding]:
    """JIT builds would use another CUDA major than torch's (flashinfer #3493; torch's cpp_extension refuses)."""
    toolkit = shell_toolkit(facts)
    version = toolkit_version(toolkit) if toolkit else None
    if toolkit is None or version is None:
        return
    variable = cuda_variable(facts)
    for environment, cuda in compiling_environments(facts):
        managed = home(facts, environment) is not None
        if version[0] == cuda[0] or (managed and variable is None):
            continue
        yield Finding(
            id="cuda-home-other-cuda",
            severity=Severity.NOTE if managed else Severity.REFUSE,
            what=f"{variable[0] if variable else 'The toolkit that builds find'} is CUDA {dotted(version)}, and torch "
            f"in environment {environment.stack} is built for CUDA {dotted(cuda)}.",
            read=(tool_read("nvcc", version, toolkit), torch_read(environment)),
            why="This toolkit's tasks use the environment's own CUDA home; programs that are started by hand would not."
            if managed
            else "Kernels built with it load another CUDA runtime than torch, or do not build: “CUDA compiler and CUDA "
            "toolkit headers are incompatible”.",
            cure=f"unset {variable[0]}" if managed and variable else setup([environment]),
        )


def toolkits_mixed(facts: Facts) -> Iterator[Finding]:
    """PATH's nvcc belongs to another toolkit than CUDA_HOME (flashinfer #3493)."""
    variable, on_path = cuda_variable(facts), seen_by(facts, "PATH")
    chosen = seen_by(facts, variable[0]) if variable else None
    if variable is None or not on_path or not chosen or on_path.root == chosen.root:
        return
    if on_path.nvcc is None or chosen.nvcc is None or on_path.nvcc == chosen.nvcc:
        return
    compiling = [environment for environment, _ in compiling_environments(facts)]
    without = [environment for environment in compiling if home(facts, environment) is None]
    yield Finding(
        id="toolkits-mixed",
        severity=Severity.NOTE if compiling and not without else Severity.WARN,
        what=f"{variable[0]} is CUDA {dotted(chosen.nvcc)}, and the nvcc on PATH is of CUDA {dotted(on_path.nvcc)}.",
        read=(tool_read("nvcc", chosen.nvcc, chosen), tool_read("nvcc", on_path.nvcc, on_path)),
        why="Some builds ask PATH and others the variable; one with its compiler from here and its headers from there "
        "fails, or is silently built for something else.",
        cure=setup(without) if without else f"export PATH={shlex.quote(f'{chosen.root}/bin')}:$PATH",
    )


def nvcc_headers(facts: Facts) -> Iterator[Finding]:
    """Compiler and runtime headers beside it are one version (sglang #29425, flashinfer #3493).

    Since CCCL 3 libcu++ stops the compilation when they differ at all (cuda/std/__cccl/cuda_toolkit.h).
    """
    for toolkit, environments in jit_toolkits(facts):
        if toolkit.nvcc is None or toolkit.headers is None or toolkit.nvcc == toolkit.headers:
            continue
        cccl = parsed(toolkit.cccl)
        strict = toolkit.nvcc[0] != toolkit.headers[0] or (cccl is not None and cccl.major >= 3)
        yield Finding(
            id="nvcc-headers",
            severity=Severity.REFUSE if strict else Severity.WARN,
            what=f"The toolkit for {names(environments)} has nvcc {dotted(toolkit.nvcc)} and headers of CUDA "
            f"{dotted(toolkit.headers)}.",
            read=_both(toolkit),
            why="Kernels that include libcu++ stop with “CUDA compiler and CUDA toolkit headers are incompatible”."
            if strict
            else "Code that nvcc makes may ask the runtime for what it does not have yet.",
            cure=setup(environments),
        )
    for environment, _ in compiling_environments(facts):
        wheels = seen_by(facts, f"wheels:{environment.stack}")
        if wheels is None or wheels.nvcc is None or wheels.headers is None:
            continue
        if wheels.nvcc != wheels.headers and jit_toolkit(facts, environment) is not wheels:
            yield Finding(
                id="nvcc-headers",
                severity=Severity.NOTE,
                what=f"The wheels of environment {environment.stack} bring nvcc {dotted(wheels.nvcc)} and headers of "
                f"CUDA {dotted(wheels.headers)}.",
                read=_both(wheels),
                why="They cannot be used together; nothing uses them unless CUDA_HOME is pointed at them.",
                cure=None,
            )


def _both(toolkit: Toolkit) -> tuple[str, ...]:
    return (
        tool_read("nvcc", toolkit.nvcc, toolkit),
        tool_read("CUDART_VERSION", toolkit.headers, toolkit),
        f"CCCL {toolkit.cccl or 'unknown'}: {toolkit.root}",
    )


def nvcc_missing(facts: Facts) -> Iterator[Finding]:
    """JIT builds need nvcc; finished modules cover part of them (flashinfer #1904, #1781)."""
    if not sm12x(facts):
        return
    for environment, _ in compiling_environments(facts):
        toolkit = jit_toolkit(facts, environment)
        if (toolkit and toolkit.nvcc) or (cuda_variable(facts) and not home(facts, environment)):
            continue  # there, or cuda-home-missing says so
        finished = version_of(environment, "flashinfer-jit-cache")
        yield Finding(
            id="nvcc-missing",
            severity=Severity.NOTE if finished else Severity.WARN,
            what=f"No nvcc is found for environment {environment.stack}, which builds kernels while it runs.",
            read=(
                f"no nvcc: {toolkit.root if toolkit else 'CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda'}",
                f"flashinfer-jit-cache {finished or 'not installed'}: {environment.site or environment.python}",
            ),
            why="flashinfer-jit-cache covers what it was built for; another kernel ends in “Could not find nvcc”."
            if finished
            else "The first kernel that has to be built ends in “Could not find nvcc”.",
            cure=setup([environment]),
        )


def cudart_unlinkable(facts: Facts) -> Iterator[Finding]:
    """JIT links with -L$CUDA_HOME/lib64 -lcudart; wheels have lib/ and versioned names only (flashinfer #5064)."""
    for toolkit, environments in jit_toolkits(facts):
        distributions_own = toolkit.root == "/usr" or toolkit.root.startswith(
            "/usr/lib/"
        )  # linked from the system's path
        if toolkit.nvcc is None or distributions_own:
            continue
        unversioned = "libcudart.so" in toolkit.cudart
        if unversioned and toolkit.library_folder == "lib64":
            continue
        lacks = "no unversioned libcudart.so" if not unversioned else "no lib64"
        yield Finding(
            id="cudart-unlinkable",
            severity=Severity.WARN,
            what=f"The toolkit for {names(environments)} has {lacks}; its {toolkit.library_folder or 'folder'} holds "
            f"{listed(toolkit.cudart) or 'no CUDA runtime'}.",
            read=(f"{listed(toolkit.cudart) or 'no CUDA runtime'}: {toolkit.root}/{toolkit.library_folder or ''}",),
            why="Kernels that are built while the server runs end in “cannot find -lcudart”.",
            cure=setup(environments),
        )


def toolkit_unreadable(facts: Facts) -> Iterator[Finding]:
    """A toolkit that is there and could not be read in full."""
    for toolkit in facts.toolkits:
        if toolkit.problems and (toolkit.nvcc or toolkit.headers):
            yield Finding(
                id="toolkit-unreadable",
                severity=Severity.NOTE,
                what=f"The CUDA toolkit in {toolkit.root} could not be read in full: {listed(toolkit.problems)}.",
                read=tuple(f"{problem}: {toolkit.root}" for problem in toolkit.problems[:3]),
                why="What is unknown about it was not judged.",
                cure=None,
            )


def ld_library_path(facts: Facts) -> Iterator[Finding]:
    """Folders in LD_LIBRARY_PATH are searched before a library's own RUNPATH (ld.so(8))."""
    others = [t for t in facts.toolkits if "LD_LIBRARY_PATH" in t.seen_by and _library_version(t)]
    for environment, cuda in cuda_environments(facts):
        for toolkit in others:
            version = _library_version(toolkit)
            if version is None or version == cuda[: len(version)]:
                continue
            label = ".".join(map(str, version))
            yield Finding(
                id="ld-library-path",
                severity=Severity.WARN,
                what=f"LD_LIBRARY_PATH brings in CUDA {label} from {toolkit.root}, and torch in environment "
                f"{environment.stack} is built for CUDA {dotted(cuda)}.",
                read=(
                    f"LD_LIBRARY_PATH={facts.variables.get('LD_LIBRARY_PATH', '')}: environment",
                    f"CUDA {label}: {toolkit.root}",
                    torch_read(environment),
                ),
                why="Libraries of the same name are taken from there instead of the environment's: a mix that nobody "
                "tested, and a different one in every shell.",
                cure="unset LD_LIBRARY_PATH",
            )


def _library_version(toolkit: Toolkit) -> Version2 | tuple[int] | None:
    if toolkit.headers or toolkit.nvcc:
        return toolkit.headers or toolkit.nvcc
    found = sorted(
        m[1] for name in toolkit.cudart if (m := re.fullmatch(r"libcudart\.so\.(\d{1,3}(?:\.\d{1,3})?).*", name))
    )
    if not found:
        return None
    numbers = [int(part) for part in found[-1].split(".")]
    return (numbers[0], numbers[1]) if len(numbers) > 1 else (numbers[0],)
