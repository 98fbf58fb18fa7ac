"""From outputs to findings: what is wrong, under which condition, by how much and where.

Tiers: T0 structural, T1 exact, T2 derived bound, T3 metamorphic, T4 determinism. The judge never averages: one wrong
element of a million is a fault, and is named with its row, tile, expert and size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sm120_cells.bounds import eta
from sm120_cells.reference import Expected

Tier = Literal["T0", "T1", "T2", "T3", "T4"]
TILE = 128
WORST = 20
_MAP_TILES = 64
_MAP_ROWS = 4096
POISON = 0x7FE5
"""bf16 NaN bits that outputs are filled with beforehand; no arithmetic gives this payload, so it means 'unwritten'."""


@dataclass(frozen=True, slots=True)
class Element:
    """One wrong output element; ``got`` is None where it is not finite."""

    row: int
    col: int
    got: float | None
    want: float | None
    bound: float
    eta: float | None  # None: infinite (a bound of zero, or a result that is not finite)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. condition holds what is known of where it happens: m, rows, tile, expert, k_step, pattern …"""

    tier: Tier
    check: str
    message: str
    condition: Mapping[str, Any] = field(default_factory=dict)
    worst: tuple[Element, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "tier": self.tier,
            "check": self.check,
            "message": self.message,
            "condition": dict(self.condition),
            "worst": [element.to_json() for element in self.worst],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outputs against their reference: eta for each element (float64 [R, C])."""

    got: Tensor
    expected: Expected
    eta: Tensor

    @property
    def worst_eta(self) -> float:
        """Largest eta; 0 for an empty output."""
        return float(self.eta.max()) if self.eta.numel() else 0.0

    @property
    def wrong(self) -> Tensor:
        """Elements beyond their bound (bool [R, C])."""
        return self.eta > 1.0

    def worst(self) -> tuple[Element, ...]:
        """The worst elements, largest eta first."""
        count = min(WORST, int(self.wrong.sum()))
        ratio, index = self.eta.flatten().topk(count)
        columns = self.got.shape[1]
        got, want, bound = self.got.flatten(), self.expected.value.flatten(), self.expected.radius.flatten()
        return tuple(
            Element(i // columns, i % columns, _finite(got[i]), _finite(want[i]), float(bound[i]), _finite(r))
            for r, i in zip(ratio, index.tolist(), strict=True)
        )

    def tiles(self) -> Tensor:
        """Largest eta in each 128x128 tile."""
        rows, columns = self.eta.shape
        padded = torch.nn.functional.pad(self.eta, (0, -columns % TILE, 0, -rows % TILE))
        tiles: Tensor = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).amax((1, 3))
        return tiles

    def error_map(self) -> dict[str, Any]:
        """Largest eta in each 128x128 tile and each row (null: infinite), cut to a size that can be drawn."""
        rows, columns = self.eta.shape
        return {
            "rows": rows,
            "columns": columns,
            "tile": TILE,
            "tiles": [[_finite(v) for v in row] for row in self.tiles()[:_MAP_TILES, :_MAP_TILES]],
            "row_profile": [_finite(v) for v in self.eta.amax(1)[:_MAP_ROWS]],
        }


def compare(got: Tensor, expected: Expected) -> Comparison:
    """The eta of every element of ``got`` (bf16 [R, C]) on the reference's device."""
    return Comparison(got, expected, eta(got, expected.value, expected.radius))


def describe(comparison: Comparison, tier: Tier, check: str, condition: Mapping[str, Any]) -> Finding:
    """A finding for a comparison that has wrong elements: how many, where, what they look like."""
    wrong = comparison.wrong
    bad_rows = wrong.any(1).nonzero().flatten().tolist()
    bad_cols = wrong.any(0).nonzero().flatten().tolist()
    where: dict[str, Any] = {**condition, "rows": ranges(bad_rows)}
    if len(bad_rows) == 1:
        where["row"] = bad_rows[0]
    tiles = (comparison.tiles() > 1.0).nonzero().tolist()
    if len(tiles) == 1:
        where["tile"] = tiles[0]
    worst = comparison.worst()
    count, size = int(wrong.sum()), wrong.numel()
    message = (
        f"{count} of {size} elements are wrong, in rows {where['rows']} and columns {ranges(bad_cols)}; "
        f"largest error {_ratio(comparison.worst_eta)} times its bound"
    )
    return Finding(tier, check, f"{message}{_shape_of_error(comparison)}", where, worst)


def _shape_of_error(comparison: Comparison) -> str:
    """What the wrong elements have in common, where that is plain to see."""
    wrong = comparison.wrong
    got, want = comparison.got.double()[wrong], comparison.expected.value[wrong]
    if bool(got.isnan().all()):
        return "; all of them are NaN"
    if bool((got == 0).all()) and bool((want != 0).any()):
        return "; all of them are zero"
    ratio = (got / want)[want != 0]
    if len(ratio) >= 4 and bool(got.isfinite().all()):
        middle = float(ratio.median())
        if abs(middle) > 1e-6 and bool(((ratio - middle).abs() <= 2.0**-6 * abs(middle)).all()):
            return f"; all of them are {middle:.4g} times what they should be"
    rows = wrong.any(1)
    if bool(wrong[rows].float().mean() > 0.5):
        source = _rows_of_others(comparison, rows.nonzero().flatten()[:8])
        if source:
            return f"; row {source[0]} holds what row {source[1]} should hold"
    return ""


def _rows_of_others(comparison: Comparison, rows: Tensor) -> tuple[int, int] | None:
    value, radius = comparison.expected.value, comparison.expected.radius
    for row in rows.tolist():
        fits = ((comparison.got[row].double() - value).abs() <= radius).all(1)
        fits[row] = False
        if bool(fits.any()) and bool((value[row] != 0).any()):
            return row, int(fits.nonzero()[0])
    return None


def unwritten(out: Tensor) -> int:
    """How many elements of a bf16 output still hold the poison."""
    return int((out.contiguous().view(torch.int16) == _poison_bits()).sum())


def poisoned(rows: int, columns: int, device: torch.device) -> Tensor:
    """A bf16 buffer full of poison."""
    bits = torch.full((rows, columns), _poison_bits(), dtype=torch.int16, device=device)
    return bits.view(torch.bfloat16)


def is_poison(buffer: Tensor) -> bool:
    """Whether a bf16 buffer still holds nothing but poison."""
    return bool((buffer.view(torch.int16) == _poison_bits()).all())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bit-equality of two bf16 tensors (NaN equals itself, -0 differs from 0)."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equality of two bf16 tensors (NaN equals itself, -0 equals 0)."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _poison_bits() -> int:
    return POISON - (1 << 16) if POISON >= 1 << 15 else POISON


def ranges(numbers: Sequence[int]) -> str:
    """``[1, 2, 3, 7]`` → ``"1-3, 7"``, cut where it gets long."""
    parts: list[str] = []
    start = previous = None
    for number in [*sorted(numbers), None]:
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if start is not None and previous is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ", ".join(parts[:12]) + (f", … ({len(numbers)} in all)" if len(parts) > 12 else "")


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _ratio(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "infinitely many"
