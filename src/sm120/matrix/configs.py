"""A model's shapes from a preset or a Hugging Face ``config.json``.

Every reader of a key says under which names public configurations spell it; the presets are the same keys as data, so
there is one reader for both.
"""

import json
import math
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from sm120.errors import UsageError
from sm120.matrix.shapes import Activation, GroupedAttention, LatentAttention, LinearAttention, ModelShapes, Moe

_MAX_BYTES = 16 << 20  # the largest public config.json is below 1 MiB
_MAX_SIZE = 1 << 20  # no dimension of a published model comes near it
_GATED_SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
"""Model types whose shared expert is multiplied by ``sigmoid(x @ w)``; in the others it is simply added."""
_GATED_QUERY = ("qwen3_next", "qwen3_5")
"""Model types whose query projection also yields the output gate even where ``attn_output_gate`` is absent."""


@dataclass(frozen=True, slots=True)
class Preset:
    """One model of models.toml."""

    name: str
    source: str
    note: str | None
    config: Mapping[str, Any]


@cache
def presets() -> tuple[Preset, ...]:
    """The shipped presets, in the file's order."""
    text = resources.files("sm120.matrix").joinpath("models.toml").read_text(encoding="utf-8")
    return tuple(
        Preset(entry["name"], entry["source"], entry.get("note"), entry["config"])
        for entry in tomllib.loads(text)["model"]
    )


def load_shapes(model: str) -> ModelShapes:
    """Shapes of a preset name, a config.json or a folder that holds one. UsageError says what was wrong with it."""
    if not model.strip():
        raise UsageError("--model is empty", remedy=_preset_remedy())
    path = Path(model).expanduser()
    try:
        exists = path.exists()
    except (OSError, ValueError):  # too long, or holding a NUL byte
        exists = False
    if exists and ("/" in model or path.suffix == ".json"):
        return _load_file(path)
    by_name = {_plain(preset.name): preset for preset in presets()}
    if (preset := by_name.get(_plain(model))) is not None:
        shapes = read_config(preset.config, name=preset.name, source=f"models.toml, model {preset.name}")
        return shapes if preset.note is None else replace(shapes, notes=(preset.note,))
    if exists:
        return _load_file(path)
    if path.suffix == ".json" or model.startswith((".", "/", "~")):
        raise UsageError(f"--model {_short(model)}: no such file or folder", remedy=_preset_remedy())
    near = get_close_matches(_plain(model), by_name, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(by_name[n].name for n in near)}?" if near else _preset_remedy()
    raise UsageError(f"--model {_short(model)} is neither a preset nor an existing path", remedy=hint)


def read_config(raw: Mapping[str, Any], *, name: str, source: str) -> ModelShapes:
    """Shapes from a configuration's keys; UsageError names ``source`` and the key."""
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        _refuse(source, f"text_config must be an object, not {_short(nested)}")
    keys = _Keys(source, raw if nested is None else {**raw, **nested})
    hidden = keys.size("hidden_size")
    if hidden % 16:
        _refuse(source, f"hidden_size ({hidden}) is no multiple of 16 (one NVFP4 block)")
    model_type = str(keys.get("model_type") or "")
    leading = keys.optional_count("first_k_dense_replace") or 0
    return ModelShapes(
        name=name,
        source=source,
        hidden=hidden,
        moe=_moe(keys, model_type),
        attention=_attention(keys, model_type, hidden),
        linear_attention=_linear_attention(keys),
        dense_intermediate=keys.size("intermediate_size") if leading else None,
    )


def _moe(keys: "_Keys", model_type: str) -> Moe:
    experts = keys.size("num_experts", "n_routed_experts", "num_local_experts")
    top_k = keys.size("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    if top_k > experts:
        _refuse(keys.source, f"{keys.last} ({top_k}) exceeds the number of experts ({experts})")
    # Mixtral, MiniMax-M2 and GPT-OSS have experts only, so their intermediate_size is the experts'.
    names = (
        ("moe_intermediate_size", "intermediate_size") if keys.has("num_local_experts") else ("moe_intermediate_size",)
    )
    intermediate = keys.size(*names)
    if keys.get("moe_latent_size") is not None:
        _refuse(keys.source, "moe_latent_size: experts that work on a latent vector are not supported")
    gated = model_type.startswith(_GATED_SHARED)
    return Moe(
        experts=experts,
        top_k=top_k,
        intermediate=intermediate,
        shared_intermediate=_shared(keys, intermediate),
        shared_gate=gated,
        activation=_activation(keys, model_type),
        routed_scaling=keys.number("routed_scaling_factor", "moe_routed_scaling_factor") or 1.0,
    )


def _shared(keys: "_Keys", intermediate: int) -> int | None:
    size = keys.optional_count("shared_expert_intermediate_size", "shared_intermediate_size")
    if size is not None:
        return size or None  # 0 is how MiniMax-M2 says that it has none
    count = keys.optional_count("n_shared_experts", "num_shared_experts")
    return count * intermediate if count else None


def _activation(keys: "_Keys", model_type: str) -> Activation:
    name, key = keys.get("hidden_act", "mlp_hidden_act", "hidden_activation"), keys.last
    limit = keys.number("swiglu_limit")
    if name == "swigluoai" or model_type == "gpt_oss":
        # gate * sigmoid(1.702 * gate) * (up + 1), clamped at 7: the values of GPT-OSS's own implementation.
        return Activation(limit or 7.0, keys.number("swiglu_alpha") or 1.702, 1.0)
    if name is not None and name not in ("silu", "swish", "swiglu"):
        _refuse(keys.source, f"{key}: experts with the activation {_short(name)} are not supported, only SwiGLU")
    return Activation(limit)


def _attention(keys: "_Keys", model_type: str, hidden: int) -> GroupedAttention | LatentAttention | None:
    if not keys.has("num_attention_heads"):
        return None
    heads = keys.size("num_attention_heads")
    if keys.get("kv_lora_rank") is not None:
        return LatentAttention(
            heads=heads,
            q_lora_rank=keys.optional_count("q_lora_rank") or None,
            kv_lora_rank=keys.size("kv_lora_rank"),
            nope_dim=keys.size("qk_nope_head_dim"),
            rope_dim=keys.size("qk_rope_head_dim"),
            v_dim=keys.size("v_head_dim"),
        )
    if keys.get("head_dim") is None and hidden % heads:
        _refuse(
            keys.source, f"hidden_size ({hidden}) is not divisible by num_attention_heads ({heads}); head_dim is absent"
        )
    kv_heads = keys.size("num_key_value_heads") if keys.has("num_key_value_heads") else heads
    if heads % kv_heads:
        _refuse(keys.source, f"num_attention_heads ({heads}) is not divisible by num_key_value_heads ({kv_heads})")
    gate = keys.get("attn_output_gate")
    if gate is not None and not isinstance(gate, bool):
        _refuse(keys.source, f"attn_output_gate must be true or false, not {_short(gate)}")
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=keys.size("head_dim") if keys.get("head_dim") is not None else hidden // heads,
        output_gate=model_type.startswith(_GATED_QUERY) if gate is None else gate,
    )


def _linear_attention(keys: "_Keys") -> LinearAttention | None:
    if not keys.has("linear_num_value_heads"):
        return None
    return LinearAttention(
        key_heads=keys.size("linear_num_key_heads"),
        value_heads=keys.size("linear_num_value_heads"),
        key_dim=keys.size("linear_key_head_dim"),
        value_dim=keys.size("linear_value_head_dim"),
    )


class _Keys:
    """Checked access to a configuration; the first of several names that is there wins."""

    def __init__(self, source: str, data: Mapping[str, Any]) -> None:
        self.source = source
        self.last = ""
        self._data = data

    def has(self, name: str) -> bool:
        return self._data.get(name) is not None

    def get(self, *names: str) -> object:
        for name in names:
            if self._data.get(name) is not None:
                self.last = name
                return self._data[name]
        self.last = names[0]
        return None

    def size(self, *names: str) -> int:
        """A whole number from 1 that must be there."""
        value = self.get(*names)
        if value is None:
            _refuse(
                self.source, f"{' or '.join(names)} is missing: this is no configuration of a mixture-of-experts model"
            )
        return self._whole(value, 1)

    def optional_count(self, *names: str) -> int | None:
        """A whole number from 0, or None where it is absent."""
        value = self.get(*names)
        return None if value is None else self._whole(value, 0)

    def number(self, *names: str) -> float | None:
        """A positive finite number, or None where it is absent."""
        value = self.get(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6 or math.isnan(value):
            _refuse(self.source, f"{self.last} must be a positive number, not {_short(value)}")
        return float(value)

    def _whole(self, value: object, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_SIZE:
            _refuse(self.source, f"{self.last} must be a whole number from {least} to {_MAX_SIZE}, not {_short(value)}")
        return value


def _load_file(path: Path) -> ModelShapes:
    file = path / "config.json" if path.is_dir() else path
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            _refuse(str(file), "is not a regular file")
        if status.st_size > _MAX_BYTES:
            _refuse(str(file), f"has {status.st_size} bytes: no config.json is that large")
        raw = json.loads(file.read_bytes().decode("utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        _refuse(str(path), "holds no config.json", remedy="give the folder of a checkpoint, or its config.json")
    except OSError as error:
        _refuse(str(file), f"cannot be read: {error.strerror or error}")
    except UnicodeDecodeError:
        _refuse(str(file), "is not text, so it is no config.json")
    except json.JSONDecodeError as error:
        _refuse(str(file), f"line {error.lineno}, column {error.colno}: {error.msg}")
    except RecursionError:
        _refuse(str(file), "is nested too deeply to be a config.json")
    except ValueError as error:  # NaN or Infinity, or a number of thousands of digits
        _refuse(str(file), f"is not valid JSON: {error}")
    if not isinstance(raw, dict):
        _refuse(str(file), f"must hold an object, not {_short(raw)}")
    resolved = file.resolve()
    name = resolved.parent.name if file.name == "config.json" else resolved.stem
    return read_config(raw, name=name or str(file), source=str(file))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _plain(name: str) -> str:
    """Owner, quantisation suffix and case do not tell models apart: ``nvidia/X-NVFP4`` is the preset ``X``."""
    plain = name.strip().rstrip("/").casefold()
    if plain.count("/") == 1 and not plain.startswith((".", "~", "/")):
        plain = plain.partition("/")[2]
    for suffix in ("-nvfp4", "-fp4"):
        plain = plain.removesuffix(suffix)
    return plain


def _preset_remedy() -> str:
    return f"presets: {', '.join(preset.name for preset in presets())}; or give a folder with a config.json"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _refuse(source: str, message: str, remedy: str | None = None) -> NoReturn:
    raise UsageError(
        f"{source}: {message}", remedy=remedy or "give --model a preset or another config.json", where=source
    )
