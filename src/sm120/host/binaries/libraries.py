"""The kernel and GPU libraries of an environment, each judged by what its file says, not by its package's name."""

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from sm120 import errors
from sm120.host.binaries import elf, loader
from sm120.host.binaries.elf import Elf
from sm120.host.binaries.records import Record, read_records
from sm120.host.binaries.symbols import TorchSymbols
from sm120.host.facts import Library

# Distributions whose every library counts, whatever it needs: a damaged file has no list of needs to go by, and some
# load CUDA by name at run time. All other libraries count when they need CUDA, the driver or torch.
KERNEL_PACKAGES: Mapping[str, str] = {
    "apache-tvm-ffi": "binds FlashInfer's and SGLang's compiled kernels",
    "deep-gemm": "kernels under its older name",
    "flash-attn": "attention kernels",
    "flash-attn-3": "attention kernels",
    "flashinfer-cubin": "kernels compiled ahead of time",
    "flashinfer-jit-cache": "kernels compiled ahead of time",
    "flashinfer-python": "kernels, and what its JIT builds",
    "humming-kernels": "low-bit kernels",
    "mscclpp": "all-reduce that SGLang may choose",
    "nvidia-cutlass-dsl": "compiles CuTe kernels; loads the CUDA runtime by name",
    "nvidia-cutlass-dsl-libs-base": "its compiler",
    "nvidia-cutlass-dsl-libs-core": "its compiler",
    "nvidia-cutlass-dsl-libs-cu12": "its compiler for CUDA 12, rightly beside that for CUDA 13",
    "nvidia-cutlass-dsl-libs-cu13": "its compiler for CUDA 13",
    "quack-kernels": "CuTe kernels",
    "sgl-deep-gemm": "FP8 kernels",
    "sgl-kernel": "SGLang's kernels until 0.3.21",
    "sglang-kernel": "SGLang's kernels from 0.4.0 on",
    "tilelang": "compiles kernels; loads CUDA through stubs",
    "torch": "what all others are linked against",
    "torchaudio": "linked against torch",
    "torchvision": "linked against torch",
    "triton": "compiles kernels; loads the driver by name",
    "vllm": "kernels",
    "xformers": "attention kernels",
}

LIBRARY = re.compile(r"\.so(?:\.\d[\w.]*)?$")
# A folder named so holds libraries for the linker, or for another machine: never loaded here.
_ELSEWHERE = frozenset({"stubs", "x86_64", "aarch64", "arm64", "sbsa"} - {platform.machine()})


def kernel_libraries(site: Path, *, folders: Sequence[Path] = ()) -> tuple[Library, ...]:
    """Every kernel or GPU library below site-packages, by path. Never raises for what a file holds.

    ``folders`` are searched for CUDA libraries besides the usual places: LD_LIBRARY_PATH, a CUDA home's lib64.
    """
    owner_of = owners(read_records(site))
    files = sorted(library_files(site))
    headers: dict[str, Elf] = {}
    problems: dict[str, str] = {}
    for path in files:
        try:
            headers[path] = elf.read(site / path)
        except errors.BinaryError as error:
            problems[path] = error.message
    symbols = TorchSymbols(site, headers, owner_of)
    search = loader.Search(site, files, headers, folders)
    libraries = []
    for path in files:
        owner = owner_of.get(path)
        if path in problems:
            if owner in KERNEL_PACKAGES:
                libraries.append(Library(path=path, distribution=owner, problem=problems[path]))
        elif owner in KERNEL_PACKAGES or loader.is_gpu(headers[path]):
            libraries.append(_library(path, headers[path], owner, symbols, search))
    return tuple(libraries)


def _library(path: str, header: Elf, owner: str | None, symbols: TorchSymbols, search: loader.Search) -> Library:
    undefined: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    problem = None
    if header.machine != platform.machine():
        problem = f"built for {header.machine}, and this machine is {platform.machine()}"
    else:
        missing = search.missing_cuda(path)
        try:
            undefined = symbols.undefined(path)
        except errors.BinaryError as error:
            problem = error.message
    return Library(
        path=path,
        distribution=owner,
        needed=header.needed,
        undefined_torch=undefined,
        unresolved_cuda=missing,
        problem=problem,
    )


def owners(records: Sequence[Record]) -> dict[str, str]:
    return {path: record.name for record in records for path in record.hashes if LIBRARY.search(path)}


def library_files(site: Path) -> Iterator[str]:
    """Paths relative to ``site`` of all that is named like a library for this machine; no linked folder is entered."""
    for folder, folders, names in os.walk(site):
        folders[:] = [name for name in folders if name not in _ELSEWHERE and name != "__pycache__"]
        for name in names:
            if LIBRARY.search(name):
                path = PurePath(folder, name)
                yield str(path.relative_to(site))
