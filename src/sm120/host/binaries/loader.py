"""Where the dynamic loader, torch and the kernel packages look for a CUDA library: a model that errs towards found."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from sm120.host.binaries.elf import Elf
from sm120.host.binaries.regular import read_limited

# Libraries of the CUDA toolkit and its companions, with the hash that auditwheel puts into a bundled one's name.
_CUDA = re.compile(
    r"lib(?:cudart|cublas(?:Lt|Mp)?|cudnn\w*|nvrtc(?:-builtins)?|nvJitLink|nvfatbin|nvvm|cufftw?|curand|cusolver(?:Mg)?"
    r"|cusparse(?:Lt)?|cufile|cupti|nccl|nvshmem\w*|nvToolsExt|nvjpeg|npp\w+|cutensor\w*)(?:[-.][0-9a-f]{8,})?\.so\b"
)
_TORCH = re.compile(r"lib(?:torch|c10|caffe2|shm)(?:_\w+)?\.so")
_DRIVER = "libcuda.so.1"
# Those whose number is CUDA's own major version; cuFFT, cuSPARSE and others count for themselves.
_MAJOR = re.compile(r"lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink|nvfatbin)(?:[-.][0-9a-f]{8,})?\.so\.(\d+)")

_CACHE = Path("/etc/ld.so.cache")
_CACHE_LIMIT = 2**26  # bytes
_SYSTEM = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


def is_cuda(name: str) -> bool:
    """Whether a DT_NEEDED name is a CUDA library that packages bring along. The driver's libcuda is none of them."""
    return _CUDA.match(name) is not None


def cuda_major(name: str) -> int | None:
    """The CUDA that a DT_NEEDED name belongs to, where the name says so: 12 for libcudart.so.12."""
    found = _MAJOR.match(name)
    return int(found[1]) if found else None


def is_gpu(elf: Elf) -> bool:
    """Whether a library needs CUDA, the driver or torch."""
    return any(name == _DRIVER or is_cuda(name) or _TORCH.match(name) for name in elf.needed)


class Search:
    """Looks for libraries by name, for an environment's ``libraries`` by path relative to site-packages.

    What lies anywhere in the environment counts as found: torch loads ``nvidia/*/lib`` before its own libraries, and
    packages load what they bring by path, so that the loader finds it by its name later. ``folders`` are further ones,
    those of LD_LIBRARY_PATH first of all.
    """

    def __init__(
        self, site: Path, files: Sequence[str], libraries: Mapping[str, Elf], folders: Sequence[Path] = ()
    ) -> None:
        self._site = site
        self._libraries = libraries
        self._names = {PurePath(path).name for path in files}
        self._names |= {library.soname for library in libraries.values() if library.soname is not None}
        # site-packages lies in the lib folder of its prefix, which conda's interpreter has in its own search path.
        multiarch = [Path(root) / f"{platform.machine()}-linux-gnu" for root in ("/lib", "/usr/lib")]
        self._folders = [*folders, *site.parents[1:2], *multiarch, *map(Path, _SYSTEM)]
        self._cache = read_limited(_CACHE, _CACHE_LIMIT) or b""

    def missing_cuda(self, path: str) -> tuple[str, ...]:
        """Of the CUDA libraries that the library at ``path`` needs, those found nowhere it would look."""
        elf = self._libraries[path]
        own = [self._expand(folder, path) for folder in elf.search]
        return tuple(name for name in elf.needed if is_cuda(name) and not self._found(name, own))

    def _expand(self, folder: str, path: str) -> Path:
        origin = str((self._site / path).parent)
        return Path(re.sub(r"\$(?:\{ORIGIN\}|ORIGIN\b)", lambda _: origin, folder))

    def _found(self, name: str, own: Sequence[Path]) -> bool:
        if name in self._names:
            return True
        # The cache holds whole paths, each ended by a zero byte.
        if b"/" + os.fsencode(name) + b"\0" in self._cache:
            return True
        return any(os.path.exists(folder / name) for folder in (*own, *self._folders))  # noqa: PTH110 - never raises
