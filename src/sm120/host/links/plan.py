"""What is tried: NCCL's settings, groups of GPUs, sizes. Data with reasons; nothing here runs anything."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from sm120.host.facts import Gpu, Pair

GOVERNED: Final = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
"""Variables that a setting decides: whatever the user has of them is taken out of every other setting's way."""

AS_SGLANG: Final = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""What SGLang sets before its ranks start, unless the user has (srt/entrypoints/engine.py, _set_envs_and_config)."""

# nvidia-smi's words for what lies between two GPUs, as NCCL's levels: to NCCL all of one NUMA node is one host bridge.
_LEVEL_OF: Final = {"INTERNAL": "PXB", "PIX": "PXB", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
_LEVELS: Final = ("NVL", "PXB", "PHB", "SYS")  # the nearest first
_BY_DEFAULT: Final = ("NVL", "PXB")  # NCCL reaches over these on every machine, if not told otherwise
_USABLE: Final = (None, "ok", "unknown")  # what may work: only a trial tells


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run NCCL. ``peer_memory``: whether GPUs reach into each other's memory; None: NCCL decides."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    reason: str
    peer_memory: bool | None = None
    last_resort: bool = False  # tried only where nothing else is right

    @property
    def command(self) -> str:
        """What to type so that it holds for what is started from this shell."""
        if not self.variables:
            return f"unset {' '.join(GOVERNED)}"
        return "export " + " ".join(f"{name}={value}" for name, value in self.variables.items())


DEFAULT: Final = Setting(name="default", reason="what NCCL does when nobody tells it otherwise")
THROUGH_HOST: Final = Setting(
    name="through the host's memory",
    variables={"NCCL_P2P_DISABLE": "1"},
    reason="helps where peer access hangs or corrupts: NVIDIA/nccl#1999, local-inference-lab/rtx6kpro#15",
    peer_memory=False,
)
THROUGH_SOCKETS: Final = Setting(
    name="through sockets",
    variables={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
    reason="needs neither peer access nor shared memory; slow, for want of anything else",
    peer_memory=False,
    last_resort=True,
)
_REACH: Final = {
    "NVL": "peer access over NVLink only",
    "PXB": "peer access below a common PCIe switch only",
    "PHB": "peer access within a NUMA node, not across sockets",
    "SYS": "peer access whatever lies between, which NCCL by itself grants only to two GPUs beside an AMD processor",
}


def level(pair: Pair) -> str | None:
    """NCCL's level for what lies between two GPUs; None where that is not known."""
    path = pair.path or ""
    return "NVL" if path.startswith("NV") else _LEVEL_OF.get(path)


def candidates(pairs: Sequence[Pair], variables: Mapping[str, str]) -> tuple[Setting, ...]:
    """The settings that can differ on this machine, in the order in which they are tried.

    ``pairs`` of the GPUs that are tested; ``variables``: the user's environment. Which levels NCCL uses by itself:
    ncclTopoCheckP2p in its graph/paths.cc; NCCL_P2P_LEVEL is given only where a pair is that far apart.
    """
    found = [DEFAULT]
    usable = [pair for pair in pairs if pair.read in _USABLE and pair.write in _USABLE]
    if usable or not pairs:
        present = [known for known in _LEVELS if known in {level(pair) for pair in usable}]
        farthest = present[-1] if present else "SYS"
        found += [_reaching(nearer) for nearer in present[:-1]]
        if farthest not in _BY_DEFAULT:
            found.append(_reaching("SYS"))  # the word that means everything, whatever NCCL calls this path
    found += [THROUGH_HOST, THROUGH_SOCKETS]
    own = {name: variables[name] for name in GOVERNED if variables.get(name)}
    if own and own not in [dict(setting.variables) for setting in found]:
        found.insert(1, Setting(name="yours", variables=own, reason="what your environment says"))
    return tuple(found)


def _reaching(name: str) -> Setting:
    return Setting(
        name=f"peer access up to {name}",
        variables={"NCCL_P2P_LEVEL": name},
        reason=_REACH[name],
        peer_memory=True,
    )


def groups(gpus: Sequence[Gpu], pairs: Iterable[Pair]) -> tuple[tuple[str, ...], ...]:
    """UUIDs of the GPUs that reduce together: a pair of every distance, then all."""
    uuids = {gpu.index: gpu.uuid for gpu in gpus}
    nearest: dict[str | None, tuple[str, ...]] = {}
    for pair in pairs:
        if pair.a in uuids and pair.b in uuids:
            nearest.setdefault(level(pair), (uuids[pair.a], uuids[pair.b]))
    everyone = tuple(gpu.uuid for gpu in gpus)
    twos = list(nearest.values()) or [everyone[:2]]
    return (*(two for two in twos if len(everyone) > 2), everyone)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is tried. Sizes in bytes, times in seconds."""

    copies: tuple[tuple[int, int], ...]  # size, rounds
    copy_timed: int  # size whose bandwidth is measured
    sums: tuple[tuple[int, str, int], ...]  # size, dtype, rounds
    timed: tuple[tuple[int, int], ...]  # size, all-reduces a block
    blocks: int = 3
    start: float = 180.0  # for a rank to import torch and to meet the others
    quiet: float = 30.0  # for one step of a rank after that; longer is a hang
    total: float = 900.0  # for a child, whatever it says


KIB, MIB = 1 << 10, 1 << 20
DECODE_BYTES: Final = 64 * KIB
"""Messages up to this size are those of decoding: a token of a model with hidden size 4096 is 8 KiB of bfloat16."""

FULL: Final = Effort(
    copies=(
        *((size, 3) for size in (1, 4, 257, 4 * KIB + 1, 8 * KIB, 64 * KIB, 64 * KIB + 3, MIB + 5, 4 * MIB)),
        (64 * MIB, 1),
    ),
    copy_timed=64 * MIB,
    sums=(
        *((size, dtype, 4) for size in (8 * KIB, 16 * KIB, 64 * KIB) for dtype in ("bfloat16", "float32")),
        (64 * KIB + 2, "bfloat16", 4),
        (MIB, "bfloat16", 3),
        (4 * MIB + 4, "float32", 3),
        (64 * MIB, "float32", 2),
    ),
    timed=(
        *((size, 100) for size in (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)),
        (MIB, 50),
        (16 * MIB, 10),
        (256 * MIB, 4),
    ),
)
