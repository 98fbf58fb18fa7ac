"""The catalogue of injected faults that the judge must catch, and of right variants that it must accept.

A fault overrides one stage of a right kernel and names the public report or experiment that it stands for. Where it
needs a place (a row, an expert, a size), that comes from the seed; intermittent ones count their calls, since a random
one in fifty would escape now and then.
"""

from collections.abc import Sequence

from sm120_cells.faults import dense, dense_data, moe, moe_data, variants
from sm120_cells.faults.base import Mutant

__all__ = ["Mutant", "catalogue"]


def catalogue() -> Sequence[Mutant]:
    """All faults and right variants; names are unique within an operation."""
    return [*dense.FAULTS, *dense_data.FAULTS, *moe.FAULTS, *moe_data.FAULTS, *variants.RIGHT]
