"""A module of further backends, as ``SM120_BACKENDS`` names them: weight-only ones, one of them less precise."""

from sm120_cells.backends.pipeline import PipelineDense, PipelineMoe
from sm120_cells.backends.torch_dequant import DequantisedProduct
from sm120_cells.bounds import SEQUENTIAL_FP32, Accumulation
from sm120_cells.cases import Format

_W4A16: frozenset[Format] = frozenset({"bf16"})
_BF16_PARTIALS = Accumulation(1, 2.0**-24, splits=4, partial="bf16", atomics=True)

DENSE = [
    PipelineDense("weight_only", _W4A16, DequantisedProduct(), SEQUENTIAL_FP32, servable=True),
    PipelineDense("less_precise", _W4A16, DequantisedProduct(), _BF16_PARTIALS),
]
MOE = [
    PipelineMoe("weight_only", _W4A16, DequantisedProduct(), SEQUENTIAL_FP32, servable=True),
    PipelineMoe("less_precise", _W4A16, DequantisedProduct(), _BF16_PARTIALS),
]
