"""The file systems under the folders that the toolkit, the stack and their caches write to."""

import getpass
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sm120.host.facts import Disk
from sm120.host.gather.mounts import mounts, under
from sm120.host.gather.within import together
from sm120.state import State

SECONDS = 10.0  # a network file system whose server is gone never answers


def folders(env: Mapping[str, str], home: Path | None, state: State) -> dict[str, Path]:
    """Purpose → folder, as each program chooses it: its own variable, or else below the home folder."""
    temporary = _temporary(env)
    found = {"state": state.root, "runs": state.runs, "wheels": state.wheels, "temporary": temporary}
    if home is not None:
        found["home"] = home
    cache = _path(env, "XDG_CACHE_HOME", home and home / ".cache")
    hugging = _path(env, "HF_HOME", cache and cache / "huggingface")
    flashinfer = _path(env, "FLASHINFER_WORKSPACE_BASE", home)
    triton = _path(env, "TRITON_HOME", home)
    sglang = _path(env, "SGLANG_CACHE_DIR", cache and cache / "sglang")
    choices = {
        "huggingface": _path(env, "HF_HUB_CACHE", hugging and hugging / "hub"),
        "flashinfer": flashinfer and flashinfer / ".cache/flashinfer",
        "triton": _path(env, "TRITON_CACHE_DIR", triton and triton / ".triton/cache"),
        "torch-extensions": _path(env, "TORCH_EXTENSIONS_DIR", cache and cache / "torch_extensions"),
        "inductor": _path(env, "TORCHINDUCTOR_CACHE_DIR", temporary / f"torchinductor_{_user()}"),
        "tvm-ffi": _path(env, "TVM_FFI_CACHE_DIR", home and home / ".cache/tvm-ffi"),
        "sglang": sglang,
        "sglang-jit": _path(env, "SGLANG_JIT_CACHE_DIR", sglang and sglang / "jit"),
        "cuda": _path(env, "CUDA_CACHE_PATH", home and home / ".nv/ComputeCache"),
    }
    return {**found, **{purpose: path for purpose, path in choices.items() if path is not None}}


def disks(chosen: Mapping[str, Path], root: Path = Path("/")) -> tuple[Disk, ...]:
    """One entry a folder. All are asked at once; the mount table answers even where a file system does not."""
    table = mounts(root)
    done, failed = together({purpose: partial(_space, path) for purpose, path in chosen.items()}, SECONDS)
    found: list[Disk] = []
    for purpose, path in chosen.items():
        space = done.get(purpose, _Space(place=path.absolute()))
        mount = under(str(space.place), table)
        found.append(
            Disk(
                purpose=purpose,
                path=str(path),
                mount=mount.point if mount else None,
                filesystem=mount.filesystem if mount else None,
                total=space.total,
                free=space.free,
                writable=space.writable,
                problem=failed.get(purpose),
            )
        )
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Space:
    place: Path
    total: int | None = None
    free: int | None = None
    writable: bool | None = None


def _space(path: Path) -> _Space:
    place = nearest(path)
    status = os.statvfs(place)
    return _Space(
        place=place,
        total=status.f_blocks * status.f_frsize,
        free=status.f_bavail * status.f_frsize,
        writable=os.access(place, os.W_OK),
    )


def nearest(path: Path) -> Path:
    """The folder itself with links resolved, or the nearest parent that exists."""
    place = path.absolute()
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110 - Path.exists raises where a folder is closed to us
        place = place.parent
    return place.resolve()


def _path(env: Mapping[str, str], name: str, default: Path | None) -> Path | None:
    return Path(os.path.expanduser(env[name])) if env.get(name) else default  # noqa: PTH111 - Path's raises without a home


def _temporary(env: Mapping[str, str]) -> Path:
    if env.get("TMPDIR"):
        return Path(env["TMPDIR"])
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # no folder for temporary files can be written
        return Path("/tmp")  # noqa: S108 - only looked at


def _user() -> str:
    """As torch names its folder: the login name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
