"""What runs where: the tables of the CUDA programming guide, pitfall B10, and what follows for a whole library."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm120.build.audit.model import Arch, Capability, Code, Fp4, LibraryFacts, Runs
from sm120.build.audit.rules import best, fp4_products, is_loaded, judge, runs

PRODUCT = "cutlass_scaled_fp4_mm"
ARCHS = st.builds(Arch, st.integers(5, 15), st.integers(0, 9), st.sampled_from(["", "a", "f"]))
DEVICES = st.tuples(st.integers(5, 15), st.integers(0, 9))


def arch(text: str) -> Arch:
    found = Arch.parse(text)
    assert found is not None
    return found


def library(*codes: str, **facts: object) -> LibraryFacts:
    """``sm_120a`` is a cubin, ``compute_90`` is PTX."""
    made = tuple(
        Code(arch=arch(text), kind="ptx" if text.startswith("compute") else "cubin", count=1, size=1) for text in codes
    )
    return LibraryFacts(path="x.so", codes=made, machine="x86_64", **facts)  # type: ignore[arg-type] # the test's own


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sm_75", Arch(7, 5)),
        ("sm_90a", Arch(9, 0, "a")),
        ("sm_100f", Arch(10, 0, "f")),
        ("sm_103a", Arch(10, 3, "a")),
        ("sm_120", Arch(12, 0)),
        ("sm_120f", Arch(12, 0, "f")),
        ("compute_121a", Arch(12, 1, "a")),
        *((text, None) for text in ("sm_120b", "120a", "sm_", "sm_1", "sm_120aa", "sm_120a ", "SM_120", "", "sm_12.0")),
    ],
)
def test_architectures_are_parsed_whole(text: str, expected: Arch | None) -> None:
    assert Arch.parse(text) == expected


@given(ARCHS)
def test_an_architecture_survives_its_own_name(one: Arch) -> None:
    assert Arch.parse(f"sm_{one}") == one
    assert one.number == int(str(one).rstrip("af"))


N, E, A, F, L = Runs.NO, Runs.EXACT, Runs.ARCH, Runs.FAMILY, Runs.LOWER
DEVICES_SHOWN: tuple[Capability, ...] = ((8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (12, 8))
TABLE: Mapping[str, tuple[Runs, ...]] = {
    "sm_80": (E, L, N, N, N, N, N, N, N),
    "sm_86": (N, E, N, N, N, N, N, N, N),
    "sm_90": (N, N, E, N, N, N, N, N, N),
    "sm_90a": (N, N, A, N, N, N, N, N, N),
    "sm_100": (N, N, N, E, L, N, N, N, N),
    "sm_100a": (N, N, N, A, N, N, N, N, N),
    "sm_100f": (N, N, N, F, F, N, N, N, N),
    "sm_103f": (N, N, N, N, F, N, N, N, N),
    "sm_110f": (N, N, N, N, N, F, N, N, N),
    "sm_120": (N, N, N, N, N, N, E, L, L),
    "sm_120a": (N, N, N, N, N, N, A, N, N),
    "sm_120f": (N, N, N, N, N, N, F, F, N),
    "sm_121": (N, N, N, N, N, N, N, E, L),
    "sm_121a": (N, N, N, N, N, N, N, A, N),
    "sm_121f": (N, N, N, N, N, N, N, F, N),
}


@pytest.mark.parametrize("text", TABLE)
def test_cubins(text: str) -> None:
    assert tuple(runs(arch(text), "cubin", device) for device in DEVICES_SHOWN) == TABLE[text]


P, Q = Runs.PTX_ONLY, Runs.PTX_ARCH
PTX: Mapping[str, tuple[Runs, ...]] = {
    "compute_80": (P, P, P, P, P, P, P, P, P),
    "compute_90": (N, N, P, P, P, P, P, P, P),
    "compute_90a": (N, N, Q, N, N, N, N, N, N),
    "compute_100f": (N, N, N, Q, Q, N, N, N, N),
    "compute_120": (N, N, N, N, N, N, P, P, P),
    "compute_120a": (N, N, N, N, N, N, Q, N, N),
    "compute_120f": (N, N, N, N, N, N, Q, Q, N),
    "compute_121": (N, N, N, N, N, N, N, P, P),
}


@pytest.mark.parametrize("text", PTX)
def test_ptx(text: str) -> None:
    assert tuple(runs(arch(text), "ptx", device) for device in DEVICES_SHOWN) == PTX[text]


@given(ARCHS, st.sampled_from(["cubin", "ptx"]), DEVICES)
def test_no_code_runs_on_an_older_device_and_no_cubin_on_another_major(
    one: Arch, kind: str, device: Capability
) -> None:
    how = runs(one, kind, device)
    if device < (one.major, one.minor):
        assert how is Runs.NO
    if kind == "cubin" and device[0] != one.major:
        assert how is Runs.NO
    if one.suffix == "a":
        assert (how is not Runs.NO) == (device == (one.major, one.minor))
    if device == (one.major, one.minor):
        assert how is not Runs.NO


@given(st.lists(st.tuples(ARCHS, st.sampled_from(["cubin", "ptx"]))), DEVICES)
def test_the_best_is_one_of_them_and_more_code_never_runs_worse(
    codes: list[tuple[Arch, str]], device: Capability
) -> None:
    found = best(codes, device)
    assert found in {Runs.NO, *(runs(one, kind, device) for one, kind in codes)}
    for count in range(len(codes)):
        if best(codes[:count], device) is not Runs.NO:
            assert found is not Runs.NO


def test_a_cubin_is_taken_before_ptx() -> None:
    assert best([(arch("sm_120"), "ptx"), (arch("sm_120f"), "cubin")], (12, 1)) is Runs.FAMILY


@pytest.mark.parametrize(
    ("operator", "is_product"),
    [
        ("cutlass_scaled_fp4_mm", True),
        ("cutlass_fp4_group_mm", True),
        ("fp4_gemm", True),
        ("mm_fp4", True),
        ("fp4_tile_mm", True),
        ("cutlass_mxfp4_moe_mm", True),
        ("nvfp4_gemm", True),
        ("scaled_fp4_quant", False),
        ("silu_and_mul_scaled_fp4_experts_quant", False),
        ("nvfp4_quant_and_per_token_scale", False),
        ("mxfp4_dequantize_host", False),
        ("fp4_marlin_gemm", False),
        ("fp8_scaled_mm", False),
        ("cutlass_w4a8_moe_mm", False),
        ("common", False),
    ],
)
def test_which_operators_multiply_fp4(operator: str, is_product: bool) -> None:
    assert bool(fp4_products([operator])) is is_product


def test_fp4_by_what_the_code_holds() -> None:
    bound = library("sm_120a", "sm_120", "sm_90", operators=(PRODUCT,), omma={arch("sm_120a"): 640, arch("sm_120"): 0})
    found = judge(bound, [(12, 0), (12, 1), (9, 0), (10, 0)])
    assert (found[12, 0].runs, found[12, 0].fp4) == (Runs.EXACT, Fp4.NATIVE)
    assert "sm_120, sm_120a" in found[12, 0].reason
    assert "640 OMMA" in found[12, 0].reason
    # On 12.1 only the plain code runs, and the instruction is not in that.
    assert (found[12, 1].runs, found[12, 1].fp4) == (Runs.LOWER, Fp4.UNUSABLE)
    assert PRODUCT in found[12, 1].reason
    # Other devices have other instructions, for which nobody looked.
    assert (found[9, 0].runs, found[9, 0].fp4) == (Runs.EXACT, Fp4.UNKNOWN)
    assert (found[10, 0].runs, found[10, 0].fp4) == (Runs.NO, Fp4.NONE)
    assert found[10, 0].reason == "it holds sm_90, sm_120, sm_120a only"


def test_not_looked_at_is_not_passed() -> None:
    assert judge(library("sm_120a", operators=(PRODUCT,)), [(12, 0)])[12, 0].fp4 is Fp4.UNKNOWN
    assert judge(library("sm_120a", operators=("rmsnorm",)), [(12, 0)])[12, 0].fp4 is Fp4.NOT_BOUND


def test_ptx_alone_loads_and_has_no_fp4() -> None:
    found = judge(library("compute_90", operators=(PRODUCT,), omma={}), [(12, 0)])[12, 0]
    assert (found.runs, found.fp4) == (Runs.PTX_ONLY, Fp4.UNUSABLE)
    assert found.reason == "compute_90; loads, no FP4"
    own = judge(library("compute_120a", operators=(PRODUCT,), omma={}), [(12, 0)])[12, 0]
    assert (own.runs, own.fp4) == (Runs.PTX_ARCH, Fp4.UNKNOWN)


def test_a_library_without_code_and_one_that_cannot_be_read() -> None:
    assert judge(library(), [(12, 0)])[12, 0].runs is Runs.HOST
    broken = judge(library("sm_120a", problem="cut short"), [(12, 0)])[12, 0]
    assert (broken.runs, broken.fp4, broken.reason) == (Runs.UNKNOWN, Fp4.NONE, "cut short")
    assert not broken.runs.loads


def test_parts_that_lack_the_architecture_are_counted() -> None:
    ours, hopper = ((arch("sm_90a"), "cubin"), (arch("sm_120a"), "cubin")), ((arch("sm_90a"), "cubin"),)
    found = judge(library("sm_90a", "sm_120a", units={ours: 3, hopper: 2}), [(12, 0), (9, 0)])
    assert found[12, 0].covered == (3, 5)
    assert "in 3 of 5 parts" in found[12, 0].reason
    assert found[9, 0].covered == (5, 5)
    ptx = ((arch("compute_90"), "ptx"),)
    found = judge(library("sm_120a", "compute_90", units={ours: 3, ptx: 2}), [(12, 0), (12, 1)])
    assert (found[12, 0].runs, found[12, 0].covered) == (Runs.ARCH, (3, 5))
    assert (found[12, 1].runs, found[12, 1].covered) == (Runs.PTX_ONLY, (2, 5))


def test_of_two_twins_the_package_loads_one() -> None:
    paths = [
        "sgl_kernel/sm90/common_ops.abi3.so",
        "sgl_kernel/sm100/common_ops.abi3.so",
        "sgl_kernel/flash_ops.abi3.so",
    ]
    assert [is_loaded(path, paths, (12, 0)) for path in paths] == [False, True, True]
    assert [is_loaded(path, paths, (9, 0)) for path in paths] == [True, False, True]
    assert is_loaded(paths[0], paths[:1], (12, 0)), "without a twin there is nothing else to load"
