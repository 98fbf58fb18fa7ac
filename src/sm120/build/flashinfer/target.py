"""The environment that a server has: it decides FlashInfer's flags, and the folder in which it looks for modules."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm120.build.options import dotted

LIST = "FLASHINFER_CUDA_ARCH_LIST"
BASE = "FLASHINFER_WORKSPACE_BASE"
# They change how ninja's output reads, or how many jobs run, and not what is compiled.
_NOT_OURS = ("NINJA_STATUS", "FORCE_COLOR", "CLICOLOR_FORCE", "MAX_JOBS")


@dataclass(frozen=True, kw_only=True)
class Target:
    architecture: str  # as nvcc says it: 120a
    listed: str  # as FlashInfer's variable says it: 12.0a
    served: bool  # a server on this machine uses this folder

    @property
    def sm(self) -> str:
        """As FlashInfer's functions say it: 120."""
        return self.architecture.rstrip("af")


def target(architecture: str, variables: Mapping[str, str]) -> Target:
    """The stack's own list where it has the architecture: the server's folder is named after the whole list."""
    own = dotted(architecture)
    listed = variables.get(LIST, "").split()
    served = bool({own, f"{own.rstrip('af')}f"} & set(listed))
    return Target(architecture=architecture, listed=" ".join(listed) if served else own, served=served)


def workspace(variables: Mapping[str, str]) -> Path:
    return Path(variables[BASE])


def environment(variables: Mapping[str, str], aimed: Target, base: Path, jobs: int) -> dict[str, str]:
    """Of a process of the stack, as a server has it: each flag that differs would make the server compile again."""
    known = {name: value for name, value in {**os.environ, **variables}.items() if name not in _NOT_OURS}
    return {
        **known,
        LIST: aimed.listed,
        BASE: str(base),
        "MAX_JOBS": str(jobs),
        "LC_ALL": "C.UTF-8",  # errors are found by their English words
        "NO_COLOR": "1",
    }
