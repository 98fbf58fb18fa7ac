"""How workers are started: which Python, with which environment, and that each is the same as the first."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sm120
from sm120.errors import PreflightError
from sm120.matrix.lost import WorkerError, WorkerRefused
from sm120.matrix.worker import Limits, Worker
from sm120.runs import safe_name

PROTOCOL = 1
PLUGINS_VARIABLE = "SM120_BACKENDS"
_SOURCE = Path(sm120.__file__).resolve().parents[1]
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Door:
    """Everything that a worker is started with. ``argv`` is the whole command."""

    argv: tuple[str, ...]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)

    def open(self, name: str) -> Worker:
        """Starts a worker whose stderr goes to ``logs/<name>.log`` of the folder."""
        log = self.folder / "logs" / f"worker-{safe_name(name)}.log"
        return Worker(self.argv, env={**os.environ, **self.env}, cwd=self.folder, log=log, limits=self.limits)


def stack_door(
    python: Path,
    folder: Path,
    *,
    device: str | None = None,
    workers: int = 2,
    variables: Mapping[str, str] | None = None,
) -> Door:
    """The real door: the stack's Python runs ``sm120_cells.worker`` from this toolkit's source.

    ``workers`` of them compute at the same time, so each gets its share of the processors, unless the user decided.
    ``variables`` are the stack's own: its CUDA home, its caches, its architecture.
    """
    threads = str(max(1, len(os.sched_getaffinity(0)) // workers))
    shares = {} if "OMP_NUM_THREADS" in os.environ else dict.fromkeys(_THREAD_VARIABLES, threads)
    return Door(
        argv=(str(python), "-m", "sm120_cells.worker", *(() if device is None else ("--device", device))),
        folder=folder,
        env={
            **(variables or {}),
            "PYTHONPATH": str(_SOURCE),
            "PYTHONSAFEPATH": "1",  # the run folder must not shadow a module
            "PYTHONNOUSERSITE": "1",
            "PYTHONUNBUFFERED": "1",
            **shares,
            **({PLUGINS_VARIABLE: named} if (named := plugins()) else {}),
        },
    )


def plugins() -> str:
    """``SM120_BACKENDS`` with its files' paths made absolute: a worker runs in the run's folder."""
    words = [word for word in os.environ.get(PLUGINS_VARIABLE, "").split(os.pathsep) if word]
    return os.pathsep.join(str(Path(word).absolute()) if word.endswith(".py") else word for word in words)


def greet(worker: Worker) -> Mapping[str, Any]:
    """The worker's hello. PreflightError when it does not start, or speaks another protocol."""
    try:
        hello = worker.hello()
    except WorkerRefused as error:
        raise PreflightError(f"the worker cannot work here: {error.message}", where=str(worker.log)) from error
    except WorkerError as error:
        last = f"; its last line: {error.tail[-1]}" if error.tail else ""
        raise PreflightError(
            f"the worker does not start: it {error.message}{last}",
            where=str(worker.log),
            remedy=f"read {worker.log}; if the stack is broken: scripts/inv setup",
        ) from error
    if hello.get("protocol") != PROTOCOL:
        raise PreflightError(
            f"the worker speaks protocol {hello.get('protocol')!r}, this toolkit {PROTOCOL}",
            remedy="update the checkout as a whole, so that src/sm120 and src/sm120_cells belong together",
        )
    return hello
