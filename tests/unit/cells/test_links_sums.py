"""All-reduces: inputs whose sums are exact in every order, and what is wrong with a sum."""

import itertools
import json
import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm120_cells.links import reduce
from sm120_cells.links.reduce import MOST_RANKS, addends, difference, own, total
from sm120_cells.links.tell import Tell


@given(st.integers(0, 2**32), st.integers(2, MOST_RANKS), st.randoms(use_true_random=False))
def test_sums_are_exact_in_bfloat16_whatever_the_order(seed: int, world: int, order: random.Random) -> None:
    common = addends(512, seed)
    inputs = [torch.from_numpy(own(common, rank)).to(torch.bfloat16) for rank in range(world)]
    assert all(np.array_equal(x.float().numpy(), own(common, rank)) for rank, x in enumerate(inputs))
    while len(inputs) > 1:  # any tree: rings, halvings, whatever NCCL does
        order.shuffle(inputs)
        inputs.append(inputs.pop() + inputs.pop())
    assert np.array_equal(inputs[0].float().numpy(), total(common, world))


def test_the_worst_values_of_the_most_ranks_are_exact() -> None:
    assert np.abs(total(addends(100_000, 3), MOST_RANKS)).max() == 248
    values = np.array([-8, 7, -8, 7], dtype=np.float32)
    signs = np.array([-1, 1, 1, -1], dtype=np.float32)
    every = [torch.from_numpy(own((values, signs), rank)).to(torch.bfloat16) for rank in range(MOST_RANKS)]
    for inputs in (every, every[::-1], every[1::2] + every[::2]):
        partial = list(itertools.accumulate(inputs))
        assert np.array_equal(partial[-1].float().numpy(), total((values, signs), MOST_RANKS))


@given(st.integers(0, 2**32), st.integers(2, MOST_RANKS), st.data())
def test_a_rank_taken_for_another_shows_in_every_element(seed: int, world: int, data: st.DataObject) -> None:
    one, other = data.draw(st.lists(st.integers(0, world - 1), min_size=2, max_size=2, unique=True))
    common = addends(256, seed)
    got = total(common, world) - own(common, one) + own(common, other)
    assert np.all(got != total(common, world))


def test_inputs_change_with_the_round() -> None:
    assert np.mean(own(addends(1000, 1), 0) == own(addends(1000, 2), 0)) < 0.2


def case() -> tuple[reduce.Floats, reduce.Floats, reduce.Floats]:
    common = addends(1000, 5)
    return total(common, 4), own(common, 2), total(addends(1000, 4), 4)


def test_a_right_sum_is_right() -> None:
    expected, mine, last = case()
    assert difference(expected, mine, last, expected.copy()) is None


@pytest.mark.parametrize("kind", ["zeros", "own", "last round", "other"])
def test_the_kind_of_a_wrong_sum_is_told(kind: str) -> None:
    expected, mine, last = case()
    instead = {"zeros": np.zeros_like(expected), "own": mine, "last round": last, "other": expected + 1}[kind]
    got = expected.copy()
    got[100:300] = instead[100:300]
    wrong = np.flatnonzero(got != expected)
    seen = difference(expected, mine, last, got)
    assert seen == {
        "first": wrong[0],
        "last": wrong[-1],
        "count": len(wrong),
        "of": 1000,
        "expected": expected[wrong[0]],
        "got": got[wrong[0]],
        "kind": kind,
    }


def test_nan_is_wrong() -> None:
    expected, mine, last = case()
    got = expected.copy()
    got[5] = np.nan
    seen = difference(expected, mine, last, got)
    assert seen is not None
    assert (seen["first"], seen["count"], seen["kind"]) == (5, 1, "other")


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="not exact"):
        reduce.check(None, 0, {"ranks": 17}, None)  # type: ignore[arg-type]  # before either is used


def test_a_message_is_one_short_line_of_strict_json() -> None:
    read, write = os.pipe()
    tell = Tell(3, write)
    tell.wrong(got=float("nan"), text="x\n\u2028" * 3000, deep=[{"a": (1, float("inf"))}])
    line = os.read(read, 1 << 16)
    os.close(read)
    os.close(write)
    assert line.startswith(b'{"links": 1, ')
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert len(line) < 4096
    message: dict[str, Any] = json.loads(line)
    assert message["rank"] == 3
    assert message["where"]["got"] is None
    assert message["where"]["deep"] == [{"a": [1, None]}]
