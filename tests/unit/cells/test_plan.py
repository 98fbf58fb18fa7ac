"""Which cells a model's shapes call for."""

import json
import os
from collections import Counter
from typing import Any

import pytest
import torch

from sm120_cells import plan
from sm120_cells.cases import BlockCase, CaseError, DenseCase, MoeCase, case_from_json
from sm120_cells.plan import PROFILES, Profile, Shapes, UnknownBackendError, make_plan
from sm120_cells.worker import run_cell

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLUGIN = "tests.unit.cells.weight_only"


def model(**changes: Any) -> dict[str, Any]:
    moe = {
        "experts": 512,
        "top_k": 10,
        "intermediate": 1024,
        "shared_intermediate": 1024,
        "shared_gate": True,
        "activation": {"kind": "silu", "limit": None, "alpha": 1.0, "beta": 0.0},
        "routed_scaling": 1.0,
    }
    dense = [
        {"name": "qkv_proj", "n": 9216, "k": 4096},
        {"name": "o_proj", "n": 4096, "k": 8192},
        {"name": "again", "n": 9216, "k": 4096},
    ]
    whole: dict[str, Any] = {"name": "Qwen-like", "tp": 1, "hidden": 4096, "moe": moe, "dense": dense}
    for key, value in changes.items():
        (whole if key in whole else moe)[key] = value
    return whole


def tiny(**changes: Any) -> dict[str, Any]:
    small = {"hidden": 64, "experts": 6, "top_k": 2, "intermediate": 32, "shared_intermediate": 48}
    return model(**{**small, "dense": [{"name": "o_proj", "n": 96, "k": 64}], **changes})


def planned(
    data: dict[str, Any], profile: Profile = "default", device: torch.device = CPU, **how: Any
) -> dict[str, Any]:
    made = make_plan(Shapes.from_json(data), profile, device, **how)
    json.dumps(made, allow_nan=False)
    return made


def cases(made: dict[str, Any], subject: str | None = None) -> list[Any]:
    chosen = [c for c in made["cells"] if subject in (None, c["subject"])]
    return [case_from_json({k: v for k, v in c["case"].items() if k != "declared"}) for c in chosen]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_BACKENDS", PLUGIN)


MODELS = {
    "large": model(),
    "tiny": tiny(),
    "no shared expert": tiny(shared_intermediate=None),
    "clamped": tiny(activation={"kind": "silu", "limit": 7.0, "alpha": 1.702, "beta": 1.0}),
    "scaled": tiny(routed_scaling=2.5),
    "one expert a token": tiny(top_k=1),
    "many experts a token": tiny(experts=64, top_k=22),
    "a rank of eight": model(intermediate=128, shared_intermediate=128),
    "narrow rank": model(intermediate=48, shared_intermediate=48),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_every_planned_cell_is_valid_unique_and_names_its_subject(
    name: str, profile: Profile, device: torch.device, plugin: None
) -> None:
    made = planned(MODELS[name], profile, device)
    subjects = {s["id"]: s for s in made["subjects"]}
    assert len(subjects) == len(made["subjects"])
    ids = Counter(cell["id"] for cell in made["cells"])
    assert ids.most_common(1)[0][1] == 1
    assert ids
    for cell, case in zip(made["cells"], cases(made), strict=True):
        assert cell["subject"] in subjects
        assert cell["id"] == f"{cell['subject'].replace(':', '/')}/{case.name}"
        assert cell["cost"] > 0
        kind = {"dense": DenseCase, "moe": MoeCase, "block": BlockCase}[subjects[cell["subject"]]["operation"]]
        assert type(case) is kind
    assert made == planned(MODELS[name], profile, device), "and the same each time"


def test_cells_with_one_reference_have_one_case_and_one_declaration() -> None:
    made = planned(model())
    by_key: dict[str, set[str]] = {}
    for cell in made["cells"]:
        by_key.setdefault(cell["reference"], set()).add(json.dumps(cell["case"], sort_keys=True))
    assert all(len(contents) == 1 for contents in by_key.values())
    assert len(by_key) == len({next(iter(c)) for c in by_key.values()})


def test_a_large_model_on_a_cpu_is_reduced_and_says_so() -> None:
    made = planned(model())
    said = " | ".join(made["reduced"])
    assert "experts 512 -> 12" in said
    assert "columns of a projection 9216 -> 1024" in said
    assert "tokens of a MoE case: 16" in said
    assert max(c.experts for c in cases(made, "moe:torch_dequant")) == 12
    assert {c.hidden for c in cases(made, "moe:torch_dequant")} == {512, 4096}
    assert {c.k for c in cases(made, "dense:torch_dequant") if c.projection} == {4096, 8192}, "K is never reduced"
    assert not any(c.projection == "again" for c in cases(made, "dense:torch_dequant")), "a shape is checked once"


def test_on_a_gpu_a_servable_backend_takes_the_whole_model(plugin: None) -> None:
    made = planned(model(), device=CUDA)
    assert max(c.experts for c in cases(made, "moe:weight_only")) == 512
    assert max(c.n for c in cases(made, "dense:weight_only")) == 9216
    assert max(c.experts for c in cases(made, "moe:torch_dequant")) == 32, "a reference backend need not"


@pytest.mark.parametrize("profile", PROFILES)
def test_sweeps_are_dense(profile: Profile) -> None:
    made = planned(tiny(), profile)
    for subject, sizes in (("dense:torch_dequant", "ms"), ("moe:torch_dequant", "tokens")):
        longest = max((getattr(c, sizes) for c in cases(made, subject)), key=len)
        assert longest == tuple(range(max(longest) + 1))
        assert max(longest) >= 12


def test_subjects_are_backends_and_pairs() -> None:
    made = planned(tiny())
    ids = [s["id"] for s in made["subjects"]]
    names = ["torch_dequant", "sm120_model"]
    assert ids == [
        *(f"dense:{n}" for n in names),
        *(f"moe:{n}" for n in names),
        *(f"block:{m}+{d}" for m in names for d in names),
    ]
    assert not any(s["servable"] for s in made["subjects"])
    assert all(s["unsupported"] is None for s in made["subjects"])
    pair = next(s for s in made["subjects"] if s["operation"] == "block")
    assert (pair["moe"], pair["dense"]) == ("torch_dequant", "torch_dequant")


def test_a_model_without_a_shared_expert_has_no_blocks() -> None:
    made = planned(tiny(shared_intermediate=None))
    assert {s["operation"] for s in made["subjects"]} == {"dense", "moe"}
    assert not any(c["subject"].startswith("block") for c in made["cells"])


def test_a_clamped_activation_has_no_exact_moe_probes_and_says_so() -> None:
    clamped = {"kind": "silu", "limit": 7.0, "alpha": 1.702, "beta": 1.0}
    made = planned(tiny(activation=clamped))
    probes = {c.probe for c in cases(made, "moe:torch_dequant")}
    assert probes == {"bound", "onehot", "repeat_bound"}
    assert any("clamped" in note for note in made["reduced"])
    assert {c.activation.limit for c in cases(made, "moe:torch_dequant")} == {7.0}
    assert any(c.tokens == tuple(range(41)) for c in cases(made, "moe:torch_dequant")), "the sweep is by bound"


def test_routed_scaling_is_a_power_of_two_where_results_are_exact() -> None:
    made = planned(tiny(routed_scaling=2.5))
    for case in cases(made, "moe:torch_dequant"):
        assert case.routed_scaling == (2.0 if case.probe in ("isolated", "exact", "repeat") else 2.5)


def test_every_routing_is_met() -> None:
    made = planned(tiny())
    seen = {(c.probe, c.routing) for c in cases(made, "moe:torch_dequant")}
    for routing in ("one_expert", "half_empty", "minus_one", "skewed"):
        assert {("bound", routing), ("isolated", routing)} <= seen


def test_a_model_with_more_experts_a_token_than_a_cpu_takes() -> None:
    made = planned(MODELS["many experts a token"])
    assert all(c.experts >= 22 for c in cases(made, "moe:torch_dequant"))


# --- further backends -------------------------------------------------------------------------------------------------


def test_a_weight_only_backend_is_planned_with_its_own_format(plugin: None) -> None:
    made = planned(tiny())
    for subject in ("dense:weight_only", "moe:weight_only", "dense:less_precise", "moe:less_precise"):
        assert cases(made, subject)
        assert {c.format for c in cases(made, subject)} == {"bf16"}
    servable = {s["id"] for s in made["subjects"] if s["servable"]}
    assert servable == {"dense:weight_only", "moe:weight_only", "block:weight_only+weight_only"}


def test_no_exact_probe_for_a_backend_without_fp32_partial_sums(plugin: None) -> None:
    made = planned(tiny())
    assert {c.probe for c in cases(made, "dense:less_precise")} == {"readback", "bound", "repeat_bound"}
    assert {c.probe for c in cases(made, "moe:less_precise")} == {"bound", "onehot", "repeat_bound"}
    assert {c.probe for c in cases(made, "dense:weight_only")} == {"exact", "unit", "repeat", "readback", "bound"}


@pytest.mark.parametrize("moe", ["weight_only", "less_precise", "torch_dequant", "sm120_model"])
@pytest.mark.parametrize("dense", ["weight_only", "less_precise", "torch_dequant", "sm120_model"])
def test_every_pair_of_a_model_runs_and_passes(moe: str, dense: str, plugin: None) -> None:
    """Also where one of the two takes FP4 activations and the other does not."""
    made = planned(tiny(), moe=[moe], dense=[dense], only=["block/*"])
    (cell,) = made["cells"]
    outcome = run_cell(cell, CPU, None)
    assert (outcome.verdict, outcome.reason) == ("PASS", None)


def test_a_backend_module_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_BACKENDS", f"no_such_module{os.pathsep}{PLUGIN}")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        planned(tiny())


def test_two_backends_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_BACKENDS", "sm120_cells.backends.torch_dequant")
    with pytest.raises(ValueError, match="two dense backends are called torch_dequant"):
        planned(tiny())


def test_modules_are_named_in_order_and_empty_names_are_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_BACKENDS", f"{os.pathsep}{PLUGIN}{os.pathsep}")
    ids = [s["dense"] for s in planned(tiny(), operations=["dense"])["subjects"]]
    assert ids == ["torch_dequant", "sm120_model", "weight_only", "less_precise"]


# --- choices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["dense", "moe"])
def test_an_unknown_backend_is_refused_with_those_that_are_known(operation: str, plugin: None) -> None:
    names: dict[str, Any] = {operation: ["torch_dequant", "cutlas"]}
    with pytest.raises(UnknownBackendError) as caught:
        planned(tiny(), **names)
    assert caught.value.known == ("torch_dequant", "sm120_model", "weight_only", "less_precise")
    assert "cutlas" in str(caught.value)


def test_chosen_backends_and_operations() -> None:
    made = planned(tiny(), dense=["sm120_model"], moe=["torch_dequant"])
    assert [s["id"] for s in made["subjects"]] == [
        "dense:sm120_model",
        "moe:torch_dequant",
        "block:torch_dequant+sm120_model",
    ]
    assert {s["operation"] for s in planned(tiny(), operations=["moe"])["subjects"]} == {"moe"}
    assert {s["operation"] for s in planned(tiny(), operations=["dense"])["subjects"]} == {"dense"}


def test_only_globs_match_ids() -> None:
    every = planned(tiny())
    exact = planned(tiny(), only=["dense/*/exact-*", "block/sm120_model+torch_dequant/*"])
    ids = [c["id"] for c in exact["cells"]]
    assert len(ids) == 4, "torch_dequant takes both formats"
    assert set(ids) < {c["id"] for c in every["cells"]}
    assert exact["subjects"] == every["subjects"], "a subject left without cells is still named"
    assert planned(tiny(), only=["DENSE/*"])["cells"] == [], "case counts"
    one = every["cells"][0]["id"]
    assert [c["id"] for c in planned(tiny(), only=[one])["cells"]] == [one]


def test_the_seed_goes_into_every_case() -> None:
    made = planned(tiny(), seed=7)
    assert {c.seed for c in cases(made)} == {7}
    assert all(c["id"].endswith("-s7") for c in made["cells"])
    keys = {c["reference"] for c in made["cells"]}
    assert not keys & {c["reference"] for c in planned(tiny())["cells"]}


def test_what_a_backend_declared_comes_back_as_it_was(plugin: None) -> None:
    from sm120_cells.backends import dense_backends, moe_backends

    made = planned(tiny())
    for cell, case in zip(made["cells"], cases(made), strict=True):
        declared = json.loads(json.dumps(cell["case"]["declared"]))
        name = cell["subject"].partition(":")[2]
        if isinstance(case, DenseCase):
            assert plan.declared_accumulation(declared) == dense_backends()[name].accumulation(case)
        elif isinstance(case, MoeCase):
            assert plan.declared_recipe(declared) == moe_backends()[name].recipe(case)
        else:
            assert plan.declared_recipe(declared) == moe_backends()[name.partition("+")[0]].recipe(case.routed)


# --- bad shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        "model",
        {"name": "x"},
        model(moe=None),
        model(moe=[]),
        model(dense=None),
        model(dense=[{"name": "x", "n": 5}]),
        model(activation=None),
        model(activation={"kind": "relu2"}),
        model(activation={"kind": "silu", "slope": 3}),
    ],
)
def test_what_is_not_a_models_shapes_is_refused(data: Any) -> None:
    with pytest.raises(CaseError):
        Shapes.from_json(data)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden": "4096"}, "hidden"),
        ({"hidden": 0}, "hidden"),
        ({"hidden": 100}, "hidden"),
        ({"experts": -1}, "experts"),
        ({"top_k": True}, "top_k"),
        ({"top_k": 513}, "top_k"),
        ({"intermediate": 17}, "intermediate"),
        ({"shared_intermediate": 17}, "shared_intermediate"),
        ({"routed_scaling": 0}, "routed_scaling"),
        ({"routed_scaling": -1.0}, "routed_scaling"),
        ({"routed_scaling": "2.5"}, "routed_scaling"),
        ({"dense": [{"name": "o_proj", "n": 64, "k": 100}]}, "k"),
        ({"dense": [{"name": "o_proj", "n": "64", "k": 128}]}, "n"),
    ],
)
def test_absurd_shapes_are_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(CaseError, match=rf"^{field}\b"):
        planned(model(**change))
