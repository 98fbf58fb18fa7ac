"""From outputs to findings: where, how much, what it looks like."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sm120_cells import judge
from sm120_cells.judge import Comparison, compare, describe, ranges
from sm120_cells.reference import Expected


def made(rows: int = 160, columns: int = 264, radius: float = 1.0) -> tuple[Tensor, Expected]:
    """(right output, reference) of distinct values."""
    value = torch.arange(1, rows * columns + 1, dtype=torch.float64).reshape(rows, columns).bfloat16()
    return value.clone(), Expected(value.double(), torch.full((rows, columns), radius, dtype=torch.float64))


def described(got: Tensor, expected: Expected) -> judge.Finding:
    return describe(compare(got, expected), "T2", "bound", {"m": len(got)})


# --- where ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "column", "tile"), [(0, 0, [0, 0]), (127, 128, [0, 1]), (128, 127, [1, 0])])
def test_one_wrong_element_is_named(row: int, column: int, tile: list[int]) -> None:
    got, expected = made()
    got[row, column] += 4096
    found = described(got, expected)
    assert found.condition == {"m": 160, "rows": str(row), "row": row, "tile": tile}
    (element,) = found.worst
    assert (element.row, element.col) == (row, column)
    assert element.got == float(got[row, column])
    assert element.want == float(expected.value[row, column])
    assert element.bound == 1.0
    assert element.eta == pytest.approx(abs(element.got - element.want))
    assert f"1 of {160 * 264} elements are wrong, in rows {row} and columns {column};" in found.message


def test_the_error_map_shows_the_tile_and_the_row() -> None:
    got, expected = made()
    got[130, 260] = -1.0
    picture = compare(got, expected).error_map()
    assert (picture["rows"], picture["columns"], picture["tile"]) == (160, 264, 128)
    tiles = picture["tiles"]
    assert [len(row) for row in tiles] == [3, 3]
    assert [(i, j) for i, row in enumerate(tiles) for j, v in enumerate(row) if v > 1] == [(1, 2)]
    assert [i for i, v in enumerate(picture["row_profile"]) if v > 1] == [130]
    assert len(picture["row_profile"]) == 160


def test_an_infinite_eta_is_null_in_the_map() -> None:
    got, expected = made(4, 8)
    got[2, 3] = math.nan
    picture = compare(got, expected).error_map()
    assert picture["tiles"] == [[None]]
    assert picture["row_profile"] == [0.0, 0.0, None, 0.0]


def test_the_map_of_a_huge_output_stays_small() -> None:
    got = torch.zeros(5000, 1)
    picture = compare(got, Expected(got.double(), got.double())).error_map()
    assert len(picture["row_profile"]) == 4096
    assert len(picture["tiles"]) == 40


@pytest.mark.parametrize("columns", [8, 64, 128])
def test_errors_in_several_tiles_are_not_put_into_one(columns: int) -> None:
    """Also where the first tile alone holds thousands of them."""
    got, expected = made(300, columns)
    found = described(torch.zeros_like(got), expected)
    assert "tile" not in found.condition
    assert found.condition["rows"] == "0-299"


def test_worst_elements_are_sorted_and_at_most_twenty() -> None:
    got, expected = made()
    got += torch.randint(-50, 50, got.shape, generator=torch.Generator().manual_seed(0)).bfloat16() * 256
    worst = compare(got, expected).worst()
    assert len(worst) == judge.WORST == 20
    etas = [e.eta for e in worst if e.eta is not None]
    assert etas == sorted(etas, reverse=True)
    assert len(etas) == 20
    assert etas[0] == float(compare(got, expected).eta.max())


def test_infinite_elements_come_first_and_are_null() -> None:
    got, expected = made(4, 8)
    got[1, 1], got[3, 7], got[0, 0] = math.nan, math.inf, 500.0
    worst = compare(got, expected).worst()
    assert {(e.row, e.col) for e in worst[:2]} == {(1, 1), (3, 7)}
    assert [e.got for e in worst] == [None, None, 500.0]
    assert [e.eta for e in worst[:2]] == [None, None]
    assert all(isinstance(e.to_json()["bound"], float) for e in worst)


def test_an_empty_output_has_nothing_wrong() -> None:
    nothing = torch.empty(0, 8, dtype=torch.float64)
    comparison = compare(nothing.bfloat16(), Expected(nothing, nothing))
    assert comparison.worst_eta == 0.0
    assert comparison.worst() == ()


def test_eta_of_exactly_one_is_right() -> None:
    got, expected = made(1, 8)
    got[0, 3] += 1
    comparison: Comparison = compare(got, expected)
    assert comparison.worst_eta == 1.0
    assert not comparison.wrong.any()


# --- what it looks like -----------------------------------------------------------------------------------------------


def phrase(got: Tensor, expected: Expected) -> str:
    return described(got, expected).message.rpartition("times its bound")[2]


def test_all_zero() -> None:
    got, expected = made()
    got[64:96] = 0
    assert phrase(got, expected) == "; all of them are zero"


def test_all_nan() -> None:
    got, expected = made()
    got[5, 7:90] = math.nan
    assert phrase(got, expected) == "; all of them are NaN"


@pytest.mark.parametrize("factor", [0.5, 2.0, 1.05, -1.0, 1.7])
def test_a_constant_factor(factor: float) -> None:
    got, expected = made(radius=0.01)
    got[40:60] = (got[40:60].float() * factor).bfloat16()
    found = phrase(got, expected)
    assert found.startswith("; all of them are ")
    assert found.endswith(" times what they should be")
    assert float(found.split()[5]) == pytest.approx(factor, rel=0.01)


def test_no_factor_is_claimed_where_some_are_not_finite() -> None:
    got, expected = made()
    got[0] *= 2
    got[1, 0] = math.nan
    assert "all of them" not in phrase(got, expected)


def test_another_rows_values() -> None:
    got, expected = made(8, 64)
    got[2] = got[6].clone()
    assert phrase(got, expected) == "; row 2 holds what row 6 should hold"


def test_rows_exchanged() -> None:
    got, expected = made(8, 64)
    got[[1, 4]] = got[[4, 1]]
    assert phrase(got, expected) == "; row 1 holds what row 4 should hold"


def test_noise_has_no_name() -> None:
    got, expected = made(8, 64)
    got[3] += torch.randn(64, generator=torch.Generator().manual_seed(0)).bfloat16() * 64
    assert phrase(got, expected) == ""


def test_an_infinite_error_reads_well() -> None:
    got, expected = made(2, 8, radius=0.0)
    got[0, 0] = 99
    assert "largest error infinitely many times its bound" in described(got, expected).message


# --- ranges, poison, bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([1, 2, 3, 7], "1-3, 7"), ([7, 1, 3, 2], "1-3, 7"), ([0, 2, 4], "0, 2, 4"), ([0, 1], "0-1")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_long_ranges_are_cut_and_say_how_many_there_are() -> None:
    assert ranges(list(range(0, 60, 2))) == "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, … (30 in all)"


@given(st.sets(st.integers(0, 60), max_size=20))
def test_ranges_name_the_numbers_and_no_others(numbers: set[int]) -> None:
    text = ranges(list(numbers))
    if "…" in text:
        return
    named: set[int] = set()
    for part in filter(None, text.split(", ")):
        first, _, last = part.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == numbers


def test_poison_is_seen_where_it_is_left() -> None:
    buffer = judge.poisoned(4, 8, torch.device("cpu"))
    assert bool(buffer.isnan().all())
    assert judge.is_poison(buffer)
    assert judge.unwritten(buffer) == 32
    buffer[1, 2] = math.nan  # a NaN that was computed is not poison
    assert judge.unwritten(buffer) == 31
    assert not judge.is_poison(buffer)
    assert judge.unwritten(buffer.T) == 31


def test_same_bits_are_stricter_than_equal_values() -> None:
    a = torch.tensor([[0.0, 1.0, math.nan]]).bfloat16()
    assert judge.same_bits(a, a.clone())
    assert not judge.same_bits(a, torch.tensor([[-0.0, 1.0, math.nan]]).bfloat16())
