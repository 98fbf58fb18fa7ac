"""Every CUDA toolkit that a program on this machine could pick up, by whatever way."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sm120.host.facts import Toolkit
from sm120.host.gather import programs
from sm120.host.gather.text import cuda_version, read

_SYSTEM = ("usr/local/cuda*", "opt/cuda", "usr/lib/cuda", "usr/lib/nvidia-cuda-toolkit")
_LIBRARY_FOLDERS = ("lib64", "lib", "targets/*/lib")
_HEADERS = "cuda_runtime_api.h"


def toolkits(
    env: Mapping[str, str], own: Iterable[tuple[str, Path]] = (), root: Path = Path("/")
) -> tuple[Toolkit, ...]:
    """All toolkits, one entry for each real folder. ``own``: what the managed environments bring, with its label."""
    seen: dict[Path, list[str]] = {}
    for label, folder in [*_named(env), *_on_path(env), *_libraries(env), *_system(root), *own]:
        labels = seen.setdefault(Path(os.path.realpath(folder)), [])
        if label not in labels:
            labels.append(label)
    return tuple(programs.each(lambda item: _look(item[0], tuple(item[1])), seen.items()))


def wheels(site: Path) -> list[Path]:
    """The toolkit that NVIDIA's CUDA wheels make together below a site-packages folder: nvidia/cu13."""
    return [folder for folder in sorted(site.glob("nvidia/cu[0-9]*")) if _is_toolkit(folder)]


def _named(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Named by variable: listed even when nothing is there, because a build would look there."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            yield name, Path(env[name])


def _on_path(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    found = shutil.which("nvcc", path=env.get("PATH", ""))
    if found is None:
        return
    # nvcc itself says where its toolkit is, through links and wrapper scripts.
    text, _ = programs.output([found, "--dryrun", "-x", "cu", "-c", os.devnull], env)
    top = re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE)
    yield "PATH", Path(top[1]) if top else Path(os.path.realpath(found)).parent.parent


def _libraries(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for word in env.get("LD_LIBRARY_PATH", "").split(":"):
        folder = Path(os.path.realpath(word)) if word else None
        if folder is None or not _holds_runtime(folder):
            continue
        yield "LD_LIBRARY_PATH", folder.parents[2] if folder.parent.parent.name == "targets" else folder.parent


def _system(root: Path) -> Iterator[tuple[str, Path]]:
    for pattern in _SYSTEM:
        for folder in sorted(root.glob(pattern)):
            if _is_toolkit(folder):
                yield "system", folder


def _holds_runtime(folder: Path) -> bool:
    try:
        return any(folder.glob("libcudart.so*"))
    except OSError:  # closed to us, or no name that a folder can have
        return False


def _is_toolkit(folder: Path) -> bool:
    return (folder / "bin/nvcc").exists() or _first(folder, ("include", "targets/*/include"), _HEADERS) is not None


def _look(root: Path, seen_by: tuple[str, ...]) -> Toolkit:
    try:
        return _read(root, seen_by)
    except OSError as error:
        return Toolkit(root=str(root), seen_by=seen_by, problems=(f"it cannot be read: {error.strerror or error}",))


def _read(root: Path, seen_by: tuple[str, ...]) -> Toolkit:
    if not root.is_dir():
        return Toolkit(root=str(root), seen_by=seen_by, problems=("there is no such folder",))
    if not _is_toolkit(root):
        problem = f"it holds neither bin/nvcc nor include/{_HEADERS}"
        return Toolkit(root=str(root), seen_by=seen_by, problems=(problem,))
    problems: list[str] = []
    versions = {}
    for name in ("nvcc", "ptxas"):
        program = root / "bin" / name
        versions[name], failure = programs.cuda_release(program) if program.exists() else (None, None)
        if failure:
            problems.append(failure)
    libraries = _library_folder(root)
    cccl, under = _cccl(root)
    return Toolkit(
        root=str(root),
        seen_by=seen_by,
        nvcc=versions["nvcc"],
        ptxas=versions["ptxas"],
        headers=_headers(root),
        cccl=cccl,
        cccl_under=under,
        library_folder=str(libraries.relative_to(root)) if libraries else None,
        cudart=tuple(sorted(path.name for path in libraries.glob("libcudart.so*"))) if libraries else (),
        problems=tuple(problems),
    )


def _first(root: Path, patterns: Iterable[str], inside: str) -> Path | None:
    """The first folder of these that holds a file."""
    return next((f for pattern in patterns for f in sorted(root.glob(pattern)) if (f / inside).exists()), None)


def _headers(root: Path) -> tuple[int, int] | None:
    folder = _first(root, ("include", "targets/*/include"), _HEADERS)
    text = read(folder / _HEADERS) if folder else None
    found = re.search(r"^\s*#\s*define\s+CUDART_VERSION\s+(\d{4,6})\b", text or "", re.MULTILINE)
    return cuda_version(int(found[1])) if found else None


def _cccl(root: Path) -> tuple[str | None, str | None]:
    """The version of CCCL, and below which include folder it lies: CUDA 13 moved it to include/cccl."""
    places = ("include", "targets/*/include", "include/cccl", "targets/*/include/cccl")
    folder = _first(root, places, "cuda/std/utility")
    if folder is None:
        return None, None
    under = "include/cccl" if folder.name == "cccl" else "include"
    whole = re.search(r"#\s*define\s+CCCL_VERSION\s+(\d{7})\b", read(folder / "cuda/std/__cccl/version.h") or "")
    if whole:  # MMMmmmppp
        number = int(whole[1])
        return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}", under
    part = re.search(r"#\s*define\s+CUB_VERSION\s+(\d{6})\b", read(folder / "cub/version.cuh") or "")
    if part:  # MMMmmpp: CUB's own number, which is CCCL's since 3.0
        number = int(part[1])
        return f"{number // 100_000}.{number // 100 % 1000}.{number % 100}", under
    return None, under


def _library_folder(root: Path) -> Path | None:
    with_runtime = (f for p in _LIBRARY_FOLDERS for f in sorted(root.glob(p)) if any(f.glob("libcudart.so*")))
    present = (folder for pattern in _LIBRARY_FOLDERS for folder in sorted(root.glob(pattern)) if folder.is_dir())
    return next(with_runtime, None) or next(present, None)
