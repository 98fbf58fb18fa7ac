"""The four published criteria on known inputs: each accepts and rejects where its project's text says so."""

import math

import pytest
import torch
from torch import Tensor

from sm120_cells.criteria import CRITERIA, accepts

COSINE, DEEPGEMM, CLOSE, BENCH = CRITERIA


def want(rows: int = 20, columns: int = 50, size: float = 10.0) -> Tensor:
    gen = torch.Generator().manual_seed(0)
    sign = torch.randint(2, (rows, columns), generator=gen).double() * 2 - 1
    return sign * size * (1 + torch.rand(rows, columns, generator=gen, dtype=torch.float64))


def verdicts(got: Tensor, reference: Tensor) -> dict[str, bool]:
    return accepts(got.bfloat16(), reference)


def all_are(value: bool) -> dict[str, bool]:
    return dict.fromkeys(CRITERIA, value)


def test_names_are_those_of_the_published_thresholds() -> None:
    assert list(CRITERIA) == ["cosine > 0.97", "DeepGEMM diff < 0.02", "atol = rtol = 0.1", "flashinfer-bench 95 %"]


def test_a_right_result_is_accepted() -> None:
    assert verdicts(want(), want()) == all_are(True)


def test_the_negative_is_rejected() -> None:
    assert verdicts(-want(), want()) == all_are(False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_rejected(value: float) -> None:
    got = want()
    got[3, 3] = value
    assert verdicts(got, want()) == all_are(False)


def test_nothing_is_accepted() -> None:
    assert verdicts(torch.empty(0, 8), torch.empty(0, 8, dtype=torch.float64)) == all_are(True)


def test_zeros() -> None:
    zeros = torch.zeros(4, 8, dtype=torch.float64)
    assert verdicts(zeros, zeros) == all_are(True)
    assert verdicts(zeros, want(4, 8)) == all_are(False)
    assert verdicts(want(4, 8), zeros)[COSINE] is False


def test_cosine_sees_no_factor_and_little_else() -> None:
    assert verdicts(want() * 1.7, want())[COSINE]
    got = want()
    got[0] = 0  # one row of twenty: cosine about 0.975
    assert verdicts(got, want())[COSINE]
    got[:2] = 0
    assert not verdicts(got, want())[COSINE]


def test_deepgemms_difference_sees_large_factors() -> None:
    assert verdicts(want() * 1.2, want())[DEEPGEMM]  # 1 - 2 * 1.2 / (1 + 1.44) = 0.016
    assert not verdicts(want() * 1.25, want())[DEEPGEMM]  # 0.024
    got = want()
    got[0, :10] *= -1
    assert verdicts(got, want())[DEEPGEMM] == (
        1 - 2 * float((got * want()).sum()) / (2 * float(want().square().sum())) < 0.02
    )


def test_absolute_plus_relative_sees_each_element_and_the_scale_of_the_output() -> None:
    got = want()
    got[3, 3] *= 1.05
    assert verdicts(got, want())[CLOSE]
    got[3, 3] *= 1.2
    assert not verdicts(got, want())[CLOSE]
    small = want(size=1e-3)
    assert verdicts(torch.zeros_like(small), small)[CLOSE], "anything is accepted of a small output"


def test_bench_lets_five_percent_be_anything() -> None:
    got = want()
    got.flatten()[:50] = 0  # 50 of 1000
    assert verdicts(got, want())[BENCH]
    got.flatten()[:51] = 0
    assert not verdicts(got, want())[BENCH]


def test_bench_needs_both_errors() -> None:
    assert verdicts(want() * 1.005, want())[BENCH], "relative error below 1e-2"
    assert not verdicts(want() * 1.05, want())[BENCH]
    tiny = want(size=1e-4)
    assert verdicts(tiny * 2, tiny)[BENCH], "absolute error below 1e-2"
