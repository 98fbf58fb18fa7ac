"""MoE faults in the experts' arithmetic: order of halves, activation, scales, re-quantisation, accumulators."""

import math

import torch
from torch import Tensor

from sm120_cells import mma, nvfp4
from sm120_cells.backends.pipeline import Matrix
from sm120_cells.faults.base import MoeFault, Mutant, moe_fault
from sm120_cells.nvfp4 import BLOCK

FAULTS: list[Mutant] = []
ATOM = 32


@moe_fault(FAULTS, "gate and up swapped", "B; C32: FlashInfer CUTLASS expects [up, gate]")
class GateUpSwapped(MoeFault):
    """The halves change places."""

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        """Up first."""
        gate, up = super().split(gate_up)
        return up, gate


@moe_fault(FAULTS, "GELU for SiLU", "B: passed cosine, b12x's, trtllm's and the fuzz bound")
class Gelu(MoeFault):
    """Another gate."""

    def activate(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        """Gate * Phi(gate) * up; the clamp, where there is one, is kept."""
        limit = self.case.activation.limit
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + self.case.activation.beta
        return (torch.nn.functional.gelu(gate) * up).bfloat16()


@moe_fault(FAULTS, "clamp of SwiGLU dropped", "C15: limit, alpha and beta stored where nobody reads them")
class ClampDropped(MoeFault):
    """Plain SwiGLU whatever the model says."""

    def activate(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        """silu(gate) * up."""
        return (gate * torch.sigmoid(gate) * up).bfloat16()


@moe_fault(FAULTS, "clamp applied where there is none", "B: |h| <= 4")
class ClampAdded(MoeFault):
    """The intermediate is clamped."""

    def activate(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        """To ±4."""
        return super().activate(gate, up, expert).clamp(-4, 4)


@moe_fault(FAULTS, "beta of the clamped form dropped", "C15")
class BetaDropped(MoeFault):
    """up instead of up + beta."""

    def activate(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        """Subtracts it before it is added."""
        return super().activate(gate, up - self.case.activation.beta, expert)


@moe_fault(FAULTS, "down GEMM uses the neighbour's alpha", "B: passed four of the published criteria")
class NeighbourAlpha2(MoeFault):
    """Another expert's global scale."""

    def alpha2(self, expert: int) -> Tensor:
        """The next expert's."""
        return super().alpha2((expert + 1) % self.case.experts)


@moe_fault(FAULTS, "gate/up GEMM uses the neighbour's alpha", "C32, D04")
class NeighbourAlpha1(MoeFault):
    """Another expert's global scale."""

    def alpha1(self, expert: int) -> Tensor:
        """The next expert's."""
        return super().alpha1((expert + 1) % self.case.experts)


@moe_fault(FAULTS, "first expert's intermediate scale for all", "D01: b12x reads only the first")
class FirstIntermediateScale(MoeFault):
    """All experts quantise with expert 0's scale, and multiply with their own."""

    def requantise(self, hidden: Tensor, expert: int) -> Matrix:
        """The first expert's."""
        return super().requantise(hidden, 0)


@moe_fault(FAULTS, "intermediate scales off by one block", "B")
class IntermediateOffByOne(MoeFault):
    """Each block of the intermediate is scaled by its neighbour's scale."""

    def requantise(self, hidden: Tensor, expert: int) -> Matrix:
        """Rolled along I."""
        q = super().requantise(hidden, expert)
        return Matrix(q.values, None if q.scales is None else q.scales.roll(1, dims=1))


@moe_fault(FAULTS, "FP4 rounded toward zero", "B: instead of nearest even")
class RoundTowardZero(MoeFault):
    """The re-quantisation truncates."""

    def requantise(self, hidden: Tensor, expert: int) -> Matrix:
        """Codes of the next smaller magnitude."""
        scale_2 = self.experts.intermediate_scale[expert]
        right = super().requantise(hidden, expert)
        if right.scales is None:
            return right
        exact = hidden.float().unflatten(1, (-1, BLOCK)) / (right.scales * scale_2).unsqueeze(-1).clamp(min=1e-30)
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=hidden.device)
        index = torch.searchsorted(grid, exact.abs().clamp(max=6.0).contiguous(), right=True) - 1
        return Matrix((grid[index] * exact.sign()).flatten(1), right.scales)


@moe_fault(FAULTS, "intermediate block scale from amax / 4", "quantiser of another recipe")
class ScaleFromFour(MoeFault):
    """Block scales are 1.5 times larger, so codes use only up to 4."""

    def requantise(self, hidden: Tensor, expert: int) -> Matrix:
        """Self-consistent, but coarser."""
        scale_2 = self.experts.intermediate_scale[expert]
        scales = nvfp4.decode_e4m3(nvfp4.block_scales(hidden.float() * 1.5, 1.0 / scale_2))
        exact = hidden.float().unflatten(1, (-1, BLOCK)) / (scales * scale_2).unsqueeze(-1).clamp(min=1e-30)
        return Matrix(nvfp4.decode_e2m1(nvfp4.encode_e2m1(exact)).flatten(1), scales)


@moe_fault(FAULTS, "last K = 64 step of the down GEMM dropped", "B")
class DownStepDropped(MoeFault):
    """The tail of the intermediate is not added."""

    def down(self, hidden: Matrix, expert: int) -> Tensor:
        """Zero codes."""
        values = hidden.values.clone()
        values[:, -64:] = 0
        return super().down(Matrix(values, hidden.scales), expert)


@moe_fault(FAULTS, "one 16x8 fragment of the gate/up GEMM zero", "B")
class FragmentOfGateUp(MoeFault):
    """One fragment of one expert's first GEMM."""

    def gate_up(self, a: Matrix, expert: int) -> Tensor:
        """Expert and column come from the seed."""
        out = super().gate_up(a, expert)
        if expert == self.pick("expert", self.case.experts):
            column = 8 * self.pick("column", out.shape[1] // 8)
            out[:16, column : column + 8] = 0
        return out


@moe_fault(FAULTS, "w13 scale rows rotated in one 32-row atom of one expert", "B; D20")
class W13Atom(MoeFault):
    """The swizzle of one expert's scales is off."""

    def read_weight(self, name: str, expert: int) -> Matrix:
        """Expert and atom come from the seed."""
        w = super().read_weight(name, expert)
        if name != "w13" or expert != self.pick("expert", self.case.experts) or w.scales is None:
            return w
        first = ATOM * self.pick("atom", len(w.scales) // ATOM)
        scales = w.scales.clone()
        scales[first : first + ATOM] = w.scales[first : first + ATOM].roll(1, dims=0)
        return Matrix(w.values, scales)


@moe_fault(FAULTS, "experts' w2 scales of the neighbour", "expert stride off by one")
class NeighbourScales(MoeFault):
    """Codes of one expert, block scales of the next."""

    def read_weight(self, name: str, expert: int) -> Matrix:
        """Only the down projection."""
        w = super().read_weight(name, expert)
        return (
            w if name != "w2" else Matrix(w.values, super().read_weight(name, (expert + 1) % self.case.experts).scales)
        )


@moe_fault(FAULTS, "input scale read as 1", "C13, D02: an activation scale that was never loaded")
class InputScaleIgnored(MoeFault):
    """The first GEMM's alpha lacks the activations' scale."""

    def alpha1(self, expert: int) -> Tensor:
        """The weights' scale alone."""
        return self.experts.w13_scale_2[expert]


@moe_fault(FAULTS, "bf16 accumulator", "B")
class Bf16Accumulator(MoeFault):
    """Running sums are kept in bf16."""

    model = mma.MmaModel(accumulator="bf16")


@moe_fault(FAULTS, "13-bit accumulator", "B: FP8 accumulation of Ada and Hopper")
class ThirteenBits(MoeFault):
    """Running sums keep 13 fraction bits."""

    model = mma.MmaModel(accumulator="e8m13")


@moe_fault(FAULTS, "sigmoid by a coarse table", "an activation of 8 bits")
class CoarseSigmoid(MoeFault):
    """The sigmoid is rounded to 1/128."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Rounded."""
        return (torch.sigmoid(x) * 128).round() / 128


@moe_fault(FAULTS, "NaN hidden as zero", "TransformerEngine's NaN → 0 masking")
class OverflowToZero(MoeFault):
    """Large intermediates become zero."""

    def activate(self, gate: Tensor, up: Tensor, expert: int) -> Tensor:
        """Beyond ±8."""
        hidden = super().activate(gate, up, expert)
        return torch.where(hidden.abs() > math.sqrt(64), 0.0, hidden)
