"""The CUDA home: a folder of links into NVIDIA's wheels that behaves like an installed toolkit.

The wheels unpack to ``site-packages/nvidia/cu13``, which compiles but does not link: libraries lie in ``lib`` where
linkers look in ``lib64``, only under versioned names, and no stub of the driver's library is there. The home mends
that without touching site-packages. It is laid out as NVIDIA's installer does it: headers and libraries in
``targets/<platform>``, with ``include`` and ``lib64`` as links to them. ``bin`` is a real folder, because nvcc looks
for everything beside the path by which it was started.

cuDNN and NCCL have folders of their own in ``site-packages/nvidia``; they are no part of a toolkit and stay out.
"""

import contextlib
import filecmp
import os
import platform
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120 import errors, files, process
from sm120.stack.cuda import stub as cuda_stub

LAYOUT = 1  # raised when what is made from the same wheels changes: homes of another layout are made again
MANIFEST = "sm120-cuda-home.json"
TARGETS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}  # NVIDIA's names of the platforms
_CONTENT = ("bin", "include", "lib", "nvvm")
_NOT_TOOLKIT = {"cudnn", "nccl", "nvshmem", "cusparselt"}
_WHOLE = re.compile(r"cu(\d+)")  # one folder for the whole toolkit: since CUDA 13
_SHARED = re.compile(r"(lib[^/]+?)\.so\.([\d.]+)")
_NVCC_TIMEOUT = 60.0  # seconds for nvcc --version


@dataclass(frozen=True, kw_only=True)
class CudaHome:
    path: Path
    version: str | None  # of the headers: "13.0"
    nvcc: str | None  # as nvcc says of itself: "13.0.88"
    usable: bool  # nvcc starts, and has all it needs to compile and link
    missing: tuple[str, ...]  # parts that no wheel brought: "bin/cuobjdump (nvidia-cuda-cuobjdump)"
    problems: tuple[str, ...]  # what does not work, in words


@dataclass(frozen=True)
class Part:
    path: str  # in the home
    package: str  # that brings it
    essential: bool = False  # nvcc cannot compile and link without it


PARTS = (
    Part("bin/nvcc", "nvidia-cuda-nvcc", essential=True),
    Part("bin/ptxas", "nvidia-cuda-nvcc", essential=True),
    Part("nvvm/bin/cicc", "nvidia-nvvm", essential=True),
    Part("nvvm/libdevice/libdevice.10.bc", "nvidia-nvvm", essential=True),
    Part("include/crt/host_config.h", "nvidia-cuda-crt", essential=True),
    Part("include/cuda.h", "nvidia-cuda-runtime", essential=True),
    Part("include/cuda_runtime.h", "nvidia-cuda-runtime", essential=True),
    Part("lib64/libcudart.so", "nvidia-cuda-runtime", essential=True),
    Part("lib64/libcudart_static.a", "nvidia-cuda-runtime", essential=True),
    Part("lib64/libcudadevrt.a", "nvidia-cuda-runtime", essential=True),
    Part("include/cccl/cuda/std/utility", "nvidia-cuda-cccl"),
    Part("lib64/stubs/libcuda.so", "a C compiler: cc, gcc or clang"),
    Part("bin/cuobjdump", "nvidia-cuda-cuobjdump"),
    Part("bin/nvdisasm", "nvidia-cuda-nvdisasm"),
    Part("lib64/libnvrtc.so", "nvidia-cuda-nvrtc"),
    Part("lib64/libnvJitLink.so", "nvidia-nvjitlink"),
    Part("lib64/libcublas.so", "nvidia-cublas"),
    Part("lib64/libcublasLt.so", "nvidia-cublas"),
    Part("lib64/libcusolver.so", "nvidia-cusolver"),
    Part("lib64/libcusparse.so", "nvidia-cusparse"),
    Part("lib64/libcurand.so", "nvidia-curand"),
    Part("lib64/libcufft.so", "nvidia-cufft"),
    Part("include/nvml.h", "nvidia-nvml-dev"),
    Part("include/cuda_profiler_api.h", "nvidia-cuda-profiler-api"),
    Part("include/nvtx3/nvToolsExt.h", "nvidia-nvtx"),
)


def make_cuda_home(site: Path, home: Path) -> CudaHome:
    """Makes ``home`` from the NVIDIA wheels in the site-packages folder ``site``; no work when it is current.

    It is built beside and renamed, so that it is whole or absent. Parts that the wheels lack are named in the result,
    not refused. Raises BinaryError when ``site`` has no CUDA wheel, PreflightError when ``home`` cannot be written or
    is somebody else's.
    """
    site, home = site.absolute(), home.absolute()
    found = read_cuda_home(home, site)
    if found is not None:
        return found
    roots = _roots(site)
    if not roots:
        raise errors.BinaryError(
            f"no CUDA toolkit among the packages in {site}: {site / 'nvidia'} has no folder of one",
            where=str(site),
            remedy="name the toolkit under [packages] of the stack, at least nvidia-cuda-nvcc, nvidia-nvvm and"
            " nvidia-cuda-runtime, then run setup again",
        )
    _check_ours(home)
    with files.lock(home.with_name(f".{home.name}.lock")), files.writing(home):
        found = read_cuda_home(home, site)
        return found if found is not None else _make(site, roots, home)


def is_current(home: Path, site: Path) -> bool:
    """Whether ``home`` is what ``make_cuda_home`` would make of ``site`` now, with no dangling link. Reads only."""
    return read_cuda_home(home, site) is not None


def read_cuda_home(home: Path, site: Path) -> CudaHome | None:
    """The home that was made, or None when it is absent, damaged, made of other wheels, or has a dangling link."""
    site, home = site.absolute(), home.absolute()
    try:
        content = files.read_json(home / MANIFEST)
    except errors.UsageError:
        return None
    if not isinstance(content, dict) or content.get("stamp") != _stamp(site, home):
        return None
    if next(_dangling(home), None) is not None:
        return None
    try:
        return CudaHome(
            path=home,
            version=content["version"],
            nvcc=content["nvcc"],
            usable=content["usable"],
            missing=tuple(content["missing"]),
            problems=tuple(content["problems"]),
        )
    except (KeyError, TypeError):
        return None


def _roots(site: Path) -> list[Path]:
    """The folders whose contents make up the toolkit, the first winning where two have the same file.

    One folder that holds a whole toolkit stands alone: beside it, folders of single components are those of another
    CUDA (a ``cu12`` library package is right beside CUDA 13, and must not lend it its headers).
    """
    nvidia = site / "nvidia"
    folders = sorted(path for path in _listing(nvidia) if any((path / name).is_dir() for name in _CONTENT))
    whole = {int(match[1]): path for path in folders if (match := _WHOLE.fullmatch(path.name))}
    if whole:
        with_compiler = [number for number, path in whole.items() if (path / "bin" / "nvcc").exists()]
        return [whole[max(with_compiler or whole)]]
    return sorted((path for path in folders if path.name not in _NOT_TOOLKIT), key=lambda p: p.name != "cuda_nvcc")


def _stamp(site: Path, home: Path) -> dict[str, Any]:
    """What decides what a home looks like: its place, the wheels' names, the folders that were linked from, a compiler.

    A folder's time changes whenever an entry is added, removed or replaced, so an installation by hand is seen too.
    """
    linked = [root / name for root in _roots(site) for name in _CONTENT]
    return {
        "layout": LAYOUT,
        "home": str(home),
        "site": str(site),
        "packages": sorted(f"{name} {version}" for name, version in _packages(site).items()),
        "folders": [[str(path), path.stat().st_mtime_ns] for path in linked if path.is_dir()],
        "compiler": cuda_stub.find_compiler() is not None,
    }


def _packages(site: Path) -> dict[str, str]:
    """NVIDIA's distributions and their versions, by the names of their dist-info folders."""
    names = (path.name.removesuffix(".dist-info") for path in _listing(site) if path.name.endswith(".dist-info"))
    pairs = (name.rpartition("-") for name in names if name.startswith(("nvidia_", "cuda_toolkit-")))
    return {name: version for name, _, version in pairs}


def _listing(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _dangling(home: Path) -> Iterator[Path]:
    for folder, names, others in os.walk(home):
        for name in (*names, *others):
            path = Path(folder, name)
            if path.is_symlink() and not path.exists():
                yield path


def _check_ours(home: Path) -> None:
    """Whatever else lies there is not removed. An empty folder is nobody's."""
    others = home.is_symlink() or home.is_file() or (bool(_listing(home)) and not (home / MANIFEST).is_file())
    if others:
        raise errors.PreflightError(
            f"{home} exists and is not a CUDA home that the toolkit made: it has no {MANIFEST}",
            where=str(home),
            remedy=f"move it away: mv {shlex.quote(str(home))} {shlex.quote(f'{home}.old')}",
        )


@dataclass
class _Building:
    """A home in the making."""

    path: Path
    problems: list[str] = field(default_factory=list)

    def merge(self, folder: str, sources: Sequence[Path]) -> None:
        """Makes ``folder`` a real folder of links to all that the sources hold; the first wins where files differ."""
        target = self.path / folder
        target.mkdir(parents=True)
        entries: dict[str, list[Path]] = {}
        for source in sources:
            for entry in sorted(_listing(source)):
                if entry.name not in {"__pycache__", "__init__.py"}:
                    entries.setdefault(entry.name, []).append(entry)
        for name, found in entries.items():
            present = [entry for entry in found if entry.exists()]
            self.problems += [f"{entry} is a dangling link" for entry in found if entry not in present]
            if len(present) > 1 and all(entry.is_dir() for entry in present):
                self.merge(f"{folder}/{name}", present)
            elif present:
                (target / name).symlink_to(present[0])
                self._note_clash(present)

    def _note_clash(self, entries: Sequence[Path]) -> None:
        for other in entries[1:]:
            if other.is_dir() or entries[0].is_dir() or not filecmp.cmp(entries[0], other, shallow=False):
                self.problems.append(f"{entries[0]} and {other} differ: the first is used")

    def link(self, name: str, target: str) -> None:
        """A link within the home, ``target`` relative to the link's folder; nothing when there is no such target."""
        path = self.path / name
        if (path.parent / target).exists():
            path.symlink_to(target)


def _make(site: Path, roots: Sequence[Path], home: Path) -> CudaHome:
    stamp = _stamp(site, home)
    for rubble in home.parent.glob(f".{home.name}.*.tmp"):  # of a making that was interrupted; the lock is ours
        shutil.rmtree(rubble, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{home.name}.", suffix=".tmp", dir=home.parent))
    try:
        made = _fill(work / "new", site, roots, home)
        content = {
            "stamp": stamp,
            "version": made.version,
            "nvcc": made.nvcc,
            "usable": made.usable,
            "missing": made.missing,
            "problems": made.problems,
        }
        files.write_json_atomic(work / "new" / MANIFEST, content)
        _exchange(work / "new", home, work / "old")
        return made
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _exchange(new: Path, home: Path, old: Path) -> None:
    if home.exists():
        home.rename(old)
    try:
        new.rename(home)
    except BaseException:
        if old.exists() and not home.exists():
            old.rename(home)
        raise


def _fill(path: Path, site: Path, roots: Sequence[Path], home: Path) -> CudaHome:
    building = _Building(path)
    target = TARGETS.get(platform.machine(), f"{platform.machine()}-linux")
    building.merge("bin", [root / "bin" for root in roots])
    building.merge("nvvm", [root / "nvvm" for root in roots])
    building.merge(f"targets/{target}/include", [root / "include" for root in roots])
    building.merge(f"targets/{target}/lib", [root / "lib" for root in roots])
    _unversioned(path / "targets" / target / "lib")
    building.link("include", f"targets/{target}/include")
    building.link("lib64", f"targets/{target}/lib")
    building.link("lib", f"targets/{target}/lib")  # where tools that know the wheels look
    _nvvm(building)
    _extras(building)
    _stubs(building)
    nvcc = _nvcc_version(building)
    version = _headers_version(path)
    _write_version(path, site, version, nvcc)
    _look_over(building, home, version, nvcc)
    missing = [part for part in PARTS if not (path / part.path).exists()]
    return CudaHome(
        path=home,
        version=version,
        nvcc=nvcc,
        usable=nvcc is not None and not any(part.essential for part in missing),
        missing=tuple(f"{part.path} ({part.package})" for part in missing),
        problems=tuple(building.problems),
    )


def _unversioned(lib: Path) -> None:
    """libX.so for every libX.so.N, to the highest: the wheels ship what programs load, not what linkers ask for."""
    newest: dict[str, tuple[list[int], str]] = {}
    for path in _listing(lib):
        match = _SHARED.fullmatch(path.name)
        if match:
            numbers = [int(part) for part in match[2].split(".") if part]
            newest[match[1]] = max(newest.get(match[1], ([], "")), (numbers, path.name))
    for stem, (_, name) in newest.items():
        if not (lib / f"{stem}.so").is_symlink():
            (lib / f"{stem}.so").symlink_to(name)


def _nvvm(building: _Building) -> None:
    """The compiler library and its header, which an installed toolkit has below nvvm."""
    for folder in ("lib64", "include"):
        (building.path / "nvvm" / folder).mkdir(exist_ok=True)
    for library in sorted(_listing(building.path / "lib64")):
        if library.name.startswith("libnvvm.so"):
            building.link(f"nvvm/lib64/{library.name}", f"../../lib64/{library.name}")
    building.link("nvvm/include/nvvm.h", "../../include/nvvm.h")


def _extras(building: _Building) -> None:
    if (building.path / "include" / "cupti.h").exists():
        (building.path / "extras" / "CUPTI").mkdir(parents=True)
        building.link("extras/CUPTI/include", "../../include")
        building.link("extras/CUPTI/lib64", "../../lib64")


def _stubs(building: _Building) -> None:
    compiler = cuda_stub.find_compiler()
    folder = building.path / "lib64" / "stubs"
    folder.mkdir(exist_ok=True)
    for stub in cuda_stub.STUBS:
        if compiler is None or not (building.path / "include" / stub.headers[0]).exists():
            continue
        try:
            cuda_stub.make_stub(stub, building.path / "include", folder / stub.library, compiler)
        except cuda_stub.StubError as error:
            building.problems.append(f"no lib64/stubs/{stub.library}, so -l{stub.library[3:-3]} does not link: {error}")


def _nvcc_version(building: _Building) -> str | None:
    """By starting it: that also shows that it may be executed here."""
    nvcc = building.path / "bin" / "nvcc"
    if not nvcc.exists():
        return None
    try:
        done = process.run([str(nvcc), "--version"], timeout=_NVCC_TIMEOUT)
    except errors.PreflightError as error:
        building.problems.append(f"nvcc does not start: {error.message}")
        return None
    match = re.search(r"release [\d.]+, V([\d.]+)", "\n".join(done.tail))
    if match is None:
        said = done.tail[-1] if done.tail else "nothing"
        building.problems.append(f"nvcc --version ended with {done.returncode} and said: {said}")
        return None
    return match[1]


def _headers_version(home: Path) -> str | None:
    try:
        text = (home / "include" / "cuda_runtime_api.h").read_text("utf-8", "replace")
    except OSError:
        return None
    match = re.search(r"^\s*#\s*define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return f"{int(match[1]) // 1000}.{int(match[1]) % 1000 // 10}" if match else None


def _write_version(path: Path, site: Path, version: str | None, nvcc: str | None) -> None:
    """version.json as an installed toolkit has it; the release's own third number when its metapackage is there."""
    if version is None:
        return
    release = ".".join(_packages(site).get("cuda_toolkit", "").split(".")[:3])
    known = release.startswith(f"{version}.")
    content = {"cuda": {"name": "CUDA SDK", "version": release if known else f"{version}.0"}}
    if nvcc is not None:
        content["cuda_nvcc"] = {"name": "CUDA NVCC", "version": nvcc}
    files.write_json_atomic(path / "version.json", content)


def _look_over(building: _Building, home: Path, version: str | None, nvcc: str | None) -> None:
    for path in sorted(_listing(building.path / "bin")):
        with contextlib.suppress(OSError):
            if path.is_file() and _is_program(path) and not os.access(path, os.X_OK):
                building.problems.append(f"{path.resolve()} may not be executed: it lacks the permission")
    if version is not None and nvcc is not None and nvcc.split(".")[:2] != version.split("."):
        building.problems.append(f"nvcc is {nvcc}, but the headers are of CUDA {version}: only equal ones fit")
    if " " in str(home):
        building.problems.append(
            f"the path {home} has a space: nvcc and CMake work, but FlashInfer, tvm-ffi and PyTorch's extension builder"
            f" write it without quotes into their build files, so their builds fail; {files.MOVE_REMEDY}"
        )


def _is_program(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(18)
    return head[:4] == b"\x7fELF" and ".so" not in path.name
