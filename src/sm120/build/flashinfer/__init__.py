"""FlashInfer's JIT modules, compiled ahead of time into the cache that the server uses.

FlashInfer is asked in the stack's Python (``inside.py``), and builds by its own means: its lock, ninja and folders.
"""

from sm120.build.flashinfer.command import build_flashinfer
from sm120.build.flashinfer.making import BuiltModule, build
from sm120.build.flashinfer.modules import Fault, Module, modules
from sm120.build.flashinfer.planning import Planned, State, plan

__all__ = ["BuiltModule", "Fault", "Module", "Planned", "State", "build", "build_flashinfer", "modules", "plan"]
