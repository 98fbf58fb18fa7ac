from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120.matrix.plan import MalformedReply, Request, read_plan, read_result, stored_result

SUBJECT: dict[str, Any] = {
    "id": "dense:a",
    "operation": "dense",
    "moe": None,
    "dense": "a",
    "unsupported": None,
    "servable": True,
}
CELL: dict[str, Any] = {"id": "dense/a/c", "subject": "dense:a", "case": {"m": 1}, "reference": "k", "cost": 2}
PLAN: dict[str, Any] = {"subjects": [SUBJECT], "cells": [CELL], "reduced": ["less"]}
RESULT: dict[str, Any] = {
    "verdict": "PASS",
    "reason": None,
    "eta": 0.5,
    "findings": [],
    "notes": ["n"],
    "checks": 2,
    "seconds": {"kernel": 0.1},
    "kernels": ["k"],
    "reproducer": None,
}


def test_a_plan_is_read() -> None:
    plan = read_plan(PLAN)
    assert plan.subjects[0].servable
    assert plan.cells_of("dense:a")[0].raw == CELL
    assert plan.cells_of("moe:x") == ()
    assert plan.reduced == ("less",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"subjects": None}, "subjects must be a list", id="no-subjects"),
        pytest.param({"cells": {}}, "cells must be a list", id="cells"),
        pytest.param({"cells": [5]}, "cells must be a list of objects", id="cell"),
        pytest.param({"subjects": [SUBJECT, SUBJECT]}, "two subjects share an id", id="subject-twice"),
        pytest.param({"cells": [CELL, CELL]}, "two cells share an id", id="cell-twice"),
        pytest.param({"cells": [{**CELL, "subject": "moe:x"}]}, "which is no subject", id="stray-cell"),
        pytest.param({"cells": [{**CELL, "cost": None}]}, "cost", id="no-cost"),
        pytest.param({"cells": [{**CELL, "cost": -1}]}, "cost", id="negative-cost"),
        pytest.param({"cells": [{**CELL, "cost": True}]}, "cost", id="bool-cost"),
        pytest.param({"cells": [{**CELL, "id": ""}]}, "id must be a text", id="empty-id"),
        pytest.param({"subjects": [{**SUBJECT, "operation": "attention"}]}, "attention", id="operation"),
        pytest.param({"subjects": [{**SUBJECT, "moe": "x"}]}, "moe 'x', dense 'a'", id="dense-with-moe"),
        pytest.param({"subjects": [{**SUBJECT, "servable": None}]}, "servable", id="servable"),
        pytest.param({"reduced": "less"}, "reduced must be a list", id="reduced"),
    ],
)
def test_a_malformed_plan(change: dict[str, Any], said: str) -> None:
    with pytest.raises(MalformedReply, match=said):
        read_plan({**PLAN, **change})


def test_a_result_is_read_and_stored() -> None:
    result = read_result(RESULT)
    assert (result.verdict, result.eta, result.notes) == ("PASS", 0.5, ("n",))
    assert result.details == {"checks": 2, "kernels": ["k"]}
    assert stored_result(result.to_json()) == result
    long = read_result({**RESULT, "verdict": "FAIL", "reason": "x" * 10**6}).reason
    assert long == "x" * 2000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"verdict": None}, "verdict must be a text", id="none"),
        pytest.param({"verdict": "SKIPPED"}, "is not one of", id="the-toolkits-own"),
        pytest.param({"eta": "0"}, "eta must be a float", id="eta-text"),
        pytest.param({"eta": 1.0001}, "PASS with an error", id="eta-above-1"),
        pytest.param({"checks": 0}, "PASS without a single check", id="no-checks"),
        pytest.param({"checks": None}, "PASS without a single check", id="checks-unknown"),
        pytest.param({"findings": [{"tier": "T1"}]}, "PASS with findings", id="findings"),
        pytest.param({"findings": [1]}, "findings must be a list", id="finding"),
        pytest.param({"seconds": 5}, "seconds must be an object", id="seconds"),
        pytest.param({"notes": [1]}, "notes must be a list", id="notes"),
    ],
)
def test_a_malformed_result(change: dict[str, Any], said: str) -> None:
    with pytest.raises(MalformedReply, match=said):
        read_result({**RESULT, **change})


ANY = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)


@given(key=st.sampled_from(sorted(RESULT)), value=ANY)
@settings(deadline=None)
def test_any_value_is_read_or_refused(key: str, value: object) -> None:
    try:
        result = read_result({**RESULT, key: value})
    except MalformedReply:
        return
    assert result.verdict == "PASS"
    assert result.findings == ()
    assert result.eta is None or result.eta <= 1


def test_a_request_says_none_for_everything() -> None:
    sent = Request("default", {"name": "m"}, 0).to_json()
    assert sent["only"] is None
    assert sent["backends"] == {"dense": None, "moe": None}
    sent = Request("quick", {"name": "m"}, 1, ("a*",), ("x",), ("y",)).to_json()
    assert (sent["only"], sent["backends"]) == (["a*"], {"dense": ["y"], "moe": ["x"]})
