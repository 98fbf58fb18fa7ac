"""What decides a model's kernel shapes, and those shapes on one tensor-parallel rank.

The split over ranks is SGLang's: query heads, linear-attention heads and intermediate columns are divided; key/value
heads are divided until there is one a rank and repeated beyond that; latent (MLA) down-projections are repeated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sm120.errors import UsageError

BLOCK = 16
"""NVFP4 shares one scale among this many values along K, so every K is a multiple of it."""

MAX_TP = 1024


class DoesNotDivide(ValueError):
    """A tensor-parallel size that a dimension cannot be divided by; the message names the key and its value."""


@dataclass(frozen=True, slots=True)
class Activation:
    """``gate * sigmoid(alpha * gate) * (up + beta)``; with a limit, gate is clamped from above and up on both sides."""

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As it crosses the door."""
        return {"kind": "silu", "limit": self.limit, "alpha": self.alpha, "beta": self.beta}


@dataclass(frozen=True, slots=True)
class Moe:
    """The routed experts and the shared expert (intermediate sizes of the whole model)."""

    experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int | None
    shared_gate: bool
    activation: Activation
    routed_scaling: float


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Full attention with grouped key/value heads; with a gate, the query projection is twice as wide (Qwen3-Next)."""

    heads: int
    kv_heads: int
    head_dim: int
    output_gate: bool


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek). ``q_lora_rank`` is None where the query is not compressed."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta-net layers (Qwen3-Next, Qwen3.5)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """A model's shapes before they are divided among ranks, and where they were read."""

    name: str
    source: str
    hidden: int
    moe: Moe
    attention: GroupedAttention | LatentAttention | None
    linear_attention: LinearAttention | None
    dense_intermediate: int | None
    """Intermediate size of the leading dense layers, where the model has them."""
    notes: tuple[str, ...] = ()


def per_rank(shapes: ModelShapes, tp: int) -> dict[str, Any]:
    """The MODEL that crosses the door: shapes on one of ``tp`` ranks. UsageError when ``tp`` does not divide them."""
    try:
        return _per_rank(shapes, tp)
    except DoesNotDivide as error:
        fitting = [size for size in (1, 2, 4, 8, 16, 32, 64) if size != tp and _divides(shapes, size)]
        remedy = f"use --tp {' or '.join(map(str, fitting))}" if fitting else None
        raise UsageError(
            f"--tp {tp} does not fit {shapes.name}: {error}", remedy=remedy, where=shapes.source
        ) from error


def _divides(shapes: ModelShapes, tp: int) -> bool:
    try:
        _per_rank(shapes, tp)
    except DoesNotDivide:
        return False
    return True


def _per_rank(shapes: ModelShapes, tp: int) -> dict[str, Any]:
    moe = shapes.moe
    intermediate = _blocks("the experts' intermediate size", moe.intermediate, tp)
    shared = moe.shared_intermediate
    if shared is not None:
        shared = _blocks("the shared expert's intermediate size", shared, tp)
    dense = list(_dense(shapes, tp))
    for name, _, k in dense:
        if k % BLOCK:
            raise DoesNotDivide(f"{name} has K = {k} on one rank, which is no multiple of {BLOCK} (one NVFP4 block)")
    return {
        "name": shapes.name,
        "tp": tp,
        "hidden": shapes.hidden,
        "moe": {
            "experts": moe.experts,
            "top_k": moe.top_k,
            "intermediate": intermediate,
            "shared_intermediate": shared,
            "shared_gate": moe.shared_gate,
            "activation": moe.activation.to_json(),
            "routed_scaling": moe.routed_scaling,
        },
        "dense": [{"name": name, "n": n, "k": k} for name, n, k in dense],
    }


def _dense(shapes: ModelShapes, tp: int) -> Iterator[tuple[str, int, int]]:
    """(name, N, K) of every linear layer that an FP4 GEMM backend would run on one rank, named as SGLang fuses them."""
    hidden = shapes.hidden
    match shapes.attention:
        case GroupedAttention(heads, kv_heads, head_dim, output_gate):
            mine = _split("the number of attention heads", heads, tp)
            kv = _split_or_repeat("the number of key/value heads", kv_heads, tp)
            yield "qkv_proj", (mine * (2 if output_gate else 1) + 2 * kv) * head_dim, hidden
            yield "o_proj", hidden, mine * head_dim
        case LatentAttention(heads, q_rank, kv_rank, nope, rope, v_dim):
            mine = _split("the number of attention heads", heads, tp)
            if q_rank is None:
                yield "q_proj", mine * (nope + rope), hidden
                yield "kv_a_proj", kv_rank + rope, hidden
            else:
                yield "fused_qkv_a_proj", q_rank + kv_rank + rope, hidden
                yield "q_b_proj", mine * (nope + rope), q_rank
            yield "kv_b_proj", mine * (nope + v_dim), kv_rank
            yield "o_proj", hidden, mine * v_dim
    if (linear := shapes.linear_attention) is not None:
        keys = _split("linear_num_key_heads", linear.key_heads, tp) * linear.key_dim
        values = _split("linear_num_value_heads", linear.value_heads, tp) * linear.value_dim
        yield "in_proj_qkvz", 2 * keys + 2 * values, hidden
        yield "linear_out_proj", hidden, values
    for name, size in (("shared", shapes.moe.shared_intermediate), ("dense", shapes.dense_intermediate)):
        if size is not None:
            mine = _blocks(f"the {name} intermediate size", size, tp)
            yield f"{name}_gate_up_proj", 2 * mine, hidden
            yield f"{name}_down_proj", hidden, mine


def _split(what: str, value: int, tp: int) -> int:
    if value % tp:
        raise DoesNotDivide(f"{what} ({value}) is not divisible by {tp}")
    return value // tp


def _split_or_repeat(what: str, value: int, tp: int) -> int:
    if value >= tp:
        return _split(what, value, tp)
    if tp % value:
        raise DoesNotDivide(f"{what} ({value}) neither divides {tp} nor is divisible by it")
    return 1


def _blocks(what: str, value: int, tp: int) -> int:
    mine = _split(what, value, tp)
    if mine % BLOCK:
        raise DoesNotDivide(
            f"{what} ({value}) is {mine} on one rank, which is no multiple of {BLOCK} (one NVFP4 block)"
        )
    return mine
