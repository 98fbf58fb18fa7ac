"""The plan of jobs, and the memory that earlier builds needed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120.build.compile import Jobs, plan_jobs, remember, remembered
from sm120.build.compile.jobs import halved
from sm120.state import State

GB = 10**9


def plan(**given: object) -> Jobs:
    usual = {
        "cores": 2,
        "available": 17_100_000_000,
        "architectures": 1,
        "gb_per_thread": 4.0,
        "asked": None,
        "measured": False,
    }
    return plan_jobs(**{**usual, **given})  # type: ignore[arg-type] # keywords of the tests


@pytest.mark.parametrize(
    ("given_", "jobs", "threads", "reason"),
    [
        pytest.param({}, 2, 1, "2 jobs: 2 cores; 17.1 GB available would allow 4 at 4.0 GB each", id="cores"),
        pytest.param(
            {"cores": 16, "available": 9 * GB},
            2,
            1,
            "2 jobs: 9.0 GB available at 4.0 GB each; 16 cores would allow 16",
            id="memory",
        ),
        pytest.param(
            {"gb_per_thread": 2.5, "measured": True},
            2,
            1,
            "2 jobs: 2 cores; 17.1 GB available would allow 6 at 2.5 GB each, as measured here",
            id="measured",
        ),
        pytest.param(
            {"cores": 16, "architectures": 2, "available": 40 * GB},
            5,
            2,
            "5 jobs of 2 threads: 40.0 GB available at 8.0 GB each; 16 cores would allow 8",
            id="two architectures",
        ),
        pytest.param(
            {"architectures": 5},
            1,
            2,
            "1 job of 2 threads: 2 cores; 17.1 GB available would allow 2 at 8.0 GB each",
            id="not more than two threads",
        ),
    ],
)
def test_plan(given_: dict[str, object], jobs: int, threads: int, reason: str) -> None:
    found = plan(**given_)
    assert (found.jobs, found.threads, found.reason, found.tight) == (jobs, threads, reason, False)


def test_what_the_user_asks_wins_and_is_marked_when_memory_says_less() -> None:
    found = plan(asked=8)
    assert found.jobs == 8
    assert found.tight
    assert found.reason == "8 jobs, as asked: 17.1 GB available would allow 4 at 4.0 GB each"
    assert not plan(asked=4).tight


def test_too_little_for_one_is_one_and_marked() -> None:
    found = plan(available=2 * GB)
    assert (found.jobs, found.tight) == (1, True)
    assert found.reason == "1 job: 2.0 GB available, and a job may need 4.0 GB"


@given(
    cores=st.integers(1, 1024),
    available=st.integers(0, 2**44),
    architectures=st.integers(0, 20),
    each=st.floats(0.01, 200),
    asked=st.none() | st.integers(1, 2000),
)
def test_plan_never_asks_for_more_than_there_is(
    cores: int, available: int, architectures: int, each: float, asked: int | None
) -> None:
    found = plan(cores=cores, available=available, architectures=architectures, gb_per_thread=each, asked=asked)
    assert found.jobs >= 1
    assert 1 <= found.threads <= 2
    need = found.jobs * found.threads * each * 1e9
    if asked is not None:
        assert found.jobs == asked
    else:
        assert found.jobs == 1 or found.jobs * found.threads <= cores
    assert found.tight or need <= available * (1 + 1e-9)
    assert not found.tight or need > available * (1 - 1e-9)
    assert halved(found).jobs == max(1, found.jobs // 2)


def test_half_of_one_is_one_and_says_why() -> None:
    three = halved(plan(asked=7))
    assert (three.jobs, three.reason) == (3, "3 jobs: 7 ran out of memory")
    assert halved(halved(three)).jobs == 1


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(root=tmp_path / ".sm120", runs=tmp_path / "runs")


def test_nothing_is_remembered_at_first(state: State) -> None:
    assert remembered(state, "stable/sgl-kernel") is None


def test_the_largest_build_counts(state: State) -> None:
    remember(state, "stable/sgl-kernel", 3.1412)
    remember(state, "stable/sgl-kernel", 0.4)
    remember(state, "cpu/sgl-kernel", 1.0)
    assert remembered(state, "stable/sgl-kernel") == 3.15
    assert remembered(state, "cpu/sgl-kernel") == 1.0
    remember(state, "stable/sgl-kernel", 5)
    assert remembered(state, "stable/sgl-kernel") == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": 2, "gb_per_thread": {"a": 3}}',
        '{"schema": 1, "gb_per_thread": []}',
        '{"schema": 1, "gb_per_thread": {"a": -1}}',
        '{"schema": 1, "gb_per_thread": {"a": "3"}}',
        '{"schema": 1, "gb_per_thread": {"a": true}}',
        '{"schema": 1, "gb_per_thread": {"a": NaN}}',
    ],
)
def test_a_damaged_memory_says_nothing_and_is_made_again(state: State, text: str) -> None:
    path = state.root / "build" / "memory.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert remembered(state, "a") is None
    remember(state, "a", 2.0)
    assert remembered(state, "a") == 2.0
