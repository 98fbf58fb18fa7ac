"""What compiles a component for a stack: its Python, torch and CUDA home; cmake and ninja of the toolkit's own."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from sm120 import errors
from sm120.stack.install.record import Environment, distributions, site_packages

_HOST_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    stack: str
    python: Path  # the stack's
    python_version: str  # 3.12: of the modules that are linked for it
    site: Path  # its site-packages
    torch: Version  # with its local tag where the version has one
    cuda_home: Path
    cuda: Version  # of the home: 13.0
    nvcc: str  # as nvcc says of itself: 13.0.88
    cxx: str  # as the host compiler says of itself: g++ (Debian 12.2.0-14) 12.2.0
    cmake: Path
    cmake_version: Version
    ninja: Path
    ccache: Path | None
    variables: Mapping[str, str]  # what a process of the stack gets beside our own environment


def find(environment: Environment) -> Toolchain:
    """Raises PreflightError when the environment lacks torch or a CUDA home to compile with."""
    from sm120.stack.cuda.home import read_cuda_home

    site = site_packages(environment.python.parents[1])
    again = f"scripts/inv setup --stack {environment.name}"
    if environment.cuda_home is None:
        raise errors.PreflightError(
            f"the environment {environment.name} has no CUDA home to compile with",
            where=str(environment.python),
            remedy="take a stack whose file says cuda = …, as stacks/stable.toml does; an adopted Python has none",
        )
    home = read_cuda_home(environment.cuda_home, site)
    if home is None or not home.usable or home.version is None or home.nvcc is None:
        raise errors.PreflightError(
            f"the CUDA home of the stack {environment.name} is not whole",
            where=str(environment.cuda_home),
            remedy=f"rm -r {environment.cuda_home} and then {again}",
        )
    torch = dict(distributions(site)).get("torch")
    if torch is None:
        raise errors.PreflightError(
            f"the environment {environment.name} has no torch: the kernels are built against it",
            where=str(site),
            remedy=again,
        )
    cmake, cmake_version = _cmake()
    ccache = shutil.which("ccache")
    return Toolchain(
        stack=environment.name,
        python=environment.python,
        python_version=site.parent.name.removeprefix("python"),
        site=site,
        torch=Version(torch),
        cuda_home=environment.cuda_home,
        cuda=Version(home.version),
        nvcc=home.nvcc,
        cxx=_host_compiler(),
        cmake=cmake,
        cmake_version=cmake_version,
        ninja=_ninja(),
        ccache=None if ccache is None else Path(ccache),
        variables=environment.variables,
    )


def host_compiler(base: Mapping[str, str], which: Callable[[str], str | None]) -> list[str]:
    """The words that start the host's C++ compiler: the user's CXX, or else the first of its names on PATH."""
    return base.get("CXX", "").split() or [name for name in _HOST_COMPILERS if which(name)][:1]


def _host_compiler() -> str:
    import os

    from sm120 import process

    found = host_compiler(os.environ, shutil.which)[:1]
    if not found:
        raise errors.PreflightError(
            "no C++ compiler is on PATH: nvcc and the host files need one",
            remedy="install g++ (on Debian and Ubuntu: apt install g++), or set CXX",
        )
    done = process.run([*found, "--version"], timeout=60)
    if done.returncode or not done.tail:
        raise errors.PreflightError(
            f"{found[0]} --version fails: {' '.join(done.tail[-1:]) or 'no output'}", remedy="correct CXX, or unset it"
        )
    return done.tail[0]


def _cmake() -> tuple[Path, Version]:
    """The toolkit's own, whatever is on PATH: its version decides which policies it knows."""
    import importlib.metadata

    import cmake

    path = Path(cmake.CMAKE_BIN_DIR) / "cmake"
    try:
        version = Version(importlib.metadata.version("cmake"))
    except InvalidVersion as error:
        raise _damaged("cmake") from error
    if not path.exists():
        raise _damaged("cmake")
    return path, version


def _ninja() -> Path:
    import ninja

    path = Path(ninja.BIN_DIR) / "ninja"
    if not path.exists():
        raise _damaged("ninja")
    return path


def _damaged(name: str) -> errors.PreflightError:
    return errors.PreflightError(
        f"the toolkit's own {name} is not whole", remedy="rm -r .venv, then run the same command again"
    )
