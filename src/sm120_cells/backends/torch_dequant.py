"""Dequantise, then torch's own matrix product in fp32: runs anywhere, and is no one's choice for serving."""

from torch import Tensor

from sm120_cells.backends.pipeline import Matrix, PipelineDense, PipelineMoe
from sm120_cells.bounds import SEQUENTIAL_FP32
from sm120_cells.cases import Format


class DequantisedProduct:
    """fp32 product of dequantised operands; their element products are exact in fp32."""

    def load(self, w: Matrix) -> Tensor:
        """Dequantise once."""
        return w.dequantised()

    def multiply(self, a: Matrix, w: Tensor) -> Tensor:
        """fp32 [M, N]."""
        return a.dequantised() @ w.T


_FORMATS: frozenset[Format] = frozenset({"fp4", "bf16"})
DENSE = [PipelineDense("torch_dequant", _FORMATS, DequantisedProduct(), SEQUENTIAL_FP32)]
MOE = [PipelineMoe("torch_dequant", _FORMATS, DequantisedProduct(), SEQUENTIAL_FP32)]
