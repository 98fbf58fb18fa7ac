"""What the judge says of hand-made backends that are wrong in one way: that, there, and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.cells.hooked import checks, dense, judge_dense, judge_moe, moe
from torch import Tensor

from sm120_cells import evaluate as evaluation
from sm120_cells import nvfp4, subjects
from sm120_cells.backends import DenseInput
from sm120_cells.backends.pipeline import DensePipeline, Matrix, MoePipeline, Product
from sm120_cells.bounds import FP32_HALF_ULP, Accumulation
from sm120_cells.cases import DenseCase, MoeCase
from sm120_cells.judge import Finding
from sm120_cells.nvfp4 import Quantized
from sm120_cells.probes import dense_operands
from sm120_cells.reference import dense_reference
from sm120_cells.subjects import PATTERNS, DenseSubject

SWEEP = DenseCase("exact", 40, 64, tuple(range(41)))
ONE = DenseCase("exact", 40, 64, (33,))
BOUND = DenseCase("bound", 40, 64, (33,))
REPEAT = DenseCase("repeat", 40, 64, (16,))
MOE_SWEEP = MoeCase("isolated", tuple(range(13)), 64, 32, 6, 3)
MOE_BOUND = MoeCase("bound", (13,), 64, 32, 6, 3)
ATOMICS = Accumulation(1, FP32_HALF_ULP, splits=2, atomics=True)


def finding(outcome: evaluation.Outcome, tier: str, check: str) -> Finding:
    return next(f for f in outcome.findings if (f.tier, f.check) == (tier, check))


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [SWEEP, ONE, BOUND, REPEAT, DenseCase("readback", 40, 64, (64,))])
@pytest.mark.parametrize("format_", ["fp4", "bf16"])
def test_a_right_dense_backend_passes(case: DenseCase, format_: Any) -> None:
    case = DenseCase(case.probe, case.n, case.k, case.ms, format_)
    outcome = judge_dense(dense(), case)
    assert (outcome.verdict, outcome.reason, outcome.findings) == ("PASS", None, [])
    assert outcome.eta == 0.0 if case.probe != "bound" else 0.0 < (outcome.eta or 0) <= 1.0
    assert outcome.error_map is None
    assert outcome.calls >= 3 * len(case.ms) + 4 + (64 if case.probe == "repeat" else 0)
    assert outcome.checks > outcome.calls


@pytest.mark.parametrize("case", [MOE_SWEEP, MOE_BOUND, MoeCase("repeat", (8,), 64, 32, 6, 3)])
def test_a_right_moe_backend_passes(case: MoeCase) -> None:
    outcome = judge_moe(moe(), case)
    assert (outcome.verdict, outcome.findings) == ("PASS", [])


def test_everything_is_called_with_every_padding_at_every_size() -> None:
    seen: list[tuple[int, int]] = []

    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        assert a.scales is not None
        seen.append((a.m, int(nvfp4.unswizzle(a.scales, 128, 4)[a.m :].max()) if a.m else 0))

    assert judge_dense(dense(touch), SWEEP).verdict == "PASS"
    for m in SWEEP.ms[1:]:
        assert {pattern.scale for pattern in PATTERNS} == {fill for rows, fill in seen if rows == m}, m


def test_a_tick_for_every_call_and_every_output_is_shown() -> None:
    ticks: list[int] = []
    outputs: list[Tensor] = []
    operands = dense_operands(ONE)
    subject = DenseSubject(ONE, operands, dense())
    expected = dense_reference(ONE, operands, dense().sums)
    outcome = evaluation.evaluate(
        subject, expected, watch=lambda got, want: outputs.append(got), tick=lambda: ticks.append(1)
    )
    assert len(ticks) == outcome.calls
    assert outputs
    assert all(torch.equal(got.double(), expected.value) for got in outputs)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 7, 16, 17, 39])
def test_wrong_at_one_size_is_wrong_at_exactly_that_size(m: int) -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        if a.m == m:
            out[-1, 5] += 1

    outcome = judge_dense(dense(touch), SWEEP)
    assert outcome.verdict == "FAIL"
    assert checks(outcome) == {("T1", "exact"): [m]}
    found = outcome.findings[0]
    assert found.condition["m"] == m
    assert found.condition["row"] == m - 1
    assert found.message.startswith(f"at M = {m} of 0-40: 1 of {40 * m} elements are wrong")
    assert [(e.row, e.col) for e in found.worst] == [(m - 1, 5)]
    assert outcome.reason == f"T1 exact: {found.message}"


def test_wrong_from_a_size_on() -> None:
    outcome = judge_dense(dense(lambda out, a, call: out[32:].mul_(2)), SWEEP)
    sizes = checks(outcome)[("T1", "exact")]
    assert sizes == list(range(33, 41))
    assert "at M = 33-40 of 0-40" in outcome.findings[0].message
    assert "2 times what they should be" in outcome.findings[0].message


@pytest.mark.parametrize("tokens", [1, 8, 11])
def test_wrong_at_one_number_of_tokens(tokens: int) -> None:
    def touch(out: Tensor, x: Tensor, ids: Tensor, call: int) -> None:
        if len(x) == tokens:
            out.zero_()

    assert checks(judge_moe(moe(touch), MOE_SWEEP)) == {("T1", "exact"): [tokens]}


def test_the_worst_size_is_shown_and_its_picture_kept() -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        if a.m in (30, 33):
            out[3, 2] += 1e3 if a.m == 33 else 1e-2

    outcome = judge_dense(dense(touch), DenseCase("bound", 40, 64, (30, 31, 33)))
    assert checks(outcome)[("T2", "bound")] == [30, 33]
    assert outcome.findings[0].condition["m"] == 33
    assert outcome.error_map is not None
    assert outcome.error_map["rows"] == 33
    assert outcome.eta == outcome.findings[0].worst[0].eta


# --- T0 ---------------------------------------------------------------------------------------------------------------


def beyond_rows(out: Tensor, a: DenseInput) -> Tensor:
    assert a.packed is not None
    width = a.k // 2
    return a.packed.as_strided((1, width), (width, 1), a.packed.storage_offset() + a.m * width)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_a_padding_row_that_leaks_is_called_padding(pattern: subjects.Pattern) -> None:
    """Each pattern catches what the other two would let through."""

    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        if a.m == 33 and bool((beyond_rows(out, a) == pattern.codes).all()):
            out[7, 7] += 1

    outcome = judge_dense(dense(touch), SWEEP)
    assert checks(outcome)[("T0", "padding")] == [33]
    found = finding(outcome, "T0", "padding")
    if pattern is not PATTERNS[0]:
        assert found.condition["pattern"] == pattern.name
        assert ("T1", "exact") not in checks(outcome), "the first pattern's result was right"
    assert found.condition["row"] == 7


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.name)
def test_a_padding_scale_that_leaks_is_called_padding(pattern: subjects.Pattern) -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        assert a.scales is not None
        if a.m == 33 and bool((nvfp4.unswizzle(a.scales, 128, 4)[33:] == pattern.scale).all()):
            out[0] = math.nan

    assert checks(judge_dense(dense(touch), SWEEP))[("T0", "padding")] == [33]


def test_padding_in_the_tokens_of_a_mixture() -> None:
    def touch(out: Tensor, x: Tensor, ids: Tensor, call: int) -> None:
        after = x.as_strided((1, x.shape[1]), x.stride(), x.storage_offset() + x.numel())
        if len(x) == 5 and bool((after == 1.5).all()):
            out[4] *= 2

    assert checks(judge_moe(moe(touch), MOE_SWEEP)) == {("T0", "padding"): [5]}


class Alternating(DensePipeline):
    """The last bit of one element changes with every call."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        if a.m:
            out.view(torch.int16)[0, 0] ^= self.calls % 2


@pytest.mark.parametrize("case", [BOUND, DenseCase("bound", 40, 64, tuple(range(20)))])
def test_what_changes_between_equal_calls_is_not_blamed_on_the_padding(case: DenseCase) -> None:
    found = checks(judge_dense(dense(kernel=Alternating), case))
    assert ("T4", "determinism") in found
    assert ("T0", "padding") not in found


def test_a_result_that_is_not_a_number_is_not_blamed_on_the_padding() -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        out[4:5, 3] = math.nan

    outcome = judge_dense(dense(touch), BOUND)
    assert set(checks(outcome)) == {("T2", "bound")}
    assert outcome.eta == math.inf
    assert outcome.findings[0].message.endswith("all of them are NaN")


class Unwritten(DensePipeline):
    """Writes all rows but one."""

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        before = out[8:9].clone()
        super().__call__(a, alpha, out)
        out[8:9] = before
        return out


def test_an_unwritten_row() -> None:
    outcome = judge_dense(dense(kernel=Unwritten), SWEEP)
    sizes = list(range(9, 41))
    assert checks(outcome)[("T0", "written")] == sizes
    assert checks(outcome)[("T1", "exact")] == sizes
    assert "40 output elements were never written, first [8, 0]" in outcome.findings[0].message


def test_nothing_written_at_all() -> None:
    outcome = judge_dense(dense(kernel=lambda weight, product: lambda a, alpha, out: out), BOUND)
    assert ("T0", "written") in checks(outcome)
    assert outcome.verdict == "FAIL"


@pytest.mark.parametrize("where", [-1, "after", "far after"])
def test_writing_outside_the_output(where: Any) -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        offset = {-1: -1, "after": out.numel(), "far after": out.numel() + 40 * 100}[where]
        out.as_strided((1,), (1,), out.storage_offset() + offset).zero_()

    outcome = judge_dense(dense(touch), ONE)
    assert checks(outcome) == {("T0", "guard"): [33]}
    assert outcome.findings[0].condition["pattern"] in {p.name for p in PATTERNS}


@pytest.mark.parametrize("which", ["codes", "scales", "padding of codes", "padding of scales"])
def test_changed_activations(which: str) -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        assert a.packed is not None
        assert a.scales is not None
        if a.m == 20:
            target = {
                "codes": a.packed[3],
                "scales": a.scales[0],
                "padding of codes": beyond_rows(out, a),
                "padding of scales": a.scales[-1],
            }[which]
            target.bitwise_xor_(1)

    found = checks(judge_dense(dense(touch), SWEEP))
    assert found[("T0", "inputs unchanged")] == [20]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_changed_tokens_ids_and_weights(index: int) -> None:
    def kernel(experts: Any, case: MoeCase, product: Product) -> Any:
        right = MoePipeline(experts, case, product)

        def call(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
            right(x, ids, weights, out)
            (x, ids, weights)[index][0] += 1
            return out

        return call

    assert ("T0", "inputs unchanged") in checks(judge_moe(moe(kernel=kernel), MOE_BOUND))


def weights_change(change: Callable[[Quantized], object], at: int) -> Callable[..., DensePipeline]:
    class Kernel(DensePipeline):
        def __init__(self, weight: Quantized, product: Product) -> None:
            super().__init__(weight, product)
            self.source = weight

        def finish(self, out: Tensor, a: DenseInput) -> None:
            del out, a
            if self.calls == at:
                change(self.source)

    return Kernel


@pytest.mark.parametrize("at", [1, 20])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.packed[3, 5].bitwise_xor_(1),
        lambda w: w.scales[0, 0].bitwise_xor_(8),
        lambda w: w.scale_2.mul_(2),
        lambda w: w.packed.copy_(w.packed.roll(1, 0)),  # the same bytes in another order
        lambda w: w.scales.copy_(w.scales.flip(1)),
    ],
    ids=["a code", "a scale", "the global scale", "rows rotated", "scales reversed"],
)
def test_changed_weights(change: Callable[[Quantized], object], at: int) -> None:
    outcome = judge_dense(dense(kernel=weights_change(change, at)), SWEEP)
    found = finding(outcome, "T0", "inputs unchanged")
    assert found.message == "the kernel changed its weights"
    assert found.condition["failed_at"] == [], "no size is to blame: a reproducer must run all"


RIGHT_SHAPE = "want (33, 40) bf16"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: out[:, :-1], "result is (33, 39) torch.bfloat16"),
        (lambda out: out[:-1], "result is (32, 40) torch.bfloat16"),
        (lambda out: out.T, "result is (40, 33) torch.bfloat16"),
        (lambda out: out.flatten(), "result is (1320,) torch.bfloat16"),
        (lambda out: out.unsqueeze(0), "result is (1, 33, 40) torch.bfloat16"),
        (lambda out: out.float(), "result is (33, 40) torch.float32"),
        (lambda out: out.half(), "result is (33, 40) torch.float16"),
        (lambda out: out.to("meta"), "result is (33, 40) torch.bfloat16 on meta"),
    ],
)
@pytest.mark.parametrize("case", [ONE, DenseCase("repeat", 40, 64, (33,))])
def test_a_result_of_another_shape_or_type(case: DenseCase, spoil: Callable[[Tensor], Tensor], said: str) -> None:
    def kernel(weight: Quantized, product: Product) -> Any:
        right = DensePipeline(weight, product)
        return lambda a, alpha, out: spoil(right(a, alpha, out))

    outcome = judge_dense(dense(kernel=kernel), case)
    assert set(checks(outcome)) == {("T0", "shape")}
    assert said in outcome.findings[0].message
    assert RIGHT_SHAPE in outcome.findings[0].message


@pytest.mark.parametrize(
    "own",
    [
        lambda out: out.clone(),
        lambda out: out.T.clone().T,
        lambda out: torch.cat([out, out])[: len(out)],
        lambda out: torch.cat([out, out], dim=1)[:, : out.shape[1]],
    ],
    ids=["a copy", "transposed strides", "part of more rows", "part of more columns"],
)
@pytest.mark.parametrize("case", [SWEEP, BOUND, REPEAT])
def test_a_tensor_of_its_own_is_as_good(own: Callable[[Tensor], Tensor], case: DenseCase) -> None:
    def kernel(weight: Quantized, product: Product) -> Any:
        right = DensePipeline(weight, product)
        return lambda a, alpha, out: own(right(a, alpha, torch.empty_like(out)))

    outcome = judge_dense(dense(kernel=kernel), case)
    assert (outcome.verdict, outcome.findings) == ("PASS", [])


# --- T1 and T2 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("case", [ONE, BOUND])
def test_one_element_that_is_not_finite(value: float, case: DenseCase) -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        out[2:3, 1] = value

    outcome = judge_dense(dense(touch), case)
    assert outcome.verdict == "FAIL"
    found = outcome.findings[0]
    assert found.tier == ("T1" if case is ONE else "T2")
    assert [(e.row, e.col, e.got, e.eta) for e in found.worst] == [(2, 1, None, None)]


def test_a_wrong_tile_is_drawn() -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        out[128:, 128:256] *= 1.5

    outcome = judge_dense(dense(touch), DenseCase("bound", 264, 64, (150,)))
    found = finding(outcome, "T2", "bound")
    assert found.condition["tile"] == [1, 1]
    assert found.condition["rows"] == "128-149"
    assert outcome.error_map is not None
    wrong = [(i, j) for i, row in enumerate(outcome.error_map["tiles"]) for j, v in enumerate(row) if v > 1]
    assert wrong == [(1, 1)]


# --- what is to blame -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", ["isolated", "bound"])
@pytest.mark.parametrize("expert", [0, 3, 5])
def test_an_expert_that_alone_is_wrong_is_named(probe: Any, expert: int) -> None:
    class OneExpert(MoePipeline):
        def alpha2(self, index: int) -> Tensor:
            return super().alpha2(index) * (2 if index == expert else 1)

    outcome = judge_moe(moe(kernel=OneExpert), MoeCase(probe, (40,), 64, 32, 6, 2))
    assert outcome.findings[0].condition["expert"] == expert


def test_no_expert_is_named_where_all_are_wrong() -> None:
    class All(MoePipeline):
        def alpha2(self, index: int) -> Tensor:
            return super().alpha2(index) * 2

    outcome = judge_moe(moe(kernel=All), MoeCase("isolated", (40,), 64, 32, 6, 2))
    assert "expert" not in outcome.findings[0].condition


@pytest.mark.parametrize("step", [0, 2])
def test_a_k_step_that_alone_is_wrong_is_named(step: int) -> None:
    class Dropped(DensePipeline):
        def read(self, a: DenseInput) -> Matrix:
            right = super().read(a)
            values = right.values.clone()
            values[:, 64 * step : 64 * (step + 1)] = 0
            return Matrix(values, right.scales)

    outcome = judge_dense(dense(kernel=Dropped), DenseCase("exact", 40, 256, (33,)))
    assert outcome.findings[0].condition["k_step"] == step


def test_no_k_step_is_named_where_all_are_wrong() -> None:
    outcome = judge_dense(dense(lambda out, a, call: out.mul_(2)), DenseCase("exact", 40, 256, (33,)))
    assert "k_step" not in outcome.findings[0].condition
