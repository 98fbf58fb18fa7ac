"""The vectorised accumulation against mmasim, bit for bit, and against what follows from its description."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmasim.arithmetic.fdpa import MMA_GST_FDPA
from mmasim.nv_ptx import MMABlockScale
from torch import Tensor

from sm120_cells import mma
from sm120_cells.mma import RTX_BLACKWELL, MmaModel, mma_accumulate, round_toward_zero_f32

INSTRUCTION = "m16n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.f32.ue4m3"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
ONE, MAX, MIN_NORMAL, NAN = 0x38, 0x7E, 0x08, 0x7F


@dataclass(frozen=True)
class Operands:
    """Codes [R, K] and scale bytes [R, K/16], both uint8; start float32 [M, N]."""

    a: Tensor
    sa: Tensor
    b: Tensor
    sb: Tensor
    start: Tensor | None = None

    def decoded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return E2M1[self.a.long()], E4M3[self.sa.long()], E2M1[self.b.long()], E4M3[self.sb.long()]

    def accumulate(self, model: MmaModel = RTX_BLACKWELL) -> Tensor:
        return mma_accumulate(*self.decoded(), start=self.start, model=model)

    def wide(self) -> tuple[Tensor, Tensor]:
        """Both operands with their scales, float64: products of two and their sums are exact."""
        a, sa, b, sb = (x.double() for x in self.decoded())
        return a * sa.abs().repeat_interleave(16, 1), b * sb.abs().repeat_interleave(16, 1)


def oracle(ops: Operands, model: MmaModel = RTX_BLACKWELL) -> Tensor:
    """mmasim, step by step so that the steps can be put in any order."""
    rho = {"fp32_rz": "RZ-FP32", "fp32_rne": "RNE-FP32", "fp16": "RNE-FP16", "e8m13": "RZ-E8M13"}[model.accumulator]
    step: Callable[..., Any] = MMA_GST_FDPA(G=16, F=model.fraction_bits, rho=rho, L_max=model.step, e_zero=-139)
    if model == RTX_BLACKWELL:
        step = MMABlockScale("RTX Blackwell", INSTRUCTION)

    def packed(codes: Tensor) -> Tensor:  # mmasim doubles K silently when it is given one code a byte
        return codes[:, 0::2] | codes[:, 1::2] << 4

    (m, k), n = ops.a.shape, ops.b.shape[0]
    c = torch.zeros(m, n) if ops.start is None else ops.start
    if model.accumulator == "fp16":
        c = c.half()
    starts = range(0, k, model.step)
    for k0 in reversed(starts) if model.reverse else starts:
        ks, gs = slice(k0, k0 + model.step), slice(k0 // 16, (k0 + model.step) // 16)
        sa, sb = (x[:, gs].contiguous().view(torch.float8_e4m3fn) for x in (ops.sa, ops.sb))
        c = step(packed(ops.a[:, ks]), packed(ops.b[:, ks]).T, c, sa, sb.T)
    c = c.float()
    c.view(torch.int32)[c.isnan()] = 0x7FFFFFFF  # a NaN of FP16 is another one
    return c


def unaligned(ops: Operands) -> Tensor:
    """Each step summed exactly and rounded toward zero: the model without its alignment."""
    a, b = ops.wide()
    c = torch.zeros(len(a), len(b), dtype=torch.float64) if ops.start is None else ops.start.double()
    for k0 in range(0, a.shape[1], 64):
        c = round_toward_zero_f32(c + a[:, k0 : k0 + 64] @ b[:, k0 : k0 + 64].T).double()
    return c.float()


def same_bits(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype == torch.float32 and torch.equal(got.view(torch.int32), want.view(torch.int32))


def random_operands(m: int, n: int, k: int, seed: int, scales: tuple[int, int] = (0, MAX)) -> Operands:
    """All codes; scale bytes from the first to the last of ``scales``."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=g, dtype=torch.uint8)

    return Operands(draw(0, 15, m, k), draw(*scales, m, k // 16), draw(0, 15, n, k), draw(*scales, n, k // 16))


def with_start(ops: Operands, seed: int, exponents: tuple[int, int]) -> Operands:
    g = torch.Generator().manual_seed(seed)
    shape = (len(ops.a), len(ops.b))
    start = torch.randn(*shape, generator=g) * torch.exp2(torch.randint(*exponents, shape, generator=g).float())
    return replace(ops, start=start)


def coin(shape: torch.Size, chance: float, g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g) < chance


def shaped_codes(kind: str, a: Tensor, b: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    if kind == "positive":  # accumulators as large as their bound
        return a & 7, b & 7
    if kind == "large":
        return a & 7 | 6, b & 7 | 6
    if kind == "sparse":
        return a * coin(a.shape, 0.15, g), b * coin(b.shape, 0.15, g)
    a, b = a.clone(), b.clone()
    if kind == "disjoint":  # groups whose products are all zero though neither block is
        a[:, 0::2], b[:, 1::2] = 0, 0
        a[:, 1] = 7
    elif kind == "cancelling":  # groups that sum to zero and keep their exponent
        a[:, 1::2], b[:, 1::2] = a[:, 0::2] ^ 8, b[:, 0::2]
        a[coin(a.shape, 0.003, g)] = 1
    return a, b


def shaped_scales(kind: str, s: Tensor, g: torch.Generator) -> Tensor:
    if kind == "extremes":
        some = torch.tensor([0, 1, 7, MIN_NORMAL, MAX], dtype=torch.uint8)
        return some[torch.randint(5, s.shape, generator=g)]
    if kind == "zeros":
        return s * coin(s.shape, 0.5, g)
    if kind == "signs":
        return s | coin(s.shape, 0.5, g).to(torch.uint8) << 7
    s = s.clone()
    if kind == "nan":
        s[0, 0] = NAN
        s[-1, -1] = 0xFF
    return s


def shaped_start(kind: str, ops: Operands, seed: int) -> Operands:
    if kind in {"near", "far"}:
        return with_start(ops, seed, (-20, 30) if kind == "near" else (-126, 120))
    shape, g = (len(ops.a), len(ops.b)), torch.Generator().manual_seed(seed)
    if kind == "grid":  # multiples of 2^-10, as accumulators are
        return replace(ops, start=torch.randint(-(2**20), 2**20, shape, generator=g) * 2.0**-10)
    if kind == "special":
        values = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3.4028235e38, -3.4028235e38, 1e-45, -1e-40])
        return replace(ops, start=values[torch.randint(len(values), shape, generator=g)])
    return ops


SCALE_KINDS = st.sampled_from(["drawn", "drawn", "drawn", "extremes", "zeros", "signs", "nan"])


@st.composite
def operands(draw: st.DrawFn) -> Operands:
    """Shapes and values where the steps of the arithmetic decide: spans, cancellation, sparsity, extremes."""
    m, n = draw(st.integers(1, 20)), draw(st.integers(1, 12))
    k = 16 * draw(st.integers(1, 12) | st.sampled_from([16, 24, 32]))
    low, seed = draw(st.integers(0, MAX)), draw(st.integers(0, 2**32))
    ops = random_operands(m, n, k, seed, (low, draw(st.integers(low, MAX))))
    g = torch.Generator().manual_seed(seed + 1)
    code_kinds = st.sampled_from(["any", "positive", "large", "sparse", "disjoint", "cancelling"])
    a, b = shaped_codes(draw(code_kinds), ops.a, ops.b, g)
    sa, sb = (shaped_scales(draw(SCALE_KINDS), s, g) for s in (ops.sa, ops.sb))
    start = draw(st.sampled_from(["none", "near", "far", "grid", "special"]))
    return shaped_start(start, Operands(a, sa, b, sb), seed)


@settings(max_examples=300, deadline=None)
@given(operands())
def test_bits_of_mmasim(ops: Operands) -> None:
    assert same_bits(ops.accumulate(), oracle(ops))


@pytest.mark.parametrize("shape", [(32, 32, 512), (16, 8, 512), (1, 24, 64), (17, 9, 336), (32, 8, 128)])
@pytest.mark.parametrize("scales", [(0, MAX), (0x30, 0x50), (1, 7), (0x70, MAX), (0, 0)])
def test_bits_of_mmasim_on_shapes(shape: tuple[int, int, int], scales: tuple[int, int]) -> None:
    for seed in range(3):
        ops = random_operands(*shape, seed, scales)
        assert same_bits(ops.accumulate(), oracle(ops))


VARIANTS = [
    MmaModel(fraction_bits=25),
    MmaModel(fraction_bits=25, step=16, reverse=True),
    MmaModel(fraction_bits=13, accumulator="e8m13"),
    MmaModel(accumulator="e8m13"),
    MmaModel(accumulator="fp32_rne"),
    MmaModel(accumulator="fp16"),
    MmaModel(step=32),
    MmaModel(step=128, fraction_bits=30),
    MmaModel(reverse=True),
]


@pytest.mark.parametrize("model", VARIANTS, ids=str)
@settings(max_examples=40, deadline=None)
@given(ops=operands())
def test_bits_of_mmasim_for_variants(model: MmaModel, ops: Operands) -> None:
    if model.accumulator == "fp16" and ops.start is not None:
        ops = replace(ops, start=ops.start.half().float())
    assert same_bits(ops.accumulate(model), oracle(ops, model))


def test_the_alignment_shows_in_these_inputs() -> None:
    """What is compared above depends on the rule: without the alignment the results differ."""
    ops = random_operands(32, 32, 512, 0)
    g = torch.Generator().manual_seed(0)
    a, b = shaped_codes("cancelling", ops.a, ops.b, g)
    for start in ((-20, 10), (-4, 30)):
        made = with_start(Operands(a, ops.sa, b, ops.sb), 1, start)
        got = made.accumulate()
        assert same_bits(got, oracle(made))
        share = (got != unaligned(made)).double().mean()
        assert share > 0.05, f"the alignment shows in {share:.2%} of the elements only"


@pytest.mark.parametrize("scales", [(0x58, MAX), (0x38, MAX), (0, MAX), (0x7, 0x78)])
def test_both_ways_of_computing_agree(scales: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ops = random_operands(40, 300, 1040, 5, scales)
    chosen: list[bool] = []
    decide = mma._alignment_is_exact

    def watched(left: mma._Operand, right: mma._Operand, c: Tensor, model: MmaModel) -> bool:
        chosen.append(decide(left, right, c, model))
        return chosen[-1]

    monkeypatch.setattr(mma, "_alignment_is_exact", watched)
    got = ops.accumulate()
    assert set(chosen) == {scales in {(0x58, MAX), (0x38, MAX)}}
    monkeypatch.setattr(mma, "_alignment_is_exact", lambda *args: False)
    assert same_bits(ops.accumulate(), got)


HALF, MINUS_HALF = 1, 9


def crafted(groups: list[tuple[list[int], list[int], int, int, int]], start: float) -> Operands:
    """One element from groups of (a's codes, b's codes, exponent, eighths of a's scale, eighths of b's scale)."""
    ops = random_operands(1, 1, 16 * len(groups), 0)
    for codes in (ops.a, ops.b):
        codes.zero_()
    for i, (a, b, exponent, a_eighths, b_eighths) in enumerate(groups):
        ops.a[0, 16 * i : 16 * i + len(a)] = torch.tensor(a)
        ops.b[0, 16 * i : 16 * i + len(b)] = torch.tensor(b)
        half = exponent // 2
        ops.sa[0, i] = (half + 7) * 8 + a_eighths - 8
        ops.sb[0, i] = (exponent - half + 7) * 8 + b_eighths - 8
    return replace(ops, start=torch.tensor([[start]]))


@pytest.mark.parametrize("fraction_bits", [13, 25, 35])
@pytest.mark.parametrize("beyond", [0, 1])
class TestLastBit:
    """A group's last bit, 2^(e - 8), is kept up to E = e + fraction_bits - 8; one beyond, it is not."""

    def test_below_a_cancelled_group(self, fraction_bits: int, beyond: int) -> None:
        low = 16 - (fraction_bits - 8 + beyond)
        ops = crafted([([HALF, MINUS_HALF], [HALF, HALF], 16, 8, 8), ([HALF], [HALF], low, 9, 9)], 0.0)
        model = MmaModel(fraction_bits=fraction_bits)
        got = ops.accumulate(model)
        assert float(got) == (81 - beyond) * 2.0 ** (low - 8)
        assert same_bits(got, oracle(ops, model))

    def test_below_a_large_accumulator(self, fraction_bits: int, beyond: int) -> None:
        start = 2.0 ** (fraction_bits - 8 + beyond)
        ops = crafted([([HALF], [MINUS_HALF], 0, 9, 9), ([HALF], [HALF], 0, 10, 8)], start)  # -81 and +80 units
        model = MmaModel(fraction_bits=fraction_bits)
        got = ops.accumulate(model)
        exact = torch.tensor([[start - (1 - beyond) * 2.0**-8]], dtype=torch.float64)
        assert same_bits(got, round_toward_zero_f32(exact))
        assert same_bits(got, oracle(ops, model))


def block(codes: list[float], scale: int) -> tuple[Tensor, Tensor]:
    """One row of one block: values as given, then zeros."""
    row = torch.tensor([codes + [0.0] * (16 - len(codes))])
    return row, E4M3[torch.tensor([[scale]])]


def one_group(a: list[float], b: list[float], scale: int, start: float) -> float:
    return float(mma_accumulate(*block(a, scale), *block(b, scale), start=torch.tensor([[start]])))


class TestDescription:
    """Hand-computed: one sentence of the description each."""

    fine = 1 + 2.0**-23

    def test_cancelled_products_keep_their_exponent(self) -> None:
        # 448 = 2^8 · 1.75, so E = 16: the accumulator is cut to a multiple of 2^-19
        assert one_group([6, -6], [6, 6], MAX, self.fine) == 1.0
        assert one_group([6, -6], [6, 6], MAX, -self.fine) == -1.0
        assert one_group([6, -6], [6, 6], MAX, 2.0**-19) == 2.0**-19
        assert one_group([6, -6], [6, 6], MAX, 2.0**-20) == 0.0

    def test_zero_products_have_no_exponent(self) -> None:
        assert one_group([6, 0], [0, 6], MAX, self.fine) == self.fine
        assert one_group([], [6.0] * 16, MAX, self.fine) == self.fine
        assert one_group([6], [6], 0, self.fine) == self.fine

    def test_exponent_is_the_scales_alone(self) -> None:
        # 36 · 2^0 · 2^0: E = 0 although the sum is above 2^5, so 2^-35 still counts, and 2^-36 does not
        tiny = 2.0**-35
        assert one_group([6, -6, 0.5], [6, 6, 0.0], ONE, tiny) == tiny
        assert one_group([6, -6, 0.5], [6, 6, 0.0], ONE, tiny / 2) == 0.0

    def test_denormal_scales_share_an_exponent(self) -> None:
        # 2^-9 is 2^-6 · 1/8: E = -12, the step is 2^-47
        assert one_group([6, -6], [6, 6], 1, 2.0**-47) == 2.0**-47
        assert one_group([6, -6], [6, 6], 1, 2.0**-48) == 0.0

    def test_the_sum_is_rounded_toward_zero(self) -> None:
        assert one_group([0.5], [0.5], ONE, 2.0**24 - 1) == 2.0**24 - 1
        assert one_group([-0.5], [0.5], ONE, -(2.0**24) + 1) == -(2.0**24) + 1
        assert one_group([-0.5], [0.5], ONE, 2.0**24) == 2.0**24 - 1

    def test_zero_is_positive(self) -> None:
        for result in (
            one_group([], [], ONE, -0.0),
            one_group([-6], [0.0], ONE, -0.0),
            one_group([6, -6], [6, 6], 9, 0.0),
        ):
            assert math.copysign(1, result) == 1
            assert result == 0

    @pytest.mark.parametrize("nan", [NAN, 0xFF])
    def test_a_nan_scale_spoils_its_row_or_column(self, nan: int) -> None:
        ops = random_operands(4, 5, 128, 0)
        ops.a[2], ops.sa[2, 3], ops.sb[4, 0] = 0, nan, nan
        got = ops.accumulate()
        assert got.isnan().sum() == 5 + 4 - 1
        assert got[2].isnan().all()
        assert got[:, 4].isnan().all()
        assert set(got.view(torch.int32)[got.isnan()].tolist()) == {0x7FFFFFFF}

    def test_the_sign_of_a_scale_is_ignored(self) -> None:
        ops = random_operands(4, 5, 128, 0)
        assert same_bits(replace(ops, sa=ops.sa | 0x80).accumulate(), ops.accumulate())

    def test_infinity_stays(self) -> None:
        assert one_group([6], [-6], MAX, math.inf) == math.inf
        assert one_group([6], [6], MAX, -math.inf) == -math.inf
        assert math.isnan(one_group([6], [6], NAN, math.inf))


def exact_probe(m: int, n: int, k: int, seed: int) -> Operands:
    """Every code, scales within one binade, so that no partial sum in any order needs more than FP32."""
    ops = random_operands(m, n, k, seed, (ONE, ONE + 7))
    a, b = ops.wide()
    assert (a.abs() @ b.abs().T).amax() / 2.0**-8 < 2**24
    return ops


@pytest.mark.parametrize("k", [16, 64, 208, 512])
def test_exact_probes_are_exact_whatever_the_order(k: int) -> None:
    ops = exact_probe(48, 32, k, k)
    a, b = ops.wide()
    exact = (a @ b.T).float() + 0.0
    right = [MmaModel(), MmaModel(reverse=True), MmaModel(accumulator="fp32_rne"), MmaModel(step=16)]
    for model in [*right, MmaModel(fraction_bits=25)]:
        assert same_bits(ops.accumulate(model), exact)
    if k == 512:
        for accumulator in ("bf16", "fp16", "e8m13"):
            share = (ops.accumulate(MmaModel(accumulator=accumulator)) != exact).double().mean()
            assert share > 0.01, f"{accumulator} shows in {share:.2%} of the elements only"


@settings(max_examples=100, deadline=None)
@given(operands())
def test_error_bound(ops: Operands) -> None:
    """From zero: 2^-23 of S a step. What the alignment drops is below 5 · 2^-33 of S: it needs E = 16, so S >= 2^14."""
    ops = replace(ops, start=None)
    a, b = ops.wide()
    size = a.abs() @ b.abs().T
    bound = math.ceil(a.shape[1] / 64) * 2.0**-23 * (1 + 2.0**-7) * size
    valid = ~size.isnan()
    error = (ops.accumulate().double() - a @ b.T).abs()
    assert (error <= bound)[valid].all()


@settings(max_examples=60, deadline=None)
@given(operands(), st.data())
def test_parts_are_the_whole(ops: Operands, data: st.DataObject) -> None:
    """Rows and columns do not know of each other, and K can be continued at the end of a step."""
    (m, k), n = ops.a.shape, len(ops.b)
    whole = ops.accumulate()
    i, j = data.draw(st.integers(0, m)), data.draw(st.integers(0, n))
    start = torch.zeros(m, n) if ops.start is None else ops.start
    top = Operands(ops.a[:i], ops.sa[:i], ops.b, ops.sb, start[:i])
    left = Operands(ops.a, ops.sa, ops.b[:j], ops.sb[:j], start[:, :j])
    assert same_bits(top.accumulate(), whole[:i])
    assert same_bits(left.accumulate(), whole[:, :j])
    if k > 64:
        cut = 64 * data.draw(st.integers(1, (k - 1) // 64))
        g = cut // 16
        first = Operands(ops.a[:, :cut], ops.sa[:, :g], ops.b[:, :cut], ops.sb[:, :g], ops.start)
        rest = Operands(ops.a[:, cut:], ops.sa[:, g:], ops.b[:, cut:], ops.sb[:, g:], first.accumulate())
        assert same_bits(rest.accumulate(), whole)


@pytest.mark.parametrize("scales", [(0x50, MAX), (0, MAX)])
def test_blocks_of_any_size_agree(scales: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ops = with_start(random_operands(20, 130, 192, 3, scales), 4, (-10, 10))
    whole = ops.accumulate()
    for shape in ((1, 130), (20, 7), (16, 64), (128, 2048)):
        monkeypatch.setattr(mma, "_block_shape", lambda rows, device, shape=shape: shape)
        assert same_bits(ops.accumulate(), whole)


def test_zeros_pad_an_unfinished_step() -> None:
    ops = with_start(random_operands(8, 8, 80, 0), 0, (-4, 20))
    pad = Operands(
        *(torch.nn.functional.pad(x, (0, p)) for x, p in ((ops.a, 48), (ops.sa, 3), (ops.b, 48), (ops.sb, 3)))
    )
    assert same_bits(replace(pad, start=ops.start).accumulate(), ops.accumulate())


def test_bf16_accumulator_rounds_every_step() -> None:
    ops = random_operands(24, 16, 512, 2, (0x40, 0x50))
    a, b = (x.numpy() for x in ops.wide())
    c = np.zeros((24, 16))
    for k0 in range(0, 512, 64):
        fraction, exponent = np.frexp(c + a[:, k0 : k0 + 64] @ b[:, k0 : k0 + 64].T)
        c = np.ldexp(np.rint(fraction * 2**8), exponent - 8)
    assert np.array_equal(ops.accumulate(MmaModel(accumulator="bf16")).numpy(), c)


def test_operands_are_left_alone_and_may_be_float64() -> None:
    ops = with_start(random_operands(5, 7, 128, 0), 0, (-4, 8))
    decoded, start = ops.decoded(), ops.start
    assert start is not None
    copies, start_copy = [x.clone() for x in decoded], start.clone()
    got = mma_accumulate(*decoded, start=start)
    assert all(torch.equal(x, y) for x, y in zip((*decoded, start), (*copies, start_copy), strict=True))
    assert same_bits(mma_accumulate(*(x.double() for x in decoded), start=start), got)
    a, sa, b, sb = decoded
    strided = (a.T.contiguous().T, sa.T.contiguous().T, b.T.contiguous().T, sb.T.contiguous().T)
    assert same_bits(mma_accumulate(*strided, start=start.T.contiguous().T), got)


def test_no_rows() -> None:
    ops = random_operands(0, 7, 64, 0)
    assert ops.accumulate().shape == (0, 7)
    assert Operands(ops.b, ops.sb, ops.a, ops.sa).accumulate().shape == (7, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(4, 40)}, "multiple of 16"),
        ({"a": torch.zeros(4, 0), "a_scales": torch.zeros(4, 0)}, "multiple of 16"),
        ({"a": torch.zeros(64)}, "multiple of 16"),
        ({"a": torch.zeros(4, 64, dtype=torch.uint8)}, "a is torch.uint8"),
        ({"a": torch.full((4, 64), 6.5)}, "a holds values beyond"),
        ({"a": torch.full((4, 64), math.nan)}, "a holds values beyond"),
        ({"a_scales": torch.zeros(4, 3)}, "a_scales is"),
        ({"b_scales": torch.zeros(3, 4).to(torch.float8_e4m3fn)}, "b_scales is torch.float8_e4m3fn"),
        ({"b_scales": torch.full((3, 4), 480.0)}, "b_scales holds"),
        ({"b_scales": torch.full((3, 4), -math.inf)}, "b_scales holds"),
        ({"a": torch.zeros(4, 32), "a_scales": torch.zeros(4, 2)}, "a has K = 32, b has K = 64"),
        ({"start": torch.zeros(3, 4)}, "start is"),
        ({"start": torch.zeros(4, 3, dtype=torch.float64)}, "start is"),
    ],
)
def test_wrong_operands_are_refused(change: dict[str, Tensor], message: str) -> None:
    right = {
        "a": torch.zeros(4, 64),
        "a_scales": torch.ones(4, 4),
        "b": torch.zeros(3, 64),
        "b_scales": torch.ones(3, 4),
    }
    wrong: dict[str, Any] = {**right, **change}
    with pytest.raises(ValueError, match=message):
        mma_accumulate(**wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "multiple of 16"),
        ({"step": 24}, "multiple of 16"),
        ({"fraction_bits": 7}, "8 to 39"),
        ({"fraction_bits": 40}, "8 to 39"),
        ({"fraction_bits": 36, "step": 1024}, "8 to 35"),
        ({"accumulator": "fp8"}, "fp32_rz, fp32_rne"),
    ],
)
def test_wrong_models_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MmaModel(**change)


@settings(max_examples=500, deadline=None)
@given(st.floats() | st.floats(-1e-37, 1e-37) | st.floats(1e38, 7e38))
def test_rounding_toward_zero(x: float) -> None:
    got = float(round_toward_zero_f32(torch.tensor([x], dtype=torch.float64)))
    if math.isnan(x):
        assert math.isnan(got)
        return
    if abs(x) >= 2.0**128:
        assert got == math.copysign(math.inf, x)
        return
    with np.errstate(over="ignore", under="ignore"):
        nearest = np.float32(x)
    want = np.nextafter(nearest, np.float32(0)) if abs(float(nearest)) > abs(x) else nearest
    assert (got, math.copysign(1, got)) == (float(want), math.copysign(1, x))


def test_rounding_toward_zero_at_the_ends() -> None:
    largest = 2.0**128 - 2.0**104
    x = [
        2.0**128 - 1e30,
        2.0**128,
        -math.inf,
        2.0**-149,
        1.99 * 2.0**-149,
        0.99 * 2.0**-149,
        -(2.0**-126) * (1 - 2.0**-50),
    ]
    want = [largest, math.inf, -math.inf, 2.0**-149, 2.0**-149, 0.0, -(2.0**-126) + 2.0**-149]
    assert round_toward_zero_f32(torch.tensor(x, dtype=torch.float64)).tolist() == want
    with pytest.raises(ValueError, match="float64"):
        round_toward_zero_f32(torch.zeros(1))
