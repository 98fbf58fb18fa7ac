"""Gathers the facts of this machine. Nothing here judges, and nothing is changed.

Each probe stands alone: one that fails is a line in ``Facts.unread``, and the others go on.
"""

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from sm120 import __version__, errors, redact
from sm120.console import Console
from sm120.host.facts import Cpu, Environment, Facts, Host, Memory, Version2
from sm120.host.gather import cpu, disks, environments, gpus, memory, programs, system, toolkits, variables, within
from sm120.state import State

NVML_SECONDS = 60.0  # a driver that lost a card can make NVML wait for ever
T = TypeVar("T")


def gather(state: State, console: Console) -> Facts:
    """The facts of this machine and of the environments in the state folder."""
    env = dict(os.environ)
    probe = _Probe(console)
    cards = probe("the cards", lambda: within.one(gpus.cards, NVML_SECONDS), None) or gpus.Cards(
        driver=gpus.kernel_side("NVML could not be asked")
    )
    found = tuple(_environments(state, env, probe))
    homes: list[tuple[str, Path]] = []
    own = [*_wheels(found), *probe("the CUDA homes", lambda: _homes(state), homes)]
    return Facts(
        collected=datetime.now(UTC).isoformat(timespec="seconds"),
        toolkit=__version__,
        host=probe("the system", lambda: system.host(cards.gpus, env), Host()),
        driver=cards.driver,
        cpu=probe("the processor", cpu.cpu, Cpu(architecture=os.uname().machine)),
        memory=probe("the memory", memory.memory, Memory()),
        gpus=cards.gpus,
        pairs=cards.pairs,
        disks=probe("the disks", lambda: disks.disks(disks.folders(env, _home(), state)), ()),
        limits=probe("the limits", system.limits, {}),
        toolkits=probe("the CUDA toolkits", lambda: toolkits.toolkits(env, own), ()),
        tools=probe("the tools", lambda: programs.tools(env), ()),
        environments=found,
        wheels=probe("the wheels", lambda: environments.wheels(state), ()),
        variables=variables.variables(env),
        unread=tuple(probe.unread),
    )


def gpu_capabilities() -> tuple[Version2, ...]:
    """The compute capability of each card, by NVML alone; () without a card, a driver or an answer."""
    try:
        return within.one(gpus.capabilities, NVML_SECONDS)
    except within.NoAnswer:
        return ()


class _Probe:
    """Runs one probe at a time and keeps what went wrong."""

    def __init__(self, console: Console) -> None:
        self.unread: list[str] = []
        self._console = console

    def __call__(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        self._console.detail(f"reading {what}")
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - doctor must come to its end on the strangest machine
            said = isinstance(error, errors.ToolkitError | within.NoAnswer)
            why = str(error) if said else f"{type(error).__name__}: {error}"
            self.unread.append(redact.redact(f"{what} could not be read: {why}"))
            return otherwise


def _environments(state: State, env: dict[str, str], probe: _Probe) -> Iterator[Environment]:
    none: dict[str, Callable[[], Environment]] = {}
    for name, read in probe("the environments", lambda: environments.environments(state, env), none).items():
        found = probe(f"the environment {name}", read, None)
        if found is not None:
            yield found


def _wheels(found: tuple[Environment, ...]) -> Iterator[tuple[str, Path]]:
    """The CUDA toolkits in the environments' wheels."""
    for environment in found:
        for folder in toolkits.wheels(Path(environment.site)) if environment.site else ():
            yield f"wheels:{environment.stack}", folder


def _homes(state: State) -> list[tuple[str, Path]]:
    """The CUDA homes that setup made of these."""
    return [(f"home:{home.name}", home) for home in sorted((state.root / "cuda").glob("*/"))]


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor an entry for this user
        return None
