"""Whether what was installed is what the stack says."""

import json
import re
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from sm120 import errors
from sm120.process import run as run_process
from sm120.runs import Run
from sm120.stack.pip import Distribution, environment
from sm120.stack.spec import Stack

PROVE_SECONDS = 600.0  # a first import compiles every module, on a slow disk for minutes

_PROVE = """
import importlib, json, sys
versions = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    versions[name] = str(getattr(module, "__version__", "unknown"))
print("\\nproved " + json.dumps(versions))
"""


def site_packages(environment: Path) -> Path:
    found = sorted(environment.glob("lib/python3.*/site-packages"))
    return found[0] if found else environment / "lib" / "site-packages"


def installed(site: Path) -> dict[str, str]:
    """Canonical name → version of every distribution in a folder, from the names of its metadata folders."""
    found: dict[str, str] = {}
    for path in site.glob("*.dist-info"):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        found[canonicalize_name(name)] = version
    return found


def check_pins(stack: Stack, site: Path, distributions: list[Distribution]) -> None:
    """Raises BinaryError unless each pin is installed in exactly its version, local tag included."""
    reported = {d.name: d.version for d in distributions}
    present = installed(site)
    for name, wanted in stack.packages.items():
        for source, versions in (("pip's report", reported), (str(site), present)):
            got = versions.get(name)
            if got is None or Version(got) != Version(wanted):
                raise errors.BinaryError(
                    f"the stack {stack.name} says {name} {wanted}, but {got or 'nothing'} was installed",
                    where=source,
                    remedy="look for an index, a constraint or a find-links folder that overrides it: pip config list",
                )


def check_torch(stack: Stack, site: Path) -> None:
    """Raises BinaryError when torch's own record of its CUDA contradicts the pin's local tag."""
    wanted = stack.packages.get("torch")
    local = Version(wanted).local if wanted else None
    if local is None:
        return
    path = site / "torch" / "version.py"
    text = path.read_text("utf-8", "replace") if path.exists() else ""
    found = re.search(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+)['\"])", text, re.MULTILINE)
    if found is None:
        raise errors.BinaryError(f"{path} does not say which CUDA torch was built for", where=str(path))
    build = f"cu{found[1].replace('.', '')}" if found[1] else "cpu"
    if (local == "cpu") != (build == "cpu") or (local.startswith("cu") and local != build):
        raise errors.BinaryError(
            f"the stack {stack.name} says torch {wanted}, but what was installed is a {build} build",
            where=str(path),
            remedy="look for an index or a find-links folder that serves a mislabelled torch: pip config list",
        )


def prove(stack: Stack, python: Path, run: Run) -> dict[str, str]:
    """Imports the stack's modules in a clean process; their versions. Raises BinaryError when one does not import."""
    if not stack.imports:
        return {}
    log = run.log_path("prove")
    env = environment()
    done = run_process([str(python), "-I", "-c", _PROVE, *stack.imports], env=env, timeout=PROVE_SECONDS, log=log)
    run.record_command(done, env=env)
    last = next((line for line in reversed(done.tail) if line.startswith("proved ")), None)
    if done.returncode or last is None:
        problem = next((line for line in reversed(done.tail) if line.strip()), "no output")
        raise errors.BinaryError(
            f"the stack {stack.name} is installed but does not import: {problem.strip()}",
            where=str(log),
            remedy="the log has the whole traceback; a missing system library is installed with the system's packages",
        )
    versions: dict[str, str] = json.loads(last.removeprefix("proved "))
    return versions
