"""Relations between calls, repeated calls, and a model's whole block: hand-made backends that are wrong only there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.cells.hooked import DenseTouch, MoeTouch, checks, dense, judge_dense, judge_moe, moe
from torch import Tensor

from sm120_cells import evaluate as evaluation
from sm120_cells import judge
from sm120_cells.backends import DenseInput
from sm120_cells.backends.pipeline import DensePipeline, Loaded, MoePipeline, Product
from sm120_cells.bounds import FP32_HALF_ULP, SEQUENTIAL_FP32, Accumulation
from sm120_cells.cases import Activation, BlockCase, DenseCase, MoeCase
from sm120_cells.probes import block_operands
from sm120_cells.reference import block_reference
from sm120_cells.subjects import BlockSubject

ONE = DenseCase("exact", 40, 64, (33,))
BOUND = DenseCase("bound", 40, 64, (33,))
REPEAT = DenseCase("repeat", 40, 64, (16,))
ATOMICS = Accumulation(1, FP32_HALF_ULP, splits=2, atomics=True)


# --- T3 ---------------------------------------------------------------------------------------------------------------


class AlphaOverflows(DensePipeline):
    """Right for the case's alpha, wrong for eight times that."""

    alpha: Tensor | None = None

    def scaled(self, total: Tensor, alpha: Tensor) -> Tensor:
        self.alpha = alpha if self.alpha is None else self.alpha
        return super().scaled(total, torch.minimum(alpha, self.alpha * 2))


@pytest.mark.parametrize("case", [ONE, BOUND])
def test_wrong_for_another_alpha_only(case: DenseCase) -> None:
    outcome = judge_dense(dense(kernel=AlphaOverflows), case)
    assert checks(outcome) == {("T3", "scaling by 2^3"): [33]}
    assert "0.25 times what they should be" in outcome.findings[0].message


class RowsDepend(DensePipeline):
    """Row 4 changes when another row 1 is met than in the first call."""

    first: Tensor | None = None

    def finish(self, out: Tensor, a: DenseInput) -> None:
        assert a.packed is not None
        if self.first is None:
            self.first = a.packed[1].clone()
        if not torch.equal(self.first, a.packed[1]):
            out[4, 9] += 1


def test_a_row_that_depends_on_another_is_named_by_its_own_number() -> None:
    outcome = judge_dense(dense(kernel=RowsDepend), BOUND)
    assert {tier for tier, _ in checks(outcome)} == {"T3"}
    found = next(f for f in outcome.findings if f.check == "row independence")
    assert found.condition["row"] == 4
    assert [(e.row, e.col) for e in found.worst] == [(4, 9)]


class ZeroRows(DensePipeline):
    """A row of zeros gives 1."""

    def finish(self, out: Tensor, a: DenseInput) -> None:
        assert a.packed is not None
        out[(a.packed == 0).all(1)] = 1.0


def test_a_row_of_zeros_that_does_not_give_zeros() -> None:
    outcome = judge_dense(dense(kernel=ZeroRows), BOUND)
    assert set(checks(outcome)) == {("T3", "zero rows")}
    assert outcome.findings[0].condition["rows"].startswith("0, 3, 6, 9")


class OneOrder(DensePipeline):
    """A result is kept for all later calls of its size."""

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        kept: dict[int, Tensor] = self.__dict__.setdefault("kept", {})
        if a.m not in kept:
            kept[a.m] = super().__call__(a, alpha, out).clone()
        return out.copy_(kept[a.m])


@pytest.mark.parametrize("case", [ONE, BOUND])
def test_a_stale_result(case: DenseCase) -> None:
    found = checks(judge_dense(dense(kernel=OneOrder), case))
    assert {tier for tier, _ in found} == {"T3"}
    assert ("T3", "row permutation") in found or case is BOUND


def test_a_stale_result_shows_at_every_size() -> None:
    """The last padding pass has other contents."""
    found = checks(judge_dense(dense(kernel=OneOrder), DenseCase("exact", 40, 64, tuple(range(21)))))
    assert found[("T3", "other contents")] == list(range(1, 21))
    assert ("T0", "padding") not in found


class CachedExperts(MoePipeline):
    """Decoded weights are shared by all kernels of a shape, whatever experts they were prepared for."""

    cache: dict[tuple[str, int], Loaded]

    def weight(self, name: str, expert: int) -> Loaded:
        if (name, expert) not in self.cache:
            self.cache[name, expert] = super().weight(name, expert)
        return self.cache[name, expert]


def test_weights_cached_across_preparations() -> None:
    kernel = type("Fresh", (CachedExperts,), {"cache": {}})
    found = checks(judge_moe(moe(kernel=kernel), MoeCase("isolated", (12,), 64, 32, 6, 3)))
    assert found == {("T3", "experts relabelled"): [12]}


def moe_kernel(change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Any:
    def make(experts: Any, case: MoeCase, product: Product) -> Any:
        right = MoePipeline(experts, case, product)

        def call(x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
            x, ids, weights = change(x, ids, weights)
            return right(x, ids, weights, out)

        return call

    return make


def test_router_weights_beyond_one_are_cut() -> None:
    cut = moe_kernel(lambda x, ids, weights: (x, ids, weights.clamp(max=1.0)))
    case = MoeCase("bound", (13,), 64, 32, 6, 1)
    found = set(checks(judge_moe(moe(kernel=cut), case)))
    assert found == {("T3", "other contents"), ("T3", "router weights doubled")}


# --- T4 ---------------------------------------------------------------------------------------------------------------


def test_one_call_in_fifty_is_caught_and_numbered() -> None:
    """The call that is wrong is the 50th of the kernel; which of the repeats that is follows from the calls before."""
    calls: list[int] = []

    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        calls.append(call)
        if call == 50:
            out[:, :16] = 0

    outcome = judge_dense(dense(touch), REPEAT)
    assert set(checks(outcome)) == {("T4", "determinism")}
    before = len(calls) - 64
    assert 0 < before < 49
    found = outcome.findings[0]
    assert found.condition["call"] == 50 - before
    assert found.message.startswith(f"call {50 - before} of 64 differs from the first: ")
    assert outcome.calls == len(calls)


def test_one_call_in_fifty_of_a_mixture() -> None:
    def touch(out: Tensor, x: Tensor, ids: Tensor, call: int) -> None:
        if call % 50 == 0:
            out[3] = 0

    outcome = judge_moe(moe(touch), MoeCase("repeat", (8,), 64, 32, 6, 3))
    assert set(checks(outcome)) == {("T4", "determinism")}
    assert outcome.findings[0].condition["row"] == 3


def test_a_first_repeat_that_is_wrong() -> None:
    seen: list[int] = []

    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        seen.append(call)

    judge_dense(dense(touch), REPEAT)
    first = len(seen) - 63

    def wrong(out: Tensor, a: DenseInput, call: int) -> None:
        if call == first:
            out[5, 5] += 1

    found = checks(judge_dense(dense(wrong), REPEAT))
    assert ("T1", "exact") in found


@pytest.mark.parametrize("sums", [SEQUENTIAL_FP32, ATOMICS])
def test_one_call_in_fifty_where_results_are_not_exact(sums: Accumulation) -> None:
    """Backends without FP32 partial sums and models with a clamped activation are called again and again, too."""

    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        if call == 50:
            out[3] = 0

    def moe_touch(out: Tensor, x: Tensor, ids: Tensor, call: int) -> None:
        if call == 50:
            out[3] = 0

    clamped = MoeCase("repeat_bound", (8,), 64, 32, 6, 3, Activation(limit=2.0))
    for outcome in (
        judge_dense(dense(touch, sums=sums), DenseCase("repeat_bound", 40, 64, (16,))),
        judge_moe(moe(moe_touch, sums=sums), clamped),
    ):
        assert set(checks(outcome)) == {("T2", "bound") if sums.atomics else ("T4", "determinism")}
        assert outcome.findings[0].condition["row"] == 3
        assert outcome.findings[0].condition["call"] > 1


class StaticOutput(DensePipeline):
    """Returns the same tensor of its own each time, as a captured graph does; one call in fifty is wrong."""

    def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
        static: dict[int, Tensor] = self.__dict__.setdefault("static", {})
        mine = static.setdefault(a.m, torch.empty_like(out))
        super().__call__(a, alpha, mine)
        if self.calls == 50:
            mine[2] = 0
        return mine


def test_a_result_that_is_overwritten_by_the_next_call_is_judged_before_it() -> None:
    assert set(checks(judge_dense(dense(kernel=StaticOutput), REPEAT))) == {("T4", "determinism")}


# --- atomics ----------------------------------------------------------------------------------------------------------


class Wobbling(DensePipeline):
    """The last bit of some elements changes from call to call, as with atomics."""

    step = 1

    def finish(self, out: Tensor, a: DenseInput) -> None:
        del a
        if self.calls % 2:
            out.view(torch.int16)[::3, ::5] ^= self.step


class Lurching(Wobbling):
    """The change is far beyond the bound."""

    step = 0x40


@pytest.mark.parametrize("probe", ["bound", "repeat"])
def test_declared_atomics_may_wobble_within_the_bound(probe: Any) -> None:
    loose = Accumulation(1, 2.0**-12, atomics=True)
    case = DenseCase("bound", 40, 64, (33,))
    assert judge_dense(dense(kernel=Wobbling, sums=loose), case).verdict == "PASS"
    assert judge_dense(dense(kernel=Wobbling, sums=Accumulation(1, 2.0**-12)), case).verdict == "FAIL"
    assert judge_dense(dense(kernel=Lurching, sums=loose), case).verdict == "FAIL"


def test_atomics_do_not_excuse_wrong_repeats() -> None:
    def touch(out: Tensor, a: DenseInput, call: int) -> None:
        if call == 50:
            out[1, 1] = 0

    outcome = judge_dense(dense(touch, sums=ATOMICS), REPEAT)
    assert set(checks(outcome)) == {("T1", "exact")}
    assert outcome.findings[0].condition["call"] > 1


# --- a model's block --------------------------------------------------------------------------------------------------

BLOCK = BlockCase(9, 64, 32, 6, 3, 48, shared_gate=True)


def judge_block(moe_touch: MoeTouch | None = None, dense_touch: DenseTouch | None = None, **how: Any) -> Any:
    made = block_operands(BLOCK)
    one, other = moe(moe_touch), dense(dense_touch, **how)
    subject = BlockSubject(BLOCK, made, one, other)
    expected = block_reference(BLOCK, made, one.recipe(BLOCK.routed), (other.sums, other.sums), "fp4")
    return evaluation.evaluate(subject, expected)


def test_a_right_pair_passes() -> None:
    outcome = judge_block()
    assert (outcome.verdict, outcome.findings) == ("PASS", [])


def test_either_half_of_a_pair_may_be_wrong() -> None:
    def in_dense(out: Tensor, a: DenseInput, call: int) -> None:
        out[3] *= 1.3

    def in_moe(out: Tensor, x: Tensor, ids: Tensor, call: int) -> None:
        out[3] *= 1.3

    for outcome in (judge_block(dense_touch=in_dense), judge_block(in_moe)):
        assert set(checks(outcome)) == {("T2", "bound")}
        assert outcome.findings[0].condition["row"] == 3


def test_atomics_of_either_half_are_atomics_of_the_pair() -> None:
    made = block_operands(BLOCK)
    assert not BlockSubject(BLOCK, made, moe(), dense()).atomics
    assert BlockSubject(BLOCK, made, moe(sums=ATOMICS), dense()).atomics
    assert BlockSubject(BLOCK, made, moe(), dense(sums=ATOMICS)).atomics


def test_what_a_pair_hands_out_is_poisoned() -> None:
    """Memory that is used again may hold the last call's right result: a row that is not written would pass."""
    seen: list[bool] = []

    class Looks(DensePipeline):
        def __call__(self, a: DenseInput, alpha: Tensor, out: Tensor) -> Tensor:
            seen.append(judge.is_poison(out))
            return super().__call__(a, alpha, out)

    class LooksToo(MoePipeline):
        def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
            seen.append(judge.is_poison(out))
            return super().__call__(x, ids, weights, out)

    made = block_operands(BLOCK)
    one, other = moe(kernel=LooksToo), dense(kernel=Looks)
    expected = block_reference(BLOCK, made, one.recipe(BLOCK.routed), (other.sums, other.sums), "fp4")
    assert evaluation.evaluate(BlockSubject(BLOCK, made, one, other), expected).verdict == "PASS"
    assert seen
    assert all(seen)


def test_constants_are_all_weights() -> None:
    made = block_operands(BLOCK)
    subject = BlockSubject(BLOCK, made, moe(), dense())
    held = {t.data_ptr() for t in subject.constants()}
    e = made.routed.experts
    for tensor in (e.w13, e.w13_scales, e.w13_scale_2, e.w2, e.w2_scales, e.w2_scale_2, e.intermediate_scale):
        assert tensor.data_ptr() in held
    for q in (made.gate_up, made.down):
        assert {q.packed.data_ptr(), q.scales.data_ptr(), q.scale_2.data_ptr()} <= held
