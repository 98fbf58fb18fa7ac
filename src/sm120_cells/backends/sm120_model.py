"""The arithmetic of SM120's block-scaled FP4 tensor cores, as MMA-Sim publishes it, in software: runs anywhere."""

from dataclasses import dataclass

from torch import Tensor

from sm120_cells import mma
from sm120_cells.backends.pipeline import Matrix, PipelineDense, PipelineMoe
from sm120_cells.bounds import NATIVE_FP4
from sm120_cells.cases import Format


@dataclass(frozen=True, slots=True)
class MmaProduct:
    """Product by a model of the tensor core's accumulation."""

    model: mma.MmaModel = mma.RTX_BLACKWELL

    def load(self, w: Matrix) -> Matrix:
        """Taken as it is."""
        return w

    def multiply(self, a: Matrix, w: Matrix) -> Tensor:
        """fp32 [M, N]."""
        if a.scales is None or w.scales is None:
            raise ValueError("the block-scaled MMA takes FP4 operands with block scales")
        return mma.mma_accumulate(a.values, a.scales, w.values, w.scales, model=self.model)


_FORMATS: frozenset[Format] = frozenset({"fp4"})
DENSE = [PipelineDense("sm120_model", _FORMATS, MmaProduct(), NATIVE_FP4)]
MOE = [PipelineMoe("sm120_model", _FORMATS, MmaProduct(), NATIVE_FP4)]
