"""A child's messages become a verdict, whatever they are."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120.host.links.outcome import Collector, Outcome, OutOfMemory, Verdict, judge
from sm120.process import Completed

DONE = [{"event": "done", "rank": rank, "checks": 4, "wrong": 0} for rank in range(2)]


def message(event: str, **content: Any) -> dict[str, Any]:
    return {"event": event, **content}


def line(content: dict[str, Any]) -> str:
    return json.dumps({"links": 1, **content})


def outcome(*messages: dict[str, Any] | str, code: int = 0, timed_out: bool = False, tail: str = "") -> Outcome:
    collector = Collector()
    for item in messages:
        collector(item if isinstance(item, str) else line(item))
    done = Completed(("python",), code, 12.0, tuple(tail.splitlines()), timed_out)
    return judge(collector, done, 2)


def timing(rank: int, median: float = 3e-5, **changes: Any) -> dict[str, Any]:
    whole = {"bytes": 8192, "ranks": 2, "calls": 300, "median": median, "p99": 6e-5, "blocks": [3e-5, 3.3e-5, 3.1e-5]}
    return message("timing", rank=rank, **{**whole, **changes})


def test_right_is_what_every_rank_said_it_had_checked() -> None:
    seen = outcome("NCCL version 2.28.9", timing(0), timing(1, 4e-5), *DONE)
    assert (seen.verdict, seen.detail, seen.checks) == (Verdict.RIGHT, "", 8)
    (slowest,) = seen.timings
    assert slowest.median == 4e-5
    assert slowest.noise == pytest.approx(0.3e-5 / 4e-5)
    assert slowest.bus_bandwidth == pytest.approx(8192 / 4e-5)


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    messages = [timing(r, 1e-3, bytes=2**20, ranks=8) for r in range(2)]
    (measured,) = outcome(*messages, *DONE).timings
    assert measured.bus_bandwidth == pytest.approx(2**20 / 1e-3 * 2 * 7 / 8)


def test_a_size_that_a_rank_did_not_time_is_no_timing() -> None:
    assert outcome(timing(0), *DONE).timings == ()


@pytest.mark.parametrize(
    ("messages", "code", "verdict", "words"),
    [
        ([], 0, Verdict.CRASH, "ended with exit code 0 before it was done"),
        ([DONE[0]], 0, Verdict.CRASH, "before it was done"),
        ([DONE[0], DONE[0]], 0, Verdict.CRASH, "before it was done"),
        (DONE, 1, Verdict.CRASH, "exit code 1"),
        (DONE, -9, Verdict.CRASH, "killed by SIGKILL"),
        (
            [message("done", rank=r, checks=0, wrong=0) for r in range(2)],
            0,
            Verdict.CRASH,
            "the child checked nothing",
        ),
        (
            [message("at", rank=1, step="joining"), message("lost", rank=1, code=-11, step="joining")],
            1,
            Verdict.CRASH,
            "rank 1 was killed by SIGSEGV in joining",
        ),
        (
            [message("failed", rank=0, kind="error", message="NCCL error"), message("lost", rank=0, code=1)],
            1,
            Verdict.CRASH,
            "rank 0: NCCL error",
        ),
        (
            [message("hung", seconds=31.2, ranks=[[0, "joining", 31.2], [1, "starting", 2.0]])],
            1,
            Verdict.HANG,
            "silent for 31 s: rank 0 in joining for 31 s, rank 1 in starting for 2 s",
        ),
        (
            [*DONE[:1], message("wrong", rank=1, where={"first": 7}), message("done", rank=1, checks=4, wrong=1)],
            0,
            Verdict.WRONG,
            "1 of 8 results are wrong",
        ),
        (
            [message("wrong", rank=1, where={"first": 7}), message("hung", seconds=31, ranks=[])],
            1,
            Verdict.WRONG,
            "1 of its results are wrong",
        ),
    ],
)  # fmt: skip
def test_everything_else_has_a_verdict_and_a_reason(
    messages: list[dict[str, Any]], code: int, verdict: Verdict, words: str
) -> None:
    seen = outcome(*messages, code=code)
    assert seen.verdict == verdict
    assert words in seen.detail


def test_what_was_wrong_is_kept_with_its_rank() -> None:
    seen = outcome(message("wrong", rank=1, where={"first": 7, "rank": 0}), *DONE)
    assert seen.where == ({"first": 7, "rank": 1},)


def test_many_wrong_results_are_counted_and_the_first_are_kept() -> None:
    seen = outcome(*[message("wrong", rank=0, where={"first": i}) for i in range(100)], *DONE)
    assert seen.detail == "100 of 8 results are wrong"
    assert [where["first"] for where in seen.where] == list(range(16))


def test_a_child_that_was_stopped_by_its_limit_hung_where_it_last_was() -> None:
    seen = outcome(message("at", rank=0, step="timing copies"), code=-9, timed_out=True)
    assert seen.verdict == Verdict.HANG
    assert seen.detail == "not done within 12 s: rank 0 in timing copies"
    assert outcome(code=-9, timed_out=True).verdict == Verdict.HANG


def test_a_crash_shows_the_last_lines_that_are_no_messages() -> None:
    tail = "old\nolder\nNCCL WARN one\n" + line(message("ready", rank=0)) + "\nNCCL WARN two\n\nlast"
    seen = outcome(message("lost", rank=0, code=1), code=1, tail=tail)
    assert seen.detail.splitlines()[1:] == ["  NCCL WARN one", "  NCCL WARN two", "  last"]


def test_out_of_memory_is_no_verdict_on_links() -> None:
    with pytest.raises(OutOfMemory, match="Tried to allocate"):
        outcome(message("failed", rank=1, kind="memory", message="OutOfMemoryError: Tried to allocate 1 GiB"), code=1)


def test_a_pair_and_a_machine_are_read() -> None:
    seen = outcome(
        message("pair", rank=0, direct=False),
        message("bandwidth", rank=0, by={"forth": 2.5e10, "both": 4}),
        message("machine", rank=0, **MACHINE),
        message("stuck", pids=[12, 13]),
        *DONE,
    )
    assert seen.direct is False
    assert seen.bandwidth == {"forth": 2.5e10, "both": 4.0}
    assert seen.machine == MACHINE
    assert seen.stuck == (12, 13)


MACHINE = {
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "package": None,
    "gpus": [{"uuid": "GPU-1", "name": "card", "free": 96 << 30}],
}
NO_PROTOCOL = [
    line(message("machine", rank=0, **{**MACHINE, "cuda": 13})),
    line(message("machine", rank=0, **{**MACHINE, "gpus": 2})),
    line(message("machine", rank=0, **{**MACHINE, "gpus": [{"uuid": "GPU-1", "name": "card", "free": "much"}]})),
    line(message("wrong", rank=0, where={"first": 1})).replace("1}", "1e999}"),
    line(timing(0, 5e-324, blocks=[0, 1e300])),
    '{"links": 1, "event": "done", "rank": 0',
    '{"links": 1, "event": "done", "rank": 0}',
    line(message("done", rank=0, checks=-1, wrong=0)),
    line(message("done", rank=True, checks=1, wrong=0)),
    line(message("done", rank=2, checks=1, wrong=0)),
    line(message("done", rank=0, checks=1.5, wrong=0)),
    line(message("invented", rank=0)),
    line({"event": ["at"], "rank": 0}),
    line(message("garbled", rank=0, line="x")),
    line(message("at", rank=0)),
    line(message("wrong", rank=0, where=7)),
    line(message("wrong", rank=0, where=["ab"])),
    line(timing(0, 0.0)),
    line(timing(0, -1.0)),
    line(timing(0, blocks=[])),
    line(timing(0, blocks="3")),
    line(timing(0, ranks=0)),
    line(timing(0, p99=None)),
    line(timing(0)).replace("3e-05", "NaN"),
    line(timing(0)).replace("3e-05", "1e999"),
    line(message("bandwidth", rank=0, by=[1])),
    line(message("bandwidth", rank=0, by={"forth": "fast"})),
    line(message("hung", seconds="long", ranks=[])),
    line(message("hung", seconds=3, ranks=[[0, "joining"]])),
    line(message("hung", seconds=3, ranks=5)),
    line(message("stuck", pids=["x"])),
    line(message("lost", rank=0, code=10**30)),
    line(message("lost", rank=0, code="-9")),
    '{"links": 1, ' + '"a": [' * 100_000,
]


@pytest.mark.parametrize("text", NO_PROTOCOL)
def test_what_is_not_the_protocol_is_a_crash_with_the_line(text: str) -> None:
    seen = outcome(*DONE, text)
    assert seen.verdict == Verdict.CRASH
    assert seen.detail.startswith("sent what is not the protocol: " + text[:60])
    assert len(seen.detail) < 300


def test_control_characters_of_a_child_do_not_reach_the_user() -> None:
    assert "\x1b" not in outcome('{"links": 1, "\x1b[2J": ').detail
    assert "\x1b" not in outcome(message("at", rank=0, step="a\x1b[2J"), timed_out=True).detail


def test_noise_is_no_message() -> None:
    for noise in ("", "{", '{"event": "done"}', '[rank 0] {"links": 1, "event": "wrong"}', "\x00\xff"):
        assert outcome(noise, *DONE).verdict == Verdict.RIGHT


def test_a_flood_of_messages_is_a_crash_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm120.host.links.outcome._MOST_LINES", 10)
    collector = Collector()
    for _ in range(1000):
        collector(line(message("ready", rank=0)))
    assert len(collector.messages) == 10
    assert judge(collector, Completed((), 0, 1.0, ()), 2).verdict == Verdict.CRASH


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    ["rank", "step", "where", "checks", "wrong", "seconds", "ranks", "pids", "by", "direct", "kind", "message", "code",
     "bytes", "calls", "median", "p99", "blocks"]
)  # fmt: skip
EVENTS = st.sampled_from(
    ["ready", "at", "wrong", "timing", "pair", "bandwidth", "machine", "done", "lost", "hung", "stuck", "failed"]
)


@given(st.lists(st.tuples(EVENTS, st.dictionaries(FIELDS, JSON, max_size=8)), max_size=5), st.integers(-64, 255))
def test_no_message_is_an_exception(messages: list[tuple[str, dict[str, Any]]], code: int) -> None:
    try:
        seen = outcome(*[{"rank": 0, **content, "event": event} for event, content in messages], code=code)
    except OutOfMemory:
        return
    assert seen.verdict in set(Verdict)
    assert all(math.isfinite(timing.median) for timing in seen.timings)
