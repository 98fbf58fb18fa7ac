"""Operands: what each probe promises of them, checked on the data."""

import itertools
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sm120_cells import nvfp4, probes
from sm120_cells.bounds import NATIVE_FP4, FloatType, MoeRecipe
from sm120_cells.cases import BlockCase, Case, DenseCase, DenseProbe, MoeCase, MoeProbe, Routing, Spread
from sm120_cells.nvfp4 import Quantized
from sm120_cells.probes import (
    ONE,
    NotExactError,
    assert_exact,
    block_operands,
    dense_operands,
    moe_operands,
    to_device,
)
from sm120_cells.reference import Expected, moe_reference


def operands(case: Case) -> Any:
    match case:
        case DenseCase():
            return dense_operands(case)
        case MoeCase():
            return moe_operands(case)
        case BlockCase():
            return block_operands(case)


RECIPE = MoeRecipe(NATIVE_FP4, NATIVE_FP4)


def codes(q: Quantized) -> Tensor:
    return nvfp4.unpack(q.packed)


def fp4(a: Quantized | Tensor) -> Quantized:
    assert isinstance(a, Quantized)
    return a


# --- T1a ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_exact_operands_hold_every_code_under_every_mantissa(seed: int) -> None:
    made = dense_operands(DenseCase("exact", 64, 512, (40,), seed=seed))
    for q in (fp4(made.a), made.w):
        scale = q.scales.repeat_interleave(16, dim=1).flatten().tolist()
        pairs = set(zip(codes(q).flatten().tolist(), scale, strict=True))
        assert pairs == set(itertools.product(range(16), range(ONE, ONE + 8)))


def test_alpha_of_exact_operands_is_a_power_of_two() -> None:
    for probe in ("exact", "unit", "repeat"):
        mantissa, _ = torch.frexp(dense_operands(DenseCase(probe, 64, 512, (40,))).alpha)
        assert mantissa.item() == 0.5


def test_unit_operands_have_no_scales_to_hide_behind() -> None:
    made = dense_operands(DenseCase("unit", 64, 4096, (40,)))
    assert fp4(made.a).scales.unique().tolist() == made.w.scales.unique().tolist() == [ONE]
    assert len(codes(made.w).unique()) == 16


@pytest.mark.parametrize("factor", [1.0, 2.0**-10, 2.0**10])
def test_assert_exact_knows_the_last_exact_sum(factor: float) -> None:
    """4096 * 4095 + 1 fits 24 bits; 4096 * 4096 + 1 does not, and an fp32 sum loses the one."""
    one = torch.tensor([[4096.0, 1.0]], dtype=torch.float64) * factor
    fits = torch.tensor([[4095.0, 1.0]], dtype=torch.float64)
    beyond = torch.tensor([[4096.0, 1.0]], dtype=torch.float64)
    assert_exact(one, fits)
    with pytest.raises(NotExactError, match=r"2\^24\.0 units"):
        assert_exact(one, beyond)
    assert float(one.float() @ fits.float().T) == float(one @ fits.T)
    total = one.float()[0, 0] * beyond.float()[0, 0] + one.float()[0, 1] * beyond.float()[0, 1]
    assert float(total) != float(one @ beyond.T)


def test_assert_exact_counts_sizes_and_not_the_signed_sum() -> None:
    """Terms that cancel may be added in an order in which they have not cancelled yet."""
    a = torch.tensor([[2.0**12, 2.0**12, 1.0]], dtype=torch.float64)
    b = torch.tensor([[2.0**12, -(2.0**12), 1.0]], dtype=torch.float64)
    with pytest.raises(NotExactError):
        assert_exact(a, b)


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(-40, 40)), min_size=1, max_size=8), st.booleans())
def test_the_last_place_divides_all_and_nothing_larger_does(pairs: list[tuple[int, int]], negative: bool) -> None:
    values = [whole * 2.0**power for whole, power in pairs]
    unit = probes._last_place(torch.tensor([0.0, *(-v if negative else v for v in values)], dtype=torch.float64))
    assert all((v / unit).is_integer() for v in values)
    assert not all((v / (2 * unit)).is_integer() for v in values)


def test_assert_exact_of_nothing_and_of_zeros() -> None:
    assert_exact(torch.zeros(0, 16, dtype=torch.float64), torch.ones(4, 16, dtype=torch.float64))
    assert_exact(torch.zeros(3, 16, dtype=torch.float64), torch.ones(4, 16, dtype=torch.float64))


def test_an_exact_dense_probe_too_long_to_be_exact_is_refused() -> None:
    with pytest.raises(NotExactError):
        dense_operands(DenseCase("exact", 16, 1 << 17, (4,)))


def test_an_exact_moe_probe_too_long_to_be_exact_is_refused() -> None:
    """The claim "one result only is right" is checked on the data, in the sums of the down projection."""
    case = MoeCase("exact", (8,), 32, 1 << 15, 2, 1)
    with pytest.raises(NotExactError):
        moe_reference(case, moe_operands(case), RECIPE)


# --- W4A4 activations lie on the FP4 grid -----------------------------------------------------------------------------


GRID: list[DenseCase] = [
    DenseCase(probe, 32, 256, (24,), spread=spread)
    for probe in get_args(DenseProbe)
    for spread in (get_args(Spread) if probe == "bound" else ("normal",))
]


@pytest.mark.parametrize("case", GRID, ids=lambda c: c.name)
def test_quantising_dense_activations_again_gives_the_same_bytes(case: DenseCase) -> None:
    """So a backend that quantises them itself is handed no ties to break.

    A block of zeros (read-back: all but one of a row) has no scale of its own: quantisers give it 0.
    """
    a = fp4(dense_operands(case).a)
    again = nvfp4.quantize(a.dequantize(torch.float32), 1.0 / a.scale_2)
    assert torch.equal(again.packed & 0x77, a.packed & 0x77)
    zero = (codes(a) & 7).unflatten(1, (-1, 16)).amax(2) == 0
    assert torch.equal(codes(again).unflatten(1, (-1, 16))[~zero], codes(a).unflatten(1, (-1, 16))[~zero])
    assert torch.equal(again.scales[~zero], a.scales[~zero])
    assert bool(zero.any()) == (case.probe == "readback")
    assert not again.scales[zero].any()


@pytest.mark.parametrize("probe", get_args(MoeProbe))
@pytest.mark.parametrize("spread", ["normal", "span"])
def test_quantising_tokens_gives_them_back(probe: MoeProbe, spread: Spread) -> None:
    made = moe_operands(MoeCase(probe, (24,), 256, 64, 4, 2, spread=spread))
    values = made.x.float()
    again = nvfp4.quantize(values, 1.0 / made.experts.input_scale)
    assert torch.equal(again.dequantize(torch.float32), values)


# --- exact mixture of experts -----------------------------------------------------------------------------------------

ISOLATED = MoeCase("isolated", (24,), 64, 32, 6, 3, routed_scaling=2.0)
TYPES: tuple[FloatType, ...] = get_args(FloatType)


def expected(case: MoeCase, recipe: MoeRecipe) -> Expected:
    return moe_reference(case, moe_operands(case), recipe)


@pytest.mark.parametrize("routing", get_args(Routing))
def test_isolated_experts_give_one_result_under_every_recipe(routing: Routing) -> None:
    case = replace(ISOLATED, routing=routing)
    want = expected(case, RECIPE)
    assert want.exact
    assert want.value.any()
    names = ("gemm1_out", "activation_out", "gemm2_out", "router_weight", "product_out", "combine")
    every = list(itertools.product(TYPES, repeat=len(names)))
    # every 19th of 729, from another start for each routing: 3 and 19 share no factor, so all pairs of types occur
    for types in every[get_args(Routing).index(routing) :: 19]:
        chosen: dict[str, Any] = dict(zip(names, types, strict=True))
        recipe = replace(RECIPE, **chosen)
        got = expected(case, recipe)
        assert torch.equal(got.value, want.value), recipe
        assert got.exact


def test_isolated_experts_give_one_result_weight_only_too() -> None:
    want = expected(ISOLATED, RECIPE)
    assert torch.equal(expected(ISOLATED, replace(RECIPE, intermediate="bf16")).value, want.value)
    assert torch.equal(expected(ISOLATED, replace(RECIPE, known=False)).value, want.value)


@pytest.mark.parametrize("routing", get_args(Routing))
@pytest.mark.parametrize("shape", [(64, 32, 6, 3), (96, 16, 7, 4), (64, 32, 5, 5), (48, 64, 3, 1)])
def test_an_isolated_column_is_fed_by_one_expert_of_a_token(routing: Routing, shape: tuple[int, int, int, int]) -> None:
    """Leave out any one routing slot: each column of the token changes for at most one choice of slot."""
    case = MoeCase("isolated", (12,), *shape, routing=routing)
    made = moe_operands(case)
    whole = moe_reference(case, made, RECIPE).value
    touched = torch.zeros_like(whole)
    for slot in range(case.top_k):
        ids = made.ids.clone()
        ids[:, slot] = -1
        touched += moe_reference(case, replace(made, ids=ids), RECIPE).value != whole
    assert touched.max() <= 1
    assert torch.equal(touched > 0, whole != 0)
    if routing != "minus_one":
        assert touched.mean() > 0.35, "half of the gates are open"


def test_isolated_results_are_bf16() -> None:
    want = expected(ISOLATED, RECIPE).value
    assert torch.equal(want.bfloat16().double(), want)


def test_the_exact_moe_probe_is_tight_where_sums_are_fp32() -> None:
    """Dense down projection: only the additions of the experts' products may round."""
    want = expected(MoeCase("exact", (24,), 64, 128, 6, 3), RECIPE)
    assert (want.radius == 0).double().mean() > 0.8
    ulp = torch.exp2(torch.floor(torch.log2(want.value.abs().clamp(min=1e-30))) - 7)
    assert (want.radius <= ulp).double().mean() > 0.98, "two neighbouring bf16 values, but where sums cancel"


@pytest.mark.parametrize("probe", ["isolated", "exact", "repeat"])
@pytest.mark.parametrize("experts", [2, 3, 4, 7, 8, 9, 12, 17])
@pytest.mark.parametrize("seed", range(3))
def test_a_neighbours_alpha_is_never_ones_own(probe: MoeProbe, experts: int, seed: int) -> None:
    """Powers of two, and no two neighbours (cyclically) share one: reading a neighbour's global scale shows."""
    made = moe_operands(MoeCase(probe, (4,), 32, 32, experts, 2, seed=seed)).experts
    after_down = made.w2_scale_2 * made.intermediate_scale  # what a kernel multiplies the down GEMM's sums with
    for scales in (made.w13_scale_2, made.w2_scale_2, made.intermediate_scale, after_down):
        mantissa, _ = torch.frexp(scales)
        assert bool((mantissa == 0.5).all())
        assert bool((scales != scales.roll(1)).all())
        assert bool((scales != scales.roll(-1)).all())


@pytest.mark.parametrize("seed", range(5))
def test_the_first_experts_intermediate_scale_is_not_all_experts(seed: int) -> None:
    """b12x once read only the first expert's."""
    made = moe_operands(MoeCase("isolated", (4,), 32, 32, 8, 2, seed=seed)).experts
    assert int((made.intermediate_scale != made.intermediate_scale[0]).sum()) >= 4


@pytest.mark.parametrize(("experts", "top_k"), [(512, 8), (256, 1), (256, 16), (512, 10), (300, 32)])
@pytest.mark.parametrize("probe", ["isolated", "bound"])
def test_an_expert_number_that_wraps_around_meets_other_bytes(probe: MoeProbe, experts: int, top_k: int) -> None:
    """Large models repeat some experts' bytes, but never at a distance that is a power of two."""
    made = moe_operands(MoeCase(probe, (1,), 128, 64, experts, top_k)).experts
    for name in ("w13", "w2"):
        weights = getattr(made, name)
        for distance in (1 << shift for shift in range(10) if 1 << shift < experts):
            same = (weights[distance:] == weights[:-distance]).flatten(1).all(1)
            assert not bool(same.any()), f"{name} of experts {distance} apart"


# --- routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", ["isolated", "bound"])
@pytest.mark.parametrize("routing", get_args(Routing))
@given(seed=st.integers(0, 1000), experts=st.integers(1, 12), data=st.data())
def test_routes_are_distinct_and_in_range(
    probe: MoeProbe, routing: Routing, seed: int, experts: int, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    made = moe_operands(MoeCase(probe, (9,), 16, 16, experts, top_k, routing=routing, seed=seed))
    assert made.ids.dtype == torch.int32
    assert made.weights.dtype == torch.float32
    assert bool((made.ids < experts).all())
    assert bool((made.ids >= (-1 if routing == "minus_one" else 0)).all())
    for row in made.ids.tolist():
        real = [e for e in row if e >= 0]
        assert len(set(real)) == len(real)
    assert bool((made.weights > 0).all())


@pytest.mark.parametrize("probe", ["isolated", "bound"])
@pytest.mark.parametrize("seed", range(3))
def test_routing_patterns_do_what_they_say(probe: MoeProbe, seed: int) -> None:
    def ids(routing: Routing) -> Tensor:
        return moe_operands(MoeCase(probe, (64,), 16, 16, 16, 4, routing=routing, seed=seed)).ids

    assert len(ids("random").unique()) == 16
    one = ids("one_expert")
    assert sorted(one.unique().tolist()) == sorted(one[0].tolist()), "all tokens to the same experts"
    assert 4 <= len(ids("half_empty").unique()) <= 8
    minus = ids("minus_one")
    assert 0.15 < float((minus == -1).double().mean()) < 0.45
    assert bool(((minus == -1).any(1) & (minus >= 0).any(1)).any()), "rows with some slots routed"


def test_skewed_routing_prefers_the_first_experts() -> None:
    made = moe_operands(MoeCase("bound", (400,), 16, 16, 16, 2, routing="skewed"))
    count = torch.bincount(made.ids.flatten().long(), minlength=16)
    assert count[:4].sum() > 2 * count[8:].sum()
    assert count[0] > 3 * count[12:].max()


@pytest.mark.parametrize("routing", ["random", "one_expert"])
def test_isolated_routes_take_one_expert_of_each_residue(routing: Routing) -> None:
    made = moe_operands(MoeCase("isolated", (32,), 16, 16, 11, 4, routing=routing))
    assert bool((made.ids.sort(dim=1).values % 4).sort(dim=1).values.eq(torch.arange(4)).all())
    assert len((made.ids % 4)[:, 0].unique()) > 1 or routing == "one_expert", "in any order of slots"


def test_no_tokens_at_all() -> None:
    for probe in get_args(MoeProbe):
        for routing in get_args(Routing):
            made = moe_operands(MoeCase(probe, (0,), 32, 16, 4, 2, routing=routing))
            assert made.x.shape == (0, 32)
            assert made.ids.shape == made.weights.shape == (0, 2)


# --- spreads ----------------------------------------------------------------------------------------------------------


def test_spread_of_block_scales() -> None:
    def scales(spread: Spread) -> Tensor:
        made = dense_operands(DenseCase("bound", 256, 2048, (64,), spread=spread))
        return nvfp4.decode_e4m3(fp4(made.a).scales)

    span = scales("span")
    assert float(span.min()) <= 2.0**-8
    assert float(span.max()) == 448.0
    assert bool((span < 2.0**-6).any()), "denormal E4M3 scales"
    rows = scales("rows").mean(1)
    assert float(rows.max() / rows.min()) >= 2.0**6
    saturated = (scales("saturated") == 448.0).double().mean()
    assert 0.02 < float(saturated) < 0.1
    normal = scales("normal")
    assert float(normal.max() / normal.min()) <= 4.0


def test_readback_meets_every_scale_byte_and_code() -> None:
    made = dense_operands(DenseCase("readback", 256, 512, (512,)))
    assert set(made.w.scales.unique().tolist()) == set(range(1, 0x7F))
    assert len(codes(made.w).unique()) == 16
    assert torch.equal(fp4(made.a).dequantize(), torch.eye(512, dtype=torch.float64) * 6)


@pytest.mark.parametrize("m", [5, 64, 100])
def test_readback_rows_select_one_column_each(m: int) -> None:
    values = fp4(dense_operands(DenseCase("readback", 16, 64, (m,))).a).dequantize()
    assert bool((values != 0).sum(1).eq(1).all())
    assert len((values != 0).nonzero()[:, 1].unique()) == min(m, 64)


# --- determinism and devices ------------------------------------------------------------------------------------------


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for f in fields(value) for t in tensors(getattr(value, f.name))]


CASES: list[Case] = [
    *GRID,
    DenseCase("bound", 32, 64, (8,), "bf16"),
    DenseCase("exact", 32, 64, (8,), "bf16"),
    *(MoeCase(probe, (8,), 64, 32, 6, 3) for probe in get_args(MoeProbe)),
    MoeCase("bound", (8,), 64, 32, 6, 3, format="bf16"),
    BlockCase(8, 64, 32, 6, 3, 32, shared_gate=True),
    BlockCase(8, 64, 32, 6, 3, 32, shared_gate=False, format="bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_seed_decides_every_byte(case: Case) -> None:
    first = tensors(operands(case))
    torch.manual_seed(12345)  # the global generator plays no part
    again = tensors(operands(case))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = tensors(operands(replace(case, seed=1)))
    assert [(t.shape, t.dtype) for t in first] == [(t.shape, t.dtype) for t in other]
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in first)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_smaller_sizes_are_the_first_rows(case: Case) -> None:
    """A sweep runs prefixes of one set of operands; block-scale bytes hold no NaN."""
    made = operands(case)
    parts = [made.routed] if isinstance(made, probes.BlockOperands) else [made]
    for part in parts:
        if isinstance(part, probes.MoeOperands):
            e = part.experts
            assert not bool((torch.cat([e.w13_scales.flatten(), e.w2_scales.flatten()]) & 0x7F == 0x7F).any())


def test_a_blocks_tokens_lie_on_the_grid_whatever_the_moe_backend_takes() -> None:
    """The shared expert's dense backend may quantise them although the MoE backend does not."""
    made = block_operands(BlockCase(8, 64, 32, 6, 3, 32, shared_gate=True, format="bf16")).routed
    again = nvfp4.quantize(made.x.float(), 1.0 / made.experts.input_scale)
    assert torch.equal(again.dequantize(torch.float32), made.x.float())


def test_without_a_gate_the_shared_expert_counts_whole() -> None:
    assert bool((block_operands(BlockCase(8, 64, 32, 6, 3, 32, shared_gate=False)).gate == 1).all())
    gate = block_operands(BlockCase(8, 64, 32, 6, 3, 32, shared_gate=True)).gate
    assert bool(((gate > 0) & (gate < 1)).all())


@pytest.mark.parametrize("case", [CASES[0], CASES[-3], CASES[-2]], ids=lambda c: c.name)
def test_to_device_moves_everything(case: Case) -> None:
    made: Any = operands(case)
    moved = tensors(to_device(made, torch.device("meta")))
    assert [t.device.type for t in moved] == ["meta"] * len(tensors(made))
    same = to_device(made, torch.device("cpu"))
    assert type(same) is type(made)
    assert all(torch.equal(a, b) for a, b in zip(tensors(same), tensors(made), strict=True))
