"""The codec on CUDA and CPU tensors against the conversions of cuda_fp4.h and cuda_fp8.h in device code, bit for bit.

E4M3 conversions are the `cvt` instruction from compute capability 8.9 on, E2M1 conversions from 10.0 on; below that the
headers emulate them in device code.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Generator, Tensor

from sm120_cells import nvfp4

pytestmark = pytest.mark.gpu

DEVICES = ["cuda", "cpu"]

# Runs conversions on the device: (conversion, input) pairs -> the bytes of each result.
Convert = Callable[[list[tuple[str, Tensor]]], list[Tensor]]


def find_nvcc() -> str:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc") or (shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None)
    if found is None:
        pytest.fail("no nvcc: put the CUDA toolkit's bin folder on PATH, or set CUDA_HOME")
    return found


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    if not torch.cuda.is_available():
        pytest.fail("these tests need an NVIDIA GPU and a CUDA build of torch; deselect them with -m 'not gpu'")
    major, minor = torch.cuda.get_device_capability()
    # The E2M1 instruction is only for code that is specific to an architecture.
    architecture = f"sm_{major}{minor}{'a' if major >= 10 else ''}"
    folder = tmp_path_factory.mktemp("convert_device")
    program = folder / "convert_device"
    source = Path(__file__).with_name("convert_device.cu")
    built = subprocess.run(
        [find_nvcc(), "-std=c++17", "-O2", f"-arch={architecture}", str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.fail(f"nvcc cannot compile {source.name} for {architecture}:\n{built.stdout}{built.stderr}")

    def run(jobs: list[tuple[str, Tensor]]) -> list[Tensor]:
        arguments = [str(program)]
        for index, (conversion, x) in enumerate(jobs):
            before = folder / f"{index}.in"
            before.write_bytes(x.contiguous().view(torch.uint8).numpy().tobytes())
            arguments += [conversion, str(before), str(folder / f"{index}.out")]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        results = [(folder / f"{index}.out").read_bytes() for index in range(len(jobs))]
        return [torch.frombuffer(bytearray(result), dtype=torch.uint8) for result in results]

    return run


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    got = got.cpu().flatten()
    wrong = (got != want).nonzero().flatten()
    assert got.shape == want.shape, what
    assert not len(wrong), f"{what}: {len(wrong)} differ, first at {wrong[0]}: {got[wrong[0]]}, device {want[wrong[0]]}"


# ---- every pattern -------------------------------------------------------------------------------------------------


def float32_patterns() -> Tensor:
    """Every upper half of a float32 with six lower halves: each sign, exponent, NaN and Inf, and, since values and ties
    of both formats fit the upper half, each of those with its two neighbours.
    """
    upper = torch.arange(0x10000, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (upper | lower).flatten().to(torch.int32).view(torch.float32)


def test_float32_patterns(convert: Convert) -> None:
    generator = Generator().manual_seed(30)
    random = torch.randint(-(1 << 31), 1 << 31, (1 << 22,), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.cat((float32_patterns(), random))
    single, double, fp8 = convert([("float_to_fp4", x), ("float2_to_fp4x2", x), ("float_to_fp8", x)])
    for device in DEVICES:
        codes = nvfp4.encode_e2m1(x.to(device))
        assert_same(codes, single, f"E2M1 on {device}")
        assert_same(nvfp4.pack(codes), double, f"packed E2M1 on {device}")
        assert_same(nvfp4.encode_e4m3(x.to(device)), fp8, f"E4M3 on {device}")


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("bf16", torch.bfloat16)])
def test_every_value_of_two_bytes(convert: Convert, name: str, dtype: torch.dtype) -> None:
    x = torch.arange(0x10000).to(torch.int16).view(dtype)
    fp4, fp8 = convert([(f"{name}_to_fp4", x), (f"{name}_to_fp8", x)])
    for device in DEVICES:
        assert_same(nvfp4.encode_e2m1(x.to(device)), fp4, f"E2M1 on {device}")
        assert_same(nvfp4.encode_e4m3(x.to(device)), fp8, f"E4M3 on {device}")


def test_every_code_and_byte_back_to_float(convert: Convert) -> None:
    codes, bytes_ = torch.arange(16, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    fp4, fp8 = (result.view(torch.float32) for result in convert([("fp4_to_float", codes), ("fp8_to_float", bytes_)]))
    number = ~fp8.isnan()
    assert bytes_[~number].tolist() == [0x7F, 0xFF]
    for device in DEVICES:
        ours = nvfp4.decode_e4m3(bytes_.to(device)).cpu()
        assert torch.equal(nvfp4.decode_e2m1(codes.to(device)).cpu().view(torch.int32), fp4.view(torch.int32))
        assert torch.equal(ours.isnan(), ~number)
        assert torch.equal(ours[number].view(torch.int32), fp8[number].view(torch.int32))


# ---- the recipe over shapes and ranges -----------------------------------------------------------------------------

SHAPES = [
    (1, 16),
    (1, 4096),
    (2, 7168),
    (3, 48),
    (7, 16384),
    (17, 1024),
    (33, 112),
    (128, 256),
    (129, 2048),
    (255, 16),
    (1000, 80),
    (64, 16384),
]


def normal(rows: int, k: int, generator: Generator) -> Tensor:
    return torch.randn(rows, k, generator=generator)


def wide(rows: int, k: int, generator: Generator) -> Tensor:
    """Block scales from 1e-3 to 448."""
    exponent = torch.empty(rows, k // 16, 1).uniform_(-3, 2.6512, generator=generator)
    blocks = torch.empty(rows, k // 16, 16).uniform_(-6, 6, generator=generator)
    return (blocks * 10**exponent).flatten(-2)


def denormal(rows: int, k: int, generator: Generator) -> Tensor:
    return normal(rows, k, generator) * 2.0**-125


def zero_blocks(rows: int, k: int, generator: Generator) -> Tensor:
    keep = torch.randint(0, 2, (rows, k // 16), generator=generator).repeat_interleave(16, dim=1)
    return normal(rows, k, generator) * keep


def saturating(rows: int, k: int, generator: Generator) -> Tensor:
    return normal(rows, k, generator) * 1e5


def outlier(rows: int, k: int, generator: Generator) -> Tensor:
    x = normal(rows, k, generator)
    x[rows // 2, k // 2] = 1e30
    return x


def on_grid(rows: int, k: int, generator: Generator) -> Tensor:
    codes = torch.randint(0, 16, (rows, k), generator=generator, dtype=torch.uint8)
    codes[:, ::16] = 7
    scales = torch.randint(0x01, 0x7F, (rows, k // 16), generator=generator, dtype=torch.uint8)
    return nvfp4.dequantize_bytes(nvfp4.pack(codes), scales, torch.tensor(1.0), torch.float32)


def ties(rows: int, k: int, generator: Generator) -> Tensor:
    """Quarters up to 6 at block scales that are powers of two: a third of the values lie midway between two codes."""
    quarters = torch.randint(-24, 25, (rows, k), generator=generator).float() / 4
    quarters[:, ::16] = 6
    powers = torch.tensor([2.0**exponent for exponent in range(-9, 9)])
    scales = powers[torch.randint(0, len(powers), (rows, k // 16), generator=generator)]
    return quarters * scales.repeat_interleave(16, dim=1)


def nan_and_inf(rows: int, k: int, generator: Generator) -> Tensor:
    x = normal(rows, k, generator)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf])
    place = torch.randint(0, rows * k, (1 + rows * k // 64,), generator=generator)
    x.view(-1)[place] = special[torch.arange(len(place)) % 3]
    return x


def patterns(rows: int, k: int, generator: Generator) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, k), generator=generator).to(torch.int32).view(torch.float32)


def near_ties(global_scale: float) -> Tensor:
    """Blocks [1125, 16] that feel the last bit of each step of the recipe: amax at each tie between block scales, the
    other values at the ties between codes under the two scales, each with its float32 neighbours.
    """
    scales = nvfp4.decode_e4m3(torch.arange(1, 0x7F, dtype=torch.uint8), torch.float64) / global_scale
    lower, upper = scales[:-1, None], scales[1:, None]
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    amax = neighbours((3 * (lower + upper)).float())
    others = neighbours(torch.cat((middles * lower, middles * upper), dim=1).float())
    pairs = [torch.cat((a, -a, b.minimum(a)), dim=1) for a, b in itertools.product(amax, others)]
    return torch.cat(pairs)


def neighbours(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    infinity = torch.full_like(x, torch.inf)
    return x, torch.nextafter(x, infinity), torch.nextafter(x, -infinity)


# Each with a global scale; for the denormals one that brings their block scales into E4M3's smallest binades.
RANGES: list[tuple[Callable[[int, int, Generator], Tensor], float]] = [
    (normal, 448 * 6 / 4.7),
    (normal, 1.0),
    (wide, 1.0),
    (denormal, 2.0**118),
    (zero_blocks, 37.0),
    (saturating, 1.0),
    (outlier, 0.1),
    (on_grid, 1.0),
    (ties, 1.0),
    (nan_and_inf, 3.0),
    (patterns, 1.0),
]


@pytest.mark.parametrize(("rows", "k"), SHAPES)
@pytest.mark.parametrize(("values", "global_scale"), RANGES)
def test_quantises_as_the_device(
    convert: Convert, rows: int, k: int, values: Callable[[int, int, Generator], Tensor], global_scale: float
) -> None:
    x = values(rows, k, Generator().manual_seed(31))
    assert_quantises_as_the_device(convert, x, global_scale)


@pytest.mark.parametrize("global_scale", [1.0, 0.3, 1 / 3, 37.0, 448 * 6 / 4.7, 2.0**-20])
def test_quantises_as_the_device_to_the_last_bit(convert: Convert, global_scale: float) -> None:
    assert_quantises_as_the_device(convert, near_ties(global_scale), global_scale)


def assert_quantises_as_the_device(convert: Convert, x: Tensor, global_scale: float) -> None:
    # The device reads the float32 that torch makes of the number.
    recipe = f"quantize:{x.shape[-1]}:{float(torch.tensor(global_scale, dtype=torch.float32)).hex()}"
    quantised, fp4, fp8 = convert([(recipe, x), ("float_to_fp4", x), ("float_to_fp8", x)])
    packed, scales = quantised[: x.numel() // 2], quantised[x.numel() // 2 :]
    for device in DEVICES:
        here = x.to(device)
        assert_same(nvfp4.encode_e2m1(here), fp4, f"E2M1 on {device}")
        assert_same(nvfp4.encode_e4m3(here), fp8, f"E4M3 on {device}")
        got = nvfp4.quantize(here, global_scale)
        assert_same(got.scales, scales, f"block scales on {device}")
        assert_same(got.packed, packed, f"codes on {device}")
        assert_same(nvfp4.block_scales(here, torch.tensor(global_scale)), scales, f"block scales alone on {device}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dequantises_on_cuda_as_on_the_cpu(convert: Convert, dtype: torch.dtype) -> None:
    x = torch.randn(3, 130, 96, generator=Generator().manual_seed(32))
    global_scale = torch.tensor([1.0, 0.3, 1 / 3])
    here, there = nvfp4.quantize(x, global_scale), nvfp4.quantize(x.cuda(), global_scale)
    assert torch.equal(there.scale_2.cpu(), here.scale_2)
    assert torch.equal(there.dequantize(dtype).cpu(), here.dequantize(dtype))
    assert torch.equal(here.to("cuda").dequantize(dtype), there.dequantize(dtype))
    buffer = nvfp4.swizzle(there.scales, fill=0x7F)
    assert torch.equal(buffer.cpu(), nvfp4.swizzle(here.scales, fill=0x7F))
    assert torch.equal(nvfp4.unswizzle(buffer, 130, 6), there.scales)


def test_never_waits_for_the_device(convert: Convert) -> None:
    x, global_scale = torch.randn(64, 256, device="cuda"), torch.full((), 2.0, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for scale in (2.0, global_scale):
            q = nvfp4.quantize(x, scale)
            q.dequantize()
            nvfp4.unswizzle(nvfp4.swizzle(q.scales), 64, 16)
            nvfp4.decode_e2m1(nvfp4.unpack(q.packed))
    finally:
        torch.cuda.set_sync_debug_mode(before)
