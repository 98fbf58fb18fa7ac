"""Whether what was installed is what the lock and the stack say, and whether it can be imported."""

import collections
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from sm120 import errors
from sm120.process import Completed
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack.install.record import distributions
from sm120.stack.lock import Lock
from sm120.stack.spec import Stack

PROVE_SECONDS = 600.0  # a first import compiles every module, on a slow disk for minutes
DRIVER = "libcuda.so.1"
_INDEXES = "look for an index, a constraint or a find-links folder that overrides it: pip config list"

# The whole chain of causes: what failed to load is often wrapped by what tried to load it.
_PROVE = """
import importlib, json, sys, traceback
name = sys.argv[1]
found = {}
try:
    module = importlib.import_module(name)
    found["version"] = str(getattr(module, "__version__", "unknown"))
    if name == "torch":
        found["file"] = str(module.__file__)
        found["cuda"] = module.version.cuda
        flags = getattr(module._C, "_cuda_getArchFlags", None)
        found["architectures"] = flags().split() if flags and flags() else None
except BaseException as error:
    traceback.print_exc()
    chain = []
    while error is not None and len(chain) < 5:
        chain.append([type(error).__name__, str(error)[-500:]])
        error = error.__cause__ or error.__context__
    found["chain"] = chain
print("\\nproved " + json.dumps(found))
"""


class Outcome(StrEnum):
    OK = "OK"
    SKIPPED = "SKIPPED"  # needs the driver, which this machine does not have: not run is not passed
    FAILED = "FAILED"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of importing one module in a process of its own."""

    module: str
    outcome: Outcome
    detail: str  # its version, or why not
    facts: Mapping[str, Any]  # what torch says of itself


def check_pins(stack: Stack, lock: Lock) -> None:
    """Raises BinaryError unless the lock has what the stack names, in a version that it asks for."""
    for package in stack.packages:
        file = lock.file(package.name)
        fits = file is not None and (package.git is not None or _fits(package.specifier, file.version))
        if not fits:
            raise errors.BinaryError(
                f"the stack {stack.name} says {package.requirement}, but its lock has"
                f" {f'{package.name} {file.version}' if file else 'no such package'}",
                where=str(stack.path),
                remedy=f"resolve anew: scripts/inv setup --stack {stack.name} --lock; and {_INDEXES}",
            )


def _fits(specifier: str, version: str) -> bool:
    """A local tag in the specifier is part of what is asked; one that only the version has is as good as none."""
    return SpecifierSet(specifier).contains(version, prereleases=True)


def check_versions(lock: Lock, site: Path) -> None:
    """Raises BinaryError unless exactly the lock's packages are installed, each once and in the locked version."""
    found = distributions(site)
    twice = [name for name, count in collections.Counter(name for name, _ in found).items() if count > 1]
    if twice:
        versions = ", ".join(version for name, version in found if name == twice[0])
        raise errors.BinaryError(f"{twice[0]} is installed more than once: {versions}", where=str(site))
    present, locked = dict(found), {file.name: file.version for file in lock.files}
    for name in sorted(present.keys() | locked.keys()):
        wanted, got = locked.get(name), present.get(name)
        if wanted is None or got is None or not _same(wanted, got):
            raise errors.BinaryError(
                f"the lock says {f'{name} {wanted}' if wanted else f'nothing of {name}'}, but"
                f" {f'{name} {got}' if got else 'nothing'} was installed",
                where=str(site),
                remedy="look for a wheel whose metadata contradict its file name; to resolve anew: add --lock to the"
                " setup command",
            )


def _same(one: str, other: str) -> bool:
    return Version(one) == Version(other) if _is_version(one) and _is_version(other) else one == other


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def check_torch(stack: Stack, lock: Lock, site: Path) -> None:
    """Raises BinaryError when torch's own record of its CUDA contradicts its local tag or the stack's CUDA.

    A stack whose torch is asked for as a CPU build may have a CUDA home beside it.
    """
    torch = lock.file("torch")
    if torch is None:
        return
    local = Version(torch.version).local
    if local is None and stack.cuda is None:
        return
    path = site / "torch" / "version.py"
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    found = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    if found is None:
        raise errors.BinaryError(f"{path} does not say which CUDA torch was built for", where=str(path))
    build = f"cu{found[1].replace('.', '')}" if found[1] else "cpu"
    remedy = "look for an index or a find-links folder that serves a mislabelled torch: pip config list"
    if local is not None and ((local == "cpu") != (build == "cpu") or (local.startswith("cu") and local != build)):
        raise errors.BinaryError(
            f"torch {torch.version} was asked for, but what was installed is a {build} build",
            where=str(path),
            remedy=remedy,
        )
    if stack.cuda is not None and local != "cpu" and found[1] != stack.cuda:
        raise errors.BinaryError(
            f"the stack {stack.name} is for CUDA {stack.cuda}, but torch {torch.version} is a {build} build",
            where=str(path),
            remedy=remedy,
        )


def prove(
    modules: Sequence[str], needs_driver: Sequence[str], python: Path, env: Mapping[str, str], run: Run, held: int
) -> list[Proof]:
    """Imports each module in a process of its own."""
    proofs = []
    log = run.log_path("prove")
    for module in (*modules, *needs_driver):
        argv = [str(python), "-I", "-c", _PROVE, module]
        done = run_process(argv, env=env, timeout=PROVE_SECONDS, log=log, pass_fds=(held,))
        run.record_command(done, env=env)
        proofs.append(judge(module, done, needs_driver=module in needs_driver))
    return proofs


def judge(module: str, done: Completed, *, needs_driver: bool) -> Proof:
    """The verdict on one import. SKIPPED only where the driver's library is the one thing that was missing."""
    last = next((line for line in reversed(done.tail) if line.startswith("proved ")), None)
    found: dict[str, Any] = json.loads(last.removeprefix("proved ")) if last else {}
    chain = found.get("chain")
    if chain:
        missing = set(
            re.findall(r"(\blib[\w.+-]*\.so[\w.]*): cannot open shared object", " ".join(t for _, t in chain))
        )
        if needs_driver and missing == {DRIVER}:
            why = f"needs {DRIVER}, which comes with the NVIDIA driver and is not on this machine"
            return Proof(module=module, outcome=Outcome.SKIPPED, detail=why, facts={})
        kind, text = chain[0]
        line = next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
        return Proof(module=module, outcome=Outcome.FAILED, detail=f"{kind}: {line.strip()}", facts={})
    if done.timed_out:
        detail = f"did not end within {PROVE_SECONDS:.0f} s"
    elif done.returncode < 0:
        detail = f"ended by signal {-done.returncode}"
    elif done.returncode or not found:
        detail = f"ended with exit code {done.returncode}"
    else:
        facts = {key: value for key, value in found.items() if key != "version"}
        return Proof(module=module, outcome=Outcome.OK, detail=found["version"], facts=facts)
    return Proof(module=module, outcome=Outcome.FAILED, detail=detail, facts={})


def check_proofs(name: str, proofs: Sequence[Proof], log: Path) -> None:
    """Raises BinaryError that names every module that failed."""
    failed = [proof for proof in proofs if proof.outcome is Outcome.FAILED]
    if failed:
        raise errors.BinaryError(
            f"the stack {name} is installed but does not import: "
            + "; ".join(f"{proof.module}: {proof.detail}" for proof in failed),
            where=str(log),
            remedy="the log has the whole traceback; a missing system library is installed with the system's packages",
        )


def check_imported_torch(lock: Lock, site: Path, proofs: Sequence[Proof]) -> None:
    """Raises BinaryError when another torch was imported, or one without code for compute capability 12.x."""
    torch, proof = lock.file("torch"), next((proof for proof in proofs if proof.module == "torch"), None)
    if torch is None or proof is None or proof.outcome is not Outcome.OK:
        return
    file = str(proof.facts.get("file"))
    # A wheel of the general index has no local tag in its name, but torch says one of itself.
    is_locked = _is_version(proof.detail) and _fits(f"=={torch.version}", proof.detail)
    if not is_locked or not Path(file).resolve().is_relative_to(site.resolve()):
        raise errors.BinaryError(
            f"torch {torch.version} is installed in {site}, but torch {proof.detail} is imported, from {file}",
            where=file,
            remedy="look for a .pth file or a sitecustomize module that puts another folder first",
        )
    architectures = proof.facts.get("architectures")
    if proof.facts.get("cuda") is None or not isinstance(architectures, list):
        return  # no CUDA build, or one that does not say
    if not any(re.fullmatch(r"(?:sm|compute)_12\d[af]?", str(name)) for name in architectures):
        raise errors.BinaryError(
            f"torch {torch.version} has no code for compute capability 12.x, only for {', '.join(architectures)}",
            where=file,
            remedy="take a stack whose torch is built for CUDA 12.8 or newer",
        )
