"""The codec against ml_dtypes, against brute force, and against answers written by hand."""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sm120_cells import nvfp4

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
NAN_BYTES = (EVERY_BYTE & 0x7F) == 0x7F


def float32_patterns() -> Tensor:
    """Every upper half of a float32 with six lower halves: each sign, exponent, NaN and Inf, and, since values and ties
    of both formats fit the upper half, each of those with its two neighbours.
    """
    upper = torch.arange(0x10000, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (upper | lower).flatten().to(torch.uint32).view(torch.float32)


def random_patterns(count: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32))


def by_ml_dtypes(x: Tensor, kind: type) -> Tensor:
    # NumPy warns of NaN and overflow in the cast; both are meant here.
    with np.errstate(all="ignore"):
        return torch.from_numpy(x.numpy().astype(kind).view(np.uint8))


def assert_same_bytes(got: Tensor, want: Tensor, x: Tensor) -> None:
    wrong = (got != want).nonzero()
    assert got.dtype == torch.uint8
    assert not len(wrong), (
        f"{len(wrong)} differ, first: {float(x[wrong[0]])!r} gave {got[wrong[0]]} for {want[wrong[0]]}"
    )


# ---- E2M1 and E4M3 -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_decodes_every_e2m1_code(dtype: torch.dtype) -> None:
    got = nvfp4.decode_e2m1(torch.arange(16, dtype=torch.uint8), dtype)
    assert got.dtype == dtype
    assert got.tolist() == E2M1_VALUES + [-value for value in E2M1_VALUES]
    assert got.signbit().tolist() == [False] * 8 + [True] * 8
    theirs = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert torch.equal(got.double(), torch.from_numpy(theirs))


@pytest.mark.parametrize("dtype", FLOATS)
def test_decodes_every_e4m3_byte(dtype: torch.dtype) -> None:
    got = nvfp4.decode_e4m3(EVERY_BYTE, dtype)
    theirs = torch.from_numpy(EVERY_BYTE.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64))
    assert got.dtype == dtype
    assert torch.equal(got.isnan(), NAN_BYTES)
    assert torch.equal(got.double()[~NAN_BYTES], theirs[~NAN_BYTES])
    assert torch.equal(got.signbit()[~NAN_BYTES], (EVERY_BYTE >= 0x80)[~NAN_BYTES])
    assert torch.equal(got.double()[~NAN_BYTES], EVERY_BYTE.view(torch.float8_e4m3fn).double()[~NAN_BYTES])


def test_decodes_only_the_low_nibble_of_a_code() -> None:
    assert torch.equal(nvfp4.decode_e2m1(EVERY_BYTE), nvfp4.decode_e2m1(EVERY_BYTE & 0xF))


@pytest.mark.parametrize("dtype", FLOATS)
def test_encoding_a_value_of_the_format_gives_its_code(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(nvfp4.encode_e2m1(nvfp4.decode_e2m1(codes, dtype)), codes)
    bytes_ = EVERY_BYTE[~NAN_BYTES]
    assert torch.equal(nvfp4.encode_e4m3(nvfp4.decode_e4m3(bytes_, dtype)), bytes_)


@pytest.mark.parametrize("dtype", FLOATS)
def test_e2m1_ties_go_to_the_even_code(dtype: torch.dtype) -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    assert nvfp4.encode_e2m1(ties).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nvfp4.encode_e2m1(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_e4m3_ties_go_to_the_even_byte() -> None:
    # Half the smallest denormal, between denormals, into the first normal, into the next binade, at the largest value.
    ties = torch.tensor([0.5 / 512, 1.5 / 512, 7.5 / 512, 1.9375, 432.0, 464.0])
    assert nvfp4.encode_e4m3(ties).tolist() == [0x00, 0x02, 0x08, 0x40, 0x7E, 0x7E]
    assert nvfp4.encode_e4m3(-ties).tolist() == [0x80, 0x82, 0x88, 0xC0, 0xFE, 0xFE]


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 6e4, -6e4], dtype=dtype)
    assert nvfp4.encode_e2m1(x).tolist() == [0x0, 0x8, 0x7, 0xF, 0x7, 0x7, 0x7, 0xF]
    assert nvfp4.encode_e4m3(x).tolist() == [0x00, 0x80, 0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0xFE]


@pytest.mark.parametrize(
    ("encode", "magnitudes"),
    [
        (nvfp4.encode_e2m1, nvfp4.decode_e2m1(torch.arange(8, dtype=torch.uint8), torch.float64)),
        (nvfp4.encode_e4m3, nvfp4.decode_e4m3(torch.arange(127, dtype=torch.uint8), torch.float64)),
    ],
    ids=["e2m1", "e4m3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_to_the_nearest_value_by_exact_distance(
    encode: Callable[[Tensor], Tensor], magnitudes: Tensor, dtype: torch.dtype
) -> None:
    values = magnitudes.to(dtype)
    middles = (values[1:] + values[:-1]) / 2
    middle_and_value = torch.cat((values, middles))
    infinity = torch.full_like(middle_and_value, math.inf)
    x = torch.cat(
        (middle_and_value, torch.nextafter(middle_and_value, infinity), torch.nextafter(middle_and_value, -infinity))
    )
    exact = [Fraction(value) for value in magnitudes.tolist()]

    def nearest(value: float) -> int:
        distance = [abs(abs(Fraction(value)) - candidate) for candidate in exact]
        code = min(range(len(exact)), key=lambda index: (distance[index], index % 2))
        return code | (len(exact) + len(exact) % 2) * (math.copysign(1.0, value) < 0)

    for candidate in (x, -x):
        want = torch.tensor([nearest(value) for value in candidate.tolist()], dtype=torch.uint8)
        assert_same_bytes(encode(candidate), want, candidate)


@pytest.mark.parametrize("x", [float32_patterns(), random_patterns(1 << 20, 1)], ids=["patterns", "random"])
def test_float32_agrees_with_ml_dtypes(x: Tensor) -> None:
    # ml_dtypes turns NaN into a signed zero of E2M1, and into 0x7F or 0xFF of E4M3; the hardware gives +6 and 0x7F.
    # ml_dtypes turns what lies beyond the tie at 464 into a NaN of E4M3; satfinite gives ±448.
    nan = x.isnan()
    fp4 = by_ml_dtypes(x, ml_dtypes.float4_e2m1fn)
    assert_same_bytes(nvfp4.encode_e2m1(x), torch.where(nan, 0x7, fp4), x)
    fp8 = by_ml_dtypes(x, ml_dtypes.float8_e4m3fn)
    overflow = ~nan & (x.abs() > 464)
    assert bool((fp8[overflow] & 0x7F == 0x7F).all())
    saturated = torch.where(overflow, fp8 & 0x80 | 0x7E, fp8)
    assert_same_bytes(nvfp4.encode_e4m3(x), torch.where(nan, 0x7F, saturated), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_two_bytes_converts_as_its_float32(dtype: torch.dtype) -> None:
    x = torch.arange(0x10000, dtype=torch.int32).to(torch.uint16).view(dtype)
    assert_same_bytes(nvfp4.encode_e2m1(x), nvfp4.encode_e2m1(x.float()), x)
    assert_same_bytes(nvfp4.encode_e4m3(x), nvfp4.encode_e4m3(x.float()), x)


def test_float64_is_rounded_once() -> None:
    # By way of float32 these would become ties and go to the even neighbour.
    x = torch.tensor([0.25 + 2**-40, 1.25 + 2**-40, 1.75 - 2**-40, 5 + 2**-40], dtype=torch.float64)
    assert nvfp4.encode_e2m1(x).tolist() == [1, 3, 3, 7]
    y = torch.tensor([1.0625 + 2**-40, 1.1875 - 2**-40, 2**-10 + 2**-60], dtype=torch.float64)
    assert nvfp4.encode_e4m3(y).tolist() == [0x39, 0x39, 0x01]
    z = torch.from_numpy(np.random.default_rng(2).standard_normal(1 << 16)) * 4
    assert_same_bytes(nvfp4.encode_e2m1(z), by_ml_dtypes(z, ml_dtypes.float4_e2m1fn), z)
    assert_same_bytes(nvfp4.encode_e4m3(z), by_ml_dtypes(z, ml_dtypes.float8_e4m3fn), z)


def test_conversions_take_any_shape_and_stride() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    for encode, decode in ((nvfp4.encode_e2m1, nvfp4.decode_e2m1), (nvfp4.encode_e4m3, nvfp4.decode_e4m3)):
        assert torch.equal(encode(x.T), encode(x).T)
        assert torch.equal(decode(encode(x).T), decode(encode(x)).T)
        assert encode(x[0, 0]).shape == decode(encode(x[0, 0])).shape == ()
        assert encode(x[:0]).shape == decode(encode(x[:0])).shape == (0, 4)
    before = x.clone()
    nvfp4.quantize(x.reshape(1, 24)[:, :16], 1.0)
    assert torch.equal(x, before)


def test_gradients_stop_at_the_codec() -> None:
    x = torch.randn(2, 32, requires_grad=True)
    assert not nvfp4.quantize(x, torch.tensor(2.0, requires_grad=True)).dequantize().requires_grad


# ---- packing -------------------------------------------------------------------------------------------------------


def test_packs_even_k_into_the_low_nibble() -> None:
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0], [0x8, 0x7, 0xA, 0xB]], dtype=torch.uint8)
    packed = nvfp4.pack(codes)
    assert packed.tolist() == [[0x21, 0x0F], [0x78, 0xBA]]
    assert torch.equal(nvfp4.unpack(packed), codes)


def test_packs_only_the_low_nibbles() -> None:
    assert nvfp4.pack(torch.tensor([0xF1, 0xF2], dtype=torch.uint8)).tolist() == [0x21]


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 40))
def test_pack_and_unpack_are_inverse(data: st.DataObject, lead: list[int], half: int) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    packed = torch.randint(0, 256, (*lead, half), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    codes = nvfp4.unpack(packed)
    assert codes.shape == (*lead, 2 * half)
    assert int(codes.max() if codes.numel() else 0) <= 0xF
    assert torch.equal(nvfp4.pack(codes), packed)


# ---- scale layout --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "padded"),
    [((0, 0), (0, 0)), ((1, 1), (128, 4)), ((128, 4), (128, 4)), ((129, 5), (256, 8)), ((300, 64), (384, 64))],
)
def test_padded_scale_shape(shape: tuple[int, int], padded: tuple[int, int]) -> None:
    assert nvfp4.padded_scale_shape(*shape) == padded


@pytest.mark.parametrize(
    ("row", "group", "groups", "offset"),
    [
        # One tile: the first row of each of the four 32-row atoms, then the corners.
        (0, 0, 4, 0),
        (32, 0, 4, 4),
        (64, 0, 4, 8),
        (96, 0, 4, 12),
        (1, 0, 4, 16),
        (0, 3, 4, 3),
        (31, 3, 4, 499),
        (127, 3, 4, 511),
        # The next tile along K, the next tile of rows with one, two and an unfilled second tile along K.
        (0, 4, 8, 512),
        (33, 6, 8, 534),
        (128, 0, 4, 512),
        (128, 0, 8, 1024),
        (128, 0, 5, 1024),
        (200, 7, 8, 1675),
    ],
)
def test_places_of_scales_by_hand(row: int, group: int, groups: int, offset: int) -> None:
    assert nvfp4.swizzled_offset(row, group, groups) == offset
    scales = torch.zeros(256, groups, dtype=torch.uint8)
    scales[row, group] = 0x55
    assert nvfp4.swizzle(scales).flatten().nonzero().tolist() == [[offset]]


def test_first_bytes_of_a_tile_by_hand() -> None:
    row_numbers = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4)
    buffer = nvfp4.swizzle(row_numbers).flatten().tolist()
    assert buffer[:20] == [0] * 4 + [32] * 4 + [64] * 4 + [96] * 4 + [1] * 4
    group_numbers = torch.arange(8, dtype=torch.uint8).expand(128, 8)
    buffer = nvfp4.swizzle(group_numbers).flatten().tolist()
    assert buffer[:512] == [0, 1, 2, 3] * 128
    assert buffer[512:] == [4, 5, 6, 7] * 128


def by_permute(scales: Tensor) -> Tensor:
    """Another way to the layout: what inference engines write, on one batch of whole tiles."""
    batch, m, k = scales.shape
    return scales.reshape(batch, m // 128, 4, 32, k // 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(batch, m, k)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(0, 300), st.integers(0, 20), st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_swizzle_and_unswizzle(batch: int, rows: int, groups: int, fill: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(0, 256, (batch, rows, groups), dtype=torch.uint8, generator=generator)
    buffer = nvfp4.swizzle(scales, fill)
    padded_rows, padded_groups = nvfp4.padded_scale_shape(rows, groups)
    assert buffer.shape == (batch, padded_rows, padded_groups)
    assert buffer.is_contiguous()

    padded = torch.full((batch, padded_rows, padded_groups), fill, dtype=torch.uint8)
    padded[:, :rows, :groups] = scales
    assert torch.equal(buffer, by_permute(padded))
    assert torch.equal(nvfp4.unswizzle(buffer, rows, groups), scales)
    assert torch.equal(nvfp4.swizzle(scales[0], fill), buffer[0])
    for row, group in itertools.product({0, rows // 2, rows - 1} - {-1}, {0, groups // 2, groups - 1} - {-1}):
        if row < rows and group < groups:
            assert buffer[0].flatten()[nvfp4.swizzled_offset(row, group, groups)] == scales[0, row, group]


def test_padding_holds_the_fill_and_nothing_else_does() -> None:
    scales = torch.full((130, 6), 0x11, dtype=torch.uint8)
    buffer = nvfp4.swizzle(scales, fill=0x7F)
    assert int((buffer == 0x11).sum()) == 130 * 6
    assert int((buffer == 0x7F).sum()) == 256 * 8 - 130 * 6


# ---- quantisation --------------------------------------------------------------------------------------------------


def recipe(x: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scale bytes of x [R, K] in NumPy float32 with ml_dtypes' conversions, for finite x."""
    gs = np.float32(global_scale)
    blocks = x.astype(np.float32).reshape(x.shape[0], -1, 16)
    with np.errstate(over="ignore"):
        wanted = gs * (np.abs(blocks).max(axis=-1) / np.float32(6))
    scales = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    scale = scales.astype(np.float32)
    multiplier = np.divide(gs, scale, out=np.zeros_like(scale), where=scale != 0)
    with np.errstate(over="ignore"):
        codes = (blocks * multiplier[..., None]).astype(ml_dtypes.float4_e2m1fn)
    return codes.view(np.uint8).reshape(x.shape), scales.view(np.uint8)


GLOBAL_SCALES = [1.0, 0.3, 1 / 3e-5, 2.0**-20]
RANGES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda rng: rng.standard_normal((33, 64)),
    "wide": lambda rng: rng.standard_normal((33, 64)) * 10 ** rng.uniform(-3, np.log10(448), (33, 1)),
    "denormal": lambda rng: rng.standard_normal((33, 64)) * 2.0**-130,
    "zero blocks": lambda rng: rng.standard_normal((33, 64)) * np.repeat(rng.integers(0, 2, (33, 4)), 16, axis=1),
    "saturating": lambda rng: rng.standard_normal((33, 64)) * 1e6,
    "largest": lambda rng: rng.choice([-1.0, 1.0], (33, 64)) * np.finfo(np.float32).max,
    "scales at the smallest": lambda rng: rng.uniform(-1, 1, (33, 64)) * 6 * 2.0**-9,
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_quantises_by_the_recipe(name: str, global_scale: float) -> None:
    x = RANGES[name](np.random.default_rng(4)).astype(np.float32)
    codes, scales = recipe(x, global_scale)
    got = nvfp4.quantize(torch.from_numpy(x), global_scale)
    assert got.scales.tolist() == scales.tolist()
    assert nvfp4.unpack(got.packed).tolist() == codes.tolist()
    assert torch.equal(nvfp4.block_scales(torch.from_numpy(x), global_scale), got.scales)
    assert got.scale_2.numpy() == np.float32(1) / np.float32(global_scale)


def near_ties(global_scale: float) -> Tensor:
    """Blocks [1125, 16] that feel the last bit of each step of the recipe: amax at each tie between block scales, the
    other values at the ties between codes under the two scales, each with its float32 neighbours.
    """
    scales = nvfp4.decode_e4m3(torch.arange(1, 0x7F, dtype=torch.uint8), torch.float64) / global_scale
    lower, upper = scales[:-1, None], scales[1:, None]
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    amax = neighbours((3 * (lower + upper)).float())
    others = neighbours(torch.cat((middles * lower, middles * upper), dim=1).float())
    pairs = [torch.cat((a, -a, b.minimum(a)), dim=1) for a, b in itertools.product(amax, others)]
    return torch.cat(pairs)


def neighbours(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    infinity = torch.full_like(x, torch.inf)
    return x, torch.nextafter(x, infinity), torch.nextafter(x, -infinity)


@pytest.mark.parametrize("global_scale", GLOBAL_SCALES)
def test_quantises_by_the_recipe_to_the_last_bit(global_scale: float) -> None:
    x = near_ties(global_scale)
    codes, scales = recipe(x.numpy(), global_scale)
    got = nvfp4.quantize(x, global_scale)
    assert_same_bytes(got.scales, torch.from_numpy(scales), x[:, :1])
    assert_same_bytes(nvfp4.unpack(got.packed), torch.from_numpy(codes), x)


def test_quantises_a_block_by_hand() -> None:
    # amax 12 at global scale 1 gives block scale 2, which halves every value; 2.5 and 7 become the ties 1.25 and 3.5.
    row = [12.0, 1.0, 2.5, 7.0, -3.0, -0.0, 0.0, 0.5, 0.4, 10.0, -12.0, 4.0, 6.0, 8.0, 2.0, 3.0]
    got = nvfp4.quantize(torch.tensor([row]), 1.0)
    assert got.scales.tolist() == [[0x40]]
    assert nvfp4.unpack(got.packed).tolist() == [[7, 1, 2, 6, 0xB, 8, 0, 0, 0, 6, 0xF, 4, 5, 6, 2, 3]]
    assert got.dequantize().tolist() == [
        [12.0, 1.0, 2.0, 8.0, -3.0, -0.0, 0.0, 0.0, 0.0, 8.0, -12.0, 4.0, 6.0, 8.0, 2.0, 3.0]
    ]


def test_block_scales_by_hand() -> None:
    amax = [0.0, 6.0, 6 * 448.0, 6 * 464.0, 1e30, 6 * 2.0**-10, 6 * 2.0**-10 * 1.001, 6 * 1.0625, math.inf, math.nan]
    x = torch.zeros(len(amax), 16)
    x[:, 7] = -torch.tensor(amax)
    want = [0x00, 0x38, 0x7E, 0x7E, 0x7E, 0x00, 0x01, 0x38, 0x7E, 0x7F]
    assert nvfp4.block_scales(x, 1.0).flatten().tolist() == want
    assert nvfp4.block_scales(x / 4, torch.tensor(4.0)).flatten().tolist() == want


def test_a_scale_that_rounds_to_zero_leaves_signed_zeros() -> None:
    got = nvfp4.quantize(torch.tensor([[2.0**-12, -(2.0**-12)] * 8]), 1.0)
    assert got.scales.tolist() == [[0]]
    assert nvfp4.unpack(got.packed).tolist() == [[0, 8] * 8]


def test_infinity_saturates_and_nan_spoils_its_block_only() -> None:
    x = torch.ones(3, 32)
    x[0, 3], x[1, 4], x[2, 5] = math.inf, -math.inf, math.nan
    got = nvfp4.quantize(x, 1.0)
    codes = nvfp4.unpack(got.packed)
    assert got.scales.tolist() == [[0x7E, 0x23], [0x7E, 0x23], [0x7F, 0x23]]
    assert codes[0, :16].tolist() == [0] * 3 + [7] + [0] * 12
    assert codes[1, :16].tolist() == [0] * 4 + [0xF] + [0] * 11
    assert codes[2, :16].tolist() == [7] * 16
    values = got.dequantize()
    assert (float(values[0, 3]), float(values[1, 4])) == (6 * 448, -6 * 448)
    assert torch.equal(values.isnan(), torch.tensor([False, False, True])[:, None] & (torch.arange(32) < 16))


def on_grid(lead: tuple[int, ...], k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes with a ±6 in each block, and scale bytes that are neither zero nor NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (*lead, k), dtype=torch.uint8, generator=generator)
    sixes = torch.randint(0, 2, (*lead, k // 16), dtype=torch.uint8, generator=generator) * 8 + 7
    place = torch.randint(0, 16, (*lead, k // 16, 1), generator=generator)
    blocks = codes.reshape(*lead, k // 16, 16).scatter(-1, place, sixes.unsqueeze(-1))
    scales = torch.randint(0x01, 0x7F, (*lead, k // 16), dtype=torch.uint8, generator=generator)
    return blocks.flatten(-2), scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-20, -1, 0, 3, 40])
def test_quantising_what_lies_on_the_grid_changes_nothing(dtype: torch.dtype, exponent: int) -> None:
    codes, scales = on_grid((17,), 16 * 126, 5)
    scales[0] = torch.arange(1, 127, dtype=torch.uint8)
    original = nvfp4.Quantized(nvfp4.pack(codes), scales, torch.tensor(2.0**-exponent))
    again = nvfp4.quantize(original.dequantize(dtype), 2.0**exponent)
    assert torch.equal(again.scales, scales)
    assert torch.equal(again.packed, original.packed)
    assert torch.equal(again.scale_2, original.scale_2)


def test_each_expert_has_its_global_scale() -> None:
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(6))
    global_scale = torch.tensor([1.0, 0.3, 40.0])
    got = nvfp4.quantize(x, global_scale)
    assert (got.packed.shape, got.scales.shape, got.scale_2.shape) == ((3, 5, 32), (3, 5, 4), (3,))
    assert (got.rows, got.k) == (5, 64)
    values = got.dequantize()
    for expert in range(3):
        alone = nvfp4.quantize(x[expert], global_scale[expert])
        assert torch.equal(alone.packed, got.packed[expert])
        assert torch.equal(alone.scales, got.scales[expert])
        assert torch.equal(alone.dequantize(), values[expert])
    shared = nvfp4.quantize(x, 0.3)
    assert shared.scale_2.shape == ()
    assert torch.equal(shared.packed[1], got.packed[1])


def test_no_rows_and_no_columns() -> None:
    assert nvfp4.quantize(torch.zeros(0, 64), 1.0).dequantize().shape == (0, 64)
    assert nvfp4.quantize(torch.zeros(4, 0), 1.0).dequantize().shape == (4, 0)


def test_dequantises_exactly_in_float64_and_rounds_once_in_float32() -> None:
    codes, scales = on_grid((9,), 64, 7)
    scale_2 = torch.tensor(0.1234567)
    q = nvfp4.Quantized(nvfp4.pack(codes), scales, scale_2)
    code, scale = nvfp4.decode_e2m1(codes, torch.float64), nvfp4.decode_e4m3(scales, torch.float64)
    exact = [
        Fraction(c) * Fraction(s) * Fraction(float(scale_2))
        for c, s in zip(code.flatten().tolist(), scale.repeat_interleave(16, -1).flatten().tolist(), strict=True)
    ]
    assert [Fraction(value) for value in q.dequantize().flatten().tolist()] == exact
    single = torch.tensor([float(value) for value in exact], dtype=torch.float64).float().reshape(9, 64)
    assert torch.equal(q.dequantize(torch.float32), single)
    assert torch.equal(q.dequantize(torch.bfloat16), single.bfloat16())
    assert q.dequantize(torch.float16).dtype == torch.float16


def test_moves_to_a_device() -> None:
    q = nvfp4.quantize(torch.randn(2, 32), 1.0)
    moved = q.to("meta")
    assert (moved.packed.device.type, moved.scales.device.type, moved.scale_2.device.type) == ("meta",) * 3
    assert torch.equal(q.to(torch.device("cpu")).packed, q.packed)


# ---- bad input -----------------------------------------------------------------------------------------------------

U8 = torch.zeros(3, 8, dtype=torch.uint8)
SCALE_2 = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nvfp4.encode_e2m1(torch.zeros(2, 3, dtype=torch.int32)), r"int32 of shape \(2, 3\)"),
        (lambda: nvfp4.encode_e4m3(U8), r"uint8 of shape \(3, 8\)"),
        (lambda: nvfp4.decode_e2m1(torch.zeros(2, 3)), r"codes: uint8 .*float32 of shape \(2, 3\)"),
        (lambda: nvfp4.decode_e4m3(U8.view(torch.float8_e4m3fn)), r"float8_e4m3fn of shape \(3, 8\)"),
        (lambda: nvfp4.decode_e4m3(U8, torch.int32), "dtype: .* got torch.int32"),
        (lambda: nvfp4.pack(torch.zeros(2, 3, dtype=torch.uint8)), r"even, got shape \(2, 3\)"),
        (lambda: nvfp4.pack(torch.tensor(1, dtype=torch.uint8)), r"shape \(\)"),
        (lambda: nvfp4.unpack(torch.zeros(4)), r"float32 of shape \(4,\)"),
        (lambda: nvfp4.padded_scale_shape(-1, 4), r"\(-1, 4\)"),
        (lambda: nvfp4.swizzle(U8[0]), r"scales: .*shape \(8,\)"),
        (lambda: nvfp4.swizzle(U8, fill=256), "fill must be a byte, got 256"),
        (lambda: nvfp4.unswizzle(U8, 3, 8), r"take \[\.\.\., 128, 8\], got shape \(3, 8\)"),
        (lambda: nvfp4.swizzled_offset(0, 4, 4), "no scale at row 0, group 4 of 4 groups"),
        (lambda: nvfp4.swizzled_offset(-1, 0, 4), "no scale at row -1"),
        (lambda: nvfp4.quantize(torch.zeros(3, 24), 1.0), r"multiple of 16 .*shape \(3, 24\)"),
        (lambda: nvfp4.quantize(torch.zeros(32), 1.0), r"shape \(32,\)"),
        (lambda: nvfp4.quantize(torch.zeros(3, 32, dtype=torch.int64), 1.0), "int64"),
        (lambda: nvfp4.block_scales(torch.zeros(3, 24), 1.0), r"shape \(3, 24\)"),
        (lambda: nvfp4.quantize(torch.zeros(3, 32), 0.0), "global_scale must lie in .* got 0.0"),
        (lambda: nvfp4.quantize(torch.zeros(3, 32), math.nan), "got nan"),
        (lambda: nvfp4.quantize(torch.zeros(3, 32), torch.ones(3)), r"broadcast to \(\) .*shape \(3,\)"),
        (lambda: nvfp4.quantize(torch.zeros(2, 3, 32), torch.ones(3)), r"broadcast to \(2,\) .*shape \(3,\)"),
        (lambda: nvfp4.quantize(torch.zeros(3, 32), torch.tensor(1)), "got torch.int64"),
        (lambda: nvfp4.dequantize_bytes(U8, U8, SCALE_2), r"shapes \(3, 8\) and \(3, 8\)"),
        (lambda: nvfp4.dequantize_bytes(U8, U8[:2, :1], SCALE_2), r"shapes \(3, 8\) and \(2, 1\)"),
        (lambda: nvfp4.Quantized(U8, U8[:, :1], SCALE_2.double()), r"scale_2: float32 .*float64 of shape \(\)"),
        (lambda: nvfp4.Quantized(U8, U8[:, :1], torch.ones(3)), r"broadcasts to \(\) .*shape \(3,\)"),
        (lambda: nvfp4.Quantized(U8.float(), U8[:, :1], SCALE_2), r"packed: uint8 .*float32 of shape \(3, 8\)"),
        (lambda: nvfp4.Quantized(U8, U8[:, :1].float(), SCALE_2), r"scales: uint8 .*float32 of shape \(3, 1\)"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
