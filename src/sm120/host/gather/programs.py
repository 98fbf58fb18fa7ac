"""Programs and what they say their version is."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sm120 import errors, process
from sm120.host.facts import Tool, Version2
from sm120.host.gather.text import version2

SECONDS = 15.0  # for one program to say its version
_AT_ONCE = 8
_TOOLS = (
    *("nvcc", "ptxas", "cuobjdump", "nvdisasm", "nvidia-smi", "gcc", "g++", "cc", "ld"),
    *("cmake", "ninja", "make", "git", "ccache", "uv"),
)
T = TypeVar("T")
S = TypeVar("S")


def tools(env: Mapping[str, str]) -> tuple[Tool, ...]:
    """Each tool on PATH, or else beside the toolkit's own Python; ``path`` is None where there is none."""
    return tuple(each(_tool, [(name, env) for name in _TOOLS]))


def each(work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Work on all items, several at once, in their order. An interrupt waits for the children that are running."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(work, items))


def output(argv: list[str], env: Mapping[str, str] | None = None, seconds: float = SECONDS) -> tuple[str, str | None]:
    """What a program prints, and in words why it failed. Its last lines only, in English."""
    environment = {**(os.environ if env is None else env), "LC_ALL": "C"}
    try:
        done = process.run(argv, env=environment, timeout=seconds, grace=1.0)
    except errors.PreflightError as error:
        return "", error.message
    text = "\n".join(done.tail)
    if done.timed_out:
        return text, f"{argv[0]} did not end within {seconds:g} s"
    if done.returncode:
        last = next((line.strip() for line in reversed(done.tail) if line.strip()), "no output")
        return text, f"{argv[0]} ended with {done.returncode}: {last[:300]}"
    return text, None


def version(text: str) -> str | None:
    """The version in what ``--version`` printed.

    NVIDIA's compilers say ``release 13.0, V13.0.88``; others have it first in a line, outside of the parentheses in
    which distributions put their own.
    """
    found = re.search(r"\brelease [\d.]+, V([\d.]+)", text)
    if found:
        return found[1]
    for line in text.splitlines():
        plain = re.search(r"(?<![\w.])v?(\d+(?:\.\d+)+)", re.sub(r"\([^()]*\)", " ", line))
        if plain:
            return plain[1]
    return None


def cuda_release(program: Path) -> tuple[Version2 | None, str | None]:
    """The CUDA version of nvcc or ptxas, and in words why it has none."""
    text, failure = output([str(program), "--version"])
    release = version2(version(text))
    if release is None and failure is None:
        failure = f"{program} --version names no version"
    return release, failure


def _tool(item: tuple[str, Mapping[str, str]]) -> Tool:
    name, env = item
    path = shutil.which(name, path=env.get("PATH", "")) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        return Tool(name=name)
    text, _ = output([path, "--version"], env)
    return Tool(name=name, path=path, version=version(text))
