"""The host's memory, and the limits that programs run under."""

from collections.abc import Iterator

from sm120.host.facts import Facts
from sm120.host.findings import Finding, Severity
from sm120.host.rules.reading import GIB, cards, count, gib, selection

_COMFORTABLE = 30 * GIB  # a machine with 32 GB shows a little less
_SHARED = GIB  # what NVIDIA's containers ask for with --shm-size=1g (NCCL documentation, troubleshooting)
_FILES = 4096
_PINNED = 64 * 2**20


def host_memory(facts: Facts) -> Iterator[Finding]:
    """Loading and building take host memory; a cgroup's limit counts as the machine's size."""
    sizes = {"this machine": facts.memory.total, "this container or session": facts.memory.cgroup_limit}
    known = {name: size for name, size in sizes.items() if size is not None}
    if not known or not cards(facts) or facts.host.unified_memory:
        return
    name = min(known, key=lambda key: known[key])
    if known[name] < _COMFORTABLE:
        yield Finding(
            id="host-memory",
            severity=Severity.NOTE,
            what=f"Of host memory {name} has {gib(known[name])}.",
            read=tuple(
                f"{gib(size)}: {'/proc/meminfo' if key == 'this machine' else 'cgroup'}" for key, size in known.items()
            ),
            why="Weights pass through it, and compilers take 3 to 5 GiB for each job: a build or a server that "
            "ends with “Killed” has met this limit.",
            cure=None if name == "this machine" else "give it more, as in: docker run --memory",
        )


def unified_memory(facts: Facts) -> Iterator[Finding]:
    """GPU and CPU share memory: what counts is MemAvailable, not MemFree (vllm #48140, #46307)."""
    memory = facts.memory
    if not facts.host.unified_memory or memory.available is None or memory.total is None:
        return
    low = memory.available < memory.total / 4
    cached = f", and {gib(memory.cached)} are page cache that can be had back" if memory.cached is not None else ""
    free = f" ({gib(memory.free)} free{cached})" if memory.free is not None else ""
    yield Finding(
        id="unified-memory",
        severity=Severity.WARN if low else Severity.NOTE,
        what=f"GPU and CPU share {gib(memory.total)}, of which {gib(memory.available)} are available{free}.",
        read=(f"MemAvailable {gib(memory.available)}, MemTotal {gib(memory.total)}: /proc/meminfo",),
        why="A fraction given to a server is no bound: profiling overshoots it, and the whole machine stops when "
        "memory runs out."
        if low
        else "Programs that look at MemFree refuse to start although there is enough; and a fraction given to a server "
        "is no bound, since profiling overshoots it.",
        cure="see what holds it, largest first: ps aux --sort -rss" if low else None,
    )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """NCCL between cards without peer access goes through /dev/shm; a container has 64 MiB unless told otherwise."""
    total = facts.memory.shm_total
    if total is not None and total < _SHARED and len(selection(facts).gpus) > 1:
        yield Finding(
            id="shared-memory",
            severity=Severity.WARN,
            what=f"Shared memory has {total / 2**20:.0f} MiB, with {count(len(selection(facts).gpus), 'card')}.",
            read=(f"{total} bytes: /dev/shm",),
            why="NCCL's shared memory does not fit: it ends with “No space left on device” or with a bus error.",
            cure="start the container with --shm-size=8g (or --ipc=host)"
            if facts.host.container
            else "sudo mount -o remount,size=50% /dev/shm",
        )


def limits(facts: Facts) -> Iterator[Finding]:
    """Limits on open files and on locked memory (NCCL documentation, troubleshooting)."""
    if not cards(facts):
        return
    files = facts.limits.get("nofile")
    if files is not None and files < _FILES:
        yield Finding(
            id="limits",
            severity=Severity.NOTE,
            what=f"A program may hold {files} files open.",
            read=(f"nofile {files}: getrlimit",),
            why="A server at high concurrency needs one for each connection; SGLang raises the limit itself if it may.",
            cure="ulimit -n 65535",
        )
    locked = facts.limits.get("memlock")
    if facts.host.container and locked is not None and locked < _PINNED and len(selection(facts).gpus) > 1:
        yield Finding(
            id="limits",
            severity=Severity.NOTE,
            what=f"In this container a program may lock {locked // 1024} KiB of memory.",
            read=(f"memlock {locked // 1024} KiB: getrlimit",),
            why="NCCL over a network card locks what it sends; between the cards of one machine it does not need to.",
            cure="start the container with --ulimit memlock=-1",
        )
