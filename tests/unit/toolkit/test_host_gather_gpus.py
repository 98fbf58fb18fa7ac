"""What NVML says of cards, told by a stand-in: a full card, a card that answers little, no driver at all."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sm120.host import gather
from sm120.host.facts import Pair
from sm120.host.gather import gpus

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (a@b)  Sun Jul 27\nGCC 13\n"
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Wed Jan 22 10:00:00 UTC 2026\n"


class NVMLError(Exception):
    def __init__(self, text: str = "Not Supported") -> None:
        super().__init__(text)


class Fake:
    """A pynvml whose functions answer from a table: name → answer for each handle, or one for all."""

    NVMLError = NVMLError

    def __init__(self, answers: Mapping[str, Any], cards: int = 1, start: Exception | None = None) -> None:
        self._answers = {"nvmlDeviceGetCount": cards, "nvmlDeviceGetHandleByIndex": lambda index: index, **answers}
        self._start = start
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        if self._start is not None:
            raise self._start
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's name
        self.open -= 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            if name not in self._answers:
                raise NVMLError
            answer = self._answers[name]
            if callable(answer):
                return answer(*args)
            return answer[args[0]] if isinstance(answer, tuple) else answer

        return call


def pci(address: str) -> SimpleNamespace:
    return SimpleNamespace(busId=address)


FULL: dict[str, Any] = {
    "nvmlSystemGetDriverVersion": "580.65.06",
    "nvmlSystemGetCudaDriverVersion_v2": 13000,
    "nvmlDeviceGetUUID": "GPU-aa",
    "nvmlDeviceGetName": b"NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "nvmlDeviceGetPciInfo": pci("00000000:C1:00.0"),
    "nvmlDeviceGetCudaComputeCapability": lambda handle: (12, 0),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=97887 * 2**20, used=512 * 2**20),
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetClockInfo": lambda handle, clock: {1: 180, 2: 405}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda handle, clock: {1: 3090}[clock],
    "nvmlDeviceGetPowerUsage": 61_500,
    "nvmlDeviceGetEnforcedPowerLimit": 450_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 600_000,
    "nvmlDeviceGetTemperature": lambda handle, sensor: {0: 41}[sensor],
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4 | 0x40 | 1 << 40,
    "nvmlDeviceGetPerformanceState": 8,
    "nvmlDeviceGetEccMode": lambda handle: [1, 0],
    "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: {(1, 0): 3}[kind, counter],
    "nvmlDeviceGetDisplayActive": 0,
    "nvmlDeviceGetMigMode": lambda handle: [0, 1],
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeRunningProcesses": lambda handle: [object(), object()],
}


def machine(root: Path, *, version: str = OPEN, node: str = "1") -> Path:
    for name, text in {
        "proc/driver/nvidia/version": version,
        "sys/bus/pci/devices/0000:c1:00.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:c1:00.0/class": "0x030000\n",
        "sys/bus/pci/devices/0000:c1:00.0/device": "0x2bb1\n",
        "sys/bus/pci/devices/0000:c1:00.0/numa_node": f"{node}\n",
        "sys/bus/pci/devices/0000:c1:00.1/vendor": "0x10de\n",  # the card's audio function
        "sys/bus/pci/devices/0000:c1:00.1/class": "0x040300\n",
        "sys/bus/pci/devices/0000:00:02.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:00:02.0/class": "0x030000\n",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "dev/nvidia-caps/nvidia-cap1": "",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_card_that_answers_everything(tmp_path: Path) -> None:
    nvml = Fake(FULL)
    found = gpus.cards(nvml, machine(tmp_path))
    (gpu,) = found.gpus
    assert gpu.name == "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    assert (gpu.index, gpu.uuid, gpu.bus_id) == (0, "GPU-aa", "00000000:C1:00.0")
    assert gpu.compute_capability == (12, 0)
    assert (gpu.memory_total, gpu.memory_used) == (97887 * 2**20, 512 * 2**20)
    assert (gpu.pcie_generation, gpu.pcie_generation_max, gpu.pcie_generation_device_max) == (1, 4, 5)
    assert (gpu.pcie_width, gpu.pcie_width_max) == (8, 16)
    assert (gpu.clock_sm, gpu.clock_sm_max, gpu.clock_memory) == (180, 3090, 405)
    assert (gpu.power_draw, gpu.power_limit, gpu.power_limit_default) == (61.5, 450.0, 600.0)
    assert gpu.temperature == 41
    assert gpu.throttle_reasons == ("gpu_idle", "sw_power_cap", "hw_thermal_slowdown", "bit_0x10000000000")
    assert gpu.performance_state == 8
    assert (gpu.ecc, gpu.ecc_errors) == (True, 3)
    assert (gpu.display_active, gpu.mig, gpu.persistence) == (False, False, True)
    assert gpu.numa_node == 1
    assert gpu.processes == 2
    assert gpu.problem is None
    assert found.pairs == ()
    assert nvml.open == 0, "NVML is closed again"


def test_driver(tmp_path: Path) -> None:
    driver = gpus.cards(Fake(FULL), machine(tmp_path, version=OPEN.replace("580.65.06", "580.82.07"))).driver
    assert (driver.version, driver.cuda, driver.module, driver.error) == ("580.65.06", (13, 0), "open", None)
    assert driver.device_nodes == ("/dev/nvidia0", "/dev/nvidiactl")
    assert driver.pci_devices == ("0000:c1:00.0 10de:2bb1",)


@pytest.mark.parametrize("missing", sorted(name for name in FULL if name.startswith("nvmlDevice")))
def test_what_a_card_does_not_support_is_unknown_and_the_rest_is_read(tmp_path: Path, missing: str) -> None:
    nvml = Fake({name: answer for name, answer in FULL.items() if name != missing})
    (gpu,) = gpus.cards(nvml, machine(tmp_path)).gpus
    (whole,) = gpus.cards(Fake(FULL), machine(tmp_path)).gpus
    lost = [name for name in vars(whole) if getattr(gpu, name) != getattr(whole, name)]
    assert lost
    assert all(getattr(gpu, name) in {None, "", "unknown", ()} for name in lost)


def test_a_card_that_answers_nothing(tmp_path: Path) -> None:
    found = gpus.cards(Fake({}), tmp_path)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.memory_total, gpu.processes, gpu.numa_node) == ("unknown", None, None, None)
    assert found.driver.version is None


def test_unified_memory_has_no_size_of_its_own(tmp_path: Path) -> None:
    answers = {**FULL, "nvmlDeviceGetName": "NVIDIA GB10"}
    del answers["nvmlDeviceGetMemoryInfo"]
    (gpu,) = gpus.cards(Fake(answers), tmp_path).gpus
    assert (gpu.memory_total, gpu.memory_used) == (None, None)


def test_what_the_driver_reserves_does_not_count_as_used(tmp_path: Path) -> None:
    """NVML's first memory call counts it, its second does not; older drivers have the first alone."""

    def both(handle: int, version: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(total=100, used=0 if version else 7)

    def old(handle: int, version: int | None = None) -> SimpleNamespace:
        if version:
            raise NVMLError("Function Not Found")
        return both(handle)

    for answer, used in ((both, 0), (old, 7)):
        (gpu,) = gpus.cards(Fake({**FULL, "nvmlDeviceGetMemoryInfo": answer}), tmp_path).gpus
        assert (gpu.memory_total, gpu.memory_used) == (100, used)


def test_older_drivers_spell_throttling_and_newer_ones_temperature_differently(tmp_path: Path) -> None:
    answers = {**FULL, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x8, "nvmlDeviceGetTemperatureV": lambda h, s: 55}
    del answers["nvmlDeviceGetCurrentClocksEventReasons"], answers["nvmlDeviceGetTemperature"]
    (gpu,) = gpus.cards(Fake(answers), tmp_path).gpus
    assert gpu.throttle_reasons == ("hw_slowdown",)
    assert gpu.temperature == 55


@pytest.mark.parametrize(("text", "node"), [("0", 0), ("-1", None), ("rubbish", None)])
def test_numa_node_of_the_slot(tmp_path: Path, text: str, node: int | None) -> None:
    (gpu,) = gpus.cards(Fake(FULL), machine(tmp_path, node=text)).gpus
    assert gpu.numa_node == node


def test_unknown_performance_state(tmp_path: Path) -> None:
    (gpu,) = gpus.cards(Fake({**FULL, "nvmlDeviceGetPerformanceState": 32}), tmp_path).gpus
    assert gpu.performance_state is None


def test_a_lost_card_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise NVMLError("GPU is lost")
        return index

    found = gpus.cards(Fake({**FULL, "nvmlDeviceGetHandleByIndex": handle}, cards=3), tmp_path)
    assert [gpu.problem for gpu in found.gpus] == [None, "GPU is lost", None]
    assert [gpu.index for gpu in found.gpus] == [0, 1, 2]
    assert [(pair.a, pair.b) for pair in found.pairs] == [(0, 2)]


def pairs(answers: Mapping[str, Any], cards: int = 2, root: Path = Path("/nowhere")) -> tuple[Pair, ...]:
    addresses = tuple(pci(f"00000000:{i:02X}:00.0") for i in range(0xA0, 0xA0 + cards))
    return gpus.cards(Fake({**FULL, "nvmlDeviceGetPciInfo": addresses, **answers}, cards=cards), root).pairs


@pytest.mark.parametrize(
    ("level", "path"),
    [(0, "INTERNAL"), (10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (60, "level 60")],
)
def test_path_between_two_cards(level: int, path: str) -> None:
    (pair,) = pairs({"nvmlDeviceGetTopologyCommonAncestor": level})
    assert (pair.a, pair.b, pair.path) == (0, 1, path)


def test_peer_access_by_direction() -> None:
    (pair,) = pairs({"nvmlDeviceGetP2PStatus": lambda a, b, index: {0: 0, 1: 4}[index]})
    assert (pair.path, pair.read, pair.write) == (None, "ok", "disabled_by_regkey")
    (pair,) = pairs({"nvmlDeviceGetP2PStatus": lambda a, b, index: {0: 1, 1: 9}[index]})
    assert (pair.read, pair.write) == ("chipset_not_supported", "status 9")
    (pair,) = pairs({})
    assert (pair.read, pair.write) == (None, None)


def test_every_pair_once() -> None:
    found = pairs({"nvmlDeviceGetTopologyCommonAncestor": lambda a, b: 10 if a // 2 == b // 2 else 50}, cards=4)
    assert [(p.a, p.b) for p in found] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert [p.path for p in found] == ["PIX", "SYS", "SYS", "SYS", "SYS", "PIX"]


def test_links_of_nvlink_are_counted_for_the_peer_they_lead_to() -> None:
    def state(handle: int, link: int) -> int:
        if link >= 6:
            raise NVMLError("Invalid Argument")
        return int(link != 5)

    def remote(handle: int, link: int) -> SimpleNamespace:
        return pci("00000000:a1:00.0" if link < 4 else "00000000:A2:00.0")

    answers = {
        "nvmlDeviceGetNvLinkState": state,
        "nvmlDeviceGetNvLinkRemotePciInfo": remote,
        "nvmlDeviceGetTopologyCommonAncestor": 50,
    }
    found = pairs(answers, cards=3)
    assert {(p.a, p.b): p.path for p in found} == {(0, 1): "NV4", (0, 2): "NV1", (1, 2): "NV1"}


@pytest.mark.parametrize(
    ("text", "module", "version"), [(OPEN, "open", "580.65.06"), (PROPRIETARY, "proprietary", "570.86.10")]
)
def test_nvml_that_does_not_start_leaves_what_the_kernel_shows(
    tmp_path: Path, text: str, module: str, version: str
) -> None:
    nvml = Fake(FULL, start=NVMLError("Driver/library version mismatch"))
    found = gpus.cards(nvml, machine(tmp_path, version=text))
    assert found.gpus == ()
    driver = found.driver
    assert driver.error == "Driver/library version mismatch"
    assert (driver.module, driver.version, driver.cuda) == (module, version, None)
    assert driver.pci_devices == ("0000:c1:00.0 10de:2bb1",)
    assert nvml.open == 0


def test_no_driver_and_no_card(tmp_path: Path) -> None:
    driver = gpus.cards(Fake({}, start=NVMLError("NVML Shared Library Not Found")), tmp_path).driver
    assert (driver.version, driver.module, driver.device_nodes, driver.pci_devices) == (None, None, (), ())
    assert driver.error == "NVML Shared Library Not Found"


def test_capabilities_alone() -> None:
    def capability(handle: int) -> tuple[int, int]:
        if handle == 1:
            raise NVMLError
        return (12, handle)

    nvml = Fake({"nvmlDeviceGetCudaComputeCapability": capability}, cards=3)
    assert gpus.capabilities(nvml) == ((12, 0), (12, 2))
    assert nvml.open == 0
    assert gpus.capabilities(Fake(FULL, start=NVMLError("no driver"))) == ()


def test_a_driver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang() -> tuple[tuple[int, int], ...]:
        release.wait(60)
        return ((12, 0),)

    monkeypatch.setattr(gpus, "capabilities", hang)
    monkeypatch.setattr(gather, "NVML_SECONDS", 0.1)
    assert gather.gpu_capabilities() == ()
    release.set()
