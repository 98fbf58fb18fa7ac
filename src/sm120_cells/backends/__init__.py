"""One way to run an operation, behind one small protocol an operation, named as SGLang's flag names it.

A backend is prepared once with weights as a checkpoint holds them and gives a kernel; the kernel is called with
activations in the layouts that FP4 kernels take. The judge knows nothing else of it. Further backends come from what
``SM120_BACKENDS`` names (separated by ``os.pathsep``): modules or files, each with lists ``DENSE`` and ``MOE``.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sm120_cells.bounds import Accumulation, MoeRecipe
from sm120_cells.cases import Case, DenseCase, Format, MoeCase
from sm120_cells.nvfp4 import Quantized
from sm120_cells.probes import MoeWeights

PLUGINS_VARIABLE = "SM120_BACKENDS"


class UnsupportedError(Exception):
    """The backend itself says that it cannot run this here: neither a pass nor a fault."""


@dataclass(frozen=True, slots=True)
class DenseInput:
    """Activations of a dense GEMM.

    W4A4: ``packed`` uint8 [M, K/2] and ``scales`` uint8 [Mp, Gp] in the 128x4 layout, padding included. W4A16:
    ``values`` bf16 [M, K]. Rows beyond M may follow in the same storage and hold anything.
    """

    packed: Tensor | None
    scales: Tensor | None
    values: Tensor | None
    m: int
    k: int


class DenseKernel(Protocol):
    """Writes ``alpha * A @ W.T`` (bf16 [M, N]) into ``out`` and returns it, or returns a tensor of its own."""

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor, /) -> Tensor: ...


class MoeKernel(Protocol):
    """Fused MoE of x bf16 [T, H] with ids int32 [T, top_k] (-1: not here) and weights fp32; result bf16 [T, H]."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor, /) -> Tensor: ...


class Backend(Protocol):
    """What backends of all operations have in common."""

    @property
    def name(self) -> str:
        """As SGLang's flag names it."""

    @property
    def formats(self) -> frozenset[Format]:
        """Activations that it takes."""

    @property
    def servable(self) -> bool:
        """Whether a server can be started with it; reference implementations cannot."""

    def unsupported(self, device: torch.device, case: Case | None = None) -> str | None:
        """Why it cannot run on this device, or not this case there; None where it can."""


class DenseBackend(Backend, Protocol):
    """A dense FP4 GEMM."""

    def accumulation(self, case: DenseCase) -> Accumulation:
        """How it sums: a property of the path that runs for this case."""

    def prepare(self, weight: Quantized) -> DenseKernel:
        """Weights [N, K] as a checkpoint holds them → a kernel."""


class MoeBackend(Backend, Protocol):
    """A fused MoE."""

    def recipe(self, case: MoeCase) -> MoeRecipe:
        """Every rounding on its way, for this case."""

    def prepare(self, experts: MoeWeights, case: MoeCase) -> MoeKernel:
        """Experts as a checkpoint holds them → a kernel for the case's activation and scaling."""


def plugins() -> list[str]:
    """Names of the modules that ``SM120_BACKENDS`` brings; a file is loaded under its own name."""
    names = []
    for word in os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep):
        path = Path(word)
        if path.suffix == ".py":
            _load(path)
            names.append(path.stem)
        elif word:
            names.append(word)
    return names


def _load(path: Path) -> None:
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if Path(getattr(loaded, "__file__", None) or "") != path:
            raise ImportError(f"{PLUGINS_VARIABLE}: {path} has the name of another module; rename it")
        return
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{PLUGINS_VARIABLE}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def _registered(kind: str) -> dict[str, object]:
    modules = ["sm120_cells.backends.torch_dequant", "sm120_cells.backends.sm120_model"]
    modules += plugins()
    found: dict[str, object] = {}
    for module in modules:
        backends: Sequence[object] = getattr(importlib.import_module(module), kind, ())
        for backend in backends:
            name = str(getattr(backend, "name"))  # noqa: B009  # the list's items are typed by the two callers
            if name in found:
                raise ValueError(f"two {kind.lower()} backends are called {name}; the second is in {module}")
            found[name] = backend
    return found


def dense_backends() -> dict[str, DenseBackend]:
    """All dense backends by name, in order."""
    return _registered("DENSE")  # type: ignore[return-value]  # modules' DENSE lists hold DenseBackend


def moe_backends() -> dict[str, MoeBackend]:
    """All MoE backends by name, in order."""
    return _registered("MOE")  # type: ignore[return-value]  # modules' MOE lists hold MoeBackend
