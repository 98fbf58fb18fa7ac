"""Where right kernels would be called wrong: each line of that section of the method's description is a test here.

The last line, our vectorised accumulation against its oracle, is tests/unit/cells/test_mma.py.
"""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from tests.unit.cells.hooked import checks, dense, judge_dense, judge_moe, moe
from torch import Tensor

from sm120_cells import bounds, nvfp4
from sm120_cells.backends.pipeline import DensePipeline, Matrix, MoePipeline
from sm120_cells.backends.sm120_model import MmaProduct
from sm120_cells.bounds import FP32_ULP, NATIVE_FP4, SEQUENTIAL_FP32, Accumulation, MoeRecipe
from sm120_cells.cases import Activation, DenseCase, DenseProbe, MoeCase, MoeProbe
from sm120_cells.evaluate import Outcome, evaluate
from sm120_cells.faults import catalogue
from sm120_cells.faults.variants import ApproximateReciprocal, Bf16Atomics, Bf16RouterWeight, FastExp
from sm120_cells.mma import MmaModel
from sm120_cells.nvfp4 import Quantized
from sm120_cells.plan import dense_inapplicable, moe_inapplicable
from sm120_cells.probes import MoeOperands, dense_operands, moe_operands
from sm120_cells.reference import EXACT_DENSE, EXACT_MOE, dense_reference, moe_reference
from sm120_cells.subjects import PATTERNS, DenseSubject, MoeSubject

MOE_CASE = MoeCase("bound", (24,), 128, 128, 6, 3, routed_scaling=2.5)
RECIPE = MoeRecipe(SEQUENTIAL_FP32, SEQUENTIAL_FP32)


def judged_with(
    kernel: type[MoePipeline], recipe: MoeRecipe, case: MoeCase = MOE_CASE, made: MoeOperands | None = None
) -> Outcome:
    made = made or moe_operands(case)
    return evaluate(MoeSubject(case, made, moe(kernel=kernel)), moe_reference(case, made, recipe))


def outputs(kernel: type[MoePipeline], case: MoeCase = MOE_CASE, made: MoeOperands | None = None) -> Tensor:
    made = made or moe_operands(case)
    return moe(kernel=kernel).prepare(made.experts, case)(made.x, made.ids, made.weights, torch.empty_like(made.x))


# --- the quantiser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_quantiser_with_an_approximate_reciprocal_is_right(seed: int) -> None:
    """One ulp of the reciprocal changes codes where global scales are powers of two, and no change is called wrong."""
    case = replace(MOE_CASE, seed=seed)
    made = moe_operands(case)
    even = torch.full_like(made.experts.intermediate_scale, 2.0**-6)
    made = replace(made, experts=replace(made.experts, intermediate_scale=even))
    moved = outputs(ApproximateReciprocal, case, made) != outputs(MoePipeline, case, made)
    assert float(moved.double().mean()) > 0.01, "codes do change"
    outcome = judged_with(ApproximateReciprocal, RECIPE, case, made)
    assert (outcome.verdict, outcome.findings) == ("PASS", [])


def test_the_self_tests_variant_of_it_is_not_idle() -> None:
    """On the operands of every bound case some codes lie on a tie, so the right variant differs from the plain one."""
    moved = [
        outputs(ApproximateReciprocal, replace(MOE_CASE, seed=s)) != outputs(MoePipeline, replace(MOE_CASE, seed=s))
        for s in range(3)
    ]
    assert all(bool(m.any()) for m in moved)


@pytest.mark.parametrize("probe", get_args(DenseProbe))
@pytest.mark.parametrize("error", [1 - 2 * FP32_ULP, 1 + 2 * FP32_ULP])
def test_w4a4_activations_are_quantised_alike_in_any_arithmetic(probe: DenseProbe, error: float) -> None:
    """They lie on the grid, so a reciprocal that is off does not move one code."""
    a = dense_operands(DenseCase(probe, 16, 256, (32,))).a
    assert isinstance(a, Quantized)
    blocks = a.dequantize(torch.float32).unflatten(1, (-1, 16))
    scales = nvfp4.encode_e4m3(blocks.abs().amax(-1) / 6 / a.scale_2 * error)
    inverse = torch.where(scales > 0, error / (nvfp4.decode_e4m3(scales) * a.scale_2), 0.0).unsqueeze(-1)
    codes = nvfp4.encode_e2m1((blocks * inverse).clamp(-6, 6)).flatten(1)
    assert torch.equal(nvfp4.decode_e2m1(codes), nvfp4.decode_e2m1(nvfp4.unpack(a.packed)))


def test_a_quantiser_that_rounds_otherwise_is_wrong() -> None:
    class TowardZero(MoePipeline):
        def requantise(self, hidden: Tensor, expert: int) -> Any:
            return super().requantise((hidden.float() * (1 - 2.0**-7)).bfloat16(), expert)

    assert judged_with(TowardZero, RECIPE).verdict == "FAIL"


# --- read-back --------------------------------------------------------------------------------------------------------


def test_read_back_is_rounded_as_alpha_is_applied() -> None:
    """bf16(fp32(w) * fp32(alpha)) is expected; the unrounded dequantised weight would differ for most elements."""
    case = DenseCase("readback", 256, 256, (256,))
    made = dense_operands(case)
    want = dense_reference(case, made, SEQUENTIAL_FP32)
    selected = nvfp4.dequantize_bytes(made.w.packed, made.w.scales, torch.ones(())) * 6  # A is 6 times the identity
    assert math.frexp(float(made.alpha))[0] != 0.5, "an arbitrary alpha"
    assert torch.equal(want.value, (selected.T.float() * made.alpha.float()).bfloat16().double())
    assert want.exact
    unrounded = selected.T * made.alpha.double()
    nonzero = unrounded != 0
    assert float((want.value[nonzero] != unrounded[nonzero]).double().mean()) > 0.85
    assert judge_dense(dense(), case).verdict == "PASS"


def test_read_back_of_a_mixture_has_powers_of_two_for_alpha() -> None:
    for seed in range(3):
        made = moe_operands(MoeCase("isolated", (4,), 64, 32, 6, 3, seed=seed)).experts
        for scale in (made.w13_scale_2 * made.input_scale, made.w2_scale_2 * made.intermediate_scale):
            assert bool((torch.frexp(scale).mantissa == 0.5).all())


# --- combine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "declared"),
    [
        (Bf16RouterWeight, {"router_weight": "bf16", "product_out": "bf16"}),
        (Bf16Atomics, {"product_out": "bf16", "combine": "bf16"}),
    ],
)
def test_how_experts_are_combined_is_right_as_declared_and_wrong_if_not(kernel: Any, declared: Any) -> None:
    """bf16 router weights and bf16 atomics: the same output, told apart by the recipe alone."""
    right = judged_with(kernel, replace(RECIPE, **declared))
    assert (right.verdict, right.findings) == ("PASS", [])
    exact = replace(MOE_CASE, probe="exact", routed_scaling=2.0)
    assert judged_with(kernel, replace(RECIPE, **declared), exact).verdict == "PASS"
    undeclared = [judged_with(kernel, RECIPE, case) for case in (MOE_CASE, exact)]
    assert "FAIL" in {outcome.verdict for outcome in undeclared}
    assert max(outcome.eta or 0.0 for outcome in undeclared) > 1.0


@pytest.mark.parametrize("part", ["router_weight", "product_out", "combine"])
def test_each_rounding_of_the_combination_is_declared_by_itself(part: str) -> None:
    """A declaration widens the reference, or moves it, by that rounding."""
    declared: dict[str, Any] = {part: "bf16"}
    made = moe_operands(MOE_CASE)
    plain = moe_reference(MOE_CASE, made, RECIPE)
    other = moe_reference(MOE_CASE, made, replace(RECIPE, **declared))
    assert not torch.equal(plain.value - plain.radius, other.value - other.radius)


# --- SiLU -------------------------------------------------------------------------------------------------------------


def test_the_error_of_a_fast_exponential_lies_in_the_interval() -> None:
    """2 + floor(1.173 |x|) ulp, not a constant; larger gates have the larger error."""
    for case in (
        MOE_CASE,
        replace(MOE_CASE, activation=Activation(2.0, 1.702, 1.0)),
        replace(MOE_CASE, probe="onehot"),
    ):
        outcome = judged_with(FastExp, RECIPE, case)
        assert (outcome.verdict, outcome.findings) == ("PASS", [])


def test_a_much_larger_error_of_the_exponential_does_not() -> None:
    class Coarse(MoePipeline):
        def sigmoid(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x) * (1 + 2.0**-8)

    assert judged_with(Coarse, RECIPE).verdict == "FAIL"


# --- exact probes -----------------------------------------------------------------------------------------------------

BF16_PARTIALS = Accumulation(1, 2.0**-24, splits=4, partial="bf16", atomics=True)


@pytest.mark.parametrize("probe", get_args(DenseProbe))
def test_exact_dense_probes_are_not_asked_of_partial_sums_that_are_not_fp32(probe: DenseProbe) -> None:
    case = DenseCase(probe, 16, 64, (4,))
    assert dense_inapplicable(dense(), case) is None
    reason = dense_inapplicable(dense(sums=BF16_PARTIALS), case)
    if probe in EXACT_DENSE and probe != "readback":  # one product only: nothing is added
        assert reason is not None
        assert "FP32 partial sums" in reason
    else:
        assert reason is None


@pytest.mark.parametrize("probe", get_args(MoeProbe))
def test_exact_moe_probes_are_not_asked_of_partial_sums_that_are_not_fp32(probe: MoeProbe) -> None:
    case = MoeCase(probe, (4,), 64, 32, 6, 3)
    assert moe_inapplicable(moe(), case) is None
    reason = moe_inapplicable(moe(sums=BF16_PARTIALS), case)
    assert (reason is not None and "FP32 partial sums" in reason) == (probe in EXACT_MOE)
    clamped = replace(case, activation=Activation(limit=7.0))
    reason = moe_inapplicable(moe(), clamped)
    assert (reason is not None and "clamped" in reason) == (probe in EXACT_MOE)


def test_read_back_is_right_for_bf16_partial_sums() -> None:
    class Split(DensePipeline):
        def load(self, weight: Quantized) -> Matrix:
            self.plain = super().load(weight)
            return self.plain

        def multiply(self, a: Matrix) -> Tensor:
            total = torch.zeros((), dtype=torch.bfloat16)
            for x, w in zip(a.dequantised().chunk(4, 1), self.plain.dequantised().chunk(4, 1), strict=True):
                total = total + (x @ w.T).bfloat16()
            return total.float()

    backend = dense(kernel=Split, sums=BF16_PARTIALS)
    assert judge_dense(backend, DenseCase("readback", 64, 64, (64,))).verdict == "PASS"
    assert judge_dense(backend, DenseCase("exact", 64, 64, (64,))).verdict == "FAIL", "it would be called wrong"
    assert judge_dense(backend, DenseCase("bound", 64, 64, (64,))).verdict == "PASS"


def test_a_bound_of_zero_is_met_by_an_error_of_zero() -> None:
    """Rows of zeros, tokens that are routed nowhere: eta is 0 there, not 0 / 0, and any error is infinite."""
    case = replace(MOE_CASE, routing="minus_one", tokens=(200,), hidden=32, intermediate=32)
    made = moe_operands(case)
    assert bool((made.ids < 0).all(1).any())
    want = moe_reference(case, made, RECIPE)
    nowhere = want.radius == 0
    assert bool(nowhere.any())
    got = outputs(MoePipeline, case)
    assert not bounds.eta(got, want.value, want.radius)[nowhere].any()
    assert bool((bounds.eta(got + 1e-3, want.value, want.radius)[nowhere] == math.inf).all())
    assert judge_moe(moe(), case).verdict == "PASS"


def test_a_neighbours_alpha_shows_in_an_exact_probe() -> None:
    """Global scales are distinct powers of two between neighbours: also the last expert reading the first one's."""
    for wrong in range(6):

        class OneNeighbour(MoePipeline):
            expert = wrong

            def alpha2(self, expert: int) -> Tensor:
                return super().alpha2((expert + 1) % 6 if expert == self.expert else expert)

        class OneNeighbourBefore(MoePipeline):
            expert = wrong

            def alpha1(self, expert: int) -> Tensor:
                return super().alpha1((expert - 1) % 6 if expert == self.expert else expert)

        for kernel in (OneNeighbour, OneNeighbourBefore):
            outcome = judge_moe(moe(kernel=kernel), MoeCase("isolated", (24,), 64, 32, 6, 3))
            assert ("T1", "exact") in checks(outcome)


# --- relations --------------------------------------------------------------------------------------------------------


def relation_names(subject: DenseSubject | MoeSubject) -> set[str]:
    rows = max(subject.sweep)
    return {r.name for r in subject.relations(subject.inputs(rows), torch.zeros(rows, subject.columns).bfloat16())}


def test_only_what_follows_the_activation_is_scaled() -> None:
    """Twice the tokens is not twice the result: SiLU is no power law. Twice the router weights is."""
    made = moe_operands(MOE_CASE)
    kernel = moe().prepare(made.experts, MOE_CASE)
    plain = kernel(made.x, made.ids, made.weights, torch.empty_like(made.x)).clone()
    doubled = kernel(made.x, made.ids, made.weights * 2, torch.empty_like(made.x))
    assert torch.equal(doubled, plain * 2)
    scaled = kernel(made.x * 2, made.ids, made.weights, torch.empty_like(made.x))
    assert float(((scaled - 2 * plain).abs() / plain.abs().clamp(min=1e-3)).median()) > 0.1
    for probe in get_args(MoeProbe):
        case = MoeCase(probe, (8,), 64, 32, 6, 3)
        names = relation_names(MoeSubject(case, moe_operands(case), moe()))
        assert {n for n in names if "scal" in n or "doubled" in n} == {"router weights doubled"}


def test_permutations_are_asked_of_exact_inputs_only() -> None:
    for probe in get_args(DenseProbe):
        case = DenseCase(probe, 16, 64, (9,))
        names = relation_names(DenseSubject(case, dense_operands(case), dense()))
        assert ("row permutation" in names) == (probe in EXACT_DENSE)
    for moe_probe in get_args(MoeProbe):
        moe_case = MoeCase(moe_probe, (9,), 64, 32, 6, 3)
        names = relation_names(MoeSubject(moe_case, moe_operands(moe_case), moe()))
        asked = {"token permutation", "experts relabelled", "routing slots reversed"}
        assert names & asked == (asked if moe_probe in ("isolated", "repeat") else set())


class OrderByRow(DensePipeline):
    """Rows of the second half are summed in another order, as in another tile: right, but not bit-equal."""

    def multiply(self, a: Matrix) -> Tensor:
        weight: Any = self.weight
        half = len(a.values) // 2
        forward = super().multiply(a)
        backward = MmaProduct(MmaModel(reverse=True)).multiply(a, weight)
        return torch.cat([forward[:half], backward[half:]])


def test_rows_may_be_summed_in_different_orders() -> None:
    backend = dense(kernel=OrderByRow, product=MmaProduct(), sums=NATIVE_FP4)
    case = DenseCase("bound", 64, 1024, (32,), spread="span")
    made = dense_operands(case)
    subject = DenseSubject(case, made, backend)
    order = torch.arange(32).roll(16)

    def call(inputs: Any) -> Tensor:
        posed = subject.pose(inputs, PATTERNS[0])
        return subject.call(posed, torch.empty(32, 64).bfloat16())

    plain, moved = call(subject.inputs(32)), call(subject.inputs(32).at(order))
    assert not torch.equal(plain[order], moved), "a permutation is no exact relation here"
    for probe in ("bound", "exact", "repeat"):
        k = 1024 if probe == "bound" else 512
        outcome = judge_dense(backend, DenseCase(probe, 64, k, (32,), spread="span" if probe == "bound" else "normal"))
        assert (outcome.verdict, outcome.findings) == ("PASS", [])


# --- self-test --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["dense", "moe"])
def test_intermittent_faults_fire_in_the_same_calls_each_time(operation: str) -> None:
    """A random one in fifty would escape now and then."""
    mutant = next(m for m in catalogue() if m.name == "a tile stale in 1 of 50 calls" and m.operation == operation)
    assert [_calls_that_differ(mutant, seed) for seed in (0, 7)] == [[50, 100]] * 2


def _calls_that_differ(mutant: Any, seed: int) -> list[int]:
    if mutant.dense is not None:
        dense_case = DenseCase("repeat", 16, 64, (2,))
        subject: Any = DenseSubject(dense_case, dense_operands(dense_case), mutant.dense(seed))
    else:
        moe_case = MoeCase("repeat", (2,), 32, 16, 2, 1)
        subject = MoeSubject(moe_case, moe_operands(moe_case), mutant.moe(seed))
    posed = subject.pose(subject.inputs(2), PATTERNS[0])

    def call() -> Tensor:
        result: Tensor = subject.call(posed, torch.empty(2, subject.columns).bfloat16())
        return result.clone()

    first = call()
    return [number for number in range(2, 102) if not torch.equal(call(), first)]
