"""Which cards there are, and which of them a program sees."""

import shlex
from collections import defaultdict
from collections.abc import Iterator

from sm120.host.facts import Facts, Gpu, Version2
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import (
    SM12X,
    capability,
    card,
    cards,
    count,
    dotted,
    gib,
    grouped,
    kinds,
    listed,
    selection,
)


def _read(gpus: tuple[Gpu, ...]) -> tuple[str, ...]:
    return tuple(f"{card(gpu)}, {capability(gpu)}, {gpu.uuid}: NVML" for gpu in gpus[:8])


def gpu_unreadable(facts: Facts) -> Iterator[Finding]:
    """A card that NVML lists and cannot read: lost from the bus, or in need of a reset."""
    for gpu in facts.gpus:
        if gpu.problem:
            yield Finding(
                id="gpu-unreadable",
                severity=Severity.REFUSE,
                what=f"{card(gpu)} cannot be read: {gpu.problem}.",
                read=(f"{gpu.problem}: NVML",),
                why="A card in this state fails every program, and NCCL waits for it without end.",
                cure="look for its Xid, then reboot: sudo dmesg | grep -E 'NVRM|Xid'",
            )


def cards_mixed(facts: Facts) -> Iterator[Finding]:
    """Cards of different compute capability in one job (vllm #53834, #19741, 1Cat-vLLM #412).

    The verdict is the same in whatever order they are listed.
    """
    seen = selection(facts)
    found = kinds(seen.gpus)
    if len(found) < 2:
        return
    chosen = _largest_kind(seen.gpus)
    uuids = ",".join(gpu.uuid for gpu in chosen)
    parts = listed((f"{count(_number(seen.gpus, kind), 'card')} of {dotted(kind)}" for kind in found), 8)
    yield Finding(
        id="cards-mixed",
        severity=Severity.WARN,
        what=f"Programs see {parts}; NVML numbers them by slot, CUDA fastest first.",
        read=(
            *_read(seen.gpus),
            f"CUDA_VISIBLE_DEVICES={facts.variables.get('CUDA_VISIBLE_DEVICES', '')}: environment",
            f"CUDA_DEVICE_ORDER={facts.variables.get('CUDA_DEVICE_ORDER', '')}: environment",
        ),
        why="Kernels are chosen by the first card and run on all. Tensor parallelism across compute capabilities is "
        f"refused, and of every card only the smallest's memory can be used{_smallest(seen.gpus)}.",
        cure=f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={shlex.quote(uuids)}",
    )


def _number(gpus: tuple[Gpu, ...], kind: Version2) -> int:
    return sum(gpu.compute_capability == kind for gpu in gpus)


def _largest_kind(gpus: tuple[Gpu, ...]) -> list[Gpu]:
    """The cards of one compute capability to propose: 12.x before others, then most memory, then most cards."""
    groups: dict[Version2, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        if gpu.compute_capability is not None:
            groups[gpu.compute_capability].append(gpu)

    def worth(kind: Version2) -> tuple[bool, int, int, Version2]:
        return kind[0] == SM12X, sum(gpu.memory_total or 0 for gpu in groups[kind]), len(groups[kind]), kind

    return groups[max(groups, key=worth)]


def _smallest(gpus: tuple[Gpu, ...]) -> str:
    sizes = [gpu.memory_total for gpu in gpus if gpu.memory_total is not None]
    return f", {gib(min(sizes))}" if sizes else ""


def memory_uneven(facts: Facts) -> Iterator[Finding]:
    """Cards of one kind with different memory: tensor parallelism takes the smallest of all."""
    seen = selection(facts).gpus
    sizes = [gpu.memory_total for gpu in seen if gpu.memory_total]
    if len(kinds(seen)) == 1 and sizes and max(sizes) > 1.02 * min(sizes):
        yield Finding(
            id="memory-uneven",
            severity=Severity.NOTE,
            what=f"The visible cards have between {gib(min(sizes))} and {gib(max(sizes))} of memory.",
            read=tuple(f"{card(gpu)}, {gib(gpu.memory_total)}: NVML" for gpu in seen[:8] if gpu.memory_total),
            why=f"With tensor parallelism each card holds an equal share, so {gib(min(sizes))} of each can be used.",
            cure=None,
        )


def visible_devices(facts: Facts) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES names no card; CUDA ignores that entry and all that follow (CUDA programming guide)."""
    every = cards(facts)
    if not every or "CUDA_VISIBLE_DEVICES" not in facts.variables:
        return
    value, seen = facts.variables["CUDA_VISIBLE_DEVICES"], selection(facts)
    read = (f"CUDA_VISIBLE_DEVICES={value}: environment", f"{count(len(every), 'card')}: NVML")
    if seen.missing:
        yield Finding(
            id="visible-devices",
            severity=Severity.REFUSE,
            what=f"CUDA_VISIBLE_DEVICES is {value!r}; none of the {count(len(every), 'card')} is {seen.missing[0]!r}.",
            read=read,
            why=f"CUDA ignores it and all that follow: without a word, programs see {count(len(seen.gpus), 'card')}.",
            cure="unset CUDA_VISIBLE_DEVICES",
        )
    elif not seen.gpus:
        yield Finding(
            id="visible-devices",
            severity=Severity.WARN,
            what=f"CUDA_VISIBLE_DEVICES is {value!r} and hides every card.",
            read=read,
            why="Programs find no CUDA device, as if there were no card.",
            cure="unset CUDA_VISIBLE_DEVICES",
        )


def display_card(facts: Facts) -> Iterator[Finding]:
    """A card that also drives a screen, among several."""
    seen = selection(facts).gpus
    screens = [gpu for gpu in seen if gpu.display_active]
    if len(seen) > 1 and screens:
        yield Finding(
            id="display-card",
            severity=Severity.NOTE,
            what=f"{listed(card(gpu) for gpu in screens)} also drives a screen.",
            read=tuple(f"{card(gpu)}, display active: NVML" for gpu in screens[:8]),
            why="The desktop takes memory and time from it, and with tensor parallelism all wait for the slowest.",
            cure=None,
        )


def not_sm120(facts: Facts) -> Iterator[Finding]:
    """What passes on another architecture says nothing about SM120: families, not floors."""
    found = kinds(selection(facts).gpus)
    if found and (12, 0) not in found:
        seen = selection(facts).gpus
        sibling = any(kind[0] == SM12X for kind in found)
        yield Finding(
            id="not-sm120",
            severity=Severity.NOTE,
            what=f"No visible card is of compute capability 12.0: {grouped(seen)}.",
            read=_read(seen),
            why="Code for sm_120a does not run here, code for the family, sm_120f, does; a pass here is one of 12.1."
            if sibling
            else "Other kernels run here than on SM120, so a pass here says nothing about SM120.",
            cure=None,
        )
