"""A small FlashInfer of our own: JIT specifications, ninja files and locks as the real one has them, for g++ alone."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import ninja
from packaging.version import Version

from sm120.build.flashinfer.modules import Module
from sm120.build.flashinfer.target import Target
from sm120.build.toolchain import Toolchain
from sm120.runs import Run
from sm120.state import State

_CORE = """
import fcntl, os, subprocess, time
from pathlib import Path

VERSION = "0.6.12"
BASE = Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
CACHE = BASE / ".cache" / "flashinfer" / VERSION / os.environ["FLASHINFER_CUDA_ARCH_LIST"].replace(".", "")
JIT, GENERATED = CACHE / "cached_ops", CACHE / "generated"
SOURCES = Path(__file__).resolve().parents[1] / "data"
JIT.mkdir(parents=True, exist_ok=True)


class FileLock:
    def __init__(self, path, thread_local=True):
        self.file = open(path, "a")

    def acquire(self, timeout=-1):
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | (fcntl.LOCK_NB if timeout == 0 else 0))
        except BlockingIOError:
            raise TimeoutError(self.file.name) from None

    def release(self):
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


def run_ninja(workdir, ninja_file, verbose):
    words = ["ninja", "-v", "-C", str(workdir), "-f", str(ninja_file)]
    if os.environ.get("MAX_JOBS"):
        words += ["-j", os.environ["MAX_JOBS"]]
    with open(SOURCES / "jobs", "a") as log:
        log.write(words[-1] + "\\n")
    done = subprocess.run(words, stdout=None if verbose else subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError("Ninja build failed.")


class JitSpec:
    def __init__(self, name, sources):
        self.name, self.sources = name, sources
        self.build_dir = JIT / name
        self.ninja_path = self.build_dir / "build.ninja"
        self.jit_library_path = self.build_dir / f"{name}.so"
        self.lock_path = JIT / f"{name}.lock"
        self.aot_path = SOURCES / "aot" / name / f"{name}.so"

    @property
    def is_aot(self):
        return self.aot_path.exists()

    def write_ninja(self):
        self.build_dir.mkdir(parents=True, exist_ok=True)
        lines = [
            "ninja_required_version = 1.3",
            f"cxx = {os.environ.get('CXX', 'c++')}",
            f"cflags = -fPIC {os.environ.get('FAKE_CFLAGS', '')}",
            "rule compile",
            "  command = $cxx -MMD -MF $out.d $cflags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "rule link",
            "  command = c++ -shared $in -o $out",
        ]
        objects = [self.build_dir / f"{source.stem}.o" for source in self.sources]
        lines += [f"build {made}: compile {source}" for made, source in zip(objects, self.sources)]
        lines += [f"build {self.jit_library_path}: link {' '.join(map(str, objects))}", ""]
        write_if_different(self.ninja_path, "\\n".join(lines))

    def build(self, verbose, need_lock=True):
        if need_lock:
            with FileLock(self.lock_path):
                return self.build(verbose, need_lock=False)
        self.write_ninja()
        run_ninja(self.build_dir, self.ninja_path, verbose)

    def build_and_load(self):
        self.build(verbose=True)
        return self.jit_library_path.read_bytes()


def write_if_different(path, text):
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
"""
_OPS = """
import functools

from flashinfer.jit import core

USES_NORM = False


@functools.cache
def get_gemm(sm, tile, fast):
    assert sm in {"120", "121"} and (tile, fast) == (128, False)
    made = core.GENERATED / "gemm" / "tile.cc"
    core.write_if_different(made, f"int tile() {{ return {tile}; }}\\n")
    return core.JitSpec("gemm_120", [core.SOURCES / "one.cc", core.SOURCES / "two.cc", made]).build_and_load()


def get_quantiser():
    return core.JitSpec("quantiser", [core.SOURCES / "one.cc"]).build_and_load()


def get_late():
    class Late(core.JitSpec):
        write_ninja = property()

    return Late("late", []).build_and_load()


def get_broken():
    raise ValueError("no such card")


def get_nothing():
    return None
"""


def module(name: str, function: str, *arguments: str | int | bool, when: str | None = None) -> Module:
    return Module(
        name=name, why="a test", ask=("flashinfer.gone:f", f"flashinfer.ops:{function}"), arguments=arguments, when=when
    )


GEMM = module("gemm", "get_gemm", "{sm}", 128, False)
QUANTISER = module("quantiser", "get_quantiser")
AIMED = Target(architecture="120a", listed="12.0a", served=True)


@dataclass(frozen=True, kw_only=True)
class Made:
    root: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    nvcc: str = "13.0.88"

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def data(self) -> Path:
        return self.site / "flashinfer" / "data"

    @property
    def base(self) -> Path:
        return self.root / "cache"

    @property
    def run(self) -> Run:
        return Run.start(State(root=self.root / "state", runs=self.root / "runs"), "build-kernels", [])

    @property
    def toolchain(self) -> Toolchain:
        return Toolchain(
            stack="made",
            python=Path(sys.executable),
            python_version="3.11",
            site=self.site,
            torch=Version("2.11.0"),
            cuda_home=self.root / "cuda",
            cuda=Version("13.0"),
            nvcc=self.nvcc,
            cxx="g++ 12",
            cmake=Path("cmake"),
            cmake_version=Version("4.2"),
            ninja=Path("ninja"),
            ccache=None,
            variables={
                "FLASHINFER_WORKSPACE_BASE": str(self.base),
                "FLASHINFER_CUDA_ARCH_LIST": "12.0a",
                "PYTHONPATH": str(self.site),
                "PATH": f"{ninja.BIN_DIR}:{os.environ['PATH']}",
                **self.variables,
            },
        )

    @property
    def jobs(self) -> list[str]:
        """With how many each ninja was started."""
        path = self.data / "jobs"
        return path.read_text().split() if path.exists() else []

    def library(self, name: str = "gemm_120") -> Path:
        return self.base / ".cache/flashinfer/0.6.12/120a/cached_ops" / name / f"{name}.so"

    def compiled(self, name: str = "gemm_120") -> int:
        """Steps in ninja's log since it was begun."""
        return len(self.library(name).with_name(".ninja_log").read_text().splitlines()) - 1

    def write(self, name: str, text: str) -> Path:
        path = self.site / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def make(root: Path) -> Made:
    made = Made(root=root)
    made.write("__init__.py", "__version__ = '0.6.12'\n")
    made.write("jit/__init__.py", "")
    made.write("jit/core.py", _CORE)
    made.write("ops.py", _OPS)
    made.write("data/one.cc", "int one() { return 1; }\n")
    made.write("data/two.cc", "int two() { return 2; }\n")
    (made.site / "flashinfer_python-0.6.12.dist-info").mkdir()
    return made
