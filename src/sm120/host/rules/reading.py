"""What the rules read out of facts: versions, the cards that a program sees, the toolkit that a build would take."""

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name
from packaging.version import Version

from sm120.host.facts import Environment, Facts, Gpu, Toolkit, Version2

BLACKWELL = 10  # the first compute capability of the Blackwell generation; consumer and workstation cards are 12.x
SM12X = 12
GIB = 2**30
# Packages that hold GPU kernels of their own, or compile them while they run.
KERNEL_PACKAGES = ("sglang", "sglang-kernel", "sgl-kernel", "flashinfer-python", "vllm")
_CUDA_TAG = re.compile(r"\bcu(\d{2})(\d{1,2})\b")


def dotted(version: Version2) -> str:
    return f"{version[0]}.{version[1]}"


def parsed(text: str | None) -> Version | None:
    """None where it is no version by Python's rules."""
    try:
        return Version(text) if text else None
    except ValueError:  # InvalidVersion is one; so is what int() says of a number without end
        return None


def same_version(a: str, b: str) -> bool:
    """Equal as versions, local tag included; as text where one of them is no version."""
    left, right = parsed(a), parsed(b)
    return left == right if left is not None and right is not None else a == b


def release(text: str | None) -> tuple[int, ...]:
    """The leading numbers of any version text: 2.42-5ubuntu1 → (2, 42); () where there are none."""
    found = re.match(r"\s*(\d{1,6}(?:\.\d{1,6})*)", text or "")
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def cuda_tag(version: str) -> Version2 | None:
    """The CUDA version in a local version tag: 0.6.16+cu130 → 13.0."""
    found = _CUDA_TAG.search(version.partition("+")[2])
    return (int(found[1]), int(found[2])) if found else None


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(items: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    every = list(items)
    if len(every) <= most:
        return ", ".join(every)
    return f"{', '.join(every[:most])} and {len(every) - most} more"


def card(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"


def capability(gpu: Gpu) -> str:
    return dotted(gpu.compute_capability) if gpu.compute_capability else "unknown"


def grouped(gpus: Iterable[Gpu]) -> str:
    """Cards by name: ``NVIDIA GeForce RTX 5090 (12.0), 2 x NVIDIA GeForce RTX 3090 (8.6)``."""
    numbers = Counter((gpu.name, capability(gpu)) for gpu in gpus)
    return listed(f"{f'{n} x ' if n > 1 else ''}{name} ({has})" for (name, has), n in numbers.items())


def is_set(value: str | None) -> bool:
    """As NCCL and SGLang read a switch: set, and neither 0 nor false."""
    return (value or "").strip().lower() not in {"", "0", "false", "no", "n"}


# Cards


def cards(facts: Facts) -> tuple[Gpu, ...]:
    """Those that NVML can read, in the order of their slots: never that in which they happen to be listed."""
    readable = (gpu for gpu in facts.gpus if gpu.problem is None)
    return tuple(sorted(readable, key=lambda gpu: (gpu.bus_id.lower(), gpu.index)))


def kinds(gpus: Iterable[Gpu]) -> list[Version2]:
    """The compute capabilities among these cards, each once."""
    return sorted({gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None})


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What CUDA_VISIBLE_DEVICES leaves over."""

    gpus: tuple[Gpu, ...]
    missing: tuple[str, ...] = ()  # entries that name no card; CUDA ignores all that follow the first
    certain: bool = True  # False: plain numbers among cards of different kinds, without a fixed order


def selection(facts: Facts) -> Selection:
    """The cards that a CUDA program sees.

    CUDA numbers cards fastest first unless CUDA_DEVICE_ORDER says PCI_BUS_ID, NVML always by slot (CUDA C++
    Programming Guide, environment variables). Among cards of one kind both orders are the same.
    """
    every = cards(facts)
    text = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return Selection(gpus=every)
    if "MIG-" in text:  # slices: their cards are not named
        return Selection(gpus=every)
    entries = [entry.strip() for entry in text.split(",")]
    if entries in ([""], ["-1"], ["NoDevFiles"]):
        return Selection(gpus=())
    by_slot = facts.variables.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(kinds(every)) <= 1
    chosen: list[Gpu] = []
    for place, entry in enumerate(entries):
        if re.fullmatch(r"\d{1,6}", entry):
            found = [every[int(entry)]] if int(entry) < len(every) else []
        else:
            found = [gpu for gpu in every if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
        if len(found) != 1:
            return Selection(gpus=tuple(chosen), missing=tuple(entries[place:]), certain=by_slot)
        if found[0] not in chosen:
            chosen.append(found[0])
    if not by_slot and any(entry.isdigit() for entry in entries):
        return Selection(gpus=every, certain=False)
    return Selection(gpus=tuple(chosen))


def sm12x(facts: Facts) -> tuple[Gpu, ...]:
    """The visible cards of compute capability 12.x."""
    return tuple(g for g in selection(facts).gpus if g.compute_capability and g.compute_capability[0] == SM12X)


# Environments


def version_of(environment: Environment, name: str) -> str | None:
    return next((d.version for d in environment.distributions if canonicalize_name(d.name) == name), None)


def torch_cuda(environment: Environment) -> Version2 | None:
    """The CUDA version of its torch; None for a CPU build and without torch."""
    return environment.torch.cuda if environment.torch else None


def cuda_environments(facts: Facts) -> list[tuple[Environment, Version2]]:
    return [(env, cuda) for env in facts.environments if (cuda := torch_cuda(env)) is not None]


def compiles(environment: Environment) -> bool:
    """Whether something in it compiles CUDA code while it runs: NVFP4 kernels for SM120 are built so."""
    return any(version_of(environment, name) for name in KERNEL_PACKAGES)


def compiling_environments(facts: Facts) -> list[tuple[Environment, Version2]]:
    return [(env, cuda) for env, cuda in cuda_environments(facts) if compiles(env)]


def torch_read(environment: Environment) -> str:
    """Where a torch version was read, with its value."""
    if environment.torch is None:
        return f"no torch: {environment.python}"
    cuda = environment.torch.cuda
    build = f"CUDA {dotted(cuda)}" if cuda else "CPU build"
    return f"torch {environment.torch.version} ({build}): {environment.python}"


def again(environment: Environment, otherwise: str) -> str:
    """The command that makes a managed environment right again; an adopted one is its owner's to change."""
    return otherwise if environment.adopted else f"scripts/inv setup --stack {shlex.quote(environment.stack)}"


def pip_install(environment: Environment, flags: str, requirement: str) -> str:
    """What its owner types; names come from facts that may be somebody else's, so they are quoted for the shell."""
    return f"{shlex.quote(environment.python)} -m pip install {flags} {shlex.quote(requirement)}"


# Toolkits


def home(facts: Facts, environment: Environment) -> Toolkit | None:
    """The CUDA home that setup made for an environment; its tasks use it, whatever the shell says."""
    return seen_by(facts, f"home:{environment.stack}")


def seen_by(facts: Facts, label: str) -> Toolkit | None:
    return next((toolkit for toolkit in facts.toolkits if label in toolkit.seen_by), None)


def cuda_variable(facts: Facts) -> tuple[str, str] | None:
    """The variable that decides where a build looks for CUDA, and its value: CUDA_HOME goes before CUDA_PATH."""
    return next(((n, v) for n in ("CUDA_HOME", "CUDA_PATH") if (v := facts.variables.get(n))), None)


def shell_toolkit(facts: Facts) -> Toolkit | None:
    """What torch and FlashInfer build with unless told otherwise: CUDA_HOME, CUDA_PATH, PATH's nvcc, /usr/local/cuda.

    Source: get_cuda_path in flashinfer/jit/cpp_ext.py (0.7.2), and torch's cpp_extension.
    """
    variable = cuda_variable(facts)
    if variable is not None:
        return seen_by(facts, variable[0])
    system = [toolkit for toolkit in facts.toolkits if "system" in toolkit.seen_by]
    default = [t for t in system if t.root == "/usr/local/cuda"] or (system if len(system) == 1 else [])
    return seen_by(facts, "PATH") or next(iter(default), None)


def jit_toolkit(facts: Facts, environment: Environment) -> Toolkit | None:
    return home(facts, environment) or shell_toolkit(facts)


def jit_toolkits(facts: Facts) -> list[tuple[Toolkit, list[Environment]]]:
    """Each toolkit that an environment's kernels would be built with, once, with these environments."""
    found: dict[str, tuple[Toolkit, list[Environment]]] = {}
    for environment, _ in compiling_environments(facts):
        toolkit = jit_toolkit(facts, environment)
        if toolkit is not None:
            found.setdefault(toolkit.root, (toolkit, []))[1].append(environment)
    return list(found.values())


def names(environments: Sequence[Environment]) -> str:
    stacks = [environment.stack for environment in environments]
    return f"environment {stacks[0]}" if len(stacks) == 1 else f"environments {listed(stacks)}"


def setup(environments: Sequence[Environment]) -> str:
    """The command that gives an environment a CUDA home; an adopted one is its owner's to change."""
    first = environments[0]
    wanted = torch_cuda(first)
    if not first.adopted:
        return f"scripts/inv setup --stack {shlex.quote(first.stack)}"
    return f"export CUDA_HOME=FOLDER, with a whole toolkit of CUDA {dotted(wanted) if wanted else 'the right version'}"


def toolkit_version(toolkit: Toolkit) -> Version2 | None:
    return toolkit.nvcc or toolkit.headers


def tool_read(label: str, version: Version2 | None, toolkit: Toolkit) -> str:
    ways = ", ".join(toolkit.seen_by)
    return f"{label} {dotted(version) if version else 'none'}: {toolkit.root} (found by {ways})"
