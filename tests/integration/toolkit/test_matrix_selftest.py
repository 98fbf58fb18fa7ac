"""The self-test over one or two worker processes."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.toolkit.matrix_scenario import Scenario, perform_in, settle

from sm120.errors import PreflightError
from sm120.matrix.options import Options
from sm120.matrix.selftest import run, workers_for

MUTANTS = [{"name": f"fault {n}", "operation": "dense", "kind": "fault"} for n in range(4)]
MUTANTS += [{"name": "fault 0", "operation": "moe", "kind": "fault"}]
MUTANTS += [{"name": "split-K", "operation": "moe", "kind": "right"}]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path) -> Iterator[None]:
    settle(tmp_path)
    threads = set(threading.enumerate())
    yield
    assert psutil.Process().children(recursive=True) == []
    assert set(threading.enumerate()) == threads


def self_test(scenario: Scenario, seeds: int = 1) -> tuple[int, dict[str, Any]]:
    outcome = perform_in(scenario, Options(json=True, self_test=True, seed=3, seeds=seeds))
    return outcome.code, dict(outcome.document["self_test"])


def test_every_mutant_under_every_seed(tmp_path: Path) -> None:
    code, found = self_test(Scenario(tmp_path, mutants=MUTANTS), seeds=3)
    assert code == 0
    assert (found["faults"], found["variants"], found["missed"], found["false_alarms"]) == (5, 1, 0, 0)
    assert found["criteria"]["cosine>0.97"] == {"missed": 5, "rejected_right": 0}
    assert found["criteria"]["deepgemm<0.02"] == {"missed": 0, "rejected_right": 0}
    assert [mutant["name"] for mutant in found["mutants"]] == [mutant["name"] for mutant in MUTANTS]
    assert all([record["seed"] for record in mutant["records"]] == [3, 4, 5] for mutant in found["mutants"])
    (record,) = (tmp_path / "runs").glob("*/self-test.json")
    assert json.loads(record.read_text())["self_test"]["faults"] == 5


@pytest.mark.parametrize(
    ("name", "missed", "false_alarms"),
    [pytest.param("fault 2", 1, 0, id="missed"), pytest.param("split-K", 0, 1, id="alarm")],
)
@pytest.mark.parametrize("what", ["wrong", "segv", "garbage", "refuse"])
def test_a_wrong_judge_is_told(tmp_path: Path, name: str, what: str, missed: int, false_alarms: int) -> None:
    code, found = self_test(Scenario(tmp_path, mutants=MUTANTS, do={name: what}))
    assert code == 14
    assert (found["missed"], found["false_alarms"]) == (missed, false_alarms)
    assert found["errors"] == (0 if what == "wrong" else 1)
    assert sum(not mutant["right"] for mutant in found["mutants"]) == 1


def test_nothing_to_judge(tmp_path: Path) -> None:
    assert self_test(Scenario(tmp_path))[0] == 3


@pytest.mark.parametrize("what", ["segv", "garbage", "refuse"])
def test_a_worker_that_cannot_list_its_faults(tmp_path: Path, what: str) -> None:
    with pytest.raises(PreflightError, match="could not list its faults"):
        self_test(Scenario(tmp_path, mutants=MUTANTS, do={"list": what}))


def test_two_faults_must_not_share_a_name(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="share a name"):
        self_test(Scenario(tmp_path, mutants=[*MUTANTS, MUTANTS[0]]))


def test_a_worker_that_never_starts_ends_it(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="does not start"):
        self_test(Scenario(tmp_path, mutants=MUTANTS, do={"hello": "exit1"}))


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    many = [{"name": f"fault {n}", "operation": "dense", "kind": "fault"} for n in range(30)]
    scenario = Scenario(tmp_path, mutants=many)
    seen: list[str] = []
    records = run(scenario.door(tmp_path), [0, 1], 2, lambda total, name: seen.append(f"{name}/{total}"))
    assert len(records) == len(seen) == 60
    assert seen[0].endswith("/60")
    assert [(record.name, record.seed) for record in records] == [(m["name"], s) for m in many for s in (0, 1)]


@pytest.mark.parametrize(("cpus", "expected"), [(1, 1), (2, 2), (64, 2)])
def test_workers(cpus: int, expected: int) -> None:
    assert workers_for(cpus) == expected
