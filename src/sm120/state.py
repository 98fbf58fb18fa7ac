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
