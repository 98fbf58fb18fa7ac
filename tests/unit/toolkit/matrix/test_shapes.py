import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm120.errors import UsageError
from sm120.matrix.configs import load_shapes, presets, read_config
from sm120.matrix.shapes import Activation, per_rank

QWEN = "Qwen3.5-397B-A17B"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_act": "silu",
}


def dense(model: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {layer["name"]: (layer["n"], layer["k"]) for layer in model["dense"]}


def test_qwen_3_5_on_one_rank() -> None:
    model = per_rank(load_shapes(QWEN), 1)
    assert model["name"] == QWEN
    assert (model["hidden"], model["tp"]) == (4096, 1)
    assert model["moe"] == {
        "experts": 512,
        "top_k": 10,
        "intermediate": 1024,
        "shared_intermediate": 1024,
        "shared_gate": True,
        "activation": {"kind": "silu", "limit": None, "alpha": 1.0, "beta": 0.0},
        "routed_scaling": 1.0,
    }
    assert dense(model) == {
        "qkv_proj": (2 * 32 * 256 + 2 * 2 * 256, 4096),  # queries with their output gate, keys, values
        "o_proj": (4096, 32 * 256),
        "in_proj_qkvz": (2 * 16 * 128 + 2 * 64 * 128, 4096),
        "linear_out_proj": (4096, 64 * 128),
        "shared_gate_up_proj": (2048, 4096),
        "shared_down_proj": (4096, 1024),
    }


def test_qwen_3_5_on_four_ranks() -> None:
    model = per_rank(load_shapes(QWEN), 4)
    assert model["moe"]["intermediate"] == 256
    assert model["moe"]["experts"] == 512
    assert dense(model) == {
        "qkv_proj": (2 * 8 * 256 + 2 * 256, 4096),  # two key/value heads, repeated: one a rank
        "o_proj": (4096, 8 * 256),
        "in_proj_qkvz": (2 * 4 * 128 + 2 * 16 * 128, 4096),
        "linear_out_proj": (4096, 16 * 128),
        "shared_gate_up_proj": (512, 4096),
        "shared_down_proj": (4096, 256),
    }


def test_latent_attention_on_eight_ranks() -> None:
    assert dense(per_rank(load_shapes("DeepSeek-R1"), 8)) == {
        "fused_qkv_a_proj": (1536 + 512 + 64, 7168),
        "q_b_proj": (16 * 192, 1536),
        "kv_b_proj": (16 * 256, 512),
        "o_proj": (7168, 16 * 128),
        "shared_gate_up_proj": (512, 7168),
        "shared_down_proj": (7168, 256),
        "dense_gate_up_proj": (4608, 7168),
        "dense_down_proj": (7168, 2304),
    }


@pytest.mark.parametrize(
    ("preset", "experts", "top_k", "intermediate", "shared", "gate", "scaling"),
    [
        pytest.param("Qwen3-235B-A22B", 128, 8, 1536, None, False, 1.0),
        pytest.param("Qwen3-30B-A3B", 128, 8, 768, None, False, 1.0),
        pytest.param("Qwen3-Next-80B-A3B", 512, 10, 512, 512, True, 1.0),
        pytest.param("Qwen3.5-122B-A10B", 256, 8, 1024, 1024, True, 1.0),
        pytest.param("DeepSeek-V3.1", 256, 8, 2048, 2048, False, 2.5),
        pytest.param("Kimi-K2.5", 384, 8, 2048, 2048, False, 2.827),
        pytest.param("GLM-5.1", 256, 8, 2048, 2048, False, 2.5),
        pytest.param("MiniMax-M2.5", 256, 8, 1536, None, False, 1.0),
    ],
)
def test_presets(
    preset: str, experts: int, top_k: int, intermediate: int, shared: int | None, gate: bool, scaling: float
) -> None:
    moe = per_rank(load_shapes(preset), 1)["moe"]
    assert (moe["experts"], moe["top_k"], moe["intermediate"]) == (experts, top_k, intermediate)
    assert (moe["shared_intermediate"], moe["shared_gate"], moe["routed_scaling"]) == (shared, gate, scaling)


def test_every_preset_says_where_it_was_read() -> None:
    assert len(presets()) >= 5
    for preset in presets():
        assert preset.source.startswith("github:")
        assert preset.source.endswith("config.json")
        assert per_rank(load_shapes(preset.name), 1)["dense"]


@pytest.mark.parametrize("name", ["nvidia/Qwen3.5-397B-A17B-NVFP4", "qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B"])
def test_a_checkpoints_name_is_its_preset(name: str) -> None:
    assert load_shapes(name).name == QWEN


def test_a_local_folder_wins_over_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / QWEN
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert load_shapes(f"nvidia/{QWEN}").hidden == 2048
    assert load_shapes(QWEN).hidden == 4096


@pytest.mark.parametrize("preset", [preset.name for preset in presets()])
def test_a_preset_equals_its_config_file(preset: str, tmp_path: Path) -> None:
    (config,) = [p.config for p in presets() if p.name == preset]
    folder = tmp_path / preset
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": dict(config)}))
    for path in (folder, folder / "config.json"):
        assert per_rank(load_shapes(str(path)), 1) == per_rank(load_shapes(preset), 1)


def write(tmp_path: Path, **changes: Any) -> str:
    config = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"num_experts": ..., "n_routed_experts": 64}, {"experts": 64}, id="n_routed_experts"),
        pytest.param(
            {"num_experts": ..., "num_local_experts": 32}, {"experts": 32, "intermediate": 768}, id="num_local"
        ),
        pytest.param(
            {"num_experts": ..., "num_local_experts": 8, "moe_intermediate_size": ..., "intermediate_size": 1536},
            {"experts": 8, "intermediate": 1536},
            id="experts-only",
        ),
        pytest.param({"n_shared_experts": 2}, {"shared_intermediate": 1536, "shared_gate": False}, id="n_shared"),
        pytest.param({"n_shared_experts": 0}, {"shared_intermediate": None}, id="no-shared"),
        pytest.param({"shared_expert_intermediate_size": 0}, {"shared_intermediate": None}, id="shared-size-0"),
        pytest.param({"routed_scaling_factor": 2.5}, {"routed_scaling": 2.5}, id="scaling"),
        pytest.param({"routed_scaling_factor": None}, {"routed_scaling": 1.0}, id="scaling-null"),
    ],
)
def test_naming_conventions(tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    moe = per_rank(load_shapes(write(tmp_path, **changes)), 1)["moe"]
    assert {key: moe[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, Activation(), id="silu"),
        pytest.param({"hidden_act": ...}, Activation(), id="absent"),
        pytest.param({"swiglu_limit": 10.0}, Activation(limit=10.0), id="clamped"),
        pytest.param(
            {"hidden_act": "swigluoai", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            Activation(7.0, 1.702, 1.0),
            id="oai",
        ),
        pytest.param({"model_type": "gpt_oss", "swiglu_limit": 7.0}, Activation(7.0, 1.702, 1.0), id="gpt-oss"),
    ],
)
def test_activations(tmp_path: Path, changes: dict[str, Any], expected: Activation) -> None:
    assert load_shapes(write(tmp_path, **changes)).moe.activation == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"hidden_size": ...}, "hidden_size is missing", id="missing"),
        pytest.param(
            {"num_experts": ...}, "num_experts or n_routed_experts or num_local_experts is missing", id="dense"
        ),
        pytest.param({"moe_intermediate_size": ...}, "moe_intermediate_size is missing", id="no-intermediate"),
        pytest.param({"hidden_size": -2048}, "hidden_size must be a whole number from 1", id="negative"),
        pytest.param({"hidden_size": 0}, "hidden_size must be a whole number from 1", id="zero"),
        pytest.param({"hidden_size": 10**12}, "hidden_size must be a whole number from 1 to 1048576", id="huge"),
        pytest.param({"hidden_size": True}, "hidden_size must be a whole number", id="bool"),
        pytest.param({"hidden_size": 2048.0}, "hidden_size must be a whole number", id="float"),
        pytest.param({"hidden_size": "2048"}, "hidden_size must be a whole number", id="text"),
        pytest.param({"hidden_size": [2048]}, "hidden_size must be a whole number", id="list"),
        pytest.param({"hidden_size": 2040}, "no multiple of 16", id="not-a-block"),
        pytest.param({"num_experts_per_tok": 129}, "exceeds the number of experts", id="top-k"),
        pytest.param({"n_shared_experts": -1}, "n_shared_experts must be a whole number from 0", id="negative-shared"),
        pytest.param({"routed_scaling_factor": -1}, "routed_scaling_factor must be a positive number", id="scaling"),
        pytest.param(
            {"routed_scaling_factor": True}, "routed_scaling_factor must be a positive number", id="scaling-bool"
        ),
        pytest.param({"swiglu_limit": 0}, "swiglu_limit must be a positive number", id="limit"),
        pytest.param({"hidden_act": "relu2"}, "the activation 'relu2' are not supported", id="activation"),
        pytest.param({"moe_latent_size": 1024}, "moe_latent_size", id="latent"),
        pytest.param({"num_key_value_heads": 5}, "is not divisible by num_key_value_heads", id="kv-heads"),
        pytest.param(
            {"head_dim": ..., "num_attention_heads": 3}, "is not divisible by num_attention_heads", id="head-dim"
        ),
        pytest.param({"attn_output_gate": "yes"}, "attn_output_gate must be true or false", id="gate"),
        pytest.param({"text_config": 5}, "text_config must be an object", id="text-config"),
        pytest.param({"kv_lora_rank": 512}, "qk_nope_head_dim", id="half-latent-attention"),
        pytest.param({"linear_num_value_heads": 64}, "linear_num_key_heads", id="half-linear-attention"),
    ],
)
def test_absurd_values_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        load_shapes(write(tmp_path, **changes))
    assert str(tmp_path / "config.json") in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "line 1, column 1", id="empty"),
        pytest.param(b"{", "line 1, column 2", id="torn"),
        pytest.param(b"[]", "must hold an object", id="list"),
        pytest.param(b"null", "must hold an object", id="null"),
        pytest.param(b"\x7fELF\xff\xfe", "is not text", id="binary"),
        pytest.param(b"\xef\xbb\xbf{}", "BOM", id="bom"),
        pytest.param(b'{"hidden_size": NaN}', "NaN is not a JSON value", id="nan"),
        pytest.param(b'{"hidden_size": ' + b"9" * 6000 + b"}", "is not valid JSON", id="endless-number"),
        pytest.param(b"[" * 200_000, "nested too deeply", id="nested"),
        pytest.param(b" " * (17 << 20), "no config.json is that large", id="large"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        load_shapes(str(file))
    assert str(file) in caught.value.message


def test_places_that_hold_no_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        load_shapes(str(tmp_path))
    for name in (str(tmp_path / "gone"), "./gone", "gone.json"):
        with pytest.raises(UsageError, match="no such file or folder"):
            load_shapes(name)
    with pytest.raises(UsageError, match="is not a regular file"):
        load_shapes("/dev/zero")
    for name in ("", "  "):
        with pytest.raises(UsageError, match="empty"):
            load_shapes(name)
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(UsageError, match="neither a preset nor"):
            load_shapes(name)


def test_nearest_presets_are_offered() -> None:
    with pytest.raises(UsageError) as caught:
        load_shapes("Qwen3.5-379B-A17B")
    assert caught.value.remedy is not None
    assert QWEN in caught.value.remedy
    with pytest.raises(UsageError) as caught:
        load_shapes("zzz")
    assert caught.value.remedy is not None
    assert "DeepSeek-R1" in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "tp", "said"),
    [
        pytest.param(QWEN, 3, "is not divisible by 3", id="odd"),
        pytest.param(QWEN, 64, "multiple of 16|not divisible", id="too-many"),
        pytest.param("MiniMax-M2.5", 32, "not divisible by 32", id="48-heads"),
    ],
)
def test_tp_that_does_not_divide(model: str, tp: int, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        per_rank(load_shapes(model), tp)
    assert f"--tp {tp}" in caught.value.message
    assert caught.value.remedy is not None
    assert "--tp 1 or 2" in caught.value.remedy


def test_an_intermediate_size_must_stay_whole_blocks(tmp_path: Path) -> None:
    shapes = load_shapes(write(tmp_path, moe_intermediate_size=48))
    with pytest.raises(UsageError, match="is 24 on one rank, which is no multiple of 16"):
        per_rank(shapes, 2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)
KEYS = sorted({*CONFIG, *(key for preset in presets() for key in preset.config), "text_config", "swiglu_limit"})


@given(key=st.sampled_from(KEYS), value=JSON, base=st.sampled_from([CONFIG, *(dict(p.config) for p in presets())]))
@settings(deadline=None)
def test_no_value_of_any_key_does_anything_but_work_or_be_refused(
    key: str, value: object, base: dict[str, Any]
) -> None:
    try:
        shapes = read_config({**base, key: value}, name="x", source="here")
        model = per_rank(shapes, 1)
    except UsageError as error:
        assert error.message  # noqa: PT017 - whatever else it raises fails the test
    else:
        sizes = [
            model["hidden"],
            model["moe"]["intermediate"],
            *(size for layer in dense(model).values() for size in layer),
        ]
        assert all(type(size) is int and size > 0 for size in sizes)
        json.dumps(model, allow_nan=False)
