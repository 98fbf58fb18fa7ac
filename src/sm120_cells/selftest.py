"""The judge is itself judged: every fault of the catalogue must be caught, every right variant accepted."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sm120_cells import criteria
from sm120_cells.bounds import Accumulation, MoeRecipe
from sm120_cells.cases import Activation, DenseCase, Format, MoeCase
from sm120_cells.evaluate import evaluate
from sm120_cells.faults import Mutant
from sm120_cells.judge import Finding
from sm120_cells.plan import dense_inapplicable, moe_inapplicable
from sm120_cells.probes import DenseOperands, MoeOperands, dense_operands, moe_operands, to_device
from sm120_cells.reference import Expected, dense_reference, moe_reference
from sm120_cells.subjects import DenseSubject, MoeSubject, Subject

_CPU = torch.device("cpu")
DENSE_SWEEP = tuple(range(141))
MOE_SWEEP = tuple(range(19))
_CLAMPED = Activation(limit=2.0, alpha=1.702, beta=1.0)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the judge said of one mutant, and what the published criteria would have said (True: accepts)."""

    mutant: Mutant
    caught: bool
    tiers: tuple[str, ...]
    first: Finding | None
    eta: float
    criteria: dict[str, bool]
    cells: int
    seconds: float

    @property
    def right(self) -> bool:
        """A fault was caught, or a right variant accepted."""
        return self.caught == (self.mutant.kind == "fault")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; an infinite eta is null."""
        return {
            "name": self.mutant.name,
            "operation": self.mutant.operation,
            "kind": self.mutant.kind,
            "source": self.mutant.source,
            "caught": self.caught,
            "tiers": list(self.tiers),
            "first": None if self.first is None else self.first.to_json(),
            "eta": self.eta if self.eta < float("inf") else None,
            "criteria": self.criteria,
            "cells": self.cells,
            "seconds": self.seconds,
        }


def dense_cases(seed: int, format_: Format) -> Sequence[DenseCase]:
    """Small shapes, but all conditions: dense sweep, tails in M, N and K, full-range scales, repeats."""

    def case(probe: Any, n: int, k: int, ms: tuple[int, ...], spread: Any = "normal") -> DenseCase:
        return DenseCase(probe, n, k, ms, format_, spread, seed)

    return [
        case("exact", 136, 256, DENSE_SWEEP),
        case("exact", 200, 336, (130,)),  # K/16 = 21: a padded column of block scales
        case("unit", 136, 1024, (40,)),
        case("readback", 136, 256, (256,)),
        case("bound", 264, 512, (150,)),
        case("bound", 136, 512, (70,), "span"),
        case("bound", 136, 512, (70,), "rows"),
        case("bound", 136, 512, (70,), "saturated"),
        case("repeat", 136, 128, (16,)),
    ]


def moe_cases(seed: int, format_: Format) -> Sequence[MoeCase]:
    """Small shapes, but all conditions: dense sweep, every routing, clamped activation, repeats."""

    def case(probe: Any, tokens: tuple[int, ...], **more: Any) -> MoeCase:
        scaling = 2.5 if probe in ("bound", "onehot") else 2.0
        return MoeCase(probe, tokens, 256, 128, 6, 2, routed_scaling=scaling, format=format_, seed=seed, **more)

    return [
        case("isolated", MOE_SWEEP),
        case("isolated", (40,), routing="one_expert"),
        case("isolated", (40,), routing="half_empty"),
        case("isolated", (40,), routing="minus_one"),
        case("exact", (40,)),
        case("bound", (48,)),
        case("bound", (48,), routing="minus_one"),
        case("bound", (48,), routing="skewed"),
        case("bound", (48,), spread="span"),
        case("bound", (48,), activation=_CLAMPED),
        case("onehot", (48,)),
        case("repeat", (3,)),
    ]


def judge_mutant(mutant: Mutant, seed: int, device: torch.device = _CPU) -> Judgement:
    """Run one mutant through all of its operation's cases, as the matrix runs a backend."""
    start = time.perf_counter()
    accepted = dict.fromkeys(criteria.CRITERIA, True)

    def watch(got: Tensor, expected: Expected) -> None:
        for name, says in criteria.accepts(got, expected.value).items():
            accepted[name] &= says

    outcomes = [evaluate(subject, expected, watch=watch) for subject, expected in _subjects(mutant, seed, device)]
    failed = [o for o in outcomes if o.verdict == "FAIL"]
    return Judgement(
        mutant,
        caught=bool(failed),
        tiers=tuple(sorted({f.tier for o in failed for f in o.findings})),
        first=failed[0].findings[0] if failed else None,
        eta=max((o.eta or 0.0 for o in outcomes), default=0.0),
        criteria=accepted,
        cells=len(outcomes),
        seconds=time.perf_counter() - start,
    )


def _subjects(mutant: Mutant, seed: int, device: torch.device) -> Iterator[tuple[Subject, Expected]]:
    if mutant.dense is not None:
        dense = mutant.dense(seed)
        for case in dense_cases(seed, next(iter(dense.formats))):
            if dense_inapplicable(dense, case) is None:
                operands = _dense_operands(case, device)
                yield DenseSubject(case, operands, dense), _dense_expected(case, dense.accumulation(case), device)
    if mutant.moe is not None:
        moe = mutant.moe(seed)
        for moe_case in moe_cases(seed, next(iter(moe.formats))):
            if moe_inapplicable(moe, moe_case) is None:
                expected = _moe_expected(moe_case, moe.recipe(moe_case), device)
                yield MoeSubject(moe_case, _moe_operands(moe_case, device), moe), expected


# Operands and references are the same for all mutants of a seed.


@lru_cache(maxsize=64)
def _dense_operands(case: DenseCase, device: torch.device) -> DenseOperands:
    return to_device(dense_operands(case), device)


@lru_cache(maxsize=64)
def _moe_operands(case: MoeCase, device: torch.device) -> MoeOperands:
    return to_device(moe_operands(case), device)


@lru_cache(maxsize=64)
def _dense_expected(case: DenseCase, accumulation: Accumulation, device: torch.device) -> Expected:
    return dense_reference(case, _dense_operands(case, device), accumulation)


@lru_cache(maxsize=64)
def _moe_expected(case: MoeCase, recipe: MoeRecipe, device: torch.device) -> Expected:
    return moe_reference(case, _moe_operands(case, device), recipe)
