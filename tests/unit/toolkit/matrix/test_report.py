import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sm120.console import Console, Progress
from sm120.errors import UsageError
from sm120.matrix import selftest
from sm120.matrix.grid import Repeat, failure_lines, rows, show, summary
from sm120.matrix.journal import Journal
from sm120.matrix.observer import Watcher
from sm120.matrix.options import Options, check
from sm120.matrix.plan import Cell, Plan, Result, Subject
from sm120.matrix.selftest import Record, gather, report
from sm120.matrix.verdict import grid

REPEAT = Repeat("Qwen3.5-397B-A17B", 4, 7, "default")
SUBJECTS = (
    Subject("dense:a", "dense", None, "a", None, servable=False),
    Subject("dense:b", "dense", None, "b", "capability 9.0 is not 12.0", servable=False),
    Subject("moe:x", "moe", "x", None, None, servable=False),
)
CELLS = (Cell("dense/a/c", "dense:a", None, 1.0, {}), Cell("moe/x/it's", "moe:x", None, 1.0, {}))
PLAN = Plan(SUBJECTS, CELLS, ("experts 512 -> 16: a CPU",))
FAILED = Result(
    "FAIL",
    "wrong",
    findings=(
        {
            "tier": "T1",
            "check": "identity",
            "condition": {"m": 17, "tile": [0, 1], "expert": None},
            "message": "one row",
            "worst": [{"row": 3, "col": 5, "got": None, "want": 1.5, "bound": 0.0}],
        },
    ),
    reproducer="/runs/r/reproducers/c.py",
)
RESULTS = {"dense/a/c": Result("PASS", eta=0.97), "moe/x/it's": FAILED}


def test_the_grid_has_a_word_and_a_reason_everywhere() -> None:
    columns, table = rows(PLAN, grid(PLAN, RESULTS, has_shared_expert=False))
    assert columns == ["MoE \\ FP4 GEMM", "own cells", "a", "b"]
    assert table == [
        ["own cells", "", "PASS (1)", "UNSUPPORTED: capability 9.0 is not 12.0"],
        ["x", "FAIL: wrong", "FAIL: MoE: wrong", "FAIL: MoE: wrong"],
    ]


def test_a_failure_says_all_that_is_needed() -> None:
    assert list(failure_lines(CELLS[1], FAILED, REPEAT)) == [
        "FAIL moe/x/it's: wrong",
        "    T1 identity at m=17, tile=0,1: one row",
        "    worst element: row 3, col 5, got NaN, want 1.5, bound 0",
        "    again: scripts/inv validate-backends --model Qwen3.5-397B-A17B --tp 4 --seed 7 --only 'moe/x/it'\"'\"'s'",
        "    stand-alone reproducer: /runs/r/reproducers/c.py",
    ]


@pytest.mark.parametrize("cell", ["dense/a/c", "moe/x/it's", "a b", "a$b", "[x]*?"])
def test_the_command_is_one_for_a_shell(cell: str) -> None:
    model = "/a folder/it's"
    words = shlex.split(replace(REPEAT, model=model, profile="full", stack="s", device="cpu").command(cell))
    assert words[words.index("--model") + 1] == model
    assert words[words.index("--only") + 1] == cell
    assert words[words.index("--stack") + 1] == "s"
    assert "--full" in words


def test_everything_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show(Console.create(), PLAN, RESULTS, grid(PLAN, RESULTS, has_shared_expert=False), REPEAT)
    text = capsys.readouterr().out
    for part in ("UNSUPPORTED: capability 9.0", "FAIL moe/x/it's", "reduced: experts 512 -> 16: a CPU"):
        assert part in text
    assert text.rstrip().endswith("2 of 2 cells ran: 1 FAIL, 1 PASS; largest error of a PASS: 0.9700 of its bound")


def test_hundreds_of_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    cells = tuple(Cell(f"moe/x/{n}", "moe:x", None, 1.0, {}) for n in range(300))
    plan = Plan(SUBJECTS, cells, ())
    results = {cell.id: Result("CRASH", "gone") for cell in cells}
    show(Console.create(), plan, results, grid(plan, results, has_shared_expert=False), REPEAT)
    text = capsys.readouterr().out
    assert text.count("again: ") == 20
    assert "and 280 more cells that did not pass" in text


def test_summary_of_nothing() -> None:
    assert summary(Plan(SUBJECTS, (), ()), {}) == "0 of 0 cells ran: none"
    assert summary(PLAN, {}) == "0 of 2 cells ran: 2 not run"


def test_progress_goes_by_cost_and_counts_what_is_left(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []

    class Told(Progress):
        def advance(self, n: int = 1, label: str | None = None) -> None:
            seen.append((n, label or ""))

    cells = tuple(Cell(name, "moe:x", None, cost, {}) for name, cost in (("a", 5.0), ("b", 1.0), ("c", 3.0)))
    console = Console.create()
    with Journal.create(tmp_path / "j", {}) as journal:
        journal.append("a", Result("PASS"))
        watcher = Watcher(Plan(SUBJECTS, cells, ()), journal, console, Told(console, 100, ""))
        for name in ("b", "c", "c"):  # the last one amends
            watcher.begun(cells["abc".index(name)])
            watcher.ended(cells["abc".index(name)], Result("FAIL"))
    assert [sum(n for n, _ in seen[:i]) for i in range(1, 7)] == [0, 25, 25, 100, 100, 100]
    assert seen[0][1] == "% of the work, cell 1 of 3, b"
    with Journal.resume(tmp_path / "j") as journal:
        assert journal.results.keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(Options(quick=True, full=True), "exclude each other", id="profiles"),
        pytest.param(Options(tp=0), "--tp must be from 1", id="tp-0"),
        pytest.param(Options(tp=-2), "--tp must be from 1", id="tp-negative"),
        pytest.param(Options(tp=10**40), "--tp must be from 1 to 1024", id="tp-huge"),
        pytest.param(Options(seed=-1), "--seed must be from 0", id="seed"),
        pytest.param(Options(self_test=True, seeds=0), "--seeds must be from 1", id="seeds"),
        pytest.param(Options(seeds=3), "--seeds belongs to --self-test", id="seeds-alone"),
        pytest.param(Options(device="gpu"), "--device gpu", id="device"),
        pytest.param(Options(self_test=True, list=True), "--self-test and --list exclude", id="modes"),
        pytest.param(Options(dry_run=True, resume="last"), "--dry-run and --resume exclude", id="dry-resume"),
        pytest.param(Options(self_test=True, only=("a",)), "--self-test takes no --only", id="self-test-only"),
    ],
)
def test_flags_that_make_no_sense(options: Options, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(options)


def record(name: str, kind: str, seed: int, *, caught: bool, error: str | None = None, **criteria: bool) -> Record:
    return Record(name, kind, "dense", seed, caught, ("T1",) if caught else (), "c", 5.0, criteria, error)


RECORDS = [
    record("zero tile", "fault", 0, caught=True, cosine=True, deepgemm=False),
    record("zero tile", "fault", 1, caught=True, cosine=False, deepgemm=False),
    record("lost row", "fault", 0, caught=True, cosine=True, deepgemm=False),
    record("lost row", "fault", 1, caught=False, cosine=True, deepgemm=False),
    record("split-K", "right", 0, caught=False, cosine=True, deepgemm=True),
    record("split-K", "right", 1, caught=False, cosine=True, deepgemm=False),
    record("reversed", "right", 0, caught=True, cosine=True, deepgemm=True),
    record("reversed", "right", 1, caught=False, cosine=True, deepgemm=True),
]


def test_the_self_test_counts_what_was_missed_under_any_seed() -> None:
    found: dict[str, Any] = report(gather(RECORDS), 2, 3.21)["self_test"]
    mutants = found.pop("mutants")
    assert found == {
        "faults": 2,
        "missed": 1,
        "false_alarms": 1,
        "variants": 2,
        "errors": 0,
        "seeds": 2,
        "seconds": 3.2,
        "criteria": {
            "cosine": {"missed": 2, "rejected_right": 0},
            "deepgemm": {"missed": 0, "rejected_right": 1},
        },
    }
    assert [mutant["right"] for mutant in mutants] == [True, False, True, False]
    assert selftest.exit_code({"self_test": found}) == 14


def test_what_could_not_be_judged_is_never_right() -> None:
    for kind in ("fault", "right"):
        lost = record("m", kind, 0, caught=False, error="was killed by SIGSEGV")
        found = report(gather([lost]), 1, 0.0)
        assert (found["self_test"]["missed"], found["self_test"]["false_alarms"]) == (
            (1, 0) if kind == "fault" else (0, 1)
        )
        assert selftest.exit_code(found) == 14


def test_exit_codes_of_the_self_test() -> None:
    good = [r for r in RECORDS if r.name in ("zero tile", "split-K")]
    assert selftest.exit_code(report(gather(good), 2, 0.0)) == 0
    assert selftest.exit_code(report([], 1, 0.0)) == 3


def test_the_kill_table_names_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    mutants = gather(RECORDS)
    selftest.show(Console.create(), mutants, report(mutants, 2, 3.21))
    text = capsys.readouterr().out
    for part in (
        "MISSED 1/2",
        "REJECTED 1/2",
        "accepts 1/2",
        "WRONG: dense lost row with seed 1: not caught",
        "WRONG: dense reversed with seed 0: rejected by c",
        "1 of 2 faults caught, 1 of 2 right variants rejected, 2 seed(s), 3.2 s",
        "cosine: missed 2 of 2 faults, rejected 0 of 2 right variants",
    ):
        assert part in text
