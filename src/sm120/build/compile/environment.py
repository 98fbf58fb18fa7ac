"""What the build is told: environment variables and CMake definitions.

Variables of the user's that change what is compiled, or how much at a time, are left out and named: with them the same
recipe would give other bytes.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from sm120.build.toolchain import Toolchain, host_compiler

# SKBUILD_* and CMAKE_* are settings of the backend and of CMake. MAX_JOBS and the flags of ninja and make say how many
# jobs run, NINJA_STATUS how they are told. NVCC_* and *FLAGS add words to every compilation.
_CHANGES_THE_BUILD = re.compile(
    "(SKBUILD|CMAKE|SCIKIT_BUILD|NVCC)_.*|(C|CXX|CPP|CUDA|LD|NINJA|MAKE)FLAGS|CUDAARCHS|CUDAHOSTCXX|MAX_JOBS"
    "|NINJA_STATUS|PYTHONPATH|PYTHONHOME"
)
_COLORS = ("FORCE_COLOR", "CLICOLOR_FORCE")  # the output is read
_C_OF = (("clang++", "clang"), ("g++", "gcc"), ("c++", "cc"))
CCACHE_SIZE = "20G"


def without_what_changes_the_build(base: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The user's environment without them, and the names of those that were set to something."""
    dropped = tuple(sorted(name for name, value in base.items() if value and _CHANGES_THE_BUILD.fullmatch(name)))
    kept = {name: value for name, value in base.items() if not _CHANGES_THE_BUILD.fullmatch(name)}
    return {name: value for name, value in kept.items() if name not in _COLORS}, dropped


def build_environment(
    base: Mapping[str, str],
    toolchain: Toolchain,
    *,
    tools: Path,
    added: Mapping[str, str],
    jobs: int,
    epoch: int,
    find: Callable[[str], str | None] = shutil.which,
) -> dict[str, str]:
    """``base``: the user's, without what changes the build. ``added``: what patches and sources need."""
    known = {**base, **toolchain.variables}
    path = (str(tools / "bin"), str(toolchain.python.parent), known.get("PATH", ""))
    return {
        "CUDACXX": str(toolchain.cuda_home / "bin" / "nvcc"),
        **known,
        "PATH": ":".join(part for part in path if part),
        **compilers(base, find),
        "LC_ALL": "C.UTF-8",  # errors are found by their English words
        "NO_COLOR": "1",
        "NVCC_APPEND_FLAGS": "-objtemp",  # or else each object holds another random name
        "SOURCE_DATE_EPOCH": str(epoch),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        **added,
    }


def compilers(base: Mapping[str, str], find: Callable[[str], str | None]) -> dict[str, str]:
    """CC, CXX, and nvcc's: the user's, or the first on PATH.

    Without them the backend takes those that the stack's Python was compiled with, which need not be here.
    """
    cxx = host_compiler(base, find)
    if not cxx:
        return {}
    found = {"CXX": " ".join(cxx), "CC": base.get("CC") or _c_compiler(cxx[-1], find)}
    if len(base.get("CXX", "").split()) == 1:
        found["CUDAHOSTCXX"] = cxx[0]
    return found


def _c_compiler(cxx: str, find: Callable[[str], str | None]) -> str:
    """Of the same make and version: gcc-13 for g++-13."""
    for ending, other in _C_OF:
        head, found, tail = cxx.rpartition(ending)
        if found and find(f"{head}{other}{tail}"):
            return f"{head}{other}{tail}"
    return "cc"


def ccache_environment(base: Mapping[str, str], *, cache: Path, log: Path) -> dict[str, str]:
    """``log``: where ccache tells what it found.

    CCACHE_BASEDIR stays unset: it would change ``__FILE__``, and with it the bytes of the wheel.
    """
    return {
        "CCACHE_DIR": base.get("CCACHE_DIR") or str(cache),
        "CCACHE_MAXSIZE": base.get("CCACHE_MAXSIZE") or CCACHE_SIZE,
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_COMPILERCHECK": "content",
        "CCACHE_STATSLOG": str(log),
    }


def definitions(toolchain: Toolchain, given: Mapping[str, str]) -> dict[str, str]:
    """For CMake's command line. A launcher that is not used is named too: the cache may know one from before."""
    launcher = "" if toolchain.ccache is None else str(toolchain.ccache)
    return {
        **{f"CMAKE_{language}_COMPILER_LAUNCHER": launcher for language in ("C", "CXX", "CUDA")},
        "ENABLE_CCACHE": "OFF",  # SGLang's own option would start it a second time
        "CMAKE_PREFIX_PATH": str(toolchain.site / "torch" / "share" / "cmake"),
        "Python_EXECUTABLE": str(toolchain.python),
        "Python3_EXECUTABLE": str(toolchain.python),
        **given,
    }


def settings(build: Path, defines: Mapping[str, str]) -> list[str]:
    """For the backend. Verbose: the log then holds every command, and says with how many jobs ninja runs."""
    return [
        f"build-dir={build}",
        "build.verbose=true",
        "logging.level=INFO",
        "ninja.make-fallback=false",
        *(f"cmake.define.{name}={value}" for name, value in defines.items()),
    ]
