"""References against computations that share nothing with them: fractions, and a plain forward in float64."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sm120_cells import reference
from sm120_cells.bounds import GENERIC_FP4, NATIVE_FP4, SEQUENTIAL_FP32, Accumulation, MoeRecipe
from sm120_cells.cases import Activation, BlockCase, DenseCase, MoeCase, Routing, Spread
from sm120_cells.nvfp4 import Quantized
from sm120_cells.probes import MoeOperands, block_operands, dense_operands, moe_operands
from sm120_cells.reference import _Interval, block_reference, dense_reference, moe_reference

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
FINE = MoeRecipe(
    SEQUENTIAL_FP32, SEQUENTIAL_FP32, gemm1_out="fp32", activation_out="fp32", intermediate="fp4", gemm2_out="fp32"
)
"""The recipe nearest to exact arithmetic."""
COARSE = MoeRecipe(GENERIC_FP4, GENERIC_FP4)
CLAMPED = Activation(limit=2.0, alpha=1.702, beta=1.0)


def values(packed: Tensor, scales: Tensor) -> Tensor:
    """float64 [R, K] from packed codes and scale bytes, element by element of the format's description."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).long()
    magnitude = torch.tensor(E2M1, dtype=torch.float64)[codes & 7]
    return torch.where(codes >= 8, -magnitude, magnitude) * E4M3[scales.long()].repeat_interleave(16, dim=-1)


# --- dense ------------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    k=st.sampled_from([16, 48, 64]),
    spread=st.sampled_from(["normal", "span", "rows", "saturated"]),
    depth=st.sampled_from([1, 16, 64]),
    splits=st.sampled_from([1, 3]),
)
def test_dense_against_fractions(seed: int, k: int, spread: Spread, depth: int, splits: int) -> None:
    case = DenseCase("bound", 3, k, (2,), spread=spread, seed=seed)
    made = dense_operands(case)
    assert isinstance(made.a, Quantized)
    accumulation = Accumulation(depth, 2.0**-23, splits)
    want = dense_reference(case, made, accumulation)
    a, w = values(made.a.packed, made.a.scales).tolist(), values(made.w.packed, made.w.scales).tolist()
    alpha = Fraction(float(made.alpha))
    relative = Fraction(math.ceil(k / depth), 1 << 23) + (Fraction(splits, 1 << 24) if splits > 1 else 0)
    for i, j in itertools.product(range(2), range(3)):
        terms = [Fraction(x) * Fraction(y) for x, y in zip(a[i], w[j], strict=True)]
        exact, size = sum(terms) * alpha, sum(map(abs, terms)) * abs(alpha)
        bound = (1 + Fraction(1, 256)) * relative * size + (Fraction(4, 1 << 24) + Fraction(1, 256)) * abs(exact)
        assert float(want.value[i, j]) == pytest.approx(float(exact), rel=1e-13, abs=1e-13 * float(size))
        assert float(want.radius[i, j]) == pytest.approx(float(bound), rel=1e-9)


@pytest.mark.parametrize("probe", ["exact", "unit", "readback", "repeat"])
@pytest.mark.parametrize("format_", ["fp4", "bf16"])
def test_exact_dense_cases_have_one_result_only(probe: Any, format_: Any) -> None:
    case = DenseCase(probe, 24, 256, (17,), format_)
    made = dense_operands(case)
    want = dense_reference(case, made, NATIVE_FP4)
    assert want.exact
    assert torch.equal(want.value.bfloat16().double(), want.value)
    a = made.a.double() if isinstance(made.a, Tensor) else values(made.a.packed, made.a.scales)
    total = a @ values(made.w.packed, made.w.scales).T
    assert torch.equal((total.float() * made.alpha).bfloat16().double(), want.value)
    backwards = a.float().flip(1) @ values(made.w.packed, made.w.scales).float().flip(1).T
    assert torch.equal(backwards.double(), total), "every order of fp32 additions gives the same"


def test_the_formats_agree_where_the_activations_are_the_same() -> None:
    four, sixteen = (DenseCase("exact", 24, 256, (17,), format_) for format_ in ("fp4", "bf16"))
    made, other = dense_operands(four), dense_operands(sixteen)
    assert float(made.alpha) != float(other.alpha), "W4A16 has no scale of activations"
    assert dense_reference(sixteen, other, NATIVE_FP4).value.any()


def test_rows_of_an_expectation() -> None:
    case = DenseCase("bound", 3, 16, (5,))
    want = dense_reference(case, dense_operands(case), NATIVE_FP4)
    assert torch.equal(want.rows(2).value, want.value[:2])
    assert torch.equal(want.rows(2).radius, want.radius[:2])
    assert not want.exact
    assert want.rows(0).exact


# --- mixture of experts: a plain forward in float64 -------------------------------------------------------------------


def nearest_e2m1(x: Tensor) -> Tensor:
    grid = torch.tensor(E2M1, dtype=torch.float64)
    return grid[(x.abs().unsqueeze(-1) - grid).abs().argmin(-1)].copysign(x)


def nearest_e4m3(x: Tensor) -> Tensor:
    grid = E4M3[:0x7F]
    return grid[(x.unsqueeze(-1) - grid).abs().argmin(-1)]


def requantised(hidden: Tensor, scale_2: float) -> Tensor:
    blocks = hidden.unflatten(1, (-1, 16))
    scale = nearest_e4m3(blocks.abs().amax(-1) / 6 / scale_2).unsqueeze(-1) * scale_2
    return torch.where(scale > 0, nearest_e2m1(blocks / scale) * scale, 0.0).flatten(1)


def same(x: Tensor) -> Tensor:
    return x


def bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


def expert_forward(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    scale_2: float | None,
    form: Activation,
    rounding: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    gate, up = rounding(x @ w13.T).chunk(2, dim=1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit) + form.beta
    hidden = rounding(gate * torch.sigmoid(form.alpha * gate) * up)
    return rounding((hidden if scale_2 is None else requantised(hidden, scale_2)) @ w2.T)


def forward(case: MoeCase, o: MoeOperands, rounding: Callable[[Tensor], Tensor] = same) -> Tensor:
    """float64 [T, H]; the intermediate is quantised again, nothing else is rounded unless asked for."""
    e, out = o.experts, torch.zeros(o.x.shape, dtype=torch.float64)
    for token, slot in itertools.product(range(len(o.x)), range(case.top_k)):
        expert = int(o.ids[token, slot])
        if expert < 0:
            continue
        result = expert_forward(
            o.x[token : token + 1].double(),
            values(e.w13[expert], e.w13_scales[expert]) * float(e.w13_scale_2[expert]),
            values(e.w2[expert], e.w2_scales[expert]) * float(e.w2_scale_2[expert]),
            float(e.intermediate_scale[expert]) if case.format == "fp4" else None,
            case.activation,
            rounding,
        )
        out[token] += result[0] * float(o.weights[token, slot]) * case.routed_scaling
    return out


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    probe=st.sampled_from(["bound", "onehot"]),
    spread=st.sampled_from(["normal", "span"]),
    routing=st.sampled_from(["random", "one_expert", "minus_one"]),
    activation=st.sampled_from([Activation(), CLAMPED, Activation(limit=0.5, alpha=0.5, beta=-1.0)]),
    scaling=st.sampled_from([1.0, 2.5, 0.3]),
    weight_only=st.booleans(),
    rounded=st.booleans(),
)
def test_the_interval_holds_a_forward_in_float64(
    seed: int,
    probe: Any,
    spread: Spread,
    routing: Routing,
    activation: Activation,
    scaling: float,
    weight_only: bool,
    rounded: bool,
) -> None:
    """Exact arithmetic with, and without, the recipe's roundings to bf16."""
    format_: Any = "bf16" if weight_only else "fp4"
    case = MoeCase(probe, (3,), 32, 32, 4, 2, activation, scaling, routing, format_, spread, seed)
    made = moe_operands(case)
    recipe = replace(COARSE if rounded else FINE, intermediate=format_)
    want = moe_reference(case, made, recipe)
    got = forward(case, made, bf16 if rounded else same)
    assert bool(((got - want.value).abs() <= want.radius).all())
    assert bool(((bf16(got) - want.value).abs() <= want.radius).all())


@pytest.mark.parametrize("activation", [Activation(), CLAMPED])
def test_the_plain_interval_holds_both_forwards_and_is_wider(activation: Activation) -> None:
    case = MoeCase("bound", (6,), 64, 64, 4, 2, activation)
    made = moe_operands(case)
    plain = moe_reference(case, made, replace(COARSE, known=False))
    for rounding, recipe in ((same, FINE), (bf16, COARSE)):
        assert bool(((forward(case, made, rounding) - plain.value).abs() <= plain.radius).all())
        emulated = moe_reference(case, made, recipe)
        assert float(plain.radius.mean()) > 1.2 * float(emulated.radius.mean())


def test_a_known_recipe_is_narrow() -> None:
    """The median radius is of the order of 2 % of the output, as the experiment found."""
    case = MoeCase("bound", (16,), 256, 256, 4, 2)
    want = moe_reference(case, moe_operands(case), COARSE)
    assert 0.002 < float(want.radius.median() / want.value.square().mean().sqrt()) < 0.04


def test_an_unrouted_token_is_zero_and_its_bound_is_zero() -> None:
    case = MoeCase("bound", (40,), 32, 32, 4, 2, routing="minus_one")
    made = moe_operands(case)
    nowhere = (made.ids < 0).all(1)
    assert bool(nowhere.any())
    want = moe_reference(case, made, COARSE)
    assert not want.value[nowhere].any()
    assert not want.radius[nowhere].any()
    assert bool((want.radius[~nowhere] > 0).any(1).all())


@pytest.mark.parametrize("shared_gate", [True, False])
@pytest.mark.parametrize("dense_format", ["fp4", "bf16"])
@pytest.mark.parametrize("activation", [Activation(), CLAMPED])
def test_a_block_is_routed_plus_gated_shared(shared_gate: bool, dense_format: Any, activation: Activation) -> None:
    case = BlockCase(5, 32, 32, 4, 2, 48, shared_gate, activation, 2.5)
    made = block_operands(case)
    want = block_reference(case, made, COARSE, (GENERIC_FP4, GENERIC_FP4), dense_format)
    shared = expert_forward(
        made.routed.x.double(),
        values(made.gate_up.packed, made.gate_up.scales) * float(made.gate_up.scale_2),
        values(made.down.packed, made.down.scales) * float(made.down.scale_2),
        float(made.intermediate_scale) if dense_format == "fp4" else None,
        activation,
        bf16,
    )
    routed = forward(case.routed, made.routed, bf16)
    got = bf16(bf16(routed) + made.gate.double().unsqueeze(1) * shared)
    assert bool(((got - want.value).abs() <= want.radius).all())
    for wrong in (routed, shared, routed + 2 * shared, routed - shared, routed / 2.5 + shared):
        assert bool(((bf16(wrong) - want.value).abs() > want.radius).any())


# --- intervals --------------------------------------------------------------------------------------------------------


def interval(lo: list[float], hi: list[float]) -> _Interval:
    pairs = [sorted(pair) for pair in zip(lo, hi, strict=True)]
    return _Interval(*torch.tensor(pairs, dtype=torch.float64).T.reshape(2, 1, -1))


SIDES = st.floats(-12, 12)
FORMS = st.one_of(
    st.just(Activation()),
    st.builds(Activation, limit=st.floats(0.1, 8), alpha=st.floats(0.25, 3), beta=st.floats(-1, 1)),
)


@settings(max_examples=200)
@given(gate=st.tuples(SIDES, SIDES), up=st.tuples(SIDES, SIDES), form=FORMS, exact=st.booleans())
def test_the_activation_of_an_interval_holds_that_of_its_points(
    gate: tuple[float, float], up: tuple[float, float], form: Activation, exact: bool
) -> None:
    gates, ups = (interval([pair[0]], [pair[1]]) for pair in (gate, up))
    out = reference._activate(gates, ups, form, exact=exact)
    bottom = torch.tensor([-1.2784645 / form.alpha]).double().clamp(gates.lo[0], gates.hi[0])  # where the curve turns
    g = torch.cat([torch.linspace(float(gates.lo), float(gates.hi), 41, dtype=torch.float64), bottom]).unsqueeze(1)
    u = torch.linspace(float(ups.lo), float(ups.hi), 41, dtype=torch.float64)
    if form.limit is not None:
        g, u = g.clamp(max=form.limit), u.clamp(-form.limit, form.limit) + form.beta
    points = g * torch.sigmoid(form.alpha * g) * u
    tiny = 1e-12 * float(points.abs().max())
    assert float(points.min()) >= float(out.lo) - tiny
    assert float(points.max()) <= float(out.hi) + tiny
    if form.limit is None or form.limit > 0.5:  # and it is no wider than it must be
        width = float(points.max() - points.min())
        assert float(out.hi - out.lo) <= width * 1.05 + 1e-4 * float(out.size) + 1e-29


def test_the_interval_of_silu_reaches_its_minimum() -> None:
    across, one = interval([-3.0], [-0.5]), interval([1.0], [1.0])
    assert float(reference._activate(across, one, Activation(), exact=True).lo) == pytest.approx(-0.27846454, rel=1e-7)
    form = Activation(limit=7.0, alpha=2.0)
    assert float(reference._activate(across, one, form, exact=True).lo) == pytest.approx(-0.13923227, rel=1e-7)


def test_the_clamp_closes_an_interval_beyond_it() -> None:
    beyond = interval([3.0], [9.0])
    out = reference._activate(beyond, beyond, Activation(limit=2.0, beta=1.0), exact=True)
    assert float(out.lo) == float(out.hi) == pytest.approx(2 / (1 + math.exp(-2)) * 3, rel=1e-12)


@settings(max_examples=150)
@given(data=st.data(), scale_2=st.sampled_from([1.0, 2.0**-6, 0.0173]), width=st.sampled_from([0.0, 1e-6, 1e-3, 0.1]))
def test_requantising_an_interval_holds_that_of_its_points(data: st.DataObject, scale_2: float, width: float) -> None:
    middle = torch.tensor([data.draw(st.lists(st.floats(-40, 40), min_size=16, max_size=16))], dtype=torch.float64)
    half = width * middle.abs()
    out = reference._requantised(_Interval(middle - half, middle + half), scale_2, exact=False)
    for share in (-1.0, -0.5, 0.0, 0.3, 1.0):
        point = requantised(middle + share * half, scale_2)
        tiny = 1e-12 * point.abs()
        assert bool((point >= out.lo - tiny).all())
        assert bool((point <= out.hi + tiny).all())


def test_requantising_stays_sharp_away_from_ties() -> None:
    """A value whose interval straddles no boundary has one result; one on a boundary has two."""
    x = torch.full((1, 16), 6.0, dtype=torch.float64)
    x[0, 1:4] = torch.tensor([1.2, 2.5, 0.7])
    narrow = x.abs() * 1e-9
    out = reference._requantised(_Interval(x - narrow, x + narrow), 1.0, exact=False)
    assert float(out.lo[0, 1]) == float(out.hi[0, 1]) == 1.0
    assert (float(out.lo[0, 2]), float(out.hi[0, 2])) == (2.0, 3.0)


@given(st.floats(-100, 100), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["fp32", "bf16", "fp16"]))
def test_rounding_an_interval_is_monotone(x: float, near: float, far: float, to: Any) -> None:
    inner = _Interval(*(torch.tensor([v], dtype=torch.float64) for v in (x - near, x + near)))
    outer = inner.widen(far)
    for emulate in (True, False):
        a, b = inner.rounded(to, emulate=emulate), outer.rounded(to, emulate=emulate)
        assert float(b.lo) <= float(a.lo) <= float(a.hi) <= float(b.hi)


def test_a_wider_declaration_widens_every_element() -> None:
    case = MoeCase("bound", (6,), 64, 64, 4, 2)
    made = moe_operands(case)
    narrow = moe_reference(case, made, MoeRecipe(NATIVE_FP4, NATIVE_FP4))
    for wider in (
        MoeRecipe(NATIVE_FP4, NATIVE_FP4, product_out="bf16"),
        MoeRecipe(NATIVE_FP4, NATIVE_FP4, product_out="bf16", combine="bf16"),
        MoeRecipe(NATIVE_FP4, NATIVE_FP4, combine="fp16"),
    ):
        assert bool((moe_reference(case, made, wider).radius >= narrow.radius).all())
    looser = replace(GENERIC_FP4, splits=4, partial="bf16")
    wide = moe_reference(case, made, MoeRecipe(looser, looser))
    assert float(wide.radius.mean()) > 2 * float(narrow.radius.mean())
