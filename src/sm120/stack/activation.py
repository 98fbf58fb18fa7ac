"""The environment variables of a stack: for the toolkit's own children, and as a script for the user's shell.

One table says which, how and why; ``variables`` applies it to an environment, ``script`` writes it for a shell.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path

from sm120 import errors, files

Capability = tuple[int, int]


class How(StrEnum):
    """What happens to a value that is there already."""

    SET = "replaced"  # another value would break the stack
    KEEP = "yours is kept"
    COVER = "yours is kept where it names this architecture"
    FRONT = "before yours"
    CLEAN = "yours without other CUDA toolkits"


@dataclass(frozen=True)
class Setting:
    name: str
    how: How
    value: str  # empty for CLEAN
    reason: str
    ours: tuple[str, ...] = ()  # KEEP: folders, with a slash, whose paths another stack's activation set
    covered: str = ""  # COVER: what a list matches, with a space before and after it, when it names the architecture


# {home}: the CUDA home. Left out where a stack has none.
_CUDA = (
    Setting(
        "CUDA_HOME", How.SET, "{home}", "PyTorch, FlashInfer, tvm-ffi and SGLang ask it first for nvcc and headers"
    ),
    Setting("CUDA_PATH", How.SET, "{home}", "CMake asks it, and so does whoever finds no CUDA_HOME"),
    Setting("CUDAToolkit_ROOT", How.SET, "{home}", "CMake's find_package(CUDAToolkit) takes it before CUDA_PATH"),
    Setting("CUDACXX", How.SET, "{home}/bin/nvcc", "CMake's enable_language(CUDA) takes it before PATH"),
    Setting(
        "CPLUS_INCLUDE_PATH",
        How.FRONT,
        "{home}/include/cccl",
        "CUDA 13 has <cuda/...>, <cub/...> and <thrust/...> there; nvcc knows, host compilers do not",
    ),
    Setting("C_INCLUDE_PATH", How.FRONT, "{home}/include/cccl", "the same for C: <nv/target>"),
    Setting(
        "LIBRARY_PATH",
        How.FRONT,
        "{home}/lib64/stubs",
        "SGLang's JIT links -lcuda without saying where; a driver brings libcuda.so.1 alone",
    ),
    Setting("CPATH", How.CLEAN, "", "compilers take it before the folders above, so another CUDA's headers would win"),
    Setting("LD_LIBRARY_PATH", How.CLEAN, "", "it goes before the libraries that the stack's packages bring"),
)
# Triton's own ptxas is of CUDA 12.8 in Triton 3.5, which does not know sm_121a, of 12.9 in 3.6 and of 13.3 in 3.8.
# FlashInfer sets the second one too when it is imported, to the ptxas on PATH.
_BLACKWELL = (
    Setting("TRITON_PTXAS_PATH", How.KEEP, "{home}/bin/ptxas", "Triton's own ptxas is of an older CUDA (Triton < 3.6)"),
    Setting("TRITON_PTXAS_BLACKWELL_PATH", How.KEEP, "{home}/bin/ptxas", "the same for Triton from 3.6 on"),
)
# {arch}: 12.0a. Not 12.0f, which FlashInfer 0.7 would choose by itself: PyTorch refuses that name, and an
# architecture's own target has all that its family's has. Plain 12.0 has no FP4 instructions.
_ARCHITECTURES = (
    Setting("FLASHINFER_CUDA_ARCH_LIST", How.COVER, "{arch}", "what FlashInfer's JIT compiles for"),
    Setting("TORCH_CUDA_ARCH_LIST", How.COVER, "{arch}", "what PyTorch's extension builder compiles for"),
    Setting("TVM_FFI_CUDA_ARCH_LIST", How.COVER, "{arch}", "what tvm-ffi compiles for; alone it takes plain 12.0"),
)
# {cache}: of this stack alone, so that no kernel of another version is loaded.
_ALWAYS = (
    Setting("FLASHINFER_WORKSPACE_BASE", How.KEEP, "{cache}/flashinfer", "kernels that FlashInfer's JIT built"),
    Setting("TVM_FFI_CACHE_DIR", How.KEEP, "{cache}/tvm-ffi", "kernels that tvm-ffi and SGLang before 0.5.16 built"),
    Setting("SGLANG_CACHE_DIR", How.KEEP, "{cache}/sglang", "SGLang's tuning results, and what it builds elsewhere"),
    Setting("SGLANG_JIT_CACHE_DIR", How.KEEP, "{cache}/sglang-jit", "kernels that SGLang's JIT built"),
    Setting("SGLANG_DG_CACHE_DIR", How.KEEP, "{cache}/deep-gemm", "kernels that DeepGEMM built"),
    Setting("TRITON_CACHE_DIR", How.KEEP, "{cache}/triton", "kernels that Triton built"),
    Setting("TORCHINDUCTOR_CACHE_DIR", How.KEEP, "{cache}/inductor", "what torch.compile built"),
    Setting("TORCH_EXTENSIONS_DIR", How.KEEP, "{cache}/torch-extensions", "what PyTorch's extension builder built"),
    Setting("CUDA_DEVICE_ORDER", How.SET, "PCI_BUS_ID", "CUDA then counts GPUs as nvidia-smi and the toolkit do"),
    Setting("SM120_STACK", How.SET, "{stack}", "which stack a process belongs to"),
)
# Where installed toolkits lie, as a shell's case and fnmatch both understand it. Not cuda/compat: a container's newer
# driver library is there, and it is needed.
OTHER_TOOLKITS = tuple(
    f"*/{root}/{leaf}"
    for root in ("cuda", "cuda-[0-9]*")
    for leaf in (
        *("lib", "lib64", "lib64/stubs", "include", "include/cccl", "nvvm/lib64", "extras/CUPTI/lib64"),
        *("targets/*/lib", "targets/*/lib/stubs", "targets/*/include", "targets/*/include/cccl"),
    )
)


def architecture(capability: Capability | None) -> str:
    """The name to compile for: ``12.0a`` for capability 12.0, and where no GPU is.

    From 9.0 on with the suffix, without which a GPU's own instructions are left out.
    """
    major, minor = capability or (12, 0)
    return f"{major}.{minor}{'a' if major >= 9 else ''}"


def settings(
    stack_name: str, *, environment: Path, cuda_home: Path | None, cache: Path, capability: Capability | None
) -> tuple[Setting, ...]:
    """What the stack sets. ``environment`` is the folder that has ``bin/python``.

    UsageError when a folder's name has a colon, which PATH and its like cannot hold.
    """
    for path in (environment, cuda_home):
        if path is not None and ":" in str(path):
            raise errors.UsageError(
                f"{path} has a colon in its name: PATH cannot hold it", where=str(path), remedy=files.MOVE_REMEDY
            )
    with_home = cuda_home is not None
    rows = (
        Setting("PATH", How.FRONT, "{folders}", "the stack's python, nvcc, ptxas, cuobjdump"),
        *(_CUDA if with_home else ()),
        *(_BLACKWELL if with_home and (capability is None or capability[0] >= 10) else ()),
        *_ARCHITECTURES,
        *_ALWAYS,
    )
    arch = architecture(capability)
    places = {
        "stack": stack_name,
        "folders": f"{environment}/bin" + (f":{cuda_home}/bin" if with_home else ""),
        "home": cuda_home,
        "cache": cache,
        "arch": arch,
    }
    ours = tuple(f"{path.parent}/" for path in (cache, cuda_home) if path is not None)
    covered = "*" if capability is None else _covered(arch)
    return tuple(
        replace(
            row,
            value=row.value.format(**places),
            ours=ours if row.how is How.KEEP else (),
            covered=covered if row.how is How.COVER else "",
        )
        for row in rows
    )


def _covered(arch: str) -> str:
    """The family's name will do for the architecture's own: 12.0f for 12.0a."""
    return f"*[ ;]{arch[:-1]}[af][ ;+]*" if arch.endswith("a") else f"*[ ;]{arch}[ ;+]*"


def variables(
    stack_name: str,
    *,
    environment: Path,
    cuda_home: Path | None,
    cache: Path,
    capability: Capability | None,
    base: Mapping[str, str],
) -> dict[str, str]:
    """What a process of the stack gets beside ``base``. Raises UsageError as ``settings`` does.

    Values of another stack's activation, which a child of such a shell inherits, are not taken for the user's own.
    """
    rules = settings(stack_name, environment=environment, cuda_home=cuda_home, cache=cache, capability=capability)
    found = {rule.name: _APPLY[rule.how](rule, base[rule.name]) for rule in rules if base.get(rule.name)}
    new = {rule.name: rule.value for rule in rules if rule.name not in found and rule.how is not How.CLEAN}
    return {**found, **new}


def _apply_keep(rule: Setting, former: str) -> str:
    return rule.value if former.startswith(rule.ours) else former


def _apply_cover(rule: Setting, former: str) -> str:
    return former if fnmatchcase(f" {former} ", rule.covered) else rule.value


def _apply_front(rule: Setting, former: str) -> str:
    rest = former if rule.name == "PATH" else _without_others(former)
    if f"{rest}:".startswith(f"{rule.value}:"):
        return rest
    return f"{rule.value}:{rest}" if rest else rule.value


def _without_others(value: str) -> str:
    kept = [
        one
        for one in value.split(":")
        if not any(fnmatchcase(one.removesuffix("/"), pattern) for pattern in OTHER_TOOLKITS)
    ]
    return ":".join(kept)


_APPLY: Mapping[How, Callable[[Setting, str], str]] = {
    How.SET: lambda rule, _: rule.value,
    How.KEEP: _apply_keep,
    How.COVER: _apply_cover,
    How.FRONT: _apply_front,
    How.CLEAN: lambda _, former: _without_others(former),
}


def script(
    stack_name: str, *, environment: Path, cuda_home: Path | None, cache: Path, capability: Capability | None
) -> str:
    """A script to be sourced by sh, dash, bash or zsh; ``sm120_deactivate`` restores what was there before.

    It judges the values that it finds when it is sourced, as ``variables`` judges ``base``. Sourced again, or after
    another stack's, it undoes the former activation first. Raises UsageError as ``settings`` does.
    """
    rules = settings(stack_name, environment=environment, cuda_home=cuda_home, cache=cache, capability=capability)
    ours = next(rule.ours for rule in rules if rule.how is How.KEEP)
    covered = next(rule.covered for rule in rules if rule.how is How.COVER)
    return _SCRIPT.format(
        title=" ".join(stack_name.split()),
        names=" ".join(rule.name for rule in rules),
        ours="|".join(f"{shlex.quote(folder)}*" for folder in ours),
        covered=covered.replace("[ ;]", "[' ;']").replace("[ ;+]", "[' ;+']"),
        others=" |\\\n        ".join(OTHER_TOOLKITS),
        settings="\n".join(_line(rule) for rule in rules),
    )


def _line(rule: Setting) -> str:
    value = "" if rule.how is How.CLEAN else f" {shlex.quote(rule.value)}"
    return f"# {rule.reason}: {rule.how}\n_sm120_{rule.how.name.lower()} {rule.name}{value}"


# eval sees names from this file only; values are never part of what it reads.
_SCRIPT = """\
# The environment of the stack {title}. To be sourced, not run:  . this-file
# To go back to what was before:  sm120_deactivate
# invoke setup writes this file; a change made here is lost. Below, each variable has its reason, and what becomes of
# a value that you gave it.

if command -v sm120_deactivate >/dev/null 2>&1; then sm120_deactivate; fi

for _sm120_name in {names}; do
    eval "if [ \\"\\${{$_sm120_name+x}}\\" = x ]; then _sm120_old_$_sm120_name=\\$$_sm120_name; fi"
done

sm120_deactivate() {{
    for _sm120_name in {names}; do
        eval "if [ \\"\\${{_sm120_old_$_sm120_name+x}}\\" = x ]
            then $_sm120_name=\\$_sm120_old_$_sm120_name; export $_sm120_name; unset _sm120_old_$_sm120_name
            else unset $_sm120_name
            fi"
    done
    unset _sm120_name
    unset -f sm120_deactivate
    hash -r 2>/dev/null || :
}}

_sm120_set() {{ eval "$1=\\$2; export $1"; }}

_sm120_keep() {{
    eval "_sm120_now=\\${{$1-}}"
    case $_sm120_now in
    ''|{ours}) _sm120_set "$1" "$2" ;;
    *) _sm120_set "$1" "$_sm120_now" ;;
    esac
}}

_sm120_cover() {{
    eval "_sm120_now=\\${{$1-}}"
    case " $_sm120_now " in
    '  ') _sm120_set "$1" "$2" ;;
    {covered}) _sm120_set "$1" "$_sm120_now" ;;
    *) _sm120_set "$1" "$2" ;;
    esac
}}

_sm120_front() {{
    eval "_sm120_now=\\${{$1-}}"
    if [ "$1" != PATH ]; then _sm120_drop_others; fi
    case $_sm120_now: in
    :) _sm120_set "$1" "$2" ;;
    "$2":*) _sm120_set "$1" "$_sm120_now" ;;
    *) _sm120_set "$1" "$2:$_sm120_now" ;;
    esac
}}

_sm120_clean() {{
    eval "_sm120_now=\\${{$1-}}"
    if [ -n "$_sm120_now" ]; then
        _sm120_drop_others
        _sm120_set "$1" "$_sm120_now"
    fi
}}

_sm120_drop_others() {{ # takes the folders of other CUDA toolkits out of _sm120_now
    _sm120_rest=$_sm120_now:
    _sm120_now=
    while [ -n "$_sm120_rest" ]; do
        _sm120_one=${{_sm120_rest%%:*}}
        _sm120_rest=${{_sm120_rest#*:}}
        case ${{_sm120_one%/}} in
        {others}) ;;
        *) _sm120_now=$_sm120_now:$_sm120_one ;;
        esac
    done
    _sm120_now=${{_sm120_now#:}}
}}

{settings}

unset -f _sm120_set _sm120_keep _sm120_cover _sm120_front _sm120_clean _sm120_drop_others
unset _sm120_name _sm120_now _sm120_rest _sm120_one
hash -r 2>/dev/null || :
"""
