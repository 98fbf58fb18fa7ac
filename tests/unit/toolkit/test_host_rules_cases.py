"""Edges of single rules, and how facts are read: visible cards, arch lists, versions, toolkits."""

from dataclasses import replace

import pytest
from tests.unit.toolkit import host_machines as machines
from tests.unit.toolkit import host_snapshots as snapshots
from tests.unit.toolkit.host_machines import GIB
from tests.unit.toolkit.host_snapshots import (
    KERNELS,
    both,
    disk,
    driver,
    env,
    gpu,
    host,
    library,
    memory,
    packages,
    relocked,
    tool,
    toolkits,
    torch,
    used_toolkit,
    variables,
)

from sm120.host.facts import Distribution, Facts, Library, Toolkit, Torch, Version2
from sm120.host.findings import Finding, Severity
from sm120.host.rules import RULES, environments, reading


def ask(rule: str, base: str, *changes: snapshots.Change) -> list[Finding]:
    return list(RULES[rule](both(*changes)(snapshots.facts_of(base))))


def severities(rule: str, base: str, *changes: snapshots.Change) -> list[str]:
    return [finding.severity.value for finding in ask(rule, base, *changes)]


# Visible cards.


@pytest.mark.parametrize(
    ("chosen", "order", "names", "missing"),
    [
        pytest.param(None, None, [0, 1, 2], (), id="all"),
        pytest.param("", None, [], (), id="none"),
        pytest.param("-1", None, [], (), id="minus-one"),
        pytest.param("0,1", "PCI_BUS_ID", [0, 1], (), id="numbers-by-slot"),
        pytest.param("0, 2", "PCI_BUS_ID", [0, 2], (), id="blanks"),
        pytest.param("2,0", "PCI_BUS_ID", [2, 0], (), id="in-that-order"),
        pytest.param("1,1", "PCI_BUS_ID", [1], (), id="twice"),
        pytest.param("0,9,1", "PCI_BUS_ID", [0], ("9", "1"), id="beyond"),
        pytest.param("GPU-5090", None, [], ("GPU-5090",), id="ambiguous-prefix"),
        pytest.param("GPU-3090", None, [0], (), id="prefix"),
        pytest.param("GPU-", None, [], ("GPU-",), id="every-uuid"),
        pytest.param("first", None, [], ("first",), id="a-word"),
        pytest.param("MIG-3090aaaa", None, [0, 1, 2], (), id="a-slice"),
    ],
)
def test_visible_cards(chosen: str | None, order: str | None, names: list[int], missing: tuple[str, ...]) -> None:
    facts = variables(CUDA_VISIBLE_DEVICES=chosen, CUDA_DEVICE_ORDER=order)(machines.mixed())
    seen = reading.selection(facts)
    assert [card.index for card in seen.gpus] == names
    assert seen.missing == missing


def test_numbers_among_mixed_cards_mean_nothing_without_an_order() -> None:
    seen = reading.selection(variables(CUDA_VISIBLE_DEVICES="0")(machines.mixed()))
    assert not seen.certain
    assert len(seen.gpus) == 3
    assert reading.selection(variables(CUDA_VISIBLE_DEVICES="1")(machines.servers(4))).gpus[0].index == 1


def test_lost_card_is_no_visible_card() -> None:
    facts = gpu(1, problem="GPU is lost")(machines.servers(4))
    assert [card.index for card in reading.selection(facts).gpus] == [0, 2, 3]


def test_mixed_cards_propose_the_new_ones_by_uuid_whatever_the_order() -> None:
    facts = machines.mixed(chosen=False)
    (one,) = RULES["cards-mixed"](facts)
    (other,) = RULES["cards-mixed"](replace(facts, gpus=facts.gpus[::-1]))
    assert one == other
    uuids = ",".join(card.uuid for card in facts.gpus[1:])
    assert one.cure == f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={uuids}"
    assert "1 card of 8.6, 2 cards of 12.0" in one.what
    assert "24.0 GiB" in one.why


def test_workstation_cards_go_before_a_larger_card_of_another_family() -> None:
    large = replace(machines.h200(), index=1, memory_total=300 * GIB)
    facts = machines.machine((machines.rtx_pro_6000(), large))
    (finding,) = RULES["cards-mixed"](facts)
    assert finding.cure is not None
    assert machines.rtx_pro_6000().uuid in finding.cure
    assert large.uuid not in finding.cure


# Which code runs where.


@pytest.mark.parametrize(
    ("entry", "on", "expected"),
    [
        ("sm_120", (12, 0), True),
        ("sm_120", (12, 1), True),
        ("sm_121", (12, 0), False),
        ("sm_120a", (12, 0), True),
        ("sm_120a", (12, 1), False),
        ("sm_120f", (12, 1), True),
        ("sm_100", (12, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("compute_90", (12, 0), True),
        ("compute_120", (9, 0), False),
        ("compute_120f", (12, 1), True),
        ("compute_100f", (12, 0), False),
        ("compute_120a", (12, 1), False),
    ],
)
def test_code_runs_on_its_own_family(entry: str, on: Version2, expected: bool) -> None:
    found = environments.target(entry)
    assert found is not None
    assert environments.runs(found, on) is expected


@pytest.mark.parametrize("entry", ["", "sm_", "sm_12", "sm_1200a", "120", "sm_120x", "sm_90 "])
def test_what_is_no_entry(entry: str) -> None:
    found = environments.target(entry)
    assert found is None or entry.strip() in {"sm_12", "sm_90"}


def test_ptx_of_an_older_family_is_worth_a_warning_per_card_kind() -> None:
    both_kinds = variables(CUDA_VISIBLE_DEVICES=None)
    assert severities("torch-arch-list", "mixed-chosen", both_kinds, torch(arch_list=("sm_86", "compute_86"))) == [
        "warn"
    ]
    assert severities("torch-arch-list", "mixed-chosen", both_kinds, torch(arch_list=("sm_90",))) == ["refuse"]
    assert severities("torch-arch-list", "rtx-5090-idle", torch(arch_list=())) == []  # not read
    assert severities("torch-arch-list", "rtx-5090-idle", torch(arch_list=None)) == []


# Versions.


@pytest.mark.parametrize(
    ("python", "cubin", "jit", "cuda", "expected"),
    [
        pytest.param("0.6.16", "0.6.16", "0.6.16+cu130", (13, 0), [], id="right"),
        pytest.param("0.6.16", "0.6.16", "0.6.16", (13, 0), [], id="no-tag"),
        pytest.param("0.6.7.post3", "0.6.7.post3", "0.6.7.post3+cu130", (13, 0), [], id="post-release"),
        pytest.param("0.6.7.post3", "0.6.7", "0.6.7.post3+cu130", (13, 0), ["refuse"], id="post-release-differs"),
        pytest.param("0.6.16", "0.6.16", "0.6.16+cu129", (13, 0), ["refuse"], id="other-major"),
        pytest.param("0.6.16", "0.6.16", "0.6.16+cu132", (13, 0), ["warn"], id="other-minor"),
        pytest.param("0.6.11", "0.6.11", "0.6.9+cu130", (13, 0), ["refuse"], id="older-modules"),
        pytest.param("0.6.14", "0.6.13", "0.6.14+cu130", (13, 0), ["refuse"], id="older-cubins"),
        pytest.param("0.0.0+unknown", "0.6.13", "0.6.14+cu130", (13, 0), [], id="source-build"),
    ],
)
def test_flashinfer_parts(python: str, cubin: str, jit: str, cuda: Version2, expected: list[str]) -> None:
    change = packages(flashinfer_python=python, flashinfer_cubin=cubin, flashinfer_jit_cache=jit)
    assert severities("flashinfer-versions", "jit-cache", change, torch(cuda=cuda)) == expected


@pytest.mark.parametrize(
    ("locked", "packaged", "torch_says", "cuda", "right"),
    [
        pytest.param("2.14.1", "2.14.1", "2.14.1+cu130", (13, 0), True, id="general-index"),
        pytest.param("2.14.1+cu130", "2.14.1+cu130", "2.14.1+cu130", (13, 0), True, id="own-index"),
        pytest.param("2.13.0+cpu", "2.13.0+cpu", "2.13.0+cpu", None, True, id="cpu"),
        pytest.param("2.14.1", "2.14.1+cpu", "2.14.1+cpu", None, False, id="cpu-instead"),
        pytest.param("2.14.1", "2.14.1", "2.14.1+cpu", None, False, id="cpu-by-its-own-word"),
        pytest.param("2.14.1+cu130", "2.14.1+cu129", "2.14.1+cu129", (12, 9), False, id="other-cuda"),
        pytest.param("2.14.1", "2.15.0", "2.15.0+cu132", (13, 2), False, id="other-version"),
        pytest.param("2.12.0.dev20260307+cu130", "2.12.0.dev20260307+cu130", "2.12.0.dev20260307+cu130", (13, 0), True,
                     id="nightly"),
        pytest.param("2.12.0.dev20260307+cu130", "2.12.0.dev20260308+cu130", "2.12.0.dev20260308+cu130", (13, 0), False,
                     id="other-nightly"),
    ],
)  # fmt: skip
def test_torch_as_locked(locked: str, packaged: str, torch_says: str, cuda: Version2 | None, right: bool) -> None:
    changes = (packages(torch=packaged), env(locked={"torch": locked}), torch(version=torch_says, cuda=cuda))
    assert severities("torch-replaced", "rtx-5090-idle", *changes) == ([] if right else ["refuse"])


def test_torch_that_is_gone_was_replaced_too() -> None:
    (finding,) = ask("torch-replaced", "rtx-5090-idle", packages(torch=None), env(torch=None))
    assert "has none" in finding.what


def test_bypass_is_read_as_upstream_reads_it() -> None:
    assert severities("version-check-bypassed", "jit-cache", variables(FLASHINFER_DISABLE_VERSION_CHECK="")) == []
    assert severities("version-check-bypassed", "jit-cache", variables(FLASHINFER_DISABLE_VERSION_CHECK="0")) == [
        "warn"
    ]
    assert severities("version-check-bypassed", "jit-cache", variables(SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="0")) == []
    assert severities("version-check-bypassed", "jit-cache", variables(SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1")) == [
        "warn"
    ]


# What the loader finds.


def test_libraries_for_several_cudas_count_as_one_choice() -> None:
    """torch-memory-saver ships cu12 and cu13 side by side, and an unnamed copy of cu12."""
    assert severities("cuda-major-mixed", "rtx-5090-idle") == []
    without = [lib for lib in machines.libraries() if "_cu13" not in lib.path]
    (finding,) = ask("cuda-major-mixed", "rtx-5090-idle", env(libraries=tuple(without)))
    assert "torch-memory-saver" in finding.what
    assert "libcudart.so.12" in finding.what


def test_packages_are_judged_by_what_they_load_not_by_their_names() -> None:
    named = env(libraries=(Library(path="a/b.so", distribution="nvidia-nothing-cu12", needed=("libcudart.so.13",)),))
    assert severities("cuda-major-mixed", "rtx-5090-idle", named) == []
    inside = env(libraries=(Library(path="a/b.so", distribution="cupy-cuda13x", needed=("libnvrtc.so.12",)),))
    assert severities("cuda-major-mixed", "rtx-5090-idle", inside) == ["warn"]


@pytest.mark.parametrize(
    ("distribution", "severity"),
    [("sgl-kernel", "refuse"), ("flashinfer-jit-cache", "refuse"), ("torch", "refuse"), (None, "refuse")],
)
def test_kernel_packages_have_to_load(distribution: str | None, severity: str) -> None:
    """What a server loads whole refuses; other packages may hold parts that nobody asks for."""

    def found(rule: str, owner: str | None) -> list[str]:
        present = Library(
            path="a/b.so",
            distribution=owner,
            needed=("libcudart.so.12",) if rule == "cuda-major-mixed" else ("libcudart.so.13",),
            unresolved_cuda=("libcudart.so.13",) if rule == "cuda-library-missing" else (),
            undefined_torch=("_ZN2at1xEv",) if rule == "torch-abi" else (),
        )
        return severities(rule, "rtx-5090-idle", env(libraries=(present,)))

    assert found("cuda-major-mixed", distribution) == [severity]
    assert found("cuda-library-missing", distribution) == [severity]
    assert found("torch-abi", distribution) == [severity]
    assert found("cuda-major-mixed", "cupy-cuda13x") == ["warn"]
    assert found("cuda-library-missing", "cupy-cuda13x") == ["note"]
    assert found("torch-abi", "torchmetrics-ext") == ["warn"]


@pytest.mark.parametrize(
    "soname", ["libcufft.so.12", "libcusparse.so.12", "libcudnn.so.9", "libnccl.so.2", "libcuda.so.1"]
)
def test_sonames_that_do_not_carry_the_cuda_major(soname: str) -> None:
    change = library(KERNELS, needed=(soname, "libc10.so"), unresolved_cuda=())
    assert severities("cuda-major-mixed", "rtx-5090-idle", change) == []


def test_the_forbidden_cure_is_named_and_not_proposed() -> None:
    (finding,) = ask("cuda-major-mixed", "kernels-for-cuda-12")
    assert "no cure" in finding.why
    assert finding.cure == "scripts/inv setup --stack stable"
    (adopted,) = ask("cuda-major-mixed", "hand-made", snapshots.CUDA_12_KERNELS)
    assert adopted.cure is not None
    assert "sglang-kernel for CUDA 13" in adopted.cure
    assert "ln " not in adopted.cure


def test_missing_library_of_another_cuda_is_told_once() -> None:
    assert severities("cuda-library-missing", "kernels-for-cuda-12") == []
    assert (
        severities("cuda-library-missing", "rtx-5090-idle", library(KERNELS, unresolved_cuda=("libcuda.so.1",))) == []
    )


def test_abi_finding_says_abi_not_architecture() -> None:
    (finding,) = ask("torch-abi", "abi-on-spark")
    assert snapshots.ABI_SYMBOL in finding.what
    assert "ABI" in finding.why
    assert "would change nothing" in finding.why


# Toolkits.


def test_builds_look_where_upstream_looks() -> None:
    named = machines.toolkit((13, 0), "CUDA_HOME")
    path = machines.toolkit((12, 9), "PATH")
    system = machines.toolkit((12, 8), "system", root="/usr/local/cuda")
    other = machines.toolkit((12, 6), "system")

    def chosen(*present: Toolkit, **settings: str) -> Toolkit | None:
        return reading.shell_toolkit(both(toolkits(*present), variables(**settings))(machines.fresh()))

    assert chosen(named, path, system, CUDA_HOME="/usr/local/cuda-13.0") == named
    assert chosen(path, system, CUDA_HOME="/nowhere") is None
    assert chosen(path, system) == path
    assert chosen(other, system) == system
    assert chosen(other) == other
    assert chosen(other, machines.toolkit((12, 4), "system")) is None
    assert chosen() is None


def test_own_cuda_home_goes_before_the_shell() -> None:
    facts = machines.system_cuda_12()
    assert reading.jit_toolkit(facts, facts.environments[0]) == facts.toolkits[0]
    assert reading.shell_toolkit(facts) == facts.toolkits[2]


@pytest.mark.parametrize(
    ("glibc", "cuda", "refused"),
    [
        ("2.39", (12, 8), False),
        ("2.41", (12, 9), True),
        ("2.41", (13, 0), False),
        ("2.41-6ubuntu1", (12, 8), True),
        ("2.42", (13, 0), True),
        ("2.42", (13, 1), True),
        ("2.42", (13, 2), False),
        ("2.43", (12, 9), True),
        ("2.5", (12, 8), False),
        (None, (12, 8), False),
        ("musl", (12, 8), False),
    ],
)
def test_glibc_and_cuda_headers(glibc: str | None, cuda: Version2, refused: bool) -> None:
    change = both(host(glibc=glibc), toolkits(machines.cuda_home(version=cuda)))
    assert severities("glibc-cuda-headers", "rtx-5090-idle", change) == (["refuse"] if refused else [])


@pytest.mark.parametrize(
    ("base", "nvcc", "expected"),
    [
        ("rtx-5090-idle", (12, 6), ["refuse"]),
        ("rtx-5090-idle", (12, 8), ["warn"]),
        ("rtx-5090-idle", (12, 9), []),
        ("dgx-spark", (12, 8), ["refuse"]),
        ("dgx-spark", (12, 9), []),
        ("h200", (12, 4), []),
        ("cpu-only", (12, 4), []),
    ],
)
def test_nvcc_for_the_cards_present(base: str, nvcc: Version2, expected: list[str]) -> None:
    assert severities("nvcc-too-old", base, toolkits(machines.cuda_home(version=nvcc))) == expected


def test_nvcc_12_8_is_enough_when_120a_is_asked_for() -> None:
    old = toolkits(machines.cuda_home(version=(12, 8)))
    asked = variables(FLASHINFER_CUDA_ARCH_LIST="12.0a")
    assert severities("nvcc-too-old", "rtx-5090-idle", old, asked) == []
    assert severities("arch-list-variable", "rtx-5090-idle", old, asked) == []
    family = variables(FLASHINFER_CUDA_ARCH_LIST="12.0f")
    assert severities("nvcc-too-old", "rtx-5090-idle", old, family) == ["warn"]
    (finding,) = ask("arch-list-variable", "rtx-5090-idle", old, family)
    assert "needs nvcc 12.9" in finding.what


@pytest.mark.parametrize(
    ("text", "base", "right"),
    [
        ("12.0", "rtx-5090-idle", True),
        ("12.0a", "rtx-5090-idle", True),
        ("12.0f", "rtx-5090-idle", True),
        ("9.0a 12.0f", "rtx-5090-idle", True),
        ("12.0f", "dgx-spark", True),
        ("12.1a", "dgx-spark", True),
        ("12.1a", "rtx-5090-idle", False),
        ("12.1f", "rtx-5090-idle", False),
        ("10.0f", "rtx-5090-idle", False),
        ("12.0", "dgx-spark", False),
        ("12.0a,12.1a", "rtx-5090-idle", False),
        ("sm_120", "rtx-5090-idle", False),
        ("12.0a  9.0a", "rtx-5090-idle", False),
        ("9.0a", "h200", True),
    ],
)
def test_arch_list_variable(text: str, base: str, right: bool) -> None:
    found = severities("arch-list-variable", base, variables(FLASHINFER_CUDA_ARCH_LIST=text))
    assert found == ([] if right else ["warn"])


def test_triton_ptxas_by_card_and_variable_by_triton_version() -> None:
    old = env(triton_ptxas=(12, 8))
    assert severities("triton-ptxas", "rtx-5090-idle", old) == []
    assert severities("triton-ptxas", "dgx-spark", old) == ["refuse"]
    assert severities("triton-ptxas", "dgx-spark", env(triton_ptxas=(12, 9))) == []
    assert severities("triton-ptxas", "dgx-spark", env(triton_ptxas=None)) == []
    (newer,) = ask("triton-ptxas", "dgx-spark", old)
    assert newer.cure is not None
    assert newer.cure.startswith("export TRITON_PTXAS_BLACKWELL_PATH=")
    (older,) = ask("triton-ptxas", "dgx-spark", old, packages(triton="3.5.1"))
    assert older.cure is not None
    assert older.cure.startswith("export TRITON_PTXAS_PATH=")
    assert "sm_121a" in older.why
    (helpless,) = ask("triton-ptxas", "dgx-spark", old, toolkits(machines.cuda_home(version=(12, 8))))
    assert helpless.cure == "scripts/inv setup --stack stable"


def test_cudart_of_the_distribution_lies_on_the_linkers_path() -> None:
    debian = replace(
        machines.toolkit((13, 0), "PATH", "CUDA_HOME", root="/usr/lib/nvidia-cuda-toolkit"),
        library_folder=None,
        cudart=(),
    )
    assert severities("cudart-unlinkable", "hand-made", toolkits(debian)) == []
    (folder,) = ask("cudart-unlinkable", "hand-made", used_toolkit(library_folder="lib"))
    assert "has no lib64" in folder.what
    (name,) = ask("cudart-unlinkable", "hand-made", used_toolkit(cudart=("libcudart.so.13",)))
    assert "has no unversioned libcudart.so; its lib64 holds libcudart.so.13" in name.what


def test_library_path_of_the_same_cuda_shadows_nothing() -> None:
    def found(version: Version2, **changes: object) -> list[str]:
        shadow = replace(machines.toolkit(version, "LD_LIBRARY_PATH"), **changes)  # type: ignore[arg-type]
        return severities("ld-library-path", "rtx-5090-idle", toolkits(shadow))

    assert found((13, 0)) == []
    assert found((13, 2)) == ["warn"]
    bare = {"nvcc": None, "headers": None}
    assert found((13, 0), **bare, cudart=("libcudart.so.13",)) == []
    assert found((13, 0), **bare, cudart=("libcudart.so.13.2.51",)) == ["warn"]
    assert found((13, 0), **bare, cudart=("libcudart.so.12",)) == ["warn"]
    assert found((13, 0), **bare, cudart=("libcudart.so",)) == []


# Drivers and cards.


@pytest.mark.parametrize(
    ("version", "cuda", "right"),
    [
        ("570.86.10", (12, 8), False),
        ("575.57.08", None, False),
        ("580.65.06", None, True),
        ("580.65.06", (13, 0), True),
        ("550.127.05", (13, 0), True),  # a compatibility package raises what an older kernel module runs
        (None, None, True),  # unknown
        ("WSL", None, True),
    ],
)
def test_driver_for_cuda_13(version: str | None, cuda: Version2 | None, right: bool) -> None:
    found = severities("driver-below-cuda13", "rtx-5090-idle", driver(version=version, cuda=cuda))
    assert found == ([] if right else ["refuse"])


def test_driver_below_580_serves_a_cuda_12_set() -> None:
    change = both(
        torch(version="2.9.1+cu128", cuda=(12, 8)),
        packages(cuda_python="12.9.0", cuda_bindings="12.9.0"),
        driver(version="570.86.10", cuda=(12, 8)),
    )
    assert severities("driver-below-cuda13", "rtx-5090-idle", change) == []
    with_13 = both(change, packages(cuda_bindings="13.0.1"))
    (finding,) = ask("driver-below-cuda13", "rtx-5090-idle", with_13)
    assert "cuda-bindings 13.0.1" in finding.what


def test_each_driver_trouble_is_told_once() -> None:
    names = [name for name in RULES if name.startswith("driver-")]

    def told(base: str, *changes: snapshots.Change) -> list[str]:
        facts = both(snapshots.no_cards, *changes)(snapshots.facts_of(base))
        return [name for name in names if list(RULES[name](facts))]

    assert told("rtx-5090-idle", driver(module="proprietary", error="Unknown Error")) == ["driver-kernel-module"]
    assert told("rtx-5090-idle", driver(module="proprietary", error="Unknown Error", pci_devices=())) == [
        "driver-unusable"
    ]
    assert told("rtx-5090-idle", driver(error="Driver/library version mismatch")) == ["driver-library-mismatch"]
    assert told("container", driver(module="proprietary", device_nodes=())) == ["driver-unusable"]


def test_idle_card_may_sleep_on_a_slow_link() -> None:
    slow = gpu(pcie_generation=1, pcie_generation_max=5)
    assert severities("pcie-generation", "rtx-5090-idle", slow) == []
    assert severities("pcie-generation", "rtx-5090-at-work", slow) == ["warn"]
    for idle in ({"performance_state": 8}, {"clock_sm": 210}, {"processes": 0}, {"performance_state": None}):
        assert severities("pcie-generation", "rtx-5090-at-work", slow, gpu(**idle)) == [], idle


def test_gb10_has_no_pcie_link_that_means_anything() -> None:
    facts = snapshots.facts_of("dgx-spark")
    assert facts.gpus[0].pcie_width == 1
    assert [list(RULES[name](facts)) for name in ("pcie-width", "pcie-generation", "pcie-slot")] == [[], [], []]


@pytest.mark.parametrize(
    "reasons", [(), ("gpu_idle",), ("sw_power_cap",), ("applications_clocks_setting", "sync_boost")]
)
def test_a_healthy_card_has_reasons_too(reasons: tuple[str, ...]) -> None:
    assert severities("gpu-throttled", "rtx-5090-at-work", gpu(throttle_reasons=reasons)) == []


def test_a_power_limit_as_by_default_is_none() -> None:
    assert severities("power-limit", "rtx-5090-idle", gpu(power_limit=574.9)) == []
    assert severities("power-limit", "rtx-5090-idle", gpu(power_limit=600.0)) == []
    assert severities("power-limit", "rtx-5090-idle", gpu(power_limit=400.0)) == ["note"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"NCCL_P2P_DISABLE": "0"}, []),
        ({"NCCL_P2P_DISABLE": "1"}, ["note"]),
        ({"NCCL_P2P_LEVEL": "0"}, ["note"]),  # a level, not a switch: 0 is LOC
        ({"NCCL_SHM_DISABLE": "1"}, ["note"]),
        ({"NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1"}, ["warn"]),
        ({"NCCL_DEBUG": "INFO"}, []),
    ],
)
def test_nccl_settings(settings: dict[str, str], expected: list[str]) -> None:
    assert severities("nccl-settings", "rtx-pro-6000-x4", variables(**settings)) == expected
    assert severities("nccl-settings", "rtx-5090-idle", variables(**settings)) == []  # one card


def test_two_cards_are_several() -> None:
    assert severities("nccl-settings", "container", variables(NCCL_P2P_LEVEL="SYS")) == ["note"]
    assert severities("expandable-segments", "container", variables(PYTORCH_ALLOC_CONF="expandable_segments:True")) == [
        "warn"
    ]
    assert severities("display-card", "container", gpu(1, display_active=True)) == ["note"]
    assert severities("display-card", "rtx-pro-6000-display") == []
    assert severities("iommu-translated", "container", host(iommu="on")) == ["warn"]
    assert severities("iommu-translated", "rtx-5090-idle", host(iommu="on")) == []


def test_one_closed_direction_closes_a_pair() -> None:
    facts = machines.servers(4)
    first = replace(facts.pairs[0], read=None, write="disabled_by_regkey")
    (finding,) = RULES["peer-access"](replace(facts, pairs=(first, *facts.pairs[1:])))
    assert "1 of 6 pairs" in finding.what
    assert "disabled_by_regkey" in finding.what
    unknown = tuple(replace(pair, read=None, write=None) for pair in facts.pairs)
    assert list(RULES["peer-access"](replace(facts, pairs=unknown))) == []


def test_expandable_segments_matter_between_cards_only() -> None:
    on = variables(PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert severities("expandable-segments", "rtx-pro-6000-x4", on) == ["warn"]
    assert severities("expandable-segments", "rtx-5090-idle", on) == []
    off = variables(PYTORCH_ALLOC_CONF="expandable_segments:False")
    assert severities("expandable-segments", "rtx-pro-6000-x4", off) == []


# Memory and folders.


def test_unified_memory_is_judged_by_what_is_available() -> None:
    (finding,) = ask("unified-memory", "dgx-spark")
    assert finding.severity is Severity.NOTE
    assert "92.0 GiB are available" in finding.what
    assert "page cache" in finding.what
    assert severities("unified-memory", "dgx-spark", memory(free=60 * GIB, available=20 * GIB)) == ["warn"]


def test_the_tightest_limit_counts() -> None:
    (finding,) = ask("host-memory", "container", memory(cgroup_limit=8 * GIB))
    assert "8.0 GiB" in finding.what
    assert "container" in finding.what
    assert severities("host-memory", "container", memory(cgroup_limit=64 * GIB)) == []
    assert severities("host-memory", "cpu-only", memory(total=2 * GIB)) == []


def test_disk_space_depends_on_what_is_still_to_come() -> None:
    assert severities("disk-space", "fresh", disk("state", free=10 * GIB)) == ["warn"]
    assert severities("disk-space", "rtx-5090-idle", disk("state", free=10 * GIB)) == []
    assert severities("disk-space", "cpu-only", disk("state", free=6 * GIB)) == []
    assert severities("disk-space", "cpu-only", disk("state", free=None)) == []


def test_what_a_closed_folder_costs() -> None:
    (own,) = ask("folder-not-writable", "rtx-5090-idle", disk("temporary", writable=False))
    assert own.why == "Nothing can be installed or recorded."
    assert own.cure == "export TMPDIR=FOLDER, with a folder that you may write to"
    (cache,) = ask("folder-not-writable", "rtx-5090-idle", disk("triton", writable=False))
    assert "state folder" in cache.why
    assert cache.cure == f". {machines.STATE}/activate/stable.sh"
    (fresh,) = ask("folder-not-writable", "fresh", disk("triton", writable=False))
    assert fresh.cure == "source the activation script that setup writes"


def test_models_may_lie_on_a_file_server() -> None:
    assert (
        severities("cache-on-network", "rtx-pro-6000-x8", disk("huggingface", filesystem="nfs4", mount="/models")) == []
    )
    assert severities("folder-not-writable", "rtx-pro-6000-x8", disk("huggingface", writable=False)) == []


# DeepGEMM.


@pytest.mark.parametrize(
    ("base", "version", "setting", "expected"),
    [
        ("rtx-5090-idle", "0.5.12.post1", None, ["warn"]),
        ("rtx-5090-idle", "0.5.12.post1", "1", ["warn"]),
        ("rtx-5090-idle", "0.5.12.post1", "0", []),
        ("rtx-5090-idle", "0.5.12.post1", "false", []),
        ("rtx-5090-idle", "0.5.13.post1", None, []),
        ("rtx-5090-idle", "0.5.23", "1", []),
        ("dgx-spark", "0.5.20", None, ["warn"]),
        ("dgx-spark", "0.5.22", None, []),
        ("h200", "0.5.9", None, []),
    ],
)
def test_deepgemm_by_version_and_card(base: str, version: str, setting: str | None, expected: list[str]) -> None:
    change = both(packages(sglang=version), relocked, variables(SGLANG_ENABLE_JIT_DEEPGEMM=setting))
    assert severities("deepgemm", base, change) == expected


@pytest.mark.parametrize(
    ("kernel", "held"),
    [(("sgl-kernel", "0.3.21"), True), (("sglang-kernel", "0.4.1"), True), (("sglang-kernel", "0.4.3"), False)],
)
def test_deepgemm_came_inside_the_kernel_package(kernel: tuple[str, str], held: bool) -> None:
    present = (Distribution(name="sglang", version="0.5.9"), Distribution(name=kernel[0], version=kernel[1]))
    assert bool(ask("deepgemm", "rtx-5090-idle", env(distributions=present))) is held


def test_rules_need_no_cards_and_no_environment() -> None:
    facts = machines.cpu_only()
    empty: Facts = replace(facts, environments=(), toolkits=(), disks=(), tools=(), variables={}, limits={})
    assert [finding.id for rule in RULES.values() for finding in rule(empty)] == ["gpu-none"]


def test_a_compiler_that_is_named_need_not_be_on_path() -> None:
    gone = tool("g++", path=None)
    assert severities("compiler-missing", "rtx-5090-idle", gone) == ["warn"]
    assert severities("compiler-missing", "cpu-only", gone) == ["note"]
    assert severities("compiler-missing", "rtx-5090-idle", gone, variables(CXX="/usr/local/gcc/bin/g++")) == []


def test_cpu_build_where_it_belongs() -> None:
    """The cpu stack on a machine with a card is no fault; kernel packages without CUDA torch are."""
    cpu = replace(machines.machine((machines.rtx_5090(),)), environments=(machines.cpu_environment(),))
    assert list(RULES["torch-cpu-build"](cpu)) == []
    plain = Torch(version="2.14.1+cpu", arch_list=())
    assert severities("torch-cpu-build", "hand-made", env(torch=plain, locked={})) == ["refuse"]
    assert severities("torch-cpu-build", "hand-made", env(torch=plain, locked={"torch": "2.14.1+cpu"})) == []


def test_number_without_end_is_no_version() -> None:
    assert reading.parsed("1" * 5000) is None
