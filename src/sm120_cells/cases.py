"""What is checked: one shape with its inputs and conditions. Plain data that crosses the door as JSON."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args, get_type_hints

Format = Literal["fp4", "bf16"]
"""What the activations are to the kernel: ``fp4`` is W4A4, ``bf16`` is W4A16 (weight-only)."""

DenseProbe = Literal["exact", "unit", "readback", "bound", "repeat", "repeat_bound"]
MoeProbe = Literal["isolated", "exact", "bound", "onehot", "repeat", "repeat_bound"]
Spread = Literal["normal", "span", "rows", "saturated"]
Routing = Literal["random", "one_expert", "half_empty", "minus_one", "skewed"]

_LARGE = 1e6
_LIMIT = 1 << 24  # no shape of a real model comes near it; larger is a typing error, not a case


class CaseError(ValueError):
    """A case that cannot exist: says which field and why."""


@dataclass(frozen=True, slots=True)
class Activation:
    """Gated activation of an expert.

    ``silu``: ``silu(gate) * up``. With ``limit`` (GPT-OSS, MiniMax-M3 form): gate is clamped to at most
    ``limit``, up to ±``limit``, and the result is ``gate * sigmoid(alpha * gate) * (up + beta)``.
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.limit is not None:
            _check_number(self, "limit", above=0.0)
        _check_number(self, "alpha", above=0.0)
        _check_number(self, "beta")


class _Case:
    """JSON form, digest and checks that all cases share."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The case as plain JSON values."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]  # every subclass is a dataclass

    @property
    def digest(self) -> str:
        """Hash of everything that decides the operands."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Self:
        if not isinstance(data, Mapping):
            raise CaseError(f"a {cls.__name__} is a JSON object, not {data!r:.200}")
        hints = get_type_hints(cls)
        names = {f.name for f in fields(cls)}  # type: ignore[arg-type]  # as above
        unknown = set(data) - names - {"operation", "name"}
        if unknown:
            raise CaseError(f"unknown field of a {cls.__name__}: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {}
        for key in names & set(data):
            value = data[key]
            if hints[key] == tuple[int, ...] and isinstance(value, list):
                value = tuple(value)
            elif hints[key] is Activation:
                value = _activation(value)
            values[key] = value
        try:
            return cls(**values)
        except TypeError as error:
            raise CaseError(f"{cls.__name__}: {error}") from error


def _activation(data: Any) -> Activation:
    names = {f.name for f in fields(Activation)}
    if not isinstance(data, Mapping) or set(data) - names:
        raise CaseError(f"activation must be an object with {', '.join(sorted(names))}, not {data!r:.200}")
    return Activation(**data)


def _check_number(case: object, name: str, *, above: float = -math.inf) -> None:
    value = getattr(case, name)
    if type(value) not in (int, float) or not above < value < _LARGE or not math.isfinite(value):
        wanted = "a finite number" if above == -math.inf else "positive and finite"
        raise CaseError(f"{name} must be {wanted}, not {value!r:.200}")


def _check_seed(case: Any) -> None:
    if type(case.seed) is not int or case.seed < 0:
        raise CaseError(f"seed must be a whole number from 0, not {case.seed!r:.200}")


def _check_whole(case: object, *names: str) -> None:
    for name in names:
        value = getattr(case, name)
        if type(value) is not int or not 0 < value < _LIMIT:
            raise CaseError(f"{name} must be a whole number from 1 to {_LIMIT - 1}, not {value!r:.200}")


def _check_sweep(name: str, sweep: tuple[int, ...]) -> None:
    if type(sweep) is not tuple or not sweep or any(type(m) is not int or not 0 <= m < _LIMIT for m in sweep):
        raise CaseError(f"{name} must be a non-empty list of whole numbers from 0, not {sweep!r:.200}")


def _check_choice(case: object, **choices: Any) -> None:
    for name, literal in choices.items():
        if getattr(case, name) not in get_args(literal):
            raise CaseError(f"{name} must be one of {', '.join(get_args(literal))}, not {getattr(case, name)!r:.200}")


def _check_groups(case: object, *names: str) -> None:
    for name in names:
        if getattr(case, name) % 16:
            raise CaseError(f"{name} must be a multiple of 16 (one NVFP4 block), not {getattr(case, name)}")


@dataclass(frozen=True, slots=True)
class DenseCase(_Case):
    """``out[M, N] = alpha * A[M, K] @ W[N, K].T`` for every M of ``ms``, bf16 out.

    Operands are made once for the largest M; smaller ones run its first rows.
    """

    probe: DenseProbe
    n: int
    k: int
    ms: tuple[int, ...]
    format: Format = "fp4"
    spread: Spread = "normal"
    seed: int = 0
    projection: str = ""

    def __post_init__(self) -> None:
        _check_whole(self, "n", "k")
        _check_sweep("ms", self.ms)
        _check_choice(self, probe=DenseProbe, format=Format, spread=Spread)
        _check_groups(self, "k")
        _check_seed(self)
        if type(self.projection) is not str:
            raise CaseError(f"projection must be text, not {self.projection!r:.200}")

    @property
    def name(self) -> str:
        """Stable and unique in a plan."""
        spread = "" if self.spread == "normal" else f"-{self.spread}"
        label = f"{self.projection}-" if self.projection else ""
        sweep = f"m{self.ms[0]}" if len(self.ms) == 1 else f"m{min(self.ms)}..{max(self.ms)}"
        w4a16 = "-w4a16" if self.format == "bf16" else ""
        return f"{label}{self.probe}{spread}{w4a16}-{sweep}-n{self.n}-k{self.k}-s{self.seed}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read and check; CaseError names the field."""
        return cls._read(data)


@dataclass(frozen=True, slots=True)
class MoeCase(_Case):
    """Fused mixture of experts on one rank: gate/up GEMM, activation, re-quantisation, down GEMM, combine.

    ``tokens`` is the sweep: operands are made for the largest, smaller ones run its first tokens.
    """

    probe: MoeProbe
    tokens: tuple[int, ...]
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation = field(default_factory=Activation)
    routed_scaling: float = 1.0
    routing: Routing = "random"
    format: Format = "fp4"
    spread: Spread = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_whole(self, "hidden", "intermediate", "experts", "top_k")
        _check_sweep("tokens", self.tokens)
        _check_choice(self, probe=MoeProbe, routing=Routing, format=Format, spread=Spread)
        _check_groups(self, "hidden", "intermediate")
        if self.top_k > self.experts:
            raise CaseError(f"top_k ({self.top_k}) exceeds experts ({self.experts})")
        _check_number(self, "routed_scaling", above=0.0)
        _check_seed(self)

    @property
    def name(self) -> str:
        """Stable and unique in a plan."""
        parts: list[str] = [self.probe]
        parts += [p for p, default in ((self.routing, "random"), (self.spread, "normal")) if p != default]
        if self.format == "bf16":
            parts.append("w4a16")
        if self.activation.limit is not None:
            parts.append("clamped")
        sweep = f"t{self.tokens[0]}" if len(self.tokens) == 1 else f"t{min(self.tokens)}..{max(self.tokens)}"
        parts += [sweep, f"h{self.hidden}", f"i{self.intermediate}", f"e{self.experts}", f"k{self.top_k}"]
        return "-".join([*parts, f"s{self.seed}"])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read and check; CaseError names the field."""
        return cls._read(data)


@dataclass(frozen=True, slots=True)
class BlockCase(_Case):
    """A model's whole MoE block: routed experts through a MoE backend, the shared expert through a dense one.

    ``format`` is what the MoE backend takes; tokens lie on the FP4 grid either way, since the two may differ in it.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared_intermediate: int
    shared_gate: bool
    activation: Activation = field(default_factory=Activation)
    routed_scaling: float = 1.0
    format: Format = "fp4"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_whole(self, "tokens", "shared_intermediate")
        _check_groups(self, "shared_intermediate")
        if type(self.shared_gate) is not bool:
            raise CaseError(f"shared_gate must be true or false, not {self.shared_gate!r:.200}")
        _ = self.routed

    @property
    def name(self) -> str:
        """Stable and unique in a plan."""
        return (
            f"block-t{self.tokens}-h{self.hidden}-i{self.intermediate}-e{self.experts}-k{self.top_k}"
            f"-shared{self.shared_intermediate}-s{self.seed}"
        )

    @property
    def routed(self) -> MoeCase:
        """The routed half as a case of its own."""
        return MoeCase(
            probe="bound",
            tokens=(self.tokens,),
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            top_k=self.top_k,
            activation=self.activation,
            routed_scaling=self.routed_scaling,
            format=self.format,
            seed=self.seed,
        )

    def shared(self, format_: Format) -> tuple[DenseCase, DenseCase]:
        """The shared expert's two GEMMs as cases of their own: gate and up, then down."""
        ms, both = (self.tokens,), 2 * self.shared_intermediate
        gate_up = DenseCase("bound", both, self.hidden, ms, format_, seed=self.seed)
        return gate_up, DenseCase("bound", self.hidden, self.shared_intermediate, ms, format_, seed=self.seed)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read and check; CaseError names the field."""
        return cls._read(data)


Case = DenseCase | MoeCase | BlockCase
_KINDS: dict[str, type[DenseCase] | type[MoeCase] | type[BlockCase]] = {
    "dense": DenseCase,
    "moe": MoeCase,
    "block": BlockCase,
}


def operation(case: Case) -> str:
    """``dense``, ``moe`` or ``block``."""
    return next(name for name, kind in _KINDS.items() if isinstance(case, kind))


def case_to_json(case: Case) -> dict[str, Any]:
    """The form that crosses the door: the fields, the operation and the name."""
    return {"operation": operation(case), "name": case.name, **case.to_json()}


def case_from_json(data: Any) -> Case:
    """Inverse of `case_to_json`; CaseError where it is not a case."""
    named = data.get("operation") if isinstance(data, Mapping) else None
    kind = _KINDS.get(named) if isinstance(named, str) else None
    if kind is None:
        raise CaseError(f"operation must be one of {', '.join(_KINDS)}, not {named!r:.200}")
    return kind.from_json(data)
