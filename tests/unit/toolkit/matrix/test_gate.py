"""The gate opens for nothing but an explicit PASS of the very pair, on the very machine, stack and model."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, find, given, settings
from hypothesis import strategies as st

from sm120.errors import UsageError
from sm120.matrix.fingerprint import Fingerprint, Gpu, canonical, differences, patches_hash, take
from sm120.matrix.gate import (
    Allowed,
    Gate,
    PairVerdict,
    Refused,
    combined,
    gate_path,
    load,
    may_start,
    open_pairs,
    state_line,
    store,
)
from sm120.matrix.plan import VERDICTS, MalformedReply

MODEL: dict[str, Any] = {
    "name": "M",
    "tp": 2,
    "hidden": 4096,
    "moe": {"experts": 8},
    "dense": [{"name": "o", "n": 1, "k": 16}],
}
NOW = Fingerprint(
    device="cuda",
    gpus=(Gpu("GPU-1", "RTX PRO 6000", "12.0"), Gpu("GPU-2", "RTX PRO 6000", "12.0")),
    driver="590.48",
    environment=(("TRTLLM_DISABLE_FP4_QUANT_FAST_MATH", "1"),),
    versions=(("sglang", "0.5.15"), ("torch", "2.11.0"), ("triton", None)),
    libraries=(("common_ops.so", "aa"), ("flash_ops.so", "bb")),
    stack="ee",
    patches="cc",
    toolkit="0.1.0",
    cells="dd",
    model=canonical(MODEL),
)
PAIR = PairVerdict("x", "a", servable=True, verdict="PASS", reason=None, passed=12)
OPEN = Gate(
    fingerprint=NOW,
    profile="default",
    seed=0,
    only=(),
    cases=("dense/a/c", "moe/x/c"),
    backends=(("block:x+a", "PASS"), ("dense:a", "PASS"), ("dense:b", "FAIL"), ("moe:x", "PASS")),
    pairs=(PAIR, PairVerdict("x", "b", servable=True, verdict="FAIL", reason="FP4 GEMM: wrong", passed=3)),
    reduced=("experts 8 -> 4",),
    complete=True,
    run="r1",
    finished="2026-01-01T00:00:00+00:00",
)


def ask(gate: Gate | None = OPEN, now: Fingerprint = NOW, moe: str = "x", dense: str = "a") -> Allowed | Refused:
    return may_start(gate, now, moe, dense, MODEL)


def reason(answer: Allowed | Refused) -> str:
    assert isinstance(answer, Refused)
    return answer.reason


def test_it_opens() -> None:
    assert ask() == Allowed(("experts 8 -> 4",))


@pytest.mark.parametrize(
    ("gate", "said"),
    [
        pytest.param(None, "no backend has been validated", id="missing"),
        pytest.param(replace(OPEN, cases=()), "ran no cell", id="zero-cells"),
        pytest.param(replace(OPEN, only=("dense/*",)), r"only a part was validated \(--only dense/\*\)", id="part"),
        pytest.param(replace(OPEN, profile="quick"), "only the quick profile was run", id="quick"),
        pytest.param(replace(OPEN, complete=False), "was interrupted", id="interrupted"),
        pytest.param(replace(OPEN, pairs=()), "x with a was not validated; validated: nothing", id="no-pair"),
        pytest.param(replace(OPEN, pairs=(PAIR, PAIR)), "was not validated", id="pair-twice"),
        pytest.param(
            replace(OPEN, pairs=(replace(PAIR, servable=False),)), "no server on this machine", id="not-servable"
        ),
        pytest.param(replace(OPEN, pairs=(replace(PAIR, passed=0),)), "contradicts itself", id="nothing-passed"),
        pytest.param(replace(OPEN, backends=(("dense:a", "PASS"),)), "contradicts itself", id="backend-unknown"),
        pytest.param(
            replace(OPEN, backends=(("dense:a", "FAIL"), ("moe:x", "PASS"))), "contradicts", id="backend-failed"
        ),
    ],
)
def test_refusals(gate: Gate | None, said: str) -> None:
    assert re.search(said, reason(ask(gate)))


@pytest.mark.parametrize("word", [word for word in VERDICTS if word != "PASS"])
def test_no_other_verdict_is_a_pass(word: str) -> None:
    refused = ask(replace(OPEN, pairs=(replace(PAIR, verdict=word, reason="why"),)))
    assert reason(refused) == f"x with a is {word}: why"


@pytest.mark.parametrize(("moe", "dense"), [("x", "b"), ("y", "a"), ("a", "x"), ("", ""), ("X", "a"), ("x ", "a")])
def test_only_the_very_pair(moe: str, dense: str) -> None:
    assert isinstance(ask(moe=moe, dense=dense), Refused)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"driver": "600.1"}, "driver was 590.48, is 600.1", id="driver"),
        pytest.param(
            {"versions": (("sglang", "0.5.16"), ("torch", "2.11.0"), ("triton", None))},
            "versions.sglang was 0.5.15, is 0.5.16",
            id="sglang",
        ),
        pytest.param(
            {"versions": (("sglang", "0.5.15"), ("torch", "2.11.0"))},
            "versions.triton was null, is absent",
            id="package-gone",
        ),
        pytest.param(
            {"libraries": (("common_ops.so", "aa"),)}, "libraries.flash_ops.so was bb, is absent", id="library-gone"
        ),
        pytest.param(
            {"environment": ()}, "environment.TRTLLM_DISABLE_FP4_QUANT_FAST_MATH was 1, is absent", id="variable"
        ),
        pytest.param({"gpus": NOW.gpus[:1]}, "compute capability was 12.0, 12.0, is 12.0", id="one-card-less"),
        pytest.param(
            {"gpus": (Gpu("GPU-1", "H200", "9.0"),) * 2},
            "compute capability was 12.0, 12.0, is 9.0, 9.0",
            id="capability",
        ),
        pytest.param(
            {"gpus": (NOW.gpus[0], Gpu("GPU-3", "RTX PRO 6000", "12.0"))}, "GPU-2, is .*GPU-3", id="another-card"
        ),
        pytest.param({"patches": None}, "patches was cc, is null", id="patches"),
        pytest.param({"toolkit": "0.2.0"}, "toolkit was 0.1.0, is 0.2.0", id="toolkit"),
        pytest.param({"cells": "d0"}, "cells was dd, is d0", id="cells"),
        pytest.param({"stack": "e0"}, "stack was ee, is e0", id="stack"),
        pytest.param({"device": "cpu"}, "device was cuda, is cpu", id="device"),
    ],
)
def test_stale_says_which_field(change: dict[str, Any], said: str) -> None:
    assert re.search(f"is stale: .*{said}", reason(ask(now=replace(NOW, **change))))


def test_another_model_or_tp() -> None:
    for other in ({**MODEL, "tp": 4}, {**MODEL, "hidden": 2048}, {**MODEL, "name": "N"}):
        assert isinstance(may_start(OPEN, NOW, "x", "a", other), Refused)
        stale = may_start(OPEN, replace(NOW, model=canonical(other)), "x", "a", other)
        assert "is stale: model." in reason(stale)


@pytest.mark.parametrize(
    "gpus",
    [(), (Gpu(None, "RTX PRO 6000", "12.0"),), (Gpu("GPU-1", "RTX PRO 6000", None),)],
    ids=["none", "uuid", "capability"],
)
def test_a_card_that_is_not_known_opens_nothing(gpus: tuple[Gpu, ...]) -> None:
    same = replace(NOW, gpus=gpus)
    assert "no GPU" in reason(ask(replace(OPEN, fingerprint=same), same))


TEXT = st.text(max_size=8)
PAIRS = st.dictionaries(TEXT, TEXT, max_size=3).map(lambda d: tuple(sorted(d.items())))
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "device": TEXT,
    "gpus": st.lists(st.builds(Gpu, st.none() | TEXT, TEXT, st.none() | TEXT), max_size=3).map(tuple),
    "driver": st.none() | TEXT,
    "environment": PAIRS,
    "versions": st.dictionaries(TEXT, st.none() | TEXT, max_size=3).map(lambda d: tuple(sorted(d.items()))),
    "libraries": PAIRS,
    "stack": TEXT,
    "patches": st.none() | TEXT,
    "toolkit": TEXT,
    "cells": TEXT,
    "model": st.dictionaries(TEXT, st.integers(), max_size=2).map(canonical),
}


def test_every_field_of_the_fingerprint_is_mutated_below() -> None:
    assert set(FIELDS) == {field.name for field in fields(Fingerprint)}


@given(name=st.sampled_from(sorted(FIELDS)), data=st.data())
@settings(deadline=None)
def test_no_change_of_any_field_leaves_it_open(name: str, data: st.DataObject) -> None:
    value = data.draw(FIELDS[name])
    assume(value != getattr(NOW, name))
    changed = replace(NOW, **{name: value})
    assert differences(NOW, changed)
    assert differences(changed, NOW)
    assert isinstance(ask(now=changed), Refused)
    assert isinstance(ask(replace(OPEN, fingerprint=changed)), Refused)


WORDS = st.sampled_from([*VERDICTS, "pass", "PASS ", ""])
SOME_PAIRS = st.lists(
    st.builds(
        PairVerdict, st.sampled_from("xy"), st.sampled_from("ab"), st.booleans(), WORDS, st.none(), st.integers(0, 2)
    ),
    max_size=3,
).map(tuple)
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "profile": st.sampled_from(["quick", "full", "Default", ""]),
    "only": st.sampled_from([(), ("*",)]),
    "cases": st.sampled_from([("c",), ()]),
    "backends": st.dictionaries(st.sampled_from(["moe:x", "dense:a", "moe:y"]), WORDS).map(lambda d: tuple(d.items())),
    "pairs": SOME_PAIRS | SOME_PAIRS.map(lambda pairs: (PAIR, *pairs)),
    "complete": st.booleans(),
}


@st.composite
def gates(draw: st.DrawFn) -> Gate:
    """The open gate with any of its fields changed."""
    names = draw(st.sets(st.sampled_from(sorted(CHANGES))))
    return replace(OPEN, **{name: draw(CHANGES[name]) for name in sorted(names)})


def test_some_of_the_gates_below_open() -> None:
    assert find(gates(), lambda gate: gate != OPEN and isinstance(ask(gate), Allowed)) != OPEN


@given(gate=gates(), moe=st.sampled_from("xy"), dense=st.sampled_from("ab"))
@settings(max_examples=500, deadline=None)
def test_nothing_but_an_explicit_pass_of_the_pair_opens_it(gate: Gate, moe: str, dense: str) -> None:
    if isinstance(ask(gate, moe=moe, dense=dense), Allowed):
        (found,) = [p for p in gate.pairs if (p.moe, p.dense) == (moe, dense)]
        assert (found.verdict, found.servable) == ("PASS", True)
        assert found.passed > 0
        assert dict(gate.backends)[f"moe:{moe}"] == dict(gate.backends)[f"dense:{dense}"] == "PASS"
        assert gate.cases
        assert (gate.only, gate.complete) == ((), True)
        assert gate.profile in ("default", "full")


def test_round_trip(tmp_path: Path) -> None:
    path = gate_path(tmp_path / "gate", MODEL)
    assert path.name == "M-tp2.json"
    assert load(path) is None
    assert store(path, OPEN) == OPEN
    assert load(path) == OPEN


def damaged(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**OPEN.to_json(), **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param([], "not an object", id="list"),
        pytest.param(damaged(schema=2), "schema is 2", id="schema"),
        pytest.param(damaged(schema=...), "schema is None", id="no-schema"),
        pytest.param(damaged(cases=["one", "more"]), "cases_sha256 is not that of the cases", id="cases-edited"),
        pytest.param(damaged(fingerprint=...), "fingerprint", id="no-fingerprint"),
        pytest.param(damaged(fingerprint={}), "gpus must be a list", id="empty-fingerprint"),
        pytest.param(damaged(pairs=[{"moe": "x"}]), "servable", id="half-a-pair"),
        pytest.param(damaged(pairs=5), "TypeError", id="pairs"),
        pytest.param(damaged(backends=[]), "AttributeError", id="backends"),
    ],
)
def test_a_damaged_record_is_refused_and_replaced(tmp_path: Path, content: object, said: str) -> None:
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=said) as caught:
        load(path)
    assert str(path) in caught.value.message
    assert store(path, OPEN) == OPEN


def test_torn_record(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    path.write_text(json.dumps(OPEN.to_json())[:100])
    with pytest.raises(UsageError, match=r"gate\.json:1"):
        load(path)


def with_words(gate: Gate, run: str, **words: str) -> Gate:
    backends = {name.replace("_", ":"): word for name, word in words.items()}
    return replace(gate, run=run, backends=tuple(sorted(backends.items())), pairs=(), cases=("new",))


def test_a_part_that_passes_changes_nothing() -> None:
    part = replace(with_words(OPEN, "r2", dense_a="PASS", moe_x="SKIPPED"), only=("dense/a/*",))
    assert combined(OPEN, part) == OPEN


@pytest.mark.parametrize("word", ["FAIL", "CRASH", "HANG", "INCONCLUSIVE"])
@pytest.mark.parametrize(
    "partly", [{"only": ("*",)}, {"profile": "quick"}, {"complete": False}], ids=["only", "quick", "cut"]
)
def test_a_part_that_finds_something_wrong_closes_the_pair(word: str, partly: dict[str, Any]) -> None:
    part = replace(with_words(OPEN, "r2", dense_a=word), **partly)
    after = combined(OPEN, part)
    assert reason(ask(after)) == f"x with a is {word}: dense:a was {word} in r2"
    assert not after.only


def test_a_whole_run_replaces_what_it_looked_at_and_keeps_the_rest() -> None:
    other = replace(PAIR, moe="y")
    whole = replace(OPEN, run="r2", pairs=(other,), backends=(("dense:a", "PASS"), ("moe:y", "PASS")), cases=("new",))
    after = combined(OPEN, whole)
    assert isinstance(ask(after), Allowed)
    assert isinstance(ask(after, moe="y"), Allowed)
    assert set(after.cases) == {*OPEN.cases, "new"}
    failed = replace(whole, backends=(("dense:a", "FAIL"), ("moe:y", "PASS")), pairs=(replace(other, verdict="FAIL"),))
    assert open_pairs(combined(OPEN, failed)) == ()


def test_another_machine_replaces_everything() -> None:
    moved = replace(OPEN, fingerprint=replace(NOW, driver="600"), pairs=(), only=("*",))
    assert combined(OPEN, moved) == moved


def test_state_lines() -> None:
    assert state_line(OPEN) == "gate open for x + a"
    assert state_line(replace(OPEN, complete=False)) == "gate closed: the run was interrupted"
    assert state_line(replace(OPEN, only=("*",))) == "gate closed: only a part was checked (--only)"
    assert state_line(replace(OPEN, profile="quick")) == "gate closed: the quick profile is too little to open it"
    unservable = tuple(replace(pair, servable=False) for pair in OPEN.pairs)
    assert state_line(replace(OPEN, pairs=unservable)) == (
        "gate closed: no backend that a server here could use has been checked"
    )
    assert (
        state_line(replace(OPEN, pairs=OPEN.pairs[1:]))
        == "gate closed: no pair that a server here could use has passed"
    )


def test_patches_hash(tmp_path: Path) -> None:
    assert patches_hash(tmp_path / "none") is None
    (tmp_path / "p" / "sglang").mkdir(parents=True)
    (tmp_path / "p" / "sglang" / "0001.patch").write_text("a")
    first = patches_hash(tmp_path / "p")
    (tmp_path / "p" / "sglang" / "0001.patch").write_text("b")
    second = patches_hash(tmp_path / "p")
    (tmp_path / "p" / "sglang" / "0001.patch").rename(tmp_path / "p" / "sglang" / "0002.patch")
    assert len({first, second, patches_hash(tmp_path / "p")}) == 3


HELLO: dict[str, Any] = {
    "device": {"type": "cuda", "name": "H200", "capability": [9, 0], "uuid": "GPU-1", "driver": "580"},
    "versions": {"torch": "2"},
    "libraries": {},
    "environment": {},
    "cells_sha256": "aa",
}


def test_hello_becomes_a_fingerprint() -> None:
    found = take(HELLO, MODEL, stack="s", patches=None)
    assert found.gpus == (Gpu("GPU-1", "H200", "9.0"),)
    assert Fingerprint.from_json(json.loads(json.dumps(found.to_json()))) == found
    two = take(
        {**HELLO, "devices": [HELLO["device"], {**HELLO["device"], "uuid": "GPU-0"}]}, MODEL, stack="s", patches=None
    )
    assert [gpu.uuid for gpu in two.gpus] == ["GPU-0", "GPU-1"]
    assert take({**HELLO, "device": {"type": "cpu", "name": "x"}}, MODEL, stack="s", patches=None).gpus == ()


@pytest.mark.parametrize(
    "change",
    [
        {"device": None},
        {"device": {"type": "cuda", "name": 5}},
        {"device": {**HELLO["device"], "capability": 9.0}},
        {"versions": []},
        {"libraries": {"a": None}},
        {"environment": {"a": 1}},
        {"cells_sha256": ""},
        {"devices": "GPU-1"},
        {"devices": [5]},
    ],
)
def test_a_malformed_hello(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedReply):
        take({**HELLO, **change}, MODEL, stack="s", patches=None)
