"""NVFP4: E2M1 codes, one E4M3 scale for each 16 of them along K, one float32 scale for the whole tensor.

value = code * block scale * scale_2. Formats: OCP Microscaling Formats 1.0 (E2M1) and OCP 8-bit Floating Point 1.0
(E4M3: no infinity, 0x7F and 0xFF are NaN). Conversions give the bytes of CUDA's ``cuda_fp4.h`` and ``cuda_fp8.h`` with
``cudaRoundNearest`` and ``__NV_SATFINITE``, which are those of PTX ``cvt.rn.satfinite``. All functions are pure, work
on CPU and CUDA tensors alike and never wait for a result from the device.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

BLOCK: Final = 16
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
E4M3_NAN: Final = 0x7F

_TILE_ROWS: Final = 128
_TILE_GROUPS: Final = 4
_ATOM_ROWS: Final = 32

_FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Within these float32 holds both 1 / global_scale and global_scale / 2^-9, the smallest block scale.
_GLOBAL_SCALE_MIN: Final = 2.0**-126
_GLOBAL_SCALE_MAX: Final = 2.0**118


class _Format(NamedTuple):
    mantissa_bits: int
    min_exponent: int  # of the smallest normal value; denormals share its step
    maximum: float
    sign_bit: int
    from_nan: int  # the code of a NaN, whatever its sign
    has_nan: bool


_E2M1: Final = _Format(1, 0, E2M1_MAX, 0x8, from_nan=0x7, has_nan=False)
_E4M3: Final = _Format(3, -6, E4M3_MAX, 0x80, from_nan=E4M3_NAN, has_nan=True)


def encode_e2m1(x: Tensor) -> Tensor:
    """Round floats to E2M1 codes 0..15 (uint8, sign in bit 3), to nearest even, from the input's own precision.

    Signed zero is kept, ±Inf and everything beyond ±6 become ±6, NaN of either sign becomes +6 (the format has no NaN).
    Raises ValueError unless `x` is float32, float64, bfloat16 or float16.
    """
    return _encode(x, _E2M1)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E2M1 codes (uint8, the low four bits count), exact in each float dtype of two bytes or more."""
    return _lookup(codes, _values(_E2M1, dtype, codes.device))


def encode_e4m3(x: Tensor) -> Tensor:
    """Round floats to E4M3 bytes (uint8, sign in bit 7), to nearest even, from the input's own precision.

    Signed zero is kept, ±Inf and everything beyond ±448 become ±448 (0x7E, 0xFE), NaN of either sign becomes 0x7F
    (as in the headers' conversion from float; theirs from double keeps a NaN's sign).
    Raises ValueError unless `x` is float32, float64, bfloat16 or float16.
    """
    return _encode(x, _E4M3)


def decode_e4m3(bytes_: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E4M3 bytes (uint8), exact in each float dtype of two bytes or more; 0x7F and 0xFF are NaN."""
    return _lookup(bytes_, _values(_E4M3, dtype, bytes_.device))


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, [..., K] -> [..., K/2] uint8; even k in the low nibble. ValueError for an odd K."""
    _require_bytes("codes", codes, 1)
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: the last dimension must be even, got shape {_shape(codes)}")
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The codes 0..15 of packed bytes, [..., K/2] -> [..., K] uint8: the inverse of `pack`."""
    _require_bytes("packed", packed, 1)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def padded_scale_shape(rows: int, groups: int) -> tuple[int, int]:
    """Rows and groups of a scale buffer: up to whole tiles of 128 rows by 4 groups."""
    if rows < 0 or groups < 0:
        raise ValueError(f"rows and groups must not be negative, got ({rows}, {groups})")
    return -(-rows // _TILE_ROWS) * _TILE_ROWS, -(-groups // _TILE_GROUPS) * _TILE_GROUPS


def swizzle(scales: Tensor, fill: int = 0) -> Tensor:
    """Lay scales out as a block-scaled MMA reads them, [..., R, G] -> [..., Rp, Gp] uint8; padding bytes are `fill`.

    The result is the buffer: its shape counts bytes, its element [r, g] is not the scale of row r and group g. The
    layout is the one that cuBLAS documents as "1D block scaling factors layout": tiles of 128 rows by 4 groups, 512
    contiguous bytes each, the tiles of the same rows one after the other; within a tile the scale of row r and group g
    is byte (r % 32) * 16 + (r // 32) * 4 + g.
    """
    _require_bytes("scales", scales, 2)
    if not 0 <= fill <= 0xFF:
        raise ValueError(f"fill must be a byte, got {fill}")
    rows, groups = scales.shape[-2:]
    padded_rows, padded_groups = padded_scale_shape(rows, groups)
    padded = functional.pad(scales, (0, padded_groups - groups, 0, padded_rows - rows), value=fill)
    tiles = padded.reshape(
        *scales.shape[:-2],
        padded_rows // _TILE_ROWS,
        _TILE_ROWS // _ATOM_ROWS,
        _ATOM_ROWS,
        padded_groups // _TILE_GROUPS,
        _TILE_GROUPS,
    )
    return tiles.transpose(-4, -2).reshape(padded.shape)


def unswizzle(buffer: Tensor, rows: int, groups: int) -> Tensor:
    """The scales of a buffer in 128x4 layout, [..., Rp, Gp] -> [..., R, G] uint8: the inverse of `swizzle`."""
    _require_bytes("buffer", buffer, 2)
    padded_rows, padded_groups = padded_scale_shape(rows, groups)
    if tuple(buffer.shape[-2:]) != (padded_rows, padded_groups):
        raise ValueError(
            f"buffer: {rows} rows and {groups} groups take [..., {padded_rows}, {padded_groups}], "
            f"got shape {_shape(buffer)}"
        )
    tiles = buffer.reshape(
        *buffer.shape[:-2],
        padded_rows // _TILE_ROWS,
        padded_groups // _TILE_GROUPS,
        _ATOM_ROWS,
        _TILE_ROWS // _ATOM_ROWS,
        _TILE_GROUPS,
    )
    return tiles.transpose(-4, -2).reshape(buffer.shape)[..., :rows, :groups].contiguous()


def swizzled_offset(row: int, group: int, groups: int) -> int:
    """Where `swizzle` puts the scale of `row` and `group`: an index in the flattened buffer.

    `groups` is the number of scales in a row, without padding. ValueError for a scale that does not exist.
    """
    if row < 0 or not 0 <= group < groups:
        raise ValueError(f"no scale at row {row}, group {group} of {groups} groups")
    tiles_across = padded_scale_shape(0, groups)[1] // _TILE_GROUPS
    tile = (row // _TILE_ROWS) * tiles_across + group // _TILE_GROUPS
    atom, lane = divmod(row % _TILE_ROWS, _ATOM_ROWS)
    within = (lane * (_TILE_ROWS // _ATOM_ROWS) + atom) * _TILE_GROUPS + group % _TILE_GROUPS
    return tile * _TILE_ROWS * _TILE_GROUPS + within


def block_scales(x: Tensor, global_scale: Tensor | float) -> Tensor:
    """Block scales of `x` [..., R, K] as E4M3 bytes [..., R, K/16]: global_scale * (amax / 6) in float32, rounded.

    Takes what `quantize` takes. Saturating: 0x7E for a block whose scale exceeds 448 or that holds ±Inf; 0x7F (NaN) for
    one that holds a NaN; 0 for one of zeros or whose scale is at most 2^-10.
    """
    _require_blocks(x)
    return _block_scales(_in_blocks(x), _scale_of(x, global_scale))


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """An NVFP4 tensor of R rows and K columns, with leading dimensions where it holds several (experts).

    packed: uint8 [..., R, K/2], two codes a byte. scales: uint8 [..., R, K/16], E4M3 bytes in linear order. scale_2:
    float32, [] or of the leading dimensions; it multiplies, so it is 1 / global_scale. Compared by identity.
    """

    packed: Tensor
    scales: Tensor
    scale_2: Tensor

    def __post_init__(self) -> None:
        _require_quantized(self.packed, self.scales, self.scale_2)

    @property
    def rows(self) -> int:
        return self.packed.shape[-2]

    @property
    def k(self) -> int:
        return self.packed.shape[-1] * 2

    def dequantize(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Values [..., R, K]; see `dequantize_bytes`."""
        return dequantize_bytes(self.packed, self.scales, self.scale_2, dtype)

    def to(self, device: torch.device | str) -> "Quantized":
        return Quantized(self.packed.to(device), self.scales.to(device), self.scale_2.to(device))


def quantize(x: Tensor, global_scale: Tensor | float) -> Quantized:
    """Quantise `x` [..., R, K], K a multiple of 16, by the standard NVFP4 recipe, each step rounded to float32.

    scale = e4m3(global_scale * (amax / 6)) for each block of 16 along K; code = e2m1(x * (global_scale / scale)), with
    a multiplier of 0 (signs stay) where the scale is 0. float64 input is rounded to float32 first. `global_scale` is a
    number or a tensor on any device, [] or of the leading dimensions, in [2^-126, 2^118]: a number is checked, checking
    a tensor would wait for the device.

    ±Inf saturates: its block gets scale 448 and it gets code ±6. A NaN makes its whole block NaN: scale 0x7F, all codes
    7. Kernels may differ in both, and in the arithmetic (an approximate reciprocal moves codes at ties).
    Raises ValueError for another dtype, shape or global scale.
    """
    _require_blocks(x)
    factor = _scale_of(x, global_scale)
    blocks = _in_blocks(x)
    scales = _block_scales(blocks, factor)
    scale = decode_e4m3(scales)
    multiplier = torch.where(scale == 0, torch.zeros_like(scale), factor / scale)
    codes = encode_e2m1(blocks * multiplier.unsqueeze(-1)).flatten(-2)
    return Quantized(pack(codes), scales, factor.reciprocal()[..., 0, 0])


def dequantize_bytes(packed: Tensor, scales: Tensor, scale_2: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values [..., R, K] = code * block scale * scale_2, from packed [..., R, K/2] and scales [..., R, K/16].

    Exact in float64. Narrower dtypes are computed in float32 (one rounding, by scale_2) and then rounded to `dtype`.
    scale_2 broadcasts over the leading dimensions (one a expert). Raises ValueError for other dtypes or shapes.
    """
    _require_quantized(packed, scales, scale_2)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    value = _values(_E2M1, work, packed.device)
    both = torch.arange(0x100, device=packed.device)
    pairs = torch.stack((value[both & 0xF], value[both >> 4]), dim=-1)
    blocks = functional.embedding(packed.int(), pairs).reshape(*scales.shape, BLOCK)
    result = blocks.mul_(decode_e4m3(scales, work).unsqueeze(-1))
    return result.flatten(-2).mul_(scale_2.to(work)[..., None, None]).to(dtype)


def _encode(x: Tensor, fmt: _Format) -> Tensor:
    if x.dtype not in _FLOATS:
        raise ValueError(f"x: float32, float64, bfloat16 or float16 expected, got {x.dtype} of shape {_shape(x)}")
    double = x.dtype == torch.float64
    integer, width, bias = (torch.int64, 52, 1023) if double else (torch.int32, 23, 127)
    work = x.detach() if double else x.detach().float()
    nan = work.isnan()
    magnitude = work.abs().clamp_(max=fmt.maximum).masked_fill_(nan, 0)
    # A step of the format at this magnitude is 2^(exponent - mantissa_bits). Multiplying by its inverse, made of bits,
    # is exact, so that round() makes the only rounding; a carry into the next binade carries into the exponent field.
    exponent = (magnitude.view(integer) >> width).sub_(bias).clamp_(min=fmt.min_exponent)
    inverse_step = ((fmt.mantissa_bits + bias) - exponent).bitwise_left_shift_(width).view(work.dtype)
    code = magnitude.mul_(inverse_step).round_().to(torch.uint8)
    code += exponent.sub_(fmt.min_exponent).bitwise_left_shift_(fmt.mantissa_bits).to(torch.uint8)
    code |= work.signbit().to(torch.uint8).mul_(fmt.sign_bit)
    return code.masked_fill_(nan, fmt.from_nan)


@cache
def _values(fmt: _Format, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each of the 256 bytes stands for, [256]; made on the device, for a copy from the host would wait."""
    if dtype not in _FLOATS:
        raise ValueError(f"dtype: float32, float64, bfloat16 or float16 expected, got {dtype}")
    code = torch.arange(0x100, dtype=torch.int32, device=device)
    magnitude = code & (fmt.sign_bit - 1)
    binade = (magnitude >> fmt.mantissa_bits).clamp(min=1) - 1
    steps = magnitude - (binade << fmt.mantissa_bits)
    step = ((binade + (fmt.min_exponent - fmt.mantissa_bits + 127)) << 23).view(torch.float32)
    value = steps.float() * step
    value = torch.where((code & fmt.sign_bit) == 0, value, -value)
    if fmt.has_nan:
        value = value.masked_fill(magnitude == fmt.from_nan, math.nan)
    return value.to(dtype)


def _lookup(codes: Tensor, values: Tensor) -> Tensor:
    _require_bytes("codes", codes, 0)
    # The fastest gather with 32-bit indices, on the CPU by a factor of 4 over indexing.
    return functional.embedding(codes.int(), values.unsqueeze(-1)).squeeze(-1)


def _in_blocks(x: Tensor) -> Tensor:
    return x.detach().float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _block_scales(blocks: Tensor, factor: Tensor) -> Tensor:
    # Divided by a tensor: CUDA's division by a Python number multiplies by its rounded reciprocal.
    six = torch.full((), E2M1_MAX, dtype=torch.float32, device=blocks.device)
    return encode_e4m3(factor * (blocks.abs().amax(dim=-1) / six))


def _scale_of(x: Tensor, global_scale: Tensor | float) -> Tensor:
    """The global scale in float32 on the device of `x`, with two dimensions more for rows and groups."""
    if isinstance(global_scale, Tensor):
        if not global_scale.is_floating_point() or not _spreads(global_scale.shape, x.shape[:-2]):
            raise ValueError(
                f"global_scale: floats that broadcast to {_shape(x)[:-2]} expected, "
                f"got {global_scale.dtype} of shape {_shape(global_scale)}"
            )
        scale = global_scale.detach().to(device=x.device, dtype=torch.float32)
    else:
        if not _GLOBAL_SCALE_MIN <= global_scale <= _GLOBAL_SCALE_MAX:
            raise ValueError(f"global_scale must lie in [2^-126, 2^118], got {global_scale}")
        scale = torch.full((), global_scale, dtype=torch.float32, device=x.device)
    return scale[..., None, None]


def _require_bytes(name: str, tensor: Tensor, dimensions: int) -> None:
    if tensor.dtype != torch.uint8 or tensor.dim() < dimensions:
        raise ValueError(
            f"{name}: uint8 of {dimensions} or more dimensions expected, got {tensor.dtype} of shape {_shape(tensor)}"
        )


def _require_blocks(x: Tensor) -> None:
    if x.dtype not in _FLOATS or x.dim() < 2 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"x: floats [..., R, K] with K a multiple of {BLOCK} expected, got {x.dtype} of shape {_shape(x)}"
        )


def _require_quantized(packed: Tensor, scales: Tensor, scale_2: Tensor) -> None:
    _require_bytes("packed", packed, 2)
    _require_bytes("scales", scales, 2)
    if scales.shape[:-1] != packed.shape[:-1] or scales.shape[-1] * BLOCK != packed.shape[-1] * 2:
        raise ValueError(
            f"packed [..., R, K/2] and scales [..., R, K/{BLOCK}] do not agree: "
            f"shapes {_shape(packed)} and {_shape(scales)}"
        )
    if scale_2.dtype != torch.float32 or not _spreads(scale_2.shape, packed.shape[:-2]):
        raise ValueError(
            f"scale_2: float32 that broadcasts to {_shape(packed)[:-2]} expected, "
            f"got {scale_2.dtype} of shape {_shape(scale_2)}"
        )


def _spreads(shape: torch.Size, target: torch.Size) -> bool:
    """Whether `shape` broadcasts to exactly `target`."""
    tail = target[len(target) - len(shape) :]
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in zip(shape, tail, strict=True))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
