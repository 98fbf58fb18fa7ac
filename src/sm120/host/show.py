"""The picture of a machine that a user reads: short sections, then what the rules found."""

from collections.abc import Sequence
from pathlib import Path

from sm120.console import Console
from sm120.host.facts import Disk, Driver, Environment, Facts, Gpu, Toolkit, Version2
from sm120.host.findings import Finding, Severity

ORDER = (Severity.REFUSE, Severity.WARN, Severity.NOTE)
_COUNTED = {Severity.REFUSE: "refuse", Severity.WARN: "warn", Severity.NOTE: "note"}


def picture(facts: Facts, console: Console) -> None:
    """Every section that has something to say."""
    for line in _lines(facts):
        console.info(line)
    _cards(facts, console)
    _table(console, "links", ("GPUs", "path", "peer reads", "peer writes"), [
        (f"{pair.a} – {pair.b}", _or(pair.path), _or(pair.read), _or(pair.write)) for pair in facts.pairs
    ])  # fmt: skip
    _table(console, "", ("disk", "kind", "free", "of", "holds", ""), _disks(facts.disks))
    columns = ("CUDA toolkit", "seen by", "nvcc", "headers", "CCCL", "")
    _table(console, "", columns, [_toolkit(toolkit) for toolkit in facts.toolkits])
    tools = [(tool.name, _or(tool.version), tool.path) for tool in facts.tools if tool.path]
    _table(console, "", ("tool", "version", "path"), tools)
    missing = [tool.name for tool in facts.tools if not tool.path]
    if missing:
        console.info(f"not found: {', '.join(missing)}")
    columns = ("environment", "Python", "torch", "its CUDA", "packages", "")
    _table(console, "", columns, [_environment(environment) for environment in facts.environments])
    if not facts.environments:
        console.info("environments: none; scripts/inv setup makes one")
    for text in facts.unread:
        console.warn(text)


def findings(found: Sequence[Finding], console: Console) -> None:
    """The findings, the worst first, and the verdict."""
    for finding in ordered(found):
        console.info("")
        console.info(f"{finding.severity.upper()} {finding.id}: {finding.what}")
        for place in finding.read:
            console.info(f"  read: {place}")
        console.info(f"  why: {finding.why}")
        if finding.cure is not None:
            console.info(f"  cure: {finding.cure}")
    console.info("")
    console.info(verdict(found))


def ordered(found: Sequence[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))


def counts(found: Sequence[Finding]) -> dict[str, int]:
    return {word: sum(f.severity is severity for f in found) for severity, word in _COUNTED.items()}


def verdict(found: Sequence[Finding]) -> str:
    number = counts(found)
    notes = "note" if number["note"] == 1 else "notes"
    text = f"{len(found)} {'finding' if len(found) == 1 else 'findings'}"
    return f"{text}: {number['refuse']} refuse, {number['warn']} warn, {number['note']} {notes}"


def size(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 2**30:.1f} GiB"


def _lines(facts: Facts) -> list[str]:
    host, cpu, memory = facts.host, facts.cpu, facts.memory
    system = [_or(host.distribution), f"Linux {_or(host.kernel)}", f"glibc {_or(host.glibc)}"]
    if host.container:
        system.append(f"in a container ({host.container})")
    counted = [f"{_or(cpu.cores)} cores", f"{_or(cpu.threads)} threads", f"{_or(cpu.allowed)} for us"]
    if cpu.numa_nodes is not None:
        counted.append(f"{cpu.numa_nodes} NUMA {'node' if cpu.numa_nodes == 1 else 'nodes'}")
    limit = f"; limited to {size(memory.cgroup_limit)} by its control group" if memory.cgroup_limit is not None else ""
    shared = f"; shared memory {size(memory.shm_free)} free of {size(memory.shm_total)}"
    unified = "; the GPU uses it too" if host.unified_memory else ""
    return [
        f"machine: {', '.join(system)}",
        f"processor: {cpu.model or cpu.architecture}, {', '.join(counted)}",
        f"memory: {size(memory.available)} available of {size(memory.total)}{limit}{shared}{unified}",
        f"driver: {_driver(facts.driver)}",
    ]


def _driver(driver: Driver) -> str:
    said = f" ({driver.error})" if driver.error else ""
    if driver.version is None:
        return f"none{said}"
    cuda = f", up to CUDA {_version(driver.cuda)}" if driver.cuda else ""
    module = f", {driver.module} kernel module" if driver.module else ""
    return f"{driver.version}{cuda}{module}{said}"


def _cards(facts: Facts, console: Console) -> None:
    if facts.gpus:
        columns = ("GPU", "name", "capability", "memory", "PCIe", "clock", "power", "°C", "uuid")
        _table(console, "", columns, [_gpu(gpu) for gpu in facts.gpus])
    elif facts.driver.pci_devices:
        console.info(f"cards: on the bus, but no driver reads them: {', '.join(facts.driver.pci_devices)}")
    else:
        console.info("cards: none")


def _gpu(gpu: Gpu) -> tuple[object, ...]:
    if gpu.problem is not None:
        return (gpu.index, f"{gpu.name}: {gpu.problem}", *[""] * 7)
    used = "" if gpu.memory_used is None or gpu.memory_total is None else f"{size(gpu.memory_used)} used of "
    return (
        gpu.index,
        gpu.name,
        _version(gpu.compute_capability),
        used + ("shared" if gpu.memory_total is None else size(gpu.memory_total)),
        f"{_link(gpu.pcie_generation, gpu.pcie_width)} (at most {_link(gpu.pcie_generation_max, gpu.pcie_width_max)})",
        f"{_or(gpu.clock_sm)} of {_or(gpu.clock_sm_max)} MHz",
        f"{_watts(gpu.power_draw)} of {_watts(gpu.power_limit)} W",
        _or(gpu.temperature),
        gpu.uuid,
    )


def _link(generation: int | None, width: int | None) -> str:
    return f"{_or(generation)} ×{_or(width)}"


def _disks(disks: Sequence[Disk]) -> list[tuple[object, ...]]:
    """One line a file system: its folders share what is free."""
    groups: dict[tuple[object, ...], list[Disk]] = {}
    for disk in disks:
        groups.setdefault((disk.mount, disk.filesystem, disk.total, disk.writable, disk.problem), []).append(disk)
    rows: list[tuple[object, ...]] = []
    for members in groups.values():
        first = members[0]
        free = min((m.free for m in members if m.free is not None), default=None)
        remark = first.problem or ("not writable" if first.writable is False else "")
        purposes = ", ".join(member.purpose for member in members)
        rows.append((_or(first.mount), _or(first.filesystem), size(free), size(first.total), purposes, remark))
    return rows


def _toolkit(toolkit: Toolkit) -> tuple[object, ...]:
    versions = (_version(toolkit.nvcc), _version(toolkit.headers), _or(toolkit.cccl, "none"))
    return (toolkit.root, ", ".join(toolkit.seen_by), *versions, "; ".join(toolkit.problems))


def _environment(environment: Environment) -> tuple[object, ...]:
    torch = environment.torch
    cuda = "" if torch is None else "none (CPU)" if torch.cuda is None else _version(torch.cuda)
    problems = [text for text in (environment.problem, torch and torch.problem) if text]
    where = Path(environment.python).name if environment.python_version is None else environment.python_version
    remark = [*(["adopted"] if environment.adopted else []), *problems]
    name = torch.version if torch else "none"
    return (environment.stack, where, name, cuda, len(environment.distributions), "; ".join(remark))


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """With an empty column left out, and nothing at all without rows."""
    kept = [i for i, _ in enumerate(columns) if any(str(row[i]) for row in rows)]
    if rows:
        console.info("")
        console.table(title, [columns[i] for i in kept], [[row[i] for i in kept] for row in rows])


def _or(value: object, otherwise: str = "unknown") -> str:
    return otherwise if value is None else str(value)


def _version(version: Version2 | None) -> str:
    return "none" if version is None else f"{version[0]}.{version[1]}"


def _watts(watts: float | None) -> str:
    return "unknown" if watts is None else f"{watts:.0f}"
