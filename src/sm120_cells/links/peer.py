"""Copies between two GPUs, in each direction and in both at once, compared on the host."""

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sm120_cells.links import pattern
from sm120_cells.links.link import ENGINE, KERNEL, STAGED, Copy, Link
from sm120_cells.links.tell import Tell

GUARD: Final = 64  # bytes before and behind the destination that no copy may touch
REPORTED: Final = 4  # wrong copies that are described; all are counted
_AT_ONCE: Final = 4  # copies in a row each way, so that both directions really meet
_TIMED: Final = 5
DIRECTIONS: Final = (("forth", ((0, 1),)), ("back", ((1, 0),)), ("both", ((0, 1), (1, 0))))


def check(link: Link, request: Mapping[str, Any], tell: Tell) -> tuple[int, int]:
    """All copies between devices 0 and 1: how many were made, and how many of them were wrong."""
    direct = [link.direct(0, 1), link.direct(1, 0)]
    kinds = (ENGINE, KERNEL, STAGED) if all(direct) else (ENGINE, STAGED)
    tell.ready()
    tell.say("pair", direct=all(direct))
    made = wrong = 0
    seeds = itertools.count(1 + 2 * int(request["seed"]))
    for how, (size, rounds) in itertools.product(kinds, request["sizes"]):
        for turn, (name, ways) in itertools.product(range(rounds), DIRECTIONS):
            tell.at(f"{how} copy, {name}, {size} bytes, round {turn}")
            for found in _round(link, how, size, ways, seeds):
                made += 1
                if found is not None:
                    wrong += 1
                    if wrong <= REPORTED:
                        tell.wrong(how=how, direction=name, bytes=size, round=turn, **found)
    tell.at("timing copies")
    tell.say("bandwidth", by=_bandwidths(link, int(request["timed"])))
    return made, wrong


def _round(
    link: Link, how: str, size: int, ways: tuple[tuple[int, int], ...], seeds: Iterator[int]
) -> Iterator[dict[str, Any] | None]:
    """One copy each way, made at the same time; what is wrong with each."""
    numbers = [(next(seeds), next(seeds)) for _ in ways]
    buffers, copies = [], list[Copy]()
    for (source, target), (own, old) in zip(ways, numbers, strict=True):
        block = pattern.device_bytes(size, own, link.device(source))
        buffer = pattern.device_bytes(size + 2 * GUARD, old, link.device(target))
        buffers.append(buffer)
        copies.append((buffer[GUARD : GUARD + size], block))
    link.copy(copies, how, times=_AT_ONCE if len(ways) > 1 and how != STAGED else 1)
    for (source, target), (own, old), buffer, (_, block) in zip(ways, numbers, buffers, copies, strict=True):
        stale = pattern.host_bytes(size + 2 * GUARD, old)
        expected = stale.copy()
        expected[GUARD : GUARD + size] = pattern.host_bytes(size, own)
        found = pattern.difference(expected, stale, _on_host(buffer))
        if found is not None:
            sound = bool(np.array_equal(_on_host(block), pattern.host_bytes(size, own)))
            places = {"first": found["first"] - GUARD, "last": found["last"] - GUARD}
            found |= {"source": source, "target": target, "source_sound": sound, **places}
        yield found


def _on_host(tensor: Tensor) -> pattern.Bytes:
    array: pattern.Bytes = tensor.cpu().numpy()
    return array


def _bandwidths(link: Link, size: int) -> dict[str, float]:
    """Bytes a second of copies by the copy engines, by direction; of both at once, the sum."""
    found = {}
    for name, ways in DIRECTIONS:
        copies = [
            (torch.empty(size, dtype=torch.uint8, device=link.device(target)), _zeros(link, size, source))
            for source, target in ways
        ]
        link.copy(copies, ENGINE)
        started = time.perf_counter()
        link.copy(copies, ENGINE, times=_TIMED)
        found[name] = _TIMED * size * len(ways) / (time.perf_counter() - started)
    return found


def _zeros(link: Link, size: int, index: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=link.device(index))
