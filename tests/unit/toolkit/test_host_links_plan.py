"""Which NCCL settings and groups are tried on which machine."""

from collections.abc import Mapping
from itertools import combinations

import pytest

from sm120.host.facts import Gpu, Pair
from sm120.host.links.plan import DEFAULT, FULL, GOVERNED, THROUGH_HOST, THROUGH_SOCKETS, candidates, groups


def machine(count: int, path: Mapping[tuple[int, int], str] | str, status: str | None = "ok") -> tuple[Pair, ...]:
    return tuple(
        Pair(a=a, b=b, path=path if isinstance(path, str) else path[a, b], read=status, write=status)
        for a, b in combinations(range(count), 2)
    )


def words(pairs: tuple[Pair, ...], variables: Mapping[str, str] | None = None) -> list[str]:
    return [" ".join(f"{k}={v}" for k, v in s.variables.items()) for s in candidates(pairs, variables or {})]


# Eight cards on two sockets: a host bridge each within a socket (pitfall E24).
TWO_SOCKETS = {(a, b): "NODE" if a // 4 == b // 4 else "SYS" for a, b in combinations(range(8), 2)}
OFF, SOCKETS = "NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1"


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (machine(2, "PHB"), ["", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS]),
        (machine(8, TWO_SOCKETS), ["", "NCCL_P2P_LEVEL=PHB", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS]),
        (machine(2, "PIX"), ["", OFF, SOCKETS]),  # below one switch, NCCL uses peer access anyway
        (machine(2, "NV18"), ["", OFF, SOCKETS]),
        (
            machine(4, {(0, 1): "PIX", (2, 3): "PXB", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS"}),
            ["", "NCCL_P2P_LEVEL=PXB", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS],
        ),
        (machine(3, {(0, 1): "NV4", (0, 2): "PHB", (1, 2): "PHB"}),
         ["", "NCCL_P2P_LEVEL=NVL", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS]),
        (machine(2, "SYS", "chipset_not_supported"), ["", OFF, SOCKETS]),  # no peer access to be had
        (machine(2, "PHB", None), ["", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS]),  # not known: tried
        (machine(2, "PHB", "unknown"), ["", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS]),
        ((Pair(a=0, b=1),), ["", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS]),
        ((), ["", "NCCL_P2P_LEVEL=SYS", OFF, SOCKETS]),
        ((Pair(a=0, b=1, path="PHB", read="ok", write="not_supported"),), ["", OFF, SOCKETS]),
    ],
)  # fmt: skip
def test_only_settings_that_can_differ_are_tried(pairs: tuple[Pair, ...], expected: list[str]) -> None:
    assert words(pairs) == expected


def test_a_setting_of_the_users_own_is_one_more_candidate() -> None:
    assert words(machine(2, "PIX"), {"NCCL_P2P_LEVEL": "SYS", "NCCL_DEBUG": "INFO"})[1] == "NCCL_P2P_LEVEL=SYS"
    assert candidates(machine(2, "PIX"), {"NCCL_P2P_LEVEL": "SYS"})[1].name == "yours"
    assert words(machine(2, "PIX"), {"NCCL_P2P_DISABLE": "1"}) == ["", OFF, SOCKETS]  # is tried anyway
    assert words(machine(2, "PIX"), {"NCCL_P2P_DISABLE": ""}) == ["", OFF, SOCKETS]


def test_the_table_says_what_each_setting_is() -> None:
    every = candidates(machine(8, TWO_SOCKETS), {"NCCL_P2P_LEVEL": "LOC"})
    assert every[0] == DEFAULT
    assert every[-2:] == (THROUGH_HOST, THROUGH_SOCKETS)
    assert len({setting.name for setting in every}) == len(every)
    assert all(setting.reason for setting in every)
    assert all(set(setting.variables) <= set(GOVERNED) for setting in every)
    assert [setting.peer_memory for setting in every] == [None, None, True, True, False, False]
    assert [setting.last_resort for setting in every] == [False] * 5 + [True]
    assert THROUGH_HOST.command == "export NCCL_P2P_DISABLE=1"
    assert DEFAULT.command == "unset NCCL_P2P_LEVEL NCCL_P2P_DISABLE NCCL_SHM_DISABLE"


def cards(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=i, uuid=f"U{i}", name="card", bus_id=str(i)) for i in range(count))


def test_groups_are_a_pair_of_every_distance_and_all() -> None:
    assert groups(cards(2), machine(2, "PHB")) == (("U0", "U1"),)
    assert groups(cards(2), ()) == (("U0", "U1"),)
    everyone = tuple(f"U{i}" for i in range(8))
    assert groups(cards(8), machine(8, TWO_SOCKETS)) == (("U0", "U1"), ("U0", "U4"), everyone)
    assert groups(cards(3), ()) == (("U0", "U1"), ("U0", "U1", "U2"))
    # torch sees two of the machine's four, in another order
    assert groups(cards(4)[:1:-1], machine(4, "PIX")) == (("U3", "U2"),)


def test_the_full_effort_covers_what_was_asked_for() -> None:
    copied = {size for size, _ in FULL.copies}
    assert {8 << 10, 64 << 10, 64 << 20} <= copied
    assert any(size % 2 for size in copied if size > 8 << 10)
    assert {dtype for _, dtype, _ in FULL.sums} == {"bfloat16", "float32"}
    assert all(size % (2 if dtype == "bfloat16" else 4) == 0 for size, dtype, _ in FULL.sums)
    timed = [size for size, _ in FULL.timed]
    assert (timed[0], timed[-1]) == (8 << 10, 256 << 20)
