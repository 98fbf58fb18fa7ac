"""Environment variables that change what the stack builds, loads or does."""

from collections.abc import Mapping

from sm120 import redact

_PREFIXES = (
    *("CUDA_", "NVIDIA_", "NVCC_", "NCCL_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_"),
    *("FLASHINFER_", "SGLANG_", "SGL_", "TVM_FFI_", "CUTE_DSL_", "DG_", "HF_", "CMAKE_", "UV_", "PIP_"),
    *("SM120_", "INVOKE_SM120_", "OMP_", "LD_"),
)
_NAMES = {
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "CUDAHOSTCXX", "CPATH", "LIBRARY_PATH"),
    *("C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "MAX_JOBS", "PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"),
    *("CONDA_PREFIX", "TMPDIR", "XDG_CACHE_HOME"),
}


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Those that are set, sorted, with secrets masked."""
    chosen = {name: env[name] for name in sorted(env) if name in _NAMES or name.startswith(_PREFIXES)}
    return redact.redact_env(chosen)
