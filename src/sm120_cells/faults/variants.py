"""Right variants: what a correct kernel may do differently. Rejecting one of them is a false alarm of the judge."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sm120_cells import mma, nvfp4
from sm120_cells.backends import DenseBackend, DenseInput, MoeBackend
from sm120_cells.backends.pipeline import (
    DensePipeline,
    Matrix,
    MoePipeline,
    PipelineDense,
    PipelineMoe,
    Product,
)
from sm120_cells.backends.sm120_model import MmaProduct
from sm120_cells.backends.torch_dequant import DequantisedProduct
from sm120_cells.bounds import FP32_ULP, GENERIC_FP4, NATIVE_FP4, SEQUENTIAL_FP32, Accumulation, MoeRecipe
from sm120_cells.cases import Format, MoeCase
from sm120_cells.faults.base import FP4, Mutant
from sm120_cells.nvfp4 import BLOCK

RIGHT: list[Mutant] = []
_BOTH: frozenset[Format] = frozenset({"fp4", "bf16"})
_W4A16: frozenset[Format] = frozenset({"bf16"})


# --- products -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitProduct:
    """K in parts that are summed apart, then added in ``partial``; the order of additions may change each call."""

    parts: int
    partial: torch.dtype = torch.float32
    shuffled: bool = False

    def load(self, w: Matrix) -> Tensor:
        """Dequantise once."""
        return w.dequantised()

    def multiply(self, a: Matrix, w: Tensor) -> Tensor:
        """fp32 [M, N]."""
        values = a.dequantised()
        parts = [x @ y.T for x, y in zip(values.chunk(self.parts, 1), w.chunk(self.parts, 1), strict=True)]
        if self.shuffled:
            random.shuffle(parts)
        total = parts[0].to(self.partial)
        for part in parts[1:]:
            total = total + part.to(self.partial)
        return total.float()


# --- dense --------------------------------------------------------------------------------------------------------


class OwnTensor(DensePipeline):
    """Returns a tensor of its own instead of writing into the one offered."""

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        """A fresh tensor."""
        return super().__call__(a, alpha, torch.empty_like(out))


class NegativeZero(DensePipeline):
    """Zeros come out with a negative sign."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """-0 equals 0."""
        del a
        out[out == 0] = -0.0


class WholeTiles(DensePipeline):
    """Computes the padding rows of a tile too, and stores the real ones only."""

    def read(self, a: DenseInput) -> Matrix:
        """Rows up to a multiple of 16, whatever they hold."""
        right = super().read(a)
        extra = -a.m % 16
        if a.packed is None or a.scales is None or not extra or right.scales is None:
            return right
        width = a.k // 2
        tail = a.packed.as_strided((extra, width), (width, 1), a.packed.storage_offset() + a.m * width)
        scales = nvfp4.unswizzle(a.scales, a.m + extra, a.k // BLOCK)[a.m :]
        return Matrix(
            torch.cat([right.values, nvfp4.decode_e2m1(nvfp4.unpack(tail))]),
            torch.cat([right.scales, nvfp4.decode_e4m3(scales)]),
        )

    def scaled(self, total: Tensor, alpha: Tensor) -> Tensor:
        """Drops what was computed for padding."""
        return super().scaled(total, alpha)[: self.rows]

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        """Notes the real rows."""
        self.rows = a.m
        return super().__call__(a, alpha, out)


def _dense(
    name: str,
    source: str,
    product: Product,
    sums: Accumulation,
    kernel: Callable[..., DensePipeline] = DensePipeline,
    formats: frozenset[Format] = FP4,
) -> None:
    def make(seed: int) -> DenseBackend:
        del seed
        return PipelineDense(name, formats, product, sums, kernel)

    RIGHT.append(Mutant(name, "right", source, dense=make))


_dense("SM120 model", "MMA-Sim", MmaProduct(), NATIVE_FP4)
_dense("steps in reverse order", "any order of K is right", MmaProduct(mma.MmaModel(reverse=True)), NATIVE_FP4)
_dense("round to nearest after each step", "A", MmaProduct(mma.MmaModel(accumulator="fp32_rne")), NATIVE_FP4)
_dense("16 products a step", "a narrower MMA", MmaProduct(mma.MmaModel(step=16)), GENERIC_FP4)
_dense("dequantised fp32 product", "A", DequantisedProduct(), SEQUENTIAL_FP32)
_dense("split-K 4", "partial sums in fp32", SplitProduct(4), Accumulation(1, FP32_ULP / 2, splits=4))
_dense(
    "split-K 4 with bf16 atomics",
    "numerics 2.6: Marlin at M = 1, less precise but as declared",
    SplitProduct(4, torch.bfloat16, shuffled=True),
    Accumulation(1, FP32_ULP / 2, splits=4, partial="bf16", atomics=True),
)
_dense(
    "split-K 8 with fp32 atomics",
    "order differs between calls",
    SplitProduct(8, shuffled=True),
    Accumulation(1, FP32_ULP / 2, splits=8, atomics=True),
)
_dense("W4A16", "weight-only: activations are not quantised", DequantisedProduct(), SEQUENTIAL_FP32, formats=_W4A16)
_dense("returns its own tensor", "an API without out=", MmaProduct(), NATIVE_FP4, OwnTensor)
_dense("negative zeros", "-0 equals 0", MmaProduct(), NATIVE_FP4, NegativeZero)
_dense(
    "whole tiles computed, real rows stored", "padding is read and thrown away", MmaProduct(), NATIVE_FP4, WholeTiles
)


# --- mixture of experts -------------------------------------------------------------------------------------------


class TanhSigmoid(MoePipeline):
    """The sigmoid by tanh."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """0.5 (1 + tanh(x / 2))."""
        return 0.5 * (1 + torch.tanh(0.5 * x))


class FastExp(MoePipeline):
    """The sigmoid by ``__expf``, at the error that the CUDA C++ guide allows it."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Error of 2 + floor(1.173 |x|) ulp, alternating in sign."""
        ulp = (2 + torch.floor(1.173 * x.abs())) * FP32_ULP
        sign = torch.where(torch.arange(x.shape[-1], device=x.device) % 2 == 0, 1.0, -1.0)
        return 1 / (1 + torch.exp(-x) * (1 + sign * ulp))


class ApproximateReciprocal(MoePipeline):
    """The quantiser multiplies with an approximate reciprocal, one ulp off."""

    def requantise(self, hidden: Tensor, expert: int) -> Matrix:
        """Scale and quotient one ulp too large."""
        scale_2 = self.experts.intermediate_scale[expert]
        up = 1 + FP32_ULP
        scales = nvfp4.decode_e4m3(nvfp4.block_scales(hidden.float() * up, 1.0 / scale_2))
        inverse = torch.where(scales > 0, up / (scales * scale_2), 0.0).unsqueeze(-1)
        exact = (hidden.float().unflatten(1, (-1, BLOCK)) * inverse).clamp(-6, 6)
        return Matrix(nvfp4.decode_e2m1(nvfp4.encode_e2m1(exact)).flatten(1), scales)


class Fp32Results(MoePipeline):
    """The down GEMM's result stays in fp32 until it is combined."""

    def down(self, hidden: Matrix, expert: int) -> Tensor:
        """fp32 [t, H]."""
        return self.multiply(hidden, self.weight("w2", expert)) * self.alpha2(expert)


class Fp32Activation(MoePipeline):
    """The activation is quantised from fp32, without a rounding to bf16."""

    def activate(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        """fp32 [t, I]."""
        return gate * torch.sigmoid(gate) * up if self.case.activation.limit is None else self.clamped(gate, up)

    def clamped(self, gate: Tensor, up: Tensor) -> Tensor:
        """The clamped form in fp32."""
        form = self.case.activation
        limit = form.limit or 0.0
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + form.beta
        return gate * torch.sigmoid(form.alpha * gate) * up


class Bf16RouterWeight(MoePipeline):
    """Router weights are rounded to bf16, and so is their product (SGLang's cutlass_moe_fp4)."""

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """Sum in fp32."""
        total.index_add_(0, token, (result.float() * weight.bfloat16().float()).bfloat16().float())


class Bf16Atomics(MoePipeline):
    """Experts' products are added by bf16 atomics."""

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """Rounds after each addition."""
        super().combine(total, (result.float() * weight).bfloat16(), torch.ones_like(weight), token)
        total.copy_(total.bfloat16())


class WeightsScaled(MoePipeline):
    """Routed scaling is folded into the router weights."""

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """Weight * scaling."""
        super().combine(total, result, weight * self.case.routed_scaling, token)

    def routed_scaling(self, total: Tensor) -> Tensor:
        """Already done."""
        return total


class ReverseExperts(MoePipeline):
    """Experts are added from the last to the first."""

    def used_experts(self, ids: Tensor) -> list[int]:
        """Descending."""
        return list(super().used_experts(ids))[::-1]


@dataclass(frozen=True, slots=True)
class _Declared(PipelineMoe):
    """A MoE variant with a recipe of its own."""

    declared: Callable[[MoeCase], MoeRecipe] | None = None

    def recipe(self, case: MoeCase) -> MoeRecipe:
        """As declared."""
        return PipelineMoe.recipe(self, case) if self.declared is None else self.declared(case)


def _moe(
    name: str,
    source: str,
    kernel: Callable[..., MoePipeline] = MoePipeline,
    product: Product | None = None,
    sums: Accumulation = NATIVE_FP4,
    formats: frozenset[Format] = FP4,
    declared: Callable[[MoeCase], MoeRecipe] | None = None,
) -> None:
    def make(seed: int) -> MoeBackend:
        del seed
        return _Declared(name, formats, product or MmaProduct(), sums, kernel, declared=declared)

    RIGHT.append(Mutant(name, "right", source, moe=make))


def _native(**fields: object) -> Callable[[MoeCase], MoeRecipe]:
    def recipe(case: MoeCase) -> MoeRecipe:
        return partial(MoeRecipe, NATIVE_FP4, NATIVE_FP4, intermediate=case.format)(**fields)  # type: ignore[arg-type]

    return recipe


_moe("SM120 model", "MMA-Sim")
_moe("steps in reverse order", "B", product=MmaProduct(mma.MmaModel(reverse=True)))
_moe("round to nearest after each step", "B", product=MmaProduct(mma.MmaModel(accumulator="fp32_rne")))
_moe("dequantised fp32 product", "B", product=DequantisedProduct(), sums=SEQUENTIAL_FP32)
_moe("sigmoid by tanh", "B", TanhSigmoid)
_moe("sigmoid by __expf", "numerics 2.8", FastExp)
_moe("approximate reciprocal in the quantiser", "numerics 2.8: rcp.approx.ftz", ApproximateReciprocal)
_moe("down GEMM's result in fp32", "B", Fp32Results, declared=_native(gemm2_out="fp32"))
_moe("activation quantised from fp32", "TensorRT-LLM's order", Fp32Activation, declared=_native(activation_out="fp32"))
_moe(
    "router weight and product in bf16",
    "numerics 2.8: cutlass_moe_fp4",
    Bf16RouterWeight,
    declared=_native(router_weight="bf16", product_out="bf16"),
)
_moe("bf16 atomics, declared", "numerics 2.8", Bf16Atomics, declared=_native(product_out="bf16", combine="bf16"))
_moe("unknown recipe: bf16 everywhere", "plain interval", Bf16Atomics, declared=_native(known=False))
_moe("unknown recipe: fp32 activation and result", "plain interval", Fp32Results, declared=_native(known=False))
_moe("scaling folded into the router weights", "either place is right", WeightsScaled)
_moe("experts in reverse order", "any order of experts is right", ReverseExperts)
_moe("W4A16", "weight-only", product=DequantisedProduct(), sums=SEQUENTIAL_FP32, formats=_W4A16)
