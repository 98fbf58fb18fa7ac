"""A backend on a case, in the one form that the evaluation drives: pose inputs in poisoned buffers, call, relate."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from sm120_cells import judge, nvfp4
from sm120_cells.backends import DenseBackend, DenseInput, DenseKernel, MoeBackend, MoeKernel
from sm120_cells.cases import Activation, BlockCase, DenseCase, Format, MoeCase
from sm120_cells.nvfp4 import Quantized
from sm120_cells.probes import BlockOperands, DenseOperands, MoeOperands, MoeWeights
from sm120_cells.reference import EXACT_DENSE, EXACT_MOE, Expected, dense_reference

REPEATED = ("repeat", "repeat_bound")


@dataclass(frozen=True, slots=True)
class Pattern:
    """What padding and rows beyond the real ones hold: right kernels give the same bits whatever it is."""

    name: str
    codes: int  # packed byte of two E2M1 codes
    scale: int  # E4M3 byte
    value: float  # bf16 activation, router weight
    expert: int  # expert id


PATTERNS = (
    Pattern("nan", 0x77, nvfp4.E4M3_NAN, float("nan"), 0),
    Pattern("plausible", 0x35, 0x48, 1.5, 0),
    Pattern("zero", 0x00, 0x00, 0.0, -1),
)


class Inputs(NamedTuple):
    """The real rows of a call: one tensor each along dimension 0, and the dense GEMM's alpha."""

    rows: tuple[Tensor, ...]
    alpha: Tensor

    def map(self, *rows: Tensor | None) -> "Inputs":
        """With some of the row tensors replaced."""
        replaced = [old if new is None else new for old, new in zip(self.rows, rows, strict=True)]
        return Inputs(tuple(replaced), self.alpha)

    def at(self, index: Tensor) -> "Inputs":
        """The given rows, in that order."""
        return Inputs(tuple(t[index] for t in self.rows), self.alpha)


class Posed(NamedTuple):
    """Inputs in buffers whose padding holds a pattern: what is handed over, and the buffers to check afterwards."""

    rows: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    alpha: Tensor
    real_rows: int


@dataclass(frozen=True, slots=True)
class Relation:
    """A changed input and what the output must then be, bit for bit, in the rows ``where`` (None: all)."""

    name: str
    inputs: Inputs
    want: Tensor
    where: Tensor | None = None
    experts: MoeWeights | None = None  # relabelled experts, for which a kernel is prepared anew


class Subject(Protocol):
    """A backend on a case."""

    columns: int
    sweep: tuple[int, ...]
    exact: bool
    atomics: bool
    repeats: int
    weights_before: list[int]  # checksums of the constants before the backend saw them

    def inputs(self, rows: int) -> Inputs:
        """The first rows of the case's operands."""

    def variant(self, inputs: Inputs) -> tuple[Inputs, float]:
        """Other contents whose result is a power of two times the first one's, with either sign; and that factor."""

    def expert_at_fault(self, wrong_rows: Tensor) -> int | None:
        """The one expert that explains which rows are wrong (bool [rows]), if there is one."""

    def k_steps(self, rows: int) -> Iterator[tuple[int, Inputs, Expected]]:
        """(step, inputs with only that K = 64 step, what they must give), where sums are exact."""

    def pose(self, inputs: Inputs, pattern: Pattern) -> Posed:
        """Place them in poisoned buffers."""

    def call(self, posed: Posed, out: Tensor) -> Tensor:
        """Run the prepared kernel."""

    def relate(self, relation: Relation, posed: Posed, out: Tensor) -> Tensor:
        """Run on a relation's inputs, with a kernel prepared anew where the relation asks for it."""

    def relations(self, inputs: Inputs, out: Tensor) -> Iterator[Relation]:
        """Changes of the input whose effect on the output is known exactly."""

    def constants(self) -> tuple[Tensor, ...]:
        """Weights: they must be the same bytes afterwards."""


_STRETCH = 1 << 22


def checksums(tensors: Iterable[Tensor]) -> list[int]:
    """Sums of bytes times their place, for stretches of them: any one changed byte shows, and any two exchanged."""
    sums: list[int] = []
    for tensor in tensors:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        place = torch.arange(1, min(len(flat), _STRETCH) + 1, dtype=torch.int64, device=flat.device)
        sums += [int((part * place[: len(part)]).sum()) for part in flat.split(_STRETCH)]
    return sums


def _padded(tensor: Tensor, fill: float, rows: int) -> Tensor:
    buffer = torch.full((rows, *tensor.shape[1:]), fill, dtype=tensor.dtype, device=tensor.device)
    buffer[: len(tensor)] = tensor
    return buffer


def _buffer_rows(count: int) -> int:
    """Rows that a tile of 128 would touch, and one tile more."""
    return (count // 128 + 2) * 128


def _independence(inputs: Inputs, out: Tensor, *touched: int) -> Iterator[Relation]:
    """Even rows do not change when the odd rows' contents (the row tensors ``touched``) are exchanged."""
    count = len(out)
    if count < 4:
        return
    odd = torch.arange(1, count, 2, device=out.device)
    order = torch.arange(count, device=out.device)
    order[odd] = odd.roll(1)
    changed = [t[order] if i in touched else None for i, t in enumerate(inputs.rows)]
    even = torch.arange(0, count, 2, device=out.device)
    yield Relation("row independence", inputs.map(*changed), out[even], even)


class DenseSubject:
    """Dense GEMM."""

    def __init__(self, case: DenseCase, operands: DenseOperands, backend: DenseBackend) -> None:
        self.case, self.operands = case, operands
        self.columns, self.sweep = case.n, case.ms
        self.exact = case.probe in EXACT_DENSE
        self.atomics = backend.accumulation(case).atomics
        self.repeats = 64 if case.probe in REPEATED else 0
        self.accumulation = backend.accumulation(case)
        self.weights_before = checksums(self.constants())
        self.kernel = backend.prepare(operands.w)

    def constants(self) -> tuple[Tensor, ...]:
        """The weight."""
        w = self.operands.w
        return (w.packed, w.scales, w.scale_2)

    def inputs(self, rows: int) -> Inputs:
        """Packed codes and linear scales, or bf16 values."""
        a = self.operands.a
        tensors = (a,) if isinstance(a, Tensor) else (a.packed, a.scales)
        return Inputs(tuple(t[:rows] for t in tensors), self.operands.alpha)

    def pose(self, inputs: Inputs, pattern: Pattern) -> Posed:
        """Scales go into the 128x4 layout, its padding filled with the pattern."""
        first = inputs.rows[0]
        count = len(first)
        if len(inputs.rows) == 1:
            values = _padded(first, pattern.value, _buffer_rows(count))
            return Posed((values[:count],), (values,), inputs.alpha, count)
        packed = _padded(first, pattern.codes, _buffer_rows(count))
        scales = nvfp4.swizzle(inputs.rows[1], pattern.scale)
        return Posed((packed[:count], scales), (packed, scales), inputs.alpha, count)

    def call(self, posed: Posed, out: Tensor) -> Tensor:
        """Run the kernel."""
        return self.kernel(dense_input(posed, self.case.k), posed.alpha, out)

    def variant(self, inputs: Inputs) -> tuple[Inputs, float]:
        """Negated activations."""
        first = inputs.rows[0]
        return inputs.map(first ^ 0x88 if first.dtype == torch.uint8 else -first, *inputs.rows[1:]), -1.0

    def expert_at_fault(self, wrong_rows: Tensor) -> int | None:
        """There are none."""
        del wrong_rows
        return None

    def k_steps(self, rows: int) -> Iterator[tuple[int, Inputs, Expected]]:
        """Activations that are zero but in one step of 64; only where the probe is exact."""
        if not self.exact or not rows:
            return
        inputs = self.inputs(rows)
        for step in range(-(-self.case.k // 64)):
            width = 64 if len(inputs.rows) == 1 else 32  # elements, or bytes of two codes
            alone = torch.zeros_like(inputs.rows[0])
            columns = slice(step * width, (step + 1) * width)
            alone[:, columns] = inputs.rows[0][:, columns]
            masked = inputs.map(alone, *inputs.rows[1:])
            a = self.operands.a
            part = alone if isinstance(a, Tensor) else Quantized(alone, masked.rows[1], a.scale_2)
            operands = DenseOperands(part, self.operands.w)
            yield step, masked, dense_reference(self.case, operands, self.accumulation)

    def relate(self, relation: Relation, posed: Posed, out: Tensor) -> Tensor:
        """The same kernel."""
        del relation
        return self.call(posed, out)

    def relations(self, inputs: Inputs, out: Tensor) -> Iterator[Relation]:
        """Scaling by powers of two, rows independent and permuted, zero rows."""
        for power in (3, -5):
            factor = 2.0**power
            yield Relation(
                f"scaling by 2^{power}", Inputs(inputs.rows, inputs.alpha * factor), (out.float() * factor).bfloat16()
            )
        touched = range(len(inputs.rows))
        yield from _independence(inputs, out, *touched)
        if self.exact and len(out) > 1:
            order = torch.randperm(len(out), generator=torch.Generator().manual_seed(1)).to(out.device)
            yield Relation("row permutation", inputs.at(order), out[order])
        zeroed = [t.clone() for t in inputs.rows]
        where = torch.arange(0, len(out), 3, device=out.device)
        zeroed[0][where] = 0
        yield Relation("zero rows", inputs.map(*zeroed), torch.zeros_like(out[where]), where)


def dense_input(posed: Posed, k: int) -> DenseInput:
    """What a dense kernel is handed."""
    if len(posed.rows) == 1:
        return DenseInput(None, None, posed.rows[0], posed.real_rows, k)
    return DenseInput(posed.rows[0], posed.rows[1], None, posed.real_rows, k)


class MoeSubject:
    """Fused MoE."""

    def __init__(self, case: MoeCase, operands: MoeOperands, backend: MoeBackend) -> None:
        self.case, self.operands, self.backend = case, operands, backend
        self.columns, self.sweep = case.hidden, case.tokens
        self.exact = case.probe in EXACT_MOE
        self.atomics = backend.recipe(case).atomics
        self.repeats = 64 if case.probe in REPEATED else 0
        self.weights_before = checksums(self.constants())
        self.kernel = backend.prepare(operands.experts, case)

    def constants(self) -> tuple[Tensor, ...]:
        """All experts."""
        return _constants(self.operands.experts)

    def inputs(self, rows: int) -> Inputs:
        """x, ids, weights."""
        o = self.operands
        return Inputs((o.x[:rows], o.ids[:rows], o.weights[:rows]), torch.ones(1, device=o.x.device))

    def pose(self, inputs: Inputs, pattern: Pattern) -> Posed:
        """Tokens beyond the real ones hold the pattern in x, ids and weights."""
        return pose_tokens(inputs, (pattern.value, pattern.expert, pattern.value))

    def call(self, posed: Posed, out: Tensor) -> Tensor:
        """Run the kernel."""
        x, ids, weights = posed.rows
        return self.kernel(x, ids, weights, out)

    def variant(self, inputs: Inputs) -> tuple[Inputs, float]:
        """Router weights doubled."""
        return inputs.map(None, None, inputs.rows[2] * 2), 2.0

    def expert_at_fault(self, wrong_rows: Tensor) -> int | None:
        """An expert that every wrong token is routed to, and whose tokens are nearly all wrong."""
        ids = self.operands.ids[: len(wrong_rows)]
        wrong = ids[wrong_rows]
        if not len(wrong):
            return None
        for expert in wrong[0][wrong[0] >= 0].tolist():
            routed = (ids == expert).any(1)
            if bool(routed[wrong_rows].all()) and int(wrong_rows.sum()) >= 0.9 * int(routed.sum()):
                return int(expert)
        return None

    def k_steps(self, rows: int) -> Iterator[tuple[int, Inputs, Expected]]:
        """A fused kernel's sums are not taken apart."""
        del rows
        return iter(())

    def relate(self, relation: Relation, posed: Posed, out: Tensor) -> Tensor:
        """The same kernel, or one prepared for the relabelled experts."""
        if relation.experts is None:
            return self.call(posed, out)
        x, ids, weights = posed.rows
        return self.backend.prepare(relation.experts, self.case)(x, ids, weights, out)

    def relations(self, inputs: Inputs, out: Tensor) -> Iterator[Relation]:
        """Router weights times two, tokens independent and permuted, experts relabelled, slots exchanged."""
        x, ids, weights = inputs.rows
        yield Relation("router weights doubled", inputs.map(None, None, weights * 2), (out.float() * 2).bfloat16())
        yield from _independence(inputs, out, 0)
        zeroed = x.clone()
        where = torch.arange(0, len(out), 3, device=out.device)
        zeroed[where] = 0
        if self.case.activation.limit is None:
            yield Relation("zero tokens", inputs.map(zeroed, None, None), torch.zeros_like(out[where]), where)
        if self.case.probe not in ("isolated", "repeat"):
            return
        gen = torch.Generator().manual_seed(1)
        if len(out) > 1:
            order = torch.randperm(len(out), generator=gen).to(out.device)
            yield Relation("token permutation", inputs.at(order), out[order])
        yield Relation("routing slots reversed", inputs.map(None, ids.flip(1), weights.flip(1)), out)
        relabel = torch.randperm(self.case.experts, generator=gen).to(out.device)
        new_ids = torch.where(ids >= 0, relabel[ids.clamp(min=0).long()].int(), ids)
        experts = _relabelled(self.operands.experts, relabel.argsort())
        yield Relation("experts relabelled", inputs.map(None, new_ids, None), out, experts=experts)


def pose_tokens(inputs: Inputs, fills: tuple[float, ...]) -> Posed:
    """Row tensors in buffers that go on beyond the real rows."""
    count = len(inputs.rows[0])
    size = _buffer_rows(count)
    buffers = tuple(_padded(t, fill, size) for t, fill in zip(inputs.rows, fills, strict=True))
    return Posed(tuple(b[:count] for b in buffers), buffers, inputs.alpha, count)


def _constants(experts: MoeWeights) -> tuple[Tensor, ...]:
    return tuple(getattr(experts, f.name) for f in fields(experts))


def _relabelled(e: MoeWeights, order: Tensor) -> MoeWeights:
    names = (f.name for f in fields(e) if f.name != "input_scale")
    return replace(e, **{name: getattr(e, name)[order] for name in names})


class BlockSubject:
    """A model's MoE block: a MoE backend and a dense backend together, joined as a server's layers join them."""

    def __init__(self, case: BlockCase, operands: BlockOperands, moe: MoeBackend, dense: DenseBackend) -> None:
        self.case, self.operands = case, operands
        self.columns = case.hidden
        self.sweep: tuple[int, ...] = (case.tokens,)
        self.exact, self.repeats = False, 0
        self.format: Format = "fp4" if "fp4" in dense.formats else "bf16"
        sums = [dense.accumulation(shared) for shared in case.shared(self.format)]
        self.atomics = moe.recipe(case.routed).atomics or any(s.atomics for s in sums)
        self.weights_before = checksums(self.constants())
        self.moe: MoeKernel = moe.prepare(operands.routed.experts, case.routed)
        self.gate_up: DenseKernel = dense.prepare(operands.gate_up)
        self.down: DenseKernel = dense.prepare(operands.down)

    def constants(self) -> tuple[Tensor, ...]:
        """Routed and shared weights."""
        o = self.operands
        shared = (t for q in (o.gate_up, o.down) for t in (q.packed, q.scales, q.scale_2))
        return (*_constants(o.routed.experts), *shared)

    def inputs(self, rows: int) -> Inputs:
        """x, ids, weights, gate of the shared expert."""
        o = self.operands
        tensors = (o.routed.x, o.routed.ids, o.routed.weights, o.gate)
        return Inputs(tuple(t[:rows] for t in tensors), torch.ones(1, device=o.gate.device))

    def pose(self, inputs: Inputs, pattern: Pattern) -> Posed:
        """Tokens beyond the real ones hold the pattern."""
        return pose_tokens(inputs, (pattern.value, pattern.expert, pattern.value, pattern.value))

    def call(self, posed: Posed, out: Tensor) -> Tensor:
        """Routed experts, shared expert, sum in fp32."""
        x, ids, weights, gate = posed.rows
        routed = self.moe(x, ids, weights, judge.poisoned(len(x), self.columns, x.device))
        both = self._dense(x, self.operands.routed.experts.input_scale, self.operands.gate_up, self.gate_up)
        hidden = _activated(both, self.case.activation)
        shared = self._dense(hidden, self.operands.intermediate_scale, self.operands.down, self.down)
        out.copy_(routed.float() + gate.unsqueeze(1) * shared.float())
        return out

    def _dense(self, x: Tensor, scale: Tensor, weight: Quantized, kernel: DenseKernel) -> Tensor:
        count, k = x.shape
        out = judge.poisoned(count, weight.rows, x.device)
        if self.format == "bf16" or not count:
            return kernel(DenseInput(None, None, x, count, k), weight.scale_2.reshape(1), out) if count else out
        q = nvfp4.quantize(x.float(), 1.0 / scale)
        posed = DenseInput(q.packed, nvfp4.swizzle(q.scales), None, count, k)
        return kernel(posed, (scale * weight.scale_2).reshape(1), out)

    def variant(self, inputs: Inputs) -> tuple[Inputs, float]:
        """The same: nothing scales both halves by one factor."""
        return inputs, 1.0

    def expert_at_fault(self, wrong_rows: Tensor) -> int | None:
        """The MoE backend's own cells tell."""
        del wrong_rows
        return None

    def k_steps(self, rows: int) -> Iterator[tuple[int, Inputs, Expected]]:
        """The dense backend's own cells tell."""
        del rows
        return iter(())

    def relate(self, relation: Relation, posed: Posed, out: Tensor) -> Tensor:
        """The same kernels."""
        del relation
        return self.call(posed, out)

    def relations(self, inputs: Inputs, out: Tensor) -> Iterator[Relation]:
        """Tokens are independent."""
        yield from _independence(inputs, out, 0)


def _activated(both: Tensor, form: Activation) -> Tensor:
    gate, up = both.float().chunk(2, dim=1)
    if form.limit is not None:
        gate = gate.clamp(max=form.limit)
        up = up.clamp(-form.limit, form.limit) + form.beta
    return (gate * torch.sigmoid(form.alpha * gate) * up).bfloat16()
