"""What was seen of the links, whole: data, JSON both ways, and rows for a table."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sm120.host.findings import Finding
from sm120.host.links.outcome import Outcome, Timing, Verdict
from sm120.host.links.plan import DECODE_BYTES, KIB, MIB, Setting

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class Key:
    """What a record holds for: other cards, another driver or another NCCL need a new one."""

    gpus: tuple[str, ...]  # UUIDs, sorted
    driver: str | None
    nccl: str | None  # package and version; torch's own word where it is no package


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """Copies between two GPUs."""

    a: str  # UUIDs
    b: str
    outcome: Outcome

    @property
    def staged_wrong(self) -> bool:
        """Whether a copy was wrong that did not use peer access, so that switching it off is no cure."""
        return any(where.get("how") == "staged" or self.outcome.direct is False for where in self.outcome.where)


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """All-reduces of some GPUs."""

    gpus: tuple[str, ...]  # UUIDs
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class SettingResult:
    setting: Setting
    groups: tuple[GroupResult, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """RIGHT only where every group was; a setting that was not tried is SKIPPED."""
        verdicts = [group.outcome.verdict for group in self.groups]
        bad = [verdict for verdict in verdicts if verdict not in {Verdict.RIGHT, Verdict.SKIPPED}]
        if bad:
            return bad[0]
        return Verdict.RIGHT if verdicts and Verdict.SKIPPED not in verdicts else Verdict.SKIPPED

    @property
    def detail(self) -> str:
        """What was wrong with the first group that was not right."""
        return next((group.outcome.detail for group in self.groups if group.outcome.verdict != Verdict.RIGHT), "")

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Those of all GPUs together."""
        return self.groups[-1].outcome.timings if self.verdict == Verdict.RIGHT else ()

    @property
    def decode_seconds(self) -> float | None:
        """Geometric mean of the medians of decode-sized messages."""
        return mean([timing.median for timing in self.timings if timing.bytes <= DECODE_BYTES])

    @property
    def large_seconds(self) -> float | None:
        """Geometric mean of the medians of larger messages."""
        return mean([timing.median for timing in self.timings if timing.bytes > DECODE_BYTES])


def mean(values: Sequence[float]) -> float | None:
    """The geometric mean; None of nothing."""
    import statistics

    return statistics.geometric_mean(values) if values else None


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    key: Key
    taken: str  # UTC, ISO 8601
    stack: str
    names: Mapping[str, str]  # UUID → "GPU 0 (name)"
    pairs: tuple[PairResult, ...]
    settings: tuple[SettingResult, ...]
    chosen: Setting | None
    reason: str  # why that one, or why none
    set_aside: Mapping[str, str] = field(default_factory=dict)  # the user's variables that the settings decide

    @property
    def peer_memory_trusted(self) -> bool:
        """Whether GPUs may reach into each other's memory: every pair was right."""
        return all(pair.outcome.verdict == Verdict.RIGHT for pair in self.pairs)

    @property
    def stuck(self) -> tuple[int, ...]:
        """Processes that could not be killed."""
        every = [pair.outcome for pair in self.pairs] + [g.outcome for s in self.settings for g in s.groups]
        return tuple(pid for outcome in every for pid in outcome.stuck)

    def result_of(self, setting: Setting) -> SettingResult | None:
        return next((result for result in self.settings if result.setting == setting), None)

    def findings(self) -> tuple[Finding, ...]:
        from sm120.host.links.judge import findings

        return tuple(findings(self))

    def as_json(self) -> dict[str, Any]:
        document = dataclasses.asdict(self, dict_factory=_plain)
        return {"schema": SCHEMA, **document}

    def rows(self) -> list[list[str]]:
        """One row a setting, for `COLUMNS`."""
        return [_row(result, self.chosen) for result in self.settings]

    def pair_rows(self) -> list[list[str]]:
        """One row a pair, for `PAIR_COLUMNS`."""
        return [
            [
                f"{self.names.get(pair.a, pair.a)} – {self.names.get(pair.b, pair.b)}",
                pair.outcome.verdict,
                {True: "yes", False: "no", None: "?"}[pair.outcome.direct],
                *(f"{pair.outcome.bandwidth[d] / 1e9:.1f}" if d in pair.outcome.bandwidth else "" for d in _DIRECTIONS),
                first_line(pair.outcome.detail),
            ]
            for pair in self.pairs
        ]


_DIRECTIONS: Final = ("forth", "back", "both")
PAIR_COLUMNS: Final = ("pair", "copies", "peer access", "GB/s →", "GB/s ←", "GB/s both", "seen")
COLUMNS: Final = ("", "setting", "variables", "sums", "8 KiB (p99)", "64 KiB (p99)", "largest", "seen")


def _row(result: SettingResult, chosen: Setting | None) -> list[str]:
    by_size = {timing.bytes: timing for timing in result.timings}
    small = [by_size.get(size) for size in (8 * KIB, 64 * KIB)]
    largest = result.timings[-1] if result.timings else None
    return [
        "→" if result.setting == chosen else "",
        result.setting.name,
        in_words(result.setting),
        result.verdict,
        *("" if timing is None else f"{timing.median * 1e6:.0f} ({timing.p99 * 1e6:.0f}) µs" for timing in small),
        "" if largest is None else f"{largest.bus_bandwidth / 1e9:.1f} GB/s at {size_name(largest.bytes)}",
        first_line(result.detail),
    ]


def in_words(setting: Setting) -> str:
    """Its variables as a shell has them; empty where it sets none."""
    return " ".join(f"{name}={value}" for name, value in setting.variables.items())


def size_name(size: int) -> str:
    if size >= MIB and size % MIB == 0:
        return f"{size // MIB} MiB"
    return f"{size // KIB} KiB" if size >= KIB and size % KIB == 0 else f"{size} bytes"


def first_line(text: str) -> str:
    return text.split("\n", 1)[0]


def _plain(items: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in items}
