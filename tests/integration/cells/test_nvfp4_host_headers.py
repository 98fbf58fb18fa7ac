"""The codec against cuda_fp4.h and cuda_fp8.h, whose conversions a host compiler builds: bit for bit."""

import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sm120_cells import nvfp4

# Which distribution holds which header: cuda_fp4.h includes cuda_fp8.h and cuda_fp16.h, those the other two.
HEADERS = {
    "nvidia-cuda-runtime": "cuda_fp4.h",
    "nvidia-cuda-crt": "crt/host_defines.h",
    "nvidia-cuda-cccl": "nv/target",
}

Convert = Callable[[str, Tensor, torch.dtype], Tensor]


def include_folders() -> list[Path]:
    folders = []
    for name, header in HEADERS.items():
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            files = []
        found = sorted(str(file.locate()) for file in files if str(file).endswith(f"include/{header}"))
        if not found:
            pytest.fail(f"{header} is missing: install {', '.join(HEADERS)} (13.0) into this Python's environment")
        folders.append(Path(found[0].removesuffix(header)))
    return list(dict.fromkeys(folders))


@pytest.fixture(scope="module")
def convert(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.fail("no C++ compiler (c++, g++, clang++) on PATH: install one, on Debian and Ubuntu the package g++")
    folder = tmp_path_factory.mktemp("convert_host")
    program = folder / "convert_host"
    source = Path(__file__).with_name("convert_host.cpp")
    includes = [flag for path in include_folders() for flag in ("-isystem", str(path))]
    built = subprocess.run(
        [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", *includes, str(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        pytest.fail(f"{compiler} cannot compile {source.name}:\n{built.stderr[-4000:]}")

    def run(conversion: str, x: Tensor, result: torch.dtype) -> Tensor:
        before, after = folder / "in", folder / "out"
        before.write_bytes(x.contiguous().view(torch.uint8).numpy().tobytes())
        subprocess.run([str(program), conversion, str(before), str(after)], check=True)
        return torch.frombuffer(bytearray(after.read_bytes()), dtype=result)

    return run


def float32_patterns() -> Tensor:
    """Every upper half of a float32 with six lower halves: each sign, exponent, NaN and Inf, and, since values and ties
    of both formats fit the upper half, each of those with its two neighbours.
    """
    upper = torch.arange(0x10000, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (upper | lower).flatten().to(torch.uint32).view(torch.float32)


def random_patterns() -> Tensor:
    generator = np.random.default_rng(20)
    return torch.from_numpy(generator.integers(0, 1 << 32, 1 << 21, dtype=np.uint32).view(np.float32))


def random_near_the_formats() -> Tensor:
    """Random signs and mantissas with the exponents that E2M1 and E4M3 round in: 2^-13 to 2^10."""
    generator = np.random.default_rng(21)
    sign_and_mantissa = generator.integers(0, 1 << 32, 1 << 21, dtype=np.uint32) & np.uint32(0x807FFFFF)
    exponent = generator.integers(127 - 13, 127 + 11, 1 << 21, dtype=np.uint32) << np.uint32(23)
    return torch.from_numpy((sign_and_mantissa | exponent).view(np.float32))


def assert_same(got: Tensor, want: Tensor, x: Tensor) -> None:
    wrong = (got != want).nonzero()
    assert got.shape == want.shape
    assert not len(wrong), (
        f"{len(wrong)} differ, first: {float(x[wrong[0]])!r} gave {got[wrong[0]]} for {want[wrong[0]]}"
    )


FLOAT32 = pytest.mark.parametrize("inputs", [float32_patterns, random_patterns, random_near_the_formats])


@FLOAT32
def test_float32_to_fp4(convert: Convert, inputs: Callable[[], Tensor]) -> None:
    x = inputs()
    codes = nvfp4.encode_e2m1(x)
    assert_same(codes, convert("float_to_fp4", x, torch.uint8), x)
    assert_same(nvfp4.pack(codes), convert("float2_to_fp4x2", x, torch.uint8), x[::2])


@FLOAT32
def test_float32_to_fp8(convert: Convert, inputs: Callable[[], Tensor]) -> None:
    x = inputs()
    assert_same(nvfp4.encode_e4m3(x), convert("float_to_fp8", x, torch.uint8), x)


def test_float64(convert: Convert) -> None:
    near = torch.cat((float32_patterns(), random_near_the_formats())).double()
    infinity = torch.full_like(near, torch.inf)
    x = torch.cat((near, torch.nextafter(near, infinity), torch.nextafter(near, -infinity)))
    assert_same(nvfp4.encode_e2m1(x), convert("double_to_fp4", x, torch.uint8), x)
    # The header's conversion from double alone keeps the sign of a NaN: 0xFF where float, half and bfloat16 give 0x7F.
    theirs = convert("double_to_fp8", x, torch.uint8)
    assert set(theirs[x.isnan()].tolist()) == {0x7F, 0xFF}
    assert_same(nvfp4.encode_e4m3(x), theirs.masked_fill(x.isnan(), 0x7F), x)


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("bf16", torch.bfloat16)])
def test_every_value_of_two_bytes(convert: Convert, name: str, dtype: torch.dtype) -> None:
    x = torch.arange(0x10000, dtype=torch.int32).to(torch.uint16).view(dtype)
    assert_same(nvfp4.encode_e2m1(x), convert(f"{name}_to_fp4", x, torch.uint8), x)
    assert_same(nvfp4.encode_e4m3(x), convert(f"{name}_to_fp8", x, torch.uint8), x)


def test_every_code_and_byte_back_to_float(convert: Convert) -> None:
    codes, bytes_ = torch.arange(16, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8)
    fp4, fp8 = convert("fp4_to_float", codes, torch.float32), convert("fp8_to_float", bytes_, torch.float32)
    assert torch.equal(nvfp4.decode_e2m1(codes).view(torch.int32), fp4.view(torch.int32))
    ours = nvfp4.decode_e4m3(bytes_)
    assert torch.equal(ours.isnan(), fp8.isnan())
    number = ~fp8.isnan()
    assert torch.equal(ours[number].view(torch.int32), fp8[number].view(torch.int32))
    assert bytes_[~number].tolist() == [0x7F, 0xFF]
