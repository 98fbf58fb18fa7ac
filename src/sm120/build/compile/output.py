"""What the lines of a build say, beside ninja's own."""

import re
from enum import StrEnum

from sm120.build.compile.driver import MARK

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


class Stage(StrEnum):
    START = "start"
    CONFIGURE = "configure"
    COMPILE = "compile"
    INSTALL = "install"
    WHEEL = "wheel"


_STAGES = (
    ("*** Configuring", Stage.CONFIGURE),
    ("*** Building", Stage.COMPILE),
    ("*** Installing", Stage.INSTALL),
    ("*** Making", Stage.WHEEL),
)

_FACTS = {
    "cxx": re.compile(r"-- The CXX compiler identification is (.+)"),
    "nvcc": re.compile(r"-- The CUDA compiler identification is (.+)"),
    "torch": re.compile(r"-- Found Torch: (.+)"),
    "torch_cuda": re.compile(r"-- PyTorch: CUDA detected: (.+)"),
    "torch_flags": re.compile(r"-- Added CUDA NVCC flags for: (.+)"),
}


def plain(line: str) -> str:
    """Without colours: some projects ask their compiler for them."""
    return _ANSI.sub("", line)


def stage_of(line: str) -> Stage | None:
    return next((stage for start, stage in _STAGES if line.startswith(start)), None)


def marked(line: str) -> tuple[str, str] | None:
    """What our own driver says: ``wheel`` and its name, for example."""
    if not line.startswith(MARK):
        return None
    what, _, text = line.removeprefix(MARK).partition(" ")
    return what, text


def fact(line: str) -> tuple[str, str] | None:
    """What CMake found, by name."""
    for name, pattern in _FACTS.items():
        match = pattern.fullmatch(line)
        if match:
            return name, match[1].strip()
    return None
