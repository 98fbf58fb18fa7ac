"""The doctor's rules on snapshots: what each says, and that healthy machines hear nothing worse than a note."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.unit.toolkit import host_snapshots as snapshots
from tests.unit.toolkit.host_snapshots import BROKEN, HEALTHY, NAMES

from sm120.host.codec import facts_from_json, facts_to_json, load_facts
from sm120.host.facts import Facts
from sm120.host.findings import Finding, Severity
from sm120.host.rules import RULES, judge


def said(facts: Facts) -> frozenset[tuple[str, str]]:
    return frozenset((finding.id, finding.severity.value) for finding in judge(facts))


@pytest.mark.parametrize("name", NAMES)
def test_snapshot_gets_exactly_these_findings(name: str) -> None:
    assert said(load_facts(snapshots.path_of(name))) == snapshots.expected(name)


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_machine_gets_nothing_worse_than_a_note(name: str) -> None:
    assert [finding for finding in judge(HEALTHY[name].facts) if finding.severity is not Severity.NOTE] == []


def test_files_are_those_of_the_builders() -> None:
    assert {path.stem for path in snapshots.FOLDER.glob("*.json")} == set(NAMES)
    stale = [name for name in NAMES if load_facts(snapshots.path_of(name)) != snapshots.facts_of(name)]
    assert stale == [], "python -m tests.unit.toolkit.host_snapshots writes them anew"


@pytest.mark.parametrize("name", NAMES)
def test_facts_survive_being_sent(name: str) -> None:
    facts = snapshots.facts_of(name)
    assert facts_from_json(facts_to_json(facts), "sent") == facts


@pytest.mark.parametrize("rule", RULES)
def test_rule_speaks_for_one_change_and_is_silent_without_it(rule: str) -> None:
    """The broken machine differs from a healthy one in a single respect, so on the healthy one the rule did look."""
    breaking = [name for name, broken in BROKEN.items() if rule in broken.adds]
    telling = [name for name in breaking if rule not in {note for note, _ in snapshots.expected(BROKEN[name].base)}]
    assert telling, f"no snapshot for {rule}"
    for name in telling:
        assert {finding.id for finding in RULES[rule](snapshots.facts_of(name))} == {rule}
        assert list(RULES[rule](HEALTHY[BROKEN[name].base].facts)) == []


def test_every_change_changes_its_base() -> None:
    assert [name for name in BROKEN if snapshots.facts_of(name) == HEALTHY[BROKEN[name].base].facts] == []


def every_finding() -> Iterator[tuple[str, Facts, Finding]]:
    for name in NAMES:
        facts = snapshots.facts_of(name)
        for finding in judge(facts):
            yield name, facts, finding


def test_findings_are_sentences_with_evidence() -> None:
    for name, _, finding in every_finding():
        where = f"{name}: {finding}"
        assert finding.read, where
        assert all(entry.strip() == entry and entry for entry in finding.read), where
        for text in (finding.what, finding.why):
            assert re.fullmatch(r"[^\s].*[^\s.]\.", text), where
            assert "  " not in text, where
            assert "\n" not in text, where
            assert "None" not in text, where
        assert not any("None" in entry for entry in finding.read), where
        assert finding.what[0].isupper() or finding.what[0].isdigit(), where
        if finding.severity is not Severity.NOTE:
            assert finding.cure, where
        if finding.cure is not None:
            assert finding.cure == finding.cure.strip().rstrip("."), where
            assert "None" not in finding.cure, where
            assert "\n" not in finding.cure, where


def test_what_names_a_value_that_was_read() -> None:
    """What is said can be traced: some number or name of the sentence stands in the evidence too."""
    lost = []
    for name, _, finding in every_finding():
        words = {word.strip(".,:;()'") for word in finding.what.split()}
        telling = {word for word in words if re.search(r"\d|/|_|[A-Z]{2}", word)} or words
        evidence = " ".join(finding.read)
        if not any(word in evidence for word in telling):
            lost.append(f"{name}: {finding}")
    assert lost == []


def test_cures_name_only_paths_that_exist_in_the_facts() -> None:
    named = 0
    for name, facts, finding in every_finding():
        known = str(facts_to_json(facts))
        made = {f"{toolkit.root}/bin/ptxas" for toolkit in facts.toolkits if toolkit.ptxas}
        made |= {
            f"{disk.path}/activate/{environment.stack}.sh"
            for disk in facts.disks
            if disk.purpose == "state"
            for environment in facts.environments
        }
        for path in re.findall(r"(?<![\w.$}])/[\w.+/-]+", (finding.cure or "").replace("/dev/shm", "")):
            folder = path.removesuffix("/bin")
            assert path in made or path in known or folder in known, f"{name}: {path} in {finding.cure}"
            named += 1
    assert named > 5


def test_ids_are_stable_words() -> None:
    assert all(re.fullmatch(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*", name) for name in RULES)
    assert "rule-failed" not in RULES


def test_rules_say_what_they_are_about() -> None:
    for name, rule in RULES.items():
        assert re.match(r"[A-Z].*[.:](\n|$)", rule.__doc__ or ""), name


def test_worst_comes_first() -> None:
    severities = [finding.severity for finding in judge(snapshots.facts_of("torch-without-the-screen-card"))]
    assert severities == [Severity.WARN, Severity.WARN, Severity.NOTE]
    found = judge(snapshots.facts_of("kernels-for-cuda-12-cpu-machine"))
    assert [finding.id for finding in found] == ["cuda-major-mixed", "gpu-none"]


def test_a_rule_that_fails_costs_only_its_own_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: Facts) -> Iterator[Finding]:
        raise KeyError("uuid")

    monkeypatch.setitem(RULES, "pcie-width", broken)
    findings = judge(snapshots.facts_of("power-limit"))
    assert [(finding.id, finding.severity) for finding in findings] == [
        ("power-limit", Severity.NOTE),
        ("rule-failed", Severity.NOTE),
    ]
    assert "pcie-width" in findings[1].what
    assert "uuid" in findings[1].what


@pytest.mark.parametrize("name", [name for name in NAMES if len(snapshots.facts_of(name).gpus) > 1])
def test_verdict_does_not_depend_on_the_order_of_cards(name: str) -> None:
    facts = snapshots.facts_of(name)
    assert judge(replace(facts, gpus=tuple(reversed(facts.gpus)))) == judge(facts)


def test_a_command_never_runs_what_a_facts_file_says() -> None:
    hostile = "x; touch y $(z)"
    seen = set()
    for name in NAMES:
        facts = load_facts(snapshots.path_of(name))
        facts = replace(
            facts,
            environments=tuple(
                replace(e, stack=hostile, python=hostile, locked={k: v + hostile for k, v in e.locked.items()})
                for e in facts.environments
            ),
            toolkits=tuple(
                replace(t, root=t.root + hostile, seen_by=tuple(re.sub(":.*", f":{hostile}", way) for way in t.seen_by))
                for t in facts.toolkits
            ),
        )
        for finding in judge(facts):
            if finding.cure and hostile in finding.cure and re.match(r"scripts/inv|export|'|\. |rm ", finding.cure):
                seen.add(finding.id)
                assert any(hostile in word for word in shlex.split(finding.cure)), finding.cure
    assert {"torch-replaced", "environment-broken", "toolkits-mixed", "nvcc-too-old"} <= seen
