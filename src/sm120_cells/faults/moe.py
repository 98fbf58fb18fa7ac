"""MoE faults in routing, combining and writing. B is the fused-MoE experiment, C.. the log of public reports."""

import torch
from torch import Tensor

from sm120_cells.backends.pipeline import Matrix
from sm120_cells.faults.base import MoeFault, Mutant, moe_fault

FAULTS: list[Mutant] = []
RARE = 50
"""Intermittent faults fire in each 50th call."""


class _OneExpert(MoeFault):
    """Something is wrong with one expert's results."""

    def wrong_expert(self) -> int:
        """The expert, from the seed."""
        return self.pick("expert", self.case.experts)

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """Changes one expert's results before they are added."""
        if self.current == self.wrong_expert():
            result = self.change(result.clone())
        super().combine(total, result, weight, token)

    def gate_up(self, a: object, expert: int) -> Tensor:
        """Notes which expert is at work."""
        self.current = expert
        return super().gate_up(a, expert)  # type: ignore[arg-type]  # passed through

    def change(self, result: Tensor) -> Tensor:
        """Overridden."""
        raise NotImplementedError


@moe_fault(FAULTS, "one 128-column tile of one expert zero", "B")
class TileOfExpertZero(_OneExpert):
    """A tile of the down projection's output is not added."""

    def change(self, result: Tensor) -> Tensor:
        """The first columns."""
        result[:, :128] = 0
        return result


@moe_fault(FAULTS, "two tokens of one expert exchanged", "B")
class TokensExchanged(_OneExpert):
    """The scatter of one expert's rows is off."""

    def change(self, result: Tensor) -> Tensor:
        """The first two."""
        if len(result) > 1:
            result[[0, 1]] = result[[1, 0]]
        return result


@moe_fault(FAULTS, "one token of one expert skipped", "B")
class TokenSkipped(_OneExpert):
    """One row is not added."""

    def change(self, result: Tensor) -> Tensor:
        """The first."""
        result[0] = 0
        return result


@moe_fault(FAULTS, "one expert 5 % too large", "B, per expert")
class ExpertFivePercent(_OneExpert):
    """One expert's global scale is off."""

    def change(self, result: Tensor) -> Tensor:
        """Factor 1.05."""
        return (result.float() * 1.05).bfloat16()


@moe_fault(FAULTS, "tokens beyond 32 of one expert dropped", "C09: many tokens at once; capacity")
class CapacityExceeded(MoeFault):
    """Only the first 32 tokens of an expert are computed."""

    def assigned(self, ids: Tensor, expert: int) -> tuple[Tensor, Tensor]:
        """A fixed capacity."""
        token, slot = super().assigned(ids, expert)
        return token[:32], slot[:32]


@moe_fault(FAULTS, "-1 taken as the last expert", "C27: -1 routes")
class MinusOneIsLast(MoeFault):
    """An unrouted slot indexes from the end."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """As an unchecked index does."""
        return super().__call__(x, torch.where(ids < 0, self.case.experts - 1, ids), weights, out)


@moe_fault(FAULTS, "unrouted slots keep the last call's result", "C29: experts with no tokens, uninitialised memory")
class UnroutedStale(MoeFault):
    """The buffer for a slot's result is not cleared where no expert writes it."""

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        """Tokens with an unrouted slot get a neighbour's result added."""
        rows = (ids < 0).any(1)
        if bool(rows.any()):
            out[rows] += out.roll(1, dims=0)[rows]


@moe_fault(FAULTS, "an empty expert's slot not zeroed", "C29: zero tokens, NaN from uninitialised memory")
class EmptyExpert(MoeFault):
    """Where some expert has no token, its uninitialised output reaches token 0."""

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        """NaN where an expert is empty."""
        if len(out) and len(ids[ids >= 0].unique()) < self.case.experts:
            out[0] = torch.nan


@moe_fault(FAULTS, "router weight dropped", "B")
class RouterWeightDropped(MoeFault):
    """All experts count the same."""

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """1 / top_k each."""
        super().combine(total, result, torch.full_like(weight, 1 / self.case.top_k), token)


@moe_fault(FAULTS, "router weight applied twice", "weights folded in by the router and by the kernel")
class RouterWeightTwice(MoeFault):
    """Squared weights."""

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """weight^2."""
        super().combine(total, result, weight * weight, token)


@moe_fault(FAULTS, "routed scaling dropped", "DeepSeek's 2.5 not applied")
class RoutedScalingDropped(MoeFault):
    """The factor on the routed sum is missing."""

    def routed_scaling(self, total: Tensor) -> Tensor:
        """As it is."""
        return total


@moe_fault(FAULTS, "last routing slot dropped", "top_k rounded down")
class LastSlotDropped(MoeFault):
    """One of the top_k experts is not added."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """The last."""
        return super().__call__(x, ids[:, :-1], weights[:, :-1], out)


@moe_fault(FAULTS, "bf16 partial sums, not declared", "numerics 2.8: combine by bf16 atomics")
class Bf16Combine(MoeFault):
    """Experts' products are added in bf16."""

    def combine(self, total: Tensor, result: Tensor, weight: Tensor, token: Tensor) -> None:
        """Rounds after each addition."""
        super().combine(total, result, weight, token)
        total.copy_(total.bfloat16())


@moe_fault(FAULTS, "zeros at one number of tokens", "C03")
class ZerosAtOneT(MoeFault):
    """All zeros at one size only."""

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        """The size comes from the seed."""
        if len(x) == 1 + self.pick("tokens", 18):
            out.zero_()


@moe_fault(FAULTS, "all tokens to one expert gives zeros", "C27: extreme routing")
class AllToOne(MoeFault):
    """A grouped GEMM with one group takes an empty path."""

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        """Where no more experts than top_k are used."""
        if len(x) > 1 and len(ids.unique()) <= self.case.top_k:
            out.zero_()


@moe_fault(FAULTS, "output 5 % too large", "B")
class FivePercent(MoeFault):
    """Everything is 5 % too large."""

    def routed_scaling(self, total: Tensor) -> Tensor:
        """Factor 1.05."""
        return super().routed_scaling(total) * 1.05


@moe_fault(FAULTS, "twenty elements tripled", "B: race")
class Race(MoeFault):
    """Twenty elements that some other block also wrote to."""

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        """Elements come from the seed."""
        flat = out.view(-1)
        if len(flat):
            flat[[self.pick(i, len(flat)) for i in range(20)]] *= 3


@moe_fault(FAULTS, "a tile stale in 1 of 50 calls", "C01, C05")
class StaleTile(MoeFault):
    """One tile holds the zeros of a fresh buffer, in each 50th call."""

    def finish(self, out: Tensor, x: Tensor, ids: Tensor) -> None:
        """Deterministic: by the number of the call."""
        if self.calls % RARE == 0:
            out[:128, :128] = 0


@moe_fault(FAULTS, "last token never written", "C29")
class LastTokenUnwritten(MoeFault):
    """The last row keeps what was there."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Restores the last row."""
        before = out[-1:].clone()
        super().__call__(x, ids, weights, out)
        out[-1:] = before
        return out


@moe_fault(FAULTS, "a padding token's row enters a real one", "C14: 8 real tokens, 64 slots")
class PaddingToken(MoeFault):
    """The token after the last is added to the last where a tile of 16 is not full."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        """Reads past the view, as a kernel with the pointer does."""
        if len(x) % 16:
            beyond = x.as_strided((1, x.shape[1]), x.stride(), x.storage_offset() + len(x) * x.shape[1])
            x = torch.cat([x[:-1], torch.where(beyond.isnan(), 1.0, beyond + x[-1:] * (beyond == 0))])
        return super().__call__(x, ids, weights, out)


@moe_fault(FAULTS, "expert number wraps around", "C27: global against local expert numbers")
class ExpertWraps(MoeFault):
    """Experts of the upper quarter use the weights of the lower one."""

    def read_weight(self, name: str, expert: int) -> Matrix:
        """Modulo three quarters of the experts."""
        return super().read_weight(name, expert % max(1, self.case.experts * 3 // 4))
