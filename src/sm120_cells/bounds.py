"""How far a right kernel may be from the float64 reference: derived, per element, from what its backend declares.

The bound (method and figures: "How to judge an FP4 kernel", section 2.5)::

    |err| <= (1 + u) * E + 4 * 2^-24 * |ref| + u * |ref|        E = accumulation error, u = half an ulp of the output

``E`` comes from the `Accumulation` that the backend declares for the case at hand: it is a property of the path
that really runs (split-K, the type partial sums are added in), never a constant of the format.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FloatType = Literal["fp32", "bf16", "fp16"]

FP32_ULP = 2.0**-23
"""One step of FP32 truncation (round toward zero), relative."""
FP32_HALF_ULP = 2.0**-24
BF16_HALF_ULP = 2.0**-8
BF16_MMA_STEP = 5.25 * FP32_ULP
"""A 16-deep BF16/FP8 MMA step truncates its aligned products to F = 25 bits: 17 * 2^-25 on top of the FP32 rounding
(MMA-Sim, arXiv 2511.10909)."""

HALF_ULP: dict[FloatType, float] = {"fp32": FP32_HALF_ULP, "bf16": BF16_HALF_ULP, "fp16": 2.0**-11}
DTYPE: dict[FloatType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How one output element is summed over K.

    depth: products that one step adds before the accumulator is rounded. unit: error of a step relative to
    S = sum |a * b|. splits: partial sums (split-K), added in ``partial``. atomics: the order varies between calls,
    so repeated runs need not be bit-equal.
    """

    depth: int
    unit: float
    splits: int = 1
    partial: FloatType = "fp32"
    atomics: bool = False

    @property
    def fp32_partials(self) -> bool:
        """Whether the exact probes (T1) apply: they need FP32 partial sums."""
        return self.partial == "fp32"

    def relative(self, k: int) -> float:
        """Error bound relative to S for a sum over ``k`` products."""
        steps = math.ceil(k / self.depth) * self.unit
        splitting = 0.0 if self.splits == 1 else self.splits * max(HALF_ULP[self.partial], FP32_HALF_ULP)
        return steps + splitting


NATIVE_FP4 = Accumulation(depth=64, unit=FP32_ULP)
"""SM120 block-scaled FP4 MMA: K = 64 a step, truncated to FP32 (MMA-Sim)."""
GENERIC_FP4 = Accumulation(depth=16, unit=FP32_ULP)
"""An FP4 kernel whose step is not known: four times the native count."""
SEQUENTIAL_FP32 = Accumulation(depth=1, unit=FP32_HALF_ULP)
"""FP32 fused multiply-adds in any order."""


@dataclass(frozen=True, slots=True)
class MoeRecipe:
    """Every rounding between the tokens and the output of a fused MoE, as its backend publishes it.

    known=False: the recipe is not known, and the reference widens at each place where a rounding may happen
    (plain interval) instead of emulating the recipe; exact probes that depend on the recipe are then skipped.
    gemm1_out, activation_out: type in which the gate/up result and the activation are kept. intermediate: what the
    down GEMM reads. gemm2_out: type of an expert's result. router_weight: type the routing weight is rounded to.
    product_out: type of weight * result. combine: type the experts' products are added in.
    """

    gemm1: Accumulation
    gemm2: Accumulation
    known: bool = True
    gemm1_out: FloatType = "bf16"
    activation_out: FloatType = "bf16"
    intermediate: Literal["fp4", "bf16"] = "fp4"
    gemm2_out: FloatType = "bf16"
    router_weight: FloatType = "fp32"
    product_out: FloatType = "fp32"
    combine: FloatType = "fp32"

    @property
    def atomics(self) -> bool:
        """Whether the order of additions varies between calls."""
        return self.gemm1.atomics or self.gemm2.atomics


def output_radius(ref: Tensor, magnitude: Tensor, accumulation: Accumulation, k: int) -> Tensor:
    """Radius (float64, same shape) around ``ref`` in which a bf16 result must lie; ``magnitude`` is S."""
    error = accumulation.relative(k) * magnitude
    size = ref.abs()
    return (1 + BF16_HALF_ULP) * error + (4 * FP32_HALF_ULP + BF16_HALF_ULP) * size


def eta(got: Tensor, ref: Tensor, radius: Tensor) -> Tensor:
    """|got - ref| / radius in float64. A bound of zero tolerates no error: 0 where equal, infinity elsewhere.

    A result that is not finite where the reference is finite has eta infinity.
    """
    error = (got.double() - ref).abs()
    ratio = torch.where(error == 0, torch.zeros_like(error), error / radius)
    return torch.where(torch.isfinite(got) | ~torch.isfinite(ref), ratio, torch.full_like(ratio, math.inf)).nan_to_num_(
        nan=math.inf, posinf=math.inf
    )
