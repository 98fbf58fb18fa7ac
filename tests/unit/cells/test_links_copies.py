"""Copies between two devices, in this process: what a link does wrong is found, and said where."""

from collections.abc import Sequence
from typing import Any

import pytest

from sm120_cells.links import peer
from sm120_cells.links.link import ENGINE, KERNEL, STAGED, Copy, Link

REQUEST: dict[str, Any] = {"seed": 0, "sizes": [[1, 1], [257, 2], [4096, 2]], "timed": 4096}


class Heard:
    """Takes what a rank tells."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []

    def say(self, event: str, **content: Any) -> None:
        self.messages.append((event, content))

    def at(self, step: str) -> None:
        self.say("at", step=step)

    def ready(self) -> None:
        self.say("ready")

    def wrong(self, **where: Any) -> None:
        self.say("wrong", **where)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [content for name, content in self.messages if name == event]


def run(link: Link) -> tuple[int, int, Heard]:
    heard = Heard()
    made, wrong = peer.check(link, REQUEST, heard)  # type: ignore[arg-type]  # stands in for what tells the supervisor
    return made, wrong, heard


def test_every_size_direction_and_way_is_tried() -> None:
    made, wrong, heard = run(Link("cpu"))
    assert (made, wrong) == (3 * 5 * 4, 0)  # ways, rounds over all sizes, copies of forth, back and both
    steps = [content["step"] for content in heard.of("at")]
    assert len(set(steps)) == 3 * 5 * 3 + 1
    assert heard.of("pair") == [{"direct": True}]
    (bandwidth,) = heard.of("bandwidth")
    assert sorted(bandwidth["by"]) == ["back", "both", "forth"]
    assert all(value > 0 for value in bandwidth["by"].values())


def test_without_peer_access_there_is_no_way_by_stores() -> None:
    class Apart(Link):
        def direct(self, source: int, target: int) -> bool:
            return source == 0

        def copy(self, copies: Sequence[Copy], how: str, *, times: int = 1) -> None:
            assert how in {ENGINE, STAGED}
            super().copy(copies, how, times=times)

    made, wrong, heard = run(Apart("cpu"))
    assert (made, wrong) == (2 * 5 * 4, 0)
    assert heard.of("pair") == [{"direct": False}]


class Damaged(Link):
    """A right copy, then damage to one of them."""

    def __init__(self, way: str = ENGINE, size: int = 4096) -> None:
        super().__init__("cpu")
        self.way, self.size = way, size

    def copy(self, copies: Sequence[Copy], how: str, *, times: int = 1) -> None:
        before = [target.clone() for target, _ in copies]
        super().copy(copies, how, times=times)
        _, source = copies[-1]
        if how == self.way and source.numel() == self.size:
            self.damage(copies[-1], before[-1])

    def damage(self, copy: Copy, before: Any) -> None:
        raise NotImplementedError


class Zeros(Damaged):
    def damage(self, copy: Copy, before: Any) -> None:
        copy[0][1000:2000] = 0


class Stale(Damaged):
    def damage(self, copy: Copy, before: Any) -> None:
        copy[0][1000:2000] = before[1000:2000]


class Shifted(Damaged):
    def damage(self, copy: Copy, before: Any) -> None:
        copy[0][1000:2000] = copy[1][1016:2016]


class SourceSpoiled(Damaged):
    def damage(self, copy: Copy, before: Any) -> None:
        copy[0][:] = copy[1].zero_()


@pytest.mark.parametrize("way", [ENGINE, KERNEL, STAGED])
@pytest.mark.parametrize(("kind", "damage"), [("zeros", Zeros), ("stale", Stale), ("shifted", Shifted)])
def test_damage_is_found_in_every_way(way: str, kind: str, damage: type[Damaged]) -> None:
    made, wrong, heard = run(damage(way))
    assert (made, wrong) == (60, 2 * 3)  # rounds of that size; forth, back, and one of both
    found = heard.of("wrong")
    assert len(found) == peer.REPORTED
    assert {(where["how"], where["bytes"], where["kind"]) for where in found} == {(way, 4096, kind)}
    assert [(w["direction"], w["source"], w["target"]) for w in found[:3]] == [
        ("forth", 0, 1),
        ("back", 1, 0),
        ("both", 1, 0),
    ]
    # A damaged byte may by chance be what it should be.
    assert all(1000 <= where["first"] < 1008 and 1992 <= where["last"] < 2000 for where in found)
    assert all(where["source_sound"] for where in found)


def test_a_source_that_is_spoiled_is_not_blamed_on_the_link() -> None:
    _, _, heard = run(SourceSpoiled())
    assert not heard.of("wrong")[0]["source_sound"]


@pytest.mark.parametrize(("offset", "size"), [(-1, 257), (257, 257)])
def test_bytes_beside_the_destination_are_guarded(offset: int, size: int) -> None:
    class Beside(Damaged):
        def damage(self, copy: Copy, before: Any) -> None:
            place = copy[0].storage_offset() + offset
            copy[0].untyped_storage()[place] = copy[0].untyped_storage()[place] ^ 0x55

    _, wrong, heard = run(Beside(size=size))
    assert wrong == 6
    assert {(where["first"], where["last"], where["count"]) for where in heard.of("wrong")} == {(offset, offset, 1)}


def test_both_directions_are_asked_for_at_once_and_more_than_once() -> None:
    seen: set[tuple[str, int, int]] = set()

    class Counting(Link):
        def copy(self, copies: Sequence[Copy], how: str, *, times: int = 1) -> None:
            seen.add((how, len(copies), times))
            super().copy(copies, how, times=times)

    run(Counting("cpu"))
    assert {(KERNEL, 1, 1), (KERNEL, 2, 4), (ENGINE, 2, 4), (STAGED, 2, 1)} <= seen
