"""Stub libraries: what a program links against on a machine that has no NVIDIA driver.

An installed toolkit has ``lib64/stubs/libcuda.so``; no wheel does. A stub exports the functions of a header, each of
which returns the library's own "this is a stub" status, under the SONAME of the driver's library. So the linker is
content, and at run time the dynamic linker takes the driver's: never this file.
"""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sm120 import files, process


@dataclass(frozen=True, kw_only=True)
class Stub:
    library: str  # the file that linkers ask for
    soname: str  # what a linked program needs: the driver's file
    prefix: str  # of its functions' names
    headers: tuple[str, ...]  # the first is required
    variants: tuple[str, ...]  # macros under which the headers declare further functions
    status: int  # what each function returns


STUBS = (
    Stub(
        library="libcuda.so",
        soname="libcuda.so.1",
        prefix="cu",
        headers=("cuda.h", "cudaProfiler.h"),
        # The names of earlier versions, and those of the default stream of each thread (cuda.h).
        variants=("__CUDA_API_VERSION_INTERNAL", "CUDA_API_PER_THREAD_DEFAULT_STREAM"),
        status=34,  # CUDA_ERROR_STUB_LIBRARY
    ),
    Stub(
        library="libnvidia-ml.so",
        soname="libnvidia-ml.so.1",
        prefix="nvml",
        headers=("nvml.h",),
        variants=("NVML_NO_UNVERSIONED_FUNC_DEFS",),
        status=12,  # NVML_ERROR_LIBRARY_NOT_FOUND
    ),
)
COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT = 120.0  # seconds for one call of the compiler; it takes well under one


class StubError(Exception):
    """Why a stub could not be made, in words."""


def find_compiler() -> str | None:
    """The host's C compiler; ``CC`` is not asked: it may name a launcher, a wrapper or another target's compiler."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def make_stub(stub: Stub, include: Path, library: Path, compiler: str) -> None:
    """Compiles ``stub`` to the file ``library``. Raises StubError."""
    with tempfile.TemporaryDirectory(prefix=".stub-", dir=library.parent) as name:
        work = Path(name)
        found = _functions(stub, include, work, compiler)
        if not found:
            raise StubError(f"{include / stub.headers[0]} declares no function {stub.prefix}…")
        source = work / "stub.c"
        source.write_text("".join(f"int {name}(void) {{ return {stub.status}; }}\n" for name in sorted(found)))
        made = work / stub.library
        soname = f"-Wl,-soname,{stub.soname}"
        _compile([compiler, "-shared", "-fPIC", "-nostdlib", "-w", soname, "-o", str(made), str(source)])
        files.write_bytes_atomic(library, made.read_bytes())


def _functions(stub: Stub, include: Path, work: Path, compiler: str) -> set[str]:
    """The names as the linker will see them: macros rename many functions, so the compiler reads the headers."""
    source, output = work / "probe.c", work / "probe.i"
    present = [header for header in stub.headers if (include / header).is_file()]
    source.write_text("".join(f"#include <{header}>\n" for header in present))
    declared = re.compile(rf"\b{stub.prefix}[A-Z]\w*(?=\s*\()")
    names: set[str] = set()
    for variant in ("", *stub.variants):
        macro = [f"-D{variant}"] if variant else []
        _compile([compiler, "-E", "-P", *macro, f"-I{include}", "-o", str(output), str(source)])
        names.update(declared.findall(output.read_text("utf-8", "replace")))
    return names


def _compile(argv: list[str]) -> None:
    done = process.run(argv, timeout=_TIMEOUT)
    if done.timed_out:
        raise StubError(f"{argv[0]} did not end within {_TIMEOUT:g} seconds")
    if done.returncode:
        error = next((line for line in done.tail if "error" in line.lower()), done.tail[-1] if done.tail else "")
        raise StubError(f"{argv[0]} ended with {done.returncode}: {error}")
