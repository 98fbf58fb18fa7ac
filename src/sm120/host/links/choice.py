"""Which setting: the fastest of those that are right everywhere. A rule over data."""

from collections.abc import Callable, Sequence

from sm120.host.links.outcome import Verdict
from sm120.host.links.plan import DEFAULT, Setting
from sm120.host.links.report import SettingResult

LEAST_NOISE = 0.03
"""Relative; smaller differences are none, however steady the times seem."""
_MOST_NOISE = 0.25  # on a busier machine than that, the times say little; rightness decides


def choose(results: Sequence[SettingResult], *, peer_memory_trusted: bool) -> tuple[Setting | None, str]:
    """The setting to use and why; None where nothing was right.

    Right everywhere comes first; where copies between GPUs were wrong, only settings that keep out of peer memory
    count, since a sum that came out right says less than a copy that did not. Then the lower latency of decode-sized
    messages, then the higher bandwidth; what does not differ by more than the noise is a tie, which goes to the
    default, else to the setting that was tried first.
    """
    right = [result for result in results if result.verdict == Verdict.RIGHT]
    eligible = [result for result in right if peer_memory_trusted or result.setting.peer_memory is False]
    if not eligible:
        if right:
            return None, "copies between GPUs are wrong, and no setting without peer access gives right sums"
        return None, "no setting gives right sums"
    tied = _fastest(_fastest(eligible, _decode), _large)
    best = next((result for result in tied if result.setting == DEFAULT), tied[0])
    distrust = "" if peer_memory_trusted else "copies between GPUs are wrong; without peer access, "
    return best.setting, distrust + _reason(best, eligible, tied=len(tied) > 1)


def _decode(result: SettingResult) -> float | None:
    return result.decode_seconds


def _large(result: SettingResult) -> float | None:
    return result.large_seconds


def _fastest(
    results: Sequence[SettingResult], seconds: Callable[[SettingResult], float | None]
) -> Sequence[SettingResult]:
    """Those that are not slower than the fastest by more than the noise of the two; all, where nothing was timed."""
    timed = [(own, result) for result in results if (own := seconds(result)) is not None]
    if not timed:
        return results
    least, fastest = min(timed, key=lambda item: item[0])
    return [result for own, result in timed if own <= least * (1 + _noise(fastest, result))]


def _noise(*results: SettingResult) -> float:
    """The typical difference between blocks of the same measurement, of the noisier of the settings."""
    import statistics

    typical = [statistics.median([timing.noise for timing in result.timings]) for result in results if result.timings]
    return min(max([LEAST_NOISE, *typical]), _MOST_NOISE)


def _reason(best: SettingResult, eligible: Sequence[SettingResult], *, tied: bool) -> str:
    if len(eligible) == 1:
        return "it is the only one that gives right results everywhere"
    if tied:
        return f"as fast as the fastest of {len(eligible)} that give right results everywhere"
    default = next((result for result in eligible if result.setting == DEFAULT), None)
    own, other = best.decode_seconds, default.decode_seconds if default is not None and default != best else None
    if own and other and other > own:
        return f"decode-sized messages take {own * 1e6:.0f} µs instead of {other * 1e6:.0f} µs by default"
    return f"the fastest of {len(eligible)} that give right results everywhere"
