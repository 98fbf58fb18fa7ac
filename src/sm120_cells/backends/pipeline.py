"""A dense GEMM and a fused MoE in plain torch, written as stages around one exchangeable matrix product.

The reference backends are these with their own arithmetic; the fault catalogue overrides single stages.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sm120_cells import nvfp4
from sm120_cells.backends import DenseInput, DenseKernel, MoeKernel
from sm120_cells.bounds import Accumulation, MoeRecipe
from sm120_cells.cases import Case, DenseCase, Format, MoeCase
from sm120_cells.nvfp4 import BLOCK, Quantized
from sm120_cells.probes import MoeWeights

_DECODED_BYTES = 4 << 30
"""Decoded experts are kept up to about this size: 512 of a large model would fill a card."""


class Matrix(NamedTuple):
    """Decoded operand: values fp32 [R, K] and block scales fp32 [R, K/16] (None where values are not scaled)."""

    values: Tensor
    scales: Tensor | None

    def rows(self, index: Tensor) -> "Matrix":
        """The given rows."""
        return Matrix(self.values[index], None if self.scales is None else self.scales[index])

    def dequantised(self) -> Tensor:
        """fp32 [R, K]."""
        if self.scales is None:
            return self.values
        return self.values * self.scales.repeat_interleave(BLOCK, dim=-1)


class Loaded(Protocol):
    """Weights in the form that a product multiplies with."""

    @property
    def nbytes(self) -> int:
        """What keeping them costs."""


class Product(Protocol):
    """``a @ w.T`` accumulated in fp32 [M, N]; ``multiply`` takes what ``load`` of the same product gave."""

    def load(self, w: Matrix, /) -> Loaded: ...

    def multiply(self, a: Matrix, w: Any, /) -> Tensor: ...


def decode(packed: Tensor, scales: Tensor) -> Matrix:
    """Packed codes uint8 [R, K/2] and linear scale bytes uint8 [R, K/16]."""
    return Matrix(nvfp4.decode_e2m1(nvfp4.unpack(packed)), nvfp4.decode_e4m3(scales))


class DensePipeline:
    """Dense GEMM kernel: read activations, multiply, scale, write."""

    def __init__(self, weight: Quantized, product: Product) -> None:
        self.product = product
        self.weight = product.load(self.load(weight))
        self.calls = 0

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        self.calls += 1
        total = self.multiply(self.read(a))
        out.copy_(self.scaled(total, alpha))
        self.finish(out, a)
        return out

    def load(self, weight: Quantized) -> Matrix:
        """Decode the weights."""
        return decode(weight.packed, weight.scales)

    def read(self, a: DenseInput) -> Matrix:
        """Decode the activations of the M real rows."""
        if a.values is not None:
            return Matrix(a.values.float(), None)
        if a.packed is None or a.scales is None:
            raise ValueError("activations hold neither FP4 codes with scales nor bf16 values")
        return decode(a.packed, nvfp4.unswizzle(a.scales, a.m, a.k // BLOCK))

    def multiply(self, a: Matrix) -> Tensor:
        """fp32 [M, N], without alpha."""
        return self.product.multiply(a, self.weight)

    def scaled(self, total: Tensor, alpha: Tensor) -> Tensor:
        """The epilogue: alpha in fp32."""
        return total * alpha

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """After the output is written."""


class MoePipeline:
    """Fused MoE kernel: for each expert gather, gate/up GEMM, activation, re-quantisation, down GEMM; then combine."""

    def __init__(self, experts: MoeWeights, case: MoeCase, product: Product) -> None:
        self.experts, self.case, self.product = experts, case, product
        self.calls = 0
        self._loaded: dict[tuple[str, int], Loaded] = {}
        self._loaded_bytes = 0

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        self.calls += 1
        a = self.quantise_tokens(x)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in self.used_experts(ids):
            token, slot = self.assigned(ids, expert)
            gate, up = self.split(self.gate_up(a.rows(token), expert))
            hidden = self.activate(gate, up, expert)
            result = self.down(self.requantise(hidden, expert), expert)
            self.combine(total, result, weights[token, slot].unsqueeze(1), token)
        out.copy_(self.routed_scaling(total))
        self.finish(out, x, ids)
        return out

    def weight(self, name: str, expert: int) -> Loaded:
        """An expert's w13 or w2, loaded on first use."""
        key = (name, expert)
        if key not in self._loaded:
            if self._loaded_bytes > _DECODED_BYTES:
                self._loaded.clear()
                self._loaded_bytes = 0
            loaded = self.product.load(self.read_weight(name, expert))
            self._loaded[key] = loaded
            self._loaded_bytes += loaded.nbytes
        return self._loaded[key]

    def read_weight(self, name: str, expert: int) -> Matrix:
        """Decode an expert's w13 or w2."""
        packed, scales = getattr(self.experts, name), getattr(self.experts, f"{name}_scales")
        return decode(packed[expert], scales[expert])

    def quantise_tokens(self, x: Tensor) -> Matrix:
        """NVFP4 with the checkpoint's input scale, or bf16 as it is (weight-only)."""
        if self.case.format == "bf16" or not len(x):
            return Matrix(x.float(), None)
        q = nvfp4.quantize(x.float(), 1.0 / self.experts.input_scale)
        return decode(q.packed, q.scales)

    def used_experts(self, ids: Tensor) -> Iterable[int]:
        """Experts that some token is routed to."""
        return (e for e in ids.unique().tolist() if e >= 0)

    def assigned(self, ids: Tensor, expert: int) -> tuple[Tensor, Tensor]:
        """(token, slot) of all that are routed to an expert."""
        token, slot = (ids == expert).nonzero(as_tuple=True)
        return token, slot

    def gate_up(self, a: Matrix, expert: int) -> Tensor:
        """bf16 [t, 2I]."""
        total = self.multiply(a, self.weight("w13", expert))
        return (total * self.alpha1(expert)).bfloat16()

    def multiply(self, a: Matrix, w: Loaded) -> Tensor:
        """fp32 [t, N] accumulator."""
        return self.product.multiply(a, w)

    def alpha1(self, expert: int) -> Tensor:
        """fp32 []: global scale of the gate/up GEMM."""
        scale = self.experts.w13_scale_2[expert]
        return scale if self.case.format == "bf16" else scale * self.experts.input_scale

    def alpha2(self, expert: int) -> Tensor:
        """fp32 []: global scale of the down GEMM."""
        scale = self.experts.w2_scale_2[expert]
        return scale if self.case.format == "bf16" else scale * self.experts.intermediate_scale[expert]

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """(gate, up) fp32 [t, I] each: the checkpoint's order."""
        gate, up = gate_up.float().chunk(2, dim=1)
        return gate, up

    def activate(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        """bf16 [t, I]."""
        form = self.case.activation
        if form.limit is not None:
            gate = gate.clamp(max=form.limit)
            up = up.clamp(-form.limit, form.limit) + form.beta
        return (gate * self.sigmoid(form.alpha * gate) * up).bfloat16()

    def sigmoid(self, x: Tensor) -> Tensor:
        """fp32."""
        return torch.sigmoid(x)

    def requantise(self, hidden: Tensor, expert: int) -> Matrix:
        """The down GEMM's input: NVFP4 with the expert's intermediate scale, or bf16 as it is (weight-only)."""
        if self.case.format == "bf16":
            return Matrix(hidden.float(), None)
        q = nvfp4.quantize(hidden.float(), 1.0 / self.experts.intermediate_scale[expert])
        return decode(q.packed, q.scales)

    def down(self, hidden: Matrix, expert: int) -> Tensor:
        """bf16 [t, H]."""
        total = self.multiply(hidden, self.weight("w2", expert))
        return (total * self.alpha2(expert)).bfloat16()

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """Add an expert's weighted results (weight fp32 [t, 1]) into fp32 [T, H]."""
        total.index_add_(0, token, result.float() * weight)

    def routed_scaling(self, total: Tensor) -> Tensor:
        """fp32 [T, H]."""
        return total * self.case.routed_scaling

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        """After the output is written."""


@dataclass(frozen=True, slots=True)
class PipelineDense:
    """A dense backend made of a pipeline and a product."""

    name: str
    formats: frozenset[Format]
    product: Product
    sums: Accumulation
    kernel: Callable[[Quantized, Product], DenseKernel] = DensePipeline
    servable: bool = False

    def unsupported(self, device: torch.device, case: Case | None = None) -> str | None:
        """Runs anywhere; a format that it does not take is unsupported."""
        del device
        return _format_refusal(self.name, self.formats, case)

    def accumulation(self, case: DenseCase) -> Accumulation:
        """The same for all cases."""
        del case
        return self.sums

    def prepare(self, weight: Quantized) -> DenseKernel:
        """A pipeline over these weights."""
        return self.kernel(weight, self.product)


@dataclass(frozen=True, slots=True)
class PipelineMoe:
    """A fused-MoE backend made of a pipeline and a product."""

    name: str
    formats: frozenset[Format]
    product: Product
    sums: Accumulation
    kernel: Callable[[MoeWeights, MoeCase, Product], MoeKernel] = MoePipeline
    servable: bool = False

    def unsupported(self, device: torch.device, case: Case | None = None) -> str | None:
        """Runs anywhere; a format that it does not take is unsupported."""
        del device
        return _format_refusal(self.name, self.formats, case)

    def recipe(self, case: MoeCase) -> MoeRecipe:
        """bf16 after each GEMM and after the activation, weights and sums in fp32."""
        return MoeRecipe(gemm1=self.sums, gemm2=self.sums, intermediate=case.format)

    def prepare(self, experts: MoeWeights, case: MoeCase) -> MoeKernel:
        """A pipeline over these experts."""
        return self.kernel(experts, case, self.product)


def _format_refusal(name: str, formats: frozenset[Format], case: Case | None) -> str | None:
    if isinstance(case, DenseCase | MoeCase) and case.format not in formats:
        return f"{name} does not take {'bf16' if case.format == 'bf16' else 'FP4'} activations"
    return None
