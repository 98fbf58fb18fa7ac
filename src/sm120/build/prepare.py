"""What a build would do, found out before anything is written: source, patches, dependencies, jobs."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.version import InvalidVersion, Version

from sm120 import errors
from sm120.build import patches
from sm120.build.compile import Jobs, plan_jobs, remembered
from sm120.build.options import Options
from sm120.build.source import Dependency, Pristine, Wanted, dependencies, obtain
from sm120.build.toolchain import Toolchain
from sm120.console import Console
from sm120.runs import Run
from sm120.stack.spec import Stack
from sm120.state import State

GB_PER_THREAD = 4.0  # until it was measured here: flash-attention's makers count 3 to 5
# Of the source, its dependencies and the objects. SGLang's tree of March 2026, for sm_120a alone, took 1.1 GB.
DISK_BYTES = 3 * 10**9


@dataclass(frozen=True, kw_only=True)
class Prepared:
    component: str
    toolchain: Toolchain
    wanted: Wanted
    pristine: Pristine
    applied: patches.Applied
    found: tuple[Dependency, ...]  # that the patched build files name
    architectures: tuple[str, ...]
    jobs: Jobs


def prepare(
    options: Options, stack: Stack | None, toolchain: Toolchain, state: State, run: Run | None, console: Console
) -> Prepared:
    """Fetches the source when it has to. Raises UsageError when nothing names one, else as ``obtain`` and the patches.

    ``stack`` is None for an adopted interpreter, which has no file.
    """
    kernels = stack.kernels if stack is not None else None
    if options.source is None and kernels is None:
        raise errors.UsageError(
            f"the stack {toolchain.stack} names no source for kernels",
            where=str(stack.path) if stack is not None else str(toolchain.python),
            remedy="name a checkout of SGLang: --source DIR; or a stack that has [kernels], as --stack nightly",
        )
    wanted = Wanted(
        repository=kernels.url if kernels is not None else None,
        commit=kernels.revision if kernels is not None else None,
        folder=options.source,
        mirror=options.git_mirror,
        given=options.given,
    )
    pristine = obtain(wanted, state, run, console)
    jobs = jobs_for(options, toolchain.stack, state)
    context = patches.Context(
        cmake=toolchain.cmake_version,
        cuda=toolchain.cuda,
        torch=toolchain.torch,
        component=_version(pristine.root / pristine.folder),
        architectures=options.architectures,
        compile_threads=jobs.threads,
    )
    applied = patches.propose(patches.load_series(), pristine.root, context)
    return Prepared(
        component=options.component,
        toolchain=toolchain,
        wanted=wanted,
        pristine=pristine,
        applied=applied,
        found=() if applied.conflicts else dependencies(pristine.root, pristine.folder, applied.changes),
        architectures=options.architectures,
        jobs=jobs,
    )


def jobs_for(options: Options, stack: str, state: State) -> Jobs:
    from sm120.host.gather import cgroup

    measured = remembered(state, f"{stack}/{options.component}")
    cores = len(psutil.Process().cpu_affinity())
    quota = cgroup.cpus()
    return plan_jobs(
        cores=cores if quota is None else min(cores, quota),
        available=_available(),
        architectures=len(options.architectures),
        gb_per_thread=GB_PER_THREAD if measured is None else measured,
        asked=options.jobs,
        measured=measured is not None,
    )


def _available() -> int:
    """Bytes that can be had: the machine's, and what the control group leaves of its limit."""
    from sm120.host.gather import cgroup

    free = psutil.virtual_memory().available
    limit, used = cgroup.memory()
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _version(folder: Path) -> Version | None:
    """The component's, from its pyproject.toml."""
    try:
        data = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
        return Version(data["project"]["version"])
    except (OSError, ValueError, KeyError, TypeError, InvalidVersion):
        return None
