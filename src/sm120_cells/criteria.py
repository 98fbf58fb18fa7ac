"""Four published acceptance criteria, asked about the same outputs as the judge: what would they have let through?

Thresholds are their projects' own ("How to judge an FP4 kernel", 2.1): FlashInfer ``mm_fp4`` (cosine), DeepGEMM
``calc_diff`` for FP4, SGLang and vLLM NVFP4 tests (atol = rtol = 0.1), flashinfer-bench (1e-2 on 95 % of elements). All
are given the float64 reference from the same quantised operands, which is more than some of them ask for.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def _cosine(got: Tensor, want: Tensor) -> bool:
    norm = float(torch.sqrt((got * got).sum() * (want * want).sum()))
    return bool(torch.equal(got, want)) if norm == 0 else float((got * want).sum()) / norm > 0.97


def _deepgemm(got: Tensor, want: Tensor) -> bool:
    size = float((got * got + want * want).sum())
    return True if size == 0 else 1 - 2 * float((got * want).sum()) / size < 0.02


def _close(got: Tensor, want: Tensor) -> bool:
    return bool(((got - want).abs() <= 0.1 + 0.1 * want.abs()).all())


def _bench(got: Tensor, want: Tensor) -> bool:
    error = (got - want).abs()
    bad = (error > 1e-2) & (error / (want.abs() + 1e-8) > 1e-2)
    return float(bad.double().mean()) <= 0.05


CRITERIA: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "cosine > 0.97": _cosine,
    "DeepGEMM diff < 0.02": _deepgemm,
    "atol = rtol = 0.1": _close,
    "flashinfer-bench 95 %": _bench,
}


def accepts(got: Tensor, want: Tensor) -> dict[str, bool]:
    """What each criterion says of an output (bf16) against its reference (float64); none accepts what is not finite."""
    if not got.numel():
        return dict.fromkeys(CRITERIA, True)
    if not bool(torch.isfinite(got).all()):
        return dict.fromkeys(CRITERIA, False)
    return {name: criterion(got.double(), want) for name, criterion in CRITERIA.items()}
