"""float64 references from the same quantised operands, with the radius in which a right result must lie.

Dense: one product and the derived bound. Fused MoE: float64 intervals carried through every rounding of the backend's
recipe; only a value whose interval straddles a rounding boundary stays wide, so ties are tolerated and nothing else is.
On exact probes all sums are exact in FP32, so the intervals have no width and the radius is zero.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sm120_cells import bounds, nvfp4
from sm120_cells.bounds import BF16_HALF_ULP, FP32_HALF_ULP, FP32_ULP, Accumulation, FloatType, MoeRecipe
from sm120_cells.cases import Activation, BlockCase, DenseCase, Format, MoeCase
from sm120_cells.probes import BlockOperands, DenseOperands, MoeOperands, MoeWeights, assert_exact

EXACT_DENSE = ("exact", "unit", "readback", "repeat")
EXACT_MOE = ("isolated", "exact", "repeat")

_QUANTISER_SLACK = 2.0**-20
"""Quantisers take the reciprocal with ``rcp.approx.ftz`` (one ulp) and multiply twice: 8 ulp covers all forms."""
_SILU_MINIMUM = (-1.2784645427610738, -0.27846454276107379)
"""Where x * sigmoid(x) has its minimum, and that minimum."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A right result lies within ``radius`` of ``value``; both float64 [rows, columns]."""

    value: Tensor
    radius: Tensor

    @property
    def exact(self) -> bool:
        """Whether one result only is right."""
        return not bool(self.radius.any())

    def rows(self, count: int) -> "Expected":
        """The first ``count`` rows."""
        return Expected(self.value[:count], self.radius[:count])


class _Interval(NamedTuple):
    lo: Tensor
    hi: Tensor

    @property
    def size(self) -> Tensor:
        return torch.maximum(self.lo.abs(), self.hi.abs())

    def widen(self, by: Tensor | float) -> "_Interval":
        return _Interval(self.lo - by, self.hi + by)

    def rounded(self, to: FloatType, *, emulate: bool) -> "_Interval":
        """After a rounding to ``to``: emulated (rounding is monotone), or widened where it may or may not happen."""
        if not emulate:
            return self.widen(BF16_HALF_ULP * self.size)
        if to == "fp32":
            return self
        dtype = bounds.DTYPE[to]
        return _Interval(self.lo.float().to(dtype).double(), self.hi.float().to(dtype).double())


def dense_reference(case: DenseCase, operands: DenseOperands, accumulation: Accumulation) -> Expected:
    """Reference of ``bf16(alpha * A @ W.T)`` for all rows of the case."""
    a, w = operands.a, operands.w
    if isinstance(a, Tensor):
        a_values = a.double()
    else:
        a_values = nvfp4.dequantize_bytes(a.packed, a.scales, torch.ones((), device=a.packed.device))
    w_values = nvfp4.dequantize_bytes(w.packed, w.scales, torch.ones((), device=w.packed.device))
    alpha = operands.alpha
    total = a_values @ w_values.T
    if case.probe in EXACT_DENSE:
        value = (total.float() * alpha).bfloat16().double()
        return Expected(value, torch.zeros_like(value))
    scale = alpha.double()
    magnitude = (a_values.abs() @ w_values.abs().T) * scale.abs()
    value = total * scale
    return Expected(value, bounds.output_radius(value, magnitude, accumulation, case.k))


def moe_reference(case: MoeCase, operands: MoeOperands, recipe: MoeRecipe) -> Expected:
    """Reference of the fused MoE for all tokens of the case; NotExactError where an exact probe is not."""
    exact = case.probe in EXACT_MOE
    tokens, hidden = operands.x.shape
    device = operands.x.device
    total = torch.zeros(tokens, hidden, dtype=torch.float64, device=device)
    radius, magnitude = torch.zeros_like(total), torch.zeros_like(total)
    weights = operands.weights
    if recipe.known and recipe.router_weight != "fp32":
        weights = weights.to(bounds.DTYPE[recipe.router_weight])
    weights = weights.double() * case.routed_scaling
    for expert in range(operands.experts.experts):
        token, slot = (operands.ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        x = operands.x[token].double()
        result = _expert(x, _expert_tensors(operands.experts, expert), case.activation, recipe, exact=exact)
        weight = weights[token, slot].unsqueeze(1)
        total.index_add_(0, token, (result.lo + result.hi) / 2 * weight)
        radius.index_add_(0, token, (result.hi - result.lo) / 2 * weight)
        magnitude.index_add_(0, token, result.size * weight)
    if case.probe in ("isolated", "repeat"):
        return Expected(total, radius)
    return _combined(total, radius, magnitude, recipe, case.top_k, exact=exact)


def block_reference(
    case: BlockCase,
    operands: BlockOperands,
    recipe: MoeRecipe,
    dense: tuple[Accumulation, Accumulation],
    dense_format: Format,
) -> Expected:
    """Reference of routed experts plus shared expert, added in FP32 and rounded to bf16 once.

    dense: how the shared expert's gate/up and down GEMMs add.
    """
    routed = moe_reference(case.routed, operands.routed, recipe)
    shared_recipe = MoeRecipe(*dense, intermediate=dense_format)
    tensors = _ExpertTensors(
        operands.gate_up.dequantize(),
        operands.down.dequantize(),
        1.0,
        1.0,
        float(operands.intermediate_scale),
    )
    result = _expert(operands.routed.x.double(), tensors, case.activation, shared_recipe, exact=False)
    gate = operands.gate.double().unsqueeze(1)
    value = routed.value + gate * (result.lo + result.hi) / 2
    radius = routed.radius + gate * (result.hi - result.lo) / 2
    size = value.abs() + radius
    return Expected(value, radius + (BF16_HALF_ULP + 2 * FP32_ULP) * size + FP32_ULP * gate * result.size)


def _combined(
    total: Tensor, radius: Tensor, magnitude: Tensor, recipe: MoeRecipe, top_k: int, *, exact: bool
) -> Expected:
    """Add the error of weighting and summing the experts' results, and of the output's rounding to bf16."""
    half_ulp = bounds.HALF_ULP
    if recipe.known:
        per_sum = half_ulp[recipe.product_out] + (top_k + 1) * half_ulp[recipe.combine] + 2 * FP32_HALF_ULP
    else:  # weight, product and every addition may be rounded to bf16
        per_sum = (3 + top_k) * BF16_HALF_ULP
    radius = radius + per_sum * magnitude
    if exact:
        out = _Interval(total - radius, total + radius).rounded("bf16", emulate=True)
        return Expected((out.lo + out.hi) / 2, (out.hi - out.lo) / 2)
    return Expected(total, radius + BF16_HALF_ULP * (total.abs() + radius))


class _ExpertTensors(NamedTuple):
    """Dequantised [2I, H] and [H, I] (float64) without their global scales, and the factors after each GEMM."""

    w13: Tensor
    w2: Tensor
    alpha1: float
    alpha2: float
    intermediate_scale: float


def _expert_tensors(experts: MoeWeights, index: int) -> _ExpertTensors:
    # alpha of the down GEMM without the intermediate's own scale, which its dequantised values already carry
    one = torch.ones((), device=experts.w13.device)
    return _ExpertTensors(
        nvfp4.dequantize_bytes(experts.w13[index], experts.w13_scales[index], one),
        nvfp4.dequantize_bytes(experts.w2[index], experts.w2_scales[index], one),
        float(experts.w13_scale_2[index]),
        float(experts.w2_scale_2[index]),
        float(experts.intermediate_scale[index]),
    )


def _expert(x: Tensor, w: _ExpertTensors, activation: Activation, recipe: MoeRecipe, *, exact: bool) -> _Interval:
    """One expert on its tokens, x float64 [t, H]: interval [t, H] of its result before weighting."""
    emulate = recipe.known or exact
    gate_up = _gemm(_Interval(x, x), w.w13, w.alpha1, recipe.gemm1, exact=exact)
    gate_up = gate_up.rounded(recipe.gemm1_out, emulate=emulate)
    gate, up = (_Interval(*pair) for pair in zip(*(half.chunk(2, dim=1) for half in gate_up), strict=True))
    hidden = _activate(gate, up, activation, exact=exact)
    hidden = hidden.rounded(recipe.activation_out, emulate=emulate)
    if recipe.intermediate == "fp4":
        hidden = _requantised(hidden, w.intermediate_scale, exact=exact)
    if exact:  # the first GEMM's sums have one term
        assert_exact(hidden.lo, w.w2)
    result = _gemm(hidden, w.w2, w.alpha2, recipe.gemm2, exact=exact)
    if exact:
        return result.rounded(recipe.gemm2_out, emulate=True)
    if recipe.known and recipe.gemm2_out == "fp32":
        return result
    return result.widen(BF16_HALF_ULP * result.size)


def _gemm(a: _Interval, w: Tensor, alpha: float, accumulation: Accumulation, *, exact: bool) -> _Interval:
    middle = (a.lo + a.hi) / 2 @ w.T * alpha
    if exact:
        return _Interval(middle, middle)
    half = (a.hi - a.lo) / 2
    size = w.abs().T * abs(alpha)
    inherited = half @ size if bool(half.any()) else torch.zeros_like(middle)
    error = accumulation.relative(w.shape[1]) * (a.size @ size) + 4 * FP32_HALF_ULP * (middle.abs() + inherited)
    return _Interval(middle, middle).widen(inherited + error)


def _activate(gate: _Interval, up: _Interval, activation: Activation, *, exact: bool) -> _Interval:
    """Gated activation on intervals. Kernels use ``__expf``: 2 + floor(1.173 |x|) ulp (CUDA C++ guide)."""
    if activation.limit is not None:
        gate = _Interval(*(t.clamp(max=activation.limit) for t in gate))
        up = _Interval(*(t.clamp(-activation.limit, activation.limit) + activation.beta for t in up))
    alpha = activation.alpha

    def gated(x: Tensor) -> Tensor:
        return x * torch.sigmoid(alpha * x)

    at_lo, at_hi = gated(gate.lo), gated(gate.hi)
    bottom, minimum = (value / alpha for value in _SILU_MINIMUM)
    lo = torch.minimum(at_lo, at_hi)
    lo = torch.where((gate.lo < bottom) & (gate.hi > bottom), torch.full_like(lo, minimum), lo)
    hi = torch.maximum(at_lo, at_hi)
    corners = torch.stack([lo * up.lo, lo * up.hi, hi * up.lo, hi * up.hi])
    out = _Interval(corners.amin(0), corners.amax(0))
    if exact:
        return out
    reach = alpha * gate.lo.abs().maximum(gate.hi.abs())
    exp_error = (2 + torch.floor(1.173 * reach)) * FP32_ULP
    relative = exp_error * torch.sigmoid(-alpha * gate.lo) + 8 * FP32_ULP
    return out.widen(relative * out.size + 1e-30)


def _requantised(x: _Interval, scale_2: float, *, exact: bool) -> _Interval:
    """Interval of the values after quantisation to NVFP4 and back (float64, block scale times scale_2 included)."""
    slack = 0.0 if exact else _QUANTISER_SLACK
    global_scale = 1.0 / scale_2
    lo, hi = (t.unflatten(-1, (-1, nvfp4.BLOCK)) for t in x)
    largest = torch.maximum(lo.abs(), hi.abs()).amax(-1)
    smallest = torch.where((lo <= 0) & (hi >= 0), 0.0, torch.minimum(lo.abs(), hi.abs())).amax(-1)
    first = nvfp4.encode_e4m3(global_scale * smallest / nvfp4.E2M1_MAX * (1 - slack)).int()
    last = nvfp4.encode_e4m3(global_scale * largest / nvfp4.E2M1_MAX * (1 + slack)).int()
    out_lo, out_hi = torch.full_like(lo, torch.inf), torch.full_like(hi, -torch.inf)
    for step in range(int((last - first).max()) + 1 if first.numel() else 0):
        open_ = first + step <= last  # blocks whose scale may still be this byte
        scale = nvfp4.decode_e4m3((first + step)[open_].to(torch.uint8), torch.float64).unsqueeze(-1)
        inverse = torch.where(scale > 0, global_scale / scale, 0.0)

        def quantised(values: Tensor, inverse: Tensor = inverse, scale: Tensor = scale) -> Tensor:
            codes = nvfp4.encode_e2m1((values * inverse).clamp(-nvfp4.E2M1_MAX, nvfp4.E2M1_MAX))
            return nvfp4.decode_e2m1(codes, torch.float64) * scale * scale_2

        low, high = lo[open_], hi[open_]
        out_lo[open_] = torch.minimum(out_lo[open_], quantised(low - slack * low.abs()))
        out_hi[open_] = torch.maximum(out_hi[open_], quantised(high + slack * high.abs()))
    return _Interval(out_lo.flatten(-2), out_hi.flatten(-2))
