"""Cards, driver and what lies between the cards: NVML, and the kernel's own files where NVML has no answer.

Every NVML call is guarded alone: cards and drivers differ in what they support, and what one does not is unknown.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120.host.facts import Driver, Gpu, Pair, Version2
from sm120.host.gather.text import cuda_version, read

# nvml.h, nvmlClocksEventReasons; named as nvidia-smi names them.
_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clocks_setting",
}
# nvml.h, nvmlGpuTopologyLevel_t; named as nvidia-smi topo names them.
_TOPOLOGY = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# nvml.h, nvmlGpuP2PStatus_t.
_PEER = {
    0: "ok",
    1: "chipset_not_supported",
    2: "gpu_not_supported",
    3: "topology_not_supported",
    4: "disabled_by_regkey",
    5: "not_supported",
    6: "unknown",
}
_PEER_READ, _PEER_WRITE = 0, 1
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_GPU = 0
_UNCORRECTED, _VOLATILE = 1, 0
_STATE_UNKNOWN = 32
_MEMORY_V2 = 40 | 2 << 24  # nvml.h, nvmlMemory_v2: size and version; what the driver reserves is not used there
_MAX_LINKS = 18  # of NVLink, on any one GPU
_NVIDIA, _DISPLAY = "0x10de", "0x03"


@dataclass(frozen=True, kw_only=True)
class Cards:
    driver: Driver
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[Pair, ...] = ()


def cards(nvml: Any = None, root: Path = Path("/")) -> Cards:
    """Everything about cards. Without a driver ``Driver.error`` says why, in NVML's words."""
    nvml = nvml or _nvml()
    error = _start(nvml)
    if error is not None:
        return Cards(driver=kernel_side(error, root))
    try:
        ask = _Ask(nvml)
        handles = _handles(nvml, ask)
        return Cards(
            driver=_driver(ask, root),
            gpus=tuple(_gpu(ask, index, handle, root) for index, handle in enumerate(handles)),
            pairs=_pairs(ask, handles),
        )
    finally:
        nvml.nvmlShutdown()


def capabilities(nvml: Any = None) -> tuple[Version2, ...]:
    """The compute capability of each card, and nothing else; () without a card or a driver."""
    nvml = nvml or _nvml()
    if _start(nvml) is not None:
        return ()
    try:
        ask = _Ask(nvml)
        found = (ask.pair("nvmlDeviceGetCudaComputeCapability", handle) for handle in _handles(nvml, ask))
        return tuple(capability for capability in found if capability is not None)
    finally:
        nvml.nvmlShutdown()


def kernel_side(error: str | None, root: Path = Path("/")) -> Driver:
    """What the kernel shows of driver and cards beside or in place of NVML."""
    kernel = read(root / "proc/driver/nvidia/version") or ""
    loaded = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", kernel)
    module = ("open" if "Open Kernel Module" in kernel else "proprietary") if loaded else None
    return Driver(
        version=loaded[1] if loaded else None,
        module=module,
        error=error,
        device_nodes=_nodes(root),
        pci_devices=_bus(root),
    )


def _nvml() -> Any:
    return importlib.import_module("pynvml")  # it carries no types


def _start(nvml: Any) -> str | None:
    """None, or why NVML does not start, in its words."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class _Unreadable:
    """What stands in a handle's place when NVML does not give one."""

    why: str


class _Ask:
    """NVML's answers, or None where it has none."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def any(self, name: str, *args: Any) -> Any:
        function = getattr(self._nvml, name, None)
        if function is None:  # an older binding
            return None
        try:
            return function(*args)
        except self._nvml.NVMLError:
            return None

    def text(self, name: str, *args: Any) -> str | None:
        value = self.any(name, *args)
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value and str(value)

    def number(self, name: str, *args: Any) -> int | None:
        value = self.any(name, *args)
        return None if value is None else int(value)

    def flag(self, name: str, *args: Any) -> bool | None:
        value = self.any(name, *args)
        return None if value is None else bool(value)

    def pair(self, name: str, *args: Any) -> Version2 | None:
        value = self.any(name, *args)
        return None if value is None else (int(value[0]), int(value[1]))

    def first(self, *calls: Callable[[], int | None]) -> int | None:
        """The first answer: newer drivers and older ones spell a few calls differently."""
        return next((value for call in calls if (value := call()) is not None), None)


def _handles(nvml: Any, ask: _Ask) -> list[Any]:
    handles: list[Any] = []
    for index in range(ask.number("nvmlDeviceGetCount") or 0):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            handles.append(_Unreadable(str(error)))
    return handles


def _driver(ask: _Ask, root: Path) -> Driver:
    kernel = kernel_side(None, root)
    cuda = ask.number("nvmlSystemGetCudaDriverVersion_v2")
    return dataclasses.replace(
        kernel,
        version=ask.text("nvmlSystemGetDriverVersion") or kernel.version,
        cuda=cuda_version(cuda) if cuda else None,
    )


def _nodes(root: Path) -> tuple[str, ...]:
    found = (path for path in (root / "dev").glob("nvidia*") if not path.is_dir())
    return tuple(sorted(f"/dev/{path.name}" for path in found))


def _bus(root: Path) -> tuple[str, ...]:
    found: list[str] = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind, model = ((read(device / name, 32) or "").strip() for name in ("vendor", "class", "device"))
        if vendor == _NVIDIA and kind.startswith(_DISPLAY):
            found.append(f"{device.name} {vendor[2:]}:{model.removeprefix('0x')}")
    return tuple(found)


def _gpu(ask: _Ask, index: int, handle: Any, root: Path) -> Gpu:
    if isinstance(handle, _Unreadable):
        return Gpu(index=index, uuid="", name="unknown", bus_id="", problem=handle.why)
    bus_id = _bus_id(ask, handle)
    memory = ask.any("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2) or ask.any("nvmlDeviceGetMemoryInfo", handle)
    ecc = ask.pair("nvmlDeviceGetEccMode", handle)
    mig = ask.pair("nvmlDeviceGetMigMode", handle)
    state = ask.number("nvmlDeviceGetPerformanceState", handle)
    processes = ask.any("nvmlDeviceGetComputeRunningProcesses", handle)
    return Gpu(
        index=index,
        uuid=ask.text("nvmlDeviceGetUUID", handle) or "",
        name=ask.text("nvmlDeviceGetName", handle) or "unknown",
        bus_id=bus_id,
        compute_capability=ask.pair("nvmlDeviceGetCudaComputeCapability", handle),
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        pcie_generation=ask.number("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        pcie_generation_max=ask.number("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_generation_device_max=ask.number("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle),
        pcie_width=ask.number("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_width_max=ask.number("nvmlDeviceGetMaxPcieLinkWidth", handle),
        clock_sm=ask.number("nvmlDeviceGetClockInfo", handle, _CLOCK_SM),
        clock_sm_max=ask.number("nvmlDeviceGetMaxClockInfo", handle, _CLOCK_SM),
        clock_memory=ask.number("nvmlDeviceGetClockInfo", handle, _CLOCK_MEMORY),
        **_power(ask, handle),
        temperature=ask.first(
            lambda: ask.number("nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU),
            lambda: ask.number("nvmlDeviceGetTemperatureV", handle, _TEMPERATURE_GPU),
        ),
        throttle_reasons=_reasons(ask, handle),
        performance_state=None if state == _STATE_UNKNOWN else state,
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_errors=ask.number("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
        display_active=ask.flag("nvmlDeviceGetDisplayActive", handle),
        mig=None if mig is None else bool(mig[0]),
        persistence=ask.flag("nvmlDeviceGetPersistenceMode", handle),
        numa_node=_numa_node(root, bus_id),
        processes=None if processes is None else len(processes),
    )


def _power(ask: _Ask, handle: Any) -> Mapping[str, Any]:
    """Watts; NVML counts milliwatts."""
    calls = {
        "power_draw": "nvmlDeviceGetPowerUsage",
        "power_limit": "nvmlDeviceGetEnforcedPowerLimit",
        "power_limit_default": "nvmlDeviceGetPowerManagementDefaultLimit",
    }
    read_out = {field: ask.number(name, handle) for field, name in calls.items()}
    return {field: None if value is None else value / 1000 for field, value in read_out.items()}


def _reasons(ask: _Ask, handle: Any) -> tuple[str, ...]:
    bits = ask.first(
        lambda: ask.number("nvmlDeviceGetCurrentClocksEventReasons", handle),
        lambda: ask.number("nvmlDeviceGetCurrentClocksThrottleReasons", handle),  # drivers before 535
    )
    present = [1 << i for i in range(64) if (bits or 0) >> i & 1]
    return tuple(_REASONS.get(bit, f"bit_{bit:#x}") for bit in present)


def _bus_id(ask: _Ask, handle: Any) -> str:
    info = ask.any("nvmlDeviceGetPciInfo", handle)
    raw = getattr(info, "busId", "")
    return raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)


def _numa_node(root: Path, bus_id: str) -> int | None:
    """The kernel's node of the slot. NVML writes 00000000:01:00.0 where sysfs has 0000:01:00.0."""
    text = (read(root / "sys/bus/pci/devices" / bus_id[-12:].lower() / "numa_node", 32) or "").strip()
    return int(text) if text.isdigit() else None  # -1: the kernel does not know


def _pairs(ask: _Ask, handles: list[Any]) -> tuple[Pair, ...]:
    known = [(i, handle) for i, handle in enumerate(handles) if not isinstance(handle, _Unreadable)]
    pairs: list[Pair] = []
    for i, first in known:
        for j, second in known:
            if i < j:
                pairs.append(_pair(ask, i, first, j, second))
    return tuple(pairs)


def _pair(ask: _Ask, i: int, first: Any, j: int, second: Any) -> Pair:
    links = _links(ask, first, _bus_id(ask, second))
    level = ask.number("nvmlDeviceGetTopologyCommonAncestor", first, second)
    read_status = ask.number("nvmlDeviceGetP2PStatus", first, second, _PEER_READ)
    write_status = ask.number("nvmlDeviceGetP2PStatus", first, second, _PEER_WRITE)
    return Pair(
        a=i,
        b=j,
        path=f"NV{links}" if links else None if level is None else _TOPOLOGY.get(level, f"level {level}"),
        read=None if read_status is None else _PEER.get(read_status, f"status {read_status}"),
        write=None if write_status is None else _PEER.get(write_status, f"status {write_status}"),
    )


def _links(ask: _Ask, handle: Any, peer: str) -> int:
    """How many NVLinks lead straight to the peer; those to a switch are not told apart by NVML's remote address."""
    count = 0
    for link in range(_MAX_LINKS):
        if not ask.flag("nvmlDeviceGetNvLinkState", handle, link):
            continue
        remote = ask.any("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        raw = getattr(remote, "busId", "")
        address = raw.decode("ascii", "replace") if isinstance(raw, bytes) else str(raw)
        count += bool(peer) and address.lower() == peer.lower()
    return count
