"""The SM120 model gives the same bits on CUDA tensors as on CPU ones, which are checked against mmasim."""

import pytest
import torch
from torch import Tensor

from sm120_cells.mma import Accumulator, MmaModel, mma_accumulate

pytestmark = pytest.mark.gpu

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
NARROW, ALL = (0x58, 0x7E), (0, 0x7E)  # scale bytes: no alignment needed, and every finite one


def operands(m: int, n: int, k: int, scales: tuple[int, int], zeros: float) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(m + n + k)
    made = []
    for rows in (m, n):
        codes = torch.randint(16, (rows, k), generator=g) * (torch.rand(rows, k, generator=g) >= zeros)
        made += [E2M1[codes], E4M3[torch.randint(scales[0], scales[1] + 1, (rows, k // 16), generator=g)]]
    return tuple(made)


def assert_same(made: tuple[Tensor, ...], start: Tensor | None, model: MmaModel) -> None:
    want = mma_accumulate(*made[:4], start=start, model=model)
    got = mma_accumulate(*(x.cuda() for x in made), start=None if start is None else start.cuda(), model=model)
    assert torch.equal(got.cpu().view(torch.int32), want.view(torch.int32))


@pytest.mark.parametrize("shape", [(1, 17, 16), (33, 65, 208), (128, 2048, 1024), (2100, 4200, 80)])
@pytest.mark.parametrize("scales", [NARROW, ALL])
@pytest.mark.parametrize("zeros", [0.0, 0.8])
def test_same_bits_as_on_the_cpu(shape: tuple[int, int, int], scales: tuple[int, int], zeros: float) -> None:
    assert_same(operands(*shape, scales, zeros), None, MmaModel())


@pytest.mark.parametrize("accumulator", ["fp32_rz", "fp32_rne", "bf16", "fp16", "e8m13"])
@pytest.mark.parametrize("scales", [NARROW, ALL])
def test_same_bits_for_variants(accumulator: Accumulator, scales: tuple[int, int]) -> None:
    made = operands(40, 72, 496, scales, 0.1)
    g = torch.Generator().manual_seed(0)
    start = torch.randn(40, 72, generator=g) * torch.exp2(torch.randint(-30, 30, (40, 72), generator=g).float())
    start[0, :5] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")])
    made[1][3, 2] = float("nan")
    assert_same(made, start, MmaModel(accumulator=accumulator))
    assert_same(made, None, MmaModel(accumulator=accumulator, fraction_bits=25, reverse=True))
