"""Which cells a model's shapes call for on this device: subjects (backends and pairs) and their cases.

Three sizes: quick (a smoke test), default (what a benchmark may rest on) and full. A CPU takes fewer experts and tokens
than a GPU and says so: the arithmetic of a block does not depend on how many blocks there are, its addressing does.
"""

import fnmatch
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from sm120_cells.backends import DenseBackend, MoeBackend, dense_backends, moe_backends
from sm120_cells.bounds import Accumulation, MoeRecipe
from sm120_cells.cases import (
    Activation,
    BlockCase,
    Case,
    CaseError,
    DenseCase,
    Format,
    MoeCase,
    Routing,
    case_to_json,
    operation,
)
from sm120_cells.reference import EXACT_DENSE, EXACT_MOE
from sm120_cells.subjects import REPEATED

Profile = Literal["quick", "default", "full"]
PROFILES: tuple[Profile, ...] = ("quick", "default", "full")
EXACT_K = 512
"""The longest sum that the exact probe promises for any data (all codes and all mantissas of one binade)."""


class UnknownBackendError(ValueError):
    """A backend that is not offered; ``known`` are those that are."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"no backend is called {name!r}")
        self.known = tuple(known)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of each condition is run."""

    dense_sweep: int  # every M from 0 to here
    unit_sweep: int  # every M from 0 to here at each projection's real shape
    dense_ms: tuple[int, ...]  # and these there
    readback_rows: int
    columns: int  # of a projection, at most
    moe_sweep: int  # every number of tokens from 0 to here
    tokens: int
    experts: int  # at most
    routings: tuple[Routing, ...]
    spreads: bool
    all_real: bool  # every MoE condition at the model's own dimensions; else only two, the others at small ones


_NO_LIMIT = 1 << 20
_ALL: tuple[Routing, ...] = ("random", "one_expert", "half_empty", "minus_one", "skewed")
_CPU: dict[Profile, Size] = {
    "quick": Size(32, 0, (17,), 64, 512, 12, 8, 12, ("random",), spreads=False, all_real=False),
    "default": Size(160, 0, (1, 33), 256, 1024, 40, 16, 12, _ALL, spreads=True, all_real=False),
    "full": Size(640, 0, (1, 33, 129), 1024, 4096, 160, 48, 32, _ALL, spreads=True, all_real=True),
}
_GPU: dict[Profile, Size] = {
    "quick": Size(64, 64, (1, 33), 256, 2048, 32, 32, 64, ("random",), spreads=False, all_real=True),
    "default": Size(1024, 256, (1, 16, 33, 129, 2048, 3072), 4096, _NO_LIMIT, 256, 256, _NO_LIMIT, _ALL, True, True),
    "full": Size(
        4224,
        1024,
        (1, 2, 16, 33, 64, 129, 512, 2048, 3072, 4096),
        16384,
        _NO_LIMIT,
        1024,
        1024,
        _NO_LIMIT,
        _ALL,
        True,
        True,
    ),
}


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model's shapes on one rank, as the door brings them."""

    name: str
    hidden: int
    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int | None
    shared_gate: bool
    activation: Activation
    routed_scaling: float
    dense: tuple[tuple[str, int, int], ...]  # name, n, k

    def __post_init__(self) -> None:
        """Cases check their fields and name them; at full size they are never run."""
        moe = self.intermediate, self.experts, self.top_k
        MoeCase("bound", (1,), self.hidden, *moe, self.activation, self.routed_scaling)
        if self.shared_intermediate is not None:
            BlockCase(1, self.hidden, *moe, self.shared_intermediate, self.shared_gate)
        for name, n, k in self.dense:
            DenseCase("bound", n, k, (1,), projection=name)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Shapes":
        """Read MODEL; CaseError names what is missing or wrong."""
        try:
            moe = data["moe"]
            form = {k: v for k, v in moe["activation"].items() if k != "kind"}
            if moe["activation"].get("kind", "silu") != "silu":
                raise CaseError(f"activation {moe['activation']['kind']!r} is not supported; silu is")
            dense = tuple((d["name"], d["n"], d["k"]) for d in data["dense"])
            return cls(
                name=data["name"],
                hidden=data["hidden"],
                experts=moe["experts"],
                top_k=moe["top_k"],
                intermediate=moe["intermediate"],
                shared_intermediate=moe.get("shared_intermediate"),
                shared_gate=bool(moe.get("shared_gate", False)),
                activation=Activation(**form),
                routed_scaling=moe.get("routed_scaling", 1.0),
                dense=dense,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CaseError(f"not a model's shapes: {type(error).__name__}: {error}") from error


# --- what does not apply --------------------------------------------------------------------------------------------


def dense_inapplicable(backend: DenseBackend, case: DenseCase) -> str | None:
    """Why a probe says nothing about a backend; None where it does."""
    if case.probe in EXACT_DENSE and case.probe != "readback" and not backend.accumulation(case).fp32_partials:
        return "exact probes need FP32 partial sums, which this path does not keep"
    return None


def moe_inapplicable(backend: MoeBackend, case: MoeCase) -> str | None:
    """Why a probe says nothing about a backend; None where it does."""
    recipe = backend.recipe(case)
    if case.probe in EXACT_MOE and not (recipe.gemm1.fp32_partials and recipe.gemm2.fp32_partials):
        return "exact probes need FP32 partial sums, which this path does not keep"
    if case.probe == "exact" and not recipe.known:
        return "the exact probe with a dense down projection needs the recipe, which is not known"
    if case.probe in EXACT_MOE and case.activation.limit is not None:
        return "the clamped activation is not exact in FP32 for any input"
    return None


# --- cases ----------------------------------------------------------------------------------------------------------


def dense_cases(shapes: Shapes, size: Size, format_: Format, seed: int, *, exact: bool = True) -> Iterator[DenseCase]:
    """Cases of a dense backend for a model; exact: whether exact probes apply to it."""
    sweep = tuple(range(size.dense_sweep + 1))
    yield DenseCase("exact", 256, EXACT_K, sweep, format_, seed=seed)
    yield DenseCase("repeat" if exact else "repeat_bound", 256, EXACT_K, (32,), format_, seed=seed)
    seen: set[tuple[int, int]] = set()
    for name, full_n, k in shapes.dense:
        n = min(full_n, size.columns)
        if (n, k) in seen:
            continue
        seen.add((n, k))
        rows = min(size.readback_rows, k)
        ms = tuple(sorted({*range(size.unit_sweep + 1), *size.dense_ms}))
        yield DenseCase("unit", n, k, ms, format_, seed=seed, projection=name)
        yield DenseCase("readback", n, k, (rows,), format_, seed=seed, projection=name)
        yield DenseCase("bound", n, k, size.dense_ms, format_, seed=seed, projection=name)
        if size.spreads:
            for spread in ("span", "rows", "saturated"):
                ms = (size.dense_ms[1],)
                yield DenseCase("bound", n, k, ms, format_, spread, seed, projection=name)


def moe_cases(shapes: Shapes, size: Size, format_: Format, seed: int, *, exact: bool = True) -> Iterator[MoeCase]:
    """Cases of a MoE backend for a model; exact: whether exact probes apply to it."""
    experts = _experts(shapes, size)
    exact_scaling = 2.0 ** round(math.log2(shapes.routed_scaling))

    def case(probe: Any, tokens: tuple[int, ...], **more: Any) -> MoeCase:
        fields = {
            "hidden": shapes.hidden,
            "intermediate": shapes.intermediate,
            "experts": experts,
            "top_k": shapes.top_k,
            "activation": shapes.activation,
            "routed_scaling": exact_scaling if probe in EXACT_MOE else shapes.routed_scaling,
            "format": format_,
            "seed": seed,
        }
        return MoeCase(probe, tokens, **{**fields, **more})

    small = {"hidden": min(512, shapes.hidden), "intermediate": min(256, shapes.intermediate)}
    dimensions = {} if size.all_real else small
    real = dimensions if format_ == "bf16" else {}
    if shapes.activation.limit is None:
        yield case("isolated", tuple(range(size.moe_sweep + 1)), **small)
        yield case("repeat" if exact else "repeat_bound", (8,), **small)
        yield case("isolated", (size.tokens,), **real)
        if exact_down(shapes.intermediate):
            yield case("exact", (size.tokens,), **dimensions)
    else:
        yield case("bound", tuple(range(size.moe_sweep + 1)), **small)
        yield case("repeat_bound", (8,), **small)
    yield case("bound", (size.tokens,), **real)
    yield case("onehot", (size.tokens,), **dimensions)
    for routing in size.routings[1:]:
        yield case("bound", (size.tokens,), routing=routing, **dimensions)
        if shapes.activation.limit is None:
            yield case("isolated", (size.tokens,), routing=routing, **small)
    if size.spreads:
        yield case("bound", (size.tokens,), spread="span", **dimensions)


def _experts(shapes: Shapes, size: Size) -> int:
    return min(shapes.experts, max(size.experts, shapes.top_k))


def exact_down(intermediate: int) -> bool:
    """Whether a dense down projection over this many elements stays exact in FP32 (half of them are zero)."""
    return intermediate <= 2048


# --- subjects and cells ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One case of one subject, with what the reference needs to know of the backend."""

    subject: str
    case: Case
    declared: dict[str, Any]
    cost: float

    @property
    def id(self) -> str:
        """Unique and stable: what ``--only`` matches."""
        return f"{self.subject.replace(':', '/')}/{self.case.name}"

    def to_json(self) -> dict[str, Any]:
        """CELL of the door."""
        key = hashlib.sha256(f"{self.case.digest} {sorted(self.declared.items())}".encode()).hexdigest()[:20]
        return {
            "id": self.id,
            "subject": self.subject,
            "case": {**case_to_json(self.case), "declared": self.declared},
            "reference": f"{operation(self.case)}-{key}",
            "cost": self.cost,
        }


def _cost(backend_factor: float, calls: int, products: float) -> float:
    return calls * 1e-3 + backend_factor * calls * products / 2e10


def _factor(name: str) -> float:
    return 6.0 if name == "sm120_model" else 1.0


def _dense_cells(name: str, backend: DenseBackend, shapes: Shapes, size: Size, seed: int) -> Iterator[Cell]:
    for format_ in sorted(backend.formats, reverse=True):
        repeat = DenseCase("repeat", 256, EXACT_K, (32,), format_, seed=seed)
        for case in dense_cases(shapes, size, format_, seed, exact=dense_inapplicable(backend, repeat) is None):
            if dense_inapplicable(backend, case) is None:
                calls = 3 * len(case.ms) + (64 if case.probe in REPEATED else 6)
                cost = _cost(_factor(name), calls, sum(case.ms) / len(case.ms) * case.n * case.k)
                yield Cell(f"dense:{name}", case, {"dense": asdict(backend.accumulation(case))}, cost)


def _moe_cells(name: str, backend: MoeBackend, shapes: Shapes, size: Size, seed: int) -> Iterator[Cell]:
    for format_ in sorted(backend.formats, reverse=True):
        repeat = MoeCase("repeat", (8,), 512, 256, shapes.top_k, shapes.top_k, format=format_, seed=seed)
        for case in moe_cases(shapes, size, format_, seed, exact=moe_inapplicable(backend, repeat) is None):
            if moe_inapplicable(backend, case) is None:
                calls = 3 * len(case.tokens) + (64 if case.probe in REPEATED else 6)
                products = sum(case.tokens) / len(case.tokens) * case.top_k * 3 * case.hidden * case.intermediate
                cost = _cost(_factor(name), calls, products)
                yield Cell(f"moe:{name}", case, {"moe": asdict(backend.recipe(case))}, cost)


def _block_cell(moe: MoeBackend, dense: DenseBackend, shapes: Shapes, shared: int, size: Size, seed: int) -> Cell:
    case = BlockCase(
        tokens=size.tokens,
        hidden=shapes.hidden,
        intermediate=shapes.intermediate,
        experts=_experts(shapes, size),
        top_k=shapes.top_k,
        shared_intermediate=shared,
        shared_gate=shapes.shared_gate,
        activation=shapes.activation,
        routed_scaling=shapes.routed_scaling,
        format="fp4" if "fp4" in moe.formats else "bf16",
        seed=seed,
    )
    format_: Format = "fp4" if "fp4" in dense.formats else "bf16"
    gate_up, down = case.shared(format_)
    declared = {
        "moe": asdict(moe.recipe(case.routed)),
        "dense": asdict(dense.accumulation(gate_up)),
        "down": asdict(dense.accumulation(down)),
        "dense_format": format_,
    }
    products = size.tokens * 3 * shapes.hidden * (shapes.top_k * shapes.intermediate + shared)
    cost = _cost(max(_factor(moe.name), _factor(dense.name)), 5, products)
    return Cell(f"block:{moe.name}+{dense.name}", case, declared, cost)


def _chosen(known: Mapping[str, Any], names: Sequence[str] | None) -> list[str]:
    for name in names or ():
        if name not in known:
            raise UnknownBackendError(name, tuple(known))
    return [name for name in known if not names or name in names]


def make_plan(
    shapes: Shapes,
    profile: Profile,
    device: torch.device,
    seed: int = 0,
    *,
    operations: Sequence[str] = ("dense", "moe"),
    dense: Sequence[str] | None = None,
    moe: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Subjects, cells and what was reduced, as the door's plan. UnknownBackendError for a name that is not offered."""
    all_dense, all_moe = dense_backends(), moe_backends()
    dense_names = _chosen(all_dense, dense) if "dense" in operations else []
    moe_names = _chosen(all_moe, moe) if "moe" in operations else []
    subjects: list[dict[str, Any]] = []
    cells: list[Cell] = []
    for name in dense_names:
        reason = all_dense[name].unsupported(device)
        subjects.append(_subject(f"dense:{name}", None, name, reason, all_dense[name].servable))
        if reason is None:
            size = _size(profile, device, servable=all_dense[name].servable)
            cells += _dense_cells(name, all_dense[name], shapes, size, seed)
    for name in moe_names:
        reason = all_moe[name].unsupported(device)
        subjects.append(_subject(f"moe:{name}", name, None, reason, all_moe[name].servable))
        if reason is None:
            size = _size(profile, device, servable=all_moe[name].servable)
            cells += _moe_cells(name, all_moe[name], shapes, size, seed)
    if shapes.shared_intermediate is not None:
        for moe_name in moe_names:
            for dense_name in dense_names:
                one, other = all_moe[moe_name], all_dense[dense_name]
                reason = one.unsupported(device) or other.unsupported(device)
                servable = one.servable and other.servable
                block = _subject(f"block:{moe_name}+{dense_name}", moe_name, dense_name, reason, servable)
                subjects.append(block)
                if reason is None:
                    size = _size(profile, device, servable=servable)
                    cells.append(_block_cell(one, other, shapes, shapes.shared_intermediate, size, seed))
    if only:
        cells = [cell for cell in cells if any(fnmatch.fnmatchcase(cell.id, pattern) for pattern in only)]
    return {
        "subjects": subjects,
        "cells": [cell.to_json() for cell in cells],
        "reduced": _reduced(shapes, _size(profile, device, servable=False), device),
    }


def _size(profile: Profile, device: torch.device, *, servable: bool) -> Size:
    """Reference backends loop over experts in Python: on a GPU they take what a CPU takes at full size."""
    if device.type == "cpu":
        return _CPU[profile]
    return _GPU[profile] if servable else _CPU["quick" if profile == "quick" else "full"]


def _subject(id_: str, moe: str | None, dense: str | None, reason: str | None, servable: bool) -> dict[str, Any]:
    return {
        "id": id_,
        "operation": id_.partition(":")[0],
        "moe": moe,
        "dense": dense,
        "unsupported": reason,
        "servable": servable,
    }


def _reduced(shapes: Shapes, size: Size, device: torch.device) -> list[str]:
    """What differs from the model for reference backends, in words."""
    where = "a CPU" if device.type == "cpu" else "a reference backend"
    notes = []
    experts = _experts(shapes, size)
    if shapes.experts > experts:
        notes.append(f"experts {shapes.experts} -> {experts}: {where} takes fewer")
    widest = max((n for _, n, _ in shapes.dense), default=0)
    if widest > size.columns:
        notes.append(f"columns of a projection {widest} -> {size.columns}: {where} takes fewer")
    if device.type == "cpu":
        notes.append(f"tokens of a MoE case: {size.tokens}; dense sweep to M = {size.dense_sweep}")
    if shapes.activation.limit is not None:
        notes.append("exact MoE probes do not exist for a clamped activation: the interval reference judges alone")
    return notes


def declared_accumulation(declared: Mapping[str, Any], gemm: Literal["dense", "down"] = "dense") -> Accumulation:
    """The dense half of a cell's declaration; of a block's two GEMMs ``dense`` is gate and up."""
    return Accumulation(**declared[gemm])


def declared_recipe(declared: Mapping[str, Any]) -> MoeRecipe:
    """The MoE half of a cell's declaration."""
    fields = dict(declared["moe"])
    for gemm in ("gemm1", "gemm2"):
        fields[gemm] = Accumulation(**fields[gemm])
    return MoeRecipe(**fields)
