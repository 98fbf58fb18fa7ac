"""What lies between the cards, and between card and host: PCIe, peer access, IOMMU, NCCL's settings."""

from collections.abc import Iterator

from sm120.host.facts import Facts, Gpu, Pair
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import card, cards, count, is_set, listed, selection

_MEASURE = "scripts/inv doctor --links"
_SETTINGS = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_PROTO"),
    *("NCCL_P2P_USE_CUDA_MEMCPY", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS"),
)
_SWITCHES = {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_USE_CUDA_MEMCPY"}  # 0 is what NCCL does anyway


def pcie_width(facts: Facts) -> Iterator[Finding]:
    """Lanes are counted when the link comes up, load or not: fewer than the card has mean its slot or its seat."""
    for gpu in _on_pcie(facts):
        if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
            yield Finding(
                id="pcie-width",
                severity=Severity.WARN,
                what=f"{card(gpu)} uses {gpu.pcie_width} of {gpu.pcie_width_max} PCIe lanes.",
                read=(f"width {gpu.pcie_width}, at most {gpu.pcie_width_max}: NVML, {gpu.bus_id}",),
                why="Without NVLink every all-reduce goes through this link, and the slowest sets the pace of all.",
                cure="seat the card again, or move it to a slot with all lanes; a riser or a shared slot takes some",
            )


def pcie_generation(facts: Facts) -> Iterator[Finding]:
    """A link that stays slow under load. An idle card lowers its generation to save power, which is healthy."""
    for gpu in _on_pcie(facts):
        now, most = gpu.pcie_generation, gpu.pcie_generation_max
        if now and most and now < most and _under_load(gpu):
            yield Finding(
                id="pcie-generation",
                severity=Severity.WARN,
                what=f"{card(gpu)} is at work on PCIe generation {now}; card and slot can do {most}.",
                read=(
                    f"generation {now}, at most {most}: NVML, {gpu.bus_id}",
                    f"P{gpu.performance_state}, {gpu.clock_sm} of {gpu.clock_sm_max} MHz: NVML",
                ),
                why=f"Under load the link should run at {most}; at {now} every transfer takes "
                f"{2 ** min(most - now, 8)} times as long.",
                cure="set the slot's link speed in the BIOS, and exchange a riser that cannot carry it",
            )


def pcie_slot(facts: Facts) -> Iterator[Finding]:
    """A slot of an older generation than the card."""
    for gpu in _on_pcie(facts):
        slot, device = gpu.pcie_generation_max, gpu.pcie_generation_device_max
        if slot and device and slot < device:
            yield Finding(
                id="pcie-slot",
                severity=Severity.NOTE,
                what=f"{card(gpu)} can do PCIe generation {device}, its slot {slot}.",
                read=(f"generation {slot} of card and slot, {device} of the card: NVML, {gpu.bus_id}",),
                why="All-reduces between cards and the loading of weights take longer than they would in a newer slot.",
                cure=None,
            )


def _on_pcie(facts: Facts) -> tuple[Gpu, ...]:
    """GB10 hangs on the CPU's own link, and what NVML says of PCIe there means nothing."""
    return () if facts.host.unified_memory else cards(facts)


def _under_load(gpu: Gpu) -> bool:
    fast = gpu.performance_state is not None and gpu.performance_state <= 2  # compute runs in P0 to P2
    clocked = bool(gpu.clock_sm and gpu.clock_sm_max and gpu.clock_sm >= gpu.clock_sm_max / 2)
    return fast and clocked and bool(gpu.processes)


def peer_access(facts: Facts) -> Iterator[Finding]:
    """Cards that cannot read each other's memory (nccl #1999; usual on consumer cards)."""
    shown = {gpu.index for gpu in selection(facts).gpus}
    pairs = [pair for pair in facts.pairs if pair.a in shown and pair.b in shown and (pair.read or pair.write)]
    closed = [(pair, said) for pair in pairs if (said := _closed(pair))]
    if closed:
        reasons = sorted({reason for _, said in closed for reason in said})
        yield Finding(
            id="peer-access",
            severity=Severity.NOTE,
            what=f"{len(closed)} of {count(len(pairs), 'pair')} of cards cannot reach each other: {listed(reasons)}.",
            read=tuple(
                f"GPU {p.a} and GPU {p.b} ({p.path or 'path unknown'}), {', '.join(said)}: NVML"
                for p, said in closed[:4]
            ),
            why="NCCL goes through the host's memory, which is slower. Where it tries the direct way all the same, its "
            "first all-reduce may hang: NCCL_P2P_DISABLE=1 keeps it from trying.",
            cure=_MEASURE,
        )


def _closed(pair: Pair) -> list[str]:
    """Why one cannot read or write the other."""
    return sorted({status for status in (pair.read, pair.write) if status not in {None, "ok"} and status})


def iommu_translated(facts: Facts) -> Iterator[Finding]:
    """Peer copies through a translating IOMMU can return success and wrong data (open-gpu-kernel-modules #1257)."""
    if facts.host.iommu == "on" and len(cards(facts)) > 1:
        yield Finding(
            id="iommu-translated",
            severity=Severity.WARN,
            what=f"The kernel runs with the IOMMU on and not in pass-through, with {len(cards(facts))} cards.",
            read=("iommu=on: /proc/cmdline", f"{len(cards(facts))} cards: NVML"),
            why="Copies between cards were seen to report success and to deliver wrong data; nothing crashes.",
            cure=_MEASURE,
        )


def nccl_settings(facts: Facts) -> Iterator[Finding]:
    """NCCL's settings are to be measured on this machine, not taken over (rtx6kpro's tuning pages)."""
    if len(selection(facts).gpus) < 2:
        return
    found = {name: facts.variables[name] for name in _SETTINGS if _changes(facts, name)}
    if not found:
        return
    no_peer = is_set(found.get("NCCL_P2P_DISABLE")) or not any(
        pair.read == "ok" and pair.write == "ok" for pair in facts.pairs
    )
    sockets = "NCCL_SHM_DISABLE" in found and no_peer
    values = [f"{name}={value}" for name, value in found.items()]
    yield Finding(
        id="nccl-settings",
        severity=Severity.WARN if sockets else Severity.NOTE,
        what=f"NCCL is told {listed(values, 8)}.",
        read=tuple(f"{value}: environment" for value in values),
        why="With both shared memory and peer access out of use NCCL sends everything through network sockets."
        if sockets
        else "A setting that is fastest on one machine is slower or hangs on another: one-shot all-reduce won on four "
        "cards of one CPU and lost on eight of two.",
        cure=_MEASURE,
    )


def _changes(facts: Facts, name: str) -> bool:
    value = facts.variables.get(name)
    return is_set(value) if name in _SWITCHES else bool(value)


def expandable_segments(facts: Facts) -> Iterator[Finding]:
    """One-shot all-reduce over PCIe registers memory that expandable segments move (rtx6kpro's tuning pages)."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = facts.variables.get(name, "")
        words = value.replace(" ", "").lower().split(",")
        if "expandable_segments:true" in words and len(selection(facts).gpus) > 1:
            yield Finding(
                id="expandable-segments",
                severity=Severity.WARN,
                what=f"{name} turns expandable segments on, with {count(len(selection(facts).gpus), 'card')}.",
                read=(f"{name}={value}: environment",),
                why="A one-shot all-reduce over PCIe was seen to crash with them.",
                cure=f"unset {name}",
            )
