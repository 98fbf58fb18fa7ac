import copy
import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120.errors import UsageError
from sm120.host import codec
from sm120.host.codec import facts_from_json, facts_to_json, load_facts
from sm120.host.facts import Cpu, Disk, Driver, Environment, Facts, Gpu, Host, Memory, Torch

FACTS = Facts(
    collected="2026-11-01T00:00:00+00:00",
    toolkit="0.1.0",
    host=Host(kernel="6.8"),
    driver=Driver(version="580.65.06", cuda=(13, 0)),
    cpu=Cpu(architecture="x86_64"),
    memory=Memory(total=2**36),
    gpus=(Gpu(index=0, uuid="GPU-1", name="card", bus_id="0", compute_capability=(12, 0), power_draw=61.5, ecc=True),),
    disks=(Disk(purpose="home", path="/home/u"),),
    limits={"nofile": 1024, "memlock": None},
    environments=(
        Environment(stack="s", python="/p", torch=Torch(version="2", arch_list=("sm_120",)), locked={"torch": "2"}),
    ),
)


def strategy(wanted: Any) -> st.SearchStrategy[Any]:
    """Any value of a field of the facts."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if arg is types.NoneType else strategy(arg) for arg in args))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(strategy(args[0]), max_size=2).map(tuple)
        return st.tuples(*(strategy(arg) for arg in args))
    if origin is Mapping:
        return st.dictionaries(st.text(), strategy(args[1]), max_size=2)
    if dataclasses.is_dataclass(wanted):
        assert isinstance(wanted, type)
        hints = typing.get_type_hints(wanted)
        fields = {f.name: strategy(hints[f.name]) for f in dataclasses.fields(wanted) if f.name != "schema"}
        return st.builds(wanted, **fields)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(),
        bool: st.booleans(),
        int: st.integers(-(2**63) + 1, 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
    }
    return simple[wanted]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=50)
@given(strategy(Facts))
def test_what_is_written_is_read_back(facts: Facts) -> None:
    assert facts_from_json(json.loads(json.dumps(facts_to_json(facts))), "f") == facts


def test_lists_in_json_are_tuples_in_facts() -> None:
    read = facts_from_json(facts_to_json(FACTS), "f")
    assert read == FACTS
    assert read.gpus[0].compute_capability == (12, 0)
    assert isinstance(read.gpus, tuple)


def changed(path: str, value: object) -> dict[str, object]:
    """The facts as JSON with one value changed; path as in ``gpus.0.name``."""
    document = facts_to_json(FACTS)
    place: Any = document
    *parents, last = path.split(".")
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("gpus.0.name", 3, "gpus[0].name must be text, not 3"),
        ("gpus.0.name", None, "gpus[0].name must be text, not None"),
        ("gpus.0.ecc", 1, "gpus[0].ecc must be true or false, not 1"),
        ("gpus.0.ecc", "yes", "gpus[0].ecc must be true or false, not 'yes'"),
        ("gpus.0.index", True, "gpus[0].index must be a whole number, not True"),
        ("gpus.0.index", 1.0, "gpus[0].index must be a whole number, not 1.0"),
        ("gpus.0.memory_total", 2**63, "gpus[0].memory_total must be a whole number, not a number of 64 bits or more"),
        ("gpus.0.power_draw", float("inf"), "gpus[0].power_draw must be a number, not inf"),
        ("gpus.0.power_draw", float("nan"), "gpus[0].power_draw must be a number, not nan"),
        ("gpus.0.power_draw", 10**400, "gpus[0].power_draw must be a number, not a number of 64 bits or more"),
        ("gpus.0.compute_capability", [12], "gpus[0].compute_capability must be a list of 2, not a list of 1"),
        ("gpus.0.compute_capability", "12.0", "gpus[0].compute_capability must be a list, not '12.0'"),
        ("gpus.0.compute_capability", [12, "0"], "gpus[0].compute_capability[1] must be a whole number, not '0'"),
        ("gpus", {}, "gpus must be a list, not an object"),
        ("gpus", [[]], "gpus[0] must be an object, not a list of 0"),
        ("limits", [], "limits must be an object, not a list of 0"),
        ("limits", {"nofile": "many"}, "limits['nofile'] must be a whole number, not 'many'"),
        ("host", None, "host must be an object, not None"),
        ("environments.0.torch.version", [], "environments[0].torch.version must be text, not a list of 0"),
        ("environments.0.torch.arch_list", [None], "environments[0].torch.arch_list[0] must be text, not None"),
        ("environments.0.locked", {"torch": 2}, "environments[0].locked['torch'] must be text, not 2"),
        ("gpus.0.nam", "x", "gpus[0] has an unknown field 'nam'; did you mean name"),
        ("surprise", 1, "the top has an unknown field 'surprise'"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path: str, value: object, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        facts_from_json(changed(path, value), "facts.json")
    assert caught.value.message.startswith(f"facts.json: {said}")
    assert caught.value.remedy


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(UsageError) as caught:
        facts_from_json(changed("gpus.0.index", "x" * 10**6), "f")
    assert len(caught.value.message) < 200


def test_a_whole_number_is_a_number() -> None:
    facts = facts_from_json(changed("gpus.0.power_draw", 450), "f")
    assert facts.gpus[0].power_draw == 450
    assert isinstance(facts.gpus[0].power_draw, float)


def test_a_missing_field_is_named_and_one_with_a_default_may_be_missing() -> None:
    document: Any = facts_to_json(FACTS)
    del document["gpus"][0]["persistence"]
    assert facts_from_json(document, "f") == FACTS
    del document["gpus"][0]["uuid"]
    with pytest.raises(UsageError, match=r"gpus\[0\]\.uuid is missing"):
        facts_from_json(document, "f")


@pytest.mark.parametrize("document", [None, [], 3, "facts", {}, {"gpus": []}])
def test_what_says_no_schema_is_no_facts_file(document: object) -> None:
    with pytest.raises(UsageError, match="is no facts file"):
        facts_from_json(document, "f")


@pytest.mark.parametrize("schema", [0, -1, "1", None, True, 1.5, []])
def test_a_strange_schema(schema: object) -> None:
    with pytest.raises(UsageError, match="schema must be 1, not"):
        facts_from_json(changed("schema", schema), "f")


@pytest.mark.parametrize("schema", [2, 10**30])
def test_a_newer_schema_is_refused_before_anything_else(schema: int) -> None:
    with pytest.raises(UsageError, match="newer toolkit") as caught:
        facts_from_json({"schema": schema, "unknown": 1}, "f")
    assert caught.value.remedy is not None
    assert "update" in caught.value.remedy


@given(JSON)
def test_any_json_is_facts_or_one_error(document: object) -> None:
    with pytest.raises(UsageError):
        facts_from_json(document, "f")
    with pytest.raises(UsageError):
        facts_from_json({"schema": 1, "gpus": document}, "f")


@given(st.data())
def test_any_value_anywhere_is_facts_or_one_error(data: st.DataObject) -> None:
    document: Any = copy.deepcopy(facts_to_json(FACTS))
    place, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(JSON)
    try:
        facts = facts_from_json(document, "f")
    except UsageError:
        return
    assert facts_from_json(facts_to_json(facts), "f") == facts


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts_to_json(FACTS)))
    assert load_facts(path) == FACTS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"schema": NaN}', "NaN is not a JSON number"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\x7fELF\x00\x00", "not JSON"),
    ],
)
def test_file_of_something_else(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        load_facts(path)
    assert str(path) in caught.value.message


def test_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    with path.open("wb") as file:
        file.truncate(codec.LIMIT + 1)
    with pytest.raises(UsageError, match="at most"):
        load_facts(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match="is not a file"):
            load_facts(path)


@pytest.mark.parametrize("name", ["gone.json", "a\0b", "x" * 5000])
def test_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_facts(tmp_path / name)


def test_more_cards_than_any_machine_has_are_refused_at_once() -> None:
    card = {"index": 0, "uuid": "", "name": "", "bus_id": ""}
    with pytest.raises(UsageError, match="gpus must be a list of 64 at most, not a list of 100000"):
        facts_from_json({**facts_to_json(FACTS), "gpus": [card] * 100_000}, "f")


def test_text_longer_than_any_variable_is_refused() -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "0," * 100_000}
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES.* has 200000 characters; a text has 131072 at most"):
        facts_from_json({**facts_to_json(FACTS), "variables": variables}, "f")
