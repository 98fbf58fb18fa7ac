"""The derived bound: eta at the edges, growth with K and with what a backend declares."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sm120_cells import bounds
from sm120_cells.bounds import (
    BF16_HALF_ULP,
    BF16_MMA_STEP,
    FP32_ULP,
    GENERIC_FP4,
    NATIVE_FP4,
    SEQUENTIAL_FP32,
    Accumulation,
    FloatType,
    MoeRecipe,
    eta,
    output_radius,
)
from sm120_cells.cases import DenseCase
from sm120_cells.probes import dense_operands
from sm120_cells.reference import dense_reference


def one(got: float, ref: float, radius: float) -> float:
    def tensor(x: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([x], dtype=dtype)

    return float(eta(tensor(got, torch.bfloat16), tensor(ref), tensor(radius)))


@pytest.mark.parametrize(
    ("got", "ref", "radius", "want"),
    [
        (0.0, 0.0, 0.0, 0.0),  # 0 / 0 is no error, not NaN
        (-0.0, 0.0, 0.0, 0.0),
        (2.0, 2.0, 0.0, 0.0),
        (2.0, 1.0, 0.0, math.inf),  # a bound of zero tolerates nothing
        (1e-30, 0.0, 0.0, math.inf),
        (1.5, 1.0, 1.0, 0.5),
        (3.0, 1.0, 1.0, 2.0),
        (-1.0, 1.0, 1.0, 2.0),
        (math.nan, 1.0, 1.0, math.inf),
        (math.nan, 0.0, 0.0, math.inf),
        (math.inf, 1.0, 1e30, math.inf),
        (-math.inf, -1.0, 1e30, math.inf),
        (1.0, math.nan, 1.0, math.inf),  # a reference that is not a number vouches for nothing
        (math.nan, math.nan, 1.0, math.inf),
    ],
)
def test_eta_at_the_edges(got: float, ref: float, radius: float, want: float) -> None:
    assert one(got, ref, radius) == want


@given(st.lists(st.floats(width=16), min_size=1), st.floats(-1e3, 1e3), st.floats(0, 1e3))
def test_eta_is_never_nan_and_never_negative(got: list[float], ref: float, radius: float) -> None:
    values = torch.tensor(got).bfloat16()
    same = torch.full(values.shape, ref, dtype=torch.float64)
    result = eta(values, same, torch.full_like(same, radius))
    assert not bool(result.isnan().any())
    assert bool((result >= 0).all())


def typical_relative_bound(k: int, accumulation: Accumulation) -> float:
    """Root mean square of the bound over that of the reference, on random full-size operands."""
    case = DenseCase("bound", 48, k, (48,))
    want = dense_reference(case, dense_operands(case), accumulation)
    return float((want.radius.square().mean() / want.value.square().mean()).sqrt())


@pytest.mark.parametrize(("k", "figure"), [(512, 4.0e-3), (4096, 5.2e-3), (16384, 1.4e-2)])
def test_the_relative_tolerance_is_the_published_one(k: int, figure: float) -> None:
    """The figures of the method's description: Gaussian operands, 16 products a step, relative to a typical result.

    S grows as K, a result as its root.
    """
    gen = torch.Generator().manual_seed(k)
    a, b = (torch.randn(64, k, generator=gen, dtype=torch.float64) for _ in range(2))
    typical, size = (a @ b.T).square().mean().sqrt(), (a.abs() @ b.abs().T).mean()
    relative = float(output_radius(typical, size, GENERIC_FP4, k) / typical)
    assert relative == pytest.approx(figure, rel=0.02)


def test_the_bound_grows_with_k() -> None:
    sizes = (64, 512, 4096)
    got = [typical_relative_bound(k, GENERIC_FP4) for k in sizes]
    assert got == sorted(got)
    assert got[0] > BF16_HALF_ULP


def test_steps_are_counted_whole() -> None:
    assert NATIVE_FP4.relative(64) == FP32_ULP
    assert NATIVE_FP4.relative(65) == NATIVE_FP4.relative(128) == 2 * FP32_ULP
    assert GENERIC_FP4.relative(4096) == 4 * NATIVE_FP4.relative(4096)
    assert SEQUENTIAL_FP32.relative(4096) == 4096 * 2.0**-24


def test_split_k_adds_one_rounding_a_part() -> None:
    for partial in get_args(FloatType):
        for splits in (2, 4, 8):
            split = replace(NATIVE_FP4, splits=splits, partial=partial)
            extra = split.relative(1024) - NATIVE_FP4.relative(1024)
            assert extra == pytest.approx(splits * bounds.HALF_ULP[partial], rel=1e-9)
            assert split.fp32_partials == (partial == "fp32")


def test_declaring_less_precision_never_narrows_the_bound() -> None:
    ref, size = torch.tensor([1.0]).double(), torch.tensor([10.0]).double()
    ladder = [
        NATIVE_FP4,
        GENERIC_FP4,
        replace(GENERIC_FP4, unit=BF16_MMA_STEP),
        replace(GENERIC_FP4, unit=BF16_MMA_STEP, splits=4),
        replace(GENERIC_FP4, unit=BF16_MMA_STEP, splits=4, partial="fp16"),
        replace(GENERIC_FP4, unit=BF16_MMA_STEP, splits=4, partial="bf16"),
        replace(GENERIC_FP4, unit=BF16_MMA_STEP, splits=8, partial="bf16"),
    ]
    radii = [float(output_radius(ref, size, accumulation, 4096)) for accumulation in ladder]
    assert radii == sorted(set(radii))


@given(st.floats(0, 1e6), st.floats(-1e6, 1e6), st.floats(1, 100))
def test_the_radius_grows_with_the_sizes_and_is_zero_for_zero(magnitude: float, ref: float, factor: float) -> None:
    def radius(ref: float, magnitude: float) -> float:
        pair = torch.tensor([ref, magnitude], dtype=torch.float64)
        return float(output_radius(pair[:1], pair[1:], GENERIC_FP4, 512))

    assert radius(ref * factor, magnitude) >= radius(ref, magnitude) >= 0
    assert radius(ref, magnitude * factor) >= radius(ref, magnitude)
    assert radius(0.0, 0.0) == 0.0
    assert radius(ref, magnitude) >= BF16_HALF_ULP * abs(ref)


def test_a_recipe_has_atomics_where_either_gemm_has() -> None:
    atomics = replace(NATIVE_FP4, atomics=True)
    assert not MoeRecipe(NATIVE_FP4, NATIVE_FP4).atomics
    assert MoeRecipe(atomics, NATIVE_FP4).atomics
    assert MoeRecipe(NATIVE_FP4, atomics).atomics
