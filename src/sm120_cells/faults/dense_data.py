"""Dense faults in reading operands and in the arithmetic."""

import torch
from torch import Tensor

from sm120_cells import mma, nvfp4
from sm120_cells.backends import DenseInput
from sm120_cells.backends.pipeline import Matrix
from sm120_cells.faults.base import DenseFault, Mutant, dense_fault
from sm120_cells.nvfp4 import BLOCK, Quantized

FAULTS: list[Mutant] = []
ATOM = 32
"""Rows of one atom of the 128x4 scale layout."""


def _rotate_atom(scales: Tensor, first: int) -> Tensor:
    rotated = scales.clone()
    rotated[first : first + ATOM] = scales[first : first + ATOM].roll(1, dims=0)
    return rotated


class _ReadFault(DenseFault):
    """Something is wrong with the activations as read."""

    def change(self, a: Matrix) -> Matrix:
        """Overridden."""
        raise NotImplementedError

    def read(self, a: DenseInput) -> Matrix:
        """The right matrix, changed."""
        return self.change(super().read(a))


def _scaled_by(a: Matrix, scales: Tensor) -> Matrix:
    return Matrix(a.values, scales)


def _scales(a: Matrix) -> Tensor:
    if a.scales is None:
        raise ValueError("a fault of block scales needs block scales")
    return a.scales


@dense_fault(FAULTS, "last block of 16 along K dropped", "A")
class LastBlockDropped(_ReadFault):
    """The tail of K is not added."""

    def change(self, a: Matrix) -> Matrix:
        """Zero codes."""
        values = a.values.clone()
        values[:, -BLOCK:] = 0
        return Matrix(values, a.scales)


@dense_fault(FAULTS, "one K = 64 step dropped", "A")
class StepDropped(_ReadFault):
    """One MMA step is not added."""

    def change(self, a: Matrix) -> Matrix:
        """The step comes from the seed."""
        values = a.values.clone()
        step = self.pick("step", max(1, values.shape[1] // 64))
        values[:, 64 * step : 64 * (step + 1)] = 0
        return Matrix(values, a.scales)


@dense_fault(FAULTS, "activation scale rows rotated in one 32-row atom", "A; D20")
class ActivationAtom(_ReadFault):
    """The scale swizzle is off within one atom."""

    def change(self, a: Matrix) -> Matrix:
        """The first atom."""
        return _scaled_by(a, _rotate_atom(_scales(a), 0))


@dense_fault(FAULTS, "activation scales off by one block", "A")
class ScalesOffByOne(_ReadFault):
    """Each block is scaled by its neighbour's scale."""

    def change(self, a: Matrix) -> Matrix:
        """Rolled along K."""
        return _scaled_by(a, _scales(a).roll(1, dims=1))


@dense_fault(FAULTS, "scale mantissa dropped", "A: E4M3 read as a power of two; C31")
class MantissaDropped(_ReadFault):
    """Scales are rounded down to powers of two."""

    def change(self, a: Matrix) -> Matrix:
        """2^floor(log2 s)."""
        scales = _scales(a)
        return _scaled_by(a, torch.where(scales > 0, torch.exp2(torch.floor(torch.log2(scales))), scales))


@dense_fault(FAULTS, "block scales read as E8M0", "C23: an MXFP4 kernel fed NVFP4 bytes")
class ReadAsE8M0(_ReadFault):
    """The scale byte is taken for an exponent (relative to 1.0's byte, so that the size stays plausible)."""

    def change(self, a: Matrix) -> Matrix:
        """2^((byte - byte of 1.0) / 8), rounded down."""
        bytes_ = nvfp4.encode_e4m3(_scales(a)).float()
        return _scaled_by(a, torch.exp2(torch.floor((bytes_ - 0x38) / 8)))


@dense_fault(FAULTS, "one activation scale one ulp off", "T1: the failing row names the fault")
class OneScaleOneUlp(_ReadFault):
    """One block scale of one row is the neighbouring E4M3 value."""

    def change(self, a: Matrix) -> Matrix:
        """In the first row."""
        scales = _scales(a).clone()
        if len(scales):
            column = self.pick("column", scales.shape[1])
            byte = nvfp4.encode_e4m3(scales[:1, column])
            scales[:1, column] = nvfp4.decode_e4m3(byte ^ 1)
        return _scaled_by(a, scales)


@dense_fault(FAULTS, "one weight's sign flipped", "T1: one column")
class OneWeightSign(DenseFault):
    """One weight of the whole matrix has the wrong sign."""

    def load(self, weight: Quantized) -> Matrix:
        """A non-zero element."""
        w = super().load(weight)
        index = w.values.nonzero()
        row, column = index[self.pick("weight", len(index))].tolist()
        w.values[row, column] *= -1
        return w


@dense_fault(FAULTS, "code 0.5 decoded as zero", "T1: all codes")
class HalfDecodedAsZero(_ReadFault):
    """The smallest code is lost."""

    def change(self, a: Matrix) -> Matrix:
        """±0.5 → 0."""
        return Matrix(torch.where(a.values.abs() == 0.5, 0.0, a.values), a.scales)


@dense_fault(FAULTS, "code 6 decoded as 4", "T1: all codes")
class SixDecodedAsFour(_ReadFault):
    """The largest code saturates too early."""

    def change(self, a: Matrix) -> Matrix:
        """±6 → ±4."""
        return Matrix(a.values.clamp(-4, 4), a.scales)


@dense_fault(FAULTS, "nibbles in the wrong order", "D20: layout")
class NibbleOrder(_ReadFault):
    """High nibble first."""

    def change(self, a: Matrix) -> Matrix:
        """Neighbouring elements change places."""
        return Matrix(a.values.unflatten(1, (-1, 2)).flip(2).flatten(1), a.scales)


@dense_fault(FAULTS, "denormal block scales flushed to zero", "C18: wrong only when scales span 1e-3 … 448")
class DenormalsFlushed(_ReadFault):
    """Scales below 2^-6 count as zero."""

    def change(self, a: Matrix) -> Matrix:
        """Normal E4M3 values begin at 2^-6."""
        scales = _scales(a)
        return _scaled_by(a, torch.where(scales < 2.0**-6, 0.0, scales))


@dense_fault(FAULTS, "saturated block scale taken for 240", "sglang PR #22927: byte 0x7E")
class SaturatedScale(_ReadFault):
    """The top binade is cut at 240, as in the other 8-bit format with that name."""

    def change(self, a: Matrix) -> Matrix:
        """Scales are clamped."""
        return _scaled_by(a, _scales(a).clamp(max=240.0))


@dense_fault(FAULTS, "wrong only when block scales span 1e-3 … 448", "C18: all unit tests pass, the model is wrong")
class WrongOnSpan(_ReadFault):
    """Small scales are lost where large ones are in the same row."""

    def change(self, a: Matrix) -> Matrix:
        """As a shared exponent would."""
        scales = _scales(a)
        return _scaled_by(a, torch.where(scales < scales.amax(1, keepdim=True) * 2.0**-12, 0.0, scales))


@dense_fault(FAULTS, "weight scale rows rotated in one 32-row atom", "A; D20")
class WeightAtom(DenseFault):
    """The weights' swizzle is off within one atom."""

    def load(self, weight: Quantized) -> Matrix:
        """The atom comes from the seed."""
        first = ATOM * self.pick("atom", max(1, weight.rows // ATOM))
        return super().load(Quantized(weight.packed, _rotate_atom(weight.scales, first), weight.scale_2))


@dense_fault(FAULTS, "scale layout padded to 8 groups instead of 4", "C12: a padded block-scale column")
class WrongGroupPadding(DenseFault):
    """The stride of the scale tiles is wrong where K/16 is not a multiple of 8."""

    def read(self, a: DenseInput) -> Matrix:
        """The last tile column is read from the tile before it."""
        right = super().read(a)
        groups = a.k // BLOCK
        if groups % 8 == 0 or groups <= 4:
            return right
        scales = _scales(right).clone()
        tail = groups // 4 * 4 if groups % 4 else groups - 4
        scales[:, tail:] = scales[:, tail - 4 : groups - 4]
        return _scaled_by(right, scales)


class _PaddingFault(DenseFault):
    """What lies beyond the real rows leaks in."""

    def beyond(self, a: DenseInput) -> Matrix:
        """Codes and scales of the 16 rows after the last, as the buffers hold them."""
        if a.packed is None or a.scales is None:
            raise ValueError("padding of FP4 activations only")
        width = a.k // 2
        offset = a.packed.storage_offset() + a.m * width
        packed = a.packed.as_strided((16, width), (width, 1), offset)
        scales = nvfp4.unswizzle(a.scales, a.scales.shape[0], a.k // BLOCK)
        rows = torch.arange(16, device=packed.device).add(a.m).clamp(max=max(0, len(scales) - 1))
        return Matrix(nvfp4.decode_e2m1(nvfp4.unpack(packed)), nvfp4.decode_e4m3(scales[rows]) if len(scales) else None)


@dense_fault(FAULTS, "reads padding rows", "C14: padding alters real rows")
class ReadsPaddingRows(_PaddingFault):
    """The last real row takes its codes from the row after it."""

    def read(self, a: DenseInput) -> Matrix:
        """Only where a tile of 16 rows is not full."""
        right = super().read(a)
        if a.m % 16:
            right.values[-1:] = self.beyond(a).values[:1]
        return right


@dense_fault(FAULTS, "NaN in padding scales reaches a real row", "C13, C14: stale 0x7F in swizzled padding")
class PaddingScalesLeak(_PaddingFault):
    """A maximum over the whole 128-row scale tile rescales the first row."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        """Only where padding is larger than every real scale, or NaN."""
        scales = self.beyond(a).scales
        if a.m % 128 and scales is not None and bool((scales.isnan() | (scales > 3.9)).any()):
            out[0] = torch.nan if bool(scales.isnan().any()) else out[0] * 1.5


@dense_fault(FAULTS, "padding column of block scales added", "C12: per-rank K not a multiple of 64, stale memory")
class PaddingColumnAdded(DenseFault):
    """Where K/16 is no multiple of 4, the padded group of scales enters the sum."""

    def multiply(self, a: Matrix) -> Tensor:
        """One more block of ones, scaled by what the padding holds."""
        total = super().multiply(a)
        return total if self.stale is None else total + self.stale

    def read(self, a: DenseInput) -> Matrix:
        """Notes the padding's value."""
        groups = a.k // BLOCK
        self.stale: Tensor | None = None
        if groups % 4 and a.scales is not None and a.m:
            column = nvfp4.unswizzle(a.scales, a.m, groups + 1)[:, -1:]
            self.stale = nvfp4.decode_e4m3(column)
        return super().read(a)


@dense_fault(FAULTS, "bf16 accumulator", "A")
class Bf16Accumulator(DenseFault):
    """The running sum is kept in bf16."""

    model = mma.MmaModel(accumulator="bf16")


@dense_fault(FAULTS, "fp16 accumulator", "numerics 2.5 T1")
class Fp16Accumulator(DenseFault):
    """The running sum is kept in fp16."""

    model = mma.MmaModel(accumulator="fp16")


@dense_fault(FAULTS, "13-bit accumulator", "A: FP8 accumulation of Ada and Hopper")
class ThirteenBits(DenseFault):
    """The running sum keeps 13 fraction bits."""

    model = mma.MmaModel(accumulator="e8m13")


@dense_fault(FAULTS, "one split-K partial sum lost", "split-K without a wait for one partial")
class PartialLost(DenseFault):
    """Of four partial sums one is not added, at one size only."""

    def multiply(self, a: Matrix) -> Tensor:
        """The size comes from the seed."""
        if len(a.values) == 1 + self.pick("m", 140):
            quarter = a.values.shape[1] // 64 * 16
            values = a.values.clone()
            values[:, -quarter:] = 0
            a = Matrix(values, a.scales)
        return super().multiply(a)
