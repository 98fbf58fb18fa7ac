"""What a fault is made of: a right kernel with one stage overridden, and a place chosen by the seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from sm120_cells import mma
from sm120_cells.backends import DenseBackend, MoeBackend
from sm120_cells.backends.pipeline import DensePipeline, MoePipeline, PipelineDense, PipelineMoe, Product
from sm120_cells.backends.sm120_model import MmaProduct
from sm120_cells.bounds import NATIVE_FP4
from sm120_cells.cases import Format, MoeCase
from sm120_cells.nvfp4 import Quantized
from sm120_cells.probes import MoeWeights

FP4: frozenset[Format] = frozenset({"fp4"})


@dataclass(frozen=True, slots=True)
class Mutant:
    """One entry of the catalogue. source: the report or experiment that it stands for. make: from a seed."""

    name: str
    kind: Literal["fault", "right"]
    source: str
    dense: Callable[[int], DenseBackend] | None = None
    moe: Callable[[int], MoeBackend] | None = None

    @property
    def operation(self) -> Literal["dense", "moe"]:
        """Which operation it is a backend of."""
        return "dense" if self.dense is not None else "moe"


def _pick(seed: int, label: object, count: int) -> int:
    return random.Random(f"{seed} {label}").randrange(count)  # reproducible places, not secrets


class DenseFault(DensePipeline):
    """A dense kernel with one stage wrong."""

    model = mma.RTX_BLACKWELL

    def __init__(self, weight: Quantized, product: Product, seed: int) -> None:
        self.seed = seed
        super().__init__(weight, product)

    def pick(self, label: object, count: int) -> int:
        """A place below ``count``: the same for the same seed and label."""
        return _pick(self.seed, label, count)


class MoeFault(MoePipeline):
    """A fused MoE kernel with one stage wrong."""

    model = mma.RTX_BLACKWELL

    def __init__(self, experts: MoeWeights, case: MoeCase, product: Product, seed: int) -> None:
        self.seed = seed
        super().__init__(experts, case, product)

    def pick(self, label: object, count: int) -> int:
        """A place below ``count``: the same for the same seed and label."""
        return _pick(self.seed, label, count)


def dense_fault(catalogue: list[Mutant], name: str, source: str) -> Callable[[type[DenseFault]], type[DenseFault]]:
    """Enter a class into a catalogue."""

    def enter(kernel: type[DenseFault]) -> type[DenseFault]:
        def make(seed: int) -> DenseBackend:
            return PipelineDense(name, FP4, MmaProduct(kernel.model), NATIVE_FP4, partial(kernel, seed=seed))

        catalogue.append(Mutant(name, "fault", source, dense=make))
        return kernel

    return enter


def moe_fault(catalogue: list[Mutant], name: str, source: str) -> Callable[[type[MoeFault]], type[MoeFault]]:
    """Enter a class into a catalogue."""

    def enter(kernel: type[MoeFault]) -> type[MoeFault]:
        def make(seed: int) -> MoeBackend:
            return PipelineMoe(name, FP4, MmaProduct(kernel.model), NATIVE_FP4, partial(kernel, seed=seed))

        catalogue.append(Mutant(name, "fault", source, moe=make))
        return kernel

    return enter
