"""Backends that behave badly, each in one way; and one that does not. Named by ``SM120_BACKENDS``."""

import os
import signal
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sm120_cells.backends import DenseInput, UnsupportedError
from sm120_cells.backends.pipeline import DensePipeline, MoePipeline, PipelineDense, PipelineMoe, Product
from sm120_cells.backends.torch_dequant import DequantisedProduct
from sm120_cells.bounds import SEQUENTIAL_FP32
from sm120_cells.cases import Format
from sm120_cells.nvfp4 import Quantized

_FP4: frozenset[Format] = frozenset({"fp4"})

NASTY = 'an "odd" one:\r\n\'\'\' and """ and \\ and {braces}\0'


class Doubled(DensePipeline):
    """Rows from the 17th on are doubled."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        del a
        out[16:] *= 2


class Rare(DensePipeline):
    """The 100th call is wrong."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        del a
        if self.calls == 100:
            out.zero_()


class Prints(DensePipeline):
    """Writes to stdout in every way that a library has."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        del out, a
        print('{"id": 1, "ok": true, "result": "printed"}')  # noqa: T201  # as a library does
        sys.__stdout__.write("through the first stdout\n")  # type: ignore[union-attr]  # there is one
        os.write(1, b'{"id": 1, "ok": true, "result": "written"}\n')
        os.system("echo from a child")


class NotANumber(DensePipeline):
    """One element is NaN, one infinite."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        if a.m:
            out[0, 0], out[-1, 1] = torch.nan, -torch.inf


class Raises(DensePipeline):
    """Raises what it is given, in the first call."""

    def __init__(self, weight: Quantized, product: Product, error: BaseException) -> None:
        super().__init__(weight, product)
        self.error = error

    def finish(self, out: Tensor, a: DenseInput) -> None:
        del out, a
        raise self.error


class RaisesEarly(DensePipeline):
    """Cannot be prepared."""

    def __init__(self, weight: Quantized, product: Product) -> None:
        del weight, product
        raise KeyError("w13_input_scale")


class Dies(DensePipeline):
    """Takes the process down."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        del out, a
        os.kill(os.getpid(), signal.SIGKILL)


class ReadsStdin(DensePipeline):
    """Asks a question, as a debugger would."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        del out, a
        if sys.stdin.read(1) or os.read(0, 1):
            raise RuntimeError("read what was meant for the door")


class SwappedHalves(MoePipeline):
    """Up first."""

    def split(self, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = super().split(gate_up)
        return up, gate


def _dense(name: str, kernel: Any) -> PipelineDense:
    return PipelineDense(name, _FP4, DequantisedProduct(), SEQUENTIAL_FP32, kernel)


DENSE = [
    _dense("right", DensePipeline),
    _dense("doubled", Doubled),
    _dense("rare", Rare),
    _dense("prints", Prints),
    _dense("nan", NotANumber),
    _dense("raises", partial(Raises, error=RuntimeError(NASTY))),
    _dense("raises-key", partial(Raises, error=KeyError("no such kernel"))),
    _dense("raises-type", partial(Raises, error=TypeError("unexpected keyword"))),
    _dense("raises-early", RaisesEarly),
    _dense("refuses", partial(Raises, error=UnsupportedError("needs compute capability 12.0"))),
    _dense("no-memory", partial(Raises, error=MemoryError("no 80 GiB left"))),
    _dense("dies", Dies),
    _dense("reads-stdin", ReadsStdin),
]
MOE = [
    PipelineMoe("right", _FP4, DequantisedProduct(), SEQUENTIAL_FP32),
    PipelineMoe("swapped", _FP4, DequantisedProduct(), SEQUENTIAL_FP32, SwappedHalves),
]
