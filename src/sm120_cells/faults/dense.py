"""Dense faults in what is written and when. C.. are entries of the log of public reports, A the dense experiment."""

import math

import torch
from torch import Tensor

from sm120_cells.backends import DenseInput
from sm120_cells.faults.base import DenseFault, Mutant, dense_fault

FAULTS: list[Mutant] = []
TILE = 128
RARE = 50
"""Intermittent faults fire in each 50th call."""


@dense_fault(FAULTS, "zeros at one M", "C03: right at 1536, 2048 and 4096, all zeros at 3072")
class ZerosAtOneM(DenseFault):
    """All zeros at one size only."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """The size comes from the seed."""
        if a.m == 1 + self.pick("m", 140):
            out.zero_()


@dense_fault(FAULTS, "rows beyond the last full block of 128 doubled", "C12, tail handling")
class TailDoubled(DenseFault):
    """The tail's epilogue runs twice."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Only sizes beyond 128 that are no multiple of it."""
        full = a.m // TILE * TILE
        if full:
            out[full:] *= 2


@dense_fault(FAULTS, "one 128x128 tile zero", "A; C01")
class TileZero(DenseFault):
    """One tile of the output is zero."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """The first tile."""
        del a
        out[:TILE, :TILE] = 0


@dense_fault(FAULTS, "one 16x8 MMA fragment zero", "A")
class FragmentZero(DenseFault):
    """One fragment of one tile is zero."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Fragment in the first 16 rows."""
        column = 8 * self.pick("column", out.shape[1] // 8)
        out[: min(16, a.m), column : column + 8] = 0


@dense_fault(FAULTS, "last row never written", "A; C29")
class LastRowUnwritten(DenseFault):
    """The last row keeps what was there."""

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        """Restores the last row."""
        before = out[-1:].clone()
        super().__call__(a, alpha, out)
        out[-1:] = before
        return out


@dense_fault(FAULTS, "last row zero", "A")
class LastRowZero(DenseFault):
    """The last row is zero."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """As above."""
        out[-1:] = 0


@dense_fault(FAULTS, "one row's sign flipped", "A")
class RowSign(DenseFault):
    """One row is negated."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """The row comes from the seed."""
        if a.m:
            out[self.pick("row", a.m)].neg_()


@dense_fault(FAULTS, "eight rows permuted", "A: tokens sent to the wrong row")
class RowsPermuted(DenseFault):
    """Eight rows hold their neighbours' results."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Rows spread over the matrix."""
        rows = torch.arange(0, a.m, max(1, a.m // 8), device=out.device)[:8]
        out[rows] = out[rows.roll(1)]


@dense_fault(FAULTS, "output halved", "A: alpha wrong")
class Halved(DenseFault):
    """Alpha is half of what it should be."""

    def scaled(self, total: Tensor, alpha: Tensor) -> Tensor:
        """Factor 0.5."""
        return super().scaled(total, alpha) * 0.5


@dense_fault(FAULTS, "output 5 % too large", "A: alpha wrong")
class FivePercent(DenseFault):
    """Alpha is 5 % too large."""

    def scaled(self, total: Tensor, alpha: Tensor) -> Tensor:
        """Factor 1.05."""
        return super().scaled(total, alpha) * 1.05


@dense_fault(FAULTS, "one row 5 % too large", "C35, small")
class RowFivePercent(DenseFault):
    """One row is 5 % too large."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """The row comes from the seed."""
        if a.m:
            out[self.pick("row", a.m)] *= 1.05


@dense_fault(FAULTS, "one row times 1.7", "C35: global cosine 0.99997, that row's cosine 1.0")
class RowTimes(DenseFault):
    """One row is wrong by a factor."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """The row comes from the seed."""
        if a.m:
            out[self.pick("row", a.m)] *= 1.7


@dense_fault(FAULTS, "all zeros", "A; C03")
class AllZeros(DenseFault):
    """Nothing but zeros."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """As above."""
        out.zero_()


@dense_fault(FAULTS, "twenty elements tripled", "A: race")
class Race(DenseFault):
    """Twenty elements that some other block also wrote to."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Elements come from the seed."""
        flat = out.view(-1)
        if len(flat):
            flat[[self.pick(i, len(flat)) for i in range(20)]] *= 3


@dense_fault(FAULTS, "a tile stale in 1 of 50 calls", "C01: PDL without its wait")
class StaleTile(DenseFault):
    """One tile holds the zeros of a fresh buffer, in each 50th call."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Deterministic: by the number of the call."""
        if self.calls % RARE == 0:
            out[:TILE, :TILE] = 0


@dense_fault(FAULTS, "last bit differs between calls", "C05: another tactic each time")
class LastBit(DenseFault):
    """Every second call gives one element the neighbouring bf16 value."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Within any tolerance, but not the same bits."""
        if self.calls % 2 and out.numel():
            flat = out.view(torch.int16).view(-1)
            flat[self.pick("element", len(flat))] ^= 1


@dense_fault(FAULTS, "stale result returned", "b12x's protocol: the output must change when the input does")
class StaleResult(DenseFault):
    """A second call of the same size returns the first one's result."""

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        """Results are kept by size, as a captured graph with a copied input would."""
        kept: dict[int, Tensor] = self.__dict__.setdefault("kept", {})
        if a.m in kept:
            out.copy_(kept[a.m])
            return out
        super().__call__(a, alpha, out)
        kept[a.m] = out.clone()
        return out


@dense_fault(FAULTS, "whole tile written past M", "guard zone")
class WritesPastM(DenseFault):
    """The kernel writes whole tiles of 16 rows."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Reaches past the view, as a kernel with the pointer does."""
        extra = -a.m % 16
        if extra:
            tail = out.as_strided((extra, out.shape[1]), out.stride(), out.storage_offset() + a.m * out.shape[1])
            tail.zero_()


@dense_fault(FAULTS, "activations changed in place", "T0: inputs unchanged")
class InputChanged(DenseFault):
    """The kernel uses its input as workspace."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """One scale byte is overwritten."""
        if a.scales is not None and a.scales.numel():
            a.scales.view(-1)[0] ^= 1


@dense_fault(FAULTS, "columns beyond the last full block of 128 from their neighbour", "C34: N not a multiple of 128")
class ColumnTail(DenseFault):
    """The last, partial column tile is stored one column off."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Only where N is no multiple of 128."""
        full = out.shape[1] // TILE * TILE
        if full and out.shape[1] > full:
            out[:, full:] = out[:, full:].roll(1, dims=1)


@dense_fault(FAULTS, "two column tiles exchanged", "swizzled tile order")
class TilesExchanged(DenseFault):
    """Two 64-wide column tiles change places."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """The first two."""
        out[:, :128] = out[:, :128].roll(64, dims=1)


@dense_fault(FAULTS, "bf16 result truncated", "epilogue rounds toward zero")
class Truncated(DenseFault):
    """The conversion to bf16 drops bits instead of rounding to nearest."""

    def scaled(self, total: Tensor, alpha: Tensor) -> Tensor:
        """Clears the low half of each fp32."""
        exact = super().scaled(total, alpha).float().contiguous()
        return (exact.view(torch.int32) & -65536).view(torch.float32)


@dense_fault(FAULTS, "alpha rounded to bf16", "numerics 2.6: a global scale cast to bf16")
class AlphaRounded(DenseFault):
    """The global scale loses its low bits; powers of two do not show it."""

    def scaled(self, total: Tensor, alpha: Tensor) -> Tensor:
        """bf16 alpha."""
        return super().scaled(total, alpha.bfloat16().float())


@dense_fault(FAULTS, "NaN where rows differ in magnitude", "sglang #20043: heterogeneous batches")
class Heterogeneous(DenseFault):
    """One row becomes NaN when the batch mixes magnitudes."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Compares row sizes of the result."""
        if a.m < 2:
            return
        size = out.float().abs().amax(1)
        if float(size.max()) > 64 * float(size[size > 0].min() if bool((size > 0).any()) else math.inf):
            out[self.pick("row", a.m)] = math.nan


@dense_fault(FAULTS, "result on the wrong row after a tile of 64", "C35")
class OffByOneTile(DenseFault):
    """Rows of the second 64-row tile are stored one row later."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Only sizes beyond 64."""
        if a.m > 65:
            out[64:] = out[64:].roll(1, dims=0)
