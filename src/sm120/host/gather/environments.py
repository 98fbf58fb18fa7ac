"""The Python environments that hold a stack: those that ``setup`` made, and those that it adopted."""

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sm120 import errors, files, redact
from sm120.host.facts import Distribution, Environment, Torch, Wheel
from sm120.host.gather import programs
from sm120.host.gather.text import read, version2
from sm120.stack.install import record as records
from sm120.state import State

SECONDS = 180.0  # a first import compiles every module, on a slow disk for minutes
_ADOPTED = ".adopted.json"
_RELEVANT = re.compile(
    r"torch|nvidia|cuda|cudnn|nccl|flashinfer|sgl|triton|cutlass|tvm-ffi|deep-gemm|tilelang|quack|humming"
)
# Where this Python's packages lie: beside torch, or else where pip would put them.
_WHERE = """
import importlib.util, json, pathlib, platform, sysconfig
spec = importlib.util.find_spec("torch")
site = pathlib.Path(spec.origin).parents[1] if spec and spec.origin else sysconfig.get_path("purelib")
print("\\nsaid " + json.dumps([platform.python_version(), str(site)]))
"""
# torch.cuda.get_arch_list() is empty without a driver; what it reads there is not.
_TORCH = """
import json, torch
flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")()
print("\\nsaid " + json.dumps([str(torch.__version__), torch.version.cuda, flags.split()]))
"""


def environments(state: State, env: Mapping[str, str]) -> dict[str, Callable[[], Environment]]:
    """Name → what reads it, for all environments of the state folder. Reading one changes nothing in it."""
    folder = state.root / "env"
    found: dict[str, Callable[[], Environment]] = {}
    for config in sorted(folder.glob("*/pyvenv.cfg")):
        found[config.parent.name] = functools.partial(_managed, config.parent, env)
    for path in sorted(folder.glob(f"*{_ADOPTED}")):
        found[path.name.removesuffix(_ADOPTED)] = functools.partial(_adopted, path, env)
    return found


def wheels(state: State) -> tuple[Wheel, ...]:
    """The wheels that wait in the state folder."""
    from sm120.host.binaries import wheel_facts

    return tuple(wheel_facts(path) for path in sorted(state.wheels.glob("*/*.whl")))


def _managed(folder: Path, env: Mapping[str, str]) -> Environment:
    python, site = folder / "bin/python", records.site_packages(folder)
    record, problem = _record(folder / records.NAME)
    if not os.access(python, os.X_OK):
        problem = problem or f"its Python is gone: {os.path.realpath(python)}"
    if (folder / records.EXCHANGE).exists():
        problem = problem or "an exchange of its kernels was interrupted"
    config = re.search(r"^version(?:_info)?\s*=\s*([\d.]+)", read(folder / "pyvenv.cfg") or "", re.MULTILINE)
    return _environment(
        folder.name, python, site, env, python_version=config[1].rstrip(".") if config else None, record=record,
        problem=problem,
    )  # fmt: skip


def _adopted(path: Path, env: Mapping[str, str]) -> Environment:
    name = path.name.removesuffix(_ADOPTED)
    record, problem = _record(path)
    python = record.get("python")
    if not isinstance(python, str):
        return Environment(stack=name, python="", adopted=True, problem=problem or f"{path} names no Python")
    said, failure = _ask(Path(python), _WHERE, env, programs.SECONDS)
    if failure or len(said) != 2:
        return Environment(stack=name, python=python, adopted=True, problem=failure or "its Python says nothing")
    version, site = said
    return _environment(
        name, Path(python), Path(site), env, python_version=version, record=record, problem=problem, adopted=True
    )


def _record(path: Path) -> tuple[Mapping[str, Any], str | None]:
    """What ``setup`` wrote last: without it the installation was not finished."""
    if not path.exists():
        return {}, "its installation was not finished"
    if not path.is_file():  # a pipe would never answer
        return {}, f"{path} is not a file"
    try:
        content = files.read_json(path)
    except errors.UsageError as error:
        return {}, error.message
    return (content, None) if isinstance(content, dict) else ({}, f"{path} is damaged")


def _environment(
    name: str,
    python: Path,
    site: Path,
    env: Mapping[str, str],
    *,
    python_version: str | None,
    record: Mapping[str, Any],
    problem: str | None,
    adopted: bool = False,
) -> Environment:
    from sm120.host.binaries import clashes, kernel_libraries

    distributions = _distributions(site)
    ptxas = _triton_ptxas(site, env)
    return Environment(
        stack=name,
        python=str(python),
        python_version=python_version,
        site=str(site),
        adopted=adopted,
        distributions=distributions,
        torch=_torch(python, site, distributions, env),
        libraries=kernel_libraries(site, folders=_loader_folders(env)),
        clashes=clashes(site),
        triton_ptxas=programs.cuda_release(ptxas)[0] if ptxas else None,
        triton_ptxas_path=str(ptxas) if ptxas else None,
        locked=records.expected(record),
        problem=problem,
    )


def _loader_folders(env: Mapping[str, str]) -> tuple[Path, ...]:
    """Where the loader and the packages look besides the environment itself."""
    words = [word for word in env.get("LD_LIBRARY_PATH", "").split(":") if word]
    if home := env.get("CUDA_HOME"):
        words.append(f"{home}/lib64")
    return tuple(Path(word) for word in words)


def _distributions(site: Path) -> tuple[Distribution, ...]:
    """Every distribution by its METADATA; of its requirements those that name torch, CUDA or kernel packages."""
    found: list[Distribution] = []
    for folder in sorted(site.glob("*.dist-info")):
        if folder.name.startswith("~"):  # what pip left behind when it was interrupted
            continue
        header = (read(folder / "METADATA") or "").split("\n\n", 1)[0]
        fields = [(key, value.strip()) for key, _, value in (line.partition(":") for line in header.splitlines())]
        name = next((value for key, value in fields if key == "Name"), None)
        version = next((value for key, value in fields if key == "Version"), None)
        if name is None or version is None:  # a folder without METADATA still says both in its own name
            name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        requires = (value for key, value in fields if key == "Requires-Dist")
        relevant = tuple(value for value in requires if _RELEVANT.search(_required(value)))
        found.append(Distribution(name=canonicalize_name(name), version=version, requires=relevant))
    return tuple(found)


def _required(requirement: str) -> str:
    return canonicalize_name(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0])


def _torch(python: Path, site: Path, distributions: tuple[Distribution, ...], env: Mapping[str, str]) -> Torch | None:
    """What torch says of itself in a process of its own; when it cannot be imported, what its version file says."""
    text = read(site / "torch/version.py")
    named = next((d.version for d in distributions if d.name == "torch"), None)
    if text is None and named is None:
        return None
    said, failure = _ask(python, _TORCH, env, SECONDS)
    if failure is None and len(said) == 3:
        version, cuda, flags = said
        return Torch(version=version, cuda=version2(cuda), arch_list=tuple(flags))
    written = re.search(r"^__version__\s*(?::[^=\n]*)?=\s*['\"]([^'\"\n]+)", text or "", re.MULTILINE)
    cuda_line = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text or "", re.MULTILINE)
    return Torch(
        version=written[1] if written else named or "unknown",
        cuda=version2(cuda_line[1]) if cuda_line else None,
        problem=redact.redact(failure or "it said nothing"),
    )


def _ask(python: Path, program: str, env: Mapping[str, str], seconds: float) -> tuple[list[Any], str | None]:
    """What a program prints after ``said``, run by that Python; -B: an interpreter that was adopted is not changed."""
    text, failure = programs.output([str(python), "-I", "-B", "-c", program], env, seconds)
    line = next((line for line in reversed(text.splitlines()) if line.startswith("said ")), None)
    if failure is not None or line is None:
        return [], failure or f"{python} printed no answer"
    try:
        said = json.loads(line.removeprefix("said "))
    except ValueError:
        return [], f"{python} printed no answer"
    return (said, None) if isinstance(said, list) else ([], f"{python} printed no answer")


def _triton_ptxas(site: Path, env: Mapping[str, str]) -> Path | None:
    """The ptxas that Triton runs for a Blackwell card.

    Since 3.6 that is ptxas-blackwell where it comes with one, before that ptxas (triton/backends/nvidia/compiler.py).
    A variable puts another in its place.
    """
    folder = site / "triton/backends/nvidia/bin"
    for name, variable in (("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"), ("ptxas", "TRITON_PTXAS_PATH")):
        if (folder / name).exists():
            chosen = env.get(variable)
            return Path(chosen) if chosen and Path(chosen).exists() else folder / name
    return None
