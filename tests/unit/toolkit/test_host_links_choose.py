"""The rule that chooses a setting, on data."""

from dataclasses import replace

import pytest

from sm120.host.links import Outcome, Setting, SettingResult, Timing, Verdict, choose
from sm120.host.links.plan import DEFAULT, KIB, MIB, THROUGH_HOST, THROUGH_SOCKETS
from sm120.host.links.report import GroupResult

PEER = Setting(name="peer", variables={"NCCL_P2P_LEVEL": "SYS"}, reason="", peer_memory=True)


def result(
    setting: Setting,
    decode: float = 30.0,
    large: float = 20.0,
    noise: float = 0.01,
    verdicts: tuple[Verdict, ...] = (Verdict.RIGHT,),
) -> SettingResult:
    """Decode-sized messages in microseconds, large ones in milliseconds."""
    sizes = [(8 * KIB, decode * 0.8e-6), (64 * KIB, decode * 1.25e-6), (256 * MIB, large * 1e-3)]
    timings = tuple(
        Timing(bytes=size, ranks=2, calls=100, median=seconds, p99=seconds * 1.5, noise=noise)
        for size, seconds in sizes
    )
    return SettingResult(
        setting=setting,
        groups=tuple(
            GroupResult(gpus=("a", "b"), outcome=Outcome(verdict=v, timings=timings if v == Verdict.RIGHT else ()))
            for v in verdicts
        ),
    )


def chosen(*results: SettingResult, trusted: bool = True) -> Setting | None:
    return choose(results, peer_memory_trusted=trusted)[0]


def test_the_lower_latency_of_decoding_wins_whatever_the_bandwidth() -> None:
    assert chosen(result(DEFAULT, 60, 10), result(PEER, 30, 40)) == PEER
    assert chosen(result(DEFAULT, 30, 40), result(PEER, 60, 10)) == DEFAULT


def test_bandwidth_decides_between_equal_latencies() -> None:
    assert chosen(result(DEFAULT, 30.5, 40), result(PEER, 30, 20)) == PEER
    assert chosen(result(DEFAULT, 30, 40), result(PEER, 30.5, 20)) == PEER


def test_ties_go_to_the_default_and_else_to_the_first() -> None:
    assert chosen(result(PEER, 30, 20), result(DEFAULT, 30.8, 20.5)) == DEFAULT
    assert chosen(result(PEER, 30.5, 20), result(THROUGH_HOST, 30, 20.3)) == PEER
    assert chosen(result(THROUGH_HOST, 30.5, 20), result(PEER, 30, 20.3)) == THROUGH_HOST


def test_the_measured_noise_makes_a_tie() -> None:
    assert chosen(result(DEFAULT, 34, 20), result(PEER, 30, 20)) == PEER
    assert chosen(result(DEFAULT, 34, 20, noise=0.2), result(PEER, 30, 20)) == DEFAULT
    assert chosen(result(DEFAULT, 34, 20), result(PEER, 30, 20, noise=0.2)) == DEFAULT
    assert chosen(result(DEFAULT, 300, 20, noise=50.0), result(PEER, 30, 20)) == PEER  # no noise hides tenfold


@pytest.mark.parametrize("bad", [Verdict.WRONG, Verdict.HANG, Verdict.CRASH, Verdict.SKIPPED])
def test_only_what_is_right_everywhere_counts(bad: Verdict) -> None:
    assert chosen(result(DEFAULT, 30, verdicts=(bad,)), result(THROUGH_HOST, 90)) == THROUGH_HOST
    partly = result(DEFAULT, 30, verdicts=(Verdict.RIGHT, bad))
    assert chosen(partly, result(THROUGH_HOST, 90)) == THROUGH_HOST
    assert chosen(replace(partly, groups=()), result(THROUGH_HOST, 90)) == THROUGH_HOST
    setting, reason = choose([partly], peer_memory_trusted=True)
    assert setting is None
    assert reason == "no setting gives right sums"


def test_where_copies_were_wrong_only_settings_without_peer_memory_count() -> None:
    fast = (result(DEFAULT, 30), result(PEER, 20))
    assert chosen(*fast, result(THROUGH_HOST, 90), trusted=False) == THROUGH_HOST
    setting, reason = choose(fast, peer_memory_trusted=False)
    assert setting is None
    assert "without peer access" in reason
    _, reason = choose([*fast, result(THROUGH_HOST, 90)], peer_memory_trusted=False)
    assert reason.startswith("copies between GPUs are wrong")


def test_the_last_resort_is_as_good_as_any_when_it_is_alone() -> None:
    assert chosen(result(DEFAULT, verdicts=(Verdict.HANG,)), result(THROUGH_SOCKETS, 900)) == THROUGH_SOCKETS


def test_nothing_tried_is_nothing_chosen() -> None:
    assert chosen() is None


def test_without_times_rightness_decides() -> None:
    untimed = [
        SettingResult(setting=s, groups=(GroupResult(gpus=("a",), outcome=Outcome(verdict=Verdict.RIGHT)),))
        for s in (PEER, DEFAULT)
    ]
    assert chosen(*untimed) == DEFAULT


def test_the_reason_says_how_much_faster() -> None:
    _, reason = choose([result(DEFAULT, 60), result(PEER, 30)], peer_memory_trusted=True)
    assert reason == "decode-sized messages take 30 µs instead of 60 µs by default"
    _, reason = choose([result(PEER, 30, verdicts=(Verdict.HANG,)), result(DEFAULT, 60)], peer_memory_trusted=True)
    assert "only one" in reason
