"""All-reduces whose sums are exact in every order, compared on the host by every rank; then their times."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch lists no exports

from sm120_cells.links import pattern
from sm120_cells.links.link import Link
from sm120_cells.links.tell import Tell

Floats = npt.NDArray[np.float32]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MOST_RANKS: Final = 16  # bfloat16 holds whole numbers up to 256: 16 ranks add up to 8 * 16 + 15 * 16 / 2 = 248
REPORTED: Final = 4
_WARM_UP: Final = 5


def addends(count: int, seed: int) -> tuple[Floats, Floats]:
    """What all ranks have in common: values from -8 to 7, and signs."""
    words = pattern.host_words(count, seed)
    return (words & 15).astype(np.float32) - np.float32(8), (words >> 8 & 1).astype(np.float32) * 2 - 1


def own(common: tuple[Floats, Floats], rank: int) -> Floats:
    """A rank's input: no two ranks have the same, so that one taken twice and one left out shows in the sum."""
    values, signs = common
    return values + signs * np.float32(rank)


def total(common: tuple[Floats, Floats], world: int) -> Floats:
    """The sum of all ranks' inputs."""
    values, signs = common
    return values * np.float32(world) + signs * np.float32(world * (world - 1) // 2)


def check(link: Link, rank: int, request: Mapping[str, Any], tell: Tell) -> tuple[int, int]:
    """Joins, checks and times: how many sums were checked by this rank, and how many of them were wrong."""
    world = int(request["ranks"])
    if world > MOST_RANKS:
        raise ValueError(f"sums of {world} ranks are not exact in bfloat16; {MOST_RANKS} at most")
    tell.at("joining")
    store = FileStore(str(request["store"]), world)
    link.join(rank, world, store)
    tell.ready()
    made = wrong = 0
    for size, dtype, turn, found in _sums(link, rank, world, request, tell):
        made += 1
        if found is not None:
            wrong += 1
            if wrong <= REPORTED:
                tell.wrong(bytes=size, dtype=dtype, round=turn, **found)
    for size, calls in request["timed"]:
        tell.at(f"timing all-reduces of {size} bytes")
        tell.say("timing", bytes=size, **_time(link, size, calls, int(request["blocks"]), world))
    tell.at("leaving")
    _part(store, world)
    return made, wrong


def _sums(
    link: Link, rank: int, world: int, request: Mapping[str, Any], tell: Tell
) -> Iterator[tuple[int, str, int, dict[str, Any] | None]]:
    seed = int(request["seed"])
    device = link.device(rank)
    for size, dtype, rounds in request["sizes"]:
        count, last = size // DTYPES[dtype].itemsize, None
        for turn in range(rounds):
            tell.at(f"all-reduce of {size} bytes of {dtype}, round {turn}")
            seed += 1
            common = addends(count, seed)
            mine, expected = own(common, rank), total(common, world)
            tensor = torch.from_numpy(mine).to(DTYPES[dtype]).to(device)
            link.all_reduce(tensor)
            link.synchronize()
            yield size, dtype, turn, difference(expected, mine, last, tensor.float().cpu().numpy())
            last = expected


def difference(expected: Floats, mine: Floats, last: Floats | None, got: Floats) -> dict[str, Any] | None:
    """How a sum differs, or None. The kinds: ``zeros``, ``own`` (nothing was added), ``last round``, ``other``."""
    wrong = np.flatnonzero(expected != got)
    if not wrong.size:
        return None
    first, there = int(wrong[0]), got[wrong]
    kind = "other"
    if not there.any():
        kind = "zeros"
    elif np.array_equal(there, mine[wrong]):
        kind = "own"
    elif last is not None and np.array_equal(there, last[wrong]):
        kind = "last round"
    return {
        "first": first,
        "last": int(wrong[-1]),
        "count": int(wrong.size),
        "of": int(expected.size),
        "expected": float(expected[first]),
        "got": float(got[first]),
        "kind": kind,
    }


def _time(link: Link, size: int, calls: int, blocks: int, world: int) -> dict[str, Any]:
    """Seconds of one all-reduce of ``size`` bytes: median and 99th percentile of all, and the median of each block."""
    tensor: Tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=link.device(dist.get_rank()))
    link.time_all_reduce(tensor, min(_WARM_UP, calls))
    samples: list[Sequence[float]] = [link.time_all_reduce(tensor, calls) for _ in range(blocks)]
    every = np.concatenate([np.asarray(block) for block in samples])
    return {
        "ranks": world,
        "calls": len(every),
        "median": float(np.median(every)),
        "p99": float(np.quantile(every, 0.99)),
        "blocks": [float(np.median(block)) for block in samples],
    }


def _part(store: FileStore, world: int) -> None:
    """Waits for all: a rank that left early would take away memory that another still reads."""
    if store.add("left", 1) == world:
        store.set("all", "left")
    store.wait(["all"])
