"""Findings about links."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sm120.host.findings import Finding, Severity
from sm120.host.links.outcome import Verdict
from sm120.host.links.plan import DEFAULT, KIB, THROUGH_HOST
from sm120.host.links.report import LinkReport, PairResult, SettingResult, first_line, in_words, size_name

_AGAIN: Final = "scripts/inv doctor --links"
_SAID: Final = {Verdict.WRONG: "gives wrong sums", Verdict.HANG: "hangs", Verdict.CRASH: "crashes"}


def findings(report: LinkReport) -> Iterator[Finding]:
    """What the report means: which links lie, which setting to use, and what is in the way."""
    yield from _copies(report)
    yield from _settings(report)
    if report.set_aside:
        own = " ".join(f"{name}={value}" for name, value in report.set_aside.items())
        yield Finding(
            id="links-variables-set-aside",
            severity=Severity.NOTE,
            what=f"{own} was set aside while other settings were tried.",
            read=(f"{own}: environment",),
            why="The setting that serve uses takes its place.",
            cure=None,
        )
    if report.stuck:
        pids = ", ".join(map(str, report.stuck))
        yield Finding(
            id="links-process-stuck",
            severity=Severity.WARN,
            what=f"Of this check, processes {pids} hang in the driver and cannot be killed.",
            read=(f"processes {pids} outlived SIGKILL: {_AGAIN}",),
            why="They hold GPU memory, and what was measured after them is doubtful.",
            cure="sudo nvidia-smi --gpu-reset; where that does not help, reboot",
        )


def _copies(report: LinkReport) -> Iterator[Finding]:
    bad = [pair for pair in report.pairs if pair.outcome.verdict != Verdict.RIGHT]
    if not bad:
        return
    which = "; ".join(_pair(report, pair) for pair in bad)
    read = tuple(f"{_seen(pair)}: copies between {_pair(report, pair)}" for pair in bad)
    if any(pair.staged_wrong for pair in bad):
        yield Finding(
            id="links-copies-wrong",
            severity=Severity.REFUSE,
            what=f"Copies that go through the host arrive wrong: {which}.",
            read=read,
            why="Data is damaged on the way to a card or from it. No setting of NCCL or of the server helps.",
            cure="dmesg | grep -iE 'xid|aer|pcie', reseat the cards and risers that it names, then: " + _AGAIN,
        )
        return
    off = report.set_aside.get("NCCL_P2P_DISABLE") == "1"
    wrong = any(pair.outcome.verdict == Verdict.WRONG for pair in bad)
    yield Finding(
        id="links-peer-copies-wrong" if wrong else "links-peer-copies-fail",
        severity=Severity.WARN if off else Severity.REFUSE,
        what=f"Copies from GPU to GPU {'arrive wrong while every call reports success' if wrong else 'do not end'}:"
        f" {which}. {_seen(bad[0])}.",
        read=read,
        why="Peer access must not be used: NCCL and the server's own all-reduce would add up what was never sent. "
        "Usual causes are an IOMMU that translates (amd_iommu, intel_iommu, ACS) and a host bridge that does not route "
        "between its ports.",
        cure=f"{THROUGH_HOST.command}, and SGLang's --disable-custom-all-reduce" if not off else None,
    )


def _pair(report: LinkReport, pair: PairResult) -> str:
    return f"{report.names.get(pair.a, pair.a)} and {report.names.get(pair.b, pair.b)}"


def _seen(pair: PairResult) -> str:
    """The first thing that was wrong with a pair."""
    outcome = pair.outcome
    if outcome.verdict != Verdict.WRONG or not outcome.where:
        return f"{outcome.verdict}, {first_line(outcome.detail)}"
    where = outcome.where[0]
    size = where.get("bytes")
    copy = f"{size_name(size) if isinstance(size, int) else '?'} ({where.get('how')}, {where.get('direction')})"
    return (
        f"{outcome.verdict}, {first_line(outcome.detail)}: in a copy of {copy}, {where.get('count')} bytes"
        f" of {where.get('of')} from offset {where.get('first')} on, where {_there(where)}"
    )


def _there(where: Mapping[str, Any]) -> str:
    kind = {
        "zeros": "there are only zeros",
        "stale": "the destination kept what it held before",
        "shifted": f"bytes of another place stand, {where.get('by')} away",
    }.get(str(where.get("kind")), f"{where.get('got')} stands instead of {where.get('expected')}")
    return kind if where.get("source_sound", True) else f"{kind}; the source reads back wrong too"


def _settings(report: LinkReport) -> Iterator[Finding]:
    read = tuple(_line(result) for result in report.settings if result.verdict != Verdict.SKIPPED)
    if report.chosen is None:
        yield Finding(
            id="links-no-setting-works",
            severity=Severity.REFUSE,
            what=f"None of the {len(read)} NCCL settings that were tried can be used: {report.reason}.",
            read=read,
            why="Tensor parallelism over these cards would hang, crash or compute with wrong numbers.",
            cure=f"NCCL_DEBUG=INFO {_AGAIN}, and read what NCCL says in its logs",
        )
        return
    default = report.result_of(DEFAULT)
    if default is not None and default.verdict in _SAID:
        yield Finding(
            id="links-default-fails",
            severity=Severity.WARN,
            what=f"NCCL {_SAID[default.verdict]} by default ({first_line(default.detail)}), and works with"
            f" {in_words(report.chosen)}.",
            read=read,
            why="serve sets that by itself; whatever else is started over these cards needs it too.",
            cure=report.chosen.command,
        )
    if report.chosen.last_resort:
        yield Finding(
            id="links-only-sockets-work",
            severity=Severity.WARN,
            what="All-reduce works over sockets only.",
            read=read,
            why="Every layer of every token waits for it.",
            cure=f"df -h /dev/shm; a container needs --ipc=host or --shm-size=16g; then: {_AGAIN}",
        )
    yield Finding(
        id="links-setting",
        severity=Severity.NOTE,
        what=f"serve will run NCCL with {in_words(report.chosen) or 'its defaults'}: {report.reason}"
        f"{_speed(report.result_of(report.chosen))}.",
        read=read,
        why="Messages of decoding are small and many; cards without NVLink spend much of their time on them.",
        cure=None,
    )


def _speed(result: SettingResult | None) -> str:
    timings = result.timings if result is not None else ()
    if not timings:
        return ""
    small, large = min(timings, key=lambda timing: abs(timing.bytes - 8 * KIB)), timings[-1]
    return (
        f"; {size_name(small.bytes)} take {small.median * 1e6:.0f} µs (99 % within {small.p99 * 1e6:.0f} µs) over"
        f" {small.ranks} GPUs, and {size_name(large.bytes)} go at {large.bus_bandwidth / 1e9:.1f} GB/s"
    )


def _line(result: SettingResult) -> str:
    sizes = ", ".join(str(len(group.gpus)) for group in result.groups)
    said = first_line(result.detail) or f"all-reduces of {sizes} GPUs"
    return f"{result.verdict}, {said}: {in_words(result.setting) or 'no variable set'}"
