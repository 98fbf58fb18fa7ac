"""Hand-made backends for tests: right ones, with something done before or after; and the shortest way to judge one."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from sm120_cells.backends import DenseBackend, DenseInput, MoeBackend
from sm120_cells.backends.pipeline import DensePipeline, MoePipeline, PipelineDense, PipelineMoe, Product
from sm120_cells.backends.torch_dequant import DequantisedProduct
from sm120_cells.bounds import SEQUENTIAL_FP32, Accumulation
from sm120_cells.cases import DenseCase, Format, MoeCase
from sm120_cells.evaluate import Outcome, evaluate
from sm120_cells.nvfp4 import Quantized
from sm120_cells.probes import MoeWeights, dense_operands, moe_operands
from sm120_cells.reference import dense_reference, moe_reference
from sm120_cells.subjects import DenseSubject, MoeSubject

BOTH: frozenset[Format] = frozenset({"fp4", "bf16"})
DenseTouch = Callable[[Tensor, DenseInput, int], object]
MoeTouch = Callable[[Tensor, Tensor, Tensor, int], object]


class _TouchedDense(DensePipeline):
    def __init__(self, weight: Quantized, product: Product, touch: DenseTouch) -> None:
        super().__init__(weight, product)
        self.touch = touch

    def finish(self, out: Tensor, a: DenseInput) -> None:
        self.touch(out, a, self.calls)


class _TouchedMoe(MoePipeline):
    def __init__(self, experts: MoeWeights, case: MoeCase, product: Product, touch: MoeTouch) -> None:
        super().__init__(experts, case, product)
        self.touch = touch

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        self.touch(out, x, ids, self.calls)


def dense(
    touch: DenseTouch | None = None,
    *,
    kernel: Callable[..., Any] = DensePipeline,
    product: Product | None = None,
    sums: Accumulation = SEQUENTIAL_FP32,
    formats: frozenset[Format] = BOTH,
) -> PipelineDense:
    """A right backend; touch(out, activations, number of the call) runs after each call."""
    made = kernel if touch is None else partial(_TouchedDense, touch=touch)
    return PipelineDense("hooked", formats, product or DequantisedProduct(), sums, made)


def moe(
    touch: MoeTouch | None = None,
    *,
    kernel: Callable[..., Any] = MoePipeline,
    product: Product | None = None,
    sums: Accumulation = SEQUENTIAL_FP32,
    formats: frozenset[Format] = BOTH,
) -> PipelineMoe:
    """A right backend; touch(out, x, ids, number of the call) runs after each call."""
    made = kernel if touch is None else partial(_TouchedMoe, touch=touch)
    return PipelineMoe("hooked", formats, product or DequantisedProduct(), sums, made)


def judge_dense(backend: DenseBackend, case: DenseCase) -> Outcome:
    made = dense_operands(case)
    return evaluate(DenseSubject(case, made, backend), dense_reference(case, made, backend.accumulation(case)))


def judge_moe(backend: MoeBackend, case: MoeCase) -> Outcome:
    made = moe_operands(case)
    return evaluate(MoeSubject(case, made, backend), moe_reference(case, made, backend.recipe(case)))


def checks(outcome: Outcome) -> dict[tuple[str, str], list[int]]:
    """(tier, check) → sizes at which it failed."""
    return {(f.tier, f.check): f.condition["failed_at"] for f in outcome.findings}
