"""The flags of ``validate-backends``, checked before anything is started."""

from dataclasses import dataclass
from typing import Any, Final

from sm120.errors import UsageError, nearest
from sm120.matrix.configs import load_shapes
from sm120.matrix.plan import Request
from sm120.matrix.shapes import MAX_TP, ModelShapes, per_rank

DEFAULT_MODEL: Final = "Qwen3.5-397B-A17B"
DEFAULT_STACK: Final = "cpu"
DEVICES: Final = ("cpu", "cuda")
_MAX_SEED: Final = 2**31 - 1
_MAX_SEEDS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class Options:
    """As given; None and empty mean that the flag was not."""

    model: str | None = None
    tp: int | None = None
    quick: bool = False
    full: bool = False
    seed: int | None = None
    only: tuple[str, ...] = ()
    moe_backends: tuple[str, ...] = ()
    fp4_backends: tuple[str, ...] = ()
    stack: str | None = None
    device: str | None = None
    require_servable: bool = False
    resume: str | None = None
    self_test: bool = False
    seeds: int | None = None
    list: bool = False
    dry_run: bool = False
    json: bool = False
    verbose: bool = False

    @property
    def profile(self) -> str:
        """Which list of cases."""
        return "quick" if self.quick else "full" if self.full else "default"

    @property
    def first_seed(self) -> int:
        """Seed of the operands; the first of several with ``--self-test``."""
        return self.seed or 0

    def deciding(self) -> dict[str, Any]:
        """The given flags that decide what is run."""
        names = ("model", "tp", "quick", "full", "seed", "only", "moe_backends", "fp4_backends", "stack", "device")
        return {name: value for name in names if is_given(value := getattr(self, name))}


def is_given(value: object) -> bool:
    """Whether a flag's value says something; 0 does."""
    return value is not None and value is not False and value != ()


def check(options: Options) -> None:
    """UsageError on a value out of range, and on flags that contradict each other."""
    if options.quick and options.full:
        raise UsageError("--quick and --full exclude each other")
    _check_range("--tp", options.tp, 1, MAX_TP)
    _check_range("--seed", options.seed, 0, _MAX_SEED)
    _check_range("--seeds", options.seeds, 1, _MAX_SEEDS)
    if options.device is not None and options.device not in DEVICES:
        raise UsageError(f"--device {options.device}: {nearest(options.device, list(DEVICES))}")
    modes = [
        flag
        for flag, given in (
            ("--self-test", options.self_test),
            ("--list", options.list),
            ("--dry-run", options.dry_run),
            ("--resume", options.resume is not None),
        )
        if given
    ]
    if len(modes) > 1 and modes != ["--list", "--dry-run"]:
        raise UsageError(f"{' and '.join(modes)} exclude each other")
    if options.seeds is not None and not options.self_test:
        raise UsageError("--seeds belongs to --self-test", remedy="use --seed N for the seed of the cells' operands")
    if options.self_test and (given := _given(options)):
        raise UsageError(
            f"--self-test takes no {' and no '.join(given)}: it injects faults into the reference backends"
        )


def _given(options: Options) -> list[str]:
    """Flags that choose cells."""
    names = ("model", "tp", "quick", "full", "only", "moe_backends", "fp4_backends", "require_servable")
    return [f"--{name.replace('_', '-')}" for name in names if is_given(getattr(options, name))]


def _check_range(flag: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise UsageError(f"{flag} must be from {least} to {most}, not {str(value)[:40]}")


def request(options: Options) -> tuple[Request, ModelShapes]:
    """What to ask the worker for, and the shapes that it rests on."""
    shapes = load_shapes(options.model or DEFAULT_MODEL)
    asked = Request(
        profile=options.profile,
        model=per_rank(shapes, 1 if options.tp is None else options.tp),
        seed=options.first_seed,
        only=options.only,
        moe=options.moe_backends,
        dense=options.fp4_backends,
    )
    return asked, shapes
