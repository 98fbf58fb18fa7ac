"""The folder that the toolkit keeps between tasks."""

from dataclasses import dataclass
from pathlib import Path

from sm120 import __version__, config, errors, files

STATE_VERSION = 1


@dataclass(frozen=True)
class State:
    root: Path  # .sm120
    runs: Path

    @classmethod
    def resolve(cls, settings: config.Settings | None = None) -> "State":
        """Where the state is. Reads only. Raises PreflightError when a newer toolkit has written it."""
        settings = settings or config.current()
        state = cls(root=settings.state, runs=settings.runs)
        state._check_version()
        return state

    def env(self, name: str) -> Path:
        return self.root / "env" / name

    def adopted(self, name: str) -> Path:
        """The record of an interpreter that is used and never changed."""
        return self.root / "env" / f"{name}.adopted.json"

    def lock_file(self, stack: str) -> Path:
        """What the stack resolved to: URL and SHA-256 of every file, as PEP 751 has it."""
        return self.root / "locks" / f"pylock.{stack}.toml"

    @property
    def wheels(self) -> Path:
        """The wheel store: ``<sha256>/<file name>``."""
        return self.root / "wheels"

    def cuda_home(self, stack: str) -> Path:
        """A CUDA toolkit of links into the stack's environment."""
        return self.root / "cuda" / stack

    def activation(self, stack: str) -> Path:
        """A shell script that sets what every later task sets."""
        return self.root / "activate" / f"{stack}.sh"

    def cache(self, stack: str) -> Path:
        """The folder of the stack's JIT caches."""
        return self.root / "cache" / stack

    def stack_file(self, stack: str) -> Path:
        """The copy of a stack file that came with a mirror."""
        return self.root / "stacks" / f"{stack}.toml"

    def build(self, stack: str, component: str) -> Path:
        """Where a component's kernels are built for a stack: the copy of the source, its dependencies, the objects."""
        return self.root / "build" / stack / component

    @property
    def sources(self) -> Path:
        """Git repositories and archives that builds were fetched from."""
        return self.root / "sources"

    def kernels(self, stack: str) -> Path:
        """The wheels that were built for a stack, and what is needed to go back to the one before."""
        return self.root / "kernels" / stack

    @property
    def ccache(self) -> Path:
        """The compiler cache of all builds."""
        return self.root / "cache" / "ccache"

    @property
    def links(self) -> Path:
        """What was found about the links between the GPUs."""
        return self.root / "links.json"

    @property
    def selected(self) -> Path:
        """The stack that ``setup`` made last."""
        return self.root / "selected.json"

    @property
    def gate(self) -> Path:
        """The folder of the gate's records."""
        return self.root / "gate"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def _version_file(self) -> Path:
        return self.root / "state.json"

    def prepare(self) -> None:
        """Makes the folder. Raises PreflightError when that cannot be: read-only, full, not a folder."""
        files.make_folder(self.root)
        if not self._version_file.exists():
            files.write_json_atomic(self._version_file, {"state_version": STATE_VERSION, "toolkit": __version__})

    def _check_version(self) -> None:
        try:
            if not self._version_file.exists():
                return
        except OSError as error:
            raise files.no_write(self.root, error) from error
        content = files.read_json(self._version_file)
        version = content.get("state_version") if isinstance(content, dict) else None
        if not isinstance(version, int):
            raise errors.PreflightError(
                f"{self._version_file} does not say which version of the toolkit wrote this folder",
                where=str(self._version_file),
                remedy=f"move {self.root} away; the next task makes a new one",
            )
        if version > STATE_VERSION:
            raise errors.PreflightError(
                f"{self.root} was written by a newer toolkit (state version {version}; this one knows {STATE_VERSION})",
                where=str(self._version_file),
                remedy="update this checkout, or set SM120_HOME to another folder",
            )
