"""Dense backends for the matrix, loaded by path through SM120_BACKENDS: each fails in its own way at M = 5."""

import os
import signal
import time

from torch import Tensor

from sm120_cells.backends import DenseInput
from sm120_cells.backends.pipeline import DensePipeline, PipelineDense
from sm120_cells.backends.torch_dequant import DequantisedProduct
from sm120_cells.bounds import SEQUENTIAL_FP32


class Killed(DensePipeline):
    def finish(self, out: Tensor, a: DenseInput) -> None:
        if a.m == 5:
            os.kill(os.getpid(), signal.SIGKILL)


class Hangs(DensePipeline):
    def finish(self, out: Tensor, a: DenseInput) -> None:
        if a.m == 5:
            time.sleep(3600)


class WritesNan(DensePipeline):
    def finish(self, out: Tensor, a: DenseInput) -> None:
        if a.m == 5:
            out[2, 3] = float("nan")


DENSE = [
    PipelineDense(name, frozenset({"fp4"}), DequantisedProduct(), SEQUENTIAL_FP32, kernel)
    for name, kernel in (("killed", Killed), ("hangs", Hangs), ("writes_nan", WritesNan), ("fine", DensePipeline))
]
