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

    def load(self, w: Matrix) -> mma.Prepared:
        """Taken apart once."""
        if w.scales is None:
            raise ValueError("the block-scaled MMA takes FP4 operands with block scales")
        return mma.prepare(w.values, w.scales)

    def multiply(self, a: Matrix, w: mma.Prepared) -> Tensor:
        """fp32 [M, N]."""
        return mma.accumulate(self.load(a), w, model=self.model)


_FORMATS: frozenset[Format] = frozenset({"fp4"})
DENSE = [PipelineDense("sm120_model", _FORMATS, MmaProduct(), NATIVE_FP4)]
MOE = [PipelineMoe("sm120_model", _FORMATS, MmaProduct(), NATIVE_FP4)]
