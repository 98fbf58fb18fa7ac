"""Bytes that tell where they come from, and what is wrong with those that arrived."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sm120_cells.links.pattern import Bytes, device_bytes, difference, host_bytes, host_words

CPU = torch.device("cpu")
SEEDS = st.integers(0, 2**40)


@given(SEEDS, st.integers(0, 3000))
def test_host_and_device_compute_the_same_bytes(seed: int, size: int) -> None:
    assert np.array_equal(host_bytes(size, seed), device_bytes(size, seed, CPU).numpy())


@given(SEEDS)
def test_words_are_all_different_so_that_a_shifted_block_shows(seed: int) -> None:
    assert len(np.unique(host_words(20000, seed))) == 20000


@given(SEEDS, SEEDS)
def test_two_seeds_share_hardly_a_byte(one: int, other: int) -> None:
    if one % 2**32 != other % 2**32:
        assert np.mean(host_bytes(4096, one) == host_bytes(4096, other)) < 0.05


def case() -> tuple[Bytes, Bytes]:
    return host_bytes(1000, 1).copy(), host_bytes(1000, 2).copy()


def test_what_arrived_as_it_was_sent_is_right() -> None:
    expected, stale = case()
    assert difference(expected, stale, expected.copy()) is None


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda got, stale: got.__setitem__(slice(100, 200), 0), {"kind": "zeros"}),
        (lambda got, stale: got.__setitem__(slice(100, 200), stale[100:200]), {"kind": "stale"}),
        (lambda got, stale: got.__setitem__(slice(100, 200), got[60:160].copy()), {"kind": "shifted", "by": 40}),
        (lambda got, stale: got.__setitem__(slice(100, 200), got[104:204].copy()), {"kind": "shifted", "by": -4}),
        (lambda got, stale: got.__setitem__(slice(100, 200), 255), {"kind": "other"}),
        (lambda got, stale: got.__setitem__(slice(100, 200), got[100:200] ^ 1), {"kind": "other"}),
    ],
)
def test_the_kind_of_damage_is_told(damage: object, found: dict[str, object]) -> None:
    expected, stale = case()
    got = expected.copy()
    assert callable(damage)
    damage(got, stale)
    seen = difference(expected, stale, got)
    assert seen is not None
    wrong = np.flatnonzero(got != expected)
    assert {name: seen[name] for name in found} == found
    assert (seen["first"], seen["last"], seen["count"], seen["of"]) == (wrong[0], wrong[-1], len(wrong), 1000)
    assert bytes.fromhex(seen["got"]) == got[seen["first"] :][:8].tobytes()
    assert bytes.fromhex(seen["expected"]) == expected[seen["first"] :][:8].tobytes()


@given(st.integers(0, 999), st.integers(1, 255))
def test_one_wrong_byte_is_found_wherever_it_is(offset: int, by: int) -> None:
    expected, stale = case()
    got = expected.copy()
    got[offset] ^= by
    seen = difference(expected, stale, got)
    assert seen is not None
    assert (seen["first"], seen["last"], seen["count"]) == (offset, offset, 1)
