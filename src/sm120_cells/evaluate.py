"""Run a backend on a case under every condition and collect what is wrong.

For each size of the sweep, densely and without bisection: outputs poisoned and fenced, three patterns in the padding,
each result compared with the reference and with the other patterns' bits; then relations, then repeated calls.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sm120_cells import judge
from sm120_cells.judge import Comparison, Finding, Tier
from sm120_cells.reference import Expected
from sm120_cells.subjects import PATTERNS, Inputs, Pattern, Posed, Relation, Subject, checksums

Verdict = Literal["PASS", "FAIL", "UNSUPPORTED", "INCONCLUSIVE"]
Watch = Callable[[Tensor, Expected], None]

_GUARD = 128
"""Rows of poison before and after the output: a kernel that writes whole tiles past M lands in them."""


@dataclass(slots=True)
class Outcome:
    """What one cell came to."""

    verdict: Verdict
    reason: str | None = None
    eta: float | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checks: int = 0
    calls: int = 0
    kernel_seconds: float = 0.0
    judge_seconds: float = 0.0
    kernels: list[str] = field(default_factory=list)
    error_map: dict[str, Any] | None = None


def evaluate(
    subject: Subject, expected: Expected, *, watch: Watch | None = None, tick: Callable[[], None] | None = None
) -> Outcome:
    """Judge a subject.

    watch is shown every output with its reference (the self-test's published criteria); tick is called between calls.

    Whatever the backend raises is passed on: the worker turns it into a verdict.
    """
    return _Evaluation(subject, expected, watch, tick).run()


class _Evaluation:
    def __init__(
        self, subject: Subject, expected: Expected, watch: Watch | None, tick: Callable[[], None] | None
    ) -> None:
        self.subject, self.expected, self.watch, self.tick = subject, expected, watch, tick
        self.device = expected.value.device
        self.outcome = Outcome("PASS", eta=0.0)
        self.findings: dict[tuple[str, str], list[tuple[int | None, Finding]]] = {}
        self.worst: Comparison | None = None
        self.blamed = False

    def run(self) -> Outcome:
        if self.device.type == "cuda":
            self.outcome.kernels = self._kernel_names()
        largest = max(self.subject.sweep)
        first: Tensor | None = None
        for rows in self.subject.sweep:
            result = self._patterns(rows)
            first = result if rows == largest else first
        if first is not None:
            self._relations(self.subject.inputs(largest), first)
            if self.subject.repeats:
                self._repeats(largest)
        if self.subject.weights_before != checksums(self.subject.constants()):
            self._report(None, Finding("T0", "inputs unchanged", "the kernel changed its weights"))
        return self._finish()

    # --- calls ----------------------------------------------------------------------------------------------------

    def _call(self, posed: Posed, run: Callable[[Posed, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """(result, fenced buffer that its output view lies in)."""
        fence = judge.poisoned(posed.real_rows + 2 * _GUARD, self.subject.columns, self.device)
        if self.device.type == "cuda":  # a result that the backend allocates reuses poisoned memory
            judge.poisoned(posed.real_rows, self.subject.columns, self.device)
        start = time.perf_counter()
        result = run(posed, fence[_GUARD : _GUARD + posed.real_rows])
        self._synchronise()
        self.outcome.kernel_seconds += time.perf_counter() - start
        self.outcome.calls += 1
        if self.tick is not None:
            self.tick()
        return result, fence

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _kernel_names(self) -> list[str]:
        rows = max(self.subject.sweep)
        posed = self.subject.pose(self.subject.inputs(rows), PATTERNS[-1])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            result, _ = self._call(posed, self.subject.call)
        if self._shaped(rows, result, {"m": rows, "call": 1}):
            self._compare(rows, result, {"m": rows, "call": 1})
        return sorted({e.name for e in profile.events() or () if "CUDA" in str(e.device_type)})

    # --- one size, every padding ----------------------------------------------------------------------------------

    def _patterns(self, rows: int) -> Tensor | None:
        first: Tensor | None = None
        right = True
        inputs = self.subject.inputs(rows)
        for pattern in PATTERNS:
            # other contents in the last pass, so that a result kept from before shows at every size
            varied = right and pattern is PATTERNS[-1]
            variant, factor = self.subject.variant(inputs) if varied else (inputs, 1.0)
            posed = self.subject.pose(variant, pattern)
            before = [b.clone() for b in posed.buffers]
            result, fence = self._call(posed, self.subject.call)
            start = time.perf_counter()
            if not self._structure(rows, result, fence, pattern, posed, before):
                return None
            if first is None:
                first = result.clone()
                right = self._compare(rows, first, {"m": rows, "pattern": pattern.name})
            else:
                self.outcome.checks += 1
                want = first if factor == 1.0 else (first.float() * factor).bfloat16()
                same = judge.same_values(result, want)
                if not (same or (self.subject.atomics and self._within(rows, result, factor))):
                    self._report(rows, self._padding_or_chance(variant, pattern, result.clone(), want))
            self.outcome.judge_seconds += time.perf_counter() - start
        return first

    def _padding_or_chance(self, inputs: Inputs, pattern: Pattern, result: Tensor, first: Tensor) -> Finding:
        """A difference is the padding's doing if the same call gives it again, and another pattern does not.

        Otherwise it is chance, or the contents' doing: those of the last pass are others.
        """
        again, _ = self._call(self.subject.pose(inputs, pattern), self.subject.call)
        if not judge.same_values(again, result):
            return self._differs("T4", "determinism", result, first)
        other, _ = self._call(self.subject.pose(inputs, PATTERNS[0]), self.subject.call)
        if judge.same_values(other, result):
            return self._differs("T3", "other contents", result, first)
        return self._differs("T0", "padding", result, first, {"pattern": pattern.name})

    def _shaped(self, rows: int, result: Tensor, condition: Mapping[str, Any]) -> bool:
        """Whether a result can be compared at all."""
        right = tuple(result.shape) == (rows, self.subject.columns) and result.dtype == torch.bfloat16
        if right and result.device == self.device:
            return True
        got = f"{tuple(result.shape)} {result.dtype} on {result.device}"
        want = f"({rows}, {self.subject.columns}) bf16"
        self._report(rows, Finding("T0", "shape", f"result is {got}, want {want}", condition))
        return False

    def _structure(
        self, rows: int, result: Tensor, fence: Tensor, pattern: Pattern, posed: Posed, before: list[Tensor]
    ) -> bool:
        """T0; False when the result cannot be compared at all."""
        self.outcome.checks += 4
        condition = {"m": rows, "pattern": pattern.name}
        if not self._shaped(rows, result, condition):
            return False
        if not (judge.is_poison(fence[:_GUARD]) and judge.is_poison(fence[_GUARD + rows :])):
            self._report(rows, Finding("T0", "guard", "the kernel wrote outside its output", condition))
        if count := judge.unwritten(result):
            at = (result.view(torch.int16) == judge.POISON).nonzero()[0].tolist()
            self._report(
                rows,
                Finding("T0", "written", f"{count} output elements were never written, first {at}", condition),
            )
        if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(posed.buffers, before, strict=True)):
            self._report(rows, Finding("T0", "inputs unchanged", "the kernel changed its activations", condition))
        return True

    def _compare(self, rows: int, result: Tensor, condition: Mapping[str, Any]) -> bool:
        """T1 or T2; whether all is right."""
        expected = self.expected.rows(rows)
        self.outcome.checks += 1
        if self.watch is not None:
            self.watch(result, expected)
        if self.subject.exact and torch.equal(result.double(), expected.value):
            return True
        comparison = judge.compare(result, expected)
        if comparison.worst_eta > (self.outcome.eta or 0.0):
            self.outcome.eta = comparison.worst_eta
        if comparison.worst_eta <= 1.0:
            return True
        if self.worst is None or comparison.worst_eta > self.worst.worst_eta:
            self.worst = comparison
        tier: Tier = "T1" if self.subject.exact else "T2"
        where = {**condition, **self._blame(rows, comparison)}
        self._report(rows, judge.describe(comparison, tier, "exact" if self.subject.exact else "bound", where))
        return False

    def _blame(self, rows: int, comparison: Comparison) -> dict[str, Any]:
        """The expert or the K step that alone is wrong, where there is one; looked for once a case."""
        if self.blamed:
            return {}
        self.blamed = True
        found: dict[str, Any] = {}
        expert = self.subject.expert_at_fault(comparison.wrong.any(1))
        if expert is not None:
            found["expert"] = expert
        wrong = []
        for step, inputs, expected in self.subject.k_steps(rows):
            result, _ = self._call(self.subject.pose(inputs, PATTERNS[-1]), self.subject.call)
            if not torch.equal(result.double(), expected.value):
                wrong.append(step)
        if len(wrong) == 1:
            found["k_step"] = wrong[0]
        return found

    def _within(self, rows: int, result: Tensor, factor: float) -> bool:
        expected = self.expected.rows(rows)
        scaled = Expected(expected.value * factor, expected.radius * abs(factor))
        return judge.compare(result, scaled).worst_eta <= 1.0

    def _differs(
        self, tier: Tier, check: str, got: Tensor, want: Tensor, condition: Mapping[str, Any] | None = None
    ) -> Finding:
        both = got.isnan() & want.isnan()  # what is no number in both is no difference
        value = want.double().masked_fill(both, 0.0)
        comparison = judge.compare(got.masked_fill(both, 0.0), Expected(value, torch.zeros_like(value)))
        return judge.describe(comparison, tier, check, {"m": len(want), **(condition or {})})

    # --- relations and repetition -----------------------------------------------------------------------------------

    def _relations(self, inputs: Inputs, out: Tensor) -> None:
        if self.subject.atomics or not len(out):
            return  # without a fixed order of additions no relation is exact
        for relation in self.subject.relations(inputs, out):
            posed = self.subject.pose(relation.inputs, PATTERNS[0])

            def run(posed: Posed, fenced: Tensor, relation: Relation = relation) -> Tensor:
                return self.subject.relate(relation, posed, fenced)

            result, _ = self._call(posed, run)
            self.outcome.checks += 1
            if not self._shaped(len(out), result, {"m": len(out), "relation": relation.name}):
                continue
            want = relation.want
            if relation.where is not None:  # the other rows may be anything
                want = result.clone()
                want[relation.where] = relation.want
            if not judge.same_values(result, want):
                self._report(len(out), self._differs("T3", relation.name, result, want))

    def _repeats(self, rows: int) -> None:
        """Back to back, as a server calls; each result is judged and compared with the first."""
        posed = self.subject.pose(self.subject.inputs(rows), PATTERNS[0])
        outs = judge.poisoned(self.subject.repeats * rows, self.subject.columns, self.device)
        start = time.perf_counter()
        results = []
        for out in outs.chunk(self.subject.repeats):
            result = self.subject.call(posed, out)
            # a tensor of the backend's own may be the same one each time
            results.append(result if result.data_ptr() == out.data_ptr() else result.clone())
        self._synchronise()
        self.outcome.kernel_seconds += time.perf_counter() - start
        self.outcome.calls += self.subject.repeats
        for number, result in enumerate(results, start=1):
            self.outcome.checks += 1
            if not self._shaped(rows, result, {"m": rows, "call": number}):
                continue
            if not self.subject.atomics and not judge.same_bits(result, results[0]):
                found = self._differs("T4", "determinism", result, results[0])
                message = f"call {number} of {self.subject.repeats} differs from the first: {found.message}"
                condition = {**found.condition, "call": number}
                self._report(rows, Finding(found.tier, found.check, message, condition, found.worst))
            else:
                self._compare(rows, result, {"m": rows, "call": number})

    # --- findings ---------------------------------------------------------------------------------------------------

    def _report(self, rows: int | None, finding: Finding) -> None:
        """rows: the size at which it happened; None where no one size is to blame."""
        self.findings.setdefault((finding.tier, finding.check), []).append((rows, finding))

    def _finish(self) -> Outcome:
        """One finding for each check: its worst instance, with every size at which it happens."""
        for instances in self.findings.values():
            _, finding = max(instances, key=lambda item: _severity(item[1]))
            sizes = sorted({rows for rows, _ in instances if rows is not None})
            message = finding.message
            if sizes and len(self.subject.sweep) > 1:
                message = f"at M = {judge.ranges(sizes)} of {judge.ranges(list(self.subject.sweep))}: {message}"
            condition = {**finding.condition, "failed_at": sizes}
            self.outcome.findings.append(Finding(finding.tier, finding.check, message, condition, finding.worst))
        self.outcome.findings.sort(key=lambda f: f.tier)
        if self.outcome.findings:
            self.outcome.verdict = "FAIL"
            first = self.outcome.findings[0]
            self.outcome.reason = f"{first.tier} {first.check}: {first.message}"
        elif not self.outcome.calls:
            self.outcome.verdict, self.outcome.reason = "INCONCLUSIVE", "nothing was called"
        if self.worst is not None:
            self.outcome.error_map = self.worst.error_map()
        return self.outcome


def _severity(finding: Finding) -> float:
    if not finding.worst:
        return 0.0
    return finding.worst[0].eta if finding.worst[0].eta is not None else float("inf")


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
