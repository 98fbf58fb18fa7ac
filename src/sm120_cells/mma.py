"""Accumulation of the SM120 block-scaled NVFP4 MMA (mxf4nvf4, K = 64 a step), bit for bit, for whole matrices.

Source of the arithmetic: MMA-Sim (arXiv 2511.10909; PyPI mmasim 2.1.1, "RTX Blackwell",
``m16n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.f32.ue4m3``). It is a published model, not a measurement of ours.
One step, for one element of the output with accumulator ``c``:

1. Each group of 16 products (E2M1 × E2M1) is summed exactly.
2. Its exponent is that of the two block scales alone: ``e = e(sa) + e(sb)``, where ``e`` of a denormal E4M3 value is
   -6 and the sign bit of a scale is ignored (UE4M3). The size of the sum of products plays no part. A group with a
   zero scale, or in which every product is zero, has no exponent; one whose products cancel keeps its own.
3. With ``E`` the largest of the groups' exponents and ``c``'s, every group sum times its scales, and ``c``, is
   truncated toward zero to a multiple of ``2^(E - 35)``.
4. These are added exactly and the sum is rounded toward zero to FP32. Zero is always +0.

A NaN scale makes the element NaN (0x7FFFFFFF), whatever it multiplies; an infinite accumulator stays infinite.

How it is computed: all values are exact in float64, so a matrix product in any order gives the exact sum of a step.
Where the spread of a block's scales and the bound on its partial sums show that step 3 cannot drop a bit, a step is
one product and one rounding (``_steps_exact``); elsewhere the alignment is carried out (``_steps_aligned``).
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Accumulator = Literal["fp32_rz", "fp32_rne", "bf16", "fp16", "e8m13"]

_GROUP = 16
_EXPONENT = 0x7FF << 52  # exponent field of a float64
_FP32_BITS = ~((1 << 29) - 1)  # sign, exponent and the 23 leading fraction bits of a float64
_CANONICAL_NAN = 0x7FFFFFFF
_MAX_E2M1 = 6.0
_MAX_E4M3 = 448.0
_DEAD = 2.0**-300  # stands for "no exponent": below every accumulator, also as a product of two, and never zero


@dataclass(frozen=True, slots=True)
class _Format:
    fraction_bits: int
    min_exponent: int
    max_exponent: int
    nearest: bool


_FORMATS: dict[Accumulator, _Format] = {
    "fp32_rz": _Format(23, -126, 127, nearest=False),
    "fp32_rne": _Format(23, -126, 127, nearest=True),
    "bf16": _Format(7, -126, 127, nearest=True),
    "fp16": _Format(10, -14, 15, nearest=True),
    "e8m13": _Format(13, -126, 127, nearest=False),
}


@dataclass(frozen=True, slots=True)
class MmaModel:
    """Arithmetic of one MMA step; the default is the published RTX Blackwell NVFP4 one.

    fraction_bits: bits kept below the largest exponent (35; 25 for FP8 and BF16 on RTX Blackwell, 13 for FP8 on Ada).
    step: products an instruction adds before it rounds, a multiple of 16.
    accumulator: format and rounding of the running sum; ``e8m13`` is FP8's on Ada and Hopper, ``bf16`` and ``fp16``
    round to nearest.
    reverse: the steps from the last to the first, as a kernel may.
    """

    fraction_bits: int = 35
    step: int = 64
    accumulator: Accumulator = "fp32_rz"
    reverse: bool = False

    def __post_init__(self) -> None:
        if self.step <= 0 or self.step % _GROUP:
            raise ValueError(f"step {self.step}: a positive multiple of {_GROUP} is needed")
        if self.accumulator not in _FORMATS:
            raise ValueError(f"accumulator {self.accumulator!r}: one of {', '.join(_FORMATS)} is needed")
        # A group is below 576 · 1.875² < 2^11 times 2^e, the accumulator below 2 times 2^e: their sum must fit float64.
        room = 53 - math.ceil(math.log2(self.step // _GROUP * 2**11 + 2))
        if not 8 <= self.fraction_bits <= room:
            raise ValueError(f"fraction_bits {self.fraction_bits}: 8 to {room} are possible with step {self.step}")


RTX_BLACKWELL = MmaModel()


@dataclass(frozen=True, slots=True)
class _Operand:
    """Rows of one operand as the steps need them. Powers of two stand for exponents; float64 but for the codes."""

    codes: Tensor  # [R, K/16, 16] as they came
    values: Tensor  # [R, K/16, 16] block scale multiplied in
    peak: Tensor  # [R, K/16] largest magnitude of the block's values
    power: Tensor  # [R, K/16] 2^e of the block scale, _DEAD where the block is all zero
    lowest: Tensor  # [R] smallest power of a live block, inf without one
    highest: Tensor  # [R] largest power

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> "_Operand":
        """codes: [R, K] E2M1 values, scales: [R, K/16] float64, finite and not negative."""
        blocks = codes.reshape(*scales.shape, _GROUP)
        peak = torch.maximum(blocks.amax(-1), -blocks.amin(-1)) * scales
        power = _power_of_two(scales).clamp_min_(2.0**-6)
        live = peak > 0
        return cls(
            codes=blocks,
            values=blocks * scales.unsqueeze(-1),
            peak=peak,
            power=power.where(live, _DEAD),
            lowest=power.where(live, math.inf).amin(-1),
            highest=power.where(live, _DEAD).amax(-1),
        )

    def rows(self, which: slice) -> "_Operand":
        """Some of the rows."""
        return _Operand(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    def flat(self) -> Tensor:
        """[R, K] values"""
        return self.values.flatten(1)

    def nonzero(self) -> Tensor:
        """[R, K/16, 16] float32, 1 for a code that is not zero"""
        return (self.codes != 0).float()


@dataclass(frozen=True, slots=True)
class Prepared:
    """An operand that is multiplied more than once, checked and taken apart: 12 bytes an element."""

    operand: _Operand
    broken: Tensor  # bool [R]: rows with a NaN scale

    @property
    def nbytes(self) -> int:
        """What keeping it costs."""
        return int(sum(getattr(self.operand, f.name).nbytes for f in fields(self.operand)))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, K)"""
        rows, groups = self.operand.peak.shape
        return rows, groups * _GROUP


def prepare(values: Tensor, scales: Tensor, name: str = "operand") -> Prepared:
    """Decoded E2M1 values [R, K] and decoded E4M3 scales [R, K/16] → an operand of `accumulate`.

    Both float32 or float64; K is a multiple of 16. Raises ValueError for what is no such operand, by ``name``.
    """
    _check(values, scales, name)
    return Prepared(_Operand.of(values, scales.double().abs().nan_to_num_(nan=0.0)), scales.isnan().any(-1))


def mma_accumulate(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    *,
    start: Tensor | None = None,
    model: MmaModel = RTX_BLACKWELL,
) -> Tensor:
    """``start + (a · a_scales) @ (b · b_scales)ᵀ`` as the tensor core accumulates it, before any global scale.

    a: [M, K] and b: [N, K] decoded E2M1 values, a_scales: [M, K/16] and b_scales: [N, K/16] decoded E4M3 scales, all
    float32 or float64 and on one device. K is a multiple of 16; a last step that is not full has fewer groups, as
    padding with zeros gives. start: [M, N] float32, zero if absent. Returns float32 [M, N].

    An element depends on its row of ``a`` and of ``b`` alone, so a sweep over M is one call and its leading rows.
    Raises ValueError for shapes, dtypes or values that are no such operands.
    """
    return accumulate(prepare(a, a_scales, "a"), prepare(b, b_scales, "b"), start=start, model=model)


def accumulate(a: Prepared, b: Prepared, *, start: Tensor | None = None, model: MmaModel = RTX_BLACKWELL) -> Tensor:
    """`mma_accumulate` of prepared operands."""
    (m, k), n = a.shape, b.shape[0]
    device = a.broken.device
    if b.shape[1] != k:
        raise ValueError(f"a has K = {k}, b has K = {b.shape[1]}")
    if start is None:
        out = torch.zeros(m, n, device=device)
    elif start.shape != (m, n) or start.dtype != torch.float32:
        raise ValueError(f"start is {start.dtype} {list(start.shape)}, not torch.float32 {[m, n]}")
    else:
        out = start.clone()
    rows, columns = _block_shape(m, device)
    for i in range(0, m, rows):
        left = a.operand.rows(slice(i, i + rows))
        for j in range(0, n, columns):
            right = b.operand.rows(slice(j, j + columns))
            part = out[i : i + rows, j : j + columns]
            c = part.to(torch.float64, memory_format=torch.contiguous_format)
            steps = _steps_exact if _alignment_is_exact(left, right, c, model) else _steps_aligned
            part.copy_(steps(left, right, c, model))
    out += 0.0  # -0 becomes +0
    out.masked_fill_(a.broken.unsqueeze(1) | b.broken, math.nan)
    out.view(torch.int32).masked_fill_(out.isnan(), _CANONICAL_NAN)
    return out


def round_toward_zero_f32(x: Tensor) -> Tensor:
    """float64 → float32 toward zero, as the model rounds an accumulator.

    Below 2^-126 to a multiple of 2^-149; from 2^128 on to infinity (not to the largest number, which everything just
    below 2^128 becomes); the sign of a zero is kept, NaN stays NaN.
    """
    if x.dtype != torch.float64:
        raise ValueError(f"float64 is needed, not {x.dtype}")
    return _round_to_format(x, _FORMATS["fp32_rz"]).float()


def _check(values: Tensor, scales: Tensor, name: str) -> None:
    if values.dim() != 2 or values.shape[1] == 0 or values.shape[1] % _GROUP:
        raise ValueError(f"{name} is {list(values.shape)}, not [rows, K] with K a positive multiple of {_GROUP}")
    if scales.shape != (values.shape[0], values.shape[1] // _GROUP):
        raise ValueError(f"{name}_scales is {list(scales.shape)}, which does not fit {name} {list(values.shape)}")
    for what, tensor in ((name, values), (f"{name}_scales", scales)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{what} is {tensor.dtype}, not float32 or float64")
    if values.numel() and not bool(torch.stack(values.aminmax()).abs().amax() <= _MAX_E2M1):
        raise ValueError(f"{name} holds values beyond ±{_MAX_E2M1:g} or NaN: they are not decoded E2M1 codes")
    if bool((scales.abs() > _MAX_E4M3).any()):
        raise ValueError(f"{name}_scales holds values beyond ±{_MAX_E4M3:g}: they are not decoded E4M3 scales")


def _block_shape(rows: int, device: torch.device) -> tuple[int, int]:
    """Rows and columns of the output done together: what stays in a CPU's cache, or fills a GPU."""
    if device.type == "cpu":
        return 128, max(256, min(2048, 2**15 // max(rows, 1)))
    return 2048, 4096


def _steps(operand: _Operand, model: MmaModel) -> list[slice]:
    """The groups of each step, in the order of the steps."""
    count, size = operand.peak.shape[1], model.step // _GROUP
    steps = [slice(g, min(g + size, count)) for g in range(0, count, size)]
    return steps[::-1] if model.reverse else steps


def _alignment_is_exact(left: _Operand, right: _Operand, c: Tensor, model: MmaModel) -> bool:
    """Whether no step of this block can lose a bit before its sum is rounded. True is proven, False only possible.

    A group is a multiple of 2^(e - 8): quarters times two significands in eighths. With e0 a row and column's lowest
    exponent, the accumulator therefore stays a multiple of 2^(e0 - 8), since rounding only makes it coarser. So
    nothing is dropped while every exponent, the accumulator's included, is at most e0 + fraction_bits - 8.
    """
    fmt = _FORMATS[model.accumulator]
    lowest = torch.outer(left.lowest, right.lowest)
    limit = lowest * 2.0 ** (model.fraction_bits - 8)
    if not bool((torch.outer(left.highest, right.highest) <= limit).all()):
        return False
    units = c / (lowest * 2.0**-8)
    if not bool((units == units.trunc()).all()):
        return False
    bound = left.values.abs().sum(-1) @ right.peak.T + c.abs()
    steps = math.ceil(left.peak.shape[1] * _GROUP / model.step)
    growth = (1 + 2.0**-20) * (1 + fmt.nearest * 2.0 ** -(fmt.fraction_bits + 1)) ** steps
    return bool((bound * growth < 2 * limit).all())


def _steps_exact(left: _Operand, right: _Operand, c: Tensor, model: MmaModel) -> Tensor:
    """Steps without alignment, in place. Every partial sum fits float64: below 2^(fraction_bits + 1) units."""
    a, b = left.flat(), right.flat().T
    for groups in _steps(left, model):
        k = slice(groups.start * _GROUP, groups.stop * _GROUP)
        c.addmm_(a[:, k], b[k])
        _round_accumulator(c, model.accumulator)
    return c


def _steps_aligned(left: _Operand, right: _Operand, c: Tensor, model: MmaModel) -> Tensor:
    """Steps with alignment."""
    a, b = left.values.transpose(0, 1), right.values.permute(1, 2, 0)  # [K/16, M, 16], [K/16, 16, N]
    a_power, b_power = left.power.T.unsqueeze(2), right.power.T.unsqueeze(1)  # [K/16, M, 1], [K/16, 1, N]
    # Blocks that are not zero may still meet in zeros only, and their group is dead too: look where it can be.
    a_nonzero, b_nonzero = left.nonzero(), right.nonzero()
    a_fewest, b_fewest = (x.sum(-1).where(x.any(-1), _GROUP).amin(0) for x in (a_nonzero, b_nonzero))
    may_miss = (a_fewest + b_fewest <= _GROUP).tolist()
    for groups in _steps(left, model):
        powers = a_power[groups] * b_power[groups]
        if any(may_miss[groups]):
            met = torch.bmm(a_nonzero[:, groups].transpose(0, 1), b_nonzero[:, groups].permute(1, 2, 0))
            powers.masked_fill_(met == 0, _DEAD)
        down, up = _shifts(torch.maximum(powers.amax(0), _power_of_two(c)), model.fraction_bits)
        terms = torch.bmm(a[groups], b[groups]).mul_(down)
        terms -= terms.frac()  # truncates; several times faster than trunc() on a CPU, but not for infinities
        c = c.mul(down).trunc_().add_(terms.sum(0)).mul_(up)
        _round_accumulator(c, model.accumulator)
    return c


def _power_of_two(x: Tensor) -> Tensor:
    """2^floor(log2 |x|) of normal float64 numbers; 0 for zero, inf for what is not finite."""
    return (x.view(torch.int64) & _EXPONENT).view(torch.float64)


def _shifts(power: Tensor, fraction_bits: int) -> tuple[Tensor, Tensor]:
    """2^fraction_bits / power and its inverse for powers of two; finite also where the power is infinite."""
    field = power.view(torch.int64)
    down = ((2046 << 52) - field).add_(fraction_bits << 52)
    up = field - (fraction_bits << 52)
    return down.view(torch.float64), up.view(torch.float64)


def _round_accumulator(c: Tensor, accumulator: Accumulator) -> None:
    """Rounds a running sum in place; float64 in, a value of the format out."""
    if accumulator == "fp32_rz":
        # The 24 leading bits are all of it: a sum with a live group is a multiple of 2^-54 (E >= -12) and below 2^128,
        # and one without is the accumulator unchanged, so neither FP32's denormals nor its overflow come in.
        c.view(torch.int64).bitwise_and_(_FP32_BITS)
    elif accumulator == "fp32_rne":
        c.copy_(c.float())
    else:
        c.copy_(_round_to_format(c, _FORMATS[accumulator]))


def _round_to_format(x: Tensor, fmt: _Format) -> Tensor:
    """float64 → the nearest (ties to even) or next smaller value of the format, still float64; beyond it infinity."""
    down, up = _shifts(_power_of_two(x).clamp_min_(2.0**fmt.min_exponent), fmt.fraction_bits)
    y = (x * down).round_() if fmt.nearest else (x * down).trunc_()
    y *= up
    return torch.where(y.abs() >= 2.0 ** (fmt.max_exponent + 1), y * math.inf, y)
