"""The state that each card is in: errors, heat, power, who else uses it."""

from collections.abc import Iterator

from sm120.host.facts import Facts, Gpu
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import card, cards, count, gib, listed

# Reasons that mean trouble. A power cap under load and idle clocks are what a healthy card shows.
_TROUBLE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def ecc_errors(facts: Facts) -> Iterator[Finding]:
    """Uncorrected memory errors since the last reset (NVML, volatile count)."""
    for gpu in cards(facts):
        if gpu.ecc_errors:
            yield Finding(
                id="ecc-errors",
                severity=Severity.WARN,
                what=f"{card(gpu)} counts {count(gpu.ecc_errors, 'uncorrected memory error')} since its last reset.",
                read=(f"{gpu.ecc_errors} uncorrected, volatile: NVML",),
                why="The program that hit one was ended, and numbers computed around that time cannot be trusted.",
                cure="reboot; a card that counts again is to be exchanged",
            )


def throttled(facts: Facts) -> Iterator[Finding]:
    """Clocks held down by heat or by the power supply, at this moment."""
    for gpu in cards(facts):
        reasons = [reason for reason in gpu.throttle_reasons if reason in _TROUBLE]
        clock = f"SM clock {gpu.clock_sm or 'unknown'} of {gpu.clock_sm_max or 'unknown'} MHz"
        if reasons:
            heat = f" at {gpu.temperature} °C" if gpu.temperature is not None else ""
            yield Finding(
                id="gpu-throttled",
                severity=Severity.WARN,
                what=f"{card(gpu)} holds its clocks down{heat}: {listed(reasons, 4)}.",
                read=(f"{listed(reasons, 4)}, {clock}: NVML",),
                why="Every measurement made now is one of the cooling or of the power supply.",
                cure="let air to the card and check its power connector, then look again: nvidia-smi -q -d PERFORMANCE",
            )


def power_limit(facts: Facts) -> Iterator[Finding]:
    """A power limit below the card's own."""
    for gpu in cards(facts):
        limit, default = gpu.power_limit, gpu.power_limit_default
        if limit is not None and default is not None and limit < 0.99 * default:
            yield Finding(
                id="power-limit",
                severity=Severity.NOTE,
                what=f"{card(gpu)} is limited to {limit:.0f} W; its default is {default:.0f} W.",
                read=(f"{limit:.0f} W of {default:.0f} W: NVML",),
                why="Speeds measured now are those of this limit; a report has to say so.",
                cure=f"sudo nvidia-smi -i {gpu.index} -pl {default:.0f}",
            )


def persistence_off(facts: Facts) -> Iterator[Finding]:
    """Without persistence the driver lets go of an idle card (NVIDIA driver persistence documentation)."""
    off = [gpu for gpu in cards(facts) if gpu.persistence is False]
    if off:
        yield Finding(
            id="persistence-off",
            severity=Severity.NOTE,
            what=f"Persistence mode is off for {listed(card(gpu) for gpu in off)}.",
            read=tuple(f"{card(gpu)}, persistence mode off: NVML" for gpu in off[:8]),
            why="Each program that starts on an idle card waits a few seconds for it, and its settings get lost.",
            cure="sudo nvidia-smi -pm 1",
        )


def mig_on(facts: Facts) -> Iterator[Finding]:
    """Cards that are cut into slices (NVIDIA MIG user guide)."""
    cut = [gpu for gpu in cards(facts) if gpu.mig]
    if cut:
        yield Finding(
            id="mig-on",
            severity=Severity.WARN,
            what=f"MIG is on for {listed(card(gpu) for gpu in cut)}.",
            read=tuple(f"MIG on: NVML, {gpu.uuid}" for gpu in cut[:8]),
            why="Programs see slices, not cards: less memory and fewer processors than the name says, and none reaches "
            "another, so that tensor parallelism is slow or impossible.",
            cure=f"sudo nvidia-smi -i {cut[0].index} -mig 0" if len(cut) == 1 else "sudo nvidia-smi -mig 0",
        )


def gpu_busy(facts: Facts) -> Iterator[Finding]:
    """Other programs on the cards."""
    busy = [gpu for gpu in cards(facts) if gpu.processes]
    if busy:
        yield Finding(
            id="gpu-busy",
            severity=Severity.NOTE,
            what=f"Programs are running on {listed(map(_use, busy), 8)}.",
            read=tuple(f"{_use(gpu)}: NVML" for gpu in busy[:8]),
            why="They share memory and time with whatever runs next; a measurement needs the card for itself.",
            cure="see which they are: nvidia-smi",
        )


def _use(gpu: Gpu) -> str:
    memory = f", {gib(gpu.memory_used)} in use" if gpu.memory_used is not None else ""
    return f"{card(gpu)}: {count(gpu.processes or 0, 'process')}{'es' if (gpu.processes or 0) > 1 else ''}{memory}"
