"""The flags of ``build-kernels``, and what they mean."""

import re
from dataclasses import dataclass
from pathlib import Path

from sm120 import errors

COMPONENTS = ("sgl-kernel", "flashinfer")
_ARCH = re.compile(r"(\d{1,2})\.(\d)([af]?)")


def dotted(architecture: str) -> str:
    """120a, as nvcc calls it, in the way of torch's and FlashInfer's variables: 12.0a."""
    number = architecture.rstrip("af")
    return f"{number[:-1]}.{number[-1]}{architecture[len(number) :]}"


@dataclass(frozen=True, kw_only=True)
class Options:
    source: Path | None = None
    git_mirror: Path | None = None
    dependency: tuple[str, ...] = ()  # NAME=DIR
    arch: tuple[str, ...] = ("12.0a",)
    jobs: int | None = None
    component: str = "sgl-kernel"
    modules: tuple[str, ...] = ()  # of FlashInfer; none: all that are needed
    patches: bool = False
    rollback: bool = False
    install: bool = True
    stack: str | None = None
    dry_run: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        """As nvcc calls them: 120a for 12.0a, in one order whatever the user's. UsageError for what is none."""
        found = set()
        for text in self.arch:
            match = _ARCH.fullmatch(text)
            if match is None:
                raise errors.UsageError(
                    f"--arch {text} is no architecture", remedy="write it as in --arch 12.0a or --arch 12.0a,12.1a"
                )
            found.add("".join(match.groups()))
        return tuple(sorted(found))

    @property
    def given(self) -> dict[str, Path]:
        """Folders that stand for dependencies. UsageError for an entry that is not NAME=DIR, or named twice."""
        found: dict[str, Path] = {}
        for text in self.dependency:
            name, equals, folder = text.partition("=")
            if not equals or not name or not folder or name.lower() in found:
                why = "is named twice" if name.lower() in found else "is not NAME=DIR"
                raise errors.UsageError(
                    f"--dependency {text} {why}", remedy="write it as in --dependency repo-cutlass=/src/cutlass"
                )
            found[name.lower()] = Path(folder).expanduser().absolute()
        return found

    def check(self) -> None:
        """UsageError for flags that do not go together."""
        if self.component not in COMPONENTS:
            raise errors.UsageError(
                f"no component {self.component!r}; {errors.nearest(self.component, list(COMPONENTS))}"
            )
        if self.jobs is not None and self.jobs < 1:
            raise errors.UsageError(f"--jobs {self.jobs}: one is the least")
        building = {
            "--source": self.source is not None,
            "--git-mirror": self.git_mirror is not None,
            "--dependency": bool(self.dependency),
            "--patches": self.patches,
            "--no-install": not self.install,
        }
        for flag, given in building.items():
            if given and self.component == "flashinfer":
                raise errors.UsageError(
                    f"{flag} is for sgl-kernel: FlashInfer's source is in its package", remedy=f"leave {flag} out"
                )
            if given and self.rollback:
                raise errors.UsageError(f"{flag} and --rollback do not go together", remedy=f"leave {flag} out")
        if self.modules and self.component != "flashinfer":
            raise errors.UsageError("--modules is for --component flashinfer", remedy="leave --modules out")
        _ = self.architectures, self.given
