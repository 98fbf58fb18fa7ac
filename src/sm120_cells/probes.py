"""Operands of every case, made from its seed: random ones, and those on which every right kernel agrees bit for bit.

All are made on the CPU with one generator a case, so a case means the same bytes on every machine. Activations of
W4A4 cases lie on the FP4 grid (one ±6 in each block of 16, power-of-two global scale): a backend that quantises them
itself gets the same codes in any arithmetic, so that the quantiser's own ties do not enter (numerics, section 2.8).
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sm120_cells import nvfp4
from sm120_cells.cases import BlockCase, DenseCase, MoeCase, Routing
from sm120_cells.nvfp4 import BLOCK, Quantized

ONE = 0x38
"""The E4M3 byte of 1.0; the next seven bytes are the other mantissas of its binade."""
SIX, FOUR = 0x7, 0x6
"""E2M1 codes of +6 and +4."""
_WEIGHT_RMS = {"normal": 12.0, "span": 260.0}
"""RMS of code * block scale, by spread of the block scales."""
_DISTINCT = 32
"""Experts with bytes of their own: making 512 of a large model takes minutes and says nothing more."""
_EXACT_LIMIT = 2**24  # FP32 holds every whole number up to here


class NotExactError(ValueError):
    """Operands meant to be exact in FP32 are not: the shape is beyond what the probe can promise."""


@dataclass(frozen=True, slots=True)
class DenseOperands:
    """a: FP4 [M, K] (W4A4) or bf16 [M, K] (W4A16). w: FP4 [N, K] as in a checkpoint."""

    a: Quantized | Tensor
    w: Quantized

    @property
    def alpha(self) -> Tensor:
        """fp32 [1]: what the accumulator is multiplied by."""
        scale = self.w.scale_2 if isinstance(self.a, Tensor) else self.a.scale_2 * self.w.scale_2
        return scale.reshape(1)

    @property
    def m(self) -> int:
        """Rows of A."""
        return self.a.shape[0] if isinstance(self.a, Tensor) else self.a.rows


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """One rank's experts as in a checkpoint: gate rows first, then up rows.

    w13 uint8 [E, 2I, H/2], w13_scales uint8 [E, 2I, H/16], w13_scale_2 fp32 [E]; w2 uint8 [E, H, I/2],
    w2_scales uint8 [E, H, I/16], w2_scale_2 fp32 [E]; input_scale fp32 [] and intermediate_scale fp32 [E] are the
    activations' scale_2 (value = code * block scale * scale_2).
    """

    w13: Tensor
    w13_scales: Tensor
    w13_scale_2: Tensor
    w2: Tensor
    w2_scales: Tensor
    w2_scale_2: Tensor
    input_scale: Tensor
    intermediate_scale: Tensor

    @property
    def experts(self) -> int:
        """Number of experts held."""
        return self.w13.shape[0]

    @property
    def intermediate(self) -> int:
        """Width of an expert's intermediate on this rank."""
        return self.w13.shape[1] // 2


@dataclass(frozen=True, slots=True)
class MoeOperands:
    """x bf16 [T, H], ids int32 [T, top_k] (-1: not routed here), weights fp32 [T, top_k]."""

    experts: MoeWeights
    x: Tensor
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class BlockOperands:
    """The routed half, and the shared expert: gate_up FP4 [2S, H], down FP4 [H, S], intermediate_scale fp32 [],
    gate fp32 [T] (the sigmoid already applied; ones where the model has none).
    """

    routed: MoeOperands
    gate_up: Quantized
    down: Quantized
    intermediate_scale: Tensor
    gate: Tensor


def _generator(case: DenseCase | MoeCase | BlockCase) -> torch.Generator:
    return torch.Generator().manual_seed(int(case.digest[:15], 16))


# --- building blocks ----------------------------------------------------------------------------------------------


def _bytes(gen: torch.Generator, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=gen, dtype=torch.uint8)


def _gaussian_codes() -> Tensor:
    """256-entry table: a uniform byte becomes a code with the frequency that a quantised Gaussian block has."""
    quantiles = (torch.arange(256, dtype=torch.float64) + 0.5) / 256
    values = torch.special.ndtri(quantiles)
    return nvfp4.encode_e2m1((values * (6.0 / 2.2)).float())


def _anchored(codes: Tensor, gen: torch.Generator) -> Tensor:
    """Put one ±6 into each block of 16, so that re-quantising the values returns these codes and scales."""
    blocks = codes.view(*codes.shape[:-1], codes.shape[-1] // BLOCK, BLOCK)
    where = torch.randint(0, BLOCK, (*blocks.shape[:-1], 1), generator=gen)
    sign = _bytes(gen, *where.shape, high=2) << 3
    blocks.scatter_(-1, where, SIX | sign)
    return codes


def _codes(gen: torch.Generator, *shape: int, gaussian: bool = False) -> Tensor:
    """E2M1 codes uint8: uniform over all 16, or as a quantised Gaussian has them; one ±6 in each block."""
    raw = _bytes(gen, *shape)
    return _anchored(_gaussian_codes()[raw.long()] if gaussian else raw & 0xF, gen)


def _binade(gen: torch.Generator, *shape: int) -> Tensor:
    """Scale bytes with all eight mantissas of [1, 2)."""
    return _bytes(gen, *shape, low=ONE, high=ONE + 8)


def _unlike_neighbours(gen: torch.Generator, count: int, choices: int) -> Tensor:
    """Numbers below ``choices`` (at least 3), of which no two neighbours are the same, the last and first included."""
    order = torch.randperm(choices, generator=gen)
    numbers = order[torch.arange(count) % choices]
    if count > 1 and count % choices == 1:
        numbers[-1] = order[1]
    return numbers


def _scale_bytes(gen: torch.Generator, rows: int, groups: int, spread: str) -> Tensor:
    """Scale bytes [rows, groups] of random operands."""
    if spread == "span":  # log-uniform over all that E4M3 has: 2^-9 to 448, as real checkpoints do (1e-3 … 448)
        return nvfp4.encode_e4m3(torch.exp2(torch.rand(rows, groups, generator=gen) * 18.8 - 10.0)).clamp_(min=1)
    base = _bytes(gen, rows, groups, low=ONE + 8, high=ONE + 24)
    if spread == "rows":  # rows differ by up to 2^8, as a batch of unlike requests does
        shift = torch.randint(-4, 5, (rows, 1), generator=gen) * 8
        return (base.int() + shift).to(torch.uint8)
    if spread == "saturated":
        top = torch.rand(rows, groups, generator=gen) < 0.05
        return torch.where(top, torch.tensor(0x7E, dtype=torch.uint8), base)
    return base


def _random_matrix(gen: torch.Generator, rows: int, k: int, spread: str, scale_2: Tensor) -> Quantized:
    codes = _codes(gen, rows, k, gaussian=spread == "normal")
    return Quantized(nvfp4.pack(codes), _scale_bytes(gen, rows, k // BLOCK, spread), scale_2)


def _jitter(gen: torch.Generator, *shape: int) -> Tensor:
    """Factors in [0.75, 1.5) that are no power of two, so that rounding of global scales shows."""
    return 0.75 + 0.75 * torch.rand(shape, generator=gen)


def _last_place(x: Tensor) -> float:
    """Largest power of two that divides every element of x (float64)."""
    bits = x.contiguous().view(torch.int64)
    mantissa = bits & (1 << 52) - 1 | 1 << 52
    lowest = (mantissa & -mantissa).double() * (bits & 0x7FF << 52).view(torch.float64)
    smallest = float(lowest.where(x != 0, torch.inf).min()) * 2.0**-52
    return smallest if math.isfinite(smallest) else 1.0


def assert_exact(a: Tensor, b: Tensor) -> None:
    """Check on the data that every partial sum of ``a @ b.T`` (float64) fits FP32 in any order, or NotExactError."""
    worst = float((a.abs() @ b.abs().T).max()) / (_last_place(a) * _last_place(b)) if a.numel() and b.numel() else 0.0
    if worst >= _EXACT_LIMIT:
        raise NotExactError(f"largest partial sum is 2^{math.log2(worst):.1f} units in the last place, 2^24 at most")


# --- dense --------------------------------------------------------------------------------------------------------


def dense_operands(case: DenseCase) -> DenseOperands:
    """Operands on the CPU. NotExactError where an exact probe is asked of a shape that cannot be exact."""
    gen = _generator(case)
    m, n, k, groups = max(case.ms), case.n, case.k, case.k // BLOCK
    if case.probe in ("exact", "repeat"):
        a = Quantized(nvfp4.pack(_codes(gen, m, k)), _binade(gen, m, groups), torch.tensor(0.25))
        w = Quantized(nvfp4.pack(_codes(gen, n, k)), _binade(gen, n, groups), torch.tensor(0.03125))
    elif case.probe == "unit":
        ones = torch.full((max(m, n), groups), ONE, dtype=torch.uint8)
        a = Quantized(nvfp4.pack(_codes(gen, m, k)), ones[:m], torch.tensor(0.5))
        w = Quantized(nvfp4.pack(_codes(gen, n, k)), ones[:n], torch.tensor(0.0625))
    elif case.probe == "readback":
        codes = torch.zeros(m, k, dtype=torch.uint8)
        columns = torch.arange(m) % k if m >= k else torch.randperm(k, generator=gen)[:m]
        codes[torch.arange(m), columns] = SIX
        a = Quantized(nvfp4.pack(codes), torch.full((m, groups), ONE, dtype=torch.uint8), torch.tensor(1.0))
        w_codes = _bytes(gen, n, k) & 0xF
        w = Quantized(nvfp4.pack(w_codes), _bytes(gen, n, groups, low=1, high=0x7F), 0.01 * _jitter(gen))
    else:
        a = _random_matrix(gen, m, k, case.spread, torch.tensor(2.0**-9))
        w = _random_matrix(gen, n, k, "normal" if case.spread == "rows" else case.spread, _jitter(gen) * 2.0**-8)
    if case.probe in ("exact", "unit", "repeat"):
        assert_exact(_unscaled(a), _unscaled(w))
    if case.format == "fp4":
        return DenseOperands(a, w)
    if case.probe == "bound" and case.spread == "normal":
        return DenseOperands(torch.randn(m, k, generator=gen).bfloat16(), w)
    return DenseOperands(a.dequantize(torch.float32).bfloat16(), w)


def _unscaled(q: Quantized) -> Tensor:
    return nvfp4.dequantize_bytes(q.packed, q.scales, torch.ones(()))


# --- routing ------------------------------------------------------------------------------------------------------


def _route(gen: torch.Generator, tokens: int, experts: int, top_k: int, pattern: Routing, isolated: bool) -> Tensor:
    """Expert ids int32 [tokens, top_k], distinct in each row. isolated: one expert of each residue modulo top_k.

    At random, the first tokens visit every expert once, as far as they reach.
    """
    if isolated:
        counts = torch.tensor([len(range(r, experts, top_k)) for r in range(top_k)])
        pick = (torch.rand(tokens, top_k, generator=gen) * counts).long()
        if pattern == "one_expert":
            pick = pick[:1].expand(tokens, top_k)
        elif pattern == "random":
            for residue, count in enumerate(counts.tolist()):
                visit = torch.randperm(count, generator=gen)[:tokens]
                pick[: len(visit), residue] = visit
        elif pattern == "half_empty":
            pick = pick % (counts + 1).div(2, rounding_mode="floor").clamp(min=1)
        ids = pick * top_k + torch.arange(top_k)
        order = torch.rand(tokens, top_k, generator=gen).argsort(dim=1)
        ids = ids.gather(1, order)
    else:
        preference = torch.rand(tokens, experts, generator=gen)
        if pattern == "one_expert":
            preference = preference[:1].expand(tokens, experts)
        elif pattern == "half_empty":
            preference[:, max(top_k, experts // 2) :] = -1.0
        elif pattern == "random":
            visit = torch.randperm(experts, generator=gen)[: tokens * top_k]
            preference[torch.arange(len(visit)) // top_k, visit] += 1.0
        elif pattern == "skewed":
            preference = preference * torch.arange(1, experts + 1).float().rsqrt()
        ids = preference.topk(top_k, dim=1).indices
    if pattern == "minus_one":
        ids = torch.where(torch.rand(tokens, top_k, generator=gen) < 0.3, -1, ids)
    return ids.int().contiguous()


# --- mixture of experts -------------------------------------------------------------------------------------------


def moe_operands(case: MoeCase) -> MoeOperands:
    """Operands on the CPU. Whether an exact probe's sums are exact is checked by its reference, which makes them."""
    gen = _generator(case)
    tokens = max(case.tokens)
    if case.probe in ("isolated", "exact", "repeat"):
        isolated = case.probe != "exact"
        ids = _route(gen, tokens, case.experts, case.top_k, case.routing, isolated)
        weights = torch.exp2(-torch.rand(tokens, case.top_k, generator=gen).argsort(dim=1).float() - 1.0)
        return MoeOperands(_exact_experts(case, gen, isolated=isolated), _exact_tokens(case, gen), ids, weights)
    ids = _route(gen, tokens, case.experts, case.top_k, case.routing, isolated=False)
    weights = torch.softmax(torch.randn(tokens, case.top_k, generator=gen), dim=1)
    if case.probe == "onehot":
        codes = torch.zeros(tokens, case.hidden, dtype=torch.uint8)
        codes[torch.arange(tokens), torch.randint(0, case.hidden, (tokens,), generator=gen)] = SIX
        ones = torch.full((tokens, case.hidden // BLOCK), ONE, dtype=torch.uint8)
        # As large as a dense row's norm, so that gate and up have the size they have in "bound".
        x = Quantized(nvfp4.pack(codes), ones, torch.exp2(torch.tensor(case.hidden).log2().div(2).round() - 3.0))
    else:
        x = _random_matrix(gen, tokens, case.hidden, case.spread, torch.tensor(2.0**-4))
    values = x.dequantize(torch.float32).bfloat16()
    if case.format == "bf16" and case.probe == "bound":
        values = torch.randn(tokens, case.hidden, generator=gen).bfloat16()
    return MoeOperands(_random_experts(case, gen, x.scale_2), values, ids, weights)


def _distinct_experts(case: MoeCase) -> int:
    """How many experts have bytes of their own; the others repeat them under global scales of their own.

    A multiple of top_k, so that an isolated output column has the same one source in every expert; no power of two, so
    that an expert number that wraps around (modulo 256, say) meets other bytes.
    """
    count = -(-_DISTINCT // case.top_k) * case.top_k
    while count & (count - 1) == 0:
        count += case.top_k
    return min(case.experts, count)


def _repeated(case: MoeCase, *tensors: Tensor) -> list[Tensor]:
    """Per-expert tensors of the distinct experts, for all experts."""
    source = torch.arange(case.experts) % _distinct_experts(case)
    return list(tensors) if len(source) == len(tensors[0]) else [t[source] for t in tensors]


def _random_experts(case: MoeCase, gen: torch.Generator, input_scale: Tensor) -> MoeWeights:
    experts, hidden, inter = case.experts, case.hidden, case.intermediate
    spread = "span" if case.spread == "span" else "normal"

    def stack(rows: int, k: int) -> list[Tensor]:
        parts = [_random_matrix(gen, rows, k, spread, torch.ones(())) for _ in range(_distinct_experts(case))]
        return _repeated(case, torch.stack([q.packed for q in parts]), torch.stack([q.scales for q in parts]))

    w13, w13_scales = stack(2 * inter, hidden)
    w2, w2_scales = stack(hidden, inter)
    # Gate and up get a spread of about 2, where SiLU is neither linear nor flat; the result one of about 1.
    rms = _WEIGHT_RMS["span" if case.spread == "span" else "normal"]
    return MoeWeights(
        w13=w13,
        w13_scales=w13_scales,
        w13_scale_2=_jitter(gen, experts) * (2.0 / (rms * math.sqrt(hidden))),
        w2=w2,
        w2_scales=w2_scales,
        w2_scale_2=_jitter(gen, experts) * (1.0 / (rms * math.sqrt(inter))),
        input_scale=input_scale,
        # Every second one is a power of two, where many quotients lie on a tie: right quantisers differ most there.
        intermediate_scale=torch.where(torch.arange(experts) % 2 == 0, 1.0, _jitter(gen, experts)) * 2.0**-6,
    )


def _exact_tokens(case: MoeCase, gen: torch.Generator) -> Tensor:
    """bf16 [T, H]: +4 in one column of one block, and ±6 in that block's anchor column, whose weights are zero."""
    tokens, blocks = max(case.tokens), case.hidden // BLOCK
    codes = torch.zeros(tokens, case.hidden, dtype=torch.uint8)
    block = torch.randint(0, blocks, (tokens,), generator=gen)
    anchor = _anchor(block)
    column = (anchor + torch.randint(1, BLOCK, (tokens,), generator=gen)) % BLOCK
    rows = torch.arange(tokens)
    codes[rows, block * BLOCK + anchor] = SIX | (_bytes(gen, tokens, high=2) << 3)
    codes[rows, block * BLOCK + column] = FOUR
    ones = torch.full((tokens, blocks), ONE, dtype=torch.uint8)
    return Quantized(nvfp4.pack(codes), ones, torch.tensor(0.5)).dequantize(torch.float32).bfloat16()


def _anchor(block: Tensor) -> Tensor:
    return (block * 5 + 3) % BLOCK


def _exact_experts(case: MoeCase, gen: torch.Generator, *, isolated: bool) -> MoeWeights:
    """Experts whose fused result is exact whatever the order of sums.

    A token selects one column of the gate and up weights. Gate becomes 0 or a power of two >= 32, where SiLU is the
    identity in FP32; up is on the FP4 grid, with one scale for 16 neighbouring rows and one ±6 under an open gate, so
    re-quantising the product is exact. isolated: an output column is fed by one element of one of the token's experts,
    so every rounding that a recipe may have is exact too; otherwise the down projection is dense.
    """
    experts, hidden, inter = _distinct_experts(case), case.hidden, case.intermediate
    h_blocks, i_blocks = hidden // BLOCK, inter // BLOCK
    gate = torch.where(torch.rand(experts, i_blocks, BLOCK, hidden, generator=gen) < 0.5, 0, FOUR).to(torch.uint8)
    up = _bytes(gen, experts, i_blocks, BLOCK, hidden) & 0xF
    row = torch.randint(0, BLOCK, (experts, i_blocks, 1, hidden), generator=gen)
    gate.scatter_(2, row, torch.full_like(row, FOUR, dtype=torch.uint8))
    up.scatter_(2, row, SIX | (_bytes(gen, *row.shape, high=2) << 3))
    anchors = torch.arange(h_blocks) * BLOCK + _anchor(torch.arange(h_blocks))
    gate[..., anchors] = 0
    up[..., anchors] = 0
    up_scales = _binade(gen, experts, i_blocks, 1, h_blocks).expand(experts, i_blocks, BLOCK, h_blocks)
    codes = torch.cat([gate.reshape(experts, inter, hidden), up.reshape(experts, inter, hidden)], dim=1)
    scales = torch.cat([torch.full_like(up_scales, ONE), up_scales], dim=1).reshape(experts, 2 * inter, h_blocks)
    # x = 4 * 0.5, gate = 2 * 4 * scale_2 = 32, 64 or 128; product = gate * up, with a block maximum of 6 * that.
    # All global scales, and the products that kernels make of them, differ between neighbours: reading one shows.
    exponents = _unlike_neighbours(gen, case.experts, 3)
    w13_scale_2 = torch.exp2(2.0 + exponents)
    halved = torch.randint(2, (case.experts,), generator=gen)
    down, down_scales = _isolated_down(case, gen) if isolated else _dense_down(case, gen)
    w13, w13_scales, w2, w2_scales = _repeated(
        case, nvfp4.pack(codes), scales.contiguous(), nvfp4.pack(down), down_scales
    )
    return MoeWeights(
        w13=w13,
        w13_scales=w13_scales,
        w13_scale_2=w13_scale_2,
        w2=w2,
        w2_scales=w2_scales,
        w2_scale_2=torch.exp2(-8.0 + exponents),  # results fit fp16, too
        input_scale=torch.tensor(0.5),
        intermediate_scale=w13_scale_2 * w13_scale_2 * torch.exp2(-halved.float()),
    )


def _isolated_down(case: MoeCase, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    experts, hidden, inter = _distinct_experts(case), case.hidden, case.intermediate
    codes = torch.zeros(experts, hidden, inter, dtype=torch.uint8)
    out = torch.arange(hidden)
    for e in range(experts):
        mine = out[out % case.top_k == e % case.top_k]
        source = torch.randperm(max(inter, len(mine)), generator=gen)[: len(mine)] % inter
        codes[e, mine, source] = _bytes(gen, len(mine), low=1, high=8) | (_bytes(gen, len(mine), high=2) << 3)
    scales = (_bytes(gen, experts, hidden, inter // BLOCK, high=4) << 3) + ONE
    return codes, scales


def _dense_down(case: MoeCase, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (_distinct_experts(case), case.hidden, case.intermediate)
    return _codes(gen, *shape), _binade(gen, *shape[:2], case.intermediate // BLOCK)


# --- a model's whole MoE block --------------------------------------------------------------------------------------


def block_operands(case: BlockCase) -> BlockOperands:
    """Operands of the routed half and of the shared expert, on the CPU."""
    routed = moe_operands(replace(case.routed, format="fp4"))  # on the grid: the dense backend may quantise
    gen = _generator(case)
    hidden, shared = case.hidden, case.shared_intermediate
    rms = _WEIGHT_RMS["normal"]
    gate_up = _random_matrix(gen, 2 * shared, hidden, "normal", _jitter(gen) * (2.0 / (rms * math.sqrt(hidden))))
    down = _random_matrix(gen, hidden, shared, "normal", _jitter(gen) * (1.0 / (rms * math.sqrt(shared))))
    gate = torch.sigmoid(torch.randn(case.tokens, generator=gen)) if case.shared_gate else torch.ones(case.tokens)
    return BlockOperands(routed, gate_up, down, torch.tensor(2.0**-6), gate)


OperandsT = TypeVar("OperandsT", DenseOperands, MoeOperands, BlockOperands)


def to_device(operands: OperandsT, device: torch.device) -> OperandsT:
    """The same operands on another device."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return replace(value, **{f.name: moved(getattr(value, f.name)) for f in fields(value)})

    result: OperandsT = moved(operands)
    return result
