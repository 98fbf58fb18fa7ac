"""``doctor --links``: runs the children, one after the other, and puts together what they saw."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from sm120.console import Console
from sm120.errors import NothingChecked, PreflightError
from sm120.host.facts import Facts, Gpu, Pair
from sm120.host.links.bench import Bench
from sm120.host.links.choice import choose
from sm120.host.links.outcome import Outcome, Verdict
from sm120.host.links.plan import GOVERNED, Setting, candidates, groups
from sm120.host.links.report import COLUMNS, PAIR_COLUMNS, GroupResult, Key, LinkReport, PairResult, SettingResult
from sm120.host.links.store import save
from sm120.runs import Run
from sm120.state import State

_NEEDED: Final = 2 << 30  # bytes on each GPU: buffers, the CUDA context and NCCL's own


def check(state: State, console: Console, run: Run, stack: str, *, facts: Facts) -> LinkReport:
    """Checks the links between all GPUs that torch of the stack sees, chooses a setting, and records it.

    ``stack``: empty for the one that setup made last. NothingChecked with fewer than two GPUs; PreflightError where
    the stack has no usable CUDA torch, or the GPUs have no memory free.
    """
    gpus = facts.gpus
    if len(gpus) < 2:
        seen = f"there is one GPU, {gpus[0].name}" if gpus else "there is no GPU"
        raise NothingChecked(f"{seen}; links are checked between two or more", remedy="scripts/inv doctor")
    stack, python, variables = _environment_of(stack, state)
    bench = Bench(python=python, run=run, device="cuda", variables=variables)
    with console.step(f"asking torch of the stack {stack} for its GPUs"):
        seen_by_torch = look(bench, stack)
    machine = Machine.of(seen_by_torch, gpus, facts.pairs, facts.driver.version)
    report = measure(bench, machine, stack, console)
    path = save(report, state)
    run.write_json("links.json", report.as_json())
    console.table("copies between GPUs", PAIR_COLUMNS, report.pair_rows())
    console.table("NCCL settings (→ is what serve will use)", COLUMNS, report.rows())
    console.info(f"record: {path}")
    return report


def _environment_of(name: str, state: State) -> tuple[str, Path, Mapping[str, str]]:
    """The stack's name, Python and variables; of the one that setup made last where no name is given."""
    from sm120.stack import look as look_for
    from sm120.stack import selected

    name = name or selected(state) or ""
    if not name:
        raise PreflightError(
            "the links are checked with torch of a stack, and no stack is installed",
            where=str(state.selected),
            remedy="scripts/inv setup, then: scripts/inv doctor --links",
        )
    found, why = look_for(name, state)
    if found is None:
        raise PreflightError(
            f"the links are checked with torch of the stack {name}, which cannot be used: {why}",
            where=str(state.env(name)),
            remedy=f"scripts/inv setup --stack {name}, then: scripts/inv doctor --links --stack {name}",
        )
    return found.name, found.python, found.variables


def look(bench: Bench, stack: str) -> Mapping[str, Any]:
    """What torch sees. PreflightError where it does not start, is built without CUDA, or GPUs are full."""
    outcome = bench.child("look", (), {"task": "look", "ranks": 1}, None)
    where = str(bench.run.log_path("links-look"))
    if outcome.verdict != Verdict.RIGHT:
        raise PreflightError(
            f"torch of the stack {stack} does not start: {outcome.detail}", where=where, remedy=f"read {where}"
        )
    seen = outcome.machine
    if not seen:
        raise PreflightError(
            f"torch of the stack {stack} does not say what it sees", where=where, remedy=f"read {where}"
        )
    if seen["cuda"] is None:
        raise PreflightError(
            f"torch {seen['torch']} of the stack {stack} is built without CUDA",
            where=str(bench.python),
            remedy="scripts/inv setup --stack nightly, then: scripts/inv doctor --links --stack nightly",
        )
    gpus = seen["gpus"]
    if len(gpus) < 2:
        raise NothingChecked(
            f"torch sees {'one GPU' if gpus else 'no GPU'}; links are checked between two or more",
            where="CUDA_VISIBLE_DEVICES and the driver",
            remedy="unset CUDA_VISIBLE_DEVICES, then: scripts/inv doctor --links",
        )
    for gpu in gpus:
        if gpu["free"] < _NEEDED:
            raise PreflightError(
                f"{gpu['name']} ({gpu['uuid']}) has {gpu['free'] / 2**30:.1f} GiB of free memory; "
                f"the check needs {_NEEDED >> 30} GiB",
                remedy="stop what uses it (nvidia-smi lists it), then: scripts/inv doctor --links",
            )
    return seen


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs that are tested, in torch's order, and what is between them."""

    gpus: tuple[Gpu, ...]
    pairs: tuple[Pair, ...]
    driver: str | None
    nccl: str | None

    @classmethod
    def of(cls, seen: Mapping[str, Any], gpus: Sequence[Gpu], pairs: Sequence[Pair], driver: str | None) -> "Machine":
        """NVML's GPUs by the UUIDs that torch sees: the two number them differently."""
        known = {gpu.uuid: gpu for gpu in gpus}
        unknown = [gpu["uuid"] for gpu in seen["gpus"] if gpu["uuid"] not in known]
        if unknown:
            raise PreflightError(
                f"torch sees GPUs that NVML does not know: {', '.join(unknown)}",
                remedy="nvidia-smi -L   # lists those of NVML; MIG instances are no GPUs that can be linked",
            )
        tested = tuple(known[gpu["uuid"]] for gpu in seen["gpus"])
        indices = {gpu.index for gpu in tested}
        return cls(
            gpus=tested,
            pairs=tuple(pair for pair in pairs if {pair.a, pair.b} <= indices),
            driver=driver,
            nccl=seen["package"] or seen["nccl"],
        )


def measure(bench: Bench, machine: Machine, stack: str, console: Console) -> LinkReport:
    """All copies, then all settings in turn, and the choice."""
    pairs = list(combinations((gpu.uuid for gpu in machine.gpus), 2))
    settings = candidates(machine.pairs, os.environ)
    together = groups(machine.gpus, machine.pairs)
    names = {gpu.uuid: f"GPU {gpu.index}" for gpu in machine.gpus}
    with console.progress(len(pairs) + sum(not s.last_resort for s in settings) * len(together), "links") as progress:
        copied = []
        for a, b in pairs:
            progress.advance(0, f"copies between {names[a]} and {names[b]}")
            copied.append(_copies(bench, a, b))
            progress.advance()
        trusted = all(pair.outcome.verdict == Verdict.RIGHT for pair in copied)
        results: list[SettingResult] = []
        for setting in settings:
            if setting.last_resort and choose(results, peer_memory_trusted=trusted)[0] is not None:
                continue
            results.append(_sums(bench, setting, together, progress.advance))
    chosen, reason = choose(results, peer_memory_trusted=trusted)
    return LinkReport(
        key=Key(gpus=tuple(sorted(names)), driver=machine.driver, nccl=machine.nccl),
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        stack=stack,
        names={gpu.uuid: f"GPU {gpu.index} ({gpu.name})" for gpu in machine.gpus},
        pairs=tuple(copied),
        settings=tuple(results),
        chosen=chosen,
        reason=reason,
        set_aside={name: os.environ[name] for name in GOVERNED if os.environ.get(name)},
    )


def _copies(bench: Bench, a: str, b: str) -> PairResult:
    effort = bench.effort
    request = {"task": "peer", "ranks": 1, "sizes": effort.copies, "timed": effort.copy_timed}
    return PairResult(a=a, b=b, outcome=bench.child(f"copies-{a[:12]}-{b[:12]}", (a, b), request, None))


def _sums(
    bench: Bench, setting: Setting, together: Sequence[tuple[str, ...]], advance: Callable[[int, str], None]
) -> SettingResult:
    """All groups with one setting; after the first that is not right, the rest is not run."""
    effort = bench.effort
    request = {"task": "reduce", "sizes": effort.sums, "timed": effort.timed, "blocks": effort.blocks}
    results: list[GroupResult] = []
    for number, gpus in enumerate(together):
        advance(0, f"all-reduce of {len(gpus)} GPUs, {setting.name}")
        if any(result.outcome.verdict != Verdict.RIGHT for result in results):
            outcome = Outcome(verdict=Verdict.SKIPPED, detail="not run, since a smaller group was not right")
        else:
            name = f"sums-{setting.name}-{number}-of-{len(gpus)}"
            outcome = bench.child(name, gpus, {**request, "ranks": len(gpus)}, setting)
        results.append(GroupResult(gpus=gpus, outcome=outcome))
        advance(1, "links")
    return SettingResult(setting=setting, groups=tuple(results))
