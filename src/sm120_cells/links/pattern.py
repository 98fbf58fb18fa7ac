"""Bytes that tell where they come from, and what is wrong with those that arrived."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Bytes = npt.NDArray[np.uint8]

_FACTOR: Final = 0x9E3779B1  # odd, so that no two words of a pattern are equal before the mixing
_MIX: Final = 0x85EBCA6B
_WINDOW: Final = 32  # bytes by which a shifted block is known


def host_words(count: int, seed: int) -> npt.NDArray[np.uint32]:
    """The first ``count`` words of the pattern of ``seed``."""
    words = np.arange(count, dtype=np.uint32)
    words *= np.uint32(_FACTOR)
    words += np.uint32(_start(seed))
    words ^= words >> np.uint32(16)
    words *= np.uint32(_MIX)
    words ^= words >> np.uint32(15)
    return words


def device_words(count: int, seed: int, device: torch.device) -> Tensor:
    """`host_words`, computed on the device: int32 with the same bits."""
    words = torch.arange(count, dtype=torch.int32, device=device)
    words.mul_(_signed(_FACTOR)).add_(_signed(_start(seed)))
    words.bitwise_xor_(words.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    words.mul_(_signed(_MIX))
    words.bitwise_xor_(words.bitwise_right_shift(15).bitwise_and_(0x1FFFF))
    return words


def host_bytes(size: int, seed: int) -> Bytes:
    """``size`` bytes of the pattern."""
    return host_words(-(-size // 4), seed).view(np.uint8)[:size]


def device_bytes(size: int, seed: int, device: torch.device) -> Tensor:
    """`host_bytes`, computed on the device."""
    return device_words(-(-size // 4), seed, device).view(torch.uint8)[:size]


def _start(seed: int) -> int:
    return (seed * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def difference(expected: Bytes, stale: Bytes, got: Bytes) -> dict[str, Any] | None:
    """How ``got`` differs from ``expected``, or None: offset of the first wrong byte, count, last, and what is there.

    ``stale`` is what the destination held before. The kinds: ``zeros``, ``stale`` (never written), ``shifted`` (bytes
    of the right block in another place), ``other``.
    """
    wrong = np.flatnonzero(expected != got)
    if not wrong.size:
        return None
    first, there = int(wrong[0]), got[wrong]
    found: dict[str, Any] = {
        "first": first,
        "last": int(wrong[-1]),
        "count": int(wrong.size),
        "of": int(expected.size),
        "expected": expected[first : first + 8].tobytes().hex(),
        "got": got[first : first + 8].tobytes().hex(),
    }
    if not there.any():
        return found | {"kind": "zeros"}
    if np.array_equal(there, stale[wrong]):
        return found | {"kind": "stale"}
    window = got[first : first + _WINDOW].tobytes()
    place = expected.tobytes().find(window) if len(window) == _WINDOW else -1
    return found | ({"kind": "other"} if place < 0 else {"kind": "shifted", "by": first - place})
