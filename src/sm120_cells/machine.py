"""What this interpreter runs on: device, versions, kernel libraries, variables that change arithmetic. Facts only."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "sglang",
    "sgl-kernel",
    "sglang-kernel",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "apache-tvm-ffi",
)
KERNEL_PACKAGES = ("sgl-kernel", "sglang-kernel", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
ARITHMETIC_VARIABLES = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "DISABLE_ADDMM_CUDA_LT",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
)
ARITHMETIC_PREFIXES = ("SGLANG_", "SGL_", "FLASHINFER_", "TRTLLM_", "TRITON_", "CUTLASS_", "CUDNN_", "TORCHINDUCTOR_")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_HASH_CACHE = "library-hashes.json"


class NoDeviceError(RuntimeError):
    """The device that was asked for is not there."""


def choose_device(name: str | None) -> torch.device:
    """``cpu``, ``cuda``, or the best that the machine has. NoDeviceError where it is not to be had."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        built = torch.version.cuda
        raise NoDeviceError("torch sees no GPU" if built else f"torch {torch.__version__} is built without CUDA")
    if name not in (None, "cpu", "cuda"):
        raise NoDeviceError(f"device {name!r} is not known: cpu or cuda")
    return torch.device("cuda", torch.cuda.current_device()) if name != "cpu" and available else torch.device("cpu")


def describe(device: torch.device) -> dict[str, Any]:
    """One device: type, name, capability, uuid, driver, memory_bytes."""
    return _gpu(device.index or 0) if device.type == "cuda" else _cpu()


def hello(device: torch.device) -> dict[str, Any]:
    """The worker's answer to ``hello``, the same in every worker of a run but for the process id."""
    devices = [_gpu(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else []
    return {
        "protocol": 1,
        "pid": os.getpid(),
        "python": sys.executable,
        "device": describe(device),
        "devices": devices or [_cpu()],
        "versions": versions(),
        "libraries": _library_hashes(),
        "environment": arithmetic_environment(os.environ),
        "cells_sha256": cells_hash(),
    }


def _cpu() -> dict[str, Any]:
    return {
        "type": "cpu",
        "name": _cpu_name(),
        "capability": None,
        "uuid": None,
        "driver": None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor() or platform.machine()


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "uuid": f"GPU-{properties.uuid}",
        "driver": _driver(),
        "memory_bytes": properties.total_memory,
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        if match := re.search(r"Kernel Module[^\d]*([\d.]+)", text):
            return match.group(1)
    except OSError:
        pass
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)  # fixed words
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def versions() -> dict[str, str | None]:
    """Installed versions of what computes; None where a package is absent."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["torch"] = torch.__version__  # with its local tag, which the metadata of some builds lacks
    found["cuda"] = torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    found["cudnn"] = None if cudnn is None else str(cudnn)
    return found


def arithmetic_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are set and change which arithmetic runs; nothing that could be a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in ARITHMETIC_VARIABLES or name.startswith(ARITHMETIC_PREFIXES)) and not _SECRET.search(name)
    }


def cells_hash() -> str:
    """SHA-256 over the sources of this package: another judge is another gate."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _kernel_libraries() -> Iterator[tuple[str, Path]]:
    for package in KERNEL_PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.suffix in (".so", ".cubin"):
                yield f"{package}/{file.as_posix()}", Path(str(file.locate()))


def _library_hashes() -> dict[str, str]:
    """SHA-256 of every kernel library; computed once a run and kept in the run's folder (the worker's own)."""
    cache_path = Path(_HASH_CACHE)
    try:
        cache: dict[str, list[Any]] = json.loads(cache_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        cache = {}
    hashes: dict[str, str] = {}
    fresh: dict[str, list[Any]] = {}
    for name, path in _kernel_libraries():
        try:
            stat = path.stat()
        except OSError:
            hashes[name] = "missing"
            continue
        key = [stat.st_size, stat.st_mtime_ns]
        known = cache.get(name)
        if known is None or known[:2] != key:
            with path.open("rb") as file:
                known = [*key, hashlib.file_digest(file, "sha256").hexdigest()]
        fresh[name], hashes[name] = known, known[2]
    if fresh != cache and fresh:
        partial = cache_path.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(fresh), encoding="utf-8")
        partial.replace(cache_path)
    return hashes
