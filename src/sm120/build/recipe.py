"""What decides the bytes of a wheel, and nothing else: its hash names the wheel.

How many jobs compiled it, on which machine and when, is not in it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sm120.build.patches import Outcome

SCHEMA = 1
_SHORT = 10  # digits of the hash in a version


@dataclass(frozen=True, kw_only=True)
class Recipe:
    component: str
    content: str  # SHA-256 of the component's folder before the patches
    commit: str | None
    dirty: bool  # the folder differs from the commit
    series: str  # SHA-256 of the patch series
    patches: tuple[Outcome, ...]
    changes: str  # SHA-256 of what the patches change in this tree
    dependencies: Mapping[str, str]  # name → commit, or SHA-256 of the archive or folder
    architectures: tuple[str, ...]  # 120a
    python: str  # "3.11": of the interpreter that the modules are linked for
    torch: str
    cuda: str
    nvcc: str
    cxx: str
    cmake: str
    flags: Mapping[str, str] = field(default_factory=dict)  # CMake definitions beside the tree's own

    @cached_property
    def identity(self) -> str:
        return hashlib.sha256(json.dumps(self._deciding(), sort_keys=True).encode()).hexdigest()

    @property
    def tag(self) -> str:
        """The local part of the wheel's version."""
        return f"sm120.{self.identity[:_SHORT]}"

    def record(self) -> dict[str, object]:
        """What the wheel says of itself. Holds no path and no time: the same build gives the same bytes."""
        patches = [
            {"patch": outcome.patch, "state": str(outcome.state), "reason": outcome.reason} for outcome in self.patches
        ]
        left_out = sorted({target for outcome in self.patches for target in outcome.left_out})
        return {
            "schema": SCHEMA,
            "identity": self.identity,
            **self._deciding(),
            "patches": patches,
            "left_out": left_out,
        }

    def _deciding(self) -> dict[str, object]:
        return {
            "component": self.component,
            "content": self.content,
            "commit": self.commit,
            "dirty": self.dirty,
            "series": self.series,
            "changes": self.changes,
            "dependencies": dict(sorted(self.dependencies.items())),
            "architectures": list(self.architectures),
            "python": self.python,
            "torch": self.torch,
            "cuda": self.cuda,
            "nvcc": self.nvcc,
            "cxx": self.cxx,
            "cmake": self.cmake,
            "flags": dict(sorted(self.flags.items())),
        }
